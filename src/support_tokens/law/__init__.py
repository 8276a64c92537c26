"""The paper's law of embeddings: exact density, sampling, certificates, depth.

`distribution`, `stack`, `coupling` and `fit` build on `prior`. Below it, `newton` inverts one position and `trajectory`
all of them; `certificate` and `mass` tell where the formula is a density.
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
    "all_roots_on_a_line",
    "attend",
    "barrier_concentration",
    "coupling_spectrum",
    "fit",
    "from_noise",
    "keep_repulsive",
    "newton",
    "solve",
    "standard_errors",
]

from support_tokens.law.certificate import Certificate
from support_tokens.law.coupling import Concentration, Coupling, barrier_concentration, coupling_spectrum
from support_tokens.law.distribution import EmbeddingLaw, NoiseToEmbeddings
from support_tokens.law.fit import Fit, StandardErrors, fit, standard_errors
from support_tokens.law.mass import Mass, Preimages
from support_tokens.law.newton import all_roots_on_a_line, attend, newton
from support_tokens.law.prior import EmbeddingPrior
from support_tokens.law.repulsive import keep_repulsive
from support_tokens.law.stack import LawStack, LayerLaw
from support_tokens.law.trajectory import Solution, from_noise, solve
