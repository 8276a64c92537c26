r"""Evaluation of finished runs of SmallGPT on held-out text, clean and under perturbations, in bits per character."""

__all__ = ["evaluate_runs", "measure_runs"]

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from support_tokens.errors import ArgumentError
from support_tokens.models import build_small_gpt, encode, load_small_gpt, model_margins, unknown_rate
from support_tokens.regularizers import attach, regularizer_config
from support_tokens.report.records import ArmMargins, LayerMargins, RobustnessReport, StructureFigures
from support_tokens.robustness.comparison import ArmDetails, compare
from support_tokens.robustness.evaluate import LazyModels, measure_arms
from support_tokens.robustness.lab.runs import TrainedRun, by_label, corpus_of, open_run
from support_tokens.robustness.lab.windows import held_out_windows, progress_bar, say_expected
from support_tokens.robustness.measure import EvaluationData, Measurement
from support_tokens.robustness.perturbations.set import PerturbationSet, chosen_perturbations
from support_tokens.robustness.perturbations.text import DomainShift
from support_tokens.robustness.structure import measure_structure
from support_tokens.training import Corpus, load_corpus, plan_from_config, read_result

_MARGIN_WINDOWS = 16
_STRUCTURE_WINDOWS = 8
_SENTENCE = 160


def evaluate_runs(
    folders: Sequence[str | Path],
    *,
    data: str | None = None,
    sequences: int = 64,
    sigmas: Sequence[float] = (0.1, 0.25, 0.5, 1.0),
    seed: int = 0,
    families: Sequence[str] = ("noise",),
    others: Sequence[str] = (),
    structure: bool = True,
    timings: bool = True,
    split: bool = False,
    cache: str | Path | None = None,
    progress: bool = True,
) -> RobustnessReport:
    r"""Evaluates finished runs on held-out text, clean and under perturbations.

    Runs that differ only in their seed are one arm, and the arm of the first folder is the baseline. Noise of each
    sigma is added to the embeddings twice: as it is, and times the root mean square of the model's clean embeddings.

    Args:
        folders: Run folders, trained on one corpus with one context.
        data: Corpus whose test part is read; None: that of training.
        sequences: Windows of the test part, spread evenly.
        sigmas: Standard deviations of the noise.
        seed: Seed of all random draws.
        families: Families of perturbations, of `support_tokens.robustness.perturbations.set.FAMILIES`.
        others: Other corpora whose test part is read too.
        structure: Measure the structure of embeddings and attention: before training, after it, and with embeddings
            scaled to the size of the baseline's.
        timings: Keep the seconds of training; without them, equal runs have equal reports.
        split: Also keep the figures for selecting arms on one half of the windows and judging them on the other.
        cache: Folder that keeps each measurement, so that a stopped evaluation can continue.
        progress: Say the expected time and draw a bar on stderr.

    Raises:
        ArgumentError: There are no folders, or runs cannot be compared.
        DataError: The corpus cannot be read or has changed since training.
        RunFolderError: A folder holds no finished run.
    """
    inputs = _Inputs.of(folders, data, sequences, sigmas, seed, families, others)
    measured = inputs.measure(cache, progress)
    arms, models, tokenizer, windows = inputs.arms, inputs.models, inputs.tokenizer, inputs.data.input_ids
    first, corpus, texts = inputs.first, inputs.corpus, inputs.texts
    context = int(first.config["plan"]["context"])
    sentence = encode(tokenizer, _sentence(corpus.test, context)).unsqueeze(0)
    details = {
        label: ArmDetails(
            label=label,
            description=of_arm[0].arm.summary,
            seconds=sum(read_result(run.folder).seconds for run in of_arm) if timings else None,
            margins=_margins(models[label][0], tokenizer, windows[:_MARGIN_WINDOWS], sentence),
        )
        for label, of_arm in arms.items()
    }
    config = {
        "title": f"SmallGPT under perturbations: {corpus.name}"
        if tuple(families) != ("noise",) or others
        else f"SmallGPT under embedding noise: {corpus.name}",
        "plan": {key: value for key, value in first.config["plan"].items() if key != "seed"},
        "trained_on": first.config["corpus"],
        "evaluated_on": corpus.identity(),
        "unknown_characters": unknown_rate(tokenizer, windows),
        **({"unknown_characters_elsewhere": _unknown_elsewhere(tokenizer, texts)} if texts else {}),
        "arms": {label: regularizer_config(of_arm[0].arm) for label, of_arm in arms.items()},
    }
    figures: tuple[StructureFigures, ...] = ()
    if structure:
        rms = {label: [m.embedding_rms for m in of_arm] for label, of_arm in measured.items()}
        figures = tuple(_structure(arms, rms, first.label, tokenizer, windows[:_STRUCTURE_WINDOWS]))
    return compare(
        measured,
        inputs.data,
        inputs.perturbations,
        seeds=[run.seed for run in arms[first.label]],
        details=details,
        structure=figures,
        split=split,
        config=config,
    )


def measure_runs(
    folders: Sequence[str | Path],
    *,
    cache: str | Path,
    data: str | None = None,
    sequences: int = 64,
    sigmas: Sequence[float] = (0.1, 0.25, 0.5, 1.0),
    seed: int = 0,
    families: Sequence[str] = ("noise",),
    others: Sequence[str] = (),
    progress: bool = True,
) -> None:
    """Measures finished runs into `cache`, where `evaluate_runs` with the same arguments finds them.

    Arguments and errors are those of `evaluate_runs`.
    """
    _Inputs.of(folders, data, sequences, sigmas, seed, families, others).measure(cache, progress)


@dataclass(frozen=True)
class _Inputs:
    """What an evaluation of runs reads."""

    first: TrainedRun
    arms: Mapping[str, Sequence[TrainedRun]]
    models: Mapping[str, LazyModels]
    tokenizer: Any
    corpus: Corpus
    data: EvaluationData
    texts: Sequence[DomainShift]
    perturbations: PerturbationSet

    @classmethod
    def of(
        cls,
        folders: Sequence[str | Path],
        data: str | None,
        sequences: int,
        sigmas: Sequence[float],
        seed: int,
        families: Sequence[str],
        others: Sequence[str],
    ) -> "_Inputs":
        if not folders:
            raise ArgumentError(
                "At least one run folder is required for an evaluation, received none; train one first."
            )
        runs = [open_run(folder) for folder in folders]
        arms, first = by_label(runs), runs[0]
        corpus = corpus_of(first, data)
        _, tokenizer = load_small_gpt(first.folder)
        context = int(first.config["plan"]["context"])
        corpus.require(context)

        def windows(text: str, limit: int) -> Tensor:
            return held_out_windows(encode(tokenizer, text), context, limit)

        held_out = EvaluationData(windows(corpus.test, sequences), characters=1)
        texts = [DomainShift.of(name, windows(load_corpus(name, context).test, held_out.sequences)) for name in others]
        return cls(
            first,
            arms,
            {label: LazyModels(_load, of_arm) for label, of_arm in arms.items()},
            tokenizer,
            corpus,
            held_out,
            texts,
            chosen_perturbations(families, sigmas, seed=seed, others=texts),
        )

    def measure(self, cache: str | Path | None, progress: bool) -> dict[str, list[Measurement]]:
        """Measures the runs, with a bar."""
        with progress_bar(enabled=progress) as bar:
            return measure_arms(
                self.models,
                self.data,
                self.perturbations,
                cache=None if cache is None else Path(cache),
                progress=bar,
                expect=say_expected if progress else None,
            )


def _unknown_elsewhere(tokenizer, texts: Sequence[DomainShift]) -> dict[str, float]:
    """Fraction of characters of the other texts that are not in the model's vocabulary, by corpus."""
    return {text.corpus: unknown_rate(tokenizer, text.input_ids) for text in texts if text.input_ids is not None}


def _load(run: TrainedRun) -> nn.Module:
    return load_small_gpt(run.folder)[0]


def _structure(
    arms: Mapping[str, Sequence[TrainedRun]],
    rms: Mapping[str, Sequence[float]],
    baseline: str,
    tokenizer,
    windows: Tensor,
) -> Iterator[StructureFigures]:
    for label, of_arm in arms.items():
        begun = LazyModels(lambda run: _initial(run, tokenizer), of_arm)
        yield measure_structure(begun, windows, arm=label, setting="before training")
    for label, of_arm in arms.items():
        yield measure_structure(LazyModels(_load, of_arm), windows, arm=label, setting="after training")
    for label, of_arm in arms.items():
        if label != baseline:
            yield measure_structure(
                LazyModels(_load, of_arm),
                windows,
                arm=label,
                setting="after training, embeddings of the baseline's size",
                scaled_by=[there / here for here, there in zip(rms[label], rms[baseline], strict=True)],
            )


def _initial(run: TrainedRun, tokenizer) -> nn.Module:
    """The model before the first step of the run."""
    plan = plan_from_config(run.config["plan"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.seed)
        model = build_small_gpt(
            tokenizer, layers=plan.layers, heads=plan.heads, width=plan.width, context=plan.context, dropout=0.0
        )
    attach(model, run.arm, seed=plan.seed).remove()
    return model.eval()


def _sentence(text: str, context: int) -> str:
    """A part of the text that begins at a sentence and is at most the context or `_SENTENCE` characters long."""
    begin = re.search(r"[.!?]\s+(?=[A-Z])", text)
    start = begin.end() if begin else 0
    return text[start : start + min(context, _SENTENCE)]


def _margins(model: nn.Module, tokenizer, windows: Tensor, sentence: Tensor) -> ArmMargins:
    on_text = model_margins(model, windows)[0]
    on_sentence = model_margins(model, sentence)[0]
    rankable = on_text.rankable
    text = LayerMargins.of_columns(
        [tokenizer.decode([token]) for token in sentence[0].tolist()],
        on_sentence.log_abs_det[0].tolist(),
        on_sentence.sign[0].tolist(),
        on_sentence.rankable[0].tolist(),
        ids=sentence[0].tolist(),
    )
    return ArmMargins(
        log_abs_det=on_text.log_abs_det[rankable].tolist(),
        sign=[int(s) for s in on_text.sign[rankable].tolist()],
        text=text,
    )
