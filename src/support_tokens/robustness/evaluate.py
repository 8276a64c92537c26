r"""The evaluation loop: models of arms, read one at a time, measured under the same perturbations and compared.

`measure` reads one model; `compare` makes the report of what was measured, so arms may also be measured one after
another, on other days or machines. `evaluate_robustness` does both.
"""

__all__ = ["LazyModels", "evaluate_robustness", "measure_arms"]

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from support_tokens.report.records import RobustnessReport
from support_tokens.robustness.bootstrap import Bootstrap
from support_tokens.robustness.cache import read_measurement, write_measurement
from support_tokens.robustness.comparison import ArmDetails, compare
from support_tokens.robustness.measure import EvaluationData, Measurement, expected_seconds, measure
from support_tokens.robustness.perturbations.base import Perturbation
from support_tokens.robustness.perturbations.set import PerturbationSet, standard_perturbations

Progress = Callable[[int, int, str], None]
"""Called with batches done, batches in all, and the arm and perturbation that was read."""


class LazyModels(Sequence):
    """Models that are loaded when they are asked for, so that one at a time is in memory.

    Args:
        load: Loads the model of one item.
        items: What `load` takes, such as folders, one a seed.

    Example:
        >>> models = LazyModels(lambda width: nn.Linear(width, 1), (2, 3))
        >>> len(models), models[1]
        (2, Linear(in_features=3, out_features=1, bias=True))
    """

    def __init__(self, load: Callable[[Any], nn.Module], items: Sequence[Any]) -> None:
        self._load, self._items = load, items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index):  # type: ignore[override]
        return self._load(self._items[index])


def measure_arms(
    arms: Mapping[str, nn.Module | Sequence[nn.Module]],
    data: EvaluationData,
    perturbations: PerturbationSet,
    *,
    cache: Path | None = None,
    batch_size: int = 16,
    progress: Progress | None = None,
    expect: Callable[[float], None] | None = None,
) -> dict[str, list[Measurement]]:
    """Measures each model of each arm.

    Args:
        arms: Models by arm, one a seed; a sequence may load them lazily.
        data: Held-out sequences.
        perturbations: The set.
        cache: Folder that keeps each measurement as soon as it is made and reads it again for the same weights, data,
            perturbations, batch size and code.
        batch_size: Sequences at a time.
        progress: Called after each batch, and after each model that the cache holds.
        expect: Called once, before the first measurement, with the expected seconds of all that remain.

    Raises:
        ArgumentError: As in `measure`.
        RunFolderError: The cache cannot be read or written.
    """
    models = {name: (arm,) if isinstance(arm, nn.Module) else arm for name, arm in arms.items()}
    per_model = len(perturbations.items) * -(-data.sequences // max(batch_size, 1))
    total, done = per_model * sum(map(len, models.values())), 0
    measured: dict[str, list[Measurement]] = {name: [] for name in models}

    def advance(batches: int, what: str) -> None:
        nonlocal done
        done += batches
        if progress is not None:
            progress(done, total, what)

    for name, arm in models.items():
        for number in range(len(arm)):
            model = arm[number]
            kept = None if cache is None else read_measurement(cache, model, data, perturbations, batch_size)
            if kept is not None:
                advance(per_model, f"{name}: read from the cache")
            else:
                if expect is not None:
                    seconds = expected_seconds(model, data, perturbations, batch_size=batch_size)
                    expect(seconds * (total - done) / per_model)
                    expect = None
                kept = measure(
                    model,
                    data,
                    perturbations,
                    batch_size=batch_size,
                    progress=lambda what, name=name: advance(1, f"{name}: {what}"),
                    whose=f"arm '{name}'" + (f", seed {number}" if len(arm) > 1 else ""),
                )
                if cache is not None:
                    write_measurement(cache, kept, model, data, perturbations, batch_size)
            measured[name].append(kept)
    return measured


def evaluate_robustness(
    arms: Mapping[str, nn.Module | Sequence[nn.Module]],
    data: EvaluationData | Tensor,
    perturbations: PerturbationSet | Sequence[Perturbation] | None = None,
    *,
    baseline: str | None = None,
    seeds: Sequence[int] | None = None,
    details: Mapping[str, ArmDetails] | None = None,
    bootstrap: Bootstrap | None = None,
    batch_size: int = 16,
    cache: Path | None = None,
    config: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> RobustnessReport:
    r"""Compares arms under the same perturbations on the same sequences.

    With $\ell_n$ the nats of sequence $n$ and $c_n$ its predicted characters (or tokens),

    $$ \mathrm{bits} = \frac{\sum_n \ell_n}{\ln 2\, \sum_n c_n}, \qquad
       \mathrm{degradation} = \frac{\mathrm{bits(perturbed)}}{\mathrm{bits(clean)}}, $$

    averaged over seeds. Only valid tokens count, padding never does. Differences are paired over sequences and seeds.

    Args:
        arms: Causal language models by name; several seeds of an arm as a sequence, which may load them lazily.
        data: Held-out sequences, or `(N, T)` token ids without padding (bits per token then).
        perturbations: `standard_perturbations()` where None.
        baseline: The arm that others are compared with; the first where None.
        seeds: Training seed of each model of an arm, the same for all arms; 0, 1, ... where None.
        details: Label, description, seconds and margins of arms, for the report.
        bootstrap: Makes the intervals; BCa, 95 %, 5000 resamples if None.
        batch_size: Sequences at a time; changes only speed and memory.
        cache: As in `measure_arms`.
        config: Configuration of the experiment, stored in the report.
        progress: Called with batches done, batches in all, and the arm and perturbation that was read.

    Returns:
        The report; with one seed its intervals cover the choice of sequences only, which it states.

    Raises:
        ArgumentError: There are no arms, their numbers of seeds differ, the baseline is unknown, or a loss is not
            finite.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=11, n_positions=8))
        >>> ids = torch.arange(48).reshape(6, 8) % 11
        >>> report = evaluate_robustness({"a": model}, EvaluationData(ids, characters=1))
        >>> report.status.split("; ")[0]
        '1 model under 9 perturbations on 6 sequences (42 predicted tokens)'
    """
    held_out = data if isinstance(data, EvaluationData) else EvaluationData(data)
    if perturbations is None:
        perturbations = standard_perturbations()
    elif not isinstance(perturbations, PerturbationSet):
        perturbations = PerturbationSet(tuple(perturbations))
    measured = measure_arms(arms, held_out, perturbations, cache=cache, batch_size=batch_size, progress=progress)
    return compare(
        measured,
        held_out,
        perturbations,
        baseline=baseline,
        seeds=seeds,
        details=details,
        bootstrap=bootstrap,
        config=config,
    )
