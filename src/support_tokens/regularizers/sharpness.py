"""Sharpness-aware minimisation as a term of the loss."""

__all__ = ["SAM"]

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from support_tokens.errors import CaptureError
from support_tokens.models import Decoder
from support_tokens.regularizers.base import Regularizer, Term
from support_tokens.regularizers.options import option
from support_tokens.regularizers.passes import Pass
from support_tokens.regularizers.watcher import ForwardWatcher


@dataclass(frozen=True)
class SAM(Regularizer):
    r"""Sharpness-aware minimisation: the gradient at $\theta + \rho\, g / \|g\|$ in place of the one at $\theta$,
    $L = CE + w\, [CE(\theta + \rho\, g / \|g\|) - CE(\theta)]$ with $g = \nabla_\theta CE$ over all trained parameters.

    The gradient $g$ is that of the micro-batch at hand on its own process (m-sharpness), so that it depends on how a
    batch is split.

    Args:
        weight: $w$; 1 is SAM, less is a mixture.
        radius: $\rho$.

    References:
        Foret et al. 2021 (arXiv:2010.01412).
    """

    name: ClassVar[str] = "sam"
    kind: ClassVar = "rival"
    summary: ClassVar[str] = "sharpness-aware minimisation"

    weight: float = option(1.0, "part of the loss that is sharpness-aware", most=1.0)
    radius: float = option(0.05, "rho, the norm of the change of the weights")

    def bind(self, site: Decoder, watcher: ForwardWatcher, seed: int) -> Term:
        """See `Regularizer.bind`."""
        return _SAMTerm(self, site)


class _SAMTerm(Term):
    runs_again = replaces_loss = True

    def __init__(self, sam: SAM, site: Decoder) -> None:
        super().__init__(sam.name, sam.weight)
        self.radius = sam.radius
        self._site = (site,)

    @torch.compiler.disable
    def penalty(self, forward: Pass) -> Tensor:
        """Cross-entropy at the changed weights, less that at the weights themselves.

        Raises:
            CaptureError: Parameters are sharded, and no process has all of them; or blocks are checkpointed, and would
                run again at other weights.
        """
        if any(getattr(module, "gradient_checkpointing", False) for module in self._site[0].causal_model.modules()):
            raise CaptureError(
                "gradient checkpointing must be off for SAM, whose second pass would be repeated at the weights of the "
                "first, received a model with it on; switch it off, or leave SAM out."
            )
        parameters = {n: p for n, p in self._site[0].causal_model.named_parameters() if p.requires_grad}
        if any(hasattr(p, "full_tensor") for p in parameters.values()):
            raise CaptureError(
                "parameters must be whole for SAM, received parameters that FSDP shards; train with DDP, or "
                "leave SAM out."
            )
        loss = forward.loss_of(forward.logits) if forward.cross_entropy is None else forward.cross_entropy
        slopes = torch.autograd.grad(
            loss, list(parameters.values()), retain_graph=not (forward.spared and forward.alone), allow_unused=True
        )
        norm = torch.stack([g.float().norm() for g in slopes if g is not None]).norm()
        scale = self.radius / norm.clamp_min(torch.finfo(norm.dtype).tiny)
        changed = {
            name: p if g is None else p + (scale * g).to(p.dtype)
            for (name, p), g in zip(parameters.items(), slopes, strict=True)
        }
        return forward.loss_of(forward.rerun(parameters=changed).logits) - forward.baseline()
