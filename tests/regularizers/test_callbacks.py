"""The barrier beside the Trainer: figures in logs and TensorBoard, resumption bit for bit, losses of its own."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from barrier_models import VOCABULARY, attached, batch, language_model
from support_tokens import (
    ArgumentError,
    CaptureError,
    MarginController,
    RegularizerCallback,
    RunFolderError,
    WarmupSchedule,
)
from support_tokens.regularizers.callback import FILE

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
FIGURES = ("ce", "penalty", "log_margin_mean", "log_margin_min", "negative_fraction", "weight")


class Rows(torch.utils.data.Dataset):
    """Thirteen rows, some with a prompt without labels, so that micro-batches are ragged in items and in size."""

    def __init__(self, count: int = 13) -> None:
        data = batch(count, 6, padding="right")
        data["labels"][::3, :2] = -100
        self.rows = [{name: tensor[n] for name, tensor in data.items()} for n in range(count)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, n: int) -> dict:
        return self.rows[n]


def arguments(folder: Path, **changes) -> TrainingArguments:
    chosen = {
        "output_dir": str(folder),
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.05,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**{**chosen, **changes})


def trainer(folder: Path, source: str = "prior", weight=0.3, barrier: dict | None = None, **changes):
    model = language_model(dtype=torch.float32)
    handle = attached(model, source, weight, **(barrier or {}))
    made = Trainer(model=model, args=arguments(folder, **changes), train_dataset=Rows(), eval_dataset=Rows())
    return made, handle


@pytest.mark.parametrize("source", ["prior", "model"])
def test_figures_reach_logs_and_tensorboard(tmp_path: Path, source: str, monkeypatch) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    made, handle = trainer(tmp_path, source, report_to=["tensorboard"])
    RegularizerCallback(handle).follow(made)
    made.train()
    logs = [row for row in made.state.log_history if "loss" in row]
    assert len(logs) == 4
    for row in logs:
        assert {f"stability/{name}" for name in FIGURES} <= row.keys()
        whole = row["stability/ce"] + 0.3 * row["stability/penalty"]
        assert row["loss"] == pytest.approx(whole, abs=2e-4)
    assert {
        k.removeprefix("stability/"): v for k, v in logs[-1].items() if k.startswith("stability/")
    } == pytest.approx({**handle.last, "weight": 0.3})
    events = EventAccumulator(str(next((tmp_path / "events").rglob("events.*")).parent)).Reload()
    for name in FIGURES:
        written = events.Scalars(f"train/stability/{name}")
        assert [event.step for event in written] == [1, 2, 3, 4]
        assert [event.value for event in written] == pytest.approx([row[f"stability/{name}"] for row in logs], rel=1e-5)


def test_evaluation_is_logged_without_figures_and_without_penalty(tmp_path: Path) -> None:
    made, handle = trainer(tmp_path)
    RegularizerCallback(handle).follow(made)
    with_barrier = made.evaluate()
    handle.remove()
    assert with_barrier["eval_loss"] == made.evaluate()["eval_loss"]
    assert not any(name.startswith("stability/") for name in with_barrier)


@pytest.mark.parametrize("split", [(1, 12), (2, 6), (4, 3), (12, 1)], ids=str)
def test_accumulation_by_the_trainer_makes_no_difference(tmp_path: Path, split: tuple[int, int]) -> None:
    size, accumulation = split
    found = []
    for per_device, steps in ((12, 1), (size, accumulation)):
        made, handle = trainer(
            tmp_path,
            weight=WarmupSchedule(peak=0.4, warmup=4),
            max_steps=2,
            per_device_train_batch_size=per_device,
            gradient_accumulation_steps=steps,
            optim="sgd",
            max_grad_norm=0.0,
            train_sampling_strategy="sequential",
        )
        made.train_dataset = Rows(12)
        RegularizerCallback(handle).follow(made)
        made.train()
        assert handle.step == 2
        found.append({name: p.detach().clone() for name, p in made.model.named_parameters()})
    assert found[0].keys() == found[1].keys()
    for name in found[0]:
        assert_close(found[1][name], found[0][name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("source", "weight", "barrier"),
    [
        ("prior", 0.3, {"positions": 3}),
        ("prior", WarmupSchedule(peak=0.4, warmup=6), {"penalty": "map"}),
        ("prior", MarginController(target=2.0, initial=0.1, rate=0.05), {}),
        ("model", 0.3, {"positions": 3, "layer": 1}),
    ],
    ids=["positions", "schedule", "controller", "model"],
)
@pytest.mark.parametrize("explicit", [True, "checkpoint-2"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    tmp_path: Path, source: str, weight, barrier: dict, explicit: bool | str
) -> None:
    if isinstance(weight, MarginController):
        fresh = lambda: MarginController(target=2.0, initial=0.1, rate=0.05)  # noqa: E731
    else:
        fresh = lambda: weight  # noqa: E731
    ends, logs = [], []
    for resumed in (False, True):
        made, handle = trainer(tmp_path, source, fresh(), barrier, save_strategy="steps", save_steps=2)
        RegularizerCallback(handle).follow(made)
        if resumed:
            shutil.rmtree(tmp_path / "checkpoint-4")
        point = explicit if isinstance(explicit, bool) else str(tmp_path / explicit)
        made.train(resume_from_checkpoint=point if resumed else None)
        ends.append({**dict(made.model.named_parameters()), **handle.state_dict()})
        logs.append([row for row in made.state.log_history if "loss" in row][-1])
    assert ends[0].keys() == ends[1].keys()
    for name in ends[0]:
        assert torch.equal(ends[0][name], ends[1][name]), name
    timings = ("runtime", "flos", "train_loss", "per_second")
    assert [{k: v for k, v in row.items() if not k.endswith(timings)} for row in logs] == [logs[0]] * 2


def test_a_checkpoint_of_the_trainer_is_a_stock_one_with_the_law_beside(tmp_path: Path) -> None:
    made, handle = trainer(tmp_path, save_strategy="steps", save_steps=4)
    RegularizerCallback(handle).follow(made)
    made.train()
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4", output_loading_info=True)
    assert not any(report[part] for part in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    law = load_file(tmp_path / "checkpoint-4" / FILE)
    assert torch.equal(law["law.w_q"], handle.law.w_q)
    assert not list((tmp_path / "checkpoint-4").glob(".*"))


@pytest.mark.parametrize("mask", [0o022, 0o027])
def test_the_law_in_a_checkpoint_has_the_mode_of_an_ordinary_file(tmp_path: Path, mask: int) -> None:
    made, handle = trainer(tmp_path)
    before = os.umask(mask)
    try:
        RegularizerCallback(handle).on_save(made.args, made.state, made.control)
    finally:
        os.umask(before)
    (law,) = tmp_path.glob(f"checkpoint-*/{FILE}")
    assert law.stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_checkpoint_without_the_law_or_with_another_is_refused(tmp_path: Path) -> None:
    made, handle = trainer(tmp_path, save_strategy="steps", save_steps=2, max_steps=2)
    RegularizerCallback(handle).follow(made)
    made.train()
    law = tmp_path / "checkpoint-2" / FILE
    for damage, words in (
        (lambda: law.write_bytes(law.read_bytes()[:40]), "must hold the state of these regularizers"),
        (law.unlink, f"must hold {FILE}"),
    ):
        damage()
        made, handle = trainer(tmp_path)
        RegularizerCallback(handle).follow(made)
        with pytest.raises(RunFolderError, match=words):
            made.train(resume_from_checkpoint=True)


def test_an_optimizer_made_before_the_barrier_is_refused(tmp_path: Path) -> None:
    model = language_model(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = attached(model)
    made = Trainer(model=model, args=arguments(tmp_path), train_dataset=Rows(), optimizers=(optimizer, None))
    made.add_callback(RegularizerCallback(handle))
    with pytest.raises(ArgumentError, match="make it, or the Trainer, after attaching"):
        made.train()


def outside(outputs, labels, num_items_in_batch=None):
    logits, labels = outputs.logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].flatten()
    total = torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum", ignore_index=-100)
    return total / num_items_in_batch


@pytest.mark.parametrize("source", ["prior", "model"])
@pytest.mark.parametrize("way", ["label smoothing", "loss function"])
def test_a_loss_that_the_trainer_computes_holds_the_penalty_or_is_refused(
    tmp_path: Path, source: str, way: str
) -> None:
    def made_and_handle(factor: float = 0.0):
        model = language_model(dtype=torch.float32)
        handle = attached(model, source, 0.3)
        options = {"optim": "sgd", "gradient_accumulation_steps": 2, "max_grad_norm": 0.0, "max_steps": 2}
        if way == "label smoothing":
            made = Trainer(
                model=model, args=arguments(tmp_path, label_smoothing_factor=factor, **options), train_dataset=Rows()
            )
        else:
            made = Trainer(
                model=model, args=arguments(tmp_path, **options), train_dataset=Rows(), compute_loss_func=outside
            )
        return made, handle

    made, handle = made_and_handle(0.1)
    made.add_callback(RegularizerCallback(handle))
    with pytest.raises(CaptureError, match=r"RegularizerCallback\(handle\).follow\(trainer\)"):
        made.train()

    made, handle = made_and_handle(1e-9)  # so little that the loss is that of the model
    RegularizerCallback(handle).follow(made)
    RegularizerCallback(handle).follow(made)  # twice is once
    made.train()
    reference, other = trainer(
        tmp_path, source, optim="sgd", gradient_accumulation_steps=2, max_grad_norm=0.0, max_steps=2
    )
    RegularizerCallback(other).follow(reference)
    reference.train()
    expected = dict(reference.model.named_parameters())
    for name, parameter in made.model.named_parameters():
        assert_close(parameter, expected[name], rtol=1e-5, atol=1e-6, msg=name)
    assert handle.step == 2


def test_a_step_without_the_penalty_is_refused_even_without_a_gradient_in_the_model(tmp_path: Path) -> None:
    made, handle = trainer(tmp_path)
    made.add_callback(RegularizerCallback(handle))
    blind = language_model(dtype=torch.float32)  # what trains is another model
    made.compute_loss = lambda model, inputs, **_: blind(**inputs).loss + 0 * next(model.parameters()).sum()
    with pytest.raises(CaptureError, match="was made without the penalty of the regularizer"):
        made.train()
    made, handle = trainer(tmp_path)
    made.add_callback(RegularizerCallback(handle))
    handle.remove()
    made.train()
