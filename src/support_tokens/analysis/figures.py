"""Figures of the tokens of one batch of windows, as lists of Python numbers."""

__all__ = ["FIGURES", "Measured", "check_figures", "measure_windows"]

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from support_tokens.errors import ArgumentError, NumericalError
from support_tokens.margins import rankable_positions
from support_tokens.models import MarginReader, capture_attention, decoder_blocks, text_inputs
from support_tokens.report.records import Window

FIGURES = ("sigma_min", "gradient_share", "coupling_sign", "per_head", "surprisal_nats")
"""Figures beyond sign and log|det|; each costs time, and any may be skipped."""


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
    tick: Callable[[float], None] = lambda fraction: None,
) -> tuple[list[dict[tuple[int, str], Measured]], list[list[float | None] | None]]:
    """One forward pass over windows, padded on the right, and the figures of their new tokens.

    Args:
        model: In evaluation mode.
        ids: The ids of each window, from its `start` on.
        windows: The windows.
        layers: Indices of blocks.
        views: `noise` and `block`, or one of them.
        figures: Names of `FIGURES`.
        tick: Called with the fraction of the work that is done, from 0 to 1.

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
    inputs = text_inputs(model, input_ids, mask)
    surprisals: list[list[float | None] | None] = [None for _ in windows]
    with capture_attention(model, layers=layers) as captured:
        if "surprisal_nats" in figures:
            logits = model(**inputs).logits
            surprisals = [_surprisals(logits[row], input_ids[row], window) for row, window in enumerate(windows)]
            del logits
        else:
            _run_blocks(model, max(captured.layers), inputs)
    states = captured.states(inputs["attention_mask"])
    counts = [window.stop - window.first for window in windows]
    # Only new tokens are read; a shorter window repeats its last position.
    positions = torch.tensor(
        [
            [min(window.first - window.start + i, window.stop - window.start - 1) for i in range(max(counts))]
            for window in windows
        ],
        device=device,
    )
    names = {"gradient_norm" if name == "gradient_share" else name for name in figures}
    reader = MarginReader(names | {"sign", "log_abs_det"}, views)
    found: list[dict[tuple[int, str], Measured]] = [{} for _ in windows]
    for done, (layer, state) in enumerate(sorted(states.items())):
        by_view = reader(layer, state, positions, lambda part, done=done: tick((done + part) / len(states)))
        rankable = rankable_positions(state).gather(1, positions)
        for view, parts in by_view.items():
            parts = {name: part.cpu() for name, part in (parts | {"rankable": rankable}).items()}
            for row, count in enumerate(counts):
                found[row][layer, view] = _measured({name: part[row, :count] for name, part in parts.items()}, layer)
    return found, surprisals


class _Reached(Exception):
    """The deepest block that is read has run."""


def _run_blocks(model: nn.Module, deepest: int, inputs: Mapping[str, Any]) -> None:
    """A forward pass up to a block and no further: what comes after it changes no margin."""

    def stop(*_: object) -> None:
        raise _Reached

    handle = decoder_blocks(model)[deepest].register_forward_hook(stop)
    try:
        model(**inputs)
    except _Reached:
        pass
    finally:
        handle.remove()


def _measured(parts: dict[str, Tensor], layer: int) -> Measured:
    for name in ("log_abs_det", "sigma_min", "coupling_sign", "per_head"):
        if name in parts and not bool(parts[name].isfinite().all()):
            raise NumericalError(
                f"{name} of layer {layer} must be finite, received infinity or NaN; load the model in float32 and "
                "check its weights."
            )
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
    # A singular matrix has no gradient.
    return norm if sign and norm < float("inf") else None


def _surprisals(logits: Tensor, ids: Tensor, window: Window) -> list[float | None]:
    r"""$-\log p$ of each new token in nats; None without a token before it."""
    first, stop = window.first - window.start, window.stop - window.start
    begin = max(first, 1)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    rows = logits[begin - 1 : stop - 1].to(dtype)
    taken = rows.gather(-1, ids[begin:stop].unsqueeze(-1)).squeeze(-1)
    values = (rows.logsumexp(-1) - taken).tolist()
    if not all(value < float("inf") for value in values):
        raise NumericalError(
            "the surprisal of a token must be finite, received infinity or NaN; load the model in float32 and check "
            "its weights."
        )
    return [*[None] * (begin - first), *values]


def check_figures(skip: Sequence[str]) -> tuple[str, ...]:
    """Names of the figures that remain after `skip`.

    Raises:
        ArgumentError: There is no such figure.
    """
    unknown = [name for name in skip if name not in FIGURES]
    if unknown:
        raise ArgumentError(
            f"skip may name {', '.join(FIGURES)}, received {unknown[0]!r}; sign and log_abs_det cannot be skipped."
        )
    return tuple(name for name in FIGURES if name not in skip)
