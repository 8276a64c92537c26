"""A calibrated threshold in generation: what it lets through is what calibration called answered."""

import math

import numpy as np
import pytest
import torch

from support_tokens.generation import generate
from support_tokens.generation.selective import Outcome, Threshold, conformal_risk_control, measure_threshold
from support_tokens.generation.signals import score_tokens
from support_tokens.models import build_small_gpt, character_tokenizer, encode

SIGNAL = "TokenEntropy"
NEW = 12


@pytest.fixture(scope="module")
def written():
    """A random model of some contrast, and its free continuations of a few prompts."""
    torch.manual_seed(0)
    tokenizer = character_tokenizer("abcdefgh ")
    model = build_small_gpt(tokenizer, layers=1, heads=2, width=16, context=32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6)
    prompts = ["ab", "cd ", "hgf", "a c e", "bad", "fed"]
    options = {"max_new_tokens": NEW, "signals": [SIGNAL], "do_sample": True}
    return model, tokenizer, prompts, options, generate(model, tokenizer, prompts, **options)


def test_generation_ends_where_the_threshold_ends_a_sequence(written) -> None:
    model, tokenizer, prompts, options, free = written
    score = np.array([[token.signals[SIGNAL] for token in one.tokens] for one in free])
    error = np.zeros(score.shape)
    for value in np.quantile(score, [0.3, 0.7, 0.9]):
        threshold = Threshold(SIGNAL, float(value), True, "error share", 0.1, None, len(prompts), Outcome(0, 0))
        stopped = generate(model, tokenizer, prompts, stop_above=threshold.stop_above, **options)
        kept = sum(len(one.tokens) for one in stopped)
        assert kept == round(measure_threshold(threshold, score, error).coverage * score.size)


def test_what_abstains_writes_nothing(written) -> None:
    model, tokenizer, prompts, options, free = written
    score = np.array([[token.signals[SIGNAL] for token in one.tokens] for one in free])
    threshold = conformal_risk_control(score, np.ones(score.shape), risk=0.1, signal=SIGNAL)
    assert threshold.stop_above == {SIGNAL: -math.inf}
    assert not any(
        one.tokens for one in generate(model, tokenizer, prompts, stop_above=threshold.stop_above, **options)
    )


def test_scores_of_given_text_are_those_of_generation(written) -> None:
    model, tokenizer, prompts, _, free = written
    ids = encode(tokenizer, prompts[0] + "".join(tokenizer.decode(token.id) for token in free[0].tokens))
    scored = score_tokens(model, ids.unsqueeze(0), signals=[SIGNAL])[SIGNAL][0, len(prompts[0]) - 1 : -1]
    assert scored.tolist() == pytest.approx([token.signals[SIGNAL] for token in free[0].tokens], abs=1e-4)
