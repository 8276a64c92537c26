r"""Entropy and log-probabilities of the next-token distribution at each position: functions of logits.

$$ H_t = -\sum_v p_t(v) \log p_t(v), \qquad \max_v \log p_t(v), \qquad \log p_t(x_{t+1}). $$
"""

__all__ = ["predictive_quantities"]

import torch
from torch import Tensor

# Numbers in one chunk of log-probabilities, small beside the logits, which are in memory anyway.
_CHUNK = 2**23


def predictive_quantities(logits: Tensor, following: Tensor | None = None) -> dict[str, Tensor]:
    r"""Entropy, largest log-probability, and log-probability of the token that follows, in nats.

    Args:
        logits: `(B, n, V)`; 16-bit logits are computed in float32. Minus infinity excludes a token.
        following: Ids of the tokens that follow, `(B, n)`; negative where unknown. None: unknown everywhere.

    Returns:
        `entropy`, `log_max_prob` and `log_chosen`, each `(B, n)`; `log_chosen` is NaN where no token is known, and all
        three are NaN where a logit is.

    Example:
        >>> found = predictive_quantities(torch.zeros(1, 2, 4), torch.tensor([[3, -1]]))
        >>> found["entropy"], found["log_chosen"]
        (tensor([[1.3863, 1.3863]]), tensor([[-1.3863,     nan]]))
    """
    batch, count, vocabulary = logits.shape
    dtype = logits.dtype if logits.dtype == torch.float64 else torch.float32
    size = max(1, _CHUNK // max(1, batch * vocabulary))
    parts: dict[str, list[Tensor]] = {"entropy": [], "log_max_prob": [], "log_chosen": []}
    for begin in range(0, count, size):
        log_p = torch.log_softmax(logits[:, begin : begin + size].to(dtype), dim=-1)
        parts["log_max_prob"].append(log_p.amax(-1))
        if following is None:
            parts["log_chosen"].append(torch.full_like(log_p[..., 0], torch.nan))
        else:
            ids = following[:, begin : begin + size]
            taken = log_p.gather(-1, ids.clamp_min(0).unsqueeze(-1)).squeeze(-1)
            parts["log_chosen"].append(taken.masked_fill(ids < 0, torch.nan))
        parts["entropy"].append(torch.special.entr(log_p.exp_()).sum(-1))
    empty = logits.new_zeros(batch, 0, dtype=dtype)
    return {name: torch.cat([empty, *found], dim=1) for name, found in parts.items()}
