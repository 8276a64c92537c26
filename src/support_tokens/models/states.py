r"""Builds an `AttentionState` from a recorded layer: one precision, separate heads, a boolean mask."""

__all__ = ["attention_state"]

from collections.abc import Callable

import torch
from torch import Tensor

from support_tokens.errors import ArgumentError, CaptureError
from support_tokens.margins import AttentionState, NormJacobian, Projection, Rotation
from support_tokens.margins.linalg import full_precision
from support_tokens.models.compat import assert_on_device
from support_tokens.models.recorder import LayerRecorder, NormRecorder

Lift = Callable[[Tensor], Tensor]


def attention_state(recorder: LayerRecorder, attention_mask: Tensor | None, where: str) -> AttentionState:
    """The state of one recorded layer, in float64 if its query is, else in float32.

    Args:
        recorder: The recorded layer.
        attention_mask: 1 at real tokens, `(B, S)` or longer, or None.
        where: Names the layer in errors.

    Raises:
        CaptureError: The weights are parts of whole matrices, or the mask is not causal.
        ArgumentError: `attention_mask` does not fit.
    """
    kept = recorder.tensors
    query, key, value = kept["query"], kept["key"], kept["value"]
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    factor = recorder.options["scaling"]

    def lift(tensor: Tensor) -> Tensor:
        # A pass without gradients records weights that require gradients; inference mode cannot give any.
        tensor = tensor if recorder.grad_enabled else tensor.detach()
        return tensor.to(device=query.device, dtype=dtype)

    def real(tensor: Tensor, mask: Tensor | None) -> Tensor:
        # Padding may hold NaN, which would survive a product with zero.
        return lift(tensor) if mask is None else torch.where(mask, lift(tensor), 0.0)

    with full_precision(query):
        allowed = _allowed(kept.get("mask"), query.shape[2], key.shape[2], where)
        valid, allowed = _valid(attention_mask, allowed, query, key.shape[2])
        rows = None if valid is None else valid[:, None, :, None]
        seen = None if allowed is None else allowed.any(2).any(1)[:, None, :, None]
        w_q, w_k, w_v, w_o = _weights(recorder, lift, where)
        rotation = _rotation(recorder, lift)
        norm = lambda role: _norm(recorder.norms.get(role), lift, valid)  # noqa: E731
        late = lambda role: role in recorder.norms and recorder.norms[role].norm.after_rotation  # noqa: E731
        return AttentionState(
            query=real(query, rows),
            key=real(key, seen),
            value=real(value, seen),
            scale=float(query.shape[-1] ** -0.5 if factor is None else factor),  # type: ignore[arg-type]
            to_query=Projection(w_q * recorder.query_factor, norm("query_norm"), rotation, late("query_norm")),
            to_key=Projection(w_k, norm("key_norm"), rotation, late("key_norm")),
            to_value=Projection(w_v * recorder.value_factor),
            output=w_o * recorder.residual_factor,
            allowed=allowed,
            valid=valid,
            softcap=recorder.options["softcap"],  # type: ignore[arg-type]
            sinks=lift(kept["sinks"]) if "sinks" in kept else None,
            input_norm=norm("input_norm"),
            output_norm=norm("output_norm"),
        )


def _weights(recorder: LayerRecorder, lift: Lift, where: str) -> list[Tensor]:
    """Query, key and value weights `(heads, R, D)` and output weight `(H, D, Rv)`."""
    kept, table = recorder.tensors, recorder.architecture
    (heads, width), (groups, value_width) = kept["query"].shape[1::2], kept["value"].shape[1::2]
    sizes = [heads * width, groups * width, groups * value_width]
    stacked = [lift(kept[path]) for path in table.projections]
    output = lift(kept[table.output])
    if sum(w.shape[0] for w in stacked) != sum(sizes) or output.shape[1] != heads * value_width:
        raise CaptureError(
            f"{where} has projections of {[tuple(w.shape) for w in (*stacked, output)]} for {heads} query and {groups} "
            "key heads; use neither tensor parallelism nor ZeRO stage 3, which split matrices."
        )
    if table.fused == "stacked":
        stacked = list(stacked[0].split(sizes))
    elif table.fused == "per_head":
        stacked = [w.flatten(0, 1) for w in stacked[0].unflatten(0, (heads, 3, width)).unbind(1)]
    q, k, v = (w.unflatten(0, (n, -1)) for w, n in zip(stacked, (heads, groups, groups), strict=True))
    return [q, k, v, output.unflatten(1, (heads, value_width)).transpose(0, 1)]


def _rotation(recorder: LayerRecorder, lift: Lift) -> Rotation | None:
    if "cos" not in recorder.tensors:
        return None
    style = recorder.architecture.rotation
    cos, sin = lift(recorder.tensors["cos"]), lift(recorder.tensors["sin"])
    if style == "neighbours_sine_first":
        sin, cos = (t.repeat_interleave(2, dim=-1) for t in (cos, sin))
    if style == "halves_narrow":
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    elif style == "halves_reversed":
        sin = -sin
    elif style == "neighbours_narrow":
        cos, sin = (t[..., : t.shape[-1] // 2].repeat_interleave(2, dim=-1) for t in (cos, sin))
    return Rotation(cos, sin, interleaved=style is not None and style.startswith("neighbours"))


def _norm(recorder: NormRecorder | None, lift: Lift, valid: Tensor | None) -> NormJacobian | None:
    if recorder is None:
        return None
    table = recorder.norm
    z = lift(recorder.tensors["input"])
    if table.heads_first:
        z = z.transpose(1, 2)
    if valid is not None:
        z = torch.where(valid.reshape(*valid.shape, *(1,) * (z.dim() - 2)), z, 0.0)
    gain = lift(recorder.tensors["gain"]) + table.gain_offset if "gain" in recorder.tensors else z.new_ones(z.shape[-1])
    centred = z - z.mean(-1, keepdim=True) if table.centered else z
    inverse_scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + recorder.epsilon)
    return NormJacobian(gain, centred * inverse_scale, inverse_scale, table.centered)


def _allowed(mask: Tensor | None, length: int, keys: int, where: str) -> Tensor | None:
    """The mask of the layer as `(B or 1, 1 or H, T, S)`, True where it may look; None: everywhere behind itself."""
    if mask is None:
        return None
    if mask.dim() != 4:
        raise CaptureError(
            f"{where} must receive a mask of shape (B, 1, T, S), received {tuple(mask.shape)}; load the model with "
            "attn_implementation='sdpa'."
        )
    mask = mask[..., :keys]
    allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    offset = keys - length
    ahead = torch.ones(length, keys, dtype=torch.bool, device=mask.device).triu(offset + 1)
    broken = allowed & ahead
    if mask.dtype != torch.bool:
        broken = broken | (allowed & (mask != 0))
    _require(
        ~broken.any(),
        f"{where} must receive a causal mask of 0 and -inf, received one that shows later positions or weighs keys; "
        "pass none, or one that only hides keys.",
    )
    return allowed


def _require(condition: Tensor, sentence: str) -> None:
    if torch.compiler.is_compiling():
        return
    if condition.device.type == "cpu":
        if not condition:
            raise CaptureError(sentence)
    else:
        # Asserted on the device, so that training does not wait for the result.
        assert_on_device(condition, sentence)


def _valid(
    attention_mask: Tensor | None, allowed: Tensor | None, query: Tensor, keys: int
) -> tuple[Tensor | None, Tensor | None]:
    """Real tokens, `(B, T)`, and the mask without keys at padding."""
    batch, _, length, _ = query.shape
    if attention_mask is not None and attention_mask.dim() == 2:
        if attention_mask.shape[0] != batch or attention_mask.shape[1] < keys:
            raise ArgumentError(
                f"attention_mask must have shape (B, S) with B = {batch} and S at least {keys}, received "
                f"{tuple(attention_mask.shape)}; pass the mask that the model received."
            )
        real = attention_mask[:, -keys:].to(query.device).bool()
        columns = real[:, None, None, :].expand(-1, 1, length, -1)
        return real[:, -length:], columns if allowed is None else allowed & columns
    if attention_mask is not None and attention_mask.dim() != 4:
        raise ArgumentError(
            f"attention_mask must have 2 dimensions (B, S), or the 4 that the model received, received "
            f"{tuple(attention_mask.shape)}; pass 1 at real tokens and 0 at padding."
        )
    if allowed is None:
        return None, None
    return allowed.diagonal(keys - length, -2, -1).any(1).expand(batch, -1), allowed
