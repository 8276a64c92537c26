r"""Measurement of one model: nats and calibration of each held-out sequence under each perturbation."""

__all__ = ["EvaluationData", "Measurement", "expected_seconds", "measure"]

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from support_tokens.errors import ArgumentError
from support_tokens.models import evaluating, hook_embeddings
from support_tokens.report.records import CALIBRATION_BINS, DataRecord
from support_tokens.robustness.perturbations.base import Batch, Perturbation, Spelling, token_logits, token_nats
from support_tokens.robustness.perturbations.set import PerturbationSet, standard_perturbations


@dataclass(frozen=True, eq=False)
class EvaluationData:
    r"""Held-out sequences, the same for every arm.

    Args:
        input_ids: `(N, T)` token ids, padded on the right.
        attention_mask: `(N, T)`, 1 at tokens and 0 at padding; None: no padding.
        characters: How many characters each token stands for: `(N, T)`, or one number for all (1 for a character
            tokenizer). None: unknown, and figures are bits per token.
        spelling: Texts of the tokens, for typos; None: every token is one character.
        prefix: Special tokens at the beginning of each sequence, such as BOS. They are read and never predicted, and
            the first token after them is not predicted either, so the same tokens are scored with and without them.

    Raises:
        ArgumentError: A shape is wrong, padding is not on the right, or a sequence has nothing to predict.

    Example:
        >>> data = EvaluationData(torch.zeros(2, 5, dtype=torch.long), characters=1)
        >>> data.sequences, data.unit, data.predicted.tolist()
        (2, 'character', [4, 4])
    """

    input_ids: Tensor
    attention_mask: Tensor | None = None
    characters: Tensor | int | None = None
    spelling: Spelling | None = field(default=None, repr=False)
    prefix: int = 0

    def __post_init__(self) -> None:
        ids = self.input_ids
        if ids.ndim != 2 or ids.shape[0] < 1 or ids.shape[1] < 2 or ids.is_floating_point():
            raise ArgumentError(
                "Evaluation data must be integer token ids of shape (N, T) with at least one sequence of two tokens, "
                f"received shape {tuple(ids.shape)} and type {ids.dtype}; stack and pad the sequences."
            )
        for name, value in (("attention_mask", self.attention_mask), ("characters", self.characters)):
            if isinstance(value, Tensor) and value.shape != ids.shape:
                raise ArgumentError(
                    f"The {name} of evaluation data must have the shape of its token ids, {tuple(ids.shape)}, received "
                    f"{tuple(value.shape)}."
                )
        mask = self.mask
        if bool((mask[:, 1:] > mask[:, :-1]).any()):
            raise ArgumentError(
                "The attention mask of evaluation data must be ones followed by zeros (padding on the right), received "
                "a token after padding; use padding_side='right'."
            )
        if int(self.predicted.min()) < 1:
            raise ArgumentError(
                f"Sequence {int(self.predicted.argmin())} of the evaluation data must have at least two tokens after "
                "its prefix, received fewer, so nothing is predicted in it; leave it out."
            )

    @property
    def mask(self) -> Tensor:
        """`(N, T)`, int64: 1 at tokens, 0 at padding."""
        return torch.ones_like(self.input_ids) if self.attention_mask is None else self.attention_mask.long()

    @property
    def sequences(self) -> int:
        """N."""
        return self.input_ids.shape[0]

    @property
    def unit(self) -> str:
        """`character` where the characters of tokens are known, else `token`."""
        return "token" if self.characters is None else "character"

    @property
    def predicted(self) -> Tensor:
        """`(N,)` tokens that are predicted: all but the prefix, the first after it and the padding."""
        return self.mask[:, self.prefix + 1 :].sum(-1)

    @property
    def units(self) -> Tensor:
        """`(N,)` characters (or tokens, where characters are unknown) that are predicted."""
        each = 1 if self.characters is None else self.characters
        return (self.mask * each)[:, self.prefix + 1 :].sum(-1)

    def part(self, rows: slice) -> "EvaluationData":
        """Some of the sequences."""
        per_token = {
            name: value[rows]
            for name in ("input_ids", "attention_mask", "characters")
            if isinstance(value := getattr(self, name), Tensor)
        }
        return replace(self, **per_token)

    def record(self) -> DataRecord:
        """Sizes and checksum, for the report."""
        ids = torch.where(self.mask.bool(), self.input_ids, -1).long().cpu().contiguous()
        return DataRecord(
            sequences=self.sequences,
            length=self.input_ids.shape[1],
            tokens=int(self.predicted.sum()),
            characters=None if self.characters is None else int(self.units.sum()),
            checksum=hashlib.sha256(str(tuple(ids.shape)).encode() + ids.numpy().tobytes()).hexdigest(),
        )

    def batches(self, size: int) -> Iterator[Batch]:
        """The sequences in order, `size` at a time."""
        labels = torch.where(self.mask.bool(), self.input_ids, -100)
        labels[:, : self.prefix + 1] = -100
        units = self.mask * (1 if self.characters is None else self.characters)
        for indices in torch.arange(self.sequences).split(size):
            ids, mask = self.input_ids[indices], self.mask[indices]
            yield Batch(indices, ids, mask, labels[indices], units[indices], self.spelling, self.prefix)


@dataclass(frozen=True, eq=False)
class Measurement:
    r"""Nats of each sequence under each perturbation, for one model.

    Args:
        nats: By name of the perturbation, `(N,)` float64: sum over scored tokens of $-\log p$.
        embedding_rms: Root mean square of the clean embeddings entering the first block, over tokens and width.
        units: By name, `(N,)` float64: characters (or tokens) that are scored; a missing name has those of the
            clean data.
        tokens: By name, `(N,)` float64: tokens that are scored, likewise.
        gaps: By name, `(N, CALIBRATION_BINS)` float64: sums over the scored tokens of a bin of the probability of the
            likeliest token minus 1 where it is right; a missing name was not calibrated.
    """

    nats: Mapping[str, NDArray[np.float64]] = field(repr=False)
    embedding_rms: float
    units: Mapping[str, NDArray[np.float64]] = field(default_factory=dict, repr=False)
    tokens: Mapping[str, NDArray[np.float64]] = field(default_factory=dict, repr=False)
    gaps: Mapping[str, NDArray[np.float64]] = field(default_factory=dict, repr=False)

    def part(self, rows: slice) -> "Measurement":
        """The measurement of some of the sequences; `embedding_rms` stays that of all."""
        tables = (self.nats, self.units, self.tokens, self.gaps)
        nats, *others = ({name: value[rows] for name, value in table.items()} for table in tables)
        return Measurement(nats, self.embedding_rms, *others)


def measure(
    model: nn.Module,
    data: EvaluationData,
    perturbations: PerturbationSet | None = None,
    *,
    batch_size: int = 16,
    progress: Callable[[str], None] | None = None,
    whose: str = "the model",
) -> Measurement:
    r"""Measures one model on `data` under each perturbation.

    The model is in eval mode meanwhile; the modes of its modules are restored afterwards, also after an error.

    Args:
        model: A causal language model of transformers; `model(input_ids=..., attention_mask=...).logits`.
        data: Held-out sequences.
        perturbations: `standard_perturbations()` where None.
        batch_size: Sequences at a time; changes only speed and memory.
        progress: Called with the perturbation's name after each batch.
        whose: Name of the model in errors.

    Raises:
        ArgumentError: A loss is not finite, or a token id is outside of the vocabulary.
    """
    chosen = perturbations or standard_perturbations()
    if batch_size < 1:
        raise ArgumentError(f"batch_size must be at least 1, received {batch_size!r}; pass 16, the default.")
    found: dict[str, _Sums] = {}
    rms = math.nan
    with evaluating(model):
        _check_vocabulary(model, data, whose)
        for perturbation in chosen.items:  # clean is first, so the scale is known to the others
            if perturbation.kind == "clean":
                with _root_mean_square(model) as scale:
                    sums = _sums(model, data, perturbation, rms, batch_size, progress, scale)
                rms = scale.value
            else:
                sums = _sums(model, data, perturbation, rms, batch_size, progress)
            if not np.isfinite(sums.nats).all():
                where = int(np.flatnonzero(~np.isfinite(sums.nats))[0])
                raise ArgumentError(
                    f"The loss of {whose} under '{perturbation.name}' must be finite, received {sums.nats[where]} on "
                    f"sequence {where}; leave the model or the perturbation out, or evaluate in float32."
                )
            found[perturbation.name] = sums
    of = lambda what: {name: getattr(sums, what) for name, sums in found.items()}  # noqa: E731
    return Measurement(of("nats"), rms, of("units"), of("tokens"), of("gaps"))


def expected_seconds(
    model: nn.Module, data: EvaluationData, perturbations: PerturbationSet, *, batch_size: int = 16
) -> float:
    """Seconds that `measure` will take, from one clean batch and the passes of each perturbation."""
    with evaluating(model), torch.inference_mode():
        warm_up, batch = next(data.batches(1)), next(data.batches(batch_size))
        token_logits(model, warm_up)
        start = time.perf_counter()
        token_nats(token_logits(model, batch, masked=data.attention_mask is not None), batch).sum().item()
        seconds = (time.perf_counter() - start) / len(batch.indices)
    return seconds * data.sequences * sum(getattr(p, "passes", 1) for p in perturbations.items)


class _Scale:
    """Root mean square of embeddings over tokens and width, accumulated over batches."""

    def __init__(self) -> None:
        self.mask = torch.ones(0)
        self._squares, self._numbers = 0.0, 0

    def add(self, x: Tensor) -> None:
        mask = self.mask.to(x.device).bool()
        self._squares += float(x[mask].double().square().sum())
        self._numbers += int(mask.sum()) * x.shape[-1]

    @property
    def value(self) -> float:
        return math.sqrt(self._squares / self._numbers)


@contextmanager
def _root_mean_square(model: nn.Module) -> Iterator[_Scale]:
    scale = _Scale()
    handle = hook_embeddings(model, scale.add)
    try:
        yield scale
    finally:
        handle.remove()


def _check_vocabulary(model: nn.Module, data: EvaluationData, whose: str) -> None:
    table = model.get_input_embeddings().weight  # type: ignore[operator, union-attr]
    low, high = int(data.input_ids[data.mask.bool()].min()), int(data.input_ids[data.mask.bool()].max())
    if low < 0 or high >= len(table):
        raise ArgumentError(
            f"Token ids for {whose} must be in 0 ... {len(table) - 1}, received {low} ... {high}; "
            "tokenize the data with the tokenizer of this model."
        )


class _Sums(NamedTuple):
    """Sums over the scored tokens of each sequence, as `Measurement` describes them."""

    nats: NDArray[np.float64]
    units: NDArray[np.float64]
    tokens: NDArray[np.float64]
    gaps: NDArray[np.float64]


def _sums(
    model: nn.Module,
    data: EvaluationData,
    perturbation: Perturbation,
    rms: float,
    batch_size: int,
    progress: Callable[[str], None] | None,
    scale: _Scale | None = None,
) -> _Sums:
    parts = []
    with perturbation.applied(model, rms) as read:
        for clean in data.batches(batch_size):
            batch = read(clean)  # outside of inference mode, since a perturbation may need gradients
            if scale is not None:
                scale.mask = batch.attention_mask
            with torch.inference_mode():
                logits = token_logits(model, batch, masked=data.attention_mask is not None)
                nats = token_nats(logits, batch).double().sum(-1)
                scored, units = batch.scored, batch.units
                counted = scored.double() if units is None else (scored * units[:, 1:]).double()
                each = (nats, counted.sum(-1), scored.double().sum(-1), _gaps(logits, batch))
                parts.append([part.cpu().numpy() for part in each])
            if progress is not None:
                progress(perturbation.name)
    return _Sums(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def _gaps(logits: Tensor, batch: Batch) -> Tensor:
    """Confidence minus correctness, summed in bins of confidence, `(B, CALIBRATION_BINS)`."""
    scored, labels = batch.scored.to(logits.device), batch.labels[:, 1:].to(logits.device)
    log_confidence, chosen = (logits - logits.logsumexp(-1, keepdim=True)).max(-1)
    confidence = log_confidence.double().exp()
    # A model whose logits are not finite is refused by its loss.
    places = (confidence.nan_to_num() * CALIBRATION_BINS).long().clamp(0, CALIBRATION_BINS - 1)
    gaps = (confidence - (chosen == labels).double()).masked_fill(~scored, 0.0)
    return torch.zeros(len(gaps), CALIBRATION_BINS, dtype=torch.float64, device=gaps.device).scatter_add_(
        1, places, gaps
    )
