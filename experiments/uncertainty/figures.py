"""Tables and curves of `result.json`: `python experiments/uncertainty/figures.py` makes them again, without a model."""

from pathlib import Path

import matplotlib

from support_tokens.files import read_json, write_text

matplotlib.use("agg")
import matplotlib.pyplot as plt

CONDITIONS = {"test": "clean text", "typos": "typos", "other": "other corpus"}
COLOURS = ("#3b5b92", "#b5482a", "#5a8f4e")
WORDS = {
    "auroc": "AUROC",
    "prediction_rejection_ratio": "PRR",
    "risk_coverage_area": "AURC",
    "calibration_error": "ECE",
}


def number(estimate: dict, digits: int = 3, sign: str = "") -> str:
    """Value and interval."""
    if estimate["low"] is None:
        return f"{estimate['value']:{sign}.{digits}f}"
    low, high = (f"{estimate[end]:{sign}.{digits}f}" for end in ("low", "high"))
    return f"{estimate['value']:{sign}.{digits}f} [{low}, {high}]"


def rows(head: list[str], body: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def of_set(found: dict) -> str:
    parts = [f"\n## {found['model']}, {CONDITIONS[found['condition']]}\n"]
    for unit in ("token", "window"):
        part = found[unit]
        parts.append(
            f"\nBy {unit}: {part['sequences']} windows, {part['predictions']} predictions, {len(found['seeds'])} "
            f"seed(s), {100 * part['error_rate']:.1f} % in error.\n\n"
        )
        gains = {row["name"]: row for row in part["gain_beside_entropy"]}
        body = []
        for row in part["alone"]:
            gain = gains.get(row["name"])
            beside = ["", "", ""]
            if gain is not None:
                beside = [
                    number(gain["auroc"], 4, "+"),
                    number(gain["prediction_rejection_ratio"], 4, "+"),
                    number(gain["calibration_error"], 4, "+"),
                ]
            body.append([row["name"], *(number(row[figure]) for figure in WORDS), *beside])
        head = ["signal", *WORDS.values(), "AUROC beside entropy", "PRR beside entropy", "ECE beside entropy"]
        parts.append(rows(head, body))
        if part["gain_beside_entropy_and_position"]:
            body = [[r["name"], number(r["auroc"], 4, "+")] for r in part["gain_beside_entropy_and_position"]]
            parts.append("\n" + rows(["margin beside entropy and position", "AUROC"], body))
    body = [
        [
            f"{row['kind']} {row['asked']:g}",
            row["signal"],
            f"{row['coverage']:.3f}",
            f"{row['error_share']:.3f}",
            "none answered" if row["risk"] is None else f"{row['risk']:.3f}",
            f"{row['abstained']} of {row['seeds']}",
        ]
        for row in found["thresholds"]
    ]
    head = ["threshold, calibrated on clean validation text", "signal", "coverage", "error share", "risk", "abstains"]
    return "".join([*parts, "\n", rows(head, body)])


def of_latent(found: dict) -> str:
    parts = [f"\n## {found['model']}\n\n{found['sequences']} windows, {found['seeds']} seed(s).\n"]
    for condition, ways in found["conditions"].items():
        parts.append(f"\n{CONDITIONS[condition].capitalize()}:\n\n")
        body = []
        for way in ways:
            less = way.get("minus_temperature")
            chosen = found["chosen"].get(way["name"])
            body.append(
                [
                    way["name"],
                    "" if chosen is None else ", ".join(f"{value:.3g}" for value in chosen),
                    number(way["nats"]),
                    number(way["calibration_error"]),
                    f"{100 * way['accuracy']:.2f} %",
                    number(less["nats"], 4, "+") if less else "",
                    number(less["calibration_error"], 4, "+") if less else "",
                    f"{found['cost'][way['name']]:.1f}x",
                ]
            )
        head = ["way", "chosen", "nats", "ECE", "accuracy", "nats minus temperature", "ECE minus temperature", "cost"]
        parts.append(rows(head, body))
    return "".join(parts)


def tables(result: dict) -> str:
    parts = [
        "# Tables of `result.json`\n\nMade by `figures.py`; 95 % BCa intervals, paired over windows and seeds. AURC is "
        "the area under the risk-coverage curve. *Beside entropy*: a logistic regression on entropy and the signal "
        "minus one on entropy alone, fitted on clean validation text; below 0 is better for ECE and AURC.\n",
        *(of_set(found) for found in result["sets"]),
        "\n# The barrier's model minus the plain one\n\nAUROC by token, same windows and seeds.\n",
    ]
    for found in result["barrier_minus_ce"]:
        parts.append(f"\n## {found['model']}, {CONDITIONS[found['condition']]}\n\n")
        parts.append(rows(["signal", "AUROC"], [[r["name"], number(r["auroc"], 3, "+")] for r in found["signals"]]))
    parts.append("\n# Prediction under latent noise\n")
    return "".join([*parts, *(of_latent(found) for found in result["latent"])])


def curves(result: dict, path: Path) -> None:
    """Risk against coverage, token by token, one panel a model and condition."""
    sets = result["sets"]
    columns = min(4, len(sets))
    lines = -(-len(sets) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(3.1 * columns, 2.6 * lines), sharex=True, layout="constrained", squeeze=False
    )
    for axis in axes.ravel()[len(sets) :]:
        axis.set_visible(False)
    for axis, found in zip(axes.ravel(), sets, strict=False):
        part = found["token"]
        for colour, curve in zip(COLOURS, part["curves"], strict=True):
            axis.plot(curve["coverage"], curve["risk"], color=colour, label=curve["name"], linewidth=1.3)
        axis.axhline(part["error_rate"], color="#999999", linewidth=0.8, linestyle="--", label="random order")
        axis.set_title(f"{found['model']}\n{CONDITIONS[found['condition']]}", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.set_ylim(0, None)
    figure.supxlabel("share of tokens answered", fontsize=9)
    figure.supylabel("share of wrong tokens among them", fontsize=9)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def draw(folder: Path) -> None:
    """Writes `tables.md` and `risk-coverage.png` beside the result."""
    result = read_json(folder / "result.json")
    write_text(folder / "tables.md", tables(result))
    curves(result, folder / "risk-coverage.png")


if __name__ == "__main__":
    draw(Path(__file__).parent)
