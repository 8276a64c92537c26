r"""Evaluation of any causal language models of transformers, given as folders, in bits per token."""

__all__ = ["evaluate_models"]

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from support_tokens.errors import ArgumentError, DataError
from support_tokens.models import checked_device, load_config, load_model, load_tokenizer, quiet_transformers
from support_tokens.report.records import RobustnessReport
from support_tokens.robustness.comparison import ArmDetails, compare
from support_tokens.robustness.evaluate import LazyModels, measure_arms
from support_tokens.robustness.lab.spelling import TokenizerSpelling, special_prefix
from support_tokens.robustness.lab.windows import held_out_windows, progress_bar, say_expected
from support_tokens.robustness.measure import EvaluationData
from support_tokens.robustness.perturbations.set import chosen_perturbations
from support_tokens.robustness.perturbations.text import DomainShift, reached_by_typos
from support_tokens.robustness.structure import measure_structure
from support_tokens.training import load_corpus

_STRUCTURE_WINDOWS = 4


def evaluate_models(
    folders: Sequence[str | Path],
    data: str,
    *,
    sequences: int = 32,
    context: int = 128,
    sigmas: Sequence[float] = (0.1, 0.5),
    seed: int = 0,
    families: Sequence[str] = ("noise",),
    others: Sequence[str] = (),
    structure: bool = False,
    device: str = "cpu",
    cache: str | Path | None = None,
    progress: bool = True,
) -> RobustnessReport:
    r"""Evaluates causal language models of one tokenizer on a text, clean and under perturbations, in bits per token.

    Each folder is an arm, the first one the baseline; there is one seed, so intervals cover the choice of sequences.
    Where the tokenizer puts special tokens such as BOS in front of a text, they are in front of every window; they are
    not scored, and the report names them (`config`). It also has the fraction of characters that typos can reach.

    Args:
        folders: Folders of checkpoints with their tokenizers.
        data: Corpus whose test part is read.
        sequences: Windows of the test part, spread evenly.
        context: Tokens of a window, special tokens in front not counted.
        sigmas: Standard deviations of the noise.
        seed: Seed of all random draws.
        families: Families of perturbations, of `support_tokens.robustness.perturbations.set.FAMILIES`.
        others: Other corpora whose test part is read too.
        structure: Measure the structure of embeddings and of the first block's attention, where it can be read.
        device: As torch names it.
        cache: Folder that keeps each measurement, so that a stopped evaluation can continue.
        progress: Say the expected time and draw a bar on stderr.

    Raises:
        ArgumentError: There are no folders, tokenizers differ, a model cannot read the context, or the device cannot
            be used here.
        DataError: The corpus cannot be read or is too short.
        RunFolderError: A folder holds no model.
    """
    if not folders:
        raise ArgumentError("At least one model is required for an evaluation, received none; pass a folder.")
    paths = [Path(folder) for folder in folders]
    names = [path.name for path in paths]
    labels = [name if names.count(name) == 1 else str(path) for name, path in zip(names, paths, strict=True)]
    if len(set(labels)) < len(labels):
        raise ArgumentError("Each model must be given once, received one folder twice; leave one out.")
    checked_device(device)
    tokenizer = _shared_tokenizer(paths)
    prefix = special_prefix(tokenizer)
    for path in paths:
        _check_context(path, context, len(prefix))
    corpus = load_corpus(data)

    def read(text: str, name: str, limit: int) -> Tensor:
        windows = held_out_windows(_encode(tokenizer, text, name), context, limit)
        return torch.cat((torch.tensor(prefix, dtype=torch.long).expand(len(windows), -1), windows), dim=1)

    windows = read(corpus.test, data, sequences)
    spelling = TokenizerSpelling(tokenizer)
    held_out = EvaluationData(windows, spelling=spelling, prefix=len(prefix))
    texts = [DomainShift.of(name, read(load_corpus(name).test, name, len(windows))) for name in others]
    chosen = chosen_perturbations(families, sigmas, seed=seed, others=texts)
    load = lambda path: load_model(path, device=device)[0]  # noqa: E731
    models = {label: LazyModels(load, [path]) for label, path in zip(labels, paths, strict=True)}
    with progress_bar(enabled=progress) as bar:
        measured = measure_arms(
            models,
            held_out,
            chosen,
            cache=None if cache is None else Path(cache),
            progress=bar,
            expect=say_expected if progress else None,
        )
    figures = ()
    if structure:
        some = windows[:_STRUCTURE_WINDOWS].to(device)
        figures = tuple(measure_structure(of, some, arm=label, positions=4) for label, of in models.items())
    return compare(
        measured,
        held_out,
        chosen,
        details={label: ArmDetails(label, str(path)) for label, path in zip(labels, paths, strict=True)},
        structure=figures,
        config={
            "title": f"Models under perturbations: {corpus.name}",
            "evaluated_on": corpus.identity(),
            "context": context,
            "special_tokens_in_front": tokenizer.convert_ids_to_tokens(prefix),
            **(
                {"reached_by_typos": reached_by_typos(windows[:, len(prefix) :].flatten().tolist(), spelling)}
                if any(family.startswith("typos") for family in families)
                else {}
            ),
        },
    )


def _shared_tokenizer(paths: Sequence[Path]) -> PreTrainedTokenizerBase:
    tokenizers = [load_tokenizer(path) for path in paths]
    for path, tokenizer in zip(paths, tokenizers, strict=True):
        if tokenizer.get_vocab() != tokenizers[0].get_vocab():
            raise ArgumentError(
                f"models that are compared must share their tokenizer, since bits are per token, and those of "
                f"'{paths[0]}' and '{path}' differ; evaluate them apart."
            )
    return tokenizers[0]


def _check_context(path: Path, context: int, special: int) -> None:
    config = load_config(path).get_text_config(decoder=True)
    longest = getattr(config, "max_position_embeddings", None)  # n_positions of GPT-2 goes by this name too
    if longest is not None and context + special > longest:
        in_front = f" with {special} special tokens in front" if special else ""
        raise ArgumentError(
            f"context must be at most {longest - special} for the model in '{path}', the longest text it reads"
            f"{in_front}, received {context}; pass --context {longest - special}."
        )


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, name: str) -> Tensor:
    with quiet_transformers():
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise DataError(f"the test part of corpus '{name}' gives no token; pass another corpus.")
    return torch.tensor(ids, dtype=torch.long)
