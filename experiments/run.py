"""Runs an experiment that a JSON file describes: trains what is missing, evaluates, writes the report beside the file.

    python experiments/run.py experiments/wikitext2/config.json

The file gives `corpus`, `plan`, `arms`, `seeds` and, if the defaults do not fit, `sequences` and `sigmas`. Trained runs
are kept in `runs/` and trained once; a run that was stopped goes on from its last checkpoint.
"""

import argparse
import dataclasses
import json
from pathlib import Path

from support_tokens.arms import parse_arm
from support_tokens.corpora import load_corpus
from support_tokens.experiment import evaluate_runs, write_report
from support_tokens.plan import plan_from_config
from support_tokens.training import train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the trained runs")
    parser.add_argument("--seeds", type=int, help="only the first so many seeds")
    chosen = parser.parse_args()
    config = json.loads(chosen.config.read_text(encoding="utf-8"))
    plan = plan_from_config(config["plan"])
    corpus = load_corpus(config["corpus"], plan.context)
    root = chosen.runs / chosen.config.parent.name
    folders = {}
    for seed in config["seeds"][: chosen.seeds]:
        for arm in config["arms"]:
            folder = root / f"{arm.replace(':', '-').replace('=', '-')}-seed{seed}"
            folders[arm, seed] = folder
            begun = (folder / "config.json").exists()
            train(dataclasses.replace(plan, seed=seed), corpus, parse_arm(arm), folder, resume=begun)
    in_order = [folders[arm, seed] for arm in config["arms"] for seed in config["seeds"][: chosen.seeds]]
    options = {key: config[key] for key in ("sequences", "sigmas") if key in config}
    print(f"Report: {write_report(evaluate_runs(in_order, **options), chosen.config.parent)}")


if __name__ == "__main__":
    main()
