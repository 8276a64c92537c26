r"""What the attention of one layer says of each position: pure functions of an attention state, and RAUQ's recurrence.

With $\alpha^h_{tt}$ the weight of position t on itself, the token that the prediction of t+1 follows:

$$ -\frac1H \sum_h \log \alpha^h_{tt}, \qquad c^h_t = a\, p_t(x_{t+1}) + (1 - a)\, \alpha^h_{tt}\, c^h_{t-1} . $$

The first is a token's part of LLM-Check's attention score, the log-determinant of a triangular attention matrix
(Sriramanan et al., NeurIPS 2024). The second is RAUQ's confidence (Vazhentsev et al., arXiv:2505.20045), whose weight
of the token being written on the one before it is $\alpha_{tt}$ in the pass that writes it: that token is its query.
"""

__all__ = ["Recurrence", "rauq_of_sequence", "self_weights"]

import torch
from torch import Tensor

from support_tokens.margins import AttentionState, moments

# Numbers of one chunk of attention weights.
_CHUNK = 2**23


def self_weights(state: AttentionState, first: int = 0) -> Tensor:
    r"""$\alpha^h_{tt}$ of query positions from `first` on, `(B, H, n)`; under an inclusive mask.

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
    r"""RAUQ's confidence of all heads of one layer, carried from one call to the next.

    Args:
        share: $a$, the part of the probability; 0.2 is what lm-polygraph takes for models that are not instructed.

    Example:
        >>> recurrence = Recurrence()
        >>> p, weight = torch.tensor([[0.5, 0.5]]), torch.full((1, 2, 2), 0.25)
        >>> confidence, value = recurrence(p, weight, torch.ones(1, 2, dtype=torch.bool))
        >>> confidence[0, 0], value  # 0.5, then 0.2 * 0.5 + 0.8 * 0.25 * 0.5
        (tensor([0.5000, 0.2000]), tensor([[0.6931, 1.6094]]))
    """

    def __init__(self, share: float = 0.2) -> None:
        self.share = share
        self._confidence: Tensor | None = None
        self._sum: Tensor | None = None
        self._begun: Tensor | None = None

    def __call__(self, chosen: Tensor, weight: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
        r"""Goes on by n positions.

        Args:
            chosen: $p_t(x_{t+1})$, `(B, n)`.
            weight: $\alpha^h_{tt}$, `(B, H, n)`.
            counted: True where a known token follows, `(B, n)`; other positions change nothing. A sequence begins at
                its first such position, with $c = p$.

        Returns:
            $c^h_t$, `(B, H, n)`, and $-\log c^h_t$ of the head that looked most at itself so far, `(B, n)`; NaN where
            not counted.
        """
        if self._confidence is None:
            self._confidence = torch.ones_like(weight[..., 0])
            self._sum = torch.zeros_like(weight[..., 0])
            self._begun = torch.zeros_like(counted[:, 0])
        confidence, total, begun = self._confidence, self._sum, self._begun
        found, values = [weight[..., :0]], [chosen[:, :0]]
        for t in range(chosen.shape[1]):
            p, own, here = chosen[:, t, None], weight[..., t], counted[:, t, None]
            going = self.share * p + (1 - self.share) * own * confidence
            new = torch.where(begun[:, None], going, p.expand_as(going))  # type: ignore[index]
            confidence = torch.where(here, new, confidence)
            # The weight of the first position follows no token that was written, so it chooses no head.
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
