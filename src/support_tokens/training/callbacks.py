"""What the Trainer of transformers calls during a run: progress, metrics, sealed checkpoints, and a stop at Ctrl-C."""

__all__ = ["CheckpointSeal", "MetricsWriter", "ProgressBar", "StopAtInterrupt", "last_sealed_checkpoint"]

import math
import signal
import threading
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import TrainerCallback

from support_tokens.errors import TrainingError
from support_tokens.files import read_json, write_json
from support_tokens.training.run_folder import RunFolder

SEAL = "complete.json"


class MetricsWriter(TrainerCallback):
    """Writes each log of the Trainer as one row of `metrics.jsonl`, without timings: equal runs have equal files.

    Args:
        folder: The run.
    """

    def __init__(self, folder: RunFolder):
        self.folder = folder

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Adds the row; the validation loss, in nats, is also given in bits per character."""
        timings = ("runtime", "per_second", "flos", "train_loss")
        row = {key: value for key, value in (logs or {}).items() if not key.endswith(timings)}
        if row.keys() <= {"epoch"}:
            return
        for key, value in row.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise TrainingError(f"{key} is {value} at step {state.global_step}, so training stops.")
        if "eval_loss" in row:
            row["eval_bpc"] = row["eval_loss"] / math.log(2)
        self.folder.append_metrics({"step": state.global_step, **row})


class CheckpointSeal(TrainerCallback):
    """Marks a checkpoint as complete after everything else wrote into it: a killed run leaves the last one unmarked.

    It stands last in the list of callbacks.
    """

    def on_save(self, args, state, control, **kwargs):
        """Writes the mark."""
        write_json(Path(str(args.output_dir)) / f"checkpoint-{state.global_step}" / SEAL, {"step": state.global_step})


def last_sealed_checkpoint(folder: RunFolder) -> tuple[Path, int] | None:
    """The newest checkpoint that was written to its end, and its step; None if there is none.

    Args:
        folder: The run.

    Raises:
        RunFolderError: The mark of a checkpoint cannot be read.
    """
    sealed = {read_json(seal)["step"]: seal.parent for seal in folder.checkpoints.glob(f"checkpoint-*/{SEAL}")}
    return (sealed[max(sealed)], max(sealed)) if sealed else None


class StopAtInterrupt(TrainerCallback):
    """Turns the first Ctrl-C into a checkpoint at the end of the step, and then the end of training.

    A second one interrupts at once. The handler stands only while the context manager is open.
    """

    def __init__(self):
        self.interrupted = False
        self._previous = None

    def __enter__(self) -> "StopAtInterrupt":
        # Python delivers signals to the main thread only; elsewhere an interrupt is the caller's to handle.
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *exception) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True

    def on_step_end(self, args, state, control, **kwargs):
        """Asks for a checkpoint and the end."""
        if self.interrupted:
            control.should_save = True
            control.should_training_stop = True


class ProgressBar(TrainerCallback):
    """One bar on stderr for one run: its label, steps, last loss and the time that is left.

    Args:
        label: What the bar is called.
        console: Where it is drawn; None draws on stderr.
    """

    def __init__(self, label: str, console: Console | None = None):
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console or Console(stderr=True),
        )
        self.task = self.progress.add_task(label, start=False, loss="")

    def __enter__(self) -> "ProgressBar":
        self.progress.start()
        return self

    def __exit__(self, *exception) -> None:
        self.progress.stop()

    def on_train_begin(self, args, state, control, **kwargs):
        """Starts the clock."""
        self.progress.update(self.task, total=state.max_steps, completed=state.global_step)
        self.progress.start_task(self.task)

    def on_step_end(self, args, state, control, **kwargs):
        """Moves the bar."""
        self.progress.update(self.task, completed=state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Shows the last training loss, in nats."""
        if logs and "loss" in logs:
            self.progress.update(self.task, loss=f"loss {logs['loss']:.3f}")
