r"""The verdict in words, by rules that read nothing but the figures of the report.

An arm is called better or worse only where the paired interval of the difference excludes zero, and the difference is
large enough to matter. What the number of seeds allows to be claimed stands in front of it: nothing with one, a
tentative statement below five.
"""

__all__ = [
    "SCALE_TOLERANCE",
    "SEEDS_FOR_A_CLAIM",
    "SMALLEST_COST",
    "SMALLEST_RATIO",
    "Finding",
    "Verdict",
    "clean_cost",
    "direction",
    "embedding_scale",
    "headline",
    "leaders",
    "seed_caveat",
    "under_noise",
    "verdict",
]

from dataclasses import dataclass
from typing import Literal

from support_tokens.report import format as fmt
from support_tokens.report.records.estimate import Estimate
from support_tokens.report.records.robustness import RobustnessReport

SEEDS_FOR_A_CLAIM = 5
"""Fewer seeds are reported as tentative."""
SCALE_TOLERANCE = 0.1
"""Embeddings within this share of the baseline's root mean square count as unchanged in size."""
SMALLEST_COST = 0.001
"""Clean figures that differ by a smaller share of the baseline's count as equal, however narrow the interval."""
SMALLEST_RATIO = 0.005
"""Degradation ratios that differ by less count as equal, however narrow the interval."""

ABSOLUTE, MATCHED = "embedding_noise/absolute", "embedding_noise/matched"

Tone = Literal["better", "worse", "open", "note"]


@dataclass(frozen=True)
class Finding:
    """One sentence on one arm under one topic, how it speaks for the arm, and the figures that it follows from."""

    topic: str
    arm: str
    tone: Tone
    text: str
    figures: str


@dataclass(frozen=True)
class Verdict:
    """The headline, what the number of seeds allows, and the findings behind them."""

    headline: str
    caveat: str
    findings: tuple[Finding, ...]

    def by_topic(self) -> dict[str, list[Finding]]:
        """Findings under their topics, in order."""
        topics: dict[str, list[Finding]] = {}
        for finding in self.findings:
            topics.setdefault(finding.topic, []).append(finding)
        return topics


def verdict(report: RobustnessReport) -> Verdict:
    """All that the figures of a report allow to be said."""
    others = [arm.name for arm in report.arms if arm.name != report.baseline]
    findings = [clean_cost(report, arm) for arm in others]
    findings += [under_noise(report, arm, family) for family in report.families for arm in others]
    findings += [embedding_scale(report, arm) for arm in others]
    return Verdict(headline(report), seed_caveat(report), tuple(findings))


def direction(difference: Estimate, smallest: float = 0.0) -> Literal["lower", "higher", "unclear"]:
    """Where a difference lies, if its interval excludes zero and it is at least `smallest` in size.

    Example:
        >>> direction(Estimate(-1.0, -2.0, -0.5)), direction(Estimate(-1.0, -2.0, 0.5)), direction(Estimate(-1.0))
        ('lower', 'unclear', 'unclear')
        >>> direction(Estimate(-1.0, -2.0, -0.5), smallest=1.5)
        'unclear'
    """
    if not difference.excludes(0.0) or abs(difference.value) < smallest:
        return "unclear"
    return "lower" if difference.value < 0 else "higher"


def seed_caveat(report: RobustnessReport) -> str:
    """What the number of seeds allows."""
    n = len(report.seeds)
    if n == 1:
        return (
            "With one seed, intervals cover the choice of sequences only: training again with another seed can move "
            "these figures by more than the intervals show. Findings below hold for these trained models."
        )
    if n < SEEDS_FOR_A_CLAIM:
        return (
            f"{n} seeds: tentative. The intervals cover sequences and seeds, but fewer than {SEEDS_FOR_A_CLAIM} seeds "
            "say little about the spread between them."
        )
    return f"{n} seeds. The intervals cover sequences and seeds."


def clean_cost(report: RobustnessReport, arm: str) -> Finding:
    """What the arm costs without noise, against the baseline."""
    clean = report.perturbations[0].name
    difference = next(d.bits for d in report.differences if (d.arm, d.condition) == (arm, clean))
    base = report.result(report.baseline, clean).bits.value
    share = difference.value / base
    figures = f"{fmt.percent(share)}; {_difference(report, difference)}"
    name, where = fmt.label(report, arm), direction(difference, SMALLEST_COST * base)
    if where == "unclear":
        return Finding("Clean cost", arm, "open", f"{name}: no clear difference in clean {report.measure}.", figures)
    tone: Tone = "better" if where == "lower" else "worse"
    return Finding("Clean cost", arm, tone, f"{name}: clean {report.measure} is {where} than the baseline's.", figures)


def under_noise(report: RobustnessReport, arm: str, family: str) -> Finding:
    """Whether the arm degrades less than the baseline over a curve, and not only because its clean figure is worse."""
    difference, heights = report.area_difference(arm, report.baseline, family), _heights(report, family)
    name, noise = fmt.label(report, arm), fmt.family(family)
    figures = (
        f"mean ratio {fmt.ratio(heights[arm], 3)} against {fmt.ratio(heights[report.baseline], 3)}; "
        f"{_difference(report, difference.degradation)}"
    )
    where, bits = direction(difference.degradation, SMALLEST_RATIO), direction(difference.bits)
    topic = f"Under {noise}"
    if where == "unclear":
        return Finding(topic, arm, "open", f"{name}: no clear difference in degradation under {noise}.", figures)
    if where == "higher":
        return Finding(topic, arm, "worse", f"{name} degrades more than the baseline under {noise}.", figures)
    if bits == "lower":
        return Finding(topic, arm, "better", f"{name} degrades less than the baseline under {noise}.", figures)
    but = "higher than the baseline's" if bits == "higher" else "not clearly lower"
    text = (
        f"{name} has a lower ratio than the baseline under {noise}, but its {report.measure} there is {but}: the ratio "
        "alone is no gain."
    )
    return Finding(topic, arm, "open", text, figures)


def embedding_scale(report: RobustnessReport, arm: str) -> Finding:
    """Whether embeddings merely grew, so that noise of fixed size became smaller beside them."""
    grown, name = report.arm(arm).rms_ratio, fmt.label(report, arm)
    figures = f"root mean square {fmt.number(grown, 2)} times the baseline's"
    tones = {f: under_noise(report, arm, f).tone for f in (ABSOLUTE, MATCHED) if f in report.families}
    tone: Tone = "note"
    if abs(grown - 1) <= SCALE_TOLERANCE:
        text = f"{name}: embeddings keep their size."
    elif grown < 1:
        text = f"{name}: embeddings shrank, so noise of a fixed size is larger beside them."
    elif tones.get(ABSOLUTE) != "better":
        text = f"{name}: embeddings grew."
    elif tones.get(MATCHED) == "better":
        text = f"{name}: embeddings grew, but it gains under scale-matched noise too: scale is not all of it."
    else:
        tone = "open"
        why = "it does not gain under scale-matched noise" if MATCHED in tones else "scale-matched noise was not tried"
        text = (
            f"{name}: embeddings grew and {why}; its gain under absolute noise may be one of scale, not of robustness."
        )
    return Finding("Size of the embeddings", arm, tone, text, figures)


def leaders(report: RobustnessReport, family: str) -> list[str]:
    """The arm of the lowest mean degradation, and every arm from which its difference is unclear.

    Returns:
        Names of arms, the lowest first; a single one only where it is clearly ahead of all others.
    """
    heights = _heights(report, family)
    ranked = sorted(heights, key=lambda name: heights[name])
    first, *rest = ranked
    return [first, *(a for a in rest if _level(report, first, a, family))]


def _level(report: RobustnessReport, arm: str, other: str, family: str) -> bool:
    return direction(report.area_difference(arm, other, family).degradation, SMALLEST_RATIO) == "unclear"


def headline(report: RobustnessReport) -> str:
    """The verdict in one or two sentences."""
    curves = report.families
    if len(report.arms) == 1:
        return "One arm: nothing is compared."
    if not curves:
        return "Clean figures only: nothing is said about robustness."
    found = [(leaders(report, family), fmt.family(family)) for family in curves]
    clear: dict[str, list[str]] = {}
    for ahead, noise in found:
        if len(ahead) == 1:
            clear.setdefault(ahead[0], []).append(noise)
    parts = [f"{fmt.label(report, arm)} degrades least under {_listed(noises)}" for arm, noises in clear.items()]
    level = {noise: [fmt.label(report, arm) for arm in ahead] for ahead, noise in found if len(ahead) > 1}
    if len(level) > 2:  # who is level with whom would fill a page; it stands in the findings
        parts.append(f"no arm is clearly ahead under {_listed(list(level))}")
    else:
        parts += [f"no arm is clearly ahead under {n}, where {_listed(arms)} are level" for n, arms in level.items()]
    n = len(report.seeds)
    said = f"{'; '.join(parts)}.{_cost(report, list(clear))}"
    if n == 1:
        return f"One seed: no claim. On these {report.data.sequences} sequences, {said}"
    if n < SEEDS_FOR_A_CLAIM:
        return f"Tentative, {n} seeds: {said}"
    return said[0].upper() + said[1:]


def _cost(report: RobustnessReport, arms: list[str]) -> str:
    """What the arms that are clearly ahead cost without noise."""
    clean = report.perturbations[0].name
    base = report.result(report.baseline, clean).bits.value
    costs = [
        f"{fmt.percent(d.bits.value / base)} for {fmt.label(report, arm)}"
        for arm in arms
        if (d := report.difference(arm, clean)) is not None and direction(d.bits, SMALLEST_COST * base) != "unclear"
    ]
    return f" Clean {report.measure}: {_listed(costs)}." if costs else ""


def _heights(report: RobustnessReport, family: str) -> dict[str, float]:
    return {area.arm: area.degradation.value for area in report.areas if area.family == family}


def _difference(report: RobustnessReport, estimate: Estimate, digits: int = 3) -> str:
    if estimate.low is None:
        return f"difference {fmt.signed(estimate.value, digits)}, no interval"
    return (
        f"difference {fmt.signed(estimate.value, digits)}, {100 * report.bootstrap.confidence:g}\u00a0% interval "
        f"{fmt.interval(estimate, digits, sign=True)}"
    )


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
