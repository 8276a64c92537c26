r"""The paper's law of embeddings: exact density, sampling, certificates, depth.

prior -> distribution, depth, coupling, fit; underneath: solve (one position), trajectory (all), certificate and mass.
"""

__all__ = [
    "Certificate",
    "Concentration",
    "Coupling",
    "EmbeddingLaw",
    "EmbeddingPrior",
    "Fit",
    "LawStack",
    "LayerLaw",
    "Mass",
    "NoiseToEmbeddings",
    "Preimages",
    "Solution",
    "StandardErrors",
    "barrier_concentration",
    "coupling_spectrum",
    "fit",
    "keep_repulsive",
    "standard_errors",
]

from support_tokens.law.certificate import Certificate
from support_tokens.law.coupling import Concentration, Coupling, barrier_concentration, coupling_spectrum
from support_tokens.law.depth import LawStack, LayerLaw
from support_tokens.law.distribution import EmbeddingLaw, NoiseToEmbeddings
from support_tokens.law.fit import Fit, StandardErrors, fit, standard_errors
from support_tokens.law.mass import Mass, Preimages
from support_tokens.law.prior import EmbeddingPrior
from support_tokens.law.repulsion import keep_repulsive
from support_tokens.law.trajectory import Solution
