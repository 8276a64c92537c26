r"""Structure of a model: its embeddings, and the margins and coupling of the attention that reads them.

Robustness says how much a model loses; these figures say what changed inside of it. Margins depend on the size of the
embeddings, so arms are also compared with embeddings brought to one size (`scaled_by`).
"""

__all__ = ["COUPLING_LEVELS", "measure_structure"]

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from support_tokens.errors import ArgumentError
from support_tokens.margins import AttentionState, JacobianBlocks, moments, state_margins
from support_tokens.margins.linalg import full_precision
from support_tokens.models import capture_attention, decoder_blocks, hook_embeddings
from support_tokens.report.records import StructureFigures

COUPLING_LEVELS = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
"""Quantiles at which the spectrum of the coupling is recorded."""


def measure_structure(
    models: nn.Module | Sequence[nn.Module],
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    arm: str = "model",
    setting: str = "own",
    layer: int = 0,
    scaled_by: float | Sequence[float] = 1.0,
    positions: int = 16,
) -> StructureFigures:
    r"""Structure of block `layer` in its noise view, $J_t = I - \partial\mu_t/\partial x_t$, for each model of an arm.

    Args:
        models: A causal language model of transformers whose attention can be read, in eval mode; or several, one a
            seed, which may be loaded lazily.
        input_ids: `(N, T)` token ids.
        attention_mask: `(N, T)`, 1 at tokens; None: all are.
        arm: Name of the arm in the record.
        setting: Says in the record on which embeddings it was measured.
        layer: Block.
        scaled_by: Factor of the embeddings that enter the first block, one for all models or one each: figures of the
            same model with embeddings of another size.
        positions: Positions of each sequence that margins and coupling are computed at, spread evenly from the third to
            the last; all others only enter the figures of the embeddings.

    Returns:
        A record with one figure a model in each column, over real tokens: `embedding_rms`, the root mean square of
        $x_t$; `effective_rank`, $\exp H(p)$ of the eigenvalues $\lambda_i$ of the covariance of the embeddings with
        $p_i = \lambda_i / \sum_j \lambda_j$, from 1 to D; `dispersion`, $1 - |\mathbb{E} x|^2 / \mathbb{E} |x|^2$;
        `signal_to_noise`, $\mathbb{E} |\mu_t|^2 / \mathbb{E} |x_t - \mu_t|^2$ with $\mu_t$ the output of attention,
        empty where a norm follows attention; mean and minimum of $\log|\det J_t|$ in nats; the 5 % quantile of
        $\sigma_{\min}(J_t)$; the fraction of positions with $\det J_t < 0$; the positive part of the spectrum of the
        symmetric part of the coupling $I - J_t$ as a fraction of the sum of its absolute values, and its quantiles at
        `COUPLING_LEVELS`.

    Raises:
        ArgumentError: A factor that is not positive, or no position to look at.
        UnsupportedModelError: The attention of the model cannot be read.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=8)).eval()
        >>> record = measure_structure(model, torch.arange(16).reshape(2, 8) % 11, positions=4)
        >>> record.n_positions, 1 <= record.effective_rank[0] <= 8
        (8, True)
    """
    models = (models,) if isinstance(models, nn.Module) else models
    factors = [scaled_by] * len(models) if isinstance(scaled_by, int | float) else scaled_by
    columns: dict[str, list] = {}
    for model, factor in zip(models, factors, strict=True):
        for name, value in _measured(model, input_ids, attention_mask, layer, factor, positions).items():
            columns.setdefault(name, []).append(value)
    signal = columns.pop("signal_to_noise")
    return StructureFigures(
        arm=arm,
        setting=setting,
        layer=layer,
        view="noise",
        n_positions=sum(columns.pop("n_positions")),
        signal_to_noise=() if None in signal else tuple(signal),
        coupling_levels=COUPLING_LEVELS,
        **{name: tuple(column) for name, column in columns.items()},
    )


@torch.inference_mode()
def _measured(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None, layer: int, scaled_by: float, positions: int
) -> dict[str, Any]:
    """Figures of one model, by column of the record."""
    if not scaled_by > 0:
        raise ArgumentError(
            f"scaled_by must be above 0, received {scaled_by!r}; pass 1 for the embeddings as they are."
        )
    length = input_ids.shape[1]
    if positions < 1 or length < 3:
        raise ArgumentError(
            f"Structure needs at least one position and sequences of three tokens, received {positions} positions and "
            f"{length} tokens; pass longer text."
        )
    seen: list[Tensor] = []

    def record(_block: nn.Module, args: tuple, kwargs: dict) -> None:
        seen[:] = [args[0] if args else kwargs["hidden_states"]]

    handles = [
        hook_embeddings(model, lambda x: x * scaled_by),
        decoder_blocks(model)[layer].register_forward_pre_hook(record, with_kwargs=True),
    ]
    try:
        with capture_attention(model, layers=(layer,)) as captured:
            model(input_ids=input_ids, attention_mask=attention_mask)
            state = captured.states(attention_mask)[layer]
    finally:
        for handle in handles:
            handle.remove()
    x = seen[0].float()
    real = torch.ones(x.shape[:2], dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    with full_precision(state.query):
        return _figures(state, x, real.to(x.device), positions)


def _figures(state: AttentionState, x: Tensor, real: Tensor, positions: int) -> dict[str, Any]:
    tokens = x[real].double()
    mean, power = tokens.mean(0), tokens.square().sum(-1).mean()
    spectrum = torch.linalg.eigvalsh((tokens - mean).T @ (tokens - mean)).clamp_min(0)
    share = spectrum / spectrum.sum().clamp_min(torch.finfo(torch.float64).tiny)
    places = torch.linspace(2, x.shape[1] - 1, min(positions, x.shape[1] - 2)).round().long().to(x.device)
    rows = places.expand(len(x), -1)
    margins = state_margins(state, positions=rows)
    kept = margins.rankable
    log_margin, sign = margins.log_abs_det[kept].double(), margins.sign[kept]
    if not len(log_margin):
        raise ArgumentError("Structure needs a real token at one of its positions, but all are padding; pass text.")
    finite = log_margin[log_margin.isfinite()]
    dense = torch.cat([JacobianBlocks(state).dense(rows[:, i : i + 1]) for i in range(rows.shape[1])], dim=1)[kept]
    eigenvalues = torch.linalg.eigvalsh(0.5 * (dense + dense.mT)).double().flatten()
    levels = torch.tensor(COUPLING_LEVELS, dtype=torch.float64, device=x.device)
    size = float(eigenvalues.abs().sum())
    return {
        "n_positions": int(kept.sum()),
        "embedding_rms": float((power / x.shape[-1]).sqrt()),
        "effective_rank": float(torch.special.entr(share).sum().exp()),
        "dispersion": float(1 - mean.square().sum() / power),
        "signal_to_noise": _signal_to_noise(state, x, real),
        "log_margin_mean": float(finite.mean()) if len(finite) else 0.0,
        "log_margin_min": float(finite.min()) if len(finite) else 0.0,
        "sigma_min_low": float(margins.sigma_min[kept].double().quantile(0.05)),
        "negative_fraction": float((sign < 0).double().mean()),
        "attractive_fraction": float(eigenvalues.clamp_min(0).sum()) / size if size else 0.5,
        "coupling_quantiles": tuple(torch.quantile(_at_most(eigenvalues), levels).tolist()),
    }


def _signal_to_noise(state: AttentionState, x: Tensor, real: Tensor) -> float | None:
    if state.output_norm is not None:
        return None
    heads = moments(state, slice(0, state.length), covariance=False).mean
    signal = heads[:, 0] if state.output is None else torch.einsum("hdr,bhtr->btd", state.output, heads)
    kept = real & (torch.arange(x.shape[1], device=x.device) >= 2)
    noise = (x - signal)[kept].double().square().sum()
    return float(signal[kept].double().square().sum() / noise) if noise > 0 else None


def _at_most(values: Tensor, count: int = 2**23) -> Tensor:
    """Evenly chosen among the sorted values, extremes included: torch's quantile takes no more than 16 million."""
    ordered = values.sort().values
    if len(ordered) <= count:
        return ordered
    return ordered[torch.linspace(0, len(ordered) - 1, count, dtype=torch.float64).round().long()]
