"""Does the margin know where a model errs? Signals alone and beside entropy, and prediction under latent noise.

    python experiments/uncertainty/run.py

Reads `config.json` beside it, the runs that `support-tokens reproduce` left in `runs/wikitext2` and `runs/kjv` (those
seeds that are finished in every arm), and SmolLM2 in `models/`; writes `result.json`, the figures and the tables of
`tables.md`. Signals of every token are kept in `runs/uncertainty` and computed once. Needs scikit-learn.
"""

import argparse
import json
from collections.abc import Callable
from importlib import metadata
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from analyse import Set, between_arms, figures_of, thresholds
from collect import GGUF, kept, law_of, load_smollm2, small_gpt_tables, small_gpt_texts, smollm2_tables
from figures import draw
from latent import compared, methods, read, seconds

from support_tokens.files import versions, write_json
from support_tokens.robustness import Bootstrap

HERE = Path(__file__).parent


def finished(runs: Path, name: str, of: dict) -> list[int]:
    """Seeds whose run is finished in every arm."""
    there = lambda arm, seed: (runs / name / f"{arm}-seed{seed}" / "result.json").exists()  # noqa: E731
    return [seed for seed in of["seeds"] if all(there(arm, seed) for arm in of["arms"])]


def described(tables: list[dict], condition: str, config: dict, bootstrap: Bootstrap) -> tuple[dict, Set]:
    """Figures of one condition, by token and by window."""
    of = lambda c: [t[c] for t in tables]  # noqa: E731
    tokens, windows = (Set(of("validation"), of(condition), bootstrap, windows=w) for w in (False, True))
    found = {
        "token": figures_of(tokens),
        "window": figures_of(windows),
        "thresholds": thresholds(tokens, config["risks"]),
    }
    return found, tokens


def latent_of(path: Path, make_model: Callable[[], tuple], options: dict, conditions: list[str], at_once: int) -> dict:
    """Losses of every way of predicting under one model, by condition, with what was chosen and what it took."""

    def make() -> dict[str, np.ndarray]:
        model, texts, law = make_model()
        spread = lambda ids, n: ids[torch.linspace(0, len(ids) - 1, min(n, len(ids))).long()]  # noqa: E731
        validation = spread(texts["validation"], options["validation"])
        ways, chosen = methods(model, validation, options, law, at_once)
        found = {f"chosen/{name}": np.float64(value) for name, value in chosen.items()}
        for name, way in ways.items():
            found[f"seconds/{name}"] = np.float64(seconds(way, validation[:at_once]))
            for condition in conditions:
                losses = read(way, spread(texts[condition], options["test"]), at_once)
                found |= {f"{condition}/{name}/{key}": value for key, value in losses.items()}
        return found  # type: ignore[return-value]

    return kept(path, make)


def latent_rows(tables: list[dict[str, np.ndarray]], conditions: list[str], bootstrap: Bootstrap) -> dict:
    """The comparison of the ways by condition, over the models of several seeds."""
    names = [key.removeprefix("seconds/") for key in tables[0] if key.startswith("seconds/")]
    rows = {}
    for condition in conditions:
        found = {n: [{k: t[f"{condition}/{n}/{k}"] for k in ("nats", "top", "right")} for t in tables] for n in names}
        rows[condition] = compared(found, bootstrap)
    return {
        "seeds": len(tables),
        "sequences": len(tables[0][f"{conditions[0]}/plain/nats"]),
        "chosen": {n: [float(t[f"chosen/{n}"]) for t in tables] for n in names if n != "plain"},
        "cost": {n: float(np.mean([t[f"seconds/{n}"] / t["seconds/plain"] for t in tables])) for n in names},
        "conditions": rows,
    }


def small_gpt(runs: Path, name: str, config: dict, bootstrap: Bootstrap) -> tuple[list, list, list]:
    """Sets, differences between arms, and prediction under noise, of the runs on one corpus."""
    of = config["small_gpt"][name]
    seeds = finished(runs, name, of)
    if not seeds:
        print(f"{name}: no seed is finished in every arm; left out", flush=True)
        return [], [], []
    other = ["other"] if of["other"] else []
    conditions, by_arm, sets, latent = ["test", "typos", *other], {}, [], []
    for arm in of["arms"]:
        model = f"SmallGPT, {name}, {arm}"
        tables = [small_gpt_tables(runs, name, arm, seed, config) for seed in seeds]
        for condition in conditions:
            found, by_arm[arm, condition] = described(tables, condition, config, bootstrap)
            sets.append({"model": model, "condition": condition, "seeds": seeds, **found})
            print(model, condition, flush=True)
        losses = [
            latent_of_run(runs, name, arm, seed, config, ["test", *other])
            for seed in seeds
            if seed in config["latent"]["seeds"]
        ]
        latent.append({"model": model, **latent_rows(losses, ["test", *other], bootstrap)})
    first, second = of["arms"]
    arms = [
        {
            "model": f"SmallGPT, {name}",
            "condition": c,
            "seeds": seeds,
            "signals": between_arms(by_arm[first, c], by_arm[second, c]),
        }
        for c in conditions
    ]
    return sets, arms, latent


def latent_of_run(runs: Path, name: str, arm: str, seed: int, config: dict, conditions: list[str]) -> dict:
    """`latent_of` for one run of SmallGPT."""
    folder, of = runs / name / f"{arm}-seed{seed}", config["small_gpt"][name]
    options = {**config["latent"], **config["latent"]["small_gpt"]}
    make = lambda: (*small_gpt_texts(folder, of), law_of(folder))  # noqa: E731
    return latent_of(runs / "uncertainty" / f"latent-{name}-{arm}-seed{seed}.npz", make, options, conditions, 16)


def smollm2(runs: Path, config: dict, bootstrap: Bootstrap) -> tuple[list, list]:
    """Sets of SmolLM2, and its prediction under noise."""
    if not (Path(config["smollm2"]["folder"]) / GGUF).exists():
        print("SmolLM2 is not there; left out (python scripts/fetch_smollm2.py)", flush=True)
        return [], []
    tables, sets = [smollm2_tables(runs, config)], []
    for condition in ("test", "typos"):
        found, _ = described(tables, condition, config, bootstrap)
        sets.append({"model": "SmolLM2-135M", "condition": condition, "seeds": [0], **found})
        print("SmolLM2-135M", condition, flush=True)
    options = {**config["latent"], **config["latent"]["smollm2"]}

    def make() -> tuple:
        model, _, texts = load_smollm2(config)
        return model, texts, None

    losses = [latent_of(runs / "uncertainty" / "latent-smollm2.npz", make, options, ["test"], 4)]
    return sets, [{"model": "SmolLM2-135M", **latent_rows(losses, ["test"], bootstrap)}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the trained runs")
    runs = parser.parse_args().runs
    torch.set_num_threads(1)
    config = json.loads((HERE / "config.json").read_text(encoding="utf-8"))
    bootstrap = Bootstrap(resamples=config["resamples"], seed=config["seed"])
    parts = [small_gpt(runs, name, config, bootstrap) for name in config["small_gpt"]]
    sets, arms, latent = (list(chain.from_iterable(part[i] for part in parts)) for i in range(3))
    more_sets, more_latent = smollm2(runs, config, bootstrap)
    sets, latent = sets + more_sets, latent + more_latent
    used = {**versions(), "scikit-learn": metadata.version("scikit-learn")}
    result = {"config": config, "versions": used, "sets": sets, "barrier_minus_ce": arms}
    write_json(HERE / "result.json", {**result, "latent": latent})
    draw(HERE)


if __name__ == "__main__":
    main()
