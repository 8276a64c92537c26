"""The barrier is never silently absent, moves something or says so, and makes no device wait."""

import functools
import subprocess
import sys
from types import MethodType

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2LMHeadModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from barrier_models import KINDS, SOURCES, VOCABULARY, attached, batch, gradients, language_model
from support_tokens import (
    ArgumentError,
    CaptureError,
    MarginController,
    WarmupSchedule,
    attach_barrier,
    attached_barriers,
)

both = pytest.mark.parametrize("source", SOURCES)
every = pytest.mark.parametrize("kind", KINDS)
MISSING = "does not hold the penalty of the regularizer"


def cross_entropy(logits, labels):
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY).float(), labels[:, 1:].flatten())


@every
@both
def test_a_loss_from_logits_without_the_penalty_is_refused_in_its_backward_pass(kind: str, source: str) -> None:
    model, data = language_model(kind), batch()
    attached(model, source)
    for arguments in (
        {"input_ids": data["input_ids"]},
        data,
    ):  # with labels, too: their loss is not the one that trains
        loss = cross_entropy(model(**arguments).logits, data["labels"])
        with pytest.raises(CaptureError, match=MISSING) as refusal:
            loss.backward()
        assert "\n" not in str(refusal.value)
    model(**data).loss.backward()


@every
@both
def test_a_forward_that_goes_past_the_loss_function_is_refused(kind: str, source: str) -> None:
    """As kernels do that fuse the head with the loss."""

    def fused(self, input_ids, labels=None, **kwargs):
        hidden = self.base_model(input_ids, **kwargs)[0]
        return CausalLMOutputWithPast(loss=cross_entropy(self.get_output_embeddings()(hidden), labels))

    model, data = language_model(kind), batch()
    handle = attached(model, source)
    model.forward = MethodType(fused, model)
    loss = model(**data).loss
    with pytest.raises(CaptureError, match=MISSING):
        loss.backward()
    bare = model(**data).loss
    total = bare + handle.weighted_penalty()
    assert total.item() == pytest.approx(bare.item() + 0.5 * handle.last["penalty"])
    total.backward()


@both
def test_another_loss_function_set_after_the_barrier_is_refused_and_kept(source: str) -> None:
    model, data = language_model(), batch()
    handle = attached(model, source)

    def other(logits, labels, **kwargs):
        return cross_entropy(logits, labels)

    model.loss_function = other
    loss = model(**data).loss
    with pytest.raises(CaptureError, match=MISSING):
        loss.backward()
    handle.remove()
    assert model.loss_function is other
    model(**data).loss.backward()


def test_the_penalty_of_every_barrier_is_owed() -> None:
    model, data = language_model(), batch()
    first, second = attached(model), attached(model, "model")
    loss = cross_entropy(model(input_ids=data["input_ids"]).logits, data["labels"]) + first.weighted_penalty()
    with pytest.raises(CaptureError, match=MISSING):
        loss.backward()
    logits = model(input_ids=data["input_ids"]).logits
    (cross_entropy(logits, data["labels"]) + first.weighted_penalty() + second.weighted_penalty()).backward()
    loss = cross_entropy(model(input_ids=data["input_ids"]).logits, data["labels"]) + first.weighted_penalty()
    second.remove()  # and owes no more
    loss.backward()


def test_several_passes_before_one_backward_pass() -> None:
    model = language_model()
    attached(model)
    losses = [model(**batch(seed=n)).loss for n in range(3)]
    sum(losses).backward()
    first, second = model(**batch(seed=0)), model(input_ids=batch(seed=1)["input_ids"])
    aside = (first.loss + (first.logits - second.logits).square().mean()) / 2
    with pytest.raises(CaptureError, match=MISSING):  # the second pass has a graph of its own
        aside.backward()


def test_a_loss_beside_the_models_own_is_free() -> None:
    model, data = language_model(), batch()
    attached(model)
    output = model(**data)
    (output.loss + output.logits.square().mean()).backward()
    at_once = gradients(model)
    model.zero_grad()
    output = model(**data)
    output.loss.backward(retain_graph=True)
    output.logits.square().mean().backward()
    torch.testing.assert_close(gradients(model), at_once)


@both
def test_a_pass_for_metrics_does_not_take_the_place_of_the_one_that_trains(source: str) -> None:
    model, data, found = language_model(), batch(), []
    handle = attached(model, source)
    for disturbed in (False, True):
        model.zero_grad()
        logits = model(input_ids=data["input_ids"]).logits
        if disturbed:
            with torch.no_grad():
                bare = model(**batch(seed=5)).loss
            model.eval()(**batch(seed=6))
            assert bare.item() == model(**batch(seed=5)).loss.item()
            model.train()
        (cross_entropy(logits, data["labels"]) + handle.weighted_penalty()).backward()
        found.append(gradients(model))
    for name in found[0]:
        assert torch.equal(found[0][name], found[1][name])


def test_loss_without_a_pass_is_refused() -> None:
    model, data = language_model(), batch()
    handle = attached(model)
    logits = torch.randn(4, 8, VOCABULARY)
    with pytest.raises(CaptureError, match="saw no forward pass before this loss"):
        model.loss_function(logits=logits, labels=data["labels"], vocab_size=VOCABULARY)
    with pytest.raises(CaptureError, match="saw no forward pass"):
        handle.penalty()
    model.transformer.h[0] = language_model(seed=1).transformer.h[0]  # the block that was listened to is gone
    with pytest.raises(CaptureError, match="embeddings must enter the first block"):
        model(**data)


def test_replicas_of_data_parallel_are_refused() -> None:
    for source, words in (("prior", "DataParallel"), ("model", "DataParallel")):
        model = language_model("llama")
        attached(model, source)
        model.model._is_replica = True
        with pytest.raises(CaptureError, match=words):
            model(**batch())


@pytest.mark.parametrize("after", [False, True], ids=["attach-after-peft", "peft-after-attach"])
def test_lora_and_the_barrier_of_the_law(after: bool) -> None:
    """LoRA freezes the embeddings: the law would learn beside a model that learns nothing from it."""
    model, config = language_model("llama", dtype=torch.float32), LoraConfig(task_type="CAUSAL_LM", r=2)
    if after:
        handle = attached(model)
        model = get_peft_model(model, config)
    else:
        model = get_peft_model(model, config)
        handle = attach_barrier(model, 0.5)
    model.train()
    with pytest.raises(CaptureError, match="it would move nothing of the model; act on the model's own attention"):
        model(**batch())
    model.enable_input_require_grads()  # a gradient that reaches no parameter
    with pytest.raises(CaptureError, match="would move nothing of the model"):
        model(**batch())
    handle.remove()
    model(**batch()).loss.backward()


def test_lora_that_trains_the_embeddings_too() -> None:
    config = LoraConfig(task_type="CAUSAL_LM", r=2, modules_to_save=["embed_tokens"])
    model = get_peft_model(language_model("llama", dtype=torch.float32, tie_word_embeddings=False), config).train()
    attach_barrier(model, 0.5)
    model(**batch()).loss.backward()
    found = gradients(model)
    assert any("embed_tokens.modules_to_save" in name for name in found)
    assert any("law.w_q" in name for name in found)


def test_the_law_frozen_by_lora_after_the_barrier_is_told() -> None:
    config = LoraConfig(task_type="CAUSAL_LM", r=2, modules_to_save=["embed_tokens"])
    model = language_model("llama", dtype=torch.float32, tie_word_embeddings=False)
    handle = attach_barrier(model, 0.5)
    model = get_peft_model(model, config).train()
    with pytest.warns(UserWarning, match="attach the barrier after get_peft_model"):
        model(**batch())
    model(**batch()).loss.backward()  # told once
    handle.remove()


@every
@pytest.mark.parametrize("after", [False, True], ids=["attach-after-peft", "peft-after-attach"])
def test_lora_and_the_models_own_attention(kind: str, after: bool) -> None:
    projections = ["c_attn"] if kind == "gpt2" else ["q_proj", "v_proj"]
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=projections, fan_in_fan_out=kind == "gpt2")
    found = []
    for weight in (0.0, 0.5):
        model = language_model(kind, dtype=torch.float32)
        if after:
            attached(model, "model", weight, layer=1)
            model = get_peft_model(model, config).train()
        else:
            model = get_peft_model(model, config).train()
            attach_barrier(model, weight, source="model", layer=1)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora" in name:
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        model(**batch()).loss.backward()
        found.append(gradients(model))
    assert found[0].keys() == found[1].keys() and all("lora" in name for name in found[0])
    assert all(not torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.filterwarnings("ignore:target_modules:UserWarning")
def test_lora_beside_attention_is_refused_for_the_first_layer() -> None:
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["down_proj"])
    model = get_peft_model(language_model("llama", dtype=torch.float32), config).train()
    handle = attach_barrier(model, 0.5, source="model", layer=0)
    with pytest.raises(CaptureError, match="shapes the attention of layer 0 must be trained, received none"):
        model(**batch())
    handle.remove()
    attach_barrier(model, 0.5, source="model", layer=1)
    model(**batch()).loss.backward()


def test_inputs_embeds_without_a_gradient_are_refused() -> None:
    model = language_model("llama")
    attached(model)
    ids = batch()["input_ids"]
    x = model.get_input_embeddings()(ids)
    model(inputs_embeds=x, labels=ids).loss.backward()
    with pytest.raises(CaptureError, match="must carry a gradient"):
        model(inputs_embeds=x.detach(), labels=ids)


def test_wrappers_that_would_leave_the_law_out_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class DistributedDataParallel(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    wrapped = DistributedDataParallel(language_model())
    with pytest.raises(ArgumentError, match="attach the barrier before"):
        attach_barrier(wrapped)
    assert attach_barrier(wrapped, source="model").attached


def test_a_model_without_weights_is_refused() -> None:
    with torch.device("meta"):
        model = GPT2LMHeadModel(language_model().config)
    with pytest.raises(ArgumentError, match="on the device 'meta'"):
        attach_barrier(model)
    assert attached_barriers(model) == []


class Waits(TorchDispatchMode):
    """Notes every operation whose result the host must wait for, were the tensors on a device."""

    WAITING = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "item")

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        if name in self.WAITING or any(i is not None and i.dtype == torch.bool for i in indices):
            self.noted.append(name)
        return func(*args, **(kwargs or {}))


@every
@both
@pytest.mark.parametrize("positions", [None, 3])
@pytest.mark.parametrize("padding", ["", "left"])
def test_a_step_never_waits_for_the_device_unless_last_is_read(
    kind: str, source: str, positions: int | None, padding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The mask of the model is checked on the device, without waiting, unless it is on the host as here.
    monkeypatch.setattr("support_tokens.models.states._require", lambda condition, _: torch._assert_async(condition))
    model, data = language_model(kind), {**batch(padding=padding), "num_items_in_batch": torch.tensor(20)}
    with Waits() as of_the_model:
        model(**data).loss.backward()
    options = {"penalty": "hinge", "target_margin": 1.0} if source == "model" else {"penalty": "map"}
    handle = attached(model, source, positions=positions, **options)
    with Waits() as with_barrier:
        model(**data).loss.backward()
    assert with_barrier.noted == of_the_model.noted
    with Waits() as reading:
        names = {"ce", "total", "penalty", "weight", "log_margin_mean", "log_margin_min", "negative_fraction"}
        assert handle.last.keys() == names
    # Each figure once, and the number of tokens that two of them are means over.
    assert reading.noted == ["_local_scalar_dense"] * 9


def test_a_schedule_reads_the_host_only() -> None:
    model, data = language_model(), batch()
    handle = attached(model, weight=WarmupSchedule(peak=0.4, warmup=4))
    weights = []
    for _ in range(3):
        model(**data)
        weights.append(handle.current_weight)
    assert weights == pytest.approx([0.1, 0.2, 0.3])
    assert handle.step == 3
    handle.step = 0
    assert handle.current_weight == 0.0


def test_the_package_reads_no_compiler_and_no_model_library() -> None:
    code = "import sys, support_tokens; print([m for m in ('torch._dynamo', 'transformers') if m in sys.modules])"
    run = functools.partial(subprocess.run, capture_output=True, text=True, check=True)
    assert run([sys.executable, "-c", code]).stdout.strip() == "[]"


@both
def test_training_in_eval_mode_is_told(source: str) -> None:
    model, data = language_model().eval(), batch()
    attached(model, source)
    with pytest.warns(UserWarning, match=r"call model.train\(\)"):
        model(**data).loss.backward()
    model(**data).loss.backward()  # told once
    other = language_model()
    attached(other, source)
    other(**data).loss.backward()
    other.eval()(**data).loss.backward()  # an attack on a model that was trained with its barrier


@both
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("controlled", [False, True])
def test_a_metrics_pass_in_train_mode_changes_nothing_of_what_follows(source: str, context, controlled: bool) -> None:
    found = []
    for disturbed in (False, True):
        model, data = language_model(), batch()
        weight = MarginController(3.0, 0.1, 0.5) if controlled else WarmupSchedule(peak=0.5, warmup=8)
        handle = attached(model, source, weight=weight, positions=3)
        for _ in range(3):
            model(**data).loss.backward()
            if disturbed:
                before = handle.state_dict()
                with context():
                    assert model(**batch(seed=5)).loss.isfinite()
                    model(input_ids=data["input_ids"])
                    handle.weighted_penalty()
                after = handle.state_dict()
                assert all(torch.equal(before[name], after[name]) for name in before)
        found.append((gradients(model), handle.step, handle.counted, handle.current_weight))
    assert found[0][1:] == found[1][1:] and found[0][1] == found[0][2] == 3
    for name in found[0][0]:
        assert torch.equal(found[0][0][name], found[1][0][name])
