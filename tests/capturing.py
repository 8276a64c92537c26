"""What the tests of capture share: one padded batch, its margins, and one training step on it."""

__all__ = ["BATCH", "IDS", "LAYERS", "MASK", "margins_of", "measured", "penalty_gradients", "same_gradients"]

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from support_tokens.margins import state_margins
from support_tokens.models import AttentionCapture, capture_attention
from tiny_models import left_and_right_padding

LAYERS = (0, 1)
IDS, MASK = left_and_right_padding()
BATCH = {"input_ids": IDS, "attention_mask": MASK}


def margins_of(capture: AttentionCapture, mask: Tensor | None = MASK) -> dict[int, Tensor]:
    return {layer: state_margins(state).log_abs_det for layer, state in capture.states(mask).items()}


def measured(model: nn.Module, layers: tuple[int, ...] = LAYERS, **batch) -> dict[int, Tensor]:
    batch = batch or BATCH
    with torch.no_grad(), capture_attention(model, layers) as capture:
        model(**batch)
    return margins_of(capture, batch.get("attention_mask"))


def penalty_gradients(model: nn.Module, capture: AttentionCapture, **options) -> tuple[Tensor, dict[str, Tensor]]:
    """The penalty of one training step and its gradient by every parameter that has one."""
    model.zero_grad()
    model(**BATCH, use_cache=False, **options)
    penalty = -sum(value.mean() for value in margins_of(capture).values())
    penalty.backward()
    capture.clear()
    return penalty.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 1e-10) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert_close(found[name], expected[name], rtol=0, atol=atol, msg=lambda m, name=name: f"{name}: {m}")
