r"""Whether a member of the barrier's family beats the best rival at equal clean cost, by an interval without zero."""

__all__ = ["LARGEST_COST", "LAW", "Contest", "contests"]

from collections.abc import Sequence
from dataclasses import dataclass

from support_tokens.report.records import Difference, Estimate, RobustnessReport

LARGEST_COST = 0.014
"""Largest clean cost of an arm that takes part, as a share of the baseline's bits: what the paper's barrier costs."""

LAW = ("barrier", "hold", "invariant", "condition", "law-noise", "variational")
"""Names of the arms that come of the paper's law, alone or combined with others; all others are rivals."""


@dataclass(frozen=True)
class Contest:
    """The best arm of the law against the best rival under one family of perturbations.

    `difference` is mean bits over the curve, the law's minus the rival's, paired; `outcome` is `law`, `rival` or
    `open`. Both arms are chosen on one half of the sequences and judged on the other.
    """

    family: str
    law: str
    rival: str
    difference: Estimate
    outcome: str


def contests(report: RobustnessReport) -> tuple[Contest, ...]:
    """One contest a family of perturbations, where the report has arms of both kinds within the clean cost.

    Args:
        report: A robustness report whose arms are named as in `support_tokens.regularizers`; without a `split` there is
            no contest, since what is chosen on the text it is judged on would look better than it is.
    """
    if report.split is None:
        return ()
    bits = {(choice.arm, choice.of): choice.bits for choice in report.split.choice}
    clean = report.perturbations[0].name
    largest = (1 + LARGEST_COST) * bits[report.baseline, clean]
    within = [arm.name for arm in report.arms if bits[arm.name, clean] <= largest or arm.name == report.baseline]
    of_law = [arm for arm in within if any(part.split(",")[0] in LAW for part in arm.split(" + "))]
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
        if (d.arm, d.against, d.of) == (arm, other, family):
            return d.bits
        if (d.arm, d.against, d.of) == (other, arm, family):
            if d.bits.low is None or d.bits.high is None:
                return Estimate(-d.bits.value)
            return Estimate(-d.bits.value, -d.bits.high, -d.bits.low)
    raise KeyError((arm, other, family))
