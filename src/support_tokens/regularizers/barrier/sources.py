r"""What a barrier acts on: the paper's law with a coupling of its own, or the model's own attention."""

__all__ = ["AttentionSource", "PriorSource", "check_embeddings_train"]

import warnings

import torch
from torch import Tensor, nn

from support_tokens.errors import CaptureError
from support_tokens.law import EmbeddingPrior
from support_tokens.margins import AttentionState, gather_positions, moments
from support_tokens.margins.linalg import full_precision
from support_tokens.models import Decoder, trains_before
from support_tokens.regularizers.passes import Pass
from support_tokens.regularizers.watcher import ForwardWatcher


def check_embeddings_train(site: Decoder, x: Tensor | None, what: str) -> None:
    """A penalty on embeddings must move something of the model.

    Args:
        site: The model.
        x: Embeddings of a pass; None: only parameters are looked at.
        what: Names the penalty in the error.

    Raises:
        CaptureError: Nothing that shapes the embeddings is trained, or they carry no gradient.
    """
    if not trains_before(site.module, site.blocks, 0) and (x is None or not _reaches_parameter(x)):
        raise CaptureError(
            f"a parameter that shapes the embeddings must be trained for {what}, received none (LoRA freezes them), so "
            "it would move nothing of the model; act on the model's own attention (source='model'), or train the "
            "embeddings and attach after get_peft_model."
        )
    if x is not None and not x.requires_grad:
        raise CaptureError(
            f"embeddings that enter the first block must carry a gradient for {what}, received none although the model "
            "trains its own; pass input_ids, or inputs_embeds with a gradient, and checkpoint with "
            "activation_checkpointing_kwargs={'use_reentrant': False}."
        )


def _reaches_parameter(x: Tensor) -> bool:
    """Whether a gradient of x reaches a parameter, as that of prompts that are trained does."""
    waiting, seen = [x.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(getattr(node, "variable", None), nn.Parameter):
            return True
        waiting += [function for function, _ in node.next_functions]
    return False


class PriorSource(nn.Module):
    """The paper's law on the embeddings that enter the first block; its W_Q and W_K learn with the model.

    Args:
        site: The model.
        law: The law.
        at: Which embeddings: `clean`, `noisy` or `adversarial`.
    """

    view = "noise"

    def __init__(self, site: Decoder, law: EmbeddingPrior, at: str) -> None:
        super().__init__()
        self.law, self.at = law, at
        self._site = (site,)
        self._warned = False

    def states(self, forward: Pass) -> tuple[AttentionState, ...]:
        """The attention of the law on a pass.

        Raises:
            CaptureError: The penalty could move nothing of the model.
        """
        x = forward.embeddings_at(self.at)
        self._check(x)
        mask, segments = forward.padding_mask(x.shape[1]), forward.segments(x.shape[0])
        with full_precision(x):
            return (self.law.state(x, mask, segments=segments),)

    @staticmethod
    def squared_error(state: AttentionState, positions: Tensor | None = None) -> Tensor:
        r"""$|x_t - \mu_t|^2$ of a state of the law, `(B, n)`, at all positions or at `positions`; 0 at padding."""
        rows = slice(0, state.length) if positions is None else positions
        with full_precision(state.query):
            mean = moments(state, rows, covariance=False).mean[:, 0]
            return (gather_positions(state.value[:, 0], rows, 1) - mean).square().sum(-1)

    def _check(self, x: Tensor) -> None:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        if self.law.w_q.is_meta:
            raise CaptureError(
                "the law of the barrier must have data, and it is on the device 'meta'; attach the barrier after the "
                "model was dispatched, and leave fsdp_cpu_ram_efficient_loading off."
            )
        check_embeddings_train(self._site[0], x, "the barrier of the law")
        if not self._warned and not self.law.w_q.requires_grad:
            self._warned = True
            warnings.warn(
                "The law of the barrier is frozen, as get_peft_model does to what was there before, and its coupling "
                "stays as it was drawn; attach the barrier after get_peft_model, unless this is meant.",
                stacklevel=2,
            )


class AttentionSource(nn.Module):
    """The model's own attention at some layers; it has no parameter of its own.

    Args:
        site: The model.
        watcher: Sees its forward passes.
        layers: Indices of blocks; of several, positions of all count alike.
        view: `noise` or `block`.

    Raises:
        UnsupportedModelError: The attention of this model cannot be read exactly.
        ArgumentError: A layer does not exist.
    """

    def __init__(self, site: Decoder, watcher: ForwardWatcher, layers: tuple[int, ...], view: str) -> None:
        super().__init__()
        capture = watcher.capture(layers)
        self.view, self.layers = view, capture.layers
        self._site = (site,)
        self._attention = capture.architecture.attention

    def states(self, forward: Pass) -> tuple[AttentionState, ...]:
        """The attention of each layer in a pass.

        Raises:
            CaptureError: There is none, or the penalty could move nothing of the model.
        """
        if any(layer not in forward.states for layer in self.layers):
            raise CaptureError(
                "the regularizer saw no attention of the model for this loss; call the model through its forward pass "
                "in train mode, once for every loss, or remove the regularizer."
            )
        self._check()
        return tuple(forward.states[layer] for layer in self.layers)

    def _check(self) -> None:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        site, last = self._site[0], max(self.layers)
        attention = site.blocks[last].get_submodule(self._attention)
        trained = any(p.requires_grad for p in attention.parameters())
        if not trained and not trains_before(site.module, site.blocks, last):
            raise CaptureError(
                f"a parameter that shapes the attention of layer {last} must be trained, received none, so its penalty "
                "would move nothing; train its projections (LoRA on them will do), or choose a later layer."
            )
