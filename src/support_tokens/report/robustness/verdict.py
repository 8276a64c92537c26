r"""The verdict in words, by rules that read nothing but the figures of the report.

Bits lead: a model is better under a condition where it needs fewer bits than the baseline, worse where it needs more.
Both ask for a paired interval that excludes zero, a difference large enough to matter, and enough sequences. The ratio
to clean bits says why: a ratio alone is neither gain nor loss.
"""

__all__ = [
    "RULES",
    "SEQUENCES_FOR_A_CLAIM",
    "Condition",
    "Finding",
    "Verdict",
    "caveat",
    "clean_cost",
    "conditions",
    "direction",
    "embedding_scale",
    "headline",
    "leaders",
    "under",
    "verdict",
]

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from support_tokens.report import format as fmt
from support_tokens.report.records.estimate import Estimate
from support_tokens.report.records.robustness import Difference, RobustnessReport

SEEDS_FOR_A_CLAIM = 5
"""Fewer seeds are reported as tentative."""
SEQUENCES_FOR_A_CLAIM = 20
"""With fewer sequences nothing is called significant: a few equal signs are enough to exclude zero."""
SCALE_TOLERANCE = 0.1
"""Embeddings within this fraction of the baseline's root mean square count as unchanged in size."""
SMALLEST_COST = 0.001
"""Bits that differ by a smaller fraction of the baseline's count as equal, however narrow the interval."""
SMALLEST_RATIO = 0.005
"""Degradation ratios that differ by less count as equal, however narrow the interval."""
RULES = (
    "A difference is named where its paired interval excludes zero and it is at least "
    f"{100 * SMALLEST_COST:g}\u00a0% of the baseline’s bits, or {SMALLEST_RATIO:g} of a ratio; smaller ones count as "
    f"no difference. With fewer than {SEQUENCES_FOR_A_CLAIM} sequences none is named."
)
"""The rules in words, for pages."""

ABSOLUTE, MATCHED = "embedding_noise/absolute", "embedding_noise/matched"
_WITHOUT_CURVE = ("weight_rounding", "other_text")  # a mean over 8 and 4 bits, or with another corpus, means nothing
_MOST_NAMED = 3

Tone = Literal["better", "worse", "open", "note"]
Direction = Literal["lower", "higher", "unclear"]


@dataclass(frozen=True)
class Condition:
    """What models are compared under: the curve of a family, or one setting of a family whose mean means nothing."""

    name: str
    family: str
    perturbation: str | None = None


@dataclass(frozen=True)
class Finding:
    """One sentence on one arm under one topic, how it speaks for the arm, and the figures that it follows from.

    `change` is the difference of bits as a fraction of the baseline's, None where there is none.
    """

    topic: str
    arm: str
    tone: Tone
    text: str
    figures: str
    change: float | None = None


@dataclass(frozen=True)
class Verdict:
    """The headline, what seeds and sequences allow to be claimed, and the findings behind them."""

    headline: str
    caveat: str
    findings: tuple[Finding, ...]

    def by_topic(self, *tones: Tone) -> dict[str, list[Finding]]:
        """Findings of these tones (all where none is given) under their topics, in order."""
        topics: dict[str, list[Finding]] = {}
        for finding in self.findings:
            if not tones or finding.tone in tones:
                topics.setdefault(finding.topic, []).append(finding)
        return topics


def verdict(report: RobustnessReport) -> Verdict:
    """All that follows from the figures of a report."""
    others = [arm.name for arm in report.arms if arm.name != report.baseline]
    findings = [clean_cost(report, arm) for arm in others]
    findings += [under(report, arm, condition) for condition in conditions(report) for arm in others]
    findings += [embedding_scale(report, arm) for arm in others]
    return Verdict(headline(report), caveat(report), tuple(findings))


def has_curve(family: str) -> bool:
    """Whether the mean over the settings of a family means anything."""
    return family.split("/")[0] not in _WITHOUT_CURVE


def conditions(report: RobustnessReport) -> list[Condition]:
    """One condition for each curve, and one for each setting of the families without."""
    made = []
    for family in report.families:
        name = fmt.family(family)
        if has_curve(family):
            made.append(Condition(name, family))
            continue
        settings = [p for p in report.perturbations if p.family == family]
        made += [Condition(name if len(settings) == 1 else fmt.setting(p), family, p.name) for p in settings]
    return made


def direction(report: RobustnessReport, difference: Estimate, smallest: float = 0.0) -> Direction:
    """Where a difference lies: its interval excludes zero, it is at least `smallest`, and the sequences are enough."""
    enough = report.data.sequences >= SEQUENCES_FOR_A_CLAIM
    if not enough or not difference.excludes(0.0) or abs(difference.value) < smallest:
        return "unclear"
    return "lower" if difference.value < 0 else "higher"


def caveat(report: RobustnessReport) -> str:
    """What the numbers of sequences and seeds allow to be claimed."""
    sequences, seeds = report.data.sequences, len(report.seeds)
    if sequences < SEQUENCES_FOR_A_CLAIM:
        return (
            f"Only {sequences} sequences: intervals of so few are not reliable, so no difference is called "
            f"significant. Evaluate on {SEQUENCES_FOR_A_CLAIM} or more."
        )
    if seeds == 1 and not report.trained:
        return f"On these {sequences} sequences; the intervals cover the choice of sequences."
    if seeds == 1:
        return (
            "One seed: the intervals cover the choice of sequences only. Training again with another seed can move "
            "these figures by more than the intervals show, so the findings hold for these trained models."
        )
    if seeds < SEEDS_FOR_A_CLAIM:
        return (
            f"{seeds} seeds: tentative. The intervals cover sequences and seeds, but fewer than {SEEDS_FOR_A_CLAIM} "
            "seeds say little about the spread between them."
        )
    return f"{seeds} seeds. The intervals cover sequences and seeds."


def clean_cost(report: RobustnessReport, arm: str) -> Finding:
    """What the arm costs on clean text, beside the baseline."""
    clean = report.perturbations[0].name
    difference = report.difference(arm, clean)
    assert difference is not None, "the baseline has no cost"
    base = report.result(report.baseline, clean).bits.value
    where, name = direction(report, difference.bits, SMALLEST_COST * base), fmt.label(report, arm)
    change = difference.bits.value / base
    figures = f"{fmt.percent(change)}; {_difference(report, difference.bits)}"
    text = f"{name}: clean {report.measure} is {where} than the baseline’s."
    if where == "unclear":
        text = f"{name}: no clear difference in clean {report.measure}."
    return Finding("Clean text", arm, _TONES[where], text, figures, change)


def under(report: RobustnessReport, arm: str, condition: Condition) -> Finding:
    """Whether the arm needs fewer or more bits than the baseline under a condition, and what its ratio says of it."""
    difference = _between(report, arm, report.baseline, condition)
    assert difference is not None, "each arm is compared with the baseline"
    base = _bits(report, report.baseline, condition)
    ratios = [_ratio(report, name, condition) for name in (arm, report.baseline)]
    bits = direction(report, difference.bits, SMALLEST_COST * base)
    ratio = direction(report, difference.degradation, SMALLEST_RATIO)
    name, change = fmt.label(report, arm), difference.bits.value / base
    figures = (
        f"{report.measure} {fmt.percent(change)}; {_difference(report, difference.bits)}; ratio to clean "
        f"{fmt.ratio(ratios[0], 3)}, baseline {fmt.ratio(ratios[1], 3)}"
    )
    return Finding(
        f"Under {condition.name}", arm, _TONES[bits], _sentence(name, report.measure, condition, bits, ratio), figures,
        change,
    )  # fmt: skip


_TONES: dict[Direction, Tone] = {"lower": "better", "higher": "worse", "unclear": "open"}


def _sentence(name: str, measure: str, condition: Condition, bits: Direction, ratio: Direction) -> str:
    where = f"under {condition.name}"
    if bits == "unclear":
        text = f"{name}: no clear difference in {measure} {where}"
        if ratio == "unclear":
            return f"{text}."
        return f"{text}; its ratio to clean is {ratio}, which alone is {'no gain' if ratio == 'lower' else 'no loss'}."
    text = f"{name} has {bits} {measure} than the baseline {where}"
    if ratio == bits:
        return f"{text}, and degrades {'less' if ratio == 'lower' else 'more'}."
    if ratio == "unclear":
        return f"{text}, by as much as on clean text: its ratio to clean is no different."
    return f"{text}; its {ratio} ratio to clean follows from its {bits} clean figure."


def embedding_scale(report: RobustnessReport, arm: str) -> Finding:
    """Whether embeddings merely grew, so that noise of fixed size became smaller beside them."""
    growth, name = report.arm(arm).rms_ratio, fmt.label(report, arm)
    figures = f"root mean square {fmt.number(growth, 2)} times the baseline’s"
    tones = {c.family: under(report, arm, c).tone for c in conditions(report) if c.family in (ABSOLUTE, MATCHED)}
    if abs(growth - 1) <= SCALE_TOLERANCE:
        text = f"{name}: embeddings keep their size."
    elif growth < 1:
        text = f"{name}: embeddings shrank, so noise of a fixed size is larger beside them."
    elif tones.get(ABSOLUTE) != "better":
        text = f"{name}: embeddings grew."
    elif tones.get(MATCHED) == "better":
        text = f"{name}: embeddings grew, but it gains under scale-matched noise too: scale is not all of it."
    else:
        why = "it does not gain under scale-matched noise" if MATCHED in tones else "scale-matched noise was not tried"
        text = (
            f"{name}: embeddings grew and {why}; its gain under absolute noise may be one of scale, not of robustness."
        )
    return Finding("Size of the embeddings", arm, "note", text, figures)


def leaders(report: RobustnessReport, condition: Condition) -> list[str]:
    """The arm of the fewest bits, and every arm from which its difference is unclear.

    Returns:
        Names of arms, the lowest first; a single one only where it is clearly ahead of all others.
    """
    first, *rest = sorted((arm.name for arm in report.arms), key=lambda name: _bits(report, name, condition))
    return [first, *(arm for arm in rest if not _ahead(report, first, arm, condition))]


def _ahead(report: RobustnessReport, arm: str, other: str, condition: Condition) -> bool:
    difference = _between(report, arm, other, condition)
    smallest = SMALLEST_COST * _bits(report, other, condition)
    return difference is not None and direction(report, difference.bits, smallest) == "lower"


def headline(report: RobustnessReport) -> str:
    """The verdict in one line: which model to use for what."""
    chosen = conditions(report)
    if len(report.arms) == 1:
        return f"One {report.noun}: nothing is compared."
    if not chosen:
        return "Clean figures only: nothing follows about robustness."
    if report.data.sequences < SEQUENCES_FOR_A_CLAIM:
        return f"No claim: {report.data.sequences} sequences are too few."
    chosen.insert(0, Condition("clean text", "clean", report.perturbations[0].name))
    won: dict[str, list[Condition]] = {}
    for condition in chosen:
        ahead = leaders(report, condition)
        if len(ahead) == 1:
            won.setdefault(ahead[0], []).append(condition)
    if not won:
        return f"No {report.noun} is clearly ahead under any condition."
    everywhere = sum(map(len, won.values())) == len(chosen)
    parts = [
        f"{fmt.label(report, arm)} for {'everything' if len(where) == len(chosen) else _listed(_names(where, chosen))}"
        for arm, where in won.items()
    ]
    line = f"Use {'; '.join(parts)}{'' if everywhere else '; no clear difference elsewhere'}."
    if report.trained and len(report.seeds) < SEEDS_FOR_A_CLAIM:
        one = len(report.seeds) == 1
        return f"{'One seed, so no claim about training: here,' if one else 'Tentative:'} {line[0].lower()}{line[1:]}"
    return line


def _names(won: Sequence[Condition], every: Sequence[Condition]) -> list[str]:
    """Names of conditions; a family of which all settings are won is named once."""
    whole = {c.family for c in won if all(other in won for other in every if other.family == c.family)}
    return list(dict.fromkeys(fmt.family(c.family) if c.family in whole else c.name for c in won))


def _bits(report: RobustnessReport, arm: str, condition: Condition) -> float:
    if condition.perturbation is None:
        return report.area(arm, condition.family).bits.value
    return report.result(arm, condition.perturbation).bits.value


def _ratio(report: RobustnessReport, arm: str, condition: Condition) -> float:
    if condition.perturbation is None:
        return report.area(arm, condition.family).degradation.value
    return report.result(arm, condition.perturbation).degradation.value


def _between(report: RobustnessReport, arm: str, other: str, condition: Condition) -> Difference | None:
    """`arm` minus `other`; None for two rivals under a single setting, where each is held beside the baseline only."""
    if condition.perturbation is None:
        return report.area_difference(arm, other, condition.family)
    if other == report.baseline:
        return report.difference(arm, condition.perturbation)
    turned = report.difference(other, condition.perturbation) if arm == report.baseline else None
    return turned and turned.reversed()


def _difference(report: RobustnessReport, estimate: Estimate, digits: int = 3) -> str:
    if estimate.low is None:
        return f"difference {fmt.signed(estimate.value, digits)}, no interval"
    return (
        f"difference {fmt.signed(estimate.value, digits)}, {100 * report.bootstrap.confidence:g}\u00a0% interval "
        f"{fmt.interval(estimate, digits, sign=True)}"
    )


def _listed(parts: Sequence[str]) -> str:
    more = len(parts) - _MOST_NAMED
    if more > 1:
        parts = [*parts[:_MOST_NAMED], f"{more} more conditions"]
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
