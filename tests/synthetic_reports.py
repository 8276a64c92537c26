"""Reports on figures that a test states, through the comparison that real ones go through."""

__all__ = ["ABSOLUTE", "CE", "HOSTILE", "MATCHED", "synthetic"]

import numpy as np
import torch

from support_tokens.report.records import ArmMargins, LayerMargins, RobustnessReport
from support_tokens.robustness import ArmDetails, Bootstrap, EvaluationData, Measurement, compare
from support_tokens.robustness.perturbations import PerturbationSet, standard_perturbations

ABSOLUTE, MATCHED = "embedding_noise/absolute", "embedding_noise/matched"
HOSTILE = "<script>alert('x')</script>\"&$\\frac{$ \u202eשלום\n[bold]\x1b[31m_"


def synthetic(
    *,
    seeds: int = 1,
    sequences: int = 32,
    labels: dict[str, str] | None = None,
    tokens: list[str] | None = None,
    characters: int | None = 1,
    perturbations: PerturbationSet | None = None,
    spread: float = 0.01,
    **arms: tuple[float, float, float, float],
) -> RobustnessReport:
    """A report on arms given as (clean bits, slope under absolute noise, slope under matched noise, RMS)."""
    rng = np.random.default_rng(0)
    noise = lambda: rng.normal(0, spread, sequences)  # noqa: E731
    chosen = perturbations or standard_perturbations()
    data = EvaluationData(torch.zeros(sequences, 9, dtype=torch.long), characters=characters)
    hard, measured, details = np.linspace(-0.2, 0.2, sequences), {}, {}
    for arm, (clean, absolute, matched, rms) in arms.items():
        slopes = {"clean": 0.0, ABSOLUTE: absolute, MATCHED: matched}
        measured[arm] = [
            Measurement(
                {
                    p.name: 8 * np.log(2) * (clean + hard + slopes[p.family] * p.strength + noise())
                    for p in chosen.items
                },
                rms,
            )
            for _ in range(seeds)
        ]
        margins = rng.normal(0, 1, size=200)
        text = tokens or list("a text")
        along = rng.normal(0, 1, size=len(text))
        rankable = [t > 0 for t in range(len(text))]
        sentence = LayerMargins.of_columns(text, along.tolist(), np.sign(along).tolist(), rankable)
        details[arm] = ArmDetails(
            label=(labels or {}).get(arm, arm.upper()),
            description=(labels or {}).get(arm, ""),
            seconds=12.0,
            margins=ArmMargins(margins.tolist(), np.sign(margins).astype(int).tolist(), text=sentence),
        )
    config = {"corpus": {"name": (labels or {}).get("ce", "kjv")}, "sigmas": [0.1, 0.5], "runs": [{"steps": 3}]}
    return compare(measured, data, chosen, details=details, bootstrap=Bootstrap(resamples=300), config=config)


CE = (2.0, 2.0, 2.0, 1.0)
