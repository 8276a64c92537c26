"""What is lent is given back: hooks, modes and settings of a model, whatever happens while it generates."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from generating import PROMPTS, TOKENIZER, endless
from support_tokens.errors import ArgumentError
from support_tokens.generation import MarginTemperature, generate
from support_tokens.generation.signals import score_tokens

SETTINGS = {
    "do_sample": True,
    "temperature": 0.3,
    "top_k": 2,
    "num_beams": 3,
    "num_return_sequences": 2,
    "repetition_penalty": 3.0,
    "no_repeat_ngram_size": 1,
    "sequence_bias": [[[5], 10.0]],
    "suppress_tokens": [3, 4, 5, 6],
    "forced_eos_token_id": 4,
    "guidance_scale": 2.0,
    "max_length": 4,
    "max_time": 1e-9,
    "stop_strings": ["a"],
    "cache_implementation": "static",
    "use_cache": False,
    "prompt_lookup_num_tokens": 3,
    "penalty_alpha": 0.5,
    "return_dict_in_generate": True,
}


def state_of(model: nn.Module) -> tuple:
    modules = list(model.modules())
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules]
    return hooks, [m.training for m in modules], [vars(m).get("config") for m in modules], model.generation_config


@pytest.mark.parametrize("name", SETTINGS)
def test_no_setting_of_the_model_changes_a_text_or_its_signals(name: str) -> None:
    model = endless()
    plain = generate(model, TOKENIZER, PROMPTS, max_new_tokens=6)
    settings = model.generation_config
    setattr(settings, name, SETTINGS[name])
    assert generate(model, TOKENIZER, PROMPTS, max_new_tokens=6) == plain
    assert model.generation_config is settings
    assert getattr(settings, name) == SETTINGS[name]


def _raise(*_args) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, None),
        ({"on_token": _raise}, ZeroDivisionError),
        ({"margin_rule": _raise}, ZeroDivisionError),
        ({"stop_above": {"TokenEntropy": float("nan")}}, ArgumentError),
        ({"stop_above": {"NegativeLogMargin (layer=1)": 1.0}}, ArgumentError),
        ({"layers": (9,)}, ArgumentError),
    ],
)
def test_a_model_is_left_as_it_was(options: dict, error: type[Exception] | None) -> None:
    model = endless().train()
    model.model.layers[0].eval()  # as someone who freezes a block sets it
    before = state_of(model)
    if error is None:
        generate(model, TOKENIZER, PROMPTS, max_new_tokens=2, signals=["HiddenScore"], **options)
        score_tokens(model, torch.tensor([[3, 4, 5]]))
    else:
        with pytest.raises(error):
            generate(model, TOKENIZER, PROMPTS, max_new_tokens=2, **options)
    assert state_of(model) == before


def test_threads_take_turns_on_one_model() -> None:
    """Hooks cannot tell threads apart: without turns, one would read queries that another's pass left."""
    model = endless()
    texts = ["cab", "a", "bca", "cc"]
    options = {"layers": (0, 1), "max_new_tokens": 12}
    alone = [generate(model, TOKENIZER, text, **options) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert list(pool.map(lambda text: generate(model, TOKENIZER, text, **options), texts)) == alone


def test_a_text_may_be_written_while_another_is() -> None:
    """A callback that asks the same model for another text disturbs neither."""
    model = endless()
    options = {"layers": (0, 1), "max_new_tokens": 5, "margin_rule": MarginTemperature()}
    plain, other = (generate(model, TOKENIZER, texts, **options) for texts in (PROMPTS, ["cab"]))
    inner = []
    outer = generate(
        model, TOKENIZER, PROMPTS, on_token=lambda *_: inner.append(generate(model, TOKENIZER, "cab", **options)),
        **options,
    )  # fmt: skip
    assert outer == plain
    assert all(found == other for found in inner)
