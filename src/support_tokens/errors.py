"""Errors and warnings of the package: each says what, whose, what was required, what was received and what to do."""

__all__ = [
    "ArgumentError",
    "CaptureError",
    "DataError",
    "NumericalError",
    "NumericalWarning",
    "RunFolderError",
    "SupportTokensError",
    "TrainingError",
    "UnsupportedModelError",
]


class SupportTokensError(Exception):
    """Root of every error that this package raises on purpose; its text is one sentence for the user."""


class ArgumentError(SupportTokensError, ValueError):
    """An argument has a value or a shape outside of what the function is defined for."""


class DataError(SupportTokensError):
    """A corpus or text file cannot be used: missing, empty, not text, or too short."""


class RunFolderError(SupportTokensError):
    """A run folder or result file cannot be written or read: exists, is unwritable, corrupt or of another schema."""


class TrainingError(SupportTokensError):
    """Training cannot go on, for example because the loss is not finite."""


class CaptureError(SupportTokensError):
    """A forward pass did not leave what the barrier or the analysis needs."""


class UnsupportedModelError(SupportTokensError):
    """The attention of this model cannot be read exactly."""


class NumericalError(SupportTokensError, ArithmeticError):
    """A computation missed its stated accuracy: an iteration did not converge, or all weights of a sampler vanished."""


class NumericalWarning(UserWarning):
    """A result is defined but numerically delicate, for example a matrix that is singular to working precision."""
