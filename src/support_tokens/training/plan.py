"""What one training run is asked to do: a frozen plan whose fields document themselves, and plans with a name."""

__all__ = ["PLANS", "TrainingPlan", "demo_plan", "plan_from_config"]

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from support_tokens.errors import ArgumentError, RunFolderError
from support_tokens.regularizers import check_options, option


@dataclass(frozen=True)
class TrainingPlan:
    """Size of SmallGPT, schedule and seed of one run; arms that are compared share one plan.

    Each field carries its documentation and its bounds in `metadata` (`help`, `least`, `most`, `choices`), from which
    a command line is made.

    Raises:
        ArgumentError: A value is out of its bounds, not finite, or not of its field's type.

    Example:
        >>> TrainingPlan(steps=10).learning_rate
        0.002
        >>> TrainingPlan(steps=-10)
        Traceback (most recent call last):
        support_tokens.errors.ArgumentError: steps must be a whole number of at least 1, received -10; pass such ...
    """

    layers: int = option(4, "residual blocks", least=1)
    heads: int = option(4, "attention heads; divides the width", least=1)
    width: int = option(128, "model width D", least=1)
    context: int = option(128, "characters read at once", least=2)
    dropout: float = option(0.0, "dropout on embeddings, attention and residuals", most=0.9)
    steps: int = option(2000, "optimiser steps", least=1)
    batch_size: int = option(32, "windows in one forward pass", least=1)
    accumulation: int = option(1, "forward passes added up into one optimiser step", least=1)
    learning_rate: float = option(2e-3, "peak learning rate of AdamW", most=10.0)
    warmup: float = option(0.05, "share of the steps in linear warm-up, before the cosine decay to zero", most=0.9)
    weight_decay: float = option(0.1, "decay of weights, on all but biases and norms")
    clip: float = option(1.0, "largest norm of the gradient; 0 does not clip")
    seed: int = option(0, "seed of initial weights, order of data and noise", most=2**31 - 1)
    precision: str = option("float32", "arithmetic of the forward pass", choices=("float32", "bfloat16", "float16"))
    device: str = option(
        "auto", "where to train: an accelerator if there is one, or the processor", choices=("auto", "cpu")
    )
    threads: int = option(
        0, "threads of torch on a processor, on which the last bits depend; 0 leaves torch its choice"
    )
    log_every: int = option(50, "steps between rows of metrics.jsonl", least=1)
    evaluate_every: int = option(500, "steps between looks at the validation text", least=1)
    evaluate_windows: int = option(64, "windows of the validation text in one look, spread evenly", least=1)
    save_every: int = option(500, "steps between checkpoints", least=1)

    def __post_init__(self):
        check_options(self)
        if self.width % self.heads:
            raise ArgumentError(
                f"heads must divide width, received heads={self.heads} and width={self.width}; "
                f"pass for example --width {self.heads * max(1, self.width // self.heads)}."
            )


def plan_from_config(config: Mapping) -> TrainingPlan:
    """Makes a plan from what `config.json` holds.

    Args:
        config: Value of each field by name; a field that is missing takes its default.

    Raises:
        RunFolderError: A name that a plan has not, or a value out of bounds.

    Example:
        >>> plan_from_config({"steps": 7}).steps
        7
    """
    try:
        return TrainingPlan(**config)
    except (TypeError, ArgumentError) as error:
        raise RunFolderError(f"the plan in config.json cannot be used ({error}); train again.") from error


PLANS: dict[str, TrainingPlan] = {
    # Small batches and a high rate: within minutes it is the number of steps that takes a model of characters past the
    # plateau of pairs of letters.
    "demo": TrainingPlan(
        # One thread: products this small gain little from a second, and lose much where another program has the core.
        width=96, batch_size=8, steps=1000, learning_rate=4e-3, evaluate_every=250, evaluate_windows=64, save_every=250,
        threads=1,
    ),
    "small": TrainingPlan(),
    "tiny": TrainingPlan(
        layers=2, heads=2, width=32, context=32, batch_size=8, steps=60, warmup=0.1, log_every=10, evaluate_every=30,
        evaluate_windows=8, save_every=30,
    ),
}  # fmt: skip
"""Plans by name: `demo` trains three arms in minutes on two cores, `small` is the default, `tiny` tries a set-up."""


def demo_plan(**changes: Any) -> TrainingPlan:
    """The plan of the demo, with changes.

    Args:
        changes: Fields to change.

    Raises:
        ArgumentError: A value out of bounds.

    Example:
        >>> demo_plan(seed=3).seed
        3
    """
    return dataclasses.replace(PLANS["demo"], **changes)
