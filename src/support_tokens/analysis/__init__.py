r"""Analysis: which tokens of a text are its support tokens, in which layer, and what changed between two records."""

__all__ = ["MarginReport", "analyze", "analyze_texts", "load_model", "model_margins", "token_texts"]

from support_tokens.analysis.loading import load_model
from support_tokens.analysis.margin_report import MarginReport, analyze
from support_tokens.analysis.model import model_margins
from support_tokens.analysis.texts import analyze_texts
from support_tokens.analysis.tokens import token_texts
