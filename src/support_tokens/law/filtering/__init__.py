"""Sequential inference of latent embeddings from observed tokens: emissions, resampling, the particle filter."""

__all__ = [
    "CategoricalEmission",
    "Emission",
    "FilterResult",
    "FilterStep",
    "GaussianEmission",
    "ParticleFilter",
    "effective_sample_size",
    "resample",
]

from support_tokens.law.filtering.emissions import CategoricalEmission, Emission, GaussianEmission
from support_tokens.law.filtering.particle_filter import FilterResult, FilterStep, ParticleFilter
from support_tokens.law.filtering.resampling import effective_sample_size, resample
