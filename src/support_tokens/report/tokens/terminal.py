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
from support_tokens.report.tokens.marked import marked_tokens
from support_tokens.report.tokens.sanitized import in_table

# Steps of one hue from light to dark, with the ink that can be read on each.
_STYLES = ("on #fdf3ea", "on #fbe0c8", "on #f7c49c", "on #f0a56d", "on #e08442", "on #c25f12", "on #8f3d00")
_INKS = ("#1b1f24",) * 5 + ("#ffffff",) * 2
_BLOCKS = " ▁▂▃▄▅▆▇"
_MOST = 1200


def margins_renderable(record: MarginRecord, *, k: int = 5) -> RenderableType:
    """A record for rich: each text coloured by margin, its support tokens, and all layers at a glance.

    Support tokens are in brackets, so that they can be told without colours.
    """
    parts: list[RenderableType] = []
    for entry in record.layers:
        named = f"{visible(record.name_of(entry.text))} · layer {entry.layer} · {entry.view} view"
        parts += [Text(f"\n{named}", style="bold"), _legend(entry), _text(entry, k), _table(entry, k)]
    if len({(entry.text, entry.layer) for entry in record.layers}) > 1:
        parts += [Text("\nMean log margin by layer", style="bold"), _layers(record)]
    return Group(Text(f"Support tokens of {visible(record.model)}", style="bold"), *parts, *_notes(record.notes))


def changes_renderable(changes: MarginChanges) -> RenderableType:
    """A comparison for rich: per layer, which support tokens were gained and lost."""
    parts: list[RenderableType] = []
    for entry in changes.layers:
        differences = [change.difference for change in entry.tokens if change.difference is not None]
        mean = signed(sum(differences) / len(differences)) if differences else "none"
        named = f"text {entry.text + 1} · layer {entry.layer} · {entry.view} view"
        flips = sum(change.flipped for change in entry.tokens)
        said = f"  mean change {mean} nats over {len(differences)} tokens; {flips} changed the sign of the determinant"
        moved = sum(not changes.unchanged(change) for change in entry.tokens if change.difference is not None)
        said += f"; {moved or 'none'} by more than {number(changes.floor)} nats" if moved else "; practically unchanged"
        parts += [Text(f"\n{named}", style="bold"), Text(said, style="dim"), _change_table(changes, entry)]
    head = f"From {visible(changes.before)} to {visible(changes.after)}, {changes.k} support tokens"
    return Group(Text(head, style="bold"), *parts, *_notes(changes.notes))


def _notes(notes: Sequence[str]) -> list[Text]:
    return [Text(visible(note), style="dim") for note in notes]


def _legend(entry: LayerMargins) -> Text:
    high, low = limits_of(token.margin for token in entry.ranked)
    steps = [("  ", style) for style in _STYLES]
    return Text.assemble("  log margin ", number(high), " ", *steps, " ", number(low), "   [token]¹ support token")


def _text(entry: LayerMargins, k: int) -> Text:
    text = Text()
    for token in marked_tokens(entry, limits_of(token.margin for token in entry.ranked), k)[:_MOST]:
        style = "dim" if token.band is None else f"{_INKS[token.band]} {_STYLES[token.band]}"
        style += " underline" if token.negative else ""
        if token.rank:
            text.append(f"[{token.text.replace(' ', '␣')}]{_raised(token.rank)}", style=f"bold {style}")
        else:
            text.append(token.text, style=style)
        text.append("\n" * token.breaks)
    if len(entry.tokens) > _MOST:
        text.append(f" … {len(entry.tokens) - _MOST} more tokens: see the JSON or the page.", style="dim")
    return text


def _raised(rank: int) -> str:
    return "".join("⁰¹²³⁴⁵⁶⁷⁸⁹"[int(digit)] for digit in str(rank))


def _table(entry: LayerMargins, k: int) -> Table:
    table = _plain_table()
    for head in ("", "token", "at", "log margin", "σ_min", "sign", "gradient", "surprisal"):
        table.add_column(head, justify="left" if head == "token" else "right", no_wrap=head != "token")
    for rank, token in enumerate(entry.support_tokens(k), start=1):
        table.add_row(
            str(rank),
            Text(in_table(token)),
            str(token.position),
            number(token.margin),
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
        ranked = entry.ranked
        values = [token.margin for token in ranked]
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


def _change_table(changes: MarginChanges, entry: LayerChanges) -> Table:
    table = _plain_table()
    for head in ("", "token", "before", "after", "change"):
        table.add_column(head, justify="left" if head in ("", "token") else "right")
    for word, chosen in (("gained", entry.gained), ("lost", entry.lost)):
        for change in chosen:
            margins = _margin(change.before), _margin(change.after)
            table.add_row(word, _name(change), *margins, _difference(changes, change))
    if not table.row_count:
        table.add_row("the same", "support tokens as before", "", "", "")
    return table


def _name(change: TokenChange) -> Text:
    was = f" (was {in_table(change.before)})" if change.kind == "replaced" and change.before is not None else ""
    first = ", first positions" if change.first else ""
    return Text(f"{in_table(change.token)} at {change.token.position}{was}{first}")


def _margin(token: TokenMargin | None) -> str:
    return "–" if token is None else number(token.margin)


def _difference(changes: MarginChanges, change: TokenChange) -> str:
    if change.difference is None:
        return change.kind
    return "unchanged" if changes.unchanged(change) else signed(change.difference)
