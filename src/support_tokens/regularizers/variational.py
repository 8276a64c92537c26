"""An arm that samples the latent noise of the law instead of taking its most likely value: variational training."""

__all__ = ["Posterior", "Variational"]

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor, nn
from transformers import TrainerCallback

from support_tokens.errors import RunFolderError
from support_tokens.files import write_bytes
from support_tokens.law import EmbeddingPrior
from support_tokens.margins import state_margins
from support_tokens.margins.linalg import full_precision
from support_tokens.models import hook_embeddings
from support_tokens.regularizers.barrier.penalties import sample_positions
from support_tokens.regularizers.barrier.sources import PriorSource
from support_tokens.regularizers.base import Attachment, option, require

_FILE = "variational.safetensors"
_MODULE = "support_tokens_variational"


@dataclass(frozen=True)
class Variational:
    r"""Cross-entropy under embeddings drawn from a learned posterior, and its divergence from the law, one sample a
    step.

    $$ L = \mathbb{E}_q\, CE(z) + \lambda\, \mathrm{mean}_t\, \mathbb{E}_q\Big[ \frac{|y_t - \mu_t(y)|^2}{2 \sigma^2}
       - \log|\det J_t(y)| - D \log \frac{s}{\sigma} - \frac D2 \Big], \qquad z_t = u\, y_t, \quad
       y_t \sim q = N(x_t / u,\ s^2 I), $$

    with $u$ the RMS of the embeddings: $\lambda$ times $KL(q \| p)$ a token, the negative evidence bound at $\lambda =
    1$, with the law on embeddings of unit RMS as prior. Per nat, $\lambda$ weighs $\log|\det J_t|$ as that of `Barrier`
    does. $W_Q, W_K$ and s learn with the model; the scale of the embeddings changes nothing.

    What holds s: $-D \log s$ from below, the squared error from above, which alone would bring it to about $\sigma$;
    cross-entropy brings it lower. Where $\lambda D$ is large beside that, s comes near $\sigma$ and little of the text
    passes: the collapse known of variational autoencoders. Watch `variational/scale` in the log.

    Args:
        weight: $\lambda$, per nat.
        scale: s at the start.
        sigma: $\sigma$ of the law in units of the embeddings' RMS, which stays.
        positions: Positions of each sequence whose determinant counts in a step, drawn anew; 0: all.
    """

    name: ClassVar[str] = "variational"
    summary: ClassVar[str] = "cross-entropy under a learned posterior of the law's latent noise"

    weight: float = option(0.001, "weight of the divergence between posterior and law")
    scale: float = option(0.2, "noise of the posterior at the start, in units of the embeddings' RMS", least=1e-6)
    sigma: float = option(1.0, "noise of the law, in units of the embeddings' RMS", least=1e-6)
    positions: int = option(16, "positions of a sequence that count in a step; 0: all")

    def __post_init__(self):
        require(self)

    def attach(self, model: nn.Module, *, seed: int) -> Attachment:
        """Registers law and posterior in the model, and draws its embeddings in train mode; eval mode is untouched."""
        table = model.get_input_embeddings().weight  # type: ignore[operator,union-attr]
        generator = torch.Generator().manual_seed(seed)
        posterior = Posterior(table.shape[-1], self.scale, self.sigma, generator).to(table.device)
        model.add_module(_MODULE, posterior)
        drawn: list[Tensor] = []

        def draw(x: Tensor) -> Tensor | None:
            if not model.training:
                return None
            size, noise = x.square().mean().sqrt(), posterior.scale * torch.randn_like(x)
            if torch.is_grad_enabled():
                drawn[:] = [x / size + noise]
            # As in `EmbeddingNoise`, no gradient asks the model to resize its embeddings.
            return x + size.detach() * noise

        def penalty(_model: nn.Module, inputs: Mapping[str, Tensor], _outputs: Any) -> Tensor:
            y = drawn.pop()
            mask = inputs.get("attention_mask")
            valid = torch.ones(y.shape[:2], dtype=torch.bool, device=y.device) if mask is None else mask.bool()
            positions = sample_positions(valid, self.positions) if self.positions else None
            counted = valid if positions is None else valid.gather(1, positions)
            return self.weight * posterior.divergence(y, valid, positions)[counted].mean()

        handle = hook_embeddings(model, draw)

        def remove() -> None:
            handle.remove()
            delattr(model, _MODULE)

        return Attachment(remove, (_Keeper(posterior),), posterior.save, penalty)


class Posterior(nn.Module):
    r"""The law on embeddings of unit RMS and the scale of the noise around them; it never enters the state dict of a
    model.

    Args:
        width: D.
        scale: s at the start.
        sigma: $\sigma$ of the law.
        generator: Draws the law's weights.
    """

    def __init__(self, width: int, scale: float, sigma: float, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.law = EmbeddingPrior(width, min(width, 32), sigma, generator=generator)
        # Learned, sigma would follow s upwards, and nothing but cross-entropy would hold the two.
        self.law.log_noise_scale.requires_grad_(False)
        self.start = scale
        # The logarithm of s over its start, so that the optimiser's weight decay pulls it to where it began.
        self.growth = nn.Parameter(torch.zeros(()))
        self.register_load_state_dict_post_hook(_expect_no_keys)

    @property
    def scale(self) -> Tensor:
        """s, in units of the embeddings' RMS."""
        return self.start * self.growth.exp()

    def divergence(self, y: Tensor, valid: Tensor, positions: Tensor | None = None) -> Tensor:
        r"""$-\log p(y_t) - H(q_t)$ in nats, whose mean over draws is $KL(q \| p)$ of a token, `(B, n)`.

        Args:
            y: A draw, `(B, T, D)`, in units of the embeddings' RMS.
            valid: `(B, T)`, False at padding.
            positions: `(B, n)`; None: all.
        """
        with full_precision(y):
            state = self.law.state(y, valid)
            error = PriorSource.squared_error(state, positions) / (2 * self.law.noise_scale**2)
            log_abs_det = state_margins(state, positions=positions).log_abs_det
            width = y.shape[-1]
            return error - log_abs_det - width * (self.scale.log() - self.law.log_noise_scale) - 0.5 * width

    def tensors(self) -> dict[str, Tensor]:
        """What was learned, by name."""
        return {name: value.detach().cpu().contiguous() for name, value in self.named_parameters()}

    def save(self, folder: Path) -> None:
        """Writes `variational.safetensors`."""
        write_bytes(folder / _FILE, safetensors.save(self.tensors()))

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Takes up what `save` wrote.

        Raises:
            RunFolderError: The file is missing, or of another law.
        """
        try:
            stored = safetensors.load_file(folder / _FILE)
            for name, value in self.named_parameters():
                value.copy_(stored[name])
        except (OSError, SafetensorError, KeyError, RuntimeError) as error:
            raise RunFolderError(
                f"'{folder}' must hold {_FILE}, the posterior of this run, and does not ({error}); start the run anew."
            ) from error

    def state_dict(self, *args, destination=None, prefix: str = "", keep_vars: bool = False) -> dict:  # type: ignore[override]
        """Nothing: a saved checkpoint must load in stock transformers."""
        return {} if destination is None else destination


class _Keeper(TrainerCallback):
    """Keeps the posterior in the checkpoints and its scale in the log."""

    def __init__(self, posterior: Posterior) -> None:
        self.posterior = posterior

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        if state.global_step:
            self.posterior.load(Path(str(args.output_dir)) / f"checkpoint-{state.global_step}")

    def on_save(self, args, state, control, **kwargs) -> None:
        self.posterior.save(Path(str(args.output_dir)) / f"checkpoint-{state.global_step}")

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if logs is not None and "loss" in logs:
            logs["variational/scale"] = float(self.posterior.scale.detach())


def _expect_no_keys(_module: nn.Module, incompatible) -> None:
    incompatible.missing_keys[:] = [key for key in incompatible.missing_keys if f"{_MODULE}." not in key]
