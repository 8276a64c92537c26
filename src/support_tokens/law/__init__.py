r"""The paper's law of embeddings: exact density, sampling, certificates, depth.

prior -> distribution -> depth; underneath, solve (one position), trajectory (all of them), certificate and mass.
"""

__all__ = [
    "Certificate",
    "EmbeddingLaw",
    "EmbeddingPrior",
    "Mass",
    "NoiseToEmbeddings",
    "Preimages",
    "Solution",
]

from support_tokens.law.certificate import Certificate
from support_tokens.law.distribution import EmbeddingLaw, NoiseToEmbeddings
from support_tokens.law.mass import Mass, Preimages
from support_tokens.law.prior import EmbeddingPrior
from support_tokens.law.trajectory import Solution
