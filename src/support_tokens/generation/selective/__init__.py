"""Selective prediction: metrics of uncertainty against error, and thresholds with a risk guarantee."""

__all__ = [
    "Outcome",
    "RiskCoverage",
    "ScoreTable",
    "Threshold",
    "auroc",
    "betting_p_value",
    "conformal_risk_control",
    "expected_calibration_error",
    "learn_then_test",
    "measure_threshold",
    "prediction_rejection_ratio",
    "risk_coverage",
    "risk_coverage_area",
]

from support_tokens.generation.selective.calibration import betting_p_value, conformal_risk_control, learn_then_test
from support_tokens.generation.selective.metrics import (
    RiskCoverage,
    auroc,
    expected_calibration_error,
    prediction_rejection_ratio,
    risk_coverage,
    risk_coverage_area,
)
from support_tokens.generation.selective.outcome import Outcome, Threshold, measure_threshold
from support_tokens.generation.selective.tables import ScoreTable
