r"""Next-token probabilities averaged over noise in the embeddings."""

__all__ = ["embedding_rms", "predict_under_noise"]

import math
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from support_tokens.errors import ArgumentError
from support_tokens.law import EmbeddingPrior
from support_tokens.margins import AttentionState, JacobianBlocks, position_chunks
from support_tokens.margins.linalg import each_matrix, full_precision
from support_tokens.models import evaluating, hook_embeddings, in_turn, text_inputs


@torch.no_grad()
def predict_under_noise(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scale: float,
    samples: int = 8,
    law: EmbeddingPrior | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Log-probabilities of the next token, averaged over samples of noise in the embeddings.

    $$ \log \bar p(y \mid x) = \log \frac1S \sum_{i=1}^S p\big(y \mid x + s\, \delta_i\big), \qquad
       \delta_{i,t} = \epsilon_{i,t} \;\text{ or }\; J_t^{-1} \epsilon_{i,t}, \quad \epsilon \sim N(0, I). $$

    With a law the noise is mapped through it to first order, $x - \mu(x) = \epsilon$ gives $dx = J_t^{-1} d\epsilon$:
    it is larger at positions and in directions of small margin. The S samples are one batch: time and memory are those
    of S times as many sequences. One scale for all texts keeps the prediction causal and independent of the rest of the
    batch; `r * embedding_rms(...)` is a scale relative to the size of the embeddings.

    This flattens predictions that depend on details of the embeddings. Temperature scaling also flattens predictions,
    at no cost: compare the two on held-out text first.

    Args:
        model: A causal language model of transformers; run in evaluation mode.
        input_ids: Tokens, `(B, T)`.
        attention_mask: 1 at real tokens, `(B, T)`; None: all are.
        scale: $s$, standard deviation of the noise in units of the embeddings; 0 gives the plain prediction.
        samples: $S$.
        law: The law that maps the noise; None: isotropic noise.
        generator: Draws the noise, on its own device; None: PyTorch's global one.

    Returns:
        $\log \bar p$, `(B, T, V)`, float32 or better; entry t predicts token t + 1.

    Raises:
        ArgumentError: `scale` is negative or not finite, `samples` is below 1, or the law has another width.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=8)).eval()
        >>> ids = torch.arange(6).unsqueeze(0)
        >>> log_p = predict_under_noise(model, ids, scale=0.3 * embedding_rms(model, ids), samples=4)
        >>> log_p.shape, torch.allclose(log_p.exp().sum(-1), torch.ones(1, 6))
        (torch.Size([1, 6, 11]), True)
    """
    if not 0 <= scale < math.inf:
        raise ArgumentError(
            f"scale must be a finite number of at least 0, received {scale!r}; pass 0.1 * embedding_rms(...)."
        )
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise ArgumentError(f"samples must be a whole number of at least 1, received {samples!r}; 8 is the default.")
    batch = input_ids.shape[0]

    def disturb(x: Tensor) -> Tensor:
        each = x.reshape(samples, batch, *x.shape[1:])
        drawn = torch.randn(
            each.shape, generator=generator, dtype=torch.float32, device=generator.device if generator else x.device
        )
        noise = drawn.to(x.device)
        if law is not None:
            noise = _through(law.state(_wide(each[0]), attention_mask), noise)
        return x + scale * noise.reshape(x.shape).to(x.dtype)

    mask = None if attention_mask is None else attention_mask.repeat(samples, 1)
    inputs = text_inputs(model, input_ids.repeat(samples, 1), mask)
    with ExitStack() as after:
        after.enter_context(in_turn(model))
        after.enter_context(evaluating(model))
        after.callback(hook_embeddings(model, disturb).remove)
        logits = _wide(model(**inputs).logits)
    log_p = (logits - logits.logsumexp(-1, keepdim=True)).reshape(samples, batch, *logits.shape[1:])
    return log_p.logsumexp(0) - math.log(samples)


@torch.no_grad()
def embedding_rms(model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None = None) -> float:
    r"""Root mean square of the embeddings that enter the first block, over real tokens and width.

    Args:
        model: A causal language model of transformers.
        input_ids: Tokens of a representative text, `(B, T)`.
        attention_mask: 1 at real tokens, `(B, T)`; None: all are.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=8)).eval()
        >>> embedding_rms(model, torch.arange(6).unsqueeze(0)) > 0
        True
    """
    seen: list[Tensor] = []
    with ExitStack() as after:
        after.enter_context(in_turn(model))
        after.enter_context(evaluating(model))
        after.callback(hook_embeddings(model, lambda x: seen.append(x)).remove)
        model(**text_inputs(model, input_ids, attention_mask))
    x = seen[0] if attention_mask is None else seen[0][attention_mask.bool()]
    return x.double().square().mean().sqrt().item()


def _through(state: AttentionState, noise: Tensor) -> Tensor:
    """$J_t^{-1}$ times noise `(S, B, T, D)`, one solve per position for all samples."""
    blocks = JacobianBlocks(state)
    identity = torch.eye(state.width, dtype=state.query.dtype, device=state.query.device)
    columns = noise.permute(1, 2, 3, 0).to(state.query.dtype)  # (B, T, D, S)
    with full_precision(state.query):
        solved = [
            each_matrix(torch.linalg.solve, identity - blocks.dense(rows), columns[:, rows])
            for rows in position_chunks(state, None, state.width)
        ]
    return torch.cat(solved, dim=1).permute(3, 0, 1, 2)


def _wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x if x.dtype == torch.float64 else x.float()
