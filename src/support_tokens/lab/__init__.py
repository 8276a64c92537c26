"""The laboratory: an experiment as a preset, resumed arm by arm, and its figures beside those of the paper."""

__all__ = [
    "PAPER",
    "PRESETS",
    "Contest",
    "PaperRow",
    "Preset",
    "Reproduction",
    "contests",
    "load_preset",
    "paper_rows",
    "reproduce",
]

from support_tokens.lab.contest import Contest, contests
from support_tokens.lab.paper import PAPER, PaperRow, paper_rows
from support_tokens.lab.preset import PRESETS, Preset, load_preset
from support_tokens.lab.reproduction import Reproduction, reproduce
