"""Plans and arms: each option documents itself, and each value that cannot be is refused by one sentence."""

import dataclasses
import json
import math

import pytest
import torch
from transformers import set_seed

from support_tokens import attached_barriers
from support_tokens.errors import ArgumentError, RunFolderError
from support_tokens.models import build_small_gpt, character_tokenizer
from support_tokens.regularizers import (
    ARMS,
    Arm,
    Attachment,
    Barrier,
    Combined,
    TrainingNoise,
    arm_config,
    arm_from_config,
    arm_label,
    parse_arm,
)
from support_tokens.training import PLANS, TrainingPlan, demo_plan, plan_from_config

WORDS = "In the beginning God created the heaven and the earth . And the earth was without form , and void ; "


@pytest.mark.parametrize("name", list(ARMS))
def test_attaching_leaves_the_global_generator_alone(name: str):
    model = build_small_gpt(character_tokenizer(WORDS), layers=1, heads=2, width=8, context=16)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    attachment = ARMS[name]().attach(model, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    attachment.remove()


def test_noise_is_scaled_to_the_embeddings_and_stays_out_of_evaluation():
    set_seed(0)
    model = build_small_gpt(character_tokenizer(WORDS), layers=1, heads=2, width=64, context=64)
    entered = []
    attachment = TrainingNoise(scale=0.5).attach(model, seed=0)
    model.transformer.h[0].register_forward_pre_hook(lambda _block, args: entered.append(args[0].detach()))
    ids = torch.randint(2, 10, (8, 64))
    for training_mode in (True, True, False, False):
        model.train(training_mode)(input_ids=ids)
    noise = entered[0] - entered[2]
    assert torch.equal(entered[2], entered[3])
    assert not torch.equal(entered[0], entered[1])
    assert noise.square().mean().sqrt().item() == pytest.approx(
        0.5 * entered[2].square().mean().sqrt().item(), rel=0.03
    )
    attachment.remove()
    model.train()(input_ids=ids)
    assert torch.equal(entered[4], entered[2])


def test_gradient_of_noise_does_not_see_its_scale():
    set_seed(0)
    model = build_small_gpt(character_tokenizer(WORDS), layers=1, heads=2, width=8, context=16)
    attachment = TrainingNoise(scale=0.5).attach(model, seed=0)
    block = model.transformer.h[0]
    x = torch.randn(1, 4, 8, requires_grad=True)
    hook = next(iter(block._forward_pre_hooks.values()))
    (noisy,), _ = hook(block, (x,), {})
    noisy.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    attachment.remove()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"steps": 0}, "steps must be a whole number of at least 1, received 0"),
        ({"learning_rate": -1.0}, "learning_rate must be a finite number of at least 0 and at most 10, received -1.0"),
        ({"learning_rate": math.nan}, "learning_rate must be .* received nan"),
        ({"weight_decay": math.inf}, "weight_decay must be .* received inf"),
        ({"batch_size": 2.5}, "batch_size must be a whole number"),
        ({"seed": True}, "seed must be a whole number"),
        ({"precision": "int8"}, "precision must be one of float32, bfloat16, float16, received 'int8'"),
        ({"heads": 3}, "heads must divide width, received heads=3 and width=128; pass for example --width 126"),
    ],
)
def test_a_plan_refuses_values_out_of_bounds(values: dict, says: str):
    with pytest.raises(ArgumentError, match=says):
        TrainingPlan(**values)


def test_every_option_of_plans_and_arms_documents_itself():
    for owner in (TrainingPlan, *ARMS.values()):
        for option in dataclasses.fields(owner):
            assert option.metadata["help"], (owner, option.name)


def test_a_stored_plan_of_another_version_is_an_error_of_the_folder():
    with pytest.raises(RunFolderError, match="cannot be used"):
        plan_from_config({"stepps": 3})
    with pytest.raises(RunFolderError, match="steps must be"):
        plan_from_config({"steps": -3})
    assert demo_plan(seed=1) == dataclasses.replace(PLANS["demo"], seed=1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("drop", "there is no arm 'drop'; known arms are ce, barrier, noise"),
        ("barrier:scale=1", "arm 'barrier' has no option 'scale'; its options are: weight, penalty, source"),
        ("ce:weight=1", "its options are: none"),
        ("barrier:weight", "option 'weight' is not written NAME=NUMBER"),
        ("barrier:weight=-1", "weight must be a finite number of at least 0, received -1.0"),
        ("noise:scale=nan", "scale must be a finite number of at least 0, received nan"),
        ("noise:unit=relative", "unit must be matched or absolute, received 'relative'"),
        ("barrier:positions=2.5", "positions must be a whole number of at least 0, received 2.5"),
        ("barrier:penalty=map,source=model", "the penalty map needs the law"),
        ("barrier:view=block", "view and layers go with source=model"),
        ("barrier:warmup=5,fade=5", "fade must come after warmup, received fade=5 and warmup=5"),
        ("barrier:target_margin=1", "target_margin goes with penalty=hinge, received penalty='log'"),
        ("dropout:rate=1", "rate must be a finite number of at least 0 and at most 0.9, received 1.0"),
    ],
)
def test_an_arm_that_cannot_be_is_refused(text: str, says: str):
    with pytest.raises(ArgumentError, match=says):
        parse_arm(text)


@pytest.mark.parametrize("layers", [2, 7])
def test_more_layers_than_the_model_has_are_refused_by_their_number(layers: int):
    model = build_small_gpt(character_tokenizer(WORDS), layers=1, heads=2, width=8, context=16)
    with pytest.raises(ArgumentError, match=f"layers must be at most 1, the blocks of the model, received {layers};"):
        Barrier(source="model", layers=layers).attach(model, seed=0)
    assert not attached_barriers(model)


def test_options_are_numbers_or_words():
    assert parse_arm("barrier:weight=0.1,penalty=hinge,target_margin=0.5,source=model,positions=4") == Barrier(
        0.1, "hinge", "model", 4, 0.5
    )
    assert arm_label(parse_arm("barrier:weight=0.1,penalty=hinge")) == "barrier, weight 0.1, penalty hinge"


def test_arms_are_joined_by_a_plus():
    arm = parse_arm("noise:scale=2e-1 + barrier:weight=1e+0,penalty=hinge")
    assert arm == Combined((TrainingNoise(0.2), Barrier(1.0, "hinge")))
    assert arm_from_config(json.loads(json.dumps(arm_config(arm)))) == arm
    assert arm_label(arm) == "noise, scale 0.2 + barrier, weight 1, penalty hinge"
    with pytest.raises(ArgumentError, match="two or more plain arms are required, received 1"):
        arm_from_config({"name": "combined", "parts": [{"name": "ce"}]})


def test_arms_are_what_the_protocol_asks_for():
    for arm in (parse_arm(name) for name in ARMS):
        assert isinstance(arm, Arm)
        assert arm_from_config(json.loads(json.dumps(arm_config(arm)))) == arm
        assert arm_label(arm).startswith(arm.name)
    assert Attachment().callbacks == ()
