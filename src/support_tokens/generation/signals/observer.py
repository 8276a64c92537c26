r"""What one forward pass after another left, as quantities of its last positions: the same for a whole text at once and
for a token at a time with the KV cache."""

__all__ = ["MarginReader", "Observer"]

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from support_tokens.generation.signals.attention import Recurrence, self_weights
from support_tokens.generation.signals.density import EmbeddingDensity
from support_tokens.generation.signals.hidden import HiddenGram
from support_tokens.generation.signals.logits import predictive_quantities
from support_tokens.generation.signals.table import Quantities, Signal
from support_tokens.law import EmbeddingLaw, EmbeddingPrior
from support_tokens.margins import AttentionState, JacobianBlocks, margins_at, view_sign
from support_tokens.margins.linalg import Slogdet, full_precision, sigma_min
from support_tokens.models import AttentionCapture, decoder_blocks, hook_embeddings

_MARGINS = {"log_abs_det", "sign", "sigma_min"}
_WEIGHTS = {"self_weight", "confidence", "rauq"}
# Bytes of one chunk of matrices.
_CHUNK_BYTES = 32 * 2**20


class MarginReader:
    r"""$\log|\det J_t|$ of the last positions of states, one LU factorisation a position and no inverse.

    What all positions share, products of weights with weights, is computed when a text begins and kept for its later
    tokens: it costs more than the margin of one of them.

    Args:
        view: `noise` or `block`.

    Raises:
        ArgumentError: There is no such view.

    Example:
        >>> from support_tokens.margins import state_from_weights
        >>> x, w = torch.randn(2, 5, 4), torch.randn(1, 3, 4)
        >>> MarginReader()({0: state_from_weights(x, w, w)}, 1)[0].log_abs_det.shape
        torch.Size([2, 1])
    """

    def __init__(self, view: str = "noise") -> None:
        view_sign(view)
        self.view = view
        self._kept: dict[int, JacobianBlocks] = {}

    def blocks(self, layer: int, state: AttentionState) -> JacobianBlocks:
        """The blocks of a state, with what they share from the beginning of the text."""
        if state.key.shape[2] == state.length or layer not in self._kept:
            self._kept[layer] = JacobianBlocks(state)
            self._kept[layer].prepare()
        return self._kept[layer].of(state)

    def __call__(self, states: Mapping[int, AttentionState], count: int) -> dict[int, Slogdet]:
        """Sign and log margin of the last `count` positions, `(B, count)`, by layer."""
        found = {}
        for layer, state in states.items():
            with full_precision(state.query):
                blocks = self.blocks(layer, state)
                parts = [margins_at(blocks, rows, self.view) for rows in _rows(state, count, blocks.reduced_width)]
            found[layer] = Slogdet(*(torch.cat(part, dim=1) for part in zip(*parts, strict=True)))
        return found

    def smallest(self, layer: int, state: AttentionState, count: int) -> Tensor:
        r"""$\sigma_{\min}(J_t)$ of the last `count` positions, `(B, count)`, by singular values of D x D matrices."""
        parts = []
        with full_precision(state.query):
            blocks, sign = self.blocks(layer, state), view_sign(self.view)
            identity = torch.eye(state.width, dtype=state.query.dtype, device=state.query.device)
            for rows in _rows(state, count, state.width):
                matrix = identity + sign * blocks.dense(rows)
                # Singular values of what is no number are an error, and one text must not end the others.
                finite = matrix.isfinite().flatten(-2).all(-1)
                value = sigma_min(torch.where(finite[..., None, None], matrix, identity))
                parts.append(value.masked_fill(~finite, torch.nan))
        return torch.cat(parts, dim=1)


def _rows(state: AttentionState, count: int, side: int) -> list[slice]:
    size = max(1, _CHUNK_BYTES // (state.batch * side * side * state.query.element_size()))
    first = state.length - count
    return [slice(begin, min(begin + size, state.length)) for begin in range(first, state.length, size)]


class Observer:
    """Watches a model for one batch of texts, until it is removed; it carries what a text's later tokens need.

    Args:
        model: A causal language model of transformers, of a supported family.
        signals: What is wanted.
        layers: Indices of blocks; negative ones count from the last.
        view: `noise` or `block`.
        law: Of the embeddings, where a signal needs one.

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
        self._margins = MarginReader(view)
        self._density = EmbeddingDensity(law) if law is not None and "log_density" in self._needs else None
        # A model whose attention cannot be read has logits all the same.
        seen = bool(self._needs & (_MARGINS | _WEIGHTS | {"log_pivot"}))
        self._capture = AttentionCapture(model, layers) if seen else None
        self.layers = self._capture.layers if self._capture else ()
        self._recurrences = {layer: Recurrence() for layer in self.layers}
        self._grams = {layer: HiddenGram() for layer in self.layers}
        self._hidden: dict[int, Tensor] = {}
        self._embeddings: Tensor | None = None
        self._early: dict[int, Slogdet] | None = None
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

    def margins(self, attention_mask: Tensor | None) -> dict[int, Slogdet]:
        """Margins of the last position of the last pass, `(B, 1)` by layer; `read` does not compute them again."""
        self._early = self._margins(self._states(attention_mask), 1)
        return self._early

    def _states(self, attention_mask: Tensor | None) -> dict[int, AttentionState]:
        return {} if self._capture is None else self._capture.states(attention_mask)

    @torch.no_grad()
    def read(
        self, logits: Tensor, following: Tensor, attention_mask: Tensor | None, answer: Tensor | None = None
    ) -> Quantities:
        """Quantities of the last n positions of the last pass.

        Args:
            logits: Of these positions, `(B, n, V)`.
            following: Ids of the tokens that follow, `(B, n)`; negative where none is known.
            attention_mask: 1 at real tokens, `(B, S)` up to the last position; None: all are.
            answer: True from the last token of the prompt on, `(B, n)`: where RAUQ begins; None: everywhere.
        """
        count = logits.shape[1]
        every = torch.ones_like(following, dtype=torch.bool)
        read = every if attention_mask is None else attention_mask[:, -count:].bool()
        predicted = read & (following >= 0)
        common = predictive_quantities(logits, following)
        states = self._states(attention_mask) if self._needs & (_MARGINS | _WEIGHTS) else {}
        layers: dict[int, dict[str, Tensor]] = {layer: {} for layer in self.layers}
        if {"log_abs_det", "sign"} & self._needs:
            found = self._early if self._early is not None else self._margins(states, count)
            for layer, (sign, log_abs_det) in found.items():
                layers[layer].update(sign=sign, log_abs_det=log_abs_det)
        self._early = None
        for layer, state in states.items():
            if "sigma_min" in self._needs:
                layers[layer]["sigma_min"] = self._margins.smallest(layer, state, count)
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
        """Leaves the model as it was."""
        if self._capture is not None:
            self._capture.remove()
        for handle in self._handles:
            handle.remove()
        self._hidden, self._embeddings = {}, None


def _real(attention_mask: Tensor | None, x: Tensor) -> Tensor:
    if attention_mask is None:
        return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    return attention_mask[:, -x.shape[1] :].bool()
