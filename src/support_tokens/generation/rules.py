r"""Sampling rules that depend on the margin, and a logits processor that applies one inside `model.generate`."""

__all__ = ["MarginMinP", "MarginProcessor", "MarginTemperature", "Rule"]

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor

from support_tokens.errors import ArgumentError, CaptureError
from support_tokens.margins import AttentionState
from support_tokens.models import AttentionCapture, MarginReader, text_config

Rule = Callable[[Tensor, Tensor], Tensor]
"""Logits `(B, V)` and log margins `(B,)` in nats to logits."""


@dataclass(frozen=True)
class MarginTemperature:
    r"""Divides logits by a temperature that falls with the margin, so that sampling is sharper near degeneracy.

    $$ \tau_t = \min\big(\tau_{\max}, \max(\tau_{\min}, 1 + b\,(\log|\det J_t| - m_0))\big). $$

    It multiplies with the `temperature` of `generate`.

    Args:
        pivot: $m_0$, log margin in nats at which the temperature is 1.
        slope: $b \ge 0$, change of temperature per nat.
        lowest: $\tau_{\min} > 0$.
        highest: $\tau_{\max} \ge \tau_{\min}$; 1: never above the temperature without the rule.

    Raises:
        ArgumentError: An argument is out of range.

    Example:
        >>> MarginTemperature(pivot=1.0, slope=0.5)(torch.ones(2, 1), torch.tensor([0.0, 3.0]))
        tensor([[2.],
                [1.]])
    """

    pivot: float = 0.0
    slope: float = 0.25
    lowest: float = 0.1
    highest: float = 1.0

    def __post_init__(self) -> None:
        if not (self.slope >= 0 and 0 < self.lowest <= self.highest):
            raise ArgumentError(
                f"MarginTemperature must have slope >= 0 and 0 < lowest <= highest, received slope={self.slope}, "
                f"lowest={self.lowest} and highest={self.highest}; change them."
            )

    def __call__(self, scores: Tensor, log_margin: Tensor) -> Tensor:
        """Logits divided by the temperature of each text, `(B, V)`."""
        temperature = (1 + self.slope * (log_margin - self.pivot)).clamp(self.lowest, self.highest)
        return scores / temperature.to(scores).unsqueeze(-1)


@dataclass(frozen=True)
class MarginMinP:
    r"""Removes tokens far less probable than the best one; the smaller the margin, the more tokens.

    $$ p_t(v) \ge \rho_t \max_u p_t(u), \qquad
       \rho_t = \min\big(\rho_{\max}, \max(0, b\,(m_0 - \log|\det J_t|))\big). $$

    Args:
        pivot: $m_0$, log margin in nats above which nothing is removed.
        slope: $b \ge 0$, change of $\rho$ per nat.
        highest: $\rho_{\max}$, above 0 and at most 1; at 1 only the best token remains.

    Raises:
        ArgumentError: An argument is out of range.

    Example:
        >>> logits = torch.tensor([[0.5, 0.3, 0.2]]).log().repeat(2, 1)
        >>> MarginMinP(pivot=0.0, slope=0.5, highest=0.5)(logits, torch.tensor([-1.0, 1.0])).exp()
        tensor([[0.5000, 0.3000, 0.0000],
                [0.5000, 0.3000, 0.2000]])
    """

    pivot: float = 0.0
    slope: float = 0.1
    highest: float = 0.5

    def __post_init__(self) -> None:
        if not (self.slope >= 0 and 0 < self.highest <= 1):
            raise ArgumentError(
                f"MarginMinP must have slope >= 0 and 0 < highest <= 1, received slope={self.slope} and "
                f"highest={self.highest}; change them."
            )

    def __call__(self, scores: Tensor, log_margin: Tensor) -> Tensor:
        """Logits, minus infinity at removed tokens, `(B, V)`."""
        fraction = (self.slope * (self.pivot - log_margin)).clamp(0, self.highest)
        least = scores.amax(-1, keepdim=True) + fraction.to(scores).log().unsqueeze(-1)
        return scores.masked_fill(scores < least, -torch.inf)


_ASSISTED = (
    "MarginProcessor must be called after a forward pass that ends with the last token, which assisted decoding and "
    "prompt lookup do not do"
)


class MarginProcessor(LogitsProcessor):
    r"""Applies a rule inside `model.generate(logits_processor=[...])`.

    It reads the last forward pass through hooks on the model until it is removed: use it as a context manager.
    Temperature, top-k, top-p and min-p of `generate` are applied after it.

    Args:
        model: The model that generates.
        rule: `MarginTemperature`, `MarginMinP`, or any function of logits `(B, V)` and log margins `(B,)`.
        layer: Index of a block.
        view: `noise` or `block`.

    Raises:
        UnsupportedModelError: The attention of the model cannot be read exactly.
        ArgumentError: A layer or view does not exist; while generating: texts were reordered, as in beam search, or the
            last forward pass does not end with the last token, as in assisted decoding and prompt lookup.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> config = GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=16, eos_token_id=None)
        >>> model, ids = GPT2LMHeadModel(config).eval(), torch.arange(6).unsqueeze(0)
        >>> with MarginProcessor(model, MarginTemperature(pivot=1.0)) as adapt:
        ...     model.generate(ids, logits_processor=[adapt], do_sample=True, max_new_tokens=3).shape
        torch.Size([1, 9])
        >>> adapt.log_margin.shape
        torch.Size([1])
    """

    def __init__(self, model: nn.Module, rule: Rule, *, layer: int = 0, view: str = "noise") -> None:
        self.rule = rule
        self._reader = MarginReader(views=(view,))
        self._capture = AttentionCapture(model, (layer,))
        self._window = getattr(text_config(model), "sliding_window", None)
        self._ids: Tensor | None = None
        self._beside: int | None = None  # keys that are no tokens of the text, such as virtual ones of prompt tuning
        self.log_margin: Tensor | None = None
        """Log margins `(B,)` of the last step, in nats."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        """Applies the rule, given tokens so far `(B, T)` and logits `(B, V)`."""
        try:
            ((layer, state),) = self._capture.states().items()
        except CaptureError as error:
            raise ArgumentError(f"{_ASSISTED}, received a call without one; do not use them.") from error
        self._check(input_ids, state)
        self._ids = input_ids
        self._capture.clear()  # a pass serves one call: candidates of assisted decoding come without one
        (figures,) = self._reader(layer, state, slice(state.length - 1, state.length)).values()
        self.log_margin = figures["log_abs_det"][:, 0]
        return self.rule(scores, self.log_margin)

    def _check(self, input_ids: Tensor, state: AttentionState) -> None:
        keys, before = state.key.shape[2], self._ids
        beside = keys - input_ids.shape[1]
        if keys == state.length or self._beside is None:
            # A text begins here, perhaps on a cache that holds its earlier part.
            self._beside, before = beside, None
        forgotten = self._window is not None and beside < self._beside and keys + 1 >= self._window
        if beside != self._beside and not forgotten:
            raise ArgumentError(
                f"{_ASSISTED}, received {input_ids.shape[1]} tokens after a pass over {keys - self._beside}; do "
                "not use them."
            )
        shared = None if before is None else min(before.shape[1], input_ids.shape[1])
        if before is not None and not torch.equal(input_ids[:, :shared], before[:, :shared]):
            raise ArgumentError(
                "MarginProcessor must see each text go on in its own row, received texts that were reordered, as in "
                "beam search, where a margin would belong to another text; sample or decode greedily."
            )

    def remove(self) -> None:
        """Removes the hooks."""
        self._capture.remove()

    def __enter__(self) -> "MarginProcessor":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()
