"""How robustness reports of earlier versions are read."""

__all__ = ["upgrade"]

from collections.abc import Iterator, Mapping
from typing import Any

from support_tokens.report.records.base import renamed

_NAMES = {
    "of": "condition",
    "against": "reference",
    "negative_share": "negative_fraction",
    "attractive_share": "attractive_fraction",
}
_OF_OTHERS = ("config", "versions", "perturbations")  # their keys are not ours to rename


def upgrade(record: Mapping[str, Any], version: int) -> dict[str, Any]:
    """A report of version 1 as one of version 2: other names, and a record an arm along the text."""
    assert version == 1, f"there is no version {version}"
    made = {key: value if key in _OF_OTHERS else renamed(value, _NAMES) for key, value in record.items()}
    if made.get("sentence") is not None:
        made["sentence"] = list(_records(made["sentence"]))
    else:
        made.pop("sentence", None)
    return made


def _records(sentence: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One record an arm; support tokens are no longer kept, since they follow from the margins."""
    notes = [] if sentence["source"] == "model" else [f"Margins of the {sentence['source']}, not of the model."]
    for trace in sentence["arms"]:
        columns = zip(trace["tokens"], trace["sign"], trace["log_abs_det"], trace["valid"], strict=True)
        tokens = [
            {"position": t, "id": None, "token": token, "sign": sign, "log_abs_det": margin, "rankable": valid}
            for t, (token, sign, margin, valid) in enumerate(columns)
        ]
        layer = {"layer": sentence["layer"], "view": sentence["view"], "tokens": tokens}
        yield {"model": trace["arm"], "layers": [layer], "notes": notes}
