"""Figures of each signal, alone and beside entropy, with paired intervals over windows and seeds."""

from collections.abc import Callable, Mapping

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from support_tokens.generation.selective import (
    ScoreTable,
    conformal_risk_control,
    learn_then_test,
    measure_threshold,
    risk_coverage,
)
from support_tokens.report import encode
from support_tokens.report.records import Estimate
from support_tokens.robustness import Bootstrap

Table = Mapping[str, np.ndarray]
ENTROPY, POSITION = "TokenEntropy", "Position"
ALL = "all signals"
NOT_SIGNALS = {"nats", "error", "confidence", "valid"}
FIGURES = ("auroc", "prediction_rejection_ratio", "risk_coverage_area")
LEVELS = 128
CURVE_POINTS = 40


def told(estimate: Estimate) -> dict:
    """Value and ends of the interval, to five decimals."""
    return {k: v if v is None else round(v, 5) for k, v in encode(estimate).items()}


def with_position(table: Table) -> dict[str, np.ndarray]:
    """A signal that knows nothing but how much was read: what any other has to be better than."""
    places = np.broadcast_to(np.arange(table["error"].shape[1]), table["error"].shape)
    return {**table, POSITION: -np.log1p(places).astype(np.float32)}


def by_window(table: Table) -> dict[str, np.ndarray]:
    """Windows as predictions, `(N, 1)`: means of the signals, and the largest of margins; in error is the half of the
    windows in which more tokens are wrong than the median."""
    valid = table["valid"] > 0
    count = valid.sum(-1, keepdims=True)
    mean = lambda a: np.where(valid, a, 0).sum(-1, keepdims=True) / count  # noqa: E731
    share = mean(table["error"])
    found = {name: mean(a) for name, a in table.items() if name not in NOT_SIGNALS}
    for name, a in table.items():
        if name.startswith("NegativeLogMargin"):
            found[f"Maximum{name}"] = np.where(valid, a, -np.inf).max(-1, keepdims=True)
    found.pop(POSITION, None)  # the same for every window
    return {**found, "error": (share > np.median(share)).astype(np.float32), "valid": np.ones_like(share)}


def fitted(validation: Table, table: Table, names: list[str]) -> np.ndarray:
    """Probability of error from some signals, by logistic regression on the validation text, `(N, T)`."""
    columns = lambda t: np.stack([t[n] for n in names], axis=-1)  # noqa: E731
    kept, shown = validation["valid"] > 0, table["valid"] > 0
    model = make_pipeline(StandardScaler(), LogisticRegression())
    model.fit(columns(validation)[kept], validation["error"][kept])
    found = np.zeros(table["error"].shape)
    found[shown] = model.predict_proba(columns(table)[shown])[:, 1]
    return found


class Set:
    """One condition read by the seeds of one arm."""

    def __init__(self, validation: list[Table], test: list[Table], bootstrap: Bootstrap, windows: bool) -> None:
        prepare = by_window if windows else with_position
        self.validation, self.test = [prepare(t) for t in validation], [prepare(t) for t in test]
        self.error, self.valid = (np.stack([t[k] for t in self.test]) for k in ("error", "valid"))
        self.names = [n for n in self.test[0] if n not in NOT_SIGNALS]
        self.bootstrap = bootstrap

    def probability(self, names: list[str]) -> np.ndarray:
        return np.stack([fitted(v, t, names) for v, t in zip(self.validation, self.test, strict=True)])

    def table(self, score: np.ndarray) -> ScoreTable:
        return ScoreTable.of(score, self.error, self.valid, levels=LEVELS)

    def raw(self, name: str) -> ScoreTable:
        return self.table(np.stack([t[name] for t in self.test]))

    def interval(self, statistic: Callable) -> Estimate:
        return self.bootstrap.interval(statistic, seeds=len(self.test), sequences=self.error.shape[1])

    def gain(self, more: np.ndarray, less: np.ndarray) -> dict:
        """Figures of one probability minus those of another, on the same resamples."""
        a, b = self.table(more), self.table(less)
        c, d = (ScoreTable.calibration(p, self.error, self.valid) for p in (more, less))
        pairs = {f: (getattr(a, f), getattr(b, f)) for f in FIGURES}
        pairs["calibration_error"] = (c.calibration_error, d.calibration_error)
        return {name: told(self.interval(lambda w, f=f, g=g: f(w) - g(w))) for name, (f, g) in pairs.items()}

    def alone(self, name: str, probability: np.ndarray) -> dict:
        table = self.raw(name) if name in self.names else self.table(probability)
        chance = ScoreTable.calibration(probability, self.error, self.valid)
        figures = {f: told(self.interval(getattr(table, f))) for f in FIGURES}
        # Without an interval: resampling raises an ECE near 0 by its own noise, and BCa cannot follow.
        ece = float(chance.calibration_error(np.ones(self.error.shape[1])).mean())
        return {"name": name, **figures, "calibration_error": told(Estimate(ece))}

    def curve(self, name: str, score: np.ndarray) -> dict:
        """Risk at evenly spaced coverages, the mean over seeds."""
        wanted = np.linspace(0.05, 1, CURVE_POINTS)
        curves = [risk_coverage(s[v > 0], e[v > 0]) for s, e, v in zip(score, self.error, self.valid, strict=True)]
        risk = np.mean([np.interp(wanted, c.coverage, c.risk) for c in curves], axis=0)
        return {"name": name, "coverage": wanted.round(4).tolist(), "risk": risk.round(5).tolist()}


def figures_of(found: Set) -> dict:
    """Everything that is reported of one condition."""
    entropy = found.probability([ENTROPY])
    alone, beside = [], []
    for name in found.names:
        alone.append(found.alone(name, entropy if name == ENTROPY else found.probability([name])))
        if name != ENTROPY:
            beside.append({"name": name, **found.gain(found.probability([ENTROPY, name]), entropy)})
    every = found.probability(found.names)
    alone.append(found.alone(ALL, every))
    beside.append({"name": ALL, **found.gain(every, entropy)})
    margins = [n for n in found.names if n.startswith(("NegativeLogMargin", "NegativeSigmaMin"))]
    if POSITION in found.names:
        placed = found.probability([ENTROPY, POSITION])
        beyond = [{"name": n, **found.gain(found.probability([ENTROPY, POSITION, n]), placed)} for n in margins]
    else:
        beyond = []
    drawn = {ENTROPY: entropy, ALL: every, margins[0]: np.stack([t[margins[0]] for t in found.test])}
    return {
        "sequences": found.error.shape[1],
        "predictions": int((found.valid[0] > 0).sum()),
        "error_rate": float(np.mean([e[v > 0].mean() for e, v in zip(found.error, found.valid, strict=True)])),
        "alone": alone,
        "gain_beside_entropy": beside,
        "gain_beside_entropy_and_position": beyond,
        "curves": [found.curve(name, score) for name, score in drawn.items()],
    }


def between_arms(first: Set, second: Set) -> list[dict]:
    """AUROC of each signal in the second arm minus the first, seeds and windows paired."""
    shared = [n for n in first.names if n in second.names]
    pairs = {n: (first.raw(n), second.raw(n)) for n in shared}
    return [
        {"name": n, "auroc": told(first.interval(lambda w, a=a, b=b: b.auroc(w) - a.auroc(w)))}
        for n, (a, b) in pairs.items()
    ]


def thresholds(found: Set, risks: Mapping[str, float]) -> list[dict]:
    """Thresholds calibrated on the validation windows of each seed, and what they do on the test windows."""
    rows = []
    margin = next(n for n in found.names if n.startswith("NegativeLogMargin"))
    for kind, control in (("error share", conformal_risk_control), ("selective risk", learn_then_test)):
        for name in (ENTROPY, "MaximumTokenProbability", margin):
            outcomes, abstained = [], 0
            for validation, test in zip(found.validation, found.test, strict=True):
                mixed = np.random.default_rng(0).permutation(len(validation["error"]))
                score, error, valid = (validation[k][mixed] for k in (name, "error", "valid"))
                chosen = control(score, error, risk=risks[kind], valid=valid, signal=name, prefix=False)
                outcomes.append(measure_threshold(chosen, test[name], test["error"], test["valid"]))
                abstained += chosen.abstains
            answered = float(np.mean([o.coverage for o in outcomes]))
            wrong = float(np.mean([o.error_share for o in outcomes]))
            rows.append(
                {
                    "kind": kind,
                    "asked": risks[kind],
                    "signal": name,
                    "seeds": len(outcomes),
                    "abstained": abstained,
                    "coverage": answered,
                    "error_share": wrong,
                    "risk": wrong / answered if answered else None,
                }
            )
    return rows
