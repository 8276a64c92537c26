"""Seeded, frozen perturbations under which models are compared; every arm is measured under exactly the same ones.

A perturbation is a frozen value with a `record()` of plain JSON and one method, `applied(model, rms)`: a context
manager that perturbs the model and yields a function from a batch of the data to the batch that the model reads.
Embeddings are perturbed by a hook, texts by the returned batch, weights by the context itself. Random draws
depend on the seed and on the index of a sequence in the data, never on the arm or the batch.
"""

__all__ = [
    "FAMILIES",
    "AdversarialNoise",
    "Batch",
    "Clean",
    "DomainShift",
    "EmbeddingNoise",
    "Perturbation",
    "PerturbationSet",
    "Quantization",
    "Read",
    "Spelling",
    "TokenDrop",
    "Typos",
    "chosen_perturbations",
    "misspell",
    "round_channels",
    "standard_noise",
    "standard_perturbations",
    "token_nats",
]

from support_tokens.robustness.perturbations.adversarial import AdversarialNoise
from support_tokens.robustness.perturbations.base import Batch, Clean, Perturbation, Read, Spelling, token_nats
from support_tokens.robustness.perturbations.embeddings import EmbeddingNoise, TokenDrop, standard_noise
from support_tokens.robustness.perturbations.set import (
    FAMILIES,
    PerturbationSet,
    chosen_perturbations,
    standard_perturbations,
)
from support_tokens.robustness.perturbations.text import DomainShift, Typos, misspell
from support_tokens.robustness.perturbations.weights import Quantization, round_channels
