"""Sampling with one random generator per text, so that a sample does not depend on the batch."""

__all__ = ["RowSampler"]

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor


class RowSampler(LogitsProcessor):
    r"""Samples the next token of each text and masks all others, so that greedy decoding returns it.

    Text i draws one number per step from its own generator and takes the token where the cumulative probability passes
    it. `generate` itself draws for all texts from one generator, so that a text depends on the rest of its batch.

    Args:
        seeds: One per text.

    Example:
        >>> sampler, logits = RowSampler([5, 6]), torch.zeros(2, 100)
        >>> both = sampler(torch.zeros(2, 1), logits).argmax(-1)
        >>> alone = RowSampler([6])(torch.zeros(1, 1), logits[:1]).argmax(-1)
        >>> bool(alone[0] == both[1])
        True
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        """Minus infinity at all tokens except the sampled one, `(B, V)`."""
        cumulative = torch.softmax(scores.double(), dim=-1).cumsum(-1)
        drawn = torch.stack([torch.rand((), generator=g, dtype=torch.float64) for g in self._generators])
        place = drawn.to(scores.device).unsqueeze(-1) * cumulative[:, -1:]
        # right=True: a token of probability 0 is never drawn.
        token = torch.searchsorted(cumulative, place, right=True).clamp_max(scores.shape[-1] - 1)
        return torch.full_like(scores, -torch.inf).scatter(-1, token, 0.0)
