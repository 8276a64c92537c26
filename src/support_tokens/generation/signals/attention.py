r"""Attention signals: functions of an attention state, and the recurrence of RAUQ.

With $\alpha^h_{tt}$ the attention weight of position t on itself:

$$ -\frac1H \sum_h \log \alpha^h_{tt}, \qquad c^h_t = a\, p_t(x_{t+1}) + (1 - a)\, \alpha^h_{tt}\, c^h_{t-1} . $$

The first is a token's part of LLM-Check's attention score, the log-determinant of a triangular attention matrix
(Sriramanan et al., NeurIPS 2024). The second is RAUQ's confidence (Vazhentsev et al., arXiv:2505.20045).
"""

__all__ = ["Recurrence", "rauq_of_sequence", "self_weights"]

import torch
from torch import Tensor

from support_tokens.margins import AttentionState, moments

# Attention weights in one chunk.
_CHUNK = 2**23


def self_weights(state: AttentionState, first: int = 0) -> Tensor:
    r"""$\alpha^h_{tt}$ of query positions from `first` on, `(B, H, n)`, under an inclusive mask.

    Example:
        >>> from support_tokens.margins import state_from_weights
        >>> x, w = torch.randn(2, 5, 4), torch.randn(3, 2, 4)
        >>> self_weights(state_from_weights(x, w, w, w, w.mT, strict=False), first=4).shape
        torch.Size([2, 3, 1])
    """
    size = max(1, _CHUNK // (state.batch * state.heads * state.key.shape[2]))
    parts = [
        moments(state, slice(begin, min(begin + size, state.length)), covariance=False).self_weight
        for begin in range(first, state.length, size)
    ]
    return torch.cat(parts, dim=-1)  # type: ignore[arg-type]


class Recurrence:
    r"""RAUQ's confidence of all heads of one layer, continued from one call to the next.

    Args:
        mixing: $a$, the weight of the probability; 0.2 is the default of lm-polygraph for base models.

    Example:
        >>> recurrence = Recurrence()
        >>> p, weight = torch.tensor([[0.5, 0.5]]), torch.full((1, 2, 2), 0.25)
        >>> confidence, value = recurrence(p, weight, torch.ones(1, 2, dtype=torch.bool))
        >>> confidence[0, 0], value  # 0.5, then 0.2 * 0.5 + 0.8 * 0.25 * 0.5
        (tensor([0.5000, 0.2000]), tensor([[0.6931, 1.6094]]))
    """

    def __init__(self, mixing: float = 0.2) -> None:
        self.mixing = mixing
        self._confidence: Tensor | None = None
        self._sum: Tensor | None = None
        self._begun: Tensor | None = None

    def __call__(self, chosen: Tensor, weight: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
        r"""Advances by n positions.

        Args:
            chosen: $p_t(x_{t+1})$, `(B, n)`.
            weight: $\alpha^h_{tt}$, `(B, H, n)`.
            counted: True where the next token is known, `(B, n)`; other positions are skipped. A sequence starts at its
                first such position, with $c = p$.

        Returns:
            $c^h_t$, `(B, H, n)`, and $-\log c^h_t$ of the head with the largest mean self-weight so far, `(B, n)`; NaN
            where not counted.
        """
        if self._confidence is None:
            self._confidence = torch.ones_like(weight[..., 0])
            self._sum = torch.zeros_like(weight[..., 0])
            self._begun = torch.zeros_like(counted[:, 0])
        confidence, total, begun = self._confidence, self._sum, self._begun
        found, values = [weight[..., :0]], [chosen[:, :0]]
        for t in range(chosen.shape[1]):
            p, own, here = chosen[:, t, None], weight[..., t], counted[:, t, None]
            going = self.mixing * p + (1 - self.mixing) * own * confidence
            new = torch.where(begun[:, None], going, p.expand_as(going))  # type: ignore[index]
            confidence = torch.where(here, new, confidence)
            # The first position has no earlier answer token, so its weight is left out of the choice of a head.
            total = torch.where(here & begun[:, None], total + own, total)  # type: ignore[index,operator]
            begun = begun | counted[:, t]  # type: ignore[operator]
            head = total.argmax(-1, keepdim=True)
            value = -_log(confidence.gather(-1, head)).squeeze(-1)
            found.append(torch.where(here, confidence, torch.nan).unsqueeze(-1))
            values.append(value.masked_fill(~counted[:, t], torch.nan).unsqueeze(-1))
        self._confidence, self._sum, self._begun = confidence, total, begun
        return torch.cat(found, dim=-1), torch.cat(values, dim=-1)


def rauq_of_sequence(confidence: Tensor, weight: Tensor, counted: Tensor) -> Tensor:
    r"""RAUQ of one layer, $-\frac1N \sum_t \log c^{h^*}_t$ with $h^*$ the head of largest mean weight, `(B,)`.

    Args:
        confidence: $c^h_t$, `(B, H, n)`.
        weight: $\alpha^h_{tt}$, `(B, H, n)`.
        counted: The positions of the sequence, `(B, n)`; NaN where a row has none.

    Example:
        >>> confidence = torch.tensor([[[0.5, 0.2], [0.5, 0.1]]])
        >>> rauq_of_sequence(confidence, torch.tensor([[[0.9, 0.1], [0.1, 0.3]]]), torch.ones(1, 2, dtype=torch.bool))
        tensor([1.4979])
    """
    rows = counted[:, None, :]
    later = rows & (counted.cumsum(-1) > 1)[:, None, :]
    head = weight.masked_fill(~later, 0.0).sum(-1).argmax(-1)
    chosen = confidence.gather(1, head[:, None, None].expand(-1, 1, confidence.shape[-1])).squeeze(1)
    return -_log(chosen).masked_fill(~counted, 0.0).sum(-1) / counted.sum(-1)


def _log(confidence: Tensor) -> Tensor:
    return confidence.clamp_min(torch.finfo(confidence.dtype).tiny).log()
