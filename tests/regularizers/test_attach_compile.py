"""`torch.compile`, before and after the barrier joins, and what a compiled model does at every further step."""

from collections.abc import Iterator

import pytest
import torch
from torch.testing import assert_close

from barrier_models import attached, batch, gradients, language_model, unless_refused
from support_tokens import CaptureError, MarginController, WarmupSchedule

# What torch's compiler itself does to trace autograd functions and to go on after a break in a graph.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*Function.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()


def eager(kind: str, source: str, steps: int, **options) -> list[tuple]:
    model = language_model(kind, dtype=torch.float32)
    handle = attached(model, source, **options)
    return [step(model, model, handle, n) for n in range(steps)]


def step(compiled, model, handle, n: int) -> tuple:
    model.zero_grad()
    loss = compiled(**batch(seed=n, padding="right")).loss
    loss.backward()
    return loss.detach(), gradients(model), handle.last


def same(found: list[tuple], expected: list[tuple]) -> None:
    for (loss, gradient, last), (loss_, gradient_, last_) in zip(found, expected, strict=True):
        assert_close(loss, loss_, rtol=1e-5, atol=1e-6)
        assert last == pytest.approx(last_, rel=1e-4, abs=1e-5)
        assert gradient.keys() == gradient_.keys()
        for name in gradient:
            assert_close(gradient[name], gradient_[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("when", "kind", "source", "backend"),
    [
        ("before", "gpt2", "model", "aot_eager"),
        ("after", "llama", "prior", "aot_eager"),
        ("after", "llama", "model", "eager"),
        ("after-a-run", "gpt2", "prior", "eager"),
    ],
)
def test_compiled_penalty_is_the_eager_one(when: str, kind: str, source: str, backend: str) -> None:
    model = language_model(kind, dtype=torch.float32)
    handle = attached(model, source) if when == "before" else None
    compiled = torch.compile(model, backend=backend)
    if when == "after-a-run":
        compiled(**batch(seed=7, padding="right"))
    handle = handle or attached(compiled, source)
    found = unless_refused(
        lambda: [step(compiled, model, handle, n) for n in range(2)], "call torch.compiler.reset() after attaching"
    )
    if found is None:
        # What was compiled before knows of no hooks, where the model's code broke the graph into pieces.
        assert when == "after-a-run"
        torch.compiler.reset()
        found = [step(compiled, model, handle, n) for n in range(2)]
    same(found, eager(kind, source, 2))
    bare = language_model(kind, dtype=torch.float32).eval()(**batch(padding="right")).loss
    assert_close(compiled.eval()(**batch(padding="right")).loss, bare)


@pytest.mark.parametrize(
    "options",
    [
        {"weight": WarmupSchedule(peak=0.5, warmup=3, total=20, final=0.1)},
        {"positions": 3, "penalty": "map", "noise_scale": 0.7},
    ],
    ids=["schedule", "positions"],
)
def test_many_steps_of_what_changes_at_every_step(options: dict) -> None:
    model = language_model(dtype=torch.float32)
    handle = attached(model, **options)
    compiled = torch.compile(model, backend="eager")
    same([step(compiled, model, handle, n) for n in range(10)], eager("gpt2", "prior", 10, **options))
    assert handle.step == 10


def test_a_controller_goes_its_way_in_a_compiled_model() -> None:
    weights = []
    for compiling in (False, True):
        model = language_model(dtype=torch.float32)
        handle = attached(model, weight=MarginController(target=3.0, initial=0.1, rate=0.1))
        compiled = torch.compile(model, backend="eager") if compiling else model
        for n in range(4):
            step(compiled, model, handle, n)
        weights.append(handle.current_weight)
    assert weights[1] == pytest.approx(weights[0], rel=1e-5) != pytest.approx(0.1)


def test_checkpointing_inside_of_a_compiled_model() -> None:
    model = language_model(dtype=torch.float32)
    handle = attached(model)
    model.activation_checkpointing_enable({"use_reentrant": False})
    compiled = torch.compile(model, backend="aot_eager")
    same([step(compiled, model, handle, n) for n in range(2)], eager("gpt2", "prior", 2))


def test_regions_compiled_apart_give_the_penalty_or_refuse() -> None:
    model = language_model("llama", dtype=torch.float32)
    handle = attached(model)
    for block in model.model.layers:
        block.compile(backend="eager")
    found = unless_refused(lambda: [step(model, model, handle, n) for n in range(2)], "saw no embeddings")
    if found is not None:
        same(found, eager("llama", "prior", 2))


def test_losses_without_the_penalty_are_noticed_in_a_compiled_model_too() -> None:
    model = language_model(dtype=torch.float32)
    attached(model)
    compiled = torch.compile(model, backend="eager")
    ids = batch()["input_ids"]
    # Compiled code has no hooks on gradients; the second pass falls back to code that has.
    compiled(input_ids=ids).logits.sum().backward()
    loss = compiled(input_ids=ids).logits.sum()
    with pytest.raises(CaptureError, match="does not hold the penalty of the regularizer"):
        loss.backward()
