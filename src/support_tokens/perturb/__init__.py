r"""Seeded, frozen perturbations under which models are compared: every arm meets exactly the same ones.

A perturbation is a frozen value with a `record()` of plain JSON and one method, `applied(model, rms)`: a context in
which the model is perturbed, that gives a function from the batch of the data to the batch which the model is to read.
Embeddings are perturbed by a hook, texts by the returned batch, weights by the context itself. Whatever is drawn
depends on the seed and on the place of a sequence in the data, never on arm or batch.
"""

__all__ = [
    "Batch",
    "Clean",
    "EmbeddingNoise",
    "OtherText",
    "Perturbation",
    "Read",
    "Spelling",
    "TokenDrop",
    "Typos",
    "WeightRounding",
    "WorstCaseNoise",
    "standard_noise",
    "token_nats",
]

from support_tokens.perturb.contract import Batch, Clean, Perturbation, Read, Spelling, token_nats
from support_tokens.perturb.embedding import EmbeddingNoise, TokenDrop, standard_noise
from support_tokens.perturb.text import OtherText, Typos
from support_tokens.perturb.weights import WeightRounding
from support_tokens.perturb.worst_case import WorstCaseNoise
