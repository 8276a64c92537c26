r"""Margins of a model's own attention on given tokens."""

__all__ = ["model_margins"]

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from support_tokens.margins import Margins, state_margins
from support_tokens.models.capture import capture_attention
from support_tokens.models.inputs import text_inputs
from support_tokens.models.turns import in_turn


def model_margins(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    layers: Sequence[int] = (0,),
    view: str = "noise",
) -> dict[int, Margins]:
    r"""Exact margins of chosen layers of `model` at every token, without gradient.

    $$ J_t = I \mp \partial\mu_t / \partial x_t . $$

    Args:
        model: A causal language model of transformers whose family is supported.
        input_ids: Tokens, `(B, T)`.
        attention_mask: 1 at real tokens, `(B, T)`, padded on either side; None: all are.
        layers: Indices of blocks.
        view: `noise` or `block`.

    Returns:
        Layer index to margins `(B, T)`.

    Raises:
        UnsupportedModelError: The attention of the model cannot be read exactly.
        ArgumentError: A layer does not exist, or the view is unknown.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=8)).eval()
        >>> model_margins(model, torch.arange(6).unsqueeze(0))[0].log_abs_det.shape
        torch.Size([1, 6])
    """
    with in_turn(model), torch.inference_mode(), capture_attention(model, layers=layers) as captured:
        inputs = text_inputs(model, input_ids, attention_mask)
        model(**inputs)
        states = captured.states(inputs["attention_mask"])
        return {layer: state_margins(state, view=view) for layer, state in states.items()}
