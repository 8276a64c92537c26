"""Training: equal seeds give equal bits, arms are paired, a stopped run goes on as if it had not, nothing is lost."""

import dataclasses
import gc
import math
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from support_tokens.errors import ArgumentError, DataError, RunFolderError, TrainingError
from support_tokens.files import read_json
from support_tokens.models import load_small_gpt
from support_tokens.regularizers import (
    Barrier,
    CrossEntropy,
    Noise,
    Regularizer,
    attach,
    regularizer_config,
    regularizer_from_config,
)
from support_tokens.training import (
    Corpus,
    RunFolder,
    TrainingPlan,
    last_sealed_checkpoint,
    plan_from_config,
    read_result,
    train,
    train_arms,
)
from support_tokens.training import trainer as training

WORDS = "In the beginning God created the heaven and the earth . And the earth was without form , and void ; "
CORPUS = Corpus("toy", WORDS * 20, WORDS * 2, WORDS + "?")
PLAN = TrainingPlan(
    layers=1, heads=2, width=8, context=16, steps=6, batch_size=4, learning_rate=1e-2, warmup=0.3, log_every=1,
    evaluate_every=3, evaluate_windows=4, save_every=2, device="cpu",
)  # fmt: skip
ALL = [CrossEntropy(), Barrier(weight=0.1), Noise(scale=0.5)]
EACH_ARM = pytest.mark.parametrize("arm", ALL, ids=lambda arm: arm.name)


def plan(**changes) -> TrainingPlan:
    return dataclasses.replace(PLAN, **changes)


def run(folder: Path, arm: Regularizer = ALL[0], changed: TrainingPlan = PLAN, **options):
    return train(changed, CORPUS, arm, folder, progress=False, **options)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def assert_same_bits(first: dict, second: dict) -> None:
    assert first.keys() == second.keys()
    for key in first:
        assert torch.equal(first[key], second[key]), key


@dataclasses.dataclass(frozen=True)
class At:
    """A regularizer beside which something happens when a step begins."""

    name = "ce"

    step: int
    what: object
    base: object = dataclasses.field(default_factory=CrossEntropy)

    def attach(self, model, seed):
        handle, fired = attach(model, self.base, seed=seed), []

        def before(_model, _args):
            if model.training and handle.step == self.step and not fired:
                fired.append(True)
                self.what(model)

        model.register_forward_pre_hook(before)
        return handle


@pytest.fixture(autouse=True, scope="module")
def imported_modules_are_no_garbage():
    """Trainer collects garbage at each start; most of its time went into looking through the libraries' own objects."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def as_its_base(monkeypatch: pytest.MonkeyPatch):
    """The configuration of an `At` is that of the regularizer under it, so that the run can go on with that one."""
    base = lambda regularizer: regularizer.base if isinstance(regularizer, At) else regularizer  # noqa: E731
    monkeypatch.setattr(training, "regularizer_config", lambda regularizer: regularizer_config(base(regularizer)))
    attached = lambda model, r, seed: r.attach(model, seed) if isinstance(r, At) else attach(model, r, seed=seed)  # noqa: E731
    monkeypatch.setattr(training, "attach", attached)


@EACH_ARM
def test_a_run_twice_ends_in_the_same_bits(tmp_path: Path, arm: Regularizer):
    torch.manual_seed(1)
    first = run(tmp_path / "a", arm)
    torch.manual_seed(2)
    second = run(tmp_path / "b", arm)
    assert_same_bits(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert (tmp_path / "a/metrics.jsonl").read_bytes() == (tmp_path / "b/metrics.jsonl").read_bytes()
    assert first.validation_bpc == second.validation_bpc


def test_another_seed_ends_elsewhere(tmp_path: Path):
    run(tmp_path / "a")
    run(tmp_path / "b", changed=plan(seed=1))
    assert not torch.equal(
        weights(tmp_path / "a")["transformer.wte.weight"], weights(tmp_path / "b")["transformer.wte.weight"]
    )


@EACH_ARM
@pytest.mark.parametrize("at", [3, 4])
def test_a_resumed_run_ends_in_the_bits_of_one_that_never_stopped(tmp_path: Path, arm: Regularizer, at: int):
    changed = plan(dropout=0.1, accumulation=2)
    run(tmp_path / "whole", arm, changed)
    with pytest.raises(KeyboardInterrupt, match=rf"stopped at step {at + 1} of 6; --resume goes on from there"):
        run(tmp_path / "stopped", At(at, lambda _model: signal.raise_signal(signal.SIGINT), arm), changed)
    assert not (tmp_path / "stopped/model").exists()
    run(tmp_path / "stopped", arm, changed, resume=True)
    assert_same_bits(weights(tmp_path / "whole"), weights(tmp_path / "stopped"))
    assert (tmp_path / "whole/metrics.jsonl").read_bytes() == (tmp_path / "stopped/metrics.jsonl").read_bytes()


class Killed(BaseException):
    pass


def kill(_model) -> None:
    raise Killed


@EACH_ARM
def test_a_killed_run_goes_on_from_the_last_complete_checkpoint(tmp_path: Path, arm: Regularizer):
    run(tmp_path / "whole", arm)
    with pytest.raises(Killed):
        run(tmp_path / "killed", At(5, kill, arm))
    folder = RunFolder.open(tmp_path / "killed")
    assert last_sealed_checkpoint(folder) == (folder.checkpoints / "checkpoint-4", 4)
    # A kill in the middle of saving leaves a checkpoint without its mark: the one before counts.
    shutil.copytree(folder.checkpoints / "checkpoint-4", folder.checkpoints / "checkpoint-5")
    (folder.checkpoints / "checkpoint-5/complete.json").unlink()
    (folder.checkpoints / "checkpoint-5/model.safetensors").write_bytes(b"torn")
    run(tmp_path / "killed", arm, resume=True)
    assert_same_bits(weights(tmp_path / "whole"), weights(tmp_path / "killed"))


def test_arms_start_from_the_same_weights_and_see_the_same_batches(tmp_path: Path):
    seen = {}
    for arm in ALL:
        initial, batches = {}, []

        def note(model, initial=initial, batches=batches):
            initial.update({key: value.clone() for key, value in model.state_dict().items()})
            model.register_forward_pre_hook(
                lambda _m, _a, kwargs: batches.append(kwargs["input_ids"].clone()), with_kwargs=True
            )

        run(tmp_path / arm.name, At(0, note, arm), plan(evaluate_every=100, steps=40))
        seen[arm.name] = (initial, batches[:40])
    for name in ("barrier", "noise"):
        assert_same_bits(seen["ce"][0], seen[name][0])
        assert all(torch.equal(*pair) for pair in zip(seen["ce"][1], seen[name][1], strict=True))
    assert len({batch.numpy().tobytes() for batch in seen["ce"][1]}) > 30, "batches of different steps differ"


def test_accumulation_gives_the_weights_of_one_larger_batch(tmp_path: Path):
    run(tmp_path / "whole", changed=plan(batch_size=8, evaluate_every=100))
    run(tmp_path / "parts", changed=plan(batch_size=2, accumulation=4, evaluate_every=100))
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    for key in whole:
        assert torch.allclose(whole[key], parts[key], atol=1e-5), key


@EACH_ARM
def test_a_run_folder_holds_what_it_promises(tmp_path: Path, arm: Regularizer):
    result = run(tmp_path / "run", arm)
    folder = RunFolder.open(tmp_path / "run")
    config = folder.config()
    assert plan_from_config(config["plan"]) == PLAN
    assert regularizer_from_config(config["arm"]) == arm
    assert config["corpus"] == CORPUS.identity()
    extra = {"regularizer.safetensors"} if arm.name == "barrier" else set()
    expected = {".lock", "config.json", "metrics.jsonl", "model", "result.json", "versions.json"}
    assert {entry.name for entry in folder.path.iterdir()} == expected | extra
    rows = folder.metrics()
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if "eval_bpc" in row] == [3, 6]
    assert rows[-1]["eval_bpc"] == pytest.approx(rows[-1]["eval_loss"] / math.log(2))
    assert all(row["stability/ce"] == pytest.approx(row["loss"], abs=1.0) for row in rows if "loss" in row)
    assert result.validation_bpc == pytest.approx(rows[-1]["eval_bpc"])
    assert read_result(folder.path) == result
    assert result.unknown == {"validation": 0.0, "test": 1 / len(CORPUS.test)}
    assert f"{result.parameters:,} parameters, 6 steps" in result.sentence
    assert result.parameters == load_small_gpt(folder.path)[0].num_parameters()
    _, info = AutoModelForCausalLM.from_pretrained(folder.model, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


def test_evaluation_during_training_is_the_bare_loss(tmp_path: Path):
    run(tmp_path, Barrier(weight=10.0))
    model, tokenizer = load_small_gpt(tmp_path)
    ids = tokenizer(CORPUS.validation, return_tensors="pt")["input_ids"][0]
    # Four windows of sixteen characters, evenly spread over the twelve of the validation text.
    starts = [index * (len(ids) // 16) // 4 * 16 for index in range(4)]
    batch = torch.stack([ids[start : start + 16] for start in starts])
    expected = model(input_ids=batch, labels=batch).loss.item() / math.log(2)
    assert read_result(tmp_path).validation_bpc == pytest.approx(expected, rel=1e-6)


def spoil_gradient(model) -> None:
    model.transformer.wte.weight.register_hook(lambda grad: grad * math.inf)


def spoil_loss(model) -> None:
    model.loss_function = lambda *args, **kwargs: 0 * torch.tensor(math.nan, requires_grad=True)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [(spoil_loss, "the loss is nan at step 4"), (spoil_gradient, "the norm of the gradient is (inf|nan) at step 4")],
)
@pytest.mark.parametrize("save_every", [2, 100])
def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_step(
    tmp_path: Path, spoil, says: str, save_every: int
):
    with pytest.raises(TrainingError, match=rf"training stops: {says}; the last good checkpoint is '.*checkpoint-3'"):
        run(tmp_path / "run", At(3, spoil), plan(save_every=save_every))
    checkpoint, step = last_sealed_checkpoint(RunFolder.open(tmp_path / "run"))
    assert step == 3
    kept = load_file(checkpoint / "model.safetensors")
    assert all(value.isfinite().all() for value in kept.values())
    run(tmp_path / "run", CrossEntropy(), plan(save_every=save_every), resume=True)
    run(tmp_path / "whole", CrossEntropy(), plan(save_every=save_every))
    assert_same_bits(weights(tmp_path / "run"), weights(tmp_path / "whole"))


def test_a_first_step_that_is_not_finite_says_that_none_was_made(tmp_path: Path):
    with pytest.raises(TrainingError, match="at step 1; no step had been made yet"):
        run(tmp_path, At(0, spoil_loss))


def test_resume_asks_for_the_same_plan_text_and_arm(tmp_path: Path):
    with pytest.raises(Killed):
        run(tmp_path, At(3, kill))
    with pytest.raises(ArgumentError, match=r"another plan \(seed differ\)"):
        run(tmp_path, changed=plan(seed=5), resume=True)
    with pytest.raises(ArgumentError, match=r"another arm \(name, scale, unit differ\)"):
        run(tmp_path, Noise(), resume=True)
    other = dataclasses.replace(CORPUS, train=CORPUS.train + "more")
    with pytest.raises(ArgumentError, match="another corpus"):
        train(PLAN, other, CrossEntropy(), tmp_path, resume=True)
    with pytest.raises(RunFolderError, match="there is no run folder"):
        run(tmp_path / "none", resume=True)


def test_a_finished_run_is_not_trained_again(tmp_path: Path):
    first = run(tmp_path)
    assert run(tmp_path, resume=True) == first
    with pytest.raises(RunFolderError, match="exists and is not empty"):
        run(tmp_path)
    assert read_result(tmp_path) == first


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        SafetensorError("I/O error: No space left on device"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 109312 vs 109204"),
        RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_full_disk_is_one_sentence_whichever_library_meets_it(tmp_path: Path, error: Exception):
    def fail(_model):
        raise error

    with pytest.raises(RunFolderError, match=r"cannot be written \(.*--resume"):
        run(tmp_path, At(3, fail))


def test_another_runtime_error_keeps_its_name(tmp_path: Path):
    def fail(_model):
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        run(tmp_path, At(3, fail))


def test_a_text_with_fewer_windows_than_a_step_is_refused_before_the_folder_is_made(tmp_path: Path):
    with pytest.raises(DataError, match=r"gives 125 windows of 16 characters where one step needs 500"):
        run(tmp_path / "run", changed=plan(batch_size=500))
    with pytest.raises(DataError, match="test part of corpus 'toy' has 101 characters where at least 129"):
        run(tmp_path / "run", changed=plan(context=128))
    assert not (tmp_path / "run").exists()


def test_tensorboard_is_written_if_asked_for(tmp_path: Path):
    os.environ.pop("TENSORBOARD_LOGGING_DIR", None)
    run(tmp_path, Barrier(), tensorboard=True)
    (events,) = (tmp_path / "tensorboard").glob("events.*")
    assert b"stability/barrier.log_margin_mean" in events.read_bytes()
    assert "TENSORBOARD_LOGGING_DIR" not in os.environ


def test_a_bar_is_drawn_on_stderr_and_nothing_else(tmp_path: Path, capfd: pytest.CaptureFixture):
    train(PLAN, CORPUS, CrossEntropy(), tmp_path)
    out, err = capfd.readouterr()
    assert out == ""
    assert "6/6" in err
    assert len(err.splitlines()) <= 2


def test_arms_are_trained_side_by_side_and_finished_ones_kept(tmp_path: Path):
    arms = {"plain": CrossEntropy(), "loud": Noise()}
    first = train_arms(PLAN, CORPUS, {"plain": arms["plain"]}, tmp_path, progress=False)
    both = train_arms(PLAN, CORPUS, arms, tmp_path, resume=True, progress=False)
    assert list(both) == ["plain", "loud"]
    assert both["plain"] == first["plain"]
    shutil.rmtree(tmp_path / "plain")
    with pytest.raises(RunFolderError, match="loud' exists and is not empty"):
        train_arms(PLAN, CORPUS, arms, tmp_path, progress=False)
    assert not (tmp_path / "plain").exists(), "the folder in the way is seen before the first arm is trained"


def test_a_corrupt_result_is_refused(tmp_path: Path):
    run(tmp_path)
    (tmp_path / "result.json").write_text('{"schema_version": 1}')
    with pytest.raises(RunFolderError, match="lacks"):
        read_result(tmp_path)
    assert read_json(tmp_path / "config.json")["arm"] == {"name": "ce"}


@pytest.mark.skipif(torch.accelerator.is_available(), reason="an accelerator is what must be missing")
def test_bfloat16_trains_on_the_processor_where_there_is_no_accelerator(tmp_path: Path):
    for device in ("auto", "cpu"):
        run(tmp_path / device, changed=plan(device=device, precision="bfloat16"))
    assert_same_bits(weights(tmp_path / "auto"), weights(tmp_path / "cpu"))


def test_what_a_run_writes_has_the_mode_of_ordinary_files(tmp_path: Path):
    before = os.umask(0o022)
    try:
        run(tmp_path / "run", Barrier(weight=0.1))
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"model.safetensors", "regularizer.safetensors"} <= {path.name for path in files}
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in files} == {path.name: "0o644" for path in files}


@pytest.mark.parametrize("force", [False, True])
def test_a_set_up_that_fails_leaves_no_folder_in_the_way_of_a_second_try(tmp_path: Path, force: bool, monkeypatch):
    original = training._Trainer.__init__

    def unlucky(self, *args, **options):
        original(self, *args, **options)
        raise RuntimeError("no room on the device")

    monkeypatch.setattr(training._Trainer, "__init__", unlucky)
    for folder in (tmp_path / "new", tmp_path / "empty"):
        if folder.name == "empty":
            folder.mkdir()
        with pytest.raises(RuntimeError, match="no room on the device"):
            run(folder, force=force)
        assert not folder.exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(RunFolderError):
        run(tmp_path / "mine", force=force)
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"
    monkeypatch.setattr(training._Trainer, "__init__", original)
    assert run(tmp_path / "new").steps == PLAN.steps
