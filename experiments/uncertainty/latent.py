"""Latent-noise prediction beside temperature scaling and dropout sampling: loss, calibration and cost."""

import math
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from analyse import told
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

from support_tokens.generation import embedding_rms, predict_under_noise
from support_tokens.generation.selective import ScoreTable
from support_tokens.law import EmbeddingPrior
from support_tokens.models import decoder_blocks, hook_embeddings
from support_tokens.report.records import Estimate
from support_tokens.robustness import Bootstrap

Predict = Callable[[Tensor], Tensor]


def plain(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)


def noisy(model: nn.Module, scale: float, samples: int, law: EmbeddingPrior | None, ids: Tensor) -> Tensor:
    draws = torch.Generator().manual_seed(0)
    return predict_under_noise(model, ids, scale=scale, samples=samples, law=law, generator=draws)


@torch.inference_mode()
def dropped(model: nn.Module, rate: float, samples: int, ids: Tensor) -> Tensor:
    """The mean prediction under dropout on the embeddings and on what each block's two branches add."""
    torch.manual_seed(0)
    drop = partial(nn.functional.dropout, p=rate)
    handles = [hook_embeddings(model, drop)]
    for block in decoder_blocks(model):
        branches = [m for name, m in block.named_children() if name in ("attn", "mlp", "self_attn")]
        handles += [
            m.register_forward_hook(lambda _m, _a, y: (drop(y[0]), *y[1:]) if isinstance(y, tuple) else drop(y))
            for m in branches
        ]
    try:
        log_p = plain(model, ids.repeat(samples, 1))
    finally:
        for handle in handles:
            handle.remove()
    return log_p.reshape(samples, *ids.shape, -1).logsumexp(0) - math.log(samples)


def tempered(predict: Predict, temperature: float, ids: Tensor) -> Tensor:
    return (predict(ids) / temperature).log_softmax(-1)


def read(predict: Predict, ids: Tensor, at_once: int) -> dict[str, np.ndarray]:
    """Nats of each next token, probability of the likeliest, and whether that is right, `(N, T - 1)` each."""
    parts = []
    for rows in ids.split(at_once):
        log_p = predict(rows)[:, :-1]
        top, guess = log_p.max(-1)
        nats = -log_p.gather(-1, rows[:, 1:, None]).squeeze(-1)
        parts.append((nats.double(), top.double().exp(), (guess == rows[:, 1:]).double()))
    return {k: torch.cat(p).numpy() for k, p in zip(("nats", "top", "right"), zip(*parts, strict=True), strict=True)}


def fitted_temperature(predict: Predict, ids: Tensor, at_once: int) -> float:
    """The temperature of least loss on validation text."""
    kept = [(predict(rows)[:, :-1], rows[:, 1:, None]) for rows in ids.split(at_once)]

    def loss(log_t: float) -> float:
        sums = [-(p / math.exp(log_t)).log_softmax(-1).gather(-1, y).double().sum().item() for p, y in kept]
        return sum(sums)

    return math.exp(minimize_scalar(loss, bounds=(-1.0, 1.0), method="bounded", options={"xatol": 1e-3}).x)


def methods(
    model: nn.Module, validation: Tensor, options: dict, law: EmbeddingPrior | None, at_once: int
) -> tuple[dict[str, Predict], dict[str, float]]:
    """Ways of predicting, each with what it has to choose chosen by the loss on validation text."""
    samples, rms = options["samples"], embedding_rms(model, validation[:at_once])
    base = partial(plain, model)
    families: dict[str, dict[float, Predict]] = {
        "latent noise": {s: partial(noisy, model, s * rms, samples, None) for s in options["scales"]},
        "dropout sampling": {r: partial(dropped, model, r, samples) for r in options["dropouts"]},
    }
    if law is not None:
        found = {s: partial(noisy, model, s * rms, samples, law) for s in options["scales"]}
        families["latent noise through the law"] = found
    temperature = fitted_temperature(base, validation, at_once)
    ways: dict[str, Predict] = {"plain": base, "temperature": partial(tempered, base, temperature)}
    chosen = {"temperature": temperature}
    for name, family in families.items():
        losses = {value: read(way, validation, at_once)["nats"].mean() for value, way in family.items()}
        chosen[name] = min(losses, key=lambda value: losses[value])
        ways[name] = family[chosen[name]]
    then = fitted_temperature(ways["latent noise"], validation, at_once)
    chosen["latent noise, then temperature"] = then
    ways["latent noise, then temperature"] = partial(tempered, ways["latent noise"], then)
    return ways, chosen


def seconds(way: Predict, ids: Tensor) -> float:
    """Median processor seconds of one batch, of three."""
    taken = []
    for _ in range(3):
        begun = time.process_time()
        way(ids)
        taken.append(time.process_time() - begun)
    return sorted(taken)[1]


def compared(found: dict[str, list[dict[str, np.ndarray]]], bootstrap: Bootstrap) -> list[dict]:
    """Loss, calibration and accuracy of each way, and what it gains on plain prediction and on temperature."""
    names = list(found)
    stacked = {n: {k: np.stack([f[k] for f in found[n]]) for k in found[n][0]} for n in names}
    seeds, sequences, _ = stacked[names[0]]["nats"].shape

    def interval(statistic: Callable) -> dict:
        return told(bootstrap.interval(statistic, seeds=seeds, sequences=sequences))

    mean = {n: stacked[n]["nats"].mean(-1) for n in names}
    loss = {n: lambda w, a=mean[n]: w @ a.T / w.sum(-1, keepdims=True) for n in names}
    ece = {n: ScoreTable.calibration(stacked[n]["top"], stacked[n]["right"]).calibration_error for n in names}
    return [
        {
            "name": n,
            "nats": interval(loss[n]),
            "calibration_error": told(Estimate(float(ece[n](np.ones(sequences)).mean()))),
            "accuracy": float(stacked[n]["right"].mean()),
            **{
                f"minus_{other}": {
                    "nats": interval(lambda w, n=n, o=other: loss[n](w) - loss[o](w)),
                    "calibration_error": interval(lambda w, n=n, o=other: ece[n](w) - ece[o](w)),
                }
                for other in ("plain", "temperature")
                if other != n
            },
        }
        for n in names
    ]
