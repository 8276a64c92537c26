"""One training run: the Trainer of transformers, set up for a plan, a corpus and an arm, in a run folder."""

__all__ = ["TrainingResult", "read_result", "train", "train_arms"]

import contextlib
import dataclasses
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save as save_safetensors
from torch import Tensor
from transformers import PrinterCallback, Trainer, TrainingArguments, set_seed
from transformers import default_data_collator as collate

from support_tokens.errors import ArgumentError, DataError, RunFolderError, TrainingError
from support_tokens.files import read_json, replace_folder, write_bytes, write_json
from support_tokens.models import (
    build_small_gpt,
    character_tokenizer,
    encode,
    quiet_transformers,
    save_trainer_checkpoint,
    torch_threads,
    unknown_rate,
)
from support_tokens.regularizers import Regularizer, RegularizerCallback, RegularizerHandle, attach, regularizer_config
from support_tokens.training.callbacks import (
    CheckpointSeal,
    MetricsWriter,
    ProgressBar,
    StopAtInterrupt,
    last_sealed_checkpoint,
)
from support_tokens.training.corpora import Corpus, Windows
from support_tokens.training.plan import TrainingPlan
from support_tokens.training.run_folder import RunFolder


@dataclass(frozen=True)
class TrainingResult:
    """A finished run.

    Args:
        folder: The run folder; `folder/model` is the model.
        arm: Name of the arm.
        steps: Optimiser steps made.
        seconds: Wall time of the training since it was last started.
        parameters: Number of parameters of the saved model.
        validation_bpc: Bits per character on the validation windows at the end.
        unknown: Share of characters unseen in training, for `validation` and `test`.
        threads: Threads of torch; the order of its sums, and so the last bits of the weights, depend on their number.
    """

    folder: Path
    arm: str
    steps: int
    seconds: float
    parameters: int
    validation_bpc: float
    unknown: Mapping[str, float]
    threads: int

    @property
    def sentence(self) -> str:
        """What came out, in words."""
        return (
            f"{self.arm}: {self.parameters:,} parameters, {self.steps} steps in {self.seconds:.0f} s, "
            f"{self.validation_bpc:.3f} bits per character on validation text."
        )


def train(
    plan: TrainingPlan,
    corpus: Corpus,
    arm: Regularizer,
    folder: str | Path,
    *,
    resume: bool = False,
    force: bool = False,
    progress: bool = True,
    tensorboard: bool = False,
) -> TrainingResult:
    """Trains SmallGPT on a corpus under one arm and keeps everything in a run folder.

    Initial weights, order of data and noise follow from `plan.seed` alone: two arms under one plan start from the same
    weights and see the same batches, and one arm run twice on one machine ends in the same bits.

    Args:
        plan: Size, schedule and seed.
        corpus: Text; the alphabet is that of its training part.
        arm: What is done beyond cross-entropy.
        folder: Run folder to make.
        resume: Go on from the last complete checkpoint in `folder`, or from the start if there is none; a finished
            run is returned as it is.
        force: Replace an earlier run in `folder`.
        progress: Draw a bar on stderr.
        tensorboard: Also write `tensorboard/`.

    Returns:
        The result; the model is in `folder/model`.

    Raises:
        DataError: A part of the corpus is too small for the plan.
        RunFolderError: The folder exists, is no run folder, or cannot be written.
        ArgumentError: `resume` with another plan, corpus or arm than the folder was made with.
        TrainingError: Loss or gradient is not finite; the last complete checkpoint stays in `folder/checkpoints`.
        KeyboardInterrupt: At Ctrl-C, after a checkpoint; `resume` goes on from there.
    """
    corpus.require(plan.context)
    tokenizer = character_tokenizer(corpus.train)
    ids = {split: encode(tokenizer, getattr(corpus, split)) for split in ("train", "validation", "test")}
    windows = Windows(ids["train"], plan.context)
    if len(windows) < plan.batch_size * plan.accumulation:
        raise DataError(
            f"the train part of corpus '{corpus.name}' gives {len(windows)} windows of {plan.context} characters "
            f"where one step needs {plan.batch_size * plan.accumulation}; pass a longer text, or a smaller batch."
        )
    path, config = (
        Path(folder),
        {"plan": dataclasses.asdict(plan), "corpus": corpus.identity(), "arm": regularizer_config(arm)},
    )
    if resume:
        _check_same(path, config)
        if (path / "result.json").exists():
            return read_result(path)

    set_seed(plan.seed)
    model = build_small_gpt(
        tokenizer,
        layers=plan.layers,
        heads=plan.heads,
        width=plan.width,
        context=plan.context,
        dropout=plan.dropout,
    )
    parameters = model.num_parameters()
    handle = attach(model, arm, seed=plan.seed)
    follower = RegularizerCallback(handle)
    run = RunFolder(path)
    with quiet_transformers():
        arguments = _arguments(plan, run, tensorboard=tensorboard)
    if not resume:
        # Now that nothing about plan or arm can be wrong: a mistake neither leaves a folder nor costs an earlier run.
        run = RunFolder.create(path, force=force)
        write_json(run.path / "config.json", config)
    stop = StopAtInterrupt()
    bar = ProgressBar(arm.name) if progress else None
    with torch_threads(plan.threads), quiet_transformers(), _tensorboard_folder(run.path / "tensorboard"):
        with contextlib.nullcontext() if resume else run.undone_on_error():
            trainer = _Trainer(
                model=model,
                args=arguments,
                train_dataset=windows,
                eval_dataset=Windows(ids["validation"], plan.context, limit=plan.evaluate_windows),
                processing_class=tokenizer,
                data_collator=collate,
                callbacks=[follower, MetricsWriter(run), stop, *([bar] if bar else []), CheckpointSeal()],
            )
        trainer.remove_callback(PrinterCallback)
        follower.follow(trainer)  # ahead of TensorBoard, which would otherwise write a row before the figures are there
        start = time.monotonic()
        with stop, bar or contextlib.nullcontext(), _writing(run.path):
            _run(trainer, run, resume=resume)
            if stop.interrupted and trainer.state.global_step < plan.steps:
                raise KeyboardInterrupt(
                    f"stopped at step {trainer.state.global_step} of {plan.steps}; --resume goes on from there."
                )
            validation = _last_validation_loss(trainer) / math.log(2)
        seconds = time.monotonic() - start
        with _writing(run.path):
            _save_terms(run, handle)
            handle.remove()
            with replace_folder(run.model) as target:
                model.save_pretrained(target)
                tokenizer.save_pretrained(target)
    result = TrainingResult(
        folder=run.path,
        arm=arm.name,
        steps=trainer.state.global_step,
        seconds=seconds,
        parameters=parameters,
        validation_bpc=validation,
        unknown={split: unknown_rate(tokenizer, ids[split]) for split in ("validation", "test")},
        threads=plan.threads or torch.get_num_threads(),
    )
    write_json(run.path / "result.json", {**dataclasses.asdict(result), "folder": "."})
    shutil.rmtree(run.checkpoints, ignore_errors=True)
    return result


def train_arms(
    plan: TrainingPlan,
    corpus: Corpus,
    arms: Mapping[str, Regularizer],
    folder: str | Path,
    *,
    resume: bool = False,
    force: bool = False,
    progress: bool = True,
    tensorboard: bool = False,
) -> dict[str, TrainingResult]:
    """Trains several arms under one plan, each in a folder of its label, one after the other.

    Args:
        plan: Shared by all arms.
        corpus: Shared by all arms.
        arms: Regularizer by label.
        folder: Holds one run folder a label.
        resume: As in `train`; arms that are finished are not trained again.
        force: As in `train`, for each arm.
        progress: As in `train`.
        tensorboard: As in `train`.

    Returns:
        Result by label.

    Raises:
        SupportTokensError: As in `train`; arms that were finished before stay.
    """
    folder = Path(folder)
    if not resume and not force:
        # Known before the first arm is trained, not after.
        for label in arms:
            if (folder / label).is_dir() and any((folder / label).iterdir()):
                raise RunFolderError(
                    f"folder '{folder / label}' exists and is not empty; choose another folder, "
                    "or pass --force to replace it."
                )
    options = {"force": force, "progress": progress, "tensorboard": tensorboard}
    return {
        label: train(
            plan, corpus, arm, folder / label, resume=resume and (folder / label / "config.json").exists(), **options
        )
        for label, arm in arms.items()
    }


def read_result(folder: str | Path) -> TrainingResult:
    """Reads the result of a finished run.

    Args:
        folder: The run folder.

    Raises:
        RunFolderError: The run is not finished, or `result.json` cannot be read.
    """
    folder = Path(folder)
    payload = read_json(folder / "result.json")
    names = {field.name for field in dataclasses.fields(TrainingResult)}
    try:
        return TrainingResult(**{**{key: payload[key] for key in names}, "folder": folder})
    except KeyError as error:
        raise RunFolderError(f"'{folder / 'result.json'}' lacks {error}; train again.") from error


class _Trainer(Trainer):
    """The Trainer, which stops before an update whose loss or gradient is not finite: the weights stay good."""

    def training_step(self, model, inputs, num_items_in_batch=None) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        step = self.state.global_step + 1
        if not torch.isfinite(loss):
            raise TrainingError(f"the loss is {loss.item()} at step {step}")
        # With float16 a scaler looks for overflow itself and leaves such a step out.
        if self.accelerator.sync_gradients and self.accelerator.scaler is None:
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            if not torch.isfinite(norm):
                raise TrainingError(f"the norm of the gradient is {norm.item()} at step {step}")
        return loss


def _save_terms(run: RunFolder, handle: RegularizerHandle) -> None:
    """What regularizers learned (the law of a barrier, say), beside the model."""
    learned = {name: value.cpu().contiguous() for name, value in handle.state_dict().items()}
    if handle.parameters():
        write_bytes(run.path / "regularizer.safetensors", save_safetensors(learned))


def _run(trainer: _Trainer, run: RunFolder, *, resume: bool) -> None:
    sealed = last_sealed_checkpoint(run) if resume else None
    run.keep_metrics(sealed[1] if sealed else 0)
    try:
        trainer.train(resume_from_checkpoint=str(sealed[0]) if sealed else None)
    except TrainingError as error:
        if trainer.state.global_step and not (run.checkpoints / f"checkpoint-{trainer.state.global_step}").exists():
            # The step was not made, so the weights in memory are those of the last good one; Trainer has no public way
            # to write a checkpoint outside of its loop.
            save_trainer_checkpoint(trainer)
            trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
        sealed = last_sealed_checkpoint(run)
        kept = f"the last good checkpoint is '{sealed[0]}'" if sealed else "no step had been made yet"
        raise TrainingError(
            f"training stops: {str(error).rstrip('.')}; {kept}. Lower the learning rate or the weight of the penalty."
        ) from error


def _last_validation_loss(trainer: Trainer) -> float:
    for row in reversed(trainer.state.log_history):
        if row["step"] == trainer.state.global_step and "eval_loss" in row:
            return row["eval_loss"]
    return trainer.evaluate()["eval_loss"]


def _check_same(path: Path, config: Mapping[str, Any]) -> None:
    stored = RunFolder.open(path).config()
    for part, wanted in config.items():
        found = stored.get(part)
        if found != wanted:
            keys = sorted(key for key in wanted if not isinstance(found, dict) or found.get(key) != wanted[key])
            raise ArgumentError(
                f"the run in '{path}' was begun with another {part} ({', '.join(keys)} differ); "
                "resume with the same, or train in another folder."
            )


def _arguments(plan: TrainingPlan, run: RunFolder, *, tensorboard: bool) -> TrainingArguments:
    on_cpu = plan.device == "cpu" or not torch.accelerator.is_available()
    try:
        return TrainingArguments(
            output_dir=str(run.checkpoints),
            max_steps=plan.steps,
            per_device_train_batch_size=plan.batch_size,
            per_device_eval_batch_size=plan.batch_size,
            gradient_accumulation_steps=plan.accumulation,
            learning_rate=plan.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=plan.warmup,
            weight_decay=plan.weight_decay,
            max_grad_norm=plan.clip,
            seed=plan.seed,
            data_seed=plan.seed,
            bf16=plan.precision == "bfloat16",
            fp16=plan.precision == "float16",
            use_cpu=on_cpu,
            dataloader_pin_memory=torch.cuda.is_available() and not on_cpu,
            logging_steps=plan.log_every,
            logging_nan_inf_filter=False,
            eval_strategy="steps",
            eval_steps=plan.evaluate_every,
            prediction_loss_only=True,
            save_steps=plan.save_every,
            save_total_limit=2,
            disable_tqdm=True,
            report_to=["tensorboard"] if tensorboard else "none",
        )
    except ValueError as error:
        raise ArgumentError(
            f"precision {plan.precision} cannot be had on this machine ({error}); use float32."
        ) from error


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Names the folder in what a full disk or a lost permission raises, which depends on the library that met it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise RunFolderError(
            f"run folder '{folder}' cannot be written ({error}); free space or choose another folder, then --resume."
        ) from error
    except RuntimeError as error:
        # torch's writer of checkpoints raises nothing more precise; its messages name its own source.
        if not any(name in str(error) for name in ("inline_container", "PytorchStreamWriter", "iostream")):
            raise
        raise RunFolderError(
            f"run folder '{folder}' cannot be written (a checkpoint was cut short); free space, then --resume."
        ) from error


@contextlib.contextmanager
def _tensorboard_folder(folder: Path) -> Iterator[None]:
    """The Trainer takes the folder of TensorBoard from the environment and from nowhere else."""
    key = "TENSORBOARD_LOGGING_DIR"
    before = os.environ.get(key)
    os.environ[key] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[key]
        else:
            os.environ[key] = before
