r"""Evaluation of any causal language models of transformers, given as folders: bits per token."""

__all__ = ["TokenizerSpelling", "evaluate_models"]

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from support_tokens.errors import ArgumentError, DataError, RunFolderError
from support_tokens.models import checked_device, load_model, quiet_transformers
from support_tokens.report.records import RobustnessReport
from support_tokens.robustness.comparison import ArmDetails, compare
from support_tokens.robustness.evaluate import LazyModels, measure_arms
from support_tokens.robustness.lab.windows import held_out_windows, progress_bar
from support_tokens.robustness.measure import EvaluationData
from support_tokens.robustness.perturbations.set import chosen_perturbations
from support_tokens.robustness.perturbations.text import DomainShift
from support_tokens.robustness.structure import measure_structure
from support_tokens.training import load_corpus

_STRUCTURE_WINDOWS = 4


class TokenizerSpelling:
    """Texts of a tokenizer's tokens, each by itself, and tokens of texts, for typos.

    Args:
        tokenizer: Any tokenizer of transformers.

    Example:
        >>> from support_tokens.models import character_tokenizer
        >>> spelling = TokenizerSpelling(character_tokenizer("abba"))
        >>> spelling.text(2), spelling.tokens("ab")
        ('a', [2, 3])
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        # Kept, since the tokens of a text are few beside its length, and a call of a tokenizer takes a while.
        self.text = lru_cache(None)(lambda token: str(tokenizer.decode([token])))
        self._tokens = lru_cache(None)(lambda text: tuple(tokenizer.encode(text, add_special_tokens=False)))

    def tokens(self, text: str) -> list[int]:
        """A tokenization of the text, without special tokens."""
        return list(self._tokens(text))


def evaluate_models(
    folders: Sequence[str | Path],
    data: str,
    *,
    sequences: int = 64,
    context: int = 128,
    sigmas: Sequence[float] = (0.1, 0.25, 0.5, 1.0),
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

    Args:
        folders: Folders of checkpoints with their tokenizers.
        data: Corpus whose test part is read.
        sequences: Windows of the test part, spread evenly.
        context: Tokens of a window.
        sigmas: Standard deviations of the noise.
        seed: Seed of whatever is drawn.
        families: Families of perturbations, of `support_tokens.robustness.perturbations.set.FAMILIES`.
        others: Other corpora whose test part is read too.
        structure: Measure the structure of embeddings and of the first block's attention, where it can be read.
        device: As torch names it.
        cache: Folder that keeps what was measured, for an evaluation that may be stopped.
        progress: Draw a bar on stderr.

    Raises:
        ArgumentError: No folders, tokenizers that differ, a context longer than that of a model, or a device that
            cannot be used here.
        DataError: The corpus cannot be read or is too short.
        RunFolderError: A folder holds no model.
    """
    if not folders:
        raise ArgumentError("At least one model is required for an evaluation, received none; pass a folder.")
    paths = [Path(folder) for folder in folders]
    names = [path.name for path in paths]
    labels = [name if names.count(name) == 1 else str(path) for name, path in zip(names, paths, strict=True)]
    if len(set(labels)) < len(labels):
        raise ArgumentError("Each model may be given once, but one folder is there twice; leave one out.")
    checked_device(device)
    tokenizer = _shared_tokenizer(paths)
    for path in paths:
        _check_context(path, context)
    corpus = load_corpus(data)
    windows = held_out_windows(_encode(tokenizer, corpus.test, data), context, sequences)
    held_out = EvaluationData(windows, spelling=TokenizerSpelling(tokenizer))
    texts = [
        DomainShift.of(name, held_out_windows(_encode(tokenizer, load_corpus(name).test, name), context, len(windows)))
        for name in others
    ]
    chosen = chosen_perturbations(families, sigmas, seed=seed, others=texts)
    load = lambda path: load_model(path, device=device)[0]  # noqa: E731
    models = {label: LazyModels(load, [path]) for label, path in zip(labels, paths, strict=True)}
    with progress_bar(enabled=progress) as bar:
        measured = measure_arms(models, held_out, chosen, cache=None if cache is None else Path(cache), progress=bar)
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
        },
    )


def _shared_tokenizer(paths: Sequence[Path]) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    found = []
    for path in paths:
        if not path.is_dir():
            raise RunFolderError(f"there is no folder '{path}'; check the path.")
        try:
            with quiet_transformers():
                found.append(AutoTokenizer.from_pretrained(path, local_files_only=True))
        except Exception as error:  # transformers and tokenizers each raise their own, with no common root
            reason = " ".join(str(error).split())[:300]
            raise RunFolderError(f"the tokenizer in '{path}' cannot be read ({reason}); save it there.") from error
    for path, tokenizer in zip(paths, found, strict=True):
        if tokenizer.get_vocab() != found[0].get_vocab():
            raise ArgumentError(
                f"models that are compared must share their tokenizer, since bits are per token, and those of "
                f"'{paths[0]}' and '{path}' differ; evaluate them apart."
            )
    return found[0]


def _check_context(path: Path, context: int) -> None:
    from transformers import AutoConfig

    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(path, local_files_only=True).get_text_config(decoder=True)
    except Exception as error:  # transformers raises whatever a strange configuration brings about
        reason = " ".join(str(error).split())[:300]
        raise RunFolderError(f"the model in '{path}' cannot be read ({reason}); save it there.") from error
    longest = getattr(config, "max_position_embeddings", None)  # n_positions of GPT-2 goes by this name too
    if longest is not None and context > longest:
        raise ArgumentError(
            f"context must be at most {longest} for the model in '{path}', the longest text it reads, received "
            f"{context}; pass --context {longest}."
        )


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, name: str) -> Tensor:
    with quiet_transformers():
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise DataError(f"the test part of corpus '{name}' gives no token; pass another corpus.")
    return torch.tensor(ids, dtype=torch.long)
