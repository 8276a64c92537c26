r"""All figures of the tokens of one batch of windows, as lists of Python numbers."""

__all__ = ["FIGURES", "Measured", "check_figures", "measure_windows"]

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from support_tokens.errors import ArgumentError, NumericalError
from support_tokens.margins import AttentionState, JacobianBlocks, state_margins, view_sign
from support_tokens.margins.linalg import full_precision, safe_slogdet
from support_tokens.models import capture_attention
from support_tokens.report.records import Window

FIGURES = ("sigma_min", "gradient_share", "coupling_sign", "per_head", "surprisal_nats")
"""Figures beside sign and log|det|; each costs time, and none is needed for the others."""

_CHUNK_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Measured:
    r"""Figures of the new tokens of one window under one layer and view, one entry a token.

    Args:
        sign, log_abs_det, rankable: As in `Margins`.
        sigma_min: Or None.
        gradient_norm: $\lVert J_t^{-T} \rVert_F$, None where $J_t$ is singular; or None.
        coupling_sign: Or None.
        per_head: One tuple a token; or None.
    """

    sign: list[int]
    log_abs_det: list[float]
    rankable: list[bool]
    sigma_min: list[float] | None
    gradient_norm: list[float | None] | None
    coupling_sign: list[int] | None
    per_head: list[tuple[float, ...]] | None


@torch.no_grad()
def measure_windows(
    model: nn.Module,
    ids: Sequence[Sequence[int]],
    windows: Sequence[Window],
    layers: Sequence[int],
    views: Sequence[str],
    figures: Sequence[str],
    tick: Callable[[float], None] = lambda share: None,
) -> tuple[list[dict[tuple[int, str], Measured]], list[list[float | None] | None]]:
    """One forward pass over windows, padded on the right, and the figures of their new tokens.

    Args:
        model: In evaluation mode.
        ids: The ids of each window, from its `start` on.
        windows: The windows.
        layers: Indices of blocks.
        views: `noise` and `block`, or one of them.
        figures: Those of `FIGURES` that are wanted.
        tick: Called with the share of the work that is done, from 0 to 1.

    Returns:
        For each window its figures by layer and view, and its surprisals.

    Raises:
        NumericalError: A figure is not finite.
        UnsupportedModelError: The attention of the model cannot be read exactly.
    """
    device = next(model.parameters()).device
    longest = max(map(len, ids))
    input_ids = torch.zeros(len(ids), longest, dtype=torch.long)
    mask = torch.zeros_like(input_ids)
    for row, own in enumerate(ids):
        input_ids[row, : len(own)] = torch.tensor(own)
        mask[row, : len(own)] = 1
    input_ids, mask = input_ids.to(device), mask.to(device)
    with capture_attention(model, layers=layers) as captured:
        # Without padding no mask is passed: then each kernel is the one that a single text meets.
        given = None if bool(mask.all()) else mask
        logits = model(input_ids=input_ids, attention_mask=given, use_cache=False).logits
    states = captured.states(given)
    surprisals = [
        _surprisals(logits[row], input_ids[row], window) if "surprisal_nats" in figures else None
        for row, window in enumerate(windows)
    ]
    del logits
    counts = [window.stop - window.first for window in windows]
    # Only new tokens are measured; rows of a shorter window repeat its last one.
    positions = torch.tensor(
        [
            [min(window.first - window.start + i, window.stop - window.start - 1) for i in range(max(counts))]
            for window in windows
        ],
        device=device,
    )
    found: list[dict[tuple[int, str], Measured]] = [{} for _ in windows]
    for done, layer in enumerate(sorted(states)):
        parts_of = _of_state(
            states[layer], positions, views, figures, layer, lambda share, done=done: tick((done + share) / len(states))
        )
        for view, parts in parts_of.items():
            for row, count in enumerate(counts):
                found[row][layer, view] = _measured({name: part[row, :count] for name, part in parts.items()}, layer)
    return found, surprisals


def _of_state(
    state: AttentionState,
    positions: Tensor,
    views: Sequence[str],
    figures: Sequence[str],
    layer: int,
    tick: Callable[[float], None],
) -> dict[str, dict[str, Tensor]]:
    found: dict[str, dict[str, list[Tensor]]] = {view: {} for view in views}
    with full_precision(state.query):
        blocks = JacobianBlocks(state)
        identity = torch.eye(state.width, dtype=state.query.dtype, device=state.query.device)
        chunks = _chunks(state, positions)
        for place, rows in enumerate(chunks):
            tick(place / len(chunks))
            dense = blocks.dense(rows) if {"sigma_min", "gradient_share", "coupling_sign"} & set(figures) else None
            if dense is not None and not bool(dense.isfinite().all()):
                raise _not_finite("the Jacobian", layer)
            heads = blocks.per_head(rows) if "per_head" in figures else None
            coupling = _coupling_sign(dense) if dense is not None and "coupling_sign" in figures else None
            for view in views:
                sign = view_sign(view)
                margins = state_margins(state, view=view, positions=rows)
                made = {"sign": margins.sign, "log_abs_det": margins.log_abs_det, "rankable": margins.rankable}
                if dense is not None and {"sigma_min", "gradient_share"} & set(figures):
                    singular = torch.linalg.svdvals(identity + sign * dense)
                    made["sigma_min"] = singular[..., -1]
                    made["gradient_norm"] = singular.reciprocal().square().sum(-1).sqrt()
                if coupling is not None:
                    made["coupling_sign"] = coupling
                if heads is not None:
                    own = torch.eye(heads.shape[-1], dtype=heads.dtype, device=heads.device)
                    made["per_head"] = safe_slogdet(own + sign * heads).log_abs_det
                for name, value in made.items():
                    found[view].setdefault(name, []).append(value)
    wanted = {"gradient_norm" if name == "gradient_share" else name for name in figures}
    keep = {"sign", "log_abs_det", "rankable"} | wanted
    return {
        view: {name: torch.cat(parts, dim=1).cpu() for name, parts in made.items() if name in keep}
        for view, made in found.items()
    }


def _coupling_sign(dense: Tensor) -> Tensor:
    r"""Sign of the eigenvalue of largest modulus of the symmetric part; 0 where it is zero."""
    values = torch.linalg.eigvalsh((dense + dense.mT) / 2)
    low, high = values[..., 0], values[..., -1]
    return torch.where(-low > high, low, high).sign()


def _chunks(state: AttentionState, positions: Tensor) -> Sequence[Tensor]:
    size = max(1, _CHUNK_BYTES // (state.batch * state.width**2 * state.query.element_size()))
    return positions.split(size, dim=1)


def _measured(parts: dict[str, Tensor], layer: int) -> Measured:
    for name in ("log_abs_det", "sigma_min", "per_head"):
        if name in parts and not bool(parts[name].isfinite().all()):
            raise _not_finite(name, layer)
    sign = [int(s) for s in parts["sign"].tolist()]
    norms = parts.get("gradient_norm")
    return Measured(
        sign=sign,
        log_abs_det=parts["log_abs_det"].tolist(),
        rankable=parts["rankable"].tolist(),
        sigma_min=parts["sigma_min"].tolist() if "sigma_min" in parts else None,
        gradient_norm=None if norms is None else list(map(_norm, norms.tolist(), sign)),
        coupling_sign=[int(s) for s in parts["coupling_sign"].tolist()] if "coupling_sign" in parts else None,
        per_head=[tuple(row) for row in parts["per_head"].tolist()] if "per_head" in parts else None,
    )


def _norm(norm: float, sign: int) -> float | None:
    # The gradient does not exist at a singular matrix.
    return norm if sign and norm < float("inf") else None


def _not_finite(name: str, layer: int) -> NumericalError:
    return NumericalError(
        f"{name} of layer {layer} is not finite, where the model must give finite activations; load it in float32 and "
        "check its weights."
    )


def _surprisals(logits: Tensor, ids: Tensor, window: Window) -> list[float | None]:
    r"""$-\log p$ of each new token, nats; None where nothing stands before it."""
    first, stop = window.first - window.start, window.stop - window.start
    begin = max(first, 1)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    rows = logits[begin - 1 : stop - 1].to(dtype)
    taken = rows.gather(-1, ids[begin:stop].unsqueeze(-1)).squeeze(-1)
    values = (rows.logsumexp(-1) - taken).tolist()
    if not all(value < float("inf") for value in values):
        raise NumericalError(
            "the surprisal of a token must be finite, received infinity or NaN; load the model in "
            "and check its weights."
        )
    return [*[None] * (begin - first), *values]


def check_figures(without: Sequence[str]) -> tuple[str, ...]:
    """The figures that are left when some are left out.

    Raises:
        ArgumentError: There is no such figure.
    """
    unknown = [name for name in without if name not in FIGURES]
    if unknown:
        raise ArgumentError(
            f"without may name {', '.join(FIGURES)}, received {unknown[0]!r}; sign and log_abs_det are always there."
        )
    return tuple(name for name in FIGURES if name not in without)
