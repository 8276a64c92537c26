"""Worst-case noise and rounded weights: norms, strength, and a model that is left bit for bit as it was."""

import math

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from support_tokens.errors import ArgumentError
from support_tokens.models import hook_embeddings
from support_tokens.robustness import EvaluationData, measure
from support_tokens.robustness.perturbations import (
    AdversarialNoise,
    EmbeddingNoise,
    PerturbationSet,
    Quantization,
    round_channels,
)

WIDTH, LENGTH = 8, 10


def model(seed: int = 0) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_head=2, n_embd=WIDTH, vocab_size=11, n_positions=16, initializer_range=0.3)
    ).eval()


def data(n: int = 6) -> EvaluationData:
    ids = torch.randint(0, 11, (n, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    return EvaluationData(ids, mask)


def added(one: GPT2LMHeadModel, perturbation: AdversarialNoise, rms: float = 1.0) -> torch.Tensor:
    """The noise that enters the first block."""
    (batch,), seen = data().batches(6), []
    with perturbation.applied(one, rms) as read:
        of = read(batch)
        with torch.no_grad():
            handle = hook_embeddings(one, lambda x: seen.append(x.clone()))
            one(input_ids=of.input_ids, attention_mask=of.attention_mask)
            handle.remove()
    clean = one.transformer.wte(batch.input_ids) + one.transformer.wpe(torch.arange(LENGTH))
    return (seen[0] - clean).detach()


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize(("scale", "rms", "deviation"), [("absolute", 3.0, 0.1), ("matched", 3.0, 0.3)])
def test_worst_case_noise_has_the_norm_of_gaussian_noise(steps, scale, rms, deviation):
    noise = added(model(), AdversarialNoise(0.1, scale, steps), rms)
    lengths = data().mask.sum(-1)
    torch.testing.assert_close(
        noise.flatten(1).norm(dim=-1), deviation * (lengths * WIDTH).sqrt(), rtol=1e-4, atol=1e-6
    )
    assert not noise[1, 6:].any(), "padding is left alone"


def test_worst_case_noise_by_position_spends_alike_everywhere():
    noise = added(model(), AdversarialNoise(0.1, norm="position"))
    norms = noise.norm(dim=-1)
    # The last token is read by no scored prediction, so no noise on it could hurt.
    torch.testing.assert_close(norms[0, :-1], torch.full((LENGTH - 1,), 0.1 * math.sqrt(WIDTH)), rtol=1e-4, atol=1e-6)
    assert float(norms[0, -1]) == 0


def test_one_step_is_along_the_gradient_of_the_loss():
    one = model()
    (batch,) = data().batches(6)
    x = one.transformer.wte(batch.input_ids).detach().requires_grad_()
    logits = one(inputs_embeds=x, attention_mask=batch.attention_mask).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch.labels[:, 1:], reduction="sum")
    (slope,) = torch.autograd.grad(loss, x)
    noise = added(one, AdversarialNoise(0.1))
    cosine = torch.nn.functional.cosine_similarity(noise.flatten(1), slope.flatten(1), dim=-1)
    torch.testing.assert_close(cosine, torch.ones(6), atol=1e-4, rtol=0)


def test_more_steps_are_never_weaker_and_all_hurt_more_than_gaussian_noise():
    chosen = PerturbationSet((EmbeddingNoise(0.01), *(AdversarialNoise(0.01, steps=s) for s in (1, 2, 4))))
    nats = measure(model(), data(), chosen).nats
    one, two, four = (nats[f"worst case 0.01, {s}"] for s in ("1 step", "2 steps", "4 steps"))
    assert (two >= one - 1e-4).all() and (four >= two - 1e-4).all() and four.sum() >= one.sum()
    assert one.sum() > max(nats["noise 0.01"].sum(), nats["clean"].sum())


def test_worst_case_noise_does_not_depend_on_the_batch_and_leaves_no_trace():
    one, chosen = model(), PerturbationSet((AdversarialNoise(0.3, steps=2), AdversarialNoise(0.3, "matched")))
    before = {name: value.clone() for name, value in one.state_dict().items()}
    whole, parts = (measure(one, data(), chosen, batch_size=size).nats for size in (6, 2))
    for name in whole:
        np.testing.assert_allclose(whole[name], parts[name], rtol=1e-4)
    assert all(torch.equal(before[name], value) for name, value in one.state_dict().items())
    assert all(p.grad is None for p in one.parameters())
    assert not one.transformer.h[0]._forward_pre_hooks


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("channel", [0, 1])
def test_rounding_keeps_to_its_grid_and_to_half_a_step(bits, channel):
    weight = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    rounded = round_channels(weight, bits, channel)
    step = weight.abs().amax(1 - channel, keepdim=True) / (2 ** (bits - 1) - 1)
    levels = rounded / step
    torch.testing.assert_close(levels, levels.round(), atol=1e-5, rtol=0)
    assert ((rounded - weight).abs() <= step / 2 * (1 + 1e-5)).all()
    assert levels.abs().max() <= 2 ** (bits - 1) - 1 + 1e-4
    torch.testing.assert_close(rounded.abs().amax(1 - channel), weight.abs().amax(1 - channel))


def test_rounded_weights_are_put_back_to_the_bit_also_after_an_error():
    one = model()
    before = {name: value.clone() for name, value in one.state_dict().items()}

    def interrupted() -> None:
        with Quantization(4).applied(one, 1.0):
            c_attn, wte = one.transformer.h[0].attn.c_attn.weight, one.transformer.wte.weight
            # A Conv1D is (in, out): one scale for each column; the tied embedding is rounded once.
            torch.testing.assert_close(c_attn, round_channels(before["transformer.h.0.attn.c_attn.weight"], 4, 1))
            torch.testing.assert_close(wte, round_channels(before["transformer.wte.weight"], 4, 0))
            assert torch.equal(one.transformer.ln_f.weight, before["transformer.ln_f.weight"])
            raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        interrupted()
    assert all(torch.equal(before[name], value) for name, value in one.state_dict().items())


def test_fewer_bits_hurt_more():
    nats = measure(model(), data(), PerturbationSet((Quantization(8), Quantization(3)))).nats
    off = {name: np.abs(nats[name] - nats["clean"]).sum() for name in ("weights in 8 bits", "weights in 3 bits")}
    assert 0 < off["weights in 8 bits"] < off["weights in 3 bits"]


def test_calibration_is_that_of_a_plain_loop():
    one, held_out = model(), data()
    measured = measure(one, held_out, PerturbationSet(()))
    confidences, right = [], []
    for row in range(6):
        length = int(held_out.mask[row].sum())
        p = one(input_ids=held_out.input_ids[row : row + 1, :length]).logits[0].detach().double().softmax(-1)
        for t in range(1, length):
            confidences.append(float(p[t - 1].max()))
            right.append(int(p[t - 1].argmax()) == int(held_out.input_ids[row, t]))
    places = np.minimum((np.array(confidences) * 15).astype(int), 14)
    error = sum(abs(np.array(confidences)[places == b].sum() - np.array(right)[places == b].sum()) for b in range(15))
    found = np.abs(measured.gaps["clean"].sum(0)).sum() / measured.tokens["clean"].sum()
    assert found == pytest.approx(error / len(right), rel=1e-5)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: AdversarialNoise(-1.0), "sigma of worst-case noise must be a finite number above 0, received -1.0"),
        (lambda: AdversarialNoise(1.0, "relative"), "scale of worst-case noise must be 'absolute' or 'matched'"),
        (lambda: AdversarialNoise(1.0, steps=0), "steps of worst-case noise must be at least 1, received 0"),
        (lambda: AdversarialNoise(1.0, norm="batch"), "norm of worst-case noise .* received 'batch'"),
        (lambda: Quantization(1), "bits of rounded weights must be a whole number from 2 to 16, received 1"),
    ],
)
def test_bad_perturbations_are_refused(make, says):
    with pytest.raises(ArgumentError, match=says):
        make()
