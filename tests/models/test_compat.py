"""What each private name of torch, transformers, accelerate and peft must do for this package to work."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import Trainer, TrainingArguments

from support_tokens.models import compat
from tiny_models import tiny_model


def test_torch_knows_whether_a_backward_pass_runs() -> None:
    """`torch._C._current_graph_task_id` is -1 outside of backward passes, and not in recomputation inside of them."""
    seen = []

    def function(x):
        seen.append(compat.inside_backward())
        return x.sin()

    x = torch.ones(1, requires_grad=True)
    checkpoint(function, x, use_reentrant=False).sum().backward()
    assert seen == [False, True]
    assert not compat.inside_backward()


def test_torch_asserts_on_the_device() -> None:
    """`torch._assert_async` accepts a true condition and, on the CPU, raises the message for a false one."""
    compat.assert_on_device(torch.tensor(True), "no")
    with pytest.raises(RuntimeError, match="the message"):
        compat.assert_on_device(torch.tensor(False), "the message")


def test_data_parallel_marks_its_copies() -> None:
    """`torch.nn.parallel.replicate` sets `_is_replica` on its copies; a module of one's own has no such mark."""
    module = nn.Linear(2, 2)
    assert not compat.is_replica(module)
    copied = module._replicate_for_data_parallel()
    assert compat.is_replica(copied)


def test_accelerate_says_where_an_offloaded_module_computes() -> None:
    """`cpu_offload` leaves parameters on `meta` and sets `_hf_hook` with `offload` and `execution_device`."""
    from accelerate import cpu_offload

    model = nn.Sequential(nn.Linear(2, 2))
    assert not compat.is_offloaded(model[0])
    assert compat.execution_device(model[0]) == torch.device("cpu")
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert model[0].weight.device.type == "meta"
    assert compat.is_offloaded(model[0])
    assert torch.device(compat.execution_device(model[0])) == torch.device("cpu")


def test_transformers_keeps_a_loss_function_that_is_set_under_loss_function() -> None:
    """Setting `loss_function` writes `_loss_function` on the model, which its forward pass calls."""
    model = tiny_model("llama")
    ids = torch.arange(4).unsqueeze(0)
    assert compat.loss_function_of(model) is None
    own = model(input_ids=ids, labels=ids).loss

    def constant(*_args, **_kwargs):
        return torch.tensor(7.0)

    model.loss_function = constant
    assert compat.loss_function_of(model) is constant
    assert model(input_ids=ids, labels=ids).loss == 7
    compat.restore_loss_function(model, None)
    assert compat.loss_function_of(model) is None
    assert model(input_ids=ids, labels=ids).loss == own
    compat.restore_loss_function(model, constant)
    assert model(input_ids=ids, labels=ids).loss == 7


def test_transformers_reads_the_attention_function_from_the_configuration() -> None:
    """`_attn_implementation` of a configuration names the attention function, `sdpa` by default."""
    model = tiny_model("llama")
    assert compat.attention_implementation(model.config) == "sdpa"
    compat.set_attention_implementation(model.config, "eager")
    assert compat.attention_implementation(model.config) == model.config._attn_implementation == "eager"
    weights = model(input_ids=torch.arange(4).unsqueeze(0), output_attentions=True).attentions
    assert weights[0].shape == (1, 4, 4, 4), "eager attention returns its weights"


def test_the_trainer_saves_a_checkpoint_on_demand(tmp_path) -> None:
    """`Trainer._save_checkpoint(model, trial)` writes `checkpoint-STEP` with weights and the state of the Trainer."""
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], disable_tqdm=True, use_cpu=True)
    trainer = Trainer(model=tiny_model("llama"), args=arguments)
    trainer.create_optimizer_and_scheduler(num_training_steps=1)
    compat.save_trainer_checkpoint(trainer)
    assert {path.name for path in (tmp_path / "checkpoint-0").iterdir()} >= {
        "model.safetensors",
        "optimizer.pt",
        "scheduler.pt",
        "trainer_state.json",
    }
