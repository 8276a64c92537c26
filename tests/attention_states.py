"""Attention states with leaves of their own: the law's, and one that holds all that a model's can."""

__all__ = ["BATCH", "HEADS", "HEAD_WIDTH", "KV_HEADS", "LENGTH", "WIDTH", "drawn", "law_state", "model_state"]

import torch
from torch import Tensor

from support_tokens.margins import AttentionState, NormJacobian, Projection, Rotation, state_from_weights

BATCH, LENGTH, WIDTH, HEADS, KV_HEADS, HEAD_WIDTH = 3, 6, 8, 4, 2, 2


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def law_state() -> tuple[AttentionState, list[Tensor]]:
    leaves = [drawn(BATCH, LENGTH, WIDTH, seed=0), drawn(1, 3, WIDTH, seed=1), drawn(1, 3, WIDTH, seed=2)]
    return state_from_weights(*leaves), leaves


def model_state() -> tuple[AttentionState, list[Tensor]]:
    """Grouped heads, rotation, QK norm, norms before and after, padding: all that a state can hold at once."""
    x, gain, after = (
        drawn(BATCH, LENGTH, WIDTH, seed=0),
        drawn(WIDTH, seed=1),
        drawn(WIDTH, seed=2),
    )
    w_q, w_k = drawn(HEADS, HEAD_WIDTH, WIDTH, seed=3), drawn(KV_HEADS, HEAD_WIDTH, WIDTH, seed=4)
    w_v, w_o = drawn(KV_HEADS, HEAD_WIDTH, WIDTH, seed=5), drawn(HEADS, WIDTH, HEAD_WIDTH, seed=6)

    def norm(z: Tensor, scale: Tensor) -> NormJacobian:
        inverse_scale = torch.rsqrt(z.square().mean(-1, keepdim=True) + 1e-3)
        return NormJacobian(scale, z * inverse_scale, inverse_scale, False)

    before = norm(x, gain)
    q, k, v = (torch.einsum("btd,hrd->bhtr", gain * before.direction, w) for w in (w_q, w_k, w_v))
    angle = torch.linspace(0, 2, LENGTH, dtype=torch.float64).reshape(1, -1, 1).expand(-1, -1, HEAD_WIDTH)
    rotation = Rotation(angle.cos(), angle.sin())
    valid = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    valid[1, -2:] = False
    state = AttentionState(
        query=q,
        key=k,
        value=v,
        scale=0.7,
        to_query=Projection(w_q, norm(q.transpose(1, 2), q.new_ones(HEAD_WIDTH)), rotation),
        to_key=Projection(w_k, None, rotation),
        to_value=Projection(w_v),
        output=w_o,
        allowed=valid[:, None, None, :].expand(-1, 1, LENGTH, -1),
        valid=valid,
        softcap=3.0,
        input_norm=before,
        output_norm=norm(x @ drawn(WIDTH, WIDTH, seed=7).detach(), after),
    )
    return state, [x, gain, after, w_q, w_k, w_v, w_o]
