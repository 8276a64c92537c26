"""The log-barrier inside a model: penalties, what they act on, attaching it."""

__all__ = [
    "PENALTIES",
    "BarrierHandle",
    "MarginController",
    "WarmupSchedule",
    "attach_barrier",
    "attached_barriers",
    "margin_penalty",
    "sample_positions",
    "token_weights",
]

from typing import TYPE_CHECKING

from support_tokens._lazy import lazy_exports

if TYPE_CHECKING:
    from support_tokens.regularizers.barrier.attach import attach_barrier, attached_barriers
    from support_tokens.regularizers.barrier.handle import BarrierHandle
    from support_tokens.regularizers.barrier.penalties import (
        PENALTIES,
        MarginController,
        WarmupSchedule,
        margin_penalty,
        sample_positions,
        token_weights,
    )

__getattr__ = lazy_exports(
    __name__,
    {
        "attach_barrier": "attach",
        "attached_barriers": "attach",
        "BarrierHandle": "handle",
        "PENALTIES": "penalties",
        "MarginController": "penalties",
        "WarmupSchedule": "penalties",
        "margin_penalty": "penalties",
        "sample_positions": "penalties",
        "token_weights": "penalties",
    },
)
