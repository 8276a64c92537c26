r"""Structure of a model: its embeddings, and the margins and coupling of the attention that reads them.

Robustness says how much a model loses; these figures say what changed inside of it. Margins depend on the size of the
embeddings, so arms are also compared with embeddings brought to one size (`scaled_by`).
"""

__all__ = ["COUPLING_LEVELS", "Structure", "measure_structure", "structure_figures"]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from support_tokens.errors import ArgumentError
from support_tokens.margins import AttentionState, JacobianBlocks, moments, state_margins
from support_tokens.margins.linalg import full_precision
from support_tokens.models import capture_attention, decoder_blocks, hook_embeddings
from support_tokens.report.records import StructureFigures

COUPLING_LEVELS = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
"""Quantiles at which the spectrum of the coupling is recorded."""


@dataclass(frozen=True)
class Structure:
    r"""Figures of one model on one text, over its real tokens.

    Args:
        n_positions: Positions whose margins and coupling were computed.
        embedding_rms: Root mean square of $x_t$ over tokens and width.
        effective_rank: $\exp H(p)$ of the eigenvalues $\lambda_i$ of the covariance of the embeddings, $p_i =
            \lambda_i / \sum_j \lambda_j$: from 1 to D, whatever their size.
        dispersion: $1 - |\mathbb{E} x|^2 / \mathbb{E} |x|^2$: 0 where all tokens are one, 1 where they have no common
            part.
        signal_to_noise: $\mathbb{E} |\mu_t|^2 / \mathbb{E} |x_t - \mu_t|^2$, with $\mu_t$ what attention adds; None
            where a norm stands behind attention.
        log_margin_mean: Mean $\log|\det J_t|$ over rankable positions with $J_t$ regular, in nats.
        log_margin_min: Smallest one.
        sigma_min_low: 5 % quantile of $\sigma_{\min}(J_t)$.
        negative_share: Share of positions with $\det J_t < 0$.
        attractive_share: Sum of the positive eigenvalues of the symmetric part of the coupling $I - J_t$, over the sum
            of the sizes of all.
        coupling: Quantiles of these eigenvalues at `COUPLING_LEVELS`.
    """

    n_positions: int
    embedding_rms: float
    effective_rank: float
    dispersion: float
    signal_to_noise: float | None
    log_margin_mean: float
    log_margin_min: float
    sigma_min_low: float
    negative_share: float
    attractive_share: float
    coupling: tuple[float, ...]


@torch.inference_mode()
def measure_structure(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    layer: int = 0,
    scaled_by: float = 1.0,
    positions: int = 16,
) -> Structure:
    r"""Structure of block `layer` of a model in its noise view, $J_t = I - \partial\mu_t/\partial x_t$.

    Args:
        model: A causal language model of transformers whose attention can be read, in eval mode.
        input_ids: `(N, T)` token ids.
        attention_mask: `(N, T)`, 1 at tokens; None: all are.
        layer: Block.
        scaled_by: Factor of the embeddings that enter the first block: figures of the same model with embeddings of
            another size.
        positions: Positions of each sequence that margins and coupling are computed at, spread evenly from the third to
            the last; all others only enter the figures of the embeddings.

    Returns:
        The figures.

    Raises:
        ArgumentError: A factor that is not positive, or no position to look at.
        UnsupportedModelError: The attention of the model cannot be read.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=8)).eval()
        >>> found = measure_structure(model, torch.arange(16).reshape(2, 8) % 11, positions=4)
        >>> found.n_positions, 1 <= found.effective_rank <= 8
        (8, True)
    """
    if not scaled_by > 0:
        raise ArgumentError(f"The factor of the embeddings must be above 0, not {scaled_by!r}; pass 1 for their own.")
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


def structure_figures(
    structures: Mapping[str, Sequence[Structure]], setting: str, *, layer: int = 0, view: str = "noise"
) -> tuple[StructureFigures, ...]:
    """Structures of arms, one a seed, as the records of a report.

    Args:
        structures: By arm.
        setting: On which embeddings: `own` or `scaled to the baseline`, say.
        layer: Block.
        view: `noise`.
    """
    made = []
    for arm, of_arm in structures.items():
        column = lambda name, of_arm=of_arm: tuple(getattr(s, name) for s in of_arm)  # noqa: E731
        known = all(s.signal_to_noise is not None for s in of_arm)
        made.append(
            StructureFigures(
                arm=arm,
                setting=setting,
                layer=layer,
                view=view,
                n_positions=sum(column("n_positions")),
                embedding_rms=column("embedding_rms"),
                effective_rank=column("effective_rank"),
                dispersion=column("dispersion"),
                signal_to_noise=column("signal_to_noise") if known else (),
                log_margin_mean=column("log_margin_mean"),
                log_margin_min=column("log_margin_min"),
                sigma_min_low=column("sigma_min_low"),
                negative_share=column("negative_share"),
                attractive_share=column("attractive_share"),
                coupling_levels=COUPLING_LEVELS,
                coupling_quantiles=column("coupling"),
            )
        )
    return tuple(made)


def _figures(state: AttentionState, x: Tensor, real: Tensor, positions: int) -> Structure:
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
    return Structure(
        n_positions=int(kept.sum()),
        embedding_rms=float((power / x.shape[-1]).sqrt()),
        effective_rank=float(torch.special.entr(share).sum().exp()),
        dispersion=float(1 - mean.square().sum() / power),
        signal_to_noise=_signal_to_noise(state, x, real),
        log_margin_mean=float(finite.mean()) if len(finite) else 0.0,
        log_margin_min=float(finite.min()) if len(finite) else 0.0,
        sigma_min_low=float(margins.sigma_min[kept].double().quantile(0.05)),
        negative_share=float((sign < 0).double().mean()),
        attractive_share=float(eigenvalues.clamp_min(0).sum()) / size if size else 0.5,
        coupling=tuple(torch.quantile(_at_most(eigenvalues), levels).tolist()),
    )


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
