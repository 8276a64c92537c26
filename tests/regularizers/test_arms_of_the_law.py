"""The bound on the condition number and the variational arm, against eigenvalues and densities of the textbook."""

import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import set_seed

from support_tokens.errors import RunFolderError
from support_tokens.models import build_small_gpt, character_tokenizer
from support_tokens.regularizers import ConditionPenalty, Posterior, Variational, log_condition, repulsive_state
from support_tokens.training import Corpus, TrainingPlan, train

WORDS = "In the beginning God created the heaven and the earth . And the earth was without form , and void ; "


def model():
    set_seed(0)
    return build_small_gpt(character_tokenizer(WORDS), layers=1, heads=2, width=8, context=16)


def batch(n: int = 4) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 10, (n, 16), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def everywhere(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(x.shape[:2], dtype=torch.bool)


def jacobian(row: torch.Tensor, t: int, coupling: float) -> torch.Tensor:
    """I + c Sigma / tau of position t, from the definition."""
    row = row / row.square().mean(-1, keepdim=True).sqrt()
    alpha = torch.softmax(-coupling * row[:t] @ row[t], 0)
    centred = row[:t] - alpha @ row[:t]
    sigma = torch.einsum("s,sd,se->de", alpha, centred, centred)
    width = row.shape[1]
    return torch.eye(width, dtype=row.dtype) + coupling * sigma / (sigma.trace() / width)


@pytest.mark.parametrize("coupling", [0.05, 0.7])
@pytest.mark.parametrize("length", [4, 9, 40])
def test_the_log_condition_is_that_of_the_eigenvalues_and_so_is_its_gradient(coupling: float, length: int):
    x = (3 * randn(2, length, 6) + 1).requires_grad_()
    found = log_condition(repulsive_state(x, coupling, everywhere(x)), coupling)
    rows = [[jacobian(row, t, coupling) for t in range(2, length)] for row in x]
    values = torch.linalg.eigvalsh(torch.stack([torch.stack(row) for row in rows]))
    naive = 3 * torch.log(values.square().mean(-1) / values.mean(-1).square())
    torch.testing.assert_close(found[:, 2:], naive, rtol=1e-9, atol=1e-12)
    assert (found[:, :2] == 0).all()
    weights = randn(2, length - 2, seed=1)
    gradients = [torch.autograd.grad((weights * g).sum(), x, retain_graph=True)[0] for g in (found[:, 2:], naive)]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("coupling", [0.05, 0.3, 1.0])
def test_the_log_condition_bounds_both_ends_of_the_spectrum(coupling: float):
    x = randn(3, 20, 6) * torch.tensor([2.0, 1, 1, 1, 0.5, 0.1], dtype=torch.float64)
    found = log_condition(repulsive_state(x, coupling, everywhere(x)), coupling)
    for b, t in ((b, t) for b in range(3) for t in range(2, 20)):
        values = torch.linalg.svdvals(jacobian(x[b], t, coupling))
        mean = 1 + coupling
        deviation = mean * math.sqrt(math.expm1(float(found[b, t]) / 3))
        assert values[-1] >= mean - deviation * math.sqrt(5) - 1e-9
        assert values[0] <= mean + deviation * math.sqrt(5) + 1e-9
        condition = float(values[0] / values[-1])
        assert found[b, t] <= 3 * math.log((1 + condition) ** 2 / (4 * condition)) + 1e-9


def test_to_second_order_the_log_condition_is_what_uneven_directions_cost_the_determinant():
    x, coupling = randn(1, 12, 6), 1e-3
    found = log_condition(repulsive_state(x, coupling, everywhere(x)), coupling)[0, 11]
    lost = 6 * math.log1p(coupling) - torch.logdet(jacobian(x[0], 11, coupling))
    assert float(found) == pytest.approx(float(lost), rel=5e-3)


def test_the_log_condition_does_not_see_padding():
    x, valid = randn(2, 9, 6), torch.ones(2, 9, dtype=torch.bool)
    valid[0, 7:] = False
    x[0, 7:] = torch.nan
    padded = log_condition(repulsive_state(x, 0.3, valid), 0.3)
    alone = log_condition(repulsive_state(x[:1, :7], 0.3, valid[:1, :7]), 0.3)
    torch.testing.assert_close(padded[:1, :7], alone)
    assert (padded[0, 7:] == 0).all()


def test_the_condition_arm_sees_neither_scale_nor_collapse():
    of, values = batch(), []
    for scale in (1.0, 10.0):
        one = model()
        with torch.no_grad():
            one.transformer.wte.weight *= scale
            one.transformer.wpe.weight *= scale
        attachment = ConditionPenalty(1.0, 0.5).attach(one, seed=0)
        values.append(attachment.penalty(one, of, one(**of)))
        attachment.remove()
        assert not one.transformer.h[0]._forward_pre_hooks
    assert float(values[0].detach()) > 0.1
    torch.testing.assert_close(values[0], values[1], rtol=1e-3, atol=1e-6)
    same = torch.ones(1, 5, 8, requires_grad=True)
    collapsed = log_condition(repulsive_state(same, 0.5, everywhere(same)), 0.5)
    (gradient,) = torch.autograd.grad(collapsed.sum(), same)
    assert (collapsed == 0).all() and (gradient == 0).all()


def naive_divergence(posterior: Posterior, y: torch.Tensor) -> torch.Tensor:
    """Minus the log density of the law at a draw, minus the entropy of what it was drawn from, over a sequence."""
    entropy = torch.distributions.Normal(torch.zeros_like(y), posterior.scale).entropy().sum((1, 2))
    return -posterior.law.log_prob(y) - entropy


def test_the_divergence_is_density_less_entropy_and_so_is_its_gradient():
    posterior = Posterior(6, 0.3, 0.7, torch.Generator().manual_seed(0)).double()
    y = (0.5 * randn(2, 9, 6)).requires_grad_()
    found, naive = posterior.divergence(y, everywhere(y)).sum(-1), naive_divergence(posterior, y)
    torch.testing.assert_close(found, naive)
    leaves = [y, posterior.growth, posterior.law.w_q, posterior.law.w_k]
    for pair in zip(*(torch.autograd.grad(v.sum(), leaves, retain_graph=True) for v in (found, naive)), strict=True):
        torch.testing.assert_close(*pair)
    some = torch.tensor([[8, 3], [0, 5]])
    drawn = posterior.divergence(y, everywhere(y), some)
    torch.testing.assert_close(drawn, posterior.divergence(y, everywhere(y)).gather(1, some))
    assert not posterior.law.log_noise_scale.requires_grad


def test_the_mean_divergence_of_one_token_is_that_of_two_gaussians_and_holds_the_scale():
    posterior, x = Posterior(4, 0.3, 0.7).double(), randn(1, 1, 4)
    # Eight points with the mean and covariance of a standard Gaussian, which is all that a quadratic sees of it.
    noise = 2 * torch.cat((torch.eye(4), -torch.eye(4))).double().unsqueeze(1)
    for ratio in (0.1, 1.0, 10.0):
        with torch.no_grad():
            posterior.growth.fill_(math.log(ratio * 0.7 / 0.3))
        draws = x + posterior.scale * noise
        mean = posterior.divergence(draws, everywhere(draws)).mean()
        normal = torch.distributions.Normal
        exact = torch.distributions.kl_divergence(normal(x, posterior.scale), normal(0.0, posterior.law.noise_scale))
        torch.testing.assert_close(mean, exact.sum())
        (pull,) = torch.autograd.grad(mean, posterior.growth)
        # Down to sigma from above, up to it from below.
        assert float(pull) == pytest.approx(4 * (ratio**2 - 1), rel=1e-6, abs=1e-6)


def test_the_variational_arm_draws_in_training_only_and_does_not_see_the_scale_of_embeddings():
    of, values = batch(16), []
    for scale in (1.0, 10.0):
        one, entered = model(), []
        with torch.no_grad():
            one.transformer.wte.weight *= scale
            one.transformer.wpe.weight *= scale
        attachment = Variational(1.0, 0.5, positions=0).attach(one, seed=0)
        hook = one.transformer.h[0].register_forward_pre_hook(lambda _m, args, to=entered: to.append(args[0].detach()))
        torch.manual_seed(3)
        values.append(attachment.penalty(one, of, one.train()(**of)))
        one.eval()(**of)
        noise, clean = entered[0] - entered[1], entered[1]
        size = float(clean.square().mean().sqrt())
        assert float(noise.square().mean().sqrt()) == pytest.approx(0.5 * size, rel=0.05)
        attachment.remove()
        hook.remove()
        assert not one.transformer.h[0]._forward_pre_hooks and not hasattr(one, "support_tokens_variational")
    torch.testing.assert_close(values[0], values[1], rtol=1e-4, atol=1e-4)


def test_noise_and_law_are_learned_and_kept_beside_the_model(tmp_path):
    plan = TrainingPlan(
        layers=1, heads=2, width=8, context=16, steps=2, batch_size=2, learning_rate=1e-2, log_every=1,
        evaluate_every=2, evaluate_windows=2, save_every=1, device="cpu",
    )  # fmt: skip
    corpus = Corpus("toy", WORDS * 10, WORDS * 2, WORDS)
    train(plan, corpus, Variational(), tmp_path / "run", progress=False)
    kept, start = load_file(tmp_path / "run/variational.safetensors"), Posterior(8, 0.2, 1.0)
    assert float(kept["growth"]) != 0
    assert {key: value.shape for key, value in kept.items()} == {
        key: value.shape for key, value in start.named_parameters() if key != "law.log_noise_scale"
    } | {"law.log_noise_scale": torch.Size([])}
    assert "variational/scale" in (tmp_path / "run/metrics.jsonl").read_text()
    start.load(tmp_path / "run")
    assert all(torch.equal(value, kept[key]) for key, value in start.named_parameters())
    for content in (None, b"torn"):
        (tmp_path / "run/variational.safetensors").unlink(missing_ok=True)
        if content:
            (tmp_path / "run/variational.safetensors").write_bytes(content)
        with pytest.raises(RunFolderError, match="must hold variational"):
            start.load(tmp_path / "run")
