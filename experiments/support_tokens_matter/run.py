"""Do support tokens matter more? Perturb them, and equally many others, and see what each costs.

    python scripts/fetch_smollm2.py && python experiments/support_tokens_matter/run.py

For each passage: the k tokens of smallest log margin are perturbed by Gaussian noise on their embeddings (sigma times
the root mean square of the passage's embeddings), and the mean surprise of all tokens is compared with that of the
clean passage. Against it stand, with the same noise, k tokens at random, and k tokens matched by position: for each
support token the nearest token before or after it, by lot, that is none. The first token is left out of all choices,
since attention rests on it and nothing like it can be matched.

Reads `config.json` beside it; keeps what is done in `runs/support_tokens_matter.jsonl` and goes on from there; writes
`result.json` and the figure of the guide. About ten minutes on one core.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from rich.progress import track

from support_tokens.analysis import analyze
from support_tokens.files import write_json, write_text
from support_tokens.models import load_model
from support_tokens.robustness import Bootstrap
from support_tokens.training import load_corpus

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FIGURES = ("sigma_min", "gradient_share", "coupling_sign", "per_head", "surprisal_nats")


def passages(tokenizer, corpora: dict[str, int], tokens: int) -> list[tuple[str, list[int]]]:
    """Passages spread evenly over the test part of each corpus, each from the beginning of a sentence."""
    found = []
    for name, count in corpora.items():
        text = load_corpus(name).test
        for place in np.linspace(0, len(text) - 12 * tokens, count).astype(int):
            begin = text.find(". ", place) + 2
            ids = tokenizer(text[begin : begin + 12 * tokens])["input_ids"][:tokens]
            found.append((f"{name} at {begin}", ids))
    return found


def matched(support: list[int], length: int, generator: np.random.Generator) -> list[int]:
    """For each support token the nearest other one, before or after by lot; none is taken twice, none is the first."""
    taken: set[int] = set(support) | {0}
    chosen = []
    for t in support:
        free = [other for other in range(length) if other not in taken]
        nearest = min(abs(other - t) for other in free)
        chosen.append(int(generator.choice([other for other in free if abs(other - t) == nearest])))
        taken.add(chosen[-1])
    return chosen


@torch.no_grad()
def surprise(model, ids: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
    """Mean surprise of all tokens after the first, nats, one a row of `embeddings` (n, T, D)."""
    logits = model(inputs_embeds=embeddings, use_cache=False).logits[:, :-1]
    targets = ids[1:].expand(len(embeddings), -1)
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(-1)


def measure(model, tokenizer, ids: list[int], config: dict, generator: np.random.Generator) -> dict:
    """What each arm costs in one passage: nats a token more than clean, mean over draws."""
    report = analyze(model, tokenizer, ids, (config["layer"],), config["views"], skip=FIGURES)
    tokens = torch.tensor(ids)
    clean = model.get_input_embeddings()(tokens).detach()
    scale = config["noise"] * clean.square().mean().sqrt()
    arms: dict[str, list[list[int]]] = {}
    for view in config["views"]:
        ranked = [t.position for t in report.support_tokens(len(ids), view=view) if t.position > 0]
        support = ranked[: config["k"]]
        arms[f"support/{view}"] = [support] * config["draws"]
        arms[f"matched/{view}"] = [matched(support, len(ids), generator) for _ in range(config["draws"])]
    others = np.arange(1, len(ids))
    arms["random"] = [generator.choice(others, config["k"], replace=False).tolist() for _ in range(config["draws"])]
    # The same noise for all arms of a draw: k vectors, dealt out to the k tokens of each.
    noise = torch.from_numpy(generator.standard_normal((config["draws"], config["k"], clean.shape[1]))).float() * scale
    rows = [clean]
    for chosen in arms.values():
        for draw, places in enumerate(chosen):
            row = clean.clone()
            row[places] += noise[draw]
            rows.append(row)
    values = surprise(model, tokens, torch.stack(rows))
    costs = (values[1:] - values[0]).unflatten(0, (len(arms), config["draws"])).mean(1)
    return {
        "clean": values[0].item(),
        "costs": dict(zip(arms, costs.tolist(), strict=True)),
        "positions": {name: float(np.mean(chosen)) for name, chosen in arms.items()},
    }


def summarised(rows: list[dict], config: dict) -> dict:
    """Means over passages, and paired differences with BCa intervals over passages."""
    bootstrap = Bootstrap()
    table = {name: np.array([row["costs"][name] for row in rows]) for name in rows[0]["costs"]}

    def estimate(values: np.ndarray) -> dict:
        mean = lambda weights: (weights @ values / weights.sum(-1))[..., None]  # noqa: E731
        found = bootstrap.interval(mean, seeds=1, sequences=len(values))
        return {"value": found.value, "low": found.low, "high": found.high}

    differences = {}
    for view in config["views"]:
        for against in (f"matched/{view}", "random"):
            values = table[f"support/{view}"] - table[against]
            differences[f"support/{view} - {against}"] = {**estimate(values), "above": float((values > 0).mean())}
    return {
        "passages": len(rows),
        "clean_nats": float(np.mean([row["clean"] for row in rows])),
        "costs": {name: estimate(values) for name, values in table.items()},
        "differences": differences,
        "mean_positions": {n: float(np.mean([row["positions"][n] for row in rows])) for n in rows[0]["positions"]},
        "confidence": bootstrap.confidence,
    }


def draw(summary: dict, path: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "support-tokens", "font.size": 9.0}):
        figure = Figure(figsize=(7.2, 2.6), layout="constrained")
        axes = figure.subplots()
        for place, found in enumerate(reversed(summary["differences"].values())):
            axes.plot([found["low"], found["high"]], [place, place], color="#0072b2", linewidth=2)
            axes.plot(found["value"], place, "o", color="#0072b2")
        names = [name.replace(" - ", " − ") for name in reversed(summary["differences"])]
        axes.set_yticks(range(len(names)), names)
        axes.axvline(0, color="#868f99", linestyle=(0, (4, 3)), linewidth=1)
        axes.set_xlabel("what perturbing support tokens costs more, nats a token (95 % intervals)")
        axes.margins(y=0.2)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        figure.savefig(path, dpi=160, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of what is done")
    chosen = parser.parse_args()
    config = json.loads((HERE / "config.json").read_text(encoding="utf-8"))
    model, tokenizer = load_model(ROOT / "models" / "smollm2-135m", gguf_file=GGUF)
    chosen.runs.mkdir(parents=True, exist_ok=True)
    kept = chosen.runs / "support_tokens_matter.jsonl"
    done = {}
    if kept.exists():
        rows = [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()]
        done = {row["passage"]: row for row in rows if row["config"] == config}
    for place, (name, ids) in enumerate(track(passages(tokenizer, config["corpora"], config["tokens"]), "passages")):
        if name in done:  # from an earlier run, or a passage that is found twice in a short text
            continue
        # A generator a passage: where a run was stopped changes nothing.
        generator = np.random.default_rng([config["seed"], place])
        done[name] = {"passage": name, "config": config, **measure(model, tokenizer, ids, config, generator)}
        write_text(kept, "".join(json.dumps(row) + "\n" for row in done.values()))
    rows = list(done.values())
    by_corpus = {
        c: summarised([r for r in rows if r["passage"].startswith(f"{c} ")], config) for c in config["corpora"]
    }
    summary = summarised(rows, config)
    rows = [{key: row[key] for key in ("passage", "clean", "costs", "positions")} for row in rows]
    write_json(HERE / "result.json", {"model": GGUF, "config": config, **summary, "by_corpus": by_corpus, "rows": rows})
    draw(summary, ROOT / "docs" / "images" / "support-tokens-matter.png")
    print(json.dumps({key: summary[key] for key in ("passages", "clean_nats", "costs", "differences")}, indent=2))


if __name__ == "__main__":
    main()
