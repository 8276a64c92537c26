"""The textbook formulas of the regularizers against cases computed by hand."""

import math

import pytest
import torch
from torch import Tensor

import textbook_law as law
import textbook_rivals as rivals
from naive import textbook_blocks

ROOT2 = math.sqrt(2)


def tensor(values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(actual: Tensor, expected, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, tensor(expected), rtol=tolerance, atol=tolerance)


# The law: three tokens of two dimensions, W_Q = W_K = I, R = 2. The third sees two keys with equal scores (zero), so
# alpha = 1/2, mu = 0, Sigma = diag(1, 0), J = diag(1 - 1 / sqrt 2, 1).
CROSS = tensor([[[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]]])
IDENTITY = torch.eye(2, dtype=torch.float64)
MARGIN = math.log(1 - 1 / ROOT2)


def test_log_det_of_the_law() -> None:
    close(law.law_log_det(CROSS, IDENTITY, IDENTITY), [[0.0, 0.0, MARGIN]])
    close(law.law_log_det(CROSS, -IDENTITY, IDENTITY), [[0.0, 0.0, math.log(1 + 1 / ROOT2)]])


def test_weights_of_the_law_are_softmax_of_scaled_scores() -> None:
    x = tensor([[[1.0, 0.0], [0.0, 2.0], [ROOT2 * math.log(3), 0.0]]])
    close(law.law_mean(x, IDENTITY, IDENTITY), [[[0.0, 0.0], [1.0, 0.0], [0.75, 0.5]]])


def test_barriers_of_the_law() -> None:
    log_det = law.law_log_det(CROSS, IDENTITY, IDENTITY)
    close(law.log_barrier(log_det), [[0.0, 0.0, -MARGIN]])
    close(law.hinge_barrier(log_det, 0.5), [[0.5, 0.5, 0.5 - MARGIN]])
    close(law.hinge_barrier(log_det, -2.0), [[0.0, 0.0, 0.0]])
    mean = law.law_mean(CROSS, IDENTITY, IDENTITY)
    close(mean, [[[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]]])
    close(law.map_penalty(CROSS, mean, log_det, sigma=2.0), [[1 / 8, 4 / 8, 1 / 8 - MARGIN]])


def test_positions_that_are_none_are_no_keys_and_have_no_figure() -> None:
    x = torch.cat([CROSS[:, :1], tensor([[[5.0, 7.0]]]), CROSS[:, 1:]], 1)
    valid = torch.tensor([[True, False, True, True]])
    close(law.law_log_det(x, IDENTITY, IDENTITY, valid), [[0.0, 0.0, 0.0, MARGIN]])
    close(law.scale_free_barrier(x, 1.0, valid), [[0.0, 0.0, 0.0, -math.log(3)]])
    close(law.mean_over(tensor([[1.0, 100.0, 2.0, 6.0]]), valid), 3.0)


def test_scale_free_barrier() -> None:
    # Of unit RMS the keys are (+-sqrt 2, 0): Sigma = diag(2, 0).
    for scale in (1.0, 7.0):
        close(law.scale_free_barrier(scale * CROSS, 0.3), [[0.0, 0.0, -math.log(1.6)]])


def test_spread_of_two_keys() -> None:
    # Rank one, so PR = 1. Equal weights: D n / (D + n) = 1 at D = n = 2.
    close(law.spread(CROSS, 0.3), [[0.0, 0.0, 0.0]])
    # Scores 2 and 0 under c = log(3) / 2: weights 1/4 and 3/4, n = 1.6, D n / (D + n) = 8/9.
    x = tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]])
    close(law.past_moments(law.normalized(x)[0], 2, [0, 1], math.log(3) / 2)[0], [1 / 4, 3 / 4])
    close(law.spread(x, math.log(3) / 2), [[0.0, 0.0, math.log(8 / 9)]])
    close(law.spread(x, math.log(3) / 2, zero="centring"), [[0.0, 0.0, 0.0]])
    close(law.spread(x, math.log(3) / 2, zero="centred"), [[0.0, 0.0, math.log(2 * 0.6 / 1.6)]])
    close(law.old_spread(x, 1.0), [[0.0, 0.0, math.log(1 + 1 / 4)]])


def test_spread_of_four_keys() -> None:
    # Sigma = I, PR = 2, n = 4: D n / (D + n) = 4/3, D (n - 1) / (D + n - 2) = 3/2.
    x = tensor([[[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0], [0.6, 0.8]]])
    close(law.spread(x, 0.0)[0, -1], math.log(2 / 3))
    for zero in ("centred", "centring"):
        close(law.spread(x, 0.0, zero=zero)[0, -1], math.log(3 / 4))


def test_old_spread() -> None:
    # Two keys of equal weight among three dimensions: PR = 1, D n / (D + n) = 6/5.
    x = torch.eye(3, dtype=torch.float64)[None]
    close(law.old_spread(x, 2.0), [[0.0, 0.0, 3 / 2 * math.log(1 + 4 / 9 * 2)]])
    close(law.spread(x, 2.0), [[0.0, 0.0, math.log(6 / 5)]])


def test_spread_is_zero_where_it_is_not_defined() -> None:
    x = tensor([[[3.0, 4.0]] * 4])
    close(law.spread(x, 0.5), [[0.0] * 4])
    close(law.old_spread(x, 0.5), [[0.0] * 4])


def test_lower_limit_of_spread_under_uniform_weights_is_met_by_a_simplex() -> None:
    x = tensor([[[1.0, 1.0, 1.0], [1.0, -1.0, -1.0], [-1.0, 1.0, -1.0], [-1.0, -1.0, 1.0], [1.0, 0.0, 0.0]]])
    limit = math.log(4 / 7)
    close(law.spread(x, 0.0)[0, -1], limit)
    assert -math.log(2) < limit
    close(law.spread(x, 0.0, zero="centring")[0, -1], math.log(3 / 5))
    draws = torch.randn(50, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert law.spread(draws, 0.0).min() >= limit


def test_lower_limit_of_spread_under_other_weights_lies_below() -> None:
    # One heavy key among D light ones at right angles: n_t near one, and yet PR near D.
    width, light = 64, 1e-6
    weights = torch.cat([tensor([1 - light]), torch.full((width,), light / width, dtype=torch.float64)])
    keys = torch.cat([torch.zeros(1, width, dtype=torch.float64), torch.eye(width, dtype=torch.float64)])
    ratio = law.participation_ratio(law.moments(weights, keys)[1])
    close(torch.log(law.natural_zero(weights, width) / ratio), -math.log(width + 1), 1e-4)


def test_isotropic_cloud_has_no_spread() -> None:
    # 32 random keys of 64 dimensions, weights proportional to exp(-x_t^T x_s): "centring" is near zero.
    clouds = torch.randn(24, 33, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values = {"keys": [], "centring": []}
    for x in law.normalized(clouds):
        weights, covariance = law.past_moments(x, 32, list(range(32)), 1.0)
        for zero, spreads in values.items():
            ratio = law.participation_ratio(covariance)
            spreads.append(torch.log(law.natural_zero(weights, 64, zero) / ratio).item())
    size = {zero: math.sqrt(sum(value**2 for value in spreads) / 24) for zero, spreads in values.items()}
    assert abs(sum(values["centring"]) / 24) < 0.05
    assert size["centring"] < size["keys"] / 2


def test_spread_of_a_block() -> None:
    stretch = tensor([[[[0.0, 0.0], [0.0, 2.0]]]])
    close(law.block_spread(stretch), [[math.log(20 / 16)]])
    close(law.block_spread(stretch, "symmetric"), [[math.log(20 / 16)]])
    close(law.block_spread(stretch, "determinant"), [[math.log(5 / 3)]])
    rotation = tensor([[[[-0.4, -0.8], [0.8, -0.4]]]])
    close(law.block_spread(rotation), [[math.log(4 / 1.44)]])
    close(law.block_spread(rotation, "symmetric"), [[0.0]])
    close(law.block_spread(rotation, "determinant"), [[0.0]])


def test_moments_of_low_rank_products_without_the_matrix() -> None:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)  # noqa: E731
    left, right, shared, coefficients = draw(3, 7, 2), draw(3, 2, 7), draw(4, 7, 7), draw(4)
    for matrices, arguments in [
        (law.block_matrices(left, right), (left, right)),
        (
            law.block_matrices(left, right) + (coefficients[:, None, None] * shared).sum(0),
            (left, right, shared, coefficients),
        ),
    ]:
        trace, square, power = law.low_rank_moments(*arguments)
        close(trace, matrices.trace().item())
        close(square, torch.linalg.matrix_norm(matrices).item() ** 2)
        close(power, (matrices @ matrices).trace().item())
        spread = torch.log(7 * (7 + 2 * trace + square) / (7 + trace) ** 2)
        close(law.block_spread(matrices[None, None])[0, 0], spread.item())


def test_moments_of_an_attention_block() -> None:
    # Two heads, inclusive mask: M_t = sum_h W_O^h [Cov(v, k) W_Q^h c + alpha_tt (v_t - mu_t) c q_t^T W_K^h] and shared
    # matrices W_O^h W_V^h with coefficients alpha_tt^h. The oracle of the law forms J_t = I + M_t in full.
    generator = torch.Generator().manual_seed(1)
    x, w_q, w_k, w_v, w_o = (
        torch.randn(*shape, dtype=torch.float64, generator=generator)
        for shape in ((4, 6), (2, 3, 6), (2, 3, 6), (2, 3, 6), (2, 6, 3))
    )
    t, scale = 3, 1 / math.sqrt(3)
    right, coefficients = [], []
    for h in range(2):
        query, keys, values = w_q[h] @ x[t], x @ w_k[h].T, x @ w_v[h].T
        alpha = torch.softmax(scale * keys @ query, 0)
        covariance = values.T @ (torch.diag(alpha) - torch.outer(alpha, alpha)) @ keys
        own = torch.outer(values[t] - alpha @ values, scale * query @ w_k[h])
        right.append(scale * covariance @ w_q[h] + alpha[t] * own)
        coefficients.append(alpha[t])
    trace, square, power = law.low_rank_moments(w_o, torch.stack(right), w_o @ w_v, torch.stack(coefficients))
    jacobian = textbook_blocks(x, w_q, w_k, w_v, w_o, strict=False, view="block")[t]
    close(6 + trace, jacobian.trace().item())
    close(6 + 2 * trace + square, (jacobian**2).sum().item())
    close(6 + 2 * trace + power, (jacobian @ jacobian).trace().item())


# Predictions: logits are logarithms of probabilities.
P, Q = tensor([[[1 / 4, 3 / 4]]]).log(), tensor([[[1 / 2, 1 / 2]]]).log()


def test_cross_entropy_shifts_and_ignores() -> None:
    logits = torch.cat([P, Q, P], 1)
    close(rivals.cross_entropy(logits, torch.tensor([[0, 1, 0]])), (math.log(4 / 3) + math.log(2)) / 2)
    labels = torch.tensor([[0, 0, -100]])
    close(rivals.cross_entropy(logits, labels), math.log(4))
    close(rivals.cross_entropy(logits, labels, items=4), math.log(4) / 4)
    assert rivals.scored(labels).tolist() == [[True, False, False]]


def test_divergences() -> None:
    close(rivals.kl_divergence(P, Q), [[math.log(1 / 2) / 4 + 3 * math.log(3 / 2) / 4]])
    close(rivals.symmetric_kl(P, Q), [[math.log(3) / 4]])
    close(rivals.symmetric_kl(P, Q, stop_gradient=True), [[math.log(3) / 4]])


def test_r_drop() -> None:
    labels = torch.tensor([[0, 1]])
    first, second = torch.cat([P, P], 1), torch.cat([Q, P], 1)
    expected = (math.log(4 / 3) + math.log(2)) / 2 + 0.8 / 2 * math.log(3) / 4
    close(rivals.r_drop_loss(first, second, labels, alpha=0.8), expected)


def test_noise() -> None:
    x, draw = tensor([[[3.0, 4.0], [0.0, 5.0]]]), tensor([[[1.0, -1.0], [0.5, 0.0]]])
    rms = math.sqrt(50 / 4)
    close(rivals.root_mean_square(x), rms)
    close(rivals.root_mean_square(x, torch.tensor([[True, False]])), math.sqrt(25 / 2))
    close(rivals.gaussian_noise(draw, 0.2), [[[0.2, -0.2], [0.1, 0.0]]])
    close(rivals.relative_gaussian_noise(draw, x, 0.2), [[[0.2 * rms, -0.2 * rms], [0.1 * rms, 0.0]]])
    close(rivals.neftune_noise(draw, 5.0), [[[2.5, -2.5], [1.25, 0.0]]])
    one = torch.tensor([[True, False]])
    close(rivals.neftune_noise(draw, 5.0, one), [[[5 / ROOT2, -5 / ROOT2], [0.0, 0.0]]])


def test_neftune_is_that_of_transformers() -> None:
    neftune = pytest.importorskip("transformers.integrations.neftune")
    module, x = torch.nn.Module(), torch.zeros(2, 8, 8, dtype=torch.float64)
    module.neftune_noise_alpha = 4.0  # A bound of 4 / sqrt(64) = 1/2.
    torch.manual_seed(0)
    noise = neftune.neftune_post_forward_hook(module, None, x)
    torch.manual_seed(0)
    uniform = torch.zeros_like(x).uniform_(-1, 1)
    close(rivals.neftune_noise(uniform, 4.0), noise.tolist())


# A model of one weight and width one: the logit of token 0 is w delta_t, that of token 1 is zero. Position 0 is scored
# against token 0, so CE = log(1 + exp(-w delta_0)), and predictions at position t depend on delta_t alone.
LABELS = torch.tensor([[1, 0]])


def one_weight(w: float = 1.0):
    return lambda delta: torch.cat([w * delta, torch.zeros_like(delta)], -1)


def test_smart_adversary_of_the_paper() -> None:
    where = torch.tensor([[True, False]])
    draw = tensor([[[2.0], [-3.0]]])
    options = {"sigma": 0.01, "step_size": 0.5, "epsilon": 0.1}
    # The divergence grows with |delta_0|; position 1 is not compared, so it keeps its start.
    close(rivals.smart_perturbation(one_weight(), draw, where, **options), [[[0.1], [-0.03]]])
    close(
        rivals.smart_perturbation(one_weight(), draw, where, sigma=0.01, step_size=0.05, epsilon=0.1),
        [[[0.07], [-0.03]]],
    )
    # d KLsym(p, 1/2) / d a = sigmoid(a) - 1/2 + a sigmoid'(a) at logit a: both positions, divided by the larger.
    slope = lambda a: 1 / (1 + math.exp(-a)) - 0.5 + a * math.exp(-a) / (1 + math.exp(-a)) ** 2  # noqa: E731
    ratio = slope(0.02) / slope(0.03)
    expected = [[[0.02 + 0.05 * ratio], [-0.08]]]
    close(rivals.smart_perturbation(one_weight(), draw, sigma=0.01, step_size=0.05, epsilon=0.1), expected)
    token = rivals.smart_perturbation(one_weight(), draw, sigma=0.01, step_size=0.05, epsilon=0.1, per="token")
    close(token, [[[0.07], [-0.08]]])


def test_smart_penalty() -> None:
    delta = tensor([[[math.log(3)], [0.0]]])  # Probabilities 3/4, 1/4 at position 0, halves elsewhere.
    close(rivals.smart_penalty(one_weight(), delta, torch.tensor([[True, False]])), math.log(3) / 4)
    close(rivals.smart_penalty(one_weight(), delta), math.log(3) / 8)


def test_smart_adversary_per_position() -> None:
    x = tensor([[[3.0], [4.0]]])
    delta = rivals.smart_perturbation_per_position(one_weight(-2.0), tensor([[[0.1], [-5.0]]]), x, radius=0.2)
    size = 0.2 * math.sqrt(12.5)
    close(delta, [[[size], [-size]]])

    def two_weights(shift: Tensor) -> Tensor:
        return torch.stack([shift @ tensor([3.0, 4.0]), torch.zeros_like(shift[..., 0])], -1)

    delta = rivals.smart_perturbation_per_position(
        two_weights, tensor([[[0.1, 0.0]]]), tensor([[[7.0, 1.0]]]), radius=0.2
    )
    close(delta, [[[0.2 * 5 * ROOT2 * 0.6, 0.2 * 5 * ROOT2 * 0.8]]])
    none = rivals.smart_perturbation_per_position(one_weight(0.0), tensor([[[0.1], [-5.0]]]), x, radius=0.2)
    close(none, [[[0.0], [0.0]]])


def test_bregman_and_moving_average() -> None:
    close(rivals.bregman_penalty(P, Q, mu=2.0), math.log(3) / 2)
    average = Q.clone().requires_grad_()
    weight = P.clone().requires_grad_()
    rivals.bregman_penalty(weight, average, mu=1.0).backward()
    assert average.grad is None
    assert weight.grad is not None
    close(rivals.moving_average(tensor([1.0]), tensor([3.0]), beta=0.75), [1.5])


def test_freelb() -> None:
    start = tensor([[[0.0], [0.0]]])
    loss, deltas = rivals.freelb_loss(one_weight(), LABELS, start, steps=3, step_size=0.4, max_norm=0.5, init=0.5)
    for delta, expected in zip(deltas, (0.0, -0.4, -0.5), strict=True):
        close(delta, [[[expected], [0.0]]])
    close(loss, sum(math.log(1 + math.exp(size)) for size in (0.0, 0.4, 0.5)) / 3)
    valid = torch.tensor([[True, True]])
    _, (first,) = rivals.freelb_loss(
        one_weight(), LABELS, tensor([[[1.0], [-1.0]]]), valid, steps=1, step_size=1.0, max_norm=0.0, init=0.5
    )
    close(first, [[[0.5 / ROOT2], [-0.5 / ROOT2]]])


def test_freelb_treats_each_sequence_by_itself() -> None:
    # One label in the first sequence, two in the second: slopes (-1/2, 0) and (-1/2, -1/2), up to a factor.
    labels = torch.tensor([[1, 0, -100], [1, 0, 0]])
    start = torch.zeros(2, 3, 1, dtype=torch.float64)
    _, deltas = rivals.freelb_loss(one_weight(), labels, start, steps=2, step_size=0.4, max_norm=0.3, init=0.0)
    close(deltas[1], [[[-0.3], [0.0], [0.0]], [[-0.3 / ROOT2], [-0.3 / ROOT2], [0.0]]])
    valid = torch.tensor([[True, True, False], [True, True, True]])
    ones = torch.ones(2, 3, 1, dtype=torch.float64)
    _, deltas = rivals.freelb_loss(one_weight(), labels, ones, valid, steps=1, step_size=1.0, max_norm=0.0, init=3.0)
    close(deltas[0], [[[3 / ROOT2], [3 / ROOT2], [0.0]], [[math.sqrt(3)]] * 3])


def test_smart_scales_each_sequence_by_its_own_largest_slope() -> None:
    draw = tensor([[[2.0], [0.0]], [[-1.0], [0.0]]])
    delta = rivals.smart_perturbation(one_weight(), draw, sigma=0.01, step_size=0.05, epsilon=1.0)
    close(delta, [[[0.07], [0.0]], [[-0.06], [0.0]]])
    x, valid = tensor([[[3.0], [100.0]], [[4.0], [0.0]]]), torch.tensor([[True, False], [True, False]])
    delta = rivals.smart_perturbation_per_position(one_weight(), draw, x, 0.1, valid=valid)
    size = 0.1 * math.sqrt(12.5)
    close(delta, [[[size], [0.0]], [[-size], [0.0]]])


def test_alum() -> None:
    draw, where = tensor([[[2.0], [-3.0]]]), torch.tensor([[True, False]])
    options = {"sigma": 0.01, "step_size": 0.03, "epsilon": 0.1}
    close(rivals.alum_perturbation(one_weight(), draw, where, steps=2, **options), [[[0.08], [-0.03]]])
    # d KL(1/2 || p) / d a = sigmoid(a) - 1/2 at logit a = 0.02.
    literal = 0.02 + 0.03 * (1 / (1 + math.exp(-0.02)) - 0.5)
    close(rivals.alum_perturbation(one_weight(), draw, where, per=None, **options), [[[literal], [-0.03]]])
    delta = tensor([[[math.log(3)], [0.0]]])
    # The clean logits are zero for every w: d KL(clean || perturbed) / d w = (3/4 - 1/2) delta is all that is left.
    weight = tensor(1.0).requires_grad_()
    penalty = rivals.alum_penalty(lambda d: torch.cat([weight * d, torch.zeros_like(d)], -1), delta, 10.0, where)
    close(penalty.detach(), 10 * math.log(3) / 4)
    close(torch.autograd.grad(penalty, weight)[0], 10 * math.log(3) / 4)


def test_sdbn() -> None:
    close(rivals.sdbn_perturbation(one_weight(3.0), LABELS, tensor([[[0.0], [0.0]]]), 0.1), [[[-0.1], [0.0]]])


def test_sharpness_aware_gradient() -> None:
    # Loss a^2 / 2 + 4 b^2 / 2 at (3, 1): gradient (3, 4), moved by 5 (3, 4) / 5 to (6, 5), gradient there (6, 20).
    gradients, shift = rivals.sam_gradients(
        lambda p: p[0] ** 2 / 2 + 2 * p[1] ** 2, [tensor(3.0), tensor(1.0)], rho=5.0
    )
    close(torch.stack(shift), [3.0, 4.0])
    close(torch.stack(gradients), [6.0, 20.0])


def test_weights() -> None:
    weight = tensor([[3.0, 0.0], [0.0, -1.0]])
    close(rivals.spectral_normalized(weight), [[1.0, 0.0], [0.0, -1 / 3]])
    close(rivals.sigma_reparam(weight, tensor(2.0)), [[2.0, 0.0], [0.0, -2 / 3]])
    close(rivals.embedding_dropout(weight, tensor([[1.0], [0.0]]), 0.25), [[4.0, 0.0], [0.0, 0.0]])


def test_decoupled_decay() -> None:
    one, zero = tensor([1.0]), tensor([0.0])
    close(rivals.adamw_step(one, zero, zero, zero, 1, lr=0.1, decay=0.2)[0], [0.98])
    close(rivals.adamw_step(one, 2 * one, zero, zero, 1, lr=0.1, decay=0.2, eps=0.0)[0], [0.88])
    parameter = torch.nn.Parameter(tensor([1.0, -2.0]))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.3)
    weight, first, second = parameter.detach().clone(), tensor([0.0, 0.0]), tensor([0.0, 0.0])
    for step, gradient in enumerate(tensor([[0.5, 1.0], [-2.0, 0.1], [0.0, 3.0]]), start=1):
        parameter.grad = gradient.clone()
        optimizer.step()
        weight, first, second = rivals.adamw_step(weight, gradient, first, second, step, lr=0.1, decay=0.3)
    close(weight, parameter.detach().tolist())
