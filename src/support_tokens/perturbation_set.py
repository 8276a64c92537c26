r"""A frozen set of perturbations, described as JSON and known by its checksum."""

__all__ = ["PerturbationSet", "standard_perturbations"]

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from support_tokens.errors import ArgumentError
from support_tokens.perturb import Clean, EmbeddingNoise, Perturbation

_KINDS: dict[str, Callable[..., Perturbation]] = {Clean.kind: Clean, EmbeddingNoise.kind: EmbeddingNoise}
_GENERATOR = "numpy PCG64, one stream a sequence, SeedSequence((seed, sequence)), float32 standard normal"


@dataclass(frozen=True)
class PerturbationSet:
    r"""A frozen set of perturbations, the same for all arms, known by its checksum.

    Args:
        items: The perturbations, of unique names. `Clean` comes first, and is put in where it is missing.

    Raises:
        ArgumentError: Something that is no perturbation, or two of one name.

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
                    f"A perturbation set takes perturbations such as EmbeddingNoise(0.5), not {item!r}."
                )
        if not any(item.kind == Clean.kind for item in items):
            items = (Clean(), *items)
        names = [item.name for item in items]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ArgumentError(f"The names in a perturbation set must be unique, but {twice[0]!r} is there twice.")
        object.__setattr__(self, "items", tuple(sorted(items, key=lambda item: item.kind != Clean.kind)))

    @property
    def checksum(self) -> str:
        """SHA-256 of the canonical JSON of what defines the set, the generator of the noise included."""
        defined = {"generator": _GENERATOR, "items": [item.record() for item in self.items]}
        return hashlib.sha256(json.dumps(defined, sort_keys=True, allow_nan=False).encode()).hexdigest()

    def record(self) -> dict[str, Any]:
        """Checksum, generator and the record of each perturbation, as plain JSON."""
        return {"checksum": self.checksum, "generator": _GENERATOR, "items": [item.record() for item in self.items]}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "PerturbationSet":
        """The set that `record` describes.

        Raises:
            ArgumentError: An unknown kind, unknown parameters, or a checksum that does not belong to the description.
        """
        items = []
        for entry in record.get("items", ()):
            kind, parameters = entry.get("kind"), {key: value for key, value in entry.items() if key != "kind"}
            if kind not in _KINDS:
                raise ArgumentError(f"Perturbations are of kind {', '.join(sorted(_KINDS))}, not {kind!r}.")
            try:
                items.append(_KINDS[kind](**parameters))
            except TypeError as error:
                raise ArgumentError(f"The perturbation {entry!r} cannot be made: {error}.") from error
        made = cls(tuple(items))
        if record.get("checksum") != made.checksum:
            raise ArgumentError(
                f"The perturbation set was recorded with checksum {record.get('checksum')!r} but its description has "
                f"{made.checksum!r}; it was edited or belongs to another version, so make it anew."
            )
        return made


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
    scales: tuple[Literal["absolute", "matched"], ...] = ("absolute", "matched")
    noise = [EmbeddingNoise(sigma, scale, seed) for scale in scales for sigma in sigmas]
    return PerturbationSet((Clean(), *noise))
