r"""The barrier beside the Trainer of transformers: its figures in the logs, its law in the checkpoints."""

from pathlib import Path

from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainerCallback

from support_tokens.attach import BarrierHandle
from support_tokens.errors import RunFolderError

__all__ = ["BarrierCallback"]

_FILE = "support_tokens.safetensors"


class BarrierCallback(TrainerCallback):
    """Writes `stability/...` into every log of a Trainer, and the law's weights into every checkpoint.

    Reporting integrations (TensorBoard) are called before the callbacks a user passes, so the figures reach them only
    if this
    one stands first: `follow(trainer)` puts it there.

    Args:
        handle: The attached barrier.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from support_tokens import attach_barrier
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=8))
        >>> callback = BarrierCallback(attach_barrier(model))
    """

    def __init__(self, handle: BarrierHandle) -> None:
        self.handle = handle

    def follow(self, trainer: Trainer) -> "BarrierCallback":
        """Stand first among the callbacks of `trainer`."""
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        """Takes up the law of the checkpoint that training resumes from.

        Raises:
            RunFolderError: The checkpoint holds no law.
        """
        if state.global_step == 0:
            return
        explicit = args.resume_from_checkpoint
        folders = [Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"]
        if isinstance(explicit, str) and Path(explicit).is_dir():
            folders.insert(0, Path(explicit))
        found = next((folder / _FILE for folder in folders if (folder / _FILE).is_file()), None)
        if found is None:
            raise RunFolderError(
                f"{folders[0]} must hold {_FILE}, the law of the barrier at step {state.global_step}, and does not; "
                f"resume from a "
                "checkpoint that was saved with the barrier's callback, or start anew."
            )
        self.handle.load_state_dict(load_file(found))

    def on_step_end(self, args, state, control, **kwargs) -> None:
        """Schedules count optimiser steps, not micro-batches."""
        self.handle.step = state.global_step

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        """Adds the figures of the last training step to a training log."""
        if logs is None or "loss" not in logs:
            return
        figures = {f"stability/{name}": value for name, value in self.handle.last.items()}
        weight = self.handle.weight
        figures["stability/weight"] = float(weight(self.handle.step) if callable(weight) else weight)
        logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)

    def on_save(self, args, state, control, **kwargs) -> None:
        """Saves the law beside the checkpoint's model."""
        if state.is_world_process_zero:
            folder = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)
            part = folder / f".{_FILE}.part"
            save_file(self.handle.state_dict(), part)
            part.replace(folder / _FILE)
