r"""A frozen set of perturbations, described as JSON and identified by its checksum."""

__all__ = ["FAMILIES", "PerturbationSet", "chosen_perturbations", "standard_perturbations"]

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from support_tokens.errors import ArgumentError
from support_tokens.robustness.perturbations.adversarial import AdversarialNoise
from support_tokens.robustness.perturbations.base import Clean, Perturbation
from support_tokens.robustness.perturbations.embeddings import EmbeddingNoise, TokenDrop
from support_tokens.robustness.perturbations.text import DomainShift, Typos
from support_tokens.robustness.perturbations.weights import Quantization

_KINDS: dict[str, Callable[..., Perturbation]] = {
    kind.kind: kind for kind in (Clean, EmbeddingNoise, AdversarialNoise, Typos, TokenDrop, Quantization, DomainShift)
}
_GENERATOR = "numpy PCG64, one stream a sequence, SeedSequence((seed, sequence)), float32 standard normal"


@dataclass(frozen=True)
class PerturbationSet:
    r"""A frozen set of perturbations, the same for all arms, identified by its checksum.

    Args:
        items: The perturbations, of unique names. `Clean` comes first, and is added if it is missing.

    Raises:
        ArgumentError: An item is no perturbation, or two have one name.

    Example:
        >>> chosen = PerturbationSet((EmbeddingNoise(0.5),))
        >>> [p.name for p in chosen.items]
        ['clean', 'noise 0.5']
        >>> PerturbationSet.from_record(chosen.record()) == chosen
        True
    """

    items: tuple[Perturbation, ...]

    def __post_init__(self) -> None:
        items = tuple(self.items)
        for item in items:
            if not isinstance(item, Perturbation):
                raise ArgumentError(
                    f"Items of a perturbation set must be perturbations, received {item!r}; pass "
                    "EmbeddingNoise(0.5), say."
                )
        if not any(item.kind == Clean.kind for item in items):
            items = (Clean(), *items)
        names = [item.name for item in items]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ArgumentError(
                f"The names in a perturbation set must be unique, received {twice[0]!r} twice; leave one out."
            )
        object.__setattr__(self, "items", tuple(sorted(items, key=lambda item: item.kind != Clean.kind)))

    @property
    def checksum(self) -> str:
        """SHA-256 of the canonical JSON of everything that defines the set, including the random generator."""
        defined = {"generator": _GENERATOR, "items": [item.record() for item in self.items]}
        return hashlib.sha256(json.dumps(defined, sort_keys=True, allow_nan=False).encode()).hexdigest()

    def record(self) -> dict[str, Any]:
        """Checksum, generator and the record of each perturbation, as plain JSON."""
        return {"checksum": self.checksum, "generator": _GENERATOR, "items": [item.record() for item in self.items]}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "PerturbationSet":
        """The set that `record` describes.

        Raises:
            ArgumentError: A kind or parameter is unknown, or the checksum does not match the description.
        """
        items = []
        for entry in record.get("items", ()):
            kind, parameters = entry.get("kind"), {key: value for key, value in entry.items() if key != "kind"}
            if kind not in _KINDS:
                raise ArgumentError(
                    f"The kind of a perturbation must be one of {', '.join(sorted(_KINDS))}, received {kind!r}; "
                    "check the record."
                )
            try:
                items.append(_KINDS[kind](**parameters))
            except TypeError as error:
                raise ArgumentError(
                    f"The perturbation {entry!r} has wrong parameters ({error}); check the record."
                ) from error
        perturbations = cls(tuple(items))
        if record.get("checksum") != perturbations.checksum:
            raise ArgumentError(
                f"The checksum of the perturbation set is recorded as {record.get('checksum')!r}, but its description "
                f"has {perturbations.checksum!r}; it was edited or belongs to another version, so create it again."
            )
        return perturbations


def standard_perturbations(sigmas: Sequence[float] = (0.1, 0.25, 0.5, 1.0), *, seed: int = 0) -> PerturbationSet:
    r"""Clean, then Gaussian embedding noise of each sigma, absolute and scale-matched.

    Args:
        sigmas: Standard deviations, used on both scales.
        seed: Seed of the noise.

    Returns:
        A set of $1 + 2\,$`len(sigmas)` perturbations.

    Example:
        >>> len(standard_perturbations().items)
        9
    """
    return chosen_perturbations(("noise",), sigmas, seed=seed)


_SHARES = (0.01, 0.05, 0.1)
_SCALES: tuple[Literal["absolute", "matched"], ...] = ("absolute", "matched")

FAMILIES: dict[str, Callable[[Sequence[float], int], list[Perturbation]]] = {
    "noise": lambda sigmas, seed: [EmbeddingNoise(s, scale, seed) for scale in _SCALES for s in sigmas],
    "worst-case": lambda sigmas, seed: [
        AdversarialNoise(s, scale, steps) for scale in _SCALES for steps in (1, 5) for s in _small(sigmas)
    ],
    "typos": lambda sigmas, seed: [Typos(share, "mixed", seed) for share in _SHARES],
    "typos-by-kind": lambda sigmas, seed: [
        Typos(share, operation, seed) for operation in ("replace", "drop", "insert", "swap") for share in _SHARES
    ],
    "token-drop": lambda sigmas, seed: [TokenDrop(share, seed) for share in _SHARES],
    "rounding": lambda sigmas, seed: [Quantization(bits) for bits in (8, 4, 3)],
}
"""Groups of perturbations by name, made from the sigmas of the noise and a seed; the choices of `evaluate --perturb`.
Worst-case noise has a tenth of the sigmas, where its effect is about that of Gaussian noise of the whole sigma."""


def chosen_perturbations(
    families: Sequence[str] = ("noise",),
    sigmas: Sequence[float] = (0.1, 0.25, 0.5, 1.0),
    *,
    seed: int = 0,
    others: Sequence[Perturbation] = (),
) -> PerturbationSet:
    r"""The set of the named families.

    Args:
        families: Names of `FAMILIES`.
        sigmas: Standard deviations of the noise, used on both scales.
        seed: Seed of all random draws.
        others: Further perturbations, such as `DomainShift`.

    Raises:
        ArgumentError: A family is unknown, or a value is out of range.

    Example:
        >>> len(chosen_perturbations(("typos", "rounding")).items)
        7
    """
    for family in families:
        if family not in FAMILIES:
            raise ArgumentError(
                f"A family of perturbations must be one of {', '.join(FAMILIES)}, received {family!r}; choose "
                "one of them."
            )
    made = [perturbation for family in dict.fromkeys(families) for perturbation in FAMILIES[family](sigmas, seed)]
    return PerturbationSet((Clean(), *made, *others))


def _small(sigmas: Sequence[float]) -> list[float]:
    return [round(sigma / 10, 12) for sigma in sigmas]
