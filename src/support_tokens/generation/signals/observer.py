"""Per-position statistics of a forward pass, for a whole text or token by token with a KV cache."""

__all__ = ["Observer"]

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from support_tokens.generation.signals.attention import Recurrence, self_weights
from support_tokens.generation.signals.density import EmbeddingDensity
from support_tokens.generation.signals.hidden import HiddenGram
from support_tokens.generation.signals.logits import predictive_quantities
from support_tokens.generation.signals.table import Quantities, Signal
from support_tokens.law import EmbeddingLaw, EmbeddingPrior
from support_tokens.margins import AttentionState, full_precision
from support_tokens.models import AttentionCapture, MarginReader, decoder_blocks, hook_embeddings

_MARGINS = {"log_abs_det", "sign", "sigma_min"}
_WEIGHTS = {"self_weight", "confidence", "rauq"}


class Observer:
    """Reads the forward passes of a model over one batch of texts until it is removed, whole or token by token.

    Args:
        model: A causal language model of transformers, of a supported family.
        signals: The signals to compute.
        layers: Indices of blocks; negative ones count from the last.
        view: `noise` or `block`.
        law: Law of the embeddings, for signals that need one.

    Raises:
        UnsupportedModelError: The attention of the model cannot be read exactly, and a signal needs it.
        ArgumentError: A layer or view does not exist.
    """

    def __init__(
        self,
        model: nn.Module,
        signals: Sequence[Signal],
        layers: Sequence[int] = (0,),
        view: str = "noise",
        law: EmbeddingLaw | EmbeddingPrior | None = None,
    ) -> None:
        self._needs = {name for signal in signals for name in signal.needs}
        self._reader = MarginReader(self._needs & _MARGINS, (view,))
        self._density = EmbeddingDensity(law) if law is not None and "log_density" in self._needs else None
        # Signals of logits alone work on models whose attention cannot be read.
        seen = bool(self._needs & (_MARGINS | _WEIGHTS | {"log_pivot"}))
        self._capture = AttentionCapture(model, layers) if seen else None
        self.layers = self._capture.layers if self._capture else ()
        self._recurrences = {layer: Recurrence() for layer in self.layers}
        self._grams = {layer: HiddenGram() for layer in self.layers}
        self._hidden: dict[int, Tensor] = {}
        self._embeddings: Tensor | None = None
        self._early: dict[int, dict[str, Tensor]] = {}
        self._handles = []
        if "log_pivot" in self._needs:
            blocks = decoder_blocks(model)
            self._handles += [blocks[layer].register_forward_hook(self._keeper(layer)) for layer in self.layers]
        if self._density is not None:
            self._handles.append(hook_embeddings(model, self._keep_embeddings))

    def _keeper(self, layer: int):
        def keep(_module: nn.Module, _args: tuple, output) -> None:
            self._hidden[layer] = output[0] if isinstance(output, tuple) else output

        return keep

    def _keep_embeddings(self, x: Tensor) -> None:
        self._embeddings = x

    def margins(self, attention_mask: Tensor | None) -> dict[int, Tensor]:
        """Log margins of the last position, `(B, 1)` by layer, which the next `read` does not compute again."""
        self._early = self._figures(self._states(attention_mask), 1)
        return {layer: figures["log_abs_det"] for layer, figures in self._early.items()}

    def _states(self, attention_mask: Tensor | None) -> dict[int, AttentionState]:
        return {} if self._capture is None else self._capture.states(attention_mask)

    def _figures(self, states: dict[int, AttentionState], count: int) -> dict[int, dict[str, Tensor]]:
        found = {}
        for layer, state in states.items():
            (found[layer],) = self._reader(layer, state, slice(state.length - count, state.length)).values()
        return found

    @torch.no_grad()
    def read(
        self, logits: Tensor, following: Tensor, attention_mask: Tensor | None, answer: Tensor | None = None
    ) -> Quantities:
        """Quantities of the last n positions of the last forward pass.

        Args:
            logits: Logits of these positions, `(B, n, V)`.
            following: Ids of the tokens that follow, `(B, n)`; negative where unknown.
            attention_mask: 1 at real tokens, `(B, S)` up to the last position; None: all are.
            answer: True from the last token of the prompt on, where RAUQ begins, `(B, n)`; None: everywhere.
        """
        count = logits.shape[1]
        every = torch.ones_like(following, dtype=torch.bool)
        read = every if attention_mask is None else attention_mask[:, -count:].bool()
        predicted = read & (following >= 0)
        common = predictive_quantities(logits, following)
        early, self._early = self._early, {}
        wanted = self._needs & (_WEIGHTS if early else _MARGINS | _WEIGHTS)
        states = self._states(attention_mask) if wanted else {}
        layers: dict[int, dict[str, Tensor]] = {layer: {} for layer in self.layers}
        if self._needs & _MARGINS:
            layers |= early or self._figures(states, count)
        for layer, state in states.items():
            if self._needs & _WEIGHTS:
                with full_precision(state.query):
                    weight = self_weights(state, state.length - count)
                counted = predicted if answer is None else predicted & answer
                confidence, value = self._recurrences[layer](common["log_chosen"].exp().to(weight), weight, counted)
                layers[layer].update(self_weight=weight, confidence=confidence, rauq=value)
        for layer, hidden in self._hidden.items():
            pivots = self._grams[layer](hidden, _real(attention_mask, hidden))
            layers[layer]["log_pivot"] = pivots[:, -count:].to(common["entropy"])
        if self._density is not None and self._embeddings is not None:
            x = self._embeddings
            common["log_density"] = self._density(x, _real(attention_mask, x))[:, -count:]
        return Quantities(common, layers, read, predicted)

    def remove(self) -> None:
        """Removes the hooks."""
        if self._capture is not None:
            self._capture.remove()
        for handle in self._handles:
            handle.remove()
        self._hidden, self._embeddings = {}, None


def _real(attention_mask: Tensor | None, x: Tensor) -> Tensor:
    if attention_mask is None:
        return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    return attention_mask[:, -x.shape[1] :].bool()
