"""Attention state -> moments -> Jacobian block -> log|det| -> margins: functions of tensors that need torch alone."""

__all__ = [
    "AttentionState",
    "BlockMoments",
    "JacobianBlocks",
    "LowRankBlocks",
    "Margins",
    "NormJacobian",
    "Projection",
    "Rotation",
    "Slogdet",
    "assemble",
    "attention_margins",
    "attention_slogdet",
    "attention_weights",
    "block_moments",
    "block_penalty",
    "each_matrix",
    "first_order_margins",
    "full_precision",
    "fused_penalty",
    "gather_positions",
    "gradient_share",
    "is_near_singular",
    "margins_at",
    "moments",
    "position_chunks",
    "rankable_positions",
    "safe_slogdet",
    "sigma_min",
    "slogdet_and_inverse",
    "spread_of_block",
    "state_from_weights",
    "state_margins",
    "support_candidates",
    "view_sign",
]

from support_tokens.margins.assembly import LowRankBlocks, assemble, block_penalty
from support_tokens.margins.block_moments import BlockMoments, block_moments, spread_of_block
from support_tokens.margins.candidates import first_order_margins, gradient_share, support_candidates
from support_tokens.margins.fused import fused_penalty
from support_tokens.margins.jacobian import JacobianBlocks
from support_tokens.margins.linalg.elimination import slogdet_and_inverse
from support_tokens.margins.linalg.lapack import each_matrix
from support_tokens.margins.linalg.sigma import sigma_min
from support_tokens.margins.linalg.slogdet import Slogdet, full_precision, is_near_singular, safe_slogdet
from support_tokens.margins.linear_maps import NormJacobian, Projection, Rotation, gather_positions
from support_tokens.margins.margins import (
    Margins,
    attention_margins,
    attention_slogdet,
    margins_at,
    position_chunks,
    rankable_positions,
    state_margins,
    view_sign,
)
from support_tokens.margins.moments import attention_weights, moments
from support_tokens.margins.state import AttentionState, state_from_weights
