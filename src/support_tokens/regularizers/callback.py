r"""Regularizers beside the Trainer of transformers: their figures in the logs, what they learned in the checkpoints,
their penalties in losses that a trainer computes itself."""

__all__ = ["RegularizerCallback"]

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from support_tokens.errors import ArgumentError, CaptureError, RunFolderError
from support_tokens.files import write_bytes
from support_tokens.regularizers.figures import averaged
from support_tokens.regularizers.handle import RegularizerHandle

FILE = "support_tokens.safetensors"
"""What the terms learned, beside the model in a checkpoint."""


class RegularizerCallback(TrainerCallback):
    """Writes `stability/...` into every log of a Trainer, and what the terms learned into every checkpoint.

    Passed as `callbacks=[RegularizerCallback(handle)]` it does this much. `follow(trainer)` instead does two things
    more. Integrations (TensorBoard) are called before the callbacks a user passes, so figures reach them only if this
    one stands first. And where a trainer computes the loss from logits or hidden states (TRL's SFTTrainer and
    DPOTrainer, label smoothing, `compute_loss_func`), the penalties join there.

    Logged figures are those of `handle.last` over all processes, for the whole optimiser step.

    Args:
        handle: The attached regularizers.

    Raises:
        CaptureError: In a run, after a step whose loss did not hold the penalties.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from support_tokens import attach, RegularizerCallback
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=8))
        >>> callback = RegularizerCallback(attach(model, "spread"))
    """

    def __init__(self, handle: RegularizerHandle) -> None:
        self.handle = handle
        self._counted = 0

    def follow(self, trainer: Trainer) -> "RegularizerCallback":
        """Stand first among the callbacks of `trainer`, and add the penalties to losses that it computes itself."""
        callbacks = trainer.callback_handler.callbacks
        callbacks[:] = [self, *(c for c in callbacks if getattr(c, "handle", None) is not self.handle)]
        if not isinstance(trainer.compute_loss, _RegularizedLoss) or trainer.compute_loss.handle is not self.handle:
            trainer.compute_loss = _RegularizedLoss(trainer, self.handle)  # type: ignore[method-assign]
        return self

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs) -> None:
        """Takes up the terms of the checkpoint that training resumes from.

        Raises:
            RunFolderError: The checkpoint holds no terms, or others.
            ArgumentError: The optimizer does not train the terms' parameters.
        """
        if not self.handle.attached:
            return
        self._check_optimizer(optimizer)
        self._begin_step(state)
        if state.global_step == 0:
            return
        explicit = args.resume_from_checkpoint
        folders = [Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"]
        if isinstance(explicit, str) and Path(explicit).is_dir():
            folders.insert(0, Path(explicit))
        found = next((folder / FILE for folder in folders if (folder / FILE).is_file()), None)
        if found is None:
            raise RunFolderError(
                f"{folders[0]} must hold {FILE}, the regularizers at step {state.global_step}, and does not; "
                "resume from a checkpoint that was saved with the callback, or start anew."
            )
        try:
            self.handle.load_state_dict(load_file(found))
            self._begin_step(state)
        except (SafetensorError, ArgumentError, KeyError) as error:
            raise RunFolderError(
                f"{found} must hold the state of these regularizers, and does not: {error} Resume from another "
                "checkpoint."
            ) from error

    def _check_optimizer(self, optimizer) -> None:
        # Where parameters are sharded or flattened, the optimizer has others in their place.
        groups = getattr(optimizer, "param_groups", None)
        if groups is None:
            return
        trained = {id(parameter) for group in groups for parameter in group["params"]}
        missing = [p for p in self.handle.parameters() if id(p) not in trained and not hasattr(p, "full_tensor")]
        if missing:
            raise ArgumentError(
                f"the optimizer must train the parameters of the regularizers, received one that lacks "
                f"{len(missing)} of them; make it, or the Trainer, after attaching."
            )

    def on_substep_end(self, args, state, control, **kwargs) -> None:
        """After a micro-batch; see `on_step_end`."""
        self.on_step_end(args, state, control, **kwargs)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        """Schedules count optimiser steps, not micro-batches.

        Raises:
            CaptureError: The step's losses did not hold the penalty.
        """
        if self.handle.attached and self.handle.counted == self._counted:
            raise CaptureError(
                f"step {state.global_step} was made without the penalty of the regularizer, as its loss was computed "
                "outside of the model; call RegularizerCallback(handle).follow(trainer), or handle.remove()."
            )
        self._begin_step(state)

    def _begin_step(self, state) -> None:
        self.handle.step, self._counted = state.global_step, self.handle.counted

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        """Adds the figures of the last training step, of all processes, to a training log."""
        if logs is None or "loss" not in logs or not self.handle.attached:
            return
        summed = args.average_tokens_across_devices
        figures = {f"stability/{name}": value for name, value in averaged(self.handle.last, summed=summed).items()}
        logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)

    def on_save(self, args, state, control, **kwargs) -> None:
        """Saves the terms beside the checkpoint's model."""
        if not self.handle.attached:
            return
        # In every process: where parameters are sharded, all of them gather.
        tensors = {name: value.cpu().contiguous() for name, value in self.handle.state_dict().items()}
        if state.is_world_process_zero:
            folder = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)
            write_bytes(folder / FILE, save(tensors))


class _RegularizedLoss:
    """`Trainer.compute_loss` of one trainer, plus the penalties where the model has not counted them."""

    def __init__(self, trainer: Trainer, handle: RegularizerHandle) -> None:
        self.trainer, self.handle, self.inner = trainer, handle, trainer.compute_loss

    def __call__(
        self, model: nn.Module, inputs: dict, return_outputs: bool = False, num_items_in_batch=None, **kwargs
    ) -> Tensor | tuple:
        labels = inputs.get("shift_labels")
        if labels is None and (labels := inputs.get("labels")) is not None:
            labels = labels[:, 1:]
        result = self.inner(
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch, **kwargs
        )
        if not model.training or not self.handle.waiting:
            return result
        loss, rest = (result[0], result[1:]) if isinstance(result, tuple) else (result, ())
        trainer = self.trainer
        scaled = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
        items = num_items_in_batch if scaled else None
        factor = 1
        if items is not None and trainer.args.average_tokens_across_devices:
            # The items are those of all processes, whose gradients are averaged: the Trainer takes the losses times
            # their number, and so must be the penalty.
            factor = trainer.accelerator.num_processes // trainer.get_tp_size()
        penalty = self.handle.weighted_penalty(labels, items, cross_entropy=loss / factor)
        total = loss + factor * penalty.to(loss.device)
        return (total, *rest) if rest else total
