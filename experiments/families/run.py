"""Every causal type of transformers against autograd: which are read right, which are refused, and why.

    PYTHONPATH=experiments python -m families.run [--fresh] [--jobs N] [TYPE ...]

Builds each type tiny from its configuration, in a process of its own with a time limit, and compares margins in both
views, and the penalty of the law, with `oracle.py`. Writes `result.json` beside it, where finished types are kept
(`--fresh` begins anew, names do these again), and from it the table in `docs/guides/models.md`. Minutes on one core.
"""

import argparse
import importlib
import multiprocessing
import time
import warnings
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import transformers
from families.check import check
from families.table import write_table
from families.tiny import causal_types

from support_tokens.files import read_json, versions, write_json

HERE = Path(__file__).parent
RESULT = HERE / "result.json"
# What every process needs is loaded once, before they part.
for family in ("llama", "mixtral", "gemma3", "bart", "bert", "bamba"):
    importlib.import_module(f"transformers.models.{family}.modeling_{family}")

GUIDE = HERE.parents[1] / "docs" / "guides" / "models.md"
SECONDS = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="values of model_type; all that are not finished, if none is given")
    parser.add_argument("--fresh", action="store_true", help="forget what is finished")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    options = parser.parse_args()
    packages = {name: versions()[name] for name in ("support-tokens", "torch", "transformers", "python")}
    types = {} if options.fresh or not RESULT.exists() else read_json(RESULT)["types"]
    known = causal_types()
    if unknown := [name for name in options.types if name not in known]:
        parser.error(f"unknown types: {', '.join(unknown)}")
    waiting = list(options.types) or [name for name in known if name not in types]

    def keep(name: str, outcome: dict) -> None:
        types[name] = outcome
        print(f"{name}: {outcome['status']} {outcome.get('reason', outcome.get('deviation', ''))}"[:160], flush=True)
        write_json(RESULT, {"kind": "families", "versions": packages, "types": dict(sorted(types.items()))})

    run_all(waiting, options.jobs, keep)
    write_table(types, GUIDE)
    counts = [
        f"{sum(t['status'] == s for t in types.values())} {s}" for s in ("right", "refused", "not buildable", "wrong")
    ]
    print(", ".join(counts))


def run_all(names: list[str], jobs: int, keep) -> None:
    """Calls `keep(name, outcome)` for each type, `jobs` processes at a time."""
    context = multiprocessing.get_context("fork")
    running: dict[Any, tuple[str, Any, float]] = {}
    waiting = list(names)
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            receive, send = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(name, send))
            process.start()
            send.close()
            running[receive] = name, process, time.monotonic() + SECONDS
        for receive in wait(list(running), timeout=1.0) or [
            r for r, entry in running.items() if time.monotonic() > entry[2]
        ]:
            name, process, _ = running.pop(receive)
            try:
                outcome = receive.recv() if receive.poll() else _failed(f"no answer within {SECONDS} seconds")
            except EOFError:
                outcome = _failed("its process ended without an answer")
            process.kill()
            process.join()
            receive.close()
            keep(name, outcome)


def _failed(reason: str) -> dict:
    return {"status": "not buildable", "reason": reason}


def _child(name: str, send) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    send.send(check(name))


if __name__ == "__main__":
    main()
