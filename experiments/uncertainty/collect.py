"""Signals and errors of every token of held-out texts under one model, kept as tables in `runs/uncertainty`."""

import io
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from support_tokens.files import write_bytes
from support_tokens.generation.signals import score_tokens
from support_tokens.law import EmbeddingPrior
from support_tokens.models import encode, hook_embeddings, load_small_gpt, quiet_transformers
from support_tokens.robustness import EvaluationData
from support_tokens.robustness.lab import TokenizerSpelling
from support_tokens.robustness.perturbations import Batch, Typos
from support_tokens.training import Windows, load_corpus

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# These look at the token that came: for the next error, what they said of the token before is known.
FOLLOWING = ("NegativeLogLikelihood", "RAUQ")
LAW = "NegativeLogMargin (law)"
AT_ONCE = 16


def windows(ids: Tensor, length: int, count: int) -> Tensor:
    """`count` windows at even distances over a text, `(count, length)`."""
    found = Windows(ids, length, count)
    return torch.stack([found[i]["input_ids"] for i in range(len(found))])


def law_of(folder: Path) -> EmbeddingPrior | None:
    """The law that a barrier trained beside the model; None where there was none."""
    if not (folder / "barrier.safetensors").exists():
        return None
    state = {k.removeprefix("law."): v for k, v in load_file(folder / "barrier.safetensors").items() if "law." in k}
    prior = EmbeddingPrior(state["w_q"].shape[1], rank=state["w_q"].shape[0])
    prior.load_state_dict(state)
    return prior.eval()


def corrupted(ids: Tensor, config: dict, spelling: TokenizerSpelling | None) -> Batch:
    """The windows with typos: read is the corrupted text, asked for is the clean token that comes next."""
    (batch,) = EvaluationData(ids, spelling=spelling).batches(len(ids))
    with Typos(config["typos"], seed=config["seed"]).applied(nn.Identity(), math.nan) as read:
        return read(batch)


def table(
    model: nn.Module, batch: Batch, config: dict, layers: list[int], law: EmbeddingPrior | None
) -> dict[str, np.ndarray]:
    """Columns `(N, T - 2)`: from the second position on, where something was read before; in `valid` what counts."""
    names = [s for s in config["signals"] if law is not None or s != "NegativeLogDensity"]
    ids, mask = batch.input_ids, batch.attention_mask
    masked = None if bool(mask.all()) else mask
    parts: list[dict[str, Tensor]] = []
    for rows in torch.arange(len(ids)).split(AT_ONCE):
        given = None if masked is None else masked[rows]
        seen: list[Tensor] = []
        handle = hook_embeddings(model, seen.append)
        try:
            with torch.inference_mode():
                log_p = model(input_ids=ids[rows], attention_mask=given, use_cache=False).logits[:, :-1].float()
                log_p = log_p - log_p.logsumexp(-1, keepdim=True)
        finally:
            handle.remove()
        labels = batch.labels[rows, 1:]
        top, guess = log_p.max(-1)
        part = {
            "nats": -log_p.gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1),
            "error": (guess != labels).float(),
            "confidence": top.exp(),
            "valid": (batch.scored[rows] & mask[rows, :-1].bool()).float(),
        }
        found = score_tokens(model, ids[rows], given, layers=layers, signals=names, law=law)
        other = score_tokens(model, ids[rows], given, layers=layers, view="block", signals=config["block_signals"])
        found |= {name.replace(" (", ", block view ("): values for name, values in other.items()}
        for name, values in found.items():
            follows = name.partition(" ")[0] in FOLLOWING
            part[f"{name}, token before" if follows else name] = values[:, :-1].roll(int(follows), 1)
        if law is not None:
            part[LAW] = -law.margins(seen[0].clone(), given).log_abs_det[:, :-1].detach()
        parts.append({name: values[:, 1:] for name, values in part.items()})
    return {name: torch.cat([p[name] for p in parts]).numpy().astype(np.float32) for name in parts[0]}


def kept(path: Path, make: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The table of a file, made where it is missing."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **make())  # type: ignore[arg-type]
        write_bytes(path, buffer.getvalue())
        print(f"collected {path.stem}", flush=True)
    with np.load(path) as found:
        return {name: found[name] for name in found.files}


def small_gpt_texts(folder: Path, of: dict) -> tuple[nn.Module, dict[str, Tensor]]:
    """A finished run, and the windows of its texts: validation, test, and test of the other corpus, if any."""
    model, tokenizer = load_small_gpt(folder)
    context, corpus = model.config.n_positions, load_corpus(of["corpus"])
    texts = {split: encode(tokenizer, getattr(corpus, split)) for split in ("validation", "test")}
    found = {split: windows(ids, context, of["sequences"][split]) for split, ids in texts.items()}
    if of["other"]:
        # All three parts: the other corpus was not trained on, and its test part alone is short.
        other = load_corpus(of["other"])
        text = encode(tokenizer, other.train + other.validation + other.test)
        found["other"] = windows(text, context, of["sequences"]["test"])
    return model, found


def plain(ids: Tensor) -> Batch:
    """The windows as they are."""
    (batch,) = EvaluationData(ids).batches(len(ids))
    return batch


def small_gpt_tables(runs: Path, name: str, arm: str, seed: int, config: dict) -> dict[str, dict[str, np.ndarray]]:
    """Tables of one run by condition."""
    of = config["small_gpt"][name]
    folder = runs / name / f"{arm}-seed{seed}"
    loaded: list = []

    def read(condition: str) -> dict[str, np.ndarray]:
        if not loaded:
            loaded.extend((*small_gpt_texts(folder, of), law_of(folder)))
        model, texts, law = loaded
        text = texts[condition if condition in texts else "test"]
        batch = corrupted(text, config, None) if condition == "typos" else plain(text)
        return table(model, batch, config, of["layers"], law)

    conditions = ["validation", "test", "typos", *(["other"] if of["other"] else [])]
    cache = runs / "uncertainty"
    return {c: kept(cache / f"{name}-{arm}-seed{seed}-{c}.npz", lambda c=c: read(c)) for c in conditions}


def load_smollm2(config: dict) -> tuple[nn.Module, TokenizerSpelling, dict[str, Tensor]]:
    """SmolLM2 in float32, texts of its tokens, and windows of WikiText-2 by its tokens."""
    of = config["smollm2"]
    with quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(of["folder"], gguf_file=GGUF)
        model = AutoModelForCausalLM.from_pretrained(of["folder"], gguf_file=GGUF, dtype=torch.float32).eval()
        corpus = load_corpus(of["corpus"])
        ids = {s: torch.tensor(tokenizer(getattr(corpus, s))["input_ids"]) for s in ("validation", "test")}
    return model, TokenizerSpelling(tokenizer), {s: windows(ids[s], of["length"], of["sequences"][s]) for s in ids}


def smollm2_tables(runs: Path, config: dict) -> dict[str, dict[str, np.ndarray]]:
    """Tables of SmolLM2 by condition."""
    loaded: list = []

    def read(condition: str) -> dict[str, np.ndarray]:
        if not loaded:
            loaded.extend(load_smollm2(config))
        model, spelling, texts = loaded
        batch = corrupted(texts["test"], config, spelling) if condition == "typos" else plain(texts[condition])
        return table(model, batch, config, config["smollm2"]["layers"], None)

    cache = runs / "uncertainty"
    return {c: kept(cache / f"smollm2-{c}.npz", lambda c=c: read(c)) for c in ("validation", "test", "typos")}
