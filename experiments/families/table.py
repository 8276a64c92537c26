"""The outcome of the sweep as a table of the guide."""

__all__ = ["write_table"]

from pathlib import Path

from support_tokens.files import write_text

BEGIN, END = "<!-- families: begin (made by `make families`) -->", "<!-- families: end -->"


def write_table(types: dict[str, dict], page: Path) -> None:
    """Puts the table between the two markers of `page`.

    Args:
        types: Outcome by `model_type`, as in `result.json`.
        page: Markdown file that holds both markers.
    """
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"'{page}' must hold the lines {BEGIN!r} and {END!r}; put them where the table belongs.")
    write_text(page, f"{before}{BEGIN}\n\n{_table(types)}\n\n{END}{after}")


def _table(types: dict[str, dict]) -> str:
    by_status = {status: {n: t for n, t in types.items() if t["status"] == status} for status in _HEADS}
    lines = [f"| {_HEADS[status]} | {len(found)} of {len(types)} |" for status, found in by_status.items() if found]
    parts = ["\n".join(["| outcome | types |", "|---|---|", *lines])]
    right = ", ".join(f"`{name}`" for name in by_status["right"])
    worst = max((t["deviation"] for t in by_status["right"].values()), default=0.0)
    parts.append(f"Right, with a largest deviation of {worst:.0e}: {right}.")
    for status in ("refused", "not buildable", "wrong"):
        if by_status[status]:
            rows = [f"| `{name}` | {_reason(t['reason'])} |" for name, t in by_status[status].items()]
            parts.append("\n".join([f"| {status} | reason |", "|---|---|", *rows]))
    return "\n\n".join(parts)


_HEADS = {
    "right": "supported, and right",
    "refused": "refused with a reason",
    "not buildable": "no tiny model could be built",
    "wrong": "wrong",
}


def _reason(sentence: str) -> str:
    # What to do about it is the same list of families for each.
    return sentence.partition("; use one of ")[0].replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
