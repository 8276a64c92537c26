r"""A record or a comparison in a terminal: text coloured by margin, support tokens in brackets with their rank."""

__all__ = ["changes_renderable", "margins_renderable"]

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from support_tokens.report.format import number, signed, visible
from support_tokens.report.records.changes import LayerChanges, MarginChanges, TokenChange
from support_tokens.report.records.tokens import LayerMargins, MarginRecord, TokenMargin
from support_tokens.report.scale import BANDS, band, limits_of
from support_tokens.report.tokens.sanitized import breaks_after, in_table, in_text

# Steps of one hue from light to dark, with the ink that can be read on each.
_STYLES = ("on #fdf3ea", "on #fbe0c8", "on #f7c49c", "on #f0a56d", "on #e08442", "on #c25f12", "on #8f3d00")
_INKS = ("#1b1f24",) * 5 + ("#ffffff",) * 2
_BLOCKS = " ▁▂▃▄▅▆▇"
_MOST = 1200


def margins_renderable(record: MarginRecord, *, k: int = 5) -> RenderableType:
    """What rich prints of a record: each text by its margins, its support tokens, and all layers at a glance.

    Without colours the support tokens are still in brackets, and their table says the rest.
    """
    parts: list[RenderableType] = []
    for entry in record.layers:
        named = f"{visible(record.name_of(entry.text))} · layer {entry.layer} · {entry.view} view"
        parts += [Text(f"\n{named}", style="bold"), _legend(entry), _text(entry, k), _table(entry, k)]
    if len({(entry.text, entry.layer) for entry in record.layers}) > 1:
        parts += [Text("\nMean log margin by layer", style="bold"), _layers(record)]
    return Group(Text(f"Support tokens of {visible(record.model)}", style="bold"), *parts, *_notes(record.notes))


def changes_renderable(changes: MarginChanges) -> RenderableType:
    """What rich prints of a comparison: per layer, what became and what ceased to be a support token."""
    parts: list[RenderableType] = []
    for entry in changes.layers:
        differences = [change.difference for change in entry.tokens if change.difference is not None]
        mean = signed(sum(differences) / len(differences)) if differences else "none"
        named = f"text {entry.text + 1} · layer {entry.layer} · {entry.view} view"
        flips = sum(change.flipped for change in entry.tokens)
        said = f"  mean change {mean} nats over {len(differences)} tokens; {flips} changed the sign of the determinant"
        parts += [Text(f"\n{named}", style="bold"), Text(said, style="dim"), _change_table(entry)]
    head = f"From {visible(changes.before)} to {visible(changes.after)}, {changes.k} support tokens"
    return Group(Text(head, style="bold"), *parts, *_notes(changes.notes))


def _notes(notes: Sequence[str]) -> list[Text]:
    return [Text(visible(note), style="dim") for note in notes]


def _ranked(entry: LayerMargins) -> list[TokenMargin]:
    return [token for token in entry.tokens if token.valid and token.rankable]


def _legend(entry: LayerMargins) -> Text:
    high, low = limits_of(token.log_abs_det for token in _ranked(entry))
    steps = [("  ", style) for style in _STYLES]
    return Text.assemble("  log margin ", number(high), " ", *steps, " ", number(low), "   [token]¹ support token")


def _text(entry: LayerMargins, k: int) -> Text:
    limits = limits_of(token.log_abs_det for token in _ranked(entry))
    ranks = {token.position: rank for rank, token in enumerate(entry.support_tokens(k), start=1)}
    made = Text()
    for token in entry.tokens[:_MOST]:
        step = band(token.log_abs_det, limits)
        style = f"{_INKS[step]} {_STYLES[step]}" if token.valid and token.rankable else "dim"
        style += " underline" if token.sign < 0 else ""
        if token.position in ranks:
            made.append(f"[{in_table(token)}]{_raised(ranks[token.position])}", style=f"bold {style}")
        else:
            made.append(in_text(token), style=style)
        made.append("\n" * breaks_after(token))
    if len(entry.tokens) > _MOST:
        made.append(f" … {len(entry.tokens) - _MOST} more tokens: see the JSON or the page.", style="dim")
    return made


def _raised(rank: int) -> str:
    return "".join("⁰¹²³⁴⁵⁶⁷⁸⁹"[int(digit)] for digit in str(rank))


def _table(entry: LayerMargins, k: int) -> Table:
    table = _plain_table()
    for head in ("", "token", "at", "log margin", "σ_min", "sign", "gradient", "surprise"):
        table.add_column(head, justify="left" if head == "token" else "right", no_wrap=head != "token")
    for rank, token in enumerate(entry.support_tokens(k), start=1):
        table.add_row(
            str(rank),
            Text(in_table(token)),
            str(token.position),
            number(token.log_abs_det),
            _or_dash(token.sigma_min, 4),
            "−" if token.sign < 0 else "+" if token.sign else "0",
            "–" if token.gradient_share is None else f"{100 * token.gradient_share:.1f} %",
            _or_dash(token.surprisal_nats, 2),
        )
    return table


def _plain_table() -> Table:
    return Table(box=None, padding=(0, 1), header_style="dim")


def _or_dash(value: float | None, digits: int) -> str:
    return "–" if value is None else number(value, digits)


def _layers(record: MarginRecord) -> Table:
    table = _plain_table()
    for head in ("text", "layer", "view", "mean", "smallest", "negative", "along the text"):
        left = head in ("text", "view", "along the text")
        table.add_column(head, justify="left" if left else "right", no_wrap=head != "text")
    for entry in record.layers:
        ranked = _ranked(entry)
        values = [token.log_abs_det for token in ranked]
        if not values:
            continue
        negative = sum(token.sign < 0 for token in ranked)
        table.add_row(
            Text(visible(record.name_of(entry.text))),
            str(entry.layer),
            entry.view,
            number(sum(values) / len(values)),
            number(min(values)),
            str(negative),
            _spark(values),
        )
    return table


def _spark(values: Sequence[float], width: int = 24) -> str:
    """The smallest value of each stretch: a bar that is low is a margin that is low."""
    size = max(1, -(-len(values) // width))
    lowest = [min(values[begin : begin + size]) for begin in range(0, len(values), size)]
    limits = limits_of(lowest)
    return "".join(_BLOCKS[BANDS - band(value, limits)] for value in lowest)


def _change_table(entry: LayerChanges) -> Table:
    table = _plain_table()
    for head in ("", "token", "before", "after", "change"):
        table.add_column(head, justify="left" if head in ("", "token") else "right")
    for word, chosen in (("became", entry.became), ("ceased", entry.ceased)):
        for change in chosen:
            table.add_row(word, _name(change), _margin(change.before), _margin(change.after), _difference(change))
    if not table.row_count:
        table.add_row("the same", "support tokens as before", "", "", "")
    return table


def _name(change: TokenChange) -> Text:
    there = change.after if change.after is not None else change.before
    assert there is not None, "a change has a token before or after"
    was = f" (was {in_table(change.before)})" if change.kind == "replaced" and change.before is not None else ""
    return Text(f"{in_table(there)} at {there.position}{was}")


def _margin(token: TokenMargin | None) -> str:
    return "–" if token is None else number(token.log_abs_det)


def _difference(change: TokenChange) -> str:
    return change.kind if change.difference is None else signed(change.difference)
