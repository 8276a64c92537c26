"""Training arms: what one run does to the model beyond cross-entropy, as configuration of a few lines."""

__all__ = [
    "ARMS",
    "SMART",
    "Arm",
    "Attachment",
    "Barrier",
    "Combined",
    "ConditionPenalty",
    "CrossEntropy",
    "EmbeddingDecay",
    "EmbeddingDropout",
    "EmbeddingNoise",
    "EmbeddingScale",
    "HeldMargin",
    "InvariantBarrier",
    "LawNoise",
    "NEFTune",
    "RDrop",
    "SigmaReparam",
    "SpectralNorm",
    "Variational",
    "arm_config",
    "arm_from_config",
    "arm_label",
    "parse_arm",
]

from support_tokens.arms.barriers import Barrier, HeldMargin, InvariantBarrier
from support_tokens.arms.combined import Combined
from support_tokens.arms.condition import ConditionPenalty
from support_tokens.arms.consistency import SMART, RDrop
from support_tokens.arms.contract import Arm, Attachment, CrossEntropy
from support_tokens.arms.noises import EmbeddingDropout, EmbeddingNoise, LawNoise, NEFTune
from support_tokens.arms.registry import ARMS, arm_config, arm_from_config, arm_label, parse_arm
from support_tokens.arms.variational import Variational
from support_tokens.arms.weights import EmbeddingDecay, EmbeddingScale, SigmaReparam, SpectralNorm
