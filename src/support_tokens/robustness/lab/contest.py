r"""The best regularizer of the paper's law against the best of all others, at equal clean cost."""

__all__ = ["LARGEST_COST", "Contest", "arm_kind", "contests"]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from support_tokens.regularizers import REGULARIZERS
from support_tokens.report.records import Difference, Estimate, RobustnessReport

LARGEST_COST = 0.014
"""Largest clean cost of an arm that takes part, as a fraction of the baseline's bits: that of the paper's barrier."""

_EARLIER_NAMES = {"hold", "invariant", "condition", "law-noise", "variational"}
"""Names of the law's family in results of before the regularizers were renamed."""


@dataclass(frozen=True)
class Contest:
    """The best arm of the law against the best other arm under one family of perturbations.

    Args:
        family: Family of perturbations.
        law: The best arm of kind `law`, selected on one half of the sequences.
        rival: The best other arm, selected likewise; a control counts here.
        difference: Mean bits over the curve on the other half, the law's minus the rival's, paired.
        outcome: `law` or `rival` where the interval excludes zero, else `open`.
    """

    family: str
    law: str
    rival: str
    difference: Estimate
    outcome: str


def arm_kind(config: Mapping[str, Any]) -> str:
    """`law`, `rival`, `control` or `none`: what the regularizers of an arm state; a combination with a law is a law.

    Args:
        config: As `regularizer_config` writes it.

    Example:
        >>> arm_kind({"name": "sum", "parts": [{"name": "smart"}, {"name": "barrier"}]})
        'law'
    """
    names = [part["name"] for part in config.get("parts", (config,))]
    kinds = {"law" if name in _EARLIER_NAMES else REGULARIZERS[name].kind for name in names if name != "matched"}
    return next(kind for kind in ("law", "rival", "control", "none") if kind in kinds)


def contests(report: RobustnessReport) -> tuple[Contest, ...]:
    """One contest for each family of perturbations for which arms of both sides are within the clean cost.

    Args:
        report: A report whose `config` holds the configuration of each arm, as `evaluate_runs` writes it. Without a
            `split` there is no contest, because an arm selected on the text it is judged on looks better than it is.
    """
    configs = report.config.get("arms", {})
    if report.split is None or not all(arm.name in configs for arm in report.arms):
        return ()
    bits = {(choice.arm, choice.condition): choice.bits for choice in report.split.choice}
    clean = report.perturbations[0].name
    largest = (1 + LARGEST_COST) * bits[report.baseline, clean]
    within = [arm.name for arm in report.arms if bits[arm.name, clean] <= largest or arm.name == report.baseline]
    of_law = [arm for arm in within if arm_kind(configs[arm]) == "law"]
    rivals = [arm for arm in within if arm not in of_law]
    if not of_law or not rivals:
        return ()
    made = []
    for family in dict.fromkeys(area.family for area in report.areas):
        law, rival = (min(group, key=lambda arm, of=family: bits[arm, of]) for group in (of_law, rivals))
        difference = _bits(report.split.judged, law, rival, family)
        ahead = "law" if difference.value < 0 else "rival"
        made.append(Contest(family, law, rival, difference, ahead if difference.excludes(0.0) else "open"))
    return tuple(made)


def _bits(differences: Sequence[Difference], arm: str, other: str, family: str) -> Estimate:
    for d in differences:
        if (d.arm, d.reference, d.condition) == (arm, other, family):
            return d.bits
        if (d.arm, d.reference, d.condition) == (other, arm, family):
            return -d.bits
    raise KeyError((arm, other, family))
