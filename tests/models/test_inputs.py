"""A text in a padded batch is read as it is alone, at every entry point; threads take turns on a model."""

import threading

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from support_tokens.generation import embedding_rms, predict_under_noise, score_sequences, score_tokens
from support_tokens.models import context_length, in_turn, model_margins, text_config, text_inputs
from support_tokens.regularizers.barrier import attach_barrier
from tiny_models import tiny_model

# Absolute positions (learned), rotary ones, and positions that the model counts from the mask itself.
FAMILIES = ("gpt2", "llama", "gpt_neox", "opt", "phi")
IDS = torch.tensor([[5, 9, 3, 7, 11]])
ENTRY_POINTS = {
    "model_margins": lambda model, ids, mask: model_margins(model, ids, mask, layers=(1,))[1].log_abs_det,
    "score_tokens": lambda model, ids, mask: score_tokens(model, ids, mask, signals=["TokenEntropy"])["TokenEntropy"],
    "score_sequences": lambda model, ids, mask: score_sequences(model, ids, mask, signals=["Perplexity"])["Perplexity"],
    "predict_under_noise": lambda model, ids, mask: predict_under_noise(model, ids, mask, scale=0.0, samples=1)[..., 3],
    "embedding_rms": lambda model, ids, mask: torch.tensor(embedding_rms(model, ids, mask)),
}


def padded(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    pad, zeros = torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, 3, dtype=torch.long)
    both = (
        ((pad, IDS), (zeros, torch.ones_like(IDS))) if side == "left" else ((IDS, pad), (torch.ones_like(IDS), zeros))
    )
    ids, mask = (torch.cat(parts, dim=1) for parts in both)
    return ids, mask


@pytest.mark.parametrize("entry", ENTRY_POINTS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_text_is_read_as_it_is_alone(family: str, side: str, entry: str) -> None:
    model = tiny_model(family, dtype=torch.float64)
    ids, mask = padded(side)
    read = ENTRY_POINTS[entry]
    alone, beside = read(model, IDS, None), read(model, ids, mask)
    if alone.dim() == 2:
        beside = beside[mask.bool()].unsqueeze(0)
    assert_close(beside, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_wrapped_model_is_told_the_same_positions(family: str) -> None:
    peft = pytest.importorskip("peft")
    model = tiny_model(family, dtype=torch.float64)
    ids, mask = padded("left")
    expected = text_inputs(model, ids, mask)
    target = ["c_attn"] if family == "gpt2" else ["query_key_value"] if family == "gpt_neox" else ["q_proj"]
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=target, r=2, fan_in_fan_out=family == "gpt2"))
    found = text_inputs(wrapped, ids, mask)
    assert found.keys() == expected.keys()
    assert all(torch.equal(torch.as_tensor(found[name]), torch.as_tensor(expected[name])) for name in found)


def test_a_batch_without_padding_gets_no_mask() -> None:
    model = tiny_model("gpt2")
    assert text_inputs(model, IDS, torch.ones_like(IDS)) == text_inputs(model, IDS) == {
        "input_ids": IDS,
        "attention_mask": None,
        "use_cache": False,
    }  # fmt: skip


def test_the_configuration_of_text_is_found_in_any_wrapper() -> None:
    model = tiny_model("gpt2")
    wrapped = nn.ModuleDict({"inner": model})
    assert text_config(wrapped) is model.config
    assert context_length(wrapped) == model.config.n_positions
    assert context_length(nn.Linear(2, 2)) is None


def test_turns_are_those_of_the_model_whatever_wraps_it_or_is_attached() -> None:
    model = tiny_model("llama")
    order: list[str] = []
    with in_turn(model):
        handle = attach_barrier(model)
        other = threading.Thread(target=_note, args=(torch.nn.DataParallel(model), order))
        other.start()
        other.join(0.2)
        order.append("first")
        handle.remove()
    other.join(5)
    assert order == ["first", "second"]


def _note(model: nn.Module, order: list[str]) -> None:
    with in_turn(model):
        order.append("second")
