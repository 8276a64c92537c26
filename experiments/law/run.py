"""The law on the embeddings of a trained SmallGPT: densities, coupling, who carries the barrier, uncertainty.

    python experiments/law/run.py

Reads `config.json` beside it, trains one small model in `runs/law`, and writes `result.json` and the figures. Minutes
on one core; needs zuko beside the package's `train` extra.
"""

import argparse
import json
import math
import platform
import time
from pathlib import Path

import torch
from densities import autoregression, bits, flow, gaussian, law, standard_error
from figures import coupling, uncertainty
from torch import Tensor

from support_tokens.files import write_json
from support_tokens.law import EmbeddingPrior, barrier_concentration
from support_tokens.law.filtering import CategoricalEmission, ParticleFilter
from support_tokens.models import encode, load_small_gpt
from support_tokens.regularizers import parse_regularizer
from support_tokens.training import load_corpus, plan_from_config, train

HERE = Path(__file__).parent
GUIDE = HERE.parents[1] / "docs" / "guides"


def windows(ids: Tensor, length: int, count: int) -> Tensor:
    """`count` windows spread evenly over a text, (count, length)."""
    starts = torch.linspace(0, len(ids) - length - 1, count).long()
    return torch.stack([ids[s : s + length] for s in starts.tolist()])


def densities(table: Tensor, data: dict[str, Tensor], config: dict) -> tuple[dict, EmbeddingPrior, Tensor]:
    """Bits per dimension on the test part, the certified law of whitened embeddings, and the map that whitens."""
    generator = torch.Generator().manual_seed(config["seed"])
    noisy = {
        split: table[ids]
        + config["dequantisation"] * torch.randn(*ids.shape, table.shape[1], generator=generator).double()
        for split, ids in data.items()
    }
    train_x, validation, test = noisy["train"], noisy["validation"], noisy["test"]
    order, seed = config["autoregression"], config["seed"]
    laws = {
        f"law, {kind}{', after whitening' if whiten else ''}": law(
            train_x, test, config["law_iterations"], seed, whiten=whiten, repulsive=kind == "repulsive"
        )
        for whiten in (False, True)
        for kind in ("repulsive", "free")
    }
    flow_name = f"neural spline flow given the last {order} (zuko)"
    found = {
        "gaussian": gaussian(train_x, test),
        f"linear autoregression of order {order}": autoregression(train_x, test, order),
        flow_name: flow(train_x, validation, test, order, config["flow"], seed),
        **{name: log_density for name, (log_density, *_) in laws.items()},
    }
    table_rows = [
        {"model": name, "bits_per_dimension": bits(value, test), "standard_error": standard_error(value, test)}
        for name, value in found.items()
    ]
    shares = {
        name: barrier_concentration(laws[name][1], test[:16] @ laws[name][3], k=3)
        for name in ("law, repulsive, after whitening", "law, free")
    }
    return {
        "test": table_rows,
        "laws": {name: account for name, (_, _, account, _) in laws.items()},
        "concentration": {
            name: {"k": 3, "share": float(found.share.mean()), "even": float(found.even.mean())}
            for name, found in shares.items()
        },
    }, *(laws["law, repulsive, after whitening"][i] for i in (1, 3))


def filtering(table: Tensor, prior: EmbeddingPrior, ids: Tensor, tokenizer, options: dict, seed: int) -> dict:
    """The filter on clean text and on the same text with some characters replaced by draws from the alphabet."""
    emission = CategoricalEmission(
        table / options["temperature"], bias=-0.5 * table.square().sum(-1) / options["temperature"]
    )
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for sequence, row in enumerate(windows(ids, options["length"], options["sequences"])):
        wrong = torch.rand(len(row), generator=generator) < options["corruption"]
        replaced = torch.where(wrong, torch.randint(2, len(table), row.shape, generator=generator), row)
        wrong = replaced != row
        series = {}
        for name, text in (("clean", row), ("corrupted", replaced)):
            filter = ParticleFilter(
                prior,
                emission,
                particles=options["particles"],
                window=options["window"],
                generator=torch.Generator().manual_seed(seed),
            )
            result = filter.run(text.tolist())
            series[name] = {
                k: result.series(k) for k in ("log_predictive", "spread", "margin_mean", "margin_sd", "ess")
            }
        rows.append((wrong, series))
        if sequence == 0:
            surprise = [(-series[n]["log_predictive"] / math.log(2)).tolist() for n in series]
            uncertainty(
                HERE / "uncertainty.svg", *surprise, wrong.nonzero().squeeze(-1).tolist(), tokenizer.decode(row)
            )
    at = torch.cat([wrong for wrong, _ in rows])
    joined = {
        name: {key: torch.cat([s[name][key] for _, s in rows]) for key in rows[0][1]["clean"]}
        for name in ("clean", "corrupted")
    }
    mean = lambda name, key, where=slice(None): float(joined[name][key][where].mean())  # noqa: E731
    return {
        "characters": len(at),
        "bits_per_character_of_a_uniform_guess": math.log2(len(table)),
        "replaced": int(at.sum()),
        "bits_per_character": {
            "clean text": -mean("clean", "log_predictive") / math.log(2),
            "corrupted text": -mean("corrupted", "log_predictive") / math.log(2),
            "replaced characters": -mean("corrupted", "log_predictive", at) / math.log(2),
            "the same positions, clean": -mean("clean", "log_predictive", at) / math.log(2),
        },
        "spread": {name: mean(name, "spread") for name in joined},
        "margin_mean": {name: mean(name, "margin_mean") for name in joined},
        "margin_sd": {name: mean(name, "margin_sd") for name in joined},
        "mean_ess": {name: mean(name, "ess") for name in joined},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the trained model")
    runs = parser.parse_args().runs / "law"
    config = json.loads((HERE / "config.json").read_text(encoding="utf-8"))
    begun = time.perf_counter()
    torch.set_num_threads(1)
    plan = plan_from_config(config["plan"])
    corpus = load_corpus(config["corpus"], plan.context)
    trained = train(plan, corpus, parse_regularizer(config["arm"]), runs, resume=(runs / "config.json").exists())
    model, tokenizer = load_small_gpt(runs)
    table = model.get_input_embeddings().weight.detach().double()
    parts = {split: encode(tokenizer, getattr(corpus, split)) for split in config["sequences"]}
    # One shift and one scale for all models: the mean over the text is 0, the root mean square 1.
    frequent = table[parts["train"]]
    table = (table - frequent.mean(0)) / (frequent - frequent.mean(0)).square().mean().sqrt()
    data = {split: windows(ids, plan.context, config["sequences"][split]) for split, ids in parts.items()}
    found, prior, root = densities(table, data, config)
    result = {
        "config": config,
        "model": {
            "validation_bpc": trained.validation_bpc,
            "parameters": trained.parameters,
            "corpus": corpus.identity(),
        },
        "densities": found,
        "filter": filtering(table @ root, prior, parts["test"], tokenizer, config["filter"], config["seed"]),
        "figure": coupling(GUIDE / "law-coupling.svg"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "seconds": round(time.perf_counter() - begun, 1),
    }
    write_json(HERE / "result.json", result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
