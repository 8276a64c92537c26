"""Figures and names as they are displayed, the same in the page, in the terminal and in the verdict."""

__all__ = ["family", "interval", "label", "number", "percent", "ratio", "setting", "signed", "visible"]

import math
import unicodedata

from support_tokens.report.records.estimate import Estimate
from support_tokens.report.records.robustness import PerturbationRecord, RobustnessReport

_GLYPHS = {"\n": "↵", "\r": "␍", "\t": "⇥", "\u00a0": "⍽", "\u00ad": "[SHY]"}
_FAMILIES = {
    "clean": "clean text",
    "embedding_noise/absolute": "absolute noise",
    "embedding_noise/matched": "scale-matched noise",
    "worst_case/absolute/sequence/1": "worst-case noise of one step",
    "worst_case/matched/sequence/1": "scale-matched worst-case noise of one step",
    "worst_case/absolute/sequence/5": "worst-case noise of five steps",
    "worst_case/matched/sequence/5": "scale-matched worst-case noise of five steps",
    "typos/mixed": "typos",
    "typos/replace": "replaced characters",
    "typos/drop": "dropped characters",
    "typos/insert": "inserted characters",
    "typos/swap": "swapped characters",
    "token_drop": "dropped tokens",
    "weight_rounding": "rounded weights",
}


def visible(text: str) -> str:
    r"""Text in which nothing is hidden: controls, line breaks, direction marks and lone surrogates become glyphs.

    Example:
        >>> visible("a\n"), visible("\x1b[1m"), visible("\u202e"), visible("")
        ('a↵', '␛[1m', '[U+202E]', '∅')
    """
    return "".join(map(_visible, text)) or "∅"


def _visible(character: str) -> str:
    if character in _GLYPHS:
        return _GLYPHS[character]
    if ord(character) < 0x20:
        return chr(0x2400 + ord(character))
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return f"[U+{ord(character):04X}]"
    return character


def label(report: RobustnessReport, arm: str) -> str:
    """The name of an arm for display."""
    return visible(report.arm(arm).label)


def family(name: str) -> str:
    """A family of perturbations in words.

    Example:
        >>> family("embedding_noise/matched"), family("typos")
        ('scale-matched noise', 'typos')
    """
    if name.startswith("other_text/"):
        return f"the text of {visible(name.removeprefix('other_text/'))}"
    return _FAMILIES.get(name, visible(name).replace("_", " "))


def setting(perturbation: PerturbationRecord) -> str:
    """Its strength as the head of a row.

    Example:
        >>> setting(PerturbationRecord("noise 0.5 x RMS", "embedding_noise/matched", 0.5, "sigma / RMS", {}))
        'σ = 0.5 × RMS'
    """
    if perturbation.family == "clean":
        return "clean"
    if perturbation.family == "embedding_noise/absolute":
        return f"σ = {perturbation.strength:g}"
    if perturbation.family == "embedding_noise/matched":
        return f"σ = {perturbation.strength:g} × RMS"
    return visible(perturbation.name)


def number(value: float, digits: int = 3) -> str:
    """A figure with a true minus sign.

    Example:
        >>> number(-1.23456), number(float("-inf"))
        ('−1.235', '−∞')
    """
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    digits_of = f"{value:.{digits}f}"
    return digits_of.replace("-", "−") if float(digits_of) else digits_of.removeprefix("-")


def signed(value: float, digits: int = 3) -> str:
    """A difference, always with its sign.

    Example:
        >>> signed(0.5), signed(-0.5), signed(0.00001)
        ('+0.500', '−0.500', '0.000')
    """
    unsigned = number(value, digits)
    return f"+{unsigned}" if float(f"{value:.{digits}f}") > 0 else unsigned


def ratio(value: float, digits: int = 2) -> str:
    """A degradation ratio.

    Example:
        >>> ratio(1.537)
        '1.54×'
    """
    return f"{number(value, digits)}×"


def percent(fraction: float, digits: int = 1) -> str:
    r"""A signed percentage; its space does not break.

    Example:
        >>> percent(0.0123)
        '+1.2\xa0%'
    """
    return f"{signed(100 * fraction, digits)}\u00a0%"


def interval(estimate: Estimate, digits: int = 3, *, sign: bool = False) -> str:
    r"""The ends of an interval, or that there is none.

    Example:
        >>> interval(Estimate(1.0, 0.9, 1.1)), interval(Estimate(1.0))
        ('0.900\xa0…\xa01.100', 'no interval')
    """
    if estimate.low is None or estimate.high is None:
        return "no interval"
    form = signed if sign else number
    return f"{form(estimate.low, digits)}\u00a0…\u00a0{form(estimate.high, digits)}"
