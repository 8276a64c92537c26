"""The barrier inside a model: penalties, what they act on, the objective, attaching it."""

__all__ = [
    "PENALTIES",
    "BarrierCallback",
    "BarrierHandle",
    "MarginController",
    "WarmupSchedule",
    "attach_barrier",
    "attached_barriers",
    "per_token_penalty",
    "sample_positions",
    "weighted_mean",
]

from typing import TYPE_CHECKING

from support_tokens._lazy import lazy_exports

if TYPE_CHECKING:
    from support_tokens.regularizers.barrier.attach import attach_barrier, attached_barriers
    from support_tokens.regularizers.barrier.callback import BarrierCallback
    from support_tokens.regularizers.barrier.handle import BarrierHandle
    from support_tokens.regularizers.barrier.penalties import (
        PENALTIES,
        MarginController,
        WarmupSchedule,
        per_token_penalty,
        sample_positions,
        weighted_mean,
    )

__getattr__ = lazy_exports(
    __name__,
    {
        "attach_barrier": "attach",
        "attached_barriers": "attach",
        "BarrierCallback": "callback",
        "BarrierHandle": "handle",
        "MarginController": "penalties",
        "PENALTIES": "penalties",
        "WarmupSchedule": "penalties",
        "per_token_penalty": "penalties",
        "sample_positions": "penalties",
        "weighted_mean": "penalties",
    },
)
