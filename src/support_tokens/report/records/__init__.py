"""Frozen records and their JSON."""

__all__ = [
    "CALIBRATION_BINS",
    "AnalyzedText",
    "Area",
    "ArmMargins",
    "ArmRecord",
    "BenchRecord",
    "BenchmarkArm",
    "BootstrapRecord",
    "Check",
    "Choice",
    "DataRecord",
    "Difference",
    "Estimate",
    "GeneratedToken",
    "Generation",
    "GenerationRecord",
    "LayerMargins",
    "MarginChanges",
    "MarginRecord",
    "PerturbationRecord",
    "Prediction",
    "Result",
    "RobustnessReport",
    "Split",
    "StructureFigures",
    "TokenMargin",
    "Trace",
    "Window",
    "changes_from_json",
    "changes_to_json",
    "compare_records",
    "histograms",
    "record_from_json",
    "record_table",
    "record_to_json",
    "sentence",
    "write_plot",
]

from support_tokens.report.records.benchmark import (
    BenchmarkArm,
    BenchRecord,
    Check,
    Prediction,
    record_table,
    write_plot,
)
from support_tokens.report.records.changes import MarginChanges, changes_from_json, changes_to_json, compare_records
from support_tokens.report.records.estimate import Estimate
from support_tokens.report.records.generation import GeneratedToken, Generation, GenerationRecord
from support_tokens.report.records.histograms import ArmMargins, Trace, histograms, sentence
from support_tokens.report.records.results import RobustnessReport
from support_tokens.report.records.robustness import (
    CALIBRATION_BINS,
    Area,
    ArmRecord,
    BootstrapRecord,
    Choice,
    DataRecord,
    Difference,
    PerturbationRecord,
    Result,
    Split,
    StructureFigures,
)
from support_tokens.report.records.tokens import (
    AnalyzedText,
    LayerMargins,
    MarginRecord,
    TokenMargin,
    Window,
    record_from_json,
    record_to_json,
)
