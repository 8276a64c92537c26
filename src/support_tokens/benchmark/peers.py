r"""What else regularises a language model, written from its paper, for one step of training each.

All take a causal language model of transformers and token ids `(B, T)`, and return a loss to be differentiated.
"""

__all__ = [
    "dense_covariance_penalty",
    "jacobian_regularised",
    "naive_jacobian_penalty",
    "neftune",
    "plain",
    "r_drop",
    "smart",
]

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from support_tokens.law import EmbeddingPrior


def plain(model: Any, ids: Tensor) -> Tensor:
    """Cross-entropy."""
    return model(input_ids=ids, labels=ids).loss


def r_drop(model: Any, ids: Tensor, weight: float = 1.0) -> Tensor:
    """R-Drop: two passes with dropout, and the symmetric divergence between them.

    Source:
        Liang et al., R-Drop, arXiv:2106.14448.
    """
    first, second = model(input_ids=ids, labels=ids), model(input_ids=ids, labels=ids)
    return 0.5 * (first.loss + second.loss) + weight * _divergence(first.logits, second.logits)


def smart(model: Any, ids: Tensor, weight: float = 1.0, sigma: float = 1e-3, step: float = 1e-3) -> Tensor:
    """SMART: cross-entropy plus the divergence at the worst nearby embedding, sought by one gradient step.

    Source:
        Jiang et al., SMART, arXiv:1911.03437.
    """
    embeddings = model.get_input_embeddings()(ids)
    clean = model(inputs_embeds=embeddings, labels=ids)
    noise = (sigma * torch.randn_like(embeddings)).requires_grad_()
    moved = model(inputs_embeds=embeddings.detach() + noise).logits
    (slope,) = torch.autograd.grad(_divergence(moved, clean.logits.detach()), noise)
    worst = noise.detach() + step * slope / slope.abs().amax(-1, keepdim=True).clamp_min(1e-12)
    return clean.loss + weight * _divergence(model(inputs_embeds=embeddings + worst).logits, clean.logits)


@contextmanager
def neftune(model: Any, alpha: float = 5.0) -> Iterator[None]:
    """NEFTune by the hook that transformers' own Trainer uses; the loss within is the plain one.

    Source:
        Jain et al., NEFTune, arXiv:2310.05914.
    """
    from transformers.integrations.neftune import neftune_post_forward_hook

    table = model.get_input_embeddings()
    table.neftune_noise_alpha = alpha
    hook = table.register_forward_hook(neftune_post_forward_hook)
    try:
        yield
    finally:
        hook.remove()
        del table.neftune_noise_alpha


def jacobian_regularised(model: Any, ids: Tensor, weight: float = 1e-2) -> Tensor:
    """Cross-entropy plus the squared norm of one random projection of the Jacobian of logits by embeddings.

    Source:
        Hoffman, Roberts and Yaida, arXiv:1908.02729, with one projection.
    """
    # Fused attention has no second derivative.
    with sdpa_kernel(SDPBackend.MATH):
        embeddings = model.get_input_embeddings()(ids)
        out = model(inputs_embeds=embeddings, labels=ids)
        direction = functional.normalize(torch.randn_like(out.logits), dim=-1)
        (projected,) = torch.autograd.grad((direction * out.logits).sum(), embeddings, create_graph=True)
        return out.loss + weight * projected.square().sum() / ids.numel()


def naive_jacobian_penalty(law: EmbeddingPrior, x: Tensor) -> Tensor:
    r"""Mean $-\log|\det J_t|$ of the law by an autograd Jacobian at every position of `x` `(B, T, D)`: the textbook."""
    total = x.new_zeros(())
    scale = law.rank**-0.5
    for sequence in x:
        for position in range(1, len(sequence)):
            past = sequence[:position]

            def residual(own: Tensor, past: Tensor = past) -> Tensor:
                logits = scale * (past @ law.w_k.T) @ (law.w_q @ own)
                return own - logits.softmax(0) @ past

            jacobian = torch.autograd.functional.jacobian(residual, sequence[position], create_graph=True)
            total = total - torch.linalg.slogdet(jacobian).logabsdet
    return total / x.shape[:2].numel()


def dense_covariance_penalty(law: EmbeddingPrior, x: Tensor) -> Tensor:
    r"""Mean $-\log|\det(I - \Sigma_t A)|$ of the law with all D x D covariances formed and left to autograd."""
    length = x.shape[1]
    logits = (x @ law.w_q.T) @ (x @ law.w_k.T).mT * law.rank**-0.5
    past = torch.ones(length, length, dtype=torch.bool, device=x.device).tril(-1)
    weights = logits.masked_fill(~past, torch.finfo(x.dtype).min).softmax(-1) * past
    mean = weights @ x
    second = torch.einsum("bts,bsd,bse->btde", weights, x, x)
    covariance = second - mean.unsqueeze(-1) * mean.unsqueeze(-2)
    identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    return -torch.linalg.slogdet(identity - covariance @ law.coupling).logabsdet.mean()


def _divergence(first: Tensor, second: Tensor) -> Tensor:
    """Symmetric Kullback-Leibler divergence of two sets of logits, nats, mean over tokens."""
    p, q = first.log_softmax(-1), second.log_softmax(-1)
    return 0.5 * ((p.exp() - q.exp()) * (p - q)).sum(-1).mean()
