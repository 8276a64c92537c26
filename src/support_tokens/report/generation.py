"""Views of generated text: each token coloured by a signal of its uncertainty, and all signals as a table."""

__all__ = ["generation_html", "generation_table", "signal_limits", "signal_value"]

from collections.abc import Iterable
from typing import TYPE_CHECKING

from markupsafe import Markup

from support_tokens.report.format import number, visible
from support_tokens.report.records.generation import GeneratedToken, Generation, GenerationRecord
from support_tokens.report.scale import band, limits_of

if TYPE_CHECKING:
    from rich.table import Table

_ALPHAS = (0.0, 0.12, 0.22, 0.33, 0.45, 0.58, 0.72)
_FIXED = {"TokenEntropy": (0.0, 4.0)}
_STYLE = """
:root { color-scheme: light dark; --line: #8886; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; font: 1rem/1.5 system-ui, sans-serif; }
.text { font-family: ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.9; }
.prompt { opacity: .65; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; } td, th { padding: .1rem .6rem; text-align: right; }
td:first-child, th:first-child { text-align: left; } tr { border-bottom: 1px solid var(--line); }
""" + "".join(f".b{step} {{ background: rgba(213, 94, 0, {alpha}); }} " for step, alpha in enumerate(_ALPHAS))


def signal_value(token: GeneratedToken, name: str) -> float | None:
    """A signal of a token, in the first layer that has it.

    Example:
        >>> signal_value(GeneratedToken(0, "a", {"NegativeLogMargin (layer=1)": 2.0}), "NegativeLogMargin")
        2.0
    """
    return next((value for key, value in token.signals.items() if key.partition(" (")[0] == name), None)


def signal_limits(name: str, values: Iterable[float]) -> tuple[float, float]:
    """Ends of the colour scale, most certain first: 0 to 4 nats of entropy, else quantiles of the values.

    Example:
        >>> signal_limits("TokenEntropy", [1.0])
        (0.0, 4.0)
    """
    if name in _FIXED:
        return _FIXED[name]
    high, low = limits_of(-value for value in values)
    return -high, -low


def generation_table(generation: Generation) -> "Table":
    """One row a token with its signals, for the terminal."""
    from rich.table import Table
    from rich.text import Text

    names = _signals(generation)
    table = Table("token", *names)
    for token in generation.tokens:
        table.add_row(Text(_token(token)), *(_figure(token.signals.get(name)) for name in names))
    return table


def generation_html(record: GenerationRecord, color: str = "TokenEntropy") -> str:
    """A page that needs no script and no network: texts coloured by a signal, and their tables.

    Args:
        record: What was generated.
        color: Signal that colours the tokens.

    Example:
        >>> token = GeneratedToken(0, "<b>", {"TokenEntropy": 4.0})
        >>> page = generation_html(GenerationRecord("m", (Generation("a", 1, "<b>", (token,), "length", "Done."),)))
        >>> '<span class="b6" title="TokenEntropy 4.000">&lt;b&gt;</span>' in page
        True
    """
    sections = Markup("").join(_section(generation, color) for generation in record.generations)
    return str(
        Markup(
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
            '<meta name="viewport" content="width=device-width, initial-scale=1"><title>{} · generated text</title>'
            "<style>{}</style></head><body><h1>{}</h1>{}</body></html>\n"
        ).format(visible(record.model), Markup(_STYLE), visible(record.model), sections)
    )


def _section(generation: Generation, color: str) -> Markup:
    values = [signal_value(token, color) for token in generation.tokens]
    limits = signal_limits(color, [value for value in values if value is not None])
    spans = Markup("").join(
        Markup('<span class="b{}" title="{}">{}</span>').format(
            0 if value is None else _band(value, limits), f"{color} {_figure(value)}", _lines(token.text)
        )
        for token, value in zip(generation.tokens, values, strict=True)
    )
    names = _signals(generation)
    rows = Markup("").join(
        Markup("<tr><td><bdi>{}</bdi></td>{}</tr>").format(
            _token(token),
            Markup("").join(Markup("<td>{}</td>").format(_figure(token.signals.get(name))) for name in names),
        )
        for token in generation.tokens
    )
    steps = Markup("").join(
        Markup('<span class="b{}">&nbsp;&nbsp;</span>').format(step) for step in range(len(_ALPHAS))
    )
    return Markup(
        '<section><p>{}: {} {} {}</p><p class="text" dir="auto"><span class="prompt">{}</span>{}</p><p>{}</p>'
        '<details><summary>All signals</summary><div class="scroll"><table><thead><tr><th>token</th>{}</tr></thead>'
        "<tbody>{}</tbody></table></div></details></section>"
    ).format(
        color, number(limits[0]), steps, number(limits[1]), _lines(generation.prompt), spans, generation.sentence,
        Markup("").join(Markup("<th>{}</th>").format(name) for name in names), rows,
    )  # fmt: skip


def _band(value: float, limits: tuple[float, float]) -> int:
    return band(-value, (-limits[0], -limits[1]))


def _lines(text: str) -> str:
    """A text with its line breaks, and nothing else that acts."""
    return "\n".join(visible(line) if line else "" for line in text.split("\n"))


def _token(token: GeneratedToken) -> str:
    return visible(token.text).replace(" ", "␣") if token.text else f"id {token.id}"


def _figure(value: float | None) -> str:
    return "–" if value is None else number(value)


def _signals(generation: Generation) -> list[str]:
    return list(dict.fromkeys(name for token in generation.tokens for name in token.signals))
