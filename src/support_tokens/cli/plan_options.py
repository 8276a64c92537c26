"""Options of the training plan, made from its fields."""

__all__ = ["with_plan"]

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated

import typer

from support_tokens.training import PLANS, TrainingPlan


def with_plan(default: str) -> Callable[[Callable], Callable]:
    """Gives a verb one option for each field of the training plan, documented by the field.

    Args:
        default: Name of the plan that holds the defaults.
    """

    def decorate(verb: Callable) -> Callable:
        plan = PLANS[default]
        own = [p for p in inspect.signature(verb).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        options = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=getattr(plan, field.name),
                annotation=Annotated[field.type, typer.Option(help=field.metadata["help"], rich_help_panel="Plan")],
            )
            for field in dataclasses.fields(TrainingPlan)
        ]
        verb.__signature__ = inspect.Signature(own + options)  # type: ignore[attr-defined]
        verb.__annotations__ = {p.name: p.annotation for p in own + options}
        return verb

    return decorate
