"""Frozen records and their JSON."""

__all__ = [
    "CALIBRATION_BINS",
    "RECORD_KINDS",
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
    "Record",
    "RecordKind",
    "Result",
    "RobustnessReport",
    "Split",
    "StructureFigures",
    "TokenMargin",
    "Window",
    "compare_records",
    "histograms",
    "record_table",
    "sentence",
    "write_plot",
]

from support_tokens.report.records.base import RECORD_KINDS, Record, RecordKind
from support_tokens.report.records.benchmark import (
    BenchmarkArm,
    BenchRecord,
    Check,
    Prediction,
    record_table,
    write_plot,
)
from support_tokens.report.records.changes import MarginChanges, compare_records
from support_tokens.report.records.estimate import Estimate
from support_tokens.report.records.generation import GeneratedToken, Generation, GenerationRecord
from support_tokens.report.records.histograms import ArmMargins, histograms, sentence
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
    RobustnessReport,
    Split,
)
from support_tokens.report.records.structure import StructureFigures
from support_tokens.report.records.tokens import (
    AnalyzedText,
    LayerMargins,
    MarginRecord,
    TokenMargin,
    Window,
)
