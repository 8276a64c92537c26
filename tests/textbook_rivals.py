"""Textbook formulas of the other regularizers: noise, consistency, adversaries, sharpness, weights.

Nothing here imports `support_tokens`. A model is a callable `model_logits(delta)` that returns logits (B, T, V) when
its input embeddings (B, T, D) are shifted by `delta`; its parameters, its text and its dropout are fixed inside. Labels
(B, T) are shifted here: logits at t are scored against the label at t + 1, and -100 is not scored. `where` (B, T) masks
the positions whose predictions are compared, `valid` (B, T) the real tokens (None: all). Random draws are arguments:
`normal` and `uniform` (in [-1, 1]) are tensors (B, T, D). A returned perturbation is a constant: no gradient passes
through the search that found it, as in every paper below.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = [
    "adamw_step",
    "alum_penalty",
    "alum_perturbation",
    "bregman_penalty",
    "cross_entropy",
    "embedding_dropout",
    "freelb_loss",
    "gaussian_noise",
    "kl_divergence",
    "mean_over",
    "moving_average",
    "neftune_noise",
    "r_drop_loss",
    "relative_gaussian_noise",
    "root_mean_square",
    "sam_gradients",
    "scored",
    "sdbn_perturbation",
    "sigma_reparam",
    "smart_penalty",
    "smart_perturbation",
    "smart_perturbation_per_position",
    "spectral_normalized",
    "symmetric_kl",
]

ModelLogits = Callable[[Tensor], Tensor]
IGNORED = -100


def mean_over(values: Tensor, where: Tensor | None = None) -> Tensor:
    """The mean of `values` (B, T) over the positions where the mask is True (None: over all), a scalar."""
    if where is None:
        return values.mean()
    return torch.where(where.bool(), values, torch.zeros_like(values)).sum() / where.bool().sum()


def scored(labels: Tensor) -> Tensor:
    """The positions whose prediction is scored, (B, T): the next label is there and is not -100; never the last one."""
    mask = torch.zeros(labels.shape, dtype=torch.bool)
    mask[:, :-1] = labels[:, 1:] != IGNORED
    return mask


def cross_entropy(logits: Tensor, labels: Tensor, items: int | None = None) -> Tensor:
    """-sum log p(label at t + 1 | prediction at t) over scored positions, divided by `items` or by their number."""
    total, count = torch.zeros((), dtype=logits.dtype), 0
    for b in range(logits.shape[0]):
        for t in range(logits.shape[1] - 1):
            label = int(labels[b, t + 1])
            if label != IGNORED:
                total = total + torch.logsumexp(logits[b, t], -1) - logits[b, t, label]
                count += 1
    return total / (count if items is None else items)


def kl_divergence(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """KL(p || q) = sum_v p_v (log p_v - log q_v) per token, (B, T), in nats, of two sets of logits (B, T, V)."""
    p, q = torch.log_softmax(p_logits, -1), torch.log_softmax(q_logits, -1)
    return (p.exp() * (p - q)).sum(-1)


def symmetric_kl(p_logits: Tensor, q_logits: Tensor, stop_gradient: bool = False) -> Tensor:
    """KL(p || q) + KL(q || p) per token, (B, T): the sum, not the mean (SMART, arXiv:1911.03437, equation 3).

    With `stop_gradient` the first argument of each divergence is a constant, as in the code released with SMART and
    ALUM: the value is the same, the gradient is not.
    """
    if stop_gradient:
        return kl_divergence(p_logits.detach(), q_logits) + kl_divergence(q_logits.detach(), p_logits)
    return kl_divergence(p_logits, q_logits) + kl_divergence(q_logits, p_logits)


def gradient_at(objective: Callable[[Tensor], Tensor], point: Tensor) -> Tensor:
    leaf = point.detach().clone().requires_grad_()
    return torch.autograd.grad(objective(leaf), leaf)[0]


def divided(gradient: Tensor, size: Tensor) -> Tensor:
    """`gradient / size`, zero where the size is zero: no direction is made up."""
    return torch.where(size > 0, gradient / torch.where(size > 0, size, torch.ones_like(size)), 0.0)


# Noise on the embeddings ----------------------------------------------------------------------------------------------


def root_mean_square(x: Tensor, valid: Tensor | None = None) -> Tensor:
    """sqrt(mean of x^2) over all D entries of all (valid) positions of the batch, a scalar."""
    squares = x**2 if valid is None else x[valid.bool()] ** 2
    return torch.sqrt(squares.mean())


def gaussian_noise(normal: Tensor, sigma: float) -> Tensor:
    """The shift sigma z, z ~ N(0, I), (B, T, D): sigma in the units of the embeddings."""
    return sigma * normal


def relative_gaussian_noise(normal: Tensor, x: Tensor, sigma: float, valid: Tensor | None = None) -> Tensor:
    """The shift sigma RMS(x) z, (B, T, D): sigma in units of one RMS over the batch; the RMS is a constant."""
    return sigma * root_mean_square(x.detach(), valid) * normal


def neftune_noise(uniform: Tensor, alpha: float, valid: Tensor | None = None) -> Tensor:
    """The shift alpha / sqrt(L D) u, u uniform in [-1, 1], (B, T, D) (NEFTune, arXiv:2310.05914).

    transformers' integration takes L = T, the padded length of the batch, and shifts padding too: `valid=None`. With
    `valid`, L is the number of real tokens of each sequence and padding stays.
    """
    length, width = uniform.shape[1:]
    if valid is None:
        return alpha / math.sqrt(length * width) * uniform
    count = valid.sum(1).to(uniform.dtype)[:, None, None]
    return alpha / torch.sqrt(count * width) * uniform * valid[:, :, None]


# Consistency of two predictions ---------------------------------------------------------------------------------------


def r_drop_loss(first: Tensor, second: Tensor, labels: Tensor, alpha: float, where: Tensor | None = None) -> Tensor:
    """(CE_1 + CE_2) / 2 + alpha / 2 (KL(p1 || p2) + KL(p2 || p1)) of two dropouts (R-Drop, arXiv:2106.14448).

    The paper's objective is CE_1 + CE_2 + alpha' / 2 (KL + KL), twice this one at alpha' = 2 alpha. `where` defaults to
    the scored positions.
    """
    where = scored(labels) if where is None else where
    ce = (cross_entropy(first, labels) + cross_entropy(second, labels)) / 2
    return ce + alpha / 2 * mean_over(symmetric_kl(first, second), where)


def smart_penalty(model_logits: ModelLogits, delta: Tensor, where: Tensor | None = None) -> Tensor:
    """Mean symmetric KL between predictions at 0 and at `delta`, a scalar; gradients pass through both (SMART)."""
    return mean_over(symmetric_kl(model_logits(torch.zeros_like(delta)), model_logits(delta)), where)


def largest(gradient: Tensor, per: str) -> Tensor:
    """The largest |g| of a token's D entries (`per="token"`) or a sequence's T D entries, kept for broadcasting."""
    return gradient.abs().amax((-1,) if per == "token" else (-2, -1), keepdim=True)


def smart_perturbation(
    model_logits: ModelLogits,
    normal: Tensor,
    where: Tensor | None = None,
    *,
    sigma: float = 1e-5,
    step_size: float = 1e-3,
    epsilon: float = 1e-5,
    steps: int = 1,
    per: str = "sequence",
) -> Tensor:
    """SMART's adversary (arXiv:1911.03437, algorithm 1), (B, T, D), in units of the embeddings.

    delta = sigma z; `steps` times: g = gradient of the mean symmetric KL, delta = delta + eta g / max|g|, clipped to
    [-eps, eps]. The defaults are the paper's: eta is a hundred times eps, so most entries end at eps sign(g). There
    the maximum is that of one example. The released code (namisan/mt-dnn) takes it per token, climbs the one divergence
    KL(clean || perturbed) and adds eta g / max|g| to the clean embeddings, with no clipping and without the start.
    """
    clean = model_logits(torch.zeros_like(normal)).detach()
    delta = sigma * normal
    for _ in range(steps):
        gradient = gradient_at(lambda d: mean_over(symmetric_kl(clean, model_logits(d)), where), delta)
        delta = (delta + step_size * divided(gradient, largest(gradient, per))).clamp(-epsilon, epsilon)
    return delta.detach()


def smart_perturbation_per_position(
    model_logits: ModelLogits, normal: Tensor, x: Tensor, radius: float, where: Tensor | None = None, valid=None
) -> Tensor:
    """Project's adversary: delta_t = rho RMS(x) sqrt(D) g_t / |g_t|, (B, T, D), one step, L2 norm per position.

    g is the gradient of the mean symmetric KL at the random start 1e-2 rho RMS(x) z, z ~ N(0, I), whose norm is about
    1e-2 of delta's; the start is not kept. Zero where g_t vanishes. `radius` is rho, RMS that of the (valid) batch.
    """
    size = radius * root_mean_square(x.detach(), valid)
    clean = model_logits(torch.zeros_like(normal)).detach()
    gradient = gradient_at(lambda d: mean_over(symmetric_kl(clean, model_logits(d)), where), 1e-2 * size * normal)
    length = torch.sqrt((gradient**2).sum(-1, keepdim=True))
    return (size * math.sqrt(x.shape[-1]) * divided(gradient, length)).detach()


def bregman_penalty(logits: Tensor, average_logits: Tensor, mu: float, where: Tensor | None = None) -> Tensor:
    """Mu times the mean symmetric KL between f(theta) and f(theta_bar), a scalar (SMART, equation 4).

    theta_bar is a constant: the moving average of the weights up to the step before.
    """
    return mu * mean_over(symmetric_kl(logits, average_logits.detach()), where)


def moving_average(average: Tensor, weight: Tensor, beta: float) -> Tensor:
    """theta_bar <- beta theta_bar + (1 - beta) theta, after each step; theta_bar starts at the initial weights."""
    return beta * average + (1 - beta) * weight


# Adversarial training -------------------------------------------------------------------------------------------------


def freelb_loss(
    model_logits: ModelLogits,
    labels: Tensor,
    uniform: Tensor,
    valid: Tensor | None = None,
    *,
    steps: int,
    step_size: float,
    max_norm: float,
    init: float,
) -> tuple[Tensor, list[Tensor]]:
    """FreeLB (arXiv:1909.11764, algorithm 1): the mean of K cross-entropies and the K perturbations that they are at.

    delta_0 = init u / sqrt(L D) at real tokens, L of them in a sequence; then K - 1 times, for each sequence by itself,
    delta = delta + step_size g / |g|_F and, where |delta|_F > max_norm, delta = max_norm delta / |delta|_F (0: none).
    The K losses are at delta_0, ..., delta_{K-1}: no pass is spent on the clean text or on a K-th update. The paper
    draws delta_0 with init = max_norm; its code (zhuchen03/FreeLB) has both, and one dropout mask for all K passes.
    """
    mask = torch.ones(uniform.shape[:2], dtype=uniform.dtype) if valid is None else valid.to(uniform.dtype)
    delta = init * uniform * mask[:, :, None] / torch.sqrt(mask.sum(1) * uniform.shape[-1])[:, None, None]
    losses, deltas = [], []
    for step in range(steps):
        if step:
            gradient = gradient_at(lambda d: cross_entropy(model_logits(d), labels), delta)
            delta = delta + step_size * divided(gradient, torch.sqrt((gradient**2).sum((1, 2), keepdim=True)))
            norm = torch.sqrt((delta**2).sum((1, 2), keepdim=True))
            if max_norm > 0:
                delta = torch.where(norm > max_norm, delta * max_norm / norm, delta)
        deltas.append(delta.detach())
        losses.append(cross_entropy(model_logits(delta.detach()), labels))
    return torch.stack(losses).mean(), deltas


def alum_perturbation(
    model_logits: ModelLogits,
    normal: Tensor,
    where: Tensor | None = None,
    *,
    sigma: float = 1e-5,
    step_size: float = 1e-3,
    epsilon: float = 1e-5,
    steps: int = 1,
    per: str | None = "sequence",
) -> Tensor:
    """ALUM's virtual adversary (arXiv:2004.08994, algorithm 1), (B, T, D), in units of the embeddings.

    delta = sigma z; `steps` times: g = gradient of mean KL(clean || perturbed), the clean prediction a constant, and
    delta = delta + eta g / max|g|, clipped to [-eps, eps]. `per=None` leaves g as it is, the letter of the algorithm:
    at these sizes such a step is negligible beside the start. The released code (namisan/mt-dnn, alum/adv_masked_lm.py)
    adds eta g to the embeddings and divides the sum by its largest entry, token by token, which this does not imitate.
    """
    clean = model_logits(torch.zeros_like(normal)).detach()
    delta = sigma * normal
    for _ in range(steps):
        gradient = gradient_at(lambda d: mean_over(kl_divergence(clean, model_logits(d)), where), delta)
        direction = gradient if per is None else divided(gradient, largest(gradient, per))
        delta = (delta + step_size * direction).clamp(-epsilon, epsilon)
    return delta.detach()


def alum_penalty(model_logits: ModelLogits, delta: Tensor, alpha: float, where: Tensor | None = None) -> Tensor:
    """The mean symmetric KL between clean and perturbed predictions times alpha, a scalar, added to the clean CE.

    Each divergence has its first argument constant, as in the released code (`symmetric_kl` with `stop_gradient`).
    """
    clean, perturbed = model_logits(torch.zeros_like(delta)), model_logits(delta)
    return alpha * mean_over(symmetric_kl(clean, perturbed, stop_gradient=True), where)


def sdbn_perturbation(model_logits: ModelLogits, labels: Tensor, delta: Tensor, epsilon: float = 1e-4) -> Tensor:
    """The shift epsilon sign(g), g the gradient of the summed cross-entropy at no shift, (B, T, D).

    The embedding part of SDBN (arXiv:2606.10610, "Small Data, Big Noise"). `delta` gives shape and dtype. The training
    loss is cross_entropy(model_logits(result), labels) alone, with no clean term, after some epochs on clean text.

    Source: the authors' repository, shaham-lab/SDBN: utils/utils.py and utils/classification/train.py, choice "sdbn",
    which calls it an infinity-norm FGSM. One step, no random start, dropout off during the attack, epsilon 1e-4, three
    clean epochs before ten adversarial ones, gradients clipped to norm one. It is written there for classifiers; its
    causal models are trained on paraphrases by a language model, which is another member (SDBN-p).
    Not verified: the text of the paper, of which only the abstract was at hand, and so its own epsilon and norm.
    """
    return epsilon * gradient_at(lambda d: cross_entropy(model_logits(d), labels, 1), torch.zeros_like(delta)).sign()


def sam_gradients(
    loss: Callable[[Sequence[Tensor]], Tensor], parameters: Sequence[Tensor], rho: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients at w + rho g / |g|_2 and that shift, one tensor a parameter (SAM, arXiv:2010.01412, algorithm 1).

    g is the gradient at w, |g|_2 its norm over all parameters together; the second gradient ignores that the shift
    depends on w. The optimizer then steps from w, not from the shifted point.
    """
    leaves = [p.detach().clone().requires_grad_() for p in parameters]
    first = torch.autograd.grad(loss(leaves), leaves)
    norm = torch.sqrt(torch.stack([(g**2).sum() for g in first]).sum())
    shift = [rho * divided(g, norm) for g in first]
    moved = [(p.detach() + s).requires_grad_() for p, s in zip(parameters, shift, strict=True)]
    return list(torch.autograd.grad(loss(moved), moved)), shift


# Weights --------------------------------------------------------------------------------------------------------------


def spectral_normalized(weight: Tensor) -> Tensor:
    """W / sigma(W), with sigma the largest singular value of the matrix, itself differentiated (arXiv:1802.05957)."""
    return weight / torch.linalg.svdvals(weight)[0]


def sigma_reparam(weight: Tensor, gamma: Tensor) -> Tensor:
    """Gamma W / sigma(W) with a learned scalar gamma that starts at one (arXiv:2303.06296)."""
    return gamma * spectral_normalized(weight)


def adamw_step(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    step: int,
    *,
    lr: float,
    decay: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of Adam with decoupled weight decay (arXiv:1711.05101): weight and moments; `step` counts from 1.

    m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2,
    w = (1 - lr decay) w - lr (m / (1 - b1^k)) / (sqrt(v / (1 - b2^k)) + eps).

    Decay of embeddings is this with `decay` on the embedding matrix alone: rows of absent tokens shrink too.
    """
    first = betas[0] * first + (1 - betas[0]) * gradient
    second = betas[1] * second + (1 - betas[1]) * gradient**2
    update = (first / (1 - betas[0] ** step)) / (torch.sqrt(second / (1 - betas[1] ** step)) + eps)
    return (1 - lr * decay) * weight - lr * update, first, second


def embedding_dropout(x: Tensor, keep: Tensor, rate: float) -> Tensor:
    """Embeddings keep x / (1 - rate), (B, T, D); `keep` holds zeros and ones, (B, T, D) or, whole tokens, (B, T, 1)."""
    return keep * x / (1 - rate)
