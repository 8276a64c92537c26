"""One causal type of transformers: margins and the law's penalty of the package beside the oracle's."""

__all__ = ["check"]

import copy

import torch
from families.oracle import (
    OracleError,
    attention_jacobians,
    attention_layers,
    everything_in_float64,
    law_penalty,
    residual_blocks,
)
from families.tiny import TinyModelError, batches, tiny_model
from torch import Tensor, nn

from support_tokens import attach_barrier
from support_tokens.errors import SupportTokensError
from support_tokens.margins import JacobianBlocks, state_margins
from support_tokens.models import capture_attention
from support_tokens.models.architectures import architecture_of

# Largest deviation that is rounding: of blocks by their size, of log margins in nats.
TOLERANCE = 1e-8


def check(model_type: str, *, law: bool = True) -> dict:
    """The outcome of a type: `status` (right, refused, not buildable, wrong), `deviation` or `reason`, and `law`.

    Args:
        model_type: Key of the mapping of causal models.
        law: Whether the penalty of the law is compared too.
    """
    try:
        model = tiny_model(model_type)
        for batch in batches():
            with torch.no_grad(), everything_in_float64():
                if not torch.isfinite(model(**batch, use_cache=False).logits).all():
                    raise TinyModelError("logits of its tiny model are not finite")
    except TinyModelError as error:
        return {"status": "not buildable", "reason": str(error)}
    except Exception as error:
        return {"status": "not buildable", "reason": f"forward pass: {_sentence(error)}"}
    config = model.config.get_text_config(decoder=True)
    outcome = {"class": type(model).__name__, "model_type": config.model_type, **_outcome(lambda: _margins(model))}
    return {**outcome, "law": _outcome(lambda: _law(model))} if law else outcome


def _outcome(measure) -> dict:
    try:
        deviation = measure()
    except SupportTokensError as error:
        return {"status": "refused", "reason": str(error)}
    except OracleError as error:
        return {"status": "wrong", "reason": f"accepted, and the oracle has no value: {error}"}
    except Exception as error:
        return {"status": "wrong", "reason": f"raw error: {_sentence(error)}"}
    if not deviation <= TOLERANCE:
        return {"status": "wrong", "reason": f"off by {deviation:.1e}"}
    return {"status": "right", "deviation": deviation}


def _margins(model: nn.Module) -> float:
    """Largest deviation of blocks and of log margins in both views, over layers, paddings and the bare batch."""
    architecture_of(model)
    layers, worst = attention_layers(model), 0.0
    for batch in batches():
        mask = batch.get("attention_mask")
        with torch.no_grad(), everything_in_float64(), capture_attention(model, layers) as capture:
            model(**batch, use_cache=False)
            states = capture.states(mask)
        oracle = attention_jacobians(model, layers, batch)
        for layer, state in states.items():
            real = torch.ones(oracle[layer].shape[:2], dtype=torch.bool) if mask is None else mask.bool()
            worst = max(worst, _deviation(state, oracle[layer], real))
    return worst


def _deviation(state, oracle: Tensor, real: Tensor) -> float:
    found = JacobianBlocks(state).dense(slice(0, state.length))
    size = max(1.0, float(oracle[real].abs().max()))
    if not float(oracle[real].abs().max()) > 1e-6:
        raise OracleError("attention adds nothing that depends on its input")
    worst = float((found - oracle)[real].abs().max()) / size
    identity = torch.eye(state.width, dtype=oracle.dtype)
    for view, sign in (("noise", -1), ("block", 1)):
        margins, expected = state_margins(state, view=view), torch.linalg.slogdet(identity + sign * oracle)
        if not torch.equal(margins.sign[real], expected.sign[real]):
            return float("inf")
        worst = max(worst, float((margins.log_abs_det - expected.logabsdet)[real].abs().max()))
        if margins.log_abs_det[~real].any():
            return float("inf")
    return worst


def _law(model: nn.Module) -> float:
    """Largest deviation of what a barrier of the law adds to the loss."""
    worst = 0.0
    for batch in batches():
        bare, barred = copy.deepcopy(model), copy.deepcopy(model)
        seen = _embeddings(bare)
        handle = attach_barrier(barred, weight=1.0, source="prior")
        labels = batch["input_ids"].masked_fill(batch.get("attention_mask", torch.ones(())) == 0, -100)
        losses = []
        for run in (bare, barred.double()):
            with everything_in_float64():
                losses.append(run.train()(**batch, labels=labels, use_cache=False).loss)
        losses[1].backward()
        if not any(p.grad is not None and p.grad.any() for p in barred.get_input_embeddings().parameters()):
            raise OracleError("no gradient reaches the embeddings")
        law = {name.rpartition(".")[2]: tensor for name, tensor in handle.state_dict().items()}
        added, x = float((losses[1] - losses[0]).detach()), seen[0].detach()
        expected = law_penalty(x, law["w_q"].to(x), law["w_k"].to(x), batch.get("attention_mask"))
        worst = max(worst, abs(added - float(expected)))
    return worst


def _embeddings(model: nn.Module) -> list[Tensor]:
    """A list that every forward pass of `model` puts the input of its first block into."""
    seen: list[Tensor] = []

    def keep(_module: nn.Module, args: tuple, kwargs: dict) -> None:
        seen.append(args[0] if args else kwargs["hidden_states"])

    residual_blocks(model)[0].register_forward_pre_hook(keep, with_kwargs=True)
    return seen


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
