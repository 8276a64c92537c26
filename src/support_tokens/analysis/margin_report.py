"""`analyze`, and the report that it returns."""

__all__ = ["MarginReport", "analyze"]

import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from support_tokens.errors import DataError
from support_tokens.files import write_bytes, write_text
from support_tokens.report.records import (
    LayerMargins,
    MarginChanges,
    MarginRecord,
    TokenMargin,
    compare_records,
)
from support_tokens.report.tokens import margins_fragment, margins_html, margins_png, margins_renderable, margins_svg

if TYPE_CHECKING:
    import pandas as pd

    from support_tokens.analysis.texts import Progress


@dataclass(frozen=True)
class MarginReport:
    """Margins of the tokens of texts, with methods to rank, compare, save and display them; needs no model.

    Args:
        record: The figures, as in the JSON.
    """

    record: MarginRecord

    @classmethod
    def from_json(cls, path: str | Path) -> "MarginReport":
        """Reads what `to_json` wrote.

        Raises:
            RunFolderError: The file cannot be read, or is of another kind or version.
        """
        return cls(MarginRecord.from_json(path))

    def select(self, layer: int | None = None, view: str | None = None, text: int = 0) -> LayerMargins:
        """The tokens of one text under one layer and view; the first of the report where None."""
        return self.record.select(layer, view, text)

    def support_tokens(
        self, k: int = 5, *, layer: int | None = None, view: str | None = None, text: int = 0
    ) -> tuple[TokenMargin, ...]:
        """The k tokens of smallest log margin, smallest first; fewer if the text has fewer rankable tokens.

        Args:
            k: At least 1.
            layer: Index of a block; None: the first of the report.
            view: `noise` or `block`; None: the first of the report.
            text: Index of the text.

        Raises:
            ArgumentError: k is below 1, or the report has no such layer, view or text.
        """
        return self.select(layer, view, text).support_tokens(k)

    def compare(self, other: "MarginReport", *, k: int = 5) -> MarginChanges:
        """Changes from this report to `other`; see `compare_records`."""
        return compare_records(self.record, other.record, k=k)

    def to_dataframe(self) -> "pd.DataFrame":
        """One row per text, layer, view and token; figures of heads are lists."""
        import pandas as pd

        rows = [
            {"text": entry.text, "name": self.record.name_of(entry.text), "layer": entry.layer, "view": entry.view}
            | asdict(token)
            for entry in self.record.layers
            for token in entry.tokens
        ]
        frame = pd.DataFrame(rows)
        return frame.assign(per_head=frame["per_head"].map(lambda heads: None if heads is None else list(heads)))

    def to_json(self, path: str | Path) -> None:
        """Writes the record to a JSON file, atomically.

        Raises:
            RunFolderError: The file cannot be written.
        """
        self.record.to_json(path)

    def to_parquet(self, path: str | Path) -> None:
        """Writes `to_dataframe()` to a Parquet file, atomically, with model and notes in its metadata.

        Raises:
            RunFolderError: The file cannot be written.
        """
        frame = self.to_dataframe()
        frame.attrs = {"model": self.record.model, "notes": list(self.record.notes), "complete": self.record.complete}
        file = io.BytesIO()
        frame.to_parquet(file, engine="pyarrow", index=False)
        write_bytes(path, file.getvalue())

    def to_html(self, path: str | Path) -> None:
        """Writes a self-contained HTML page with all views.

        Raises:
            RunFolderError: The file cannot be written.
        """
        write_text(path, margins_html(self.record))

    def to_png(self, path: str | Path, **which: Any) -> None:
        """Draws one layer, view and text (`layer`, `view`, `text`, `k`) as PNG."""
        write_bytes(path, margins_png(self.record, **which))

    def to_svg(self, path: str | Path, **which: Any) -> None:
        """Draws one layer, view and text (`layer`, `view`, `text`, `k`) as SVG."""
        write_text(path, margins_svg(self.record, **which))

    def _repr_html_(self) -> str:
        return margins_fragment(self.record)

    def __rich__(self) -> Any:
        return margins_renderable(self.record)

    def __repr__(self) -> str:
        record = self.record
        count = sum(text.tokens for text in record.texts) or len(record.layers[0].tokens)
        kinds = ", ".join(dict.fromkeys(f"layer {entry.layer} ({entry.view})" for entry in record.layers))
        return f"MarginReport({record.model!r}, {count} tokens, {kinds})"


def analyze(
    model: nn.Module,
    tokenizer: Any,
    text: str | Sequence[str] | Sequence[int] | Mapping[str, str | Sequence[int]],
    layers: Sequence[int] = (0,),
    view: str | Sequence[str] = "noise",
    *,
    window: int | None = None,
    overlap: int | None = None,
    batch_size: int = 4,
    skip: Sequence[str] = (),
    name: str | None = None,
    progress: "Progress | None" = None,
) -> MarginReport:
    r"""Margins of every token of a text in a model's own attention: $J_t = I \mp \partial\mu_t/\partial x_t$, exact.

    Args:
        model: A causal language model of transformers whose family is supported.
        tokenizer: Its tokenizer.
        text: A text, token ids, several texts, or texts by name.
        layers: Indices of blocks; negative ones count from the last.
        view: `noise` ($I - D_t$), `block` ($I + D_t$), or both as a sequence.
        window: Maximum number of tokens in one forward pass; None: the context of the model, 1024 at most. Longer
            texts are read in several windows, which the record lists.
        overlap: Number of tokens that a window repeats as context; None: a quarter of the window.
        batch_size: Number of windows in one forward pass; it changes no figure beyond rounding.
        skip: Figures not to compute, as in `analyze_texts`.
        name: Name of the model in the report; None: its `name_or_path`, or its class.
        progress: Called with the number of tokens done and the total.

    Returns:
        A `MarginReport`.

    Raises:
        ArgumentError: A layer does not exist, or an option is out of range.
        DataError: A text is empty.
        UnsupportedModelError: The attention of the model cannot be read exactly.
        NumericalError: A figure is not finite.

    Source:
        arXiv:2602.22271; the Jacobian of real models in the theory of this package, section 2.

    Example:
        >>> from support_tokens.models import character_tokenizer, build_small_gpt
        >>> tokenizer = character_tokenizer("abc ")
        >>> model = build_small_gpt(tokenizer, layers=1, heads=2, width=8, context=8)
        >>> report = analyze(model, tokenizer, "abba cab", name="tiny")
        >>> report
        MarginReport('tiny', 8 tokens, layer 0 (noise))
        >>> len(report.support_tokens(2))
        2
        >>> list(report.to_dataframe())[4:9]
        ['position', 'id', 'token', 'sign', 'log_abs_det']
    """
    # Here and not above: a report of an earlier analysis is read without transformers.
    from support_tokens.analysis.texts import analyze_texts

    record = analyze_texts(
        model,
        tokenizer,
        _by_name(text),
        layers,
        (view,) if isinstance(view, str) else tuple(view),
        window=window,
        overlap=overlap,
        batch_size=batch_size,
        skip=skip,
        name=name,
        progress=progress,
    )
    return MarginReport(record)


def _by_name(text: Any) -> Mapping[str, Any]:
    if isinstance(text, Mapping):
        return text
    if isinstance(text, str):
        return {"text": text}
    given = text.tolist() if hasattr(text, "tolist") else list(text)
    if not given:
        raise DataError("there is no text to analyze; pass one text or more.")
    if all(isinstance(item, int) for item in given):
        return {"tokens": given}
    if all(isinstance(item, str) for item in given):
        return {f"text {place}": item for place, item in enumerate(given, start=1)}
    return {f"tokens {place}": item for place, item in enumerate(given, start=1)}
