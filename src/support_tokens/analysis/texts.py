"""Analysis of texts in batches of windows, and the record of the result."""

__all__ = ["analyze_texts"]

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from support_tokens.analysis.figures import Measured, check_figures, measure_windows
from support_tokens.analysis.tokens import TokenText, token_texts
from support_tokens.analysis.windows import default_overlap, model_window, windows_of
from support_tokens.errors import ArgumentError, DataError
from support_tokens.files import versions
from support_tokens.margins import view_sign
from support_tokens.models import capture_attention, evaluating, in_turn
from support_tokens.report.records import AnalyzedText, LayerMargins, MarginRecord, TokenMargin, Window

Progress = Callable[[int, int], None]
_Figures = tuple[dict[tuple[int, str], Measured], "list[float | None] | None"]


def analyze_texts(
    model: nn.Module,
    tokenizer: Any,
    texts: Mapping[str, str | Sequence[int]],
    layers: Sequence[int] = (0,),
    views: Sequence[str] = ("noise",),
    *,
    window: int | None = None,
    overlap: int | None = None,
    batch_size: int = 4,
    skip: Sequence[str] = (),
    name: str | None = None,
    progress: Progress | None = None,
) -> MarginRecord:
    r"""Margins of every token of some texts.

    A text longer than a window is read in several windows, which the record lists; each repeats `overlap` tokens as
    context. Windows are padded on the right and batched; batching changes no figure beyond rounding (1e-10 relative in
    float64). KeyboardInterrupt returns the windows finished so far, with `complete` False; it is raised if there are
    none.

    Args:
        model: A causal language model of a supported family; run in evaluation mode, and left in the mode it was in.
        tokenizer: Its tokenizer.
        texts: Text, or token ids, by name.
        layers: Indices of blocks; negative ones count from the last.
        views: `noise`, `block`, or both.
        window: Maximum number of tokens in one forward pass; None: the context of the model, 1024 at most.
        overlap: Number of tokens repeated as context; None: a quarter of the window.
        batch_size: Number of windows in one forward pass.
        skip: Figures not to compute: `sigma_min`, `gradient_share`, `coupling_sign`, `per_head`,
            `surprisal_nats`; the first three need the D x D matrix of every token, which is slow in wide models.
        name: Name of the model in the record; None: its `name_or_path`, or its class.
        progress: Called with the number of tokens done and the total.

    Raises:
        ArgumentError: A layer does not exist, or an option is out of range.
        DataError: A text is empty, or has ids outside the vocabulary.
        UnsupportedModelError: The attention of the model cannot be read exactly.
        NumericalError: A figure is not finite.

    Example:
        >>> from support_tokens.models import character_tokenizer, build_small_gpt
        >>> tokenizer = character_tokenizer("abc ")
        >>> model = build_small_gpt(tokenizer, layers=1, heads=2, width=8, context=8)
        >>> record = analyze_texts(model, tokenizer, {"one": "abba", "two": "cab"})
        >>> [(entry.text, len(entry.tokens)) for entry in record.layers]
        [(0, 4), (1, 3)]
    """
    figures = check_figures(skip)
    for view in views:
        view_sign(view)
    if not views or len(set(views)) < len(views):
        raise ArgumentError(
            f"views must name 'noise', 'block' or both, each once, received {tuple(views)}; pass ('noise',), for "
            "example."
        )
    if batch_size < 1:
        raise ArgumentError(f"batch_size must be at least 1, received {batch_size}; 1 needs the least memory.")
    if not texts:
        raise DataError("there is no text to analyze; pass one text or more.")
    with in_turn(model), capture_attention(model, layers):
        pass  # raises for a wrong layer or model before any work
    window = model_window(model, window)
    overlap = default_overlap(window) if overlap is None else overlap
    ids = {label: _ids(model, tokenizer, label, text) for label, text in texts.items()}
    jobs = [(label, own) for label, tokens in ids.items() for own in windows_of(len(tokens), window, overlap)]
    with in_turn(model), evaluating(model):
        finished, complete = _run(model, ids, jobs, layers, views, figures, batch_size, progress)
    analyzed, entries = [], []
    for label in ids:
        mine = [(own, made) for (of, own), made in zip(jobs, finished, strict=False) if of == label]
        if not mine:
            break
        spans = tuple(own for own, _ in mine)
        count = spans[-1].stop
        given = texts[label]
        shown = token_texts(tokenizer, ids[label][:count], given if isinstance(given, str) else None)
        content = given if isinstance(given, str) else "".join(token.token for token in shown)
        entries += _entries(len(analyzed), ids[label], shown, [made for _, made in mine])
        analyzed.append(AnalyzedText(label, content, count, spans))
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return MarginRecord(
        model=name or getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__,
        layers=tuple(entries),
        texts=tuple(analyzed),
        window=window,
        overlap=overlap,
        dtype=dtype if dtype == "float64" else "float32",
        complete=complete,
        notes=_notes(analyzed, len(ids), figures, window, overlap, complete, dtype),
        versions=versions(),
    )


def _run(
    model: nn.Module, ids: Mapping[str, list[int]], jobs: Sequence[tuple[str, Window]], layers, views, figures,
    batch_size: int, progress: Progress | None,
) -> tuple[list[_Figures], bool]:  # fmt: skip
    """The figures of the windows in order, and whether all windows are done."""
    total = sum(map(len, ids.values()))
    finished: list[_Figures] = []
    try:
        for begin in range(0, len(jobs), batch_size):
            done = sum(own.stop - own.first for _, own in jobs[:begin])
            batch = jobs[begin : begin + batch_size]
            tokens = [ids[label][own.start : own.stop] for label, own in batch]
            windows = [own for _, own in batch]
            new = sum(own.stop - own.first for own in windows)

            def tick(fraction: float, done: int = done, new: int = new) -> None:
                if progress is not None:
                    progress(done + int(fraction * new), total)

            finished += zip(*measure_windows(model, tokens, windows, layers, views, figures, tick), strict=True)
    except KeyboardInterrupt:
        if not finished:
            raise
    if progress is not None:
        progress(sum(own.stop - own.first for _, own in jobs[: len(finished)]), total)
    return finished, len(finished) == len(jobs)


def _ids(model: nn.Module, tokenizer: Any, label: str, text: str | Sequence[int]) -> list[int]:
    if isinstance(text, str) and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise DataError(f"{label} holds half a surrogate pair, which is not a character; read the text as UTF-8.")
    # verbose=False: a text longer than the context is not an error, since windows read it.
    ids = tokenizer(text, verbose=False)["input_ids"] if isinstance(text, str) else [int(token) for token in text]
    if not ids:
        raise DataError(f"{label} has no tokens, and one or more are required; pass a text that is not empty.")
    size = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator,union-attr]
    if not 0 <= min(ids) <= max(ids) < size:
        raise DataError(
            f"{label} has token ids from {min(ids)} to {max(ids)}, and the vocabulary of the model is 0 to {size - 1}; "
            "use the tokenizer of this model."
        )
    return ids


def _entries(
    place: int, ids: Sequence[int], shown: Sequence[TokenText], made: Sequence[_Figures]
) -> list[LayerMargins]:
    surprisals = [s for _, own in made for s in (own or [])] or [None] * len(shown)
    entries = []
    for layer, view in made[0][0]:
        parts = [figures[layer, view] for figures, _ in made]
        join = lambda name, parts=parts: [value for part in parts for value in getattr(part, name) or ()]  # noqa: E731
        sign, margin, rankable = join("sign"), join("log_abs_det"), join("rankable")
        empty = [None] * len(sign)
        sigma, coupling, heads = (join(n) or empty for n in ("sigma_min", "coupling_sign", "per_head"))
        shares = _shares(join("gradient_norm"), rankable) or empty
        tokens = tuple(
            TokenMargin(
                position=t, id=ids[t], token=shown[t].token, sign=sign[t], log_abs_det=margin[t], sigma_min=sigma[t],
                rankable=rankable[t], sanitized=shown[t].shown, surprisal_nats=surprisals[t], gradient_share=shares[t],
                coupling_sign=coupling[t], per_head=heads[t],
            )
            for t in range(len(sign))
        )  # fmt: skip
        entries.append(LayerMargins(layer, view, tokens, place))
    return entries


def _shares(norms: Sequence[float | None], rankable: Sequence[bool]) -> list[float | None]:
    counted = [norm if ranked else None for norm, ranked in zip(norms, rankable, strict=False)]
    total = math.fsum(norm for norm in counted if norm is not None)
    return [None if norm is None or not total else norm / total for norm in counted]


def _notes(analyzed: Sequence[AnalyzedText], asked: int, figures, window, overlap, complete, dtype) -> tuple[str, ...]:
    notes = []
    if any(len(text.windows) > 1 for text in analyzed):
        notes.append(
            f"Read in windows of at most {window} tokens: at the start of each window after the first, a token sees "
            f"{overlap} tokens before it, not all of them."
        )
    if not complete:
        notes.append(
            f"The analysis was interrupted: {len(analyzed)} of {asked} texts are here, and the last may be incomplete."
        )
    if "per_head" in figures:
        notes.append("Figures of single heads are a diagnostic: their sum is not the log margin.")
    if dtype not in ("float32", "float64"):
        notes.append(f"The model ran in {dtype}: its activations are rounded to that, the linear algebra is float32.")
    return tuple(notes)
