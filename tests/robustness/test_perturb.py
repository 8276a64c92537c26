"""Perturbations: seeded, frozen, the same for every arm whatever the batching."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from support_tokens.errors import ArgumentError
from support_tokens.models import hook_embeddings
from support_tokens.robustness.perturbations import (
    Batch,
    Clean,
    EmbeddingNoise,
    Perturbation,
    PerturbationSet,
    standard_noise,
    standard_perturbations,
)

WIDTH, LENGTH = 8, 6


@pytest.fixture(scope="module")
def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=WIDTH, vocab_size=11, n_positions=16)).eval()


def batch(indices: list[int], length: int = LENGTH) -> Batch:
    ids = torch.stack([torch.arange(length) * 3 + i for i in indices]) % 11
    return Batch(torch.tensor(indices), ids, torch.ones_like(ids), ids)


def embeddings(model, perturbation: Perturbation, of: Batch, rms: float = 1.0) -> torch.Tensor:
    """What enters the first block. The hook is registered last, so that it sees what the perturbation did."""
    seen = []
    with perturbation.applied(model, rms) as read, torch.inference_mode():
        handle = hook_embeddings(model, lambda x: seen.append(x.clone()))
        model(input_ids=read(of).input_ids)
        handle.remove()
    return seen[0]


@given(
    seed=st.integers(0, 2**31),
    indices=st.lists(st.integers(0, 10**6), min_size=1, max_size=5, unique=True),
    length=st.integers(1, 9),
    more=st.integers(0, 20),
)
def test_noise_depends_on_sequence_and_position_only(seed, indices, length, more):
    together = standard_noise(seed, indices, length + more, 3)
    for row, index in enumerate(indices):
        alone = standard_noise(seed, [index], length, 3)
        assert torch.equal(together[row, :length], alone[0])


def test_noise_is_standard_normal_and_its_streams_differ():
    noise = standard_noise(0, range(50), 40, 10)
    assert noise.dtype == torch.float32
    assert abs(float(noise.mean())) < 5 / np.sqrt(noise.numel())
    assert abs(float(noise.std()) - 1) < 5 / np.sqrt(2 * noise.numel())
    assert not torch.equal(noise[0], noise[1])
    assert not torch.equal(noise[0], standard_noise(1, [0], 40, 10)[0])
    # Seed 1 of sequence 0 and seed 0 of sequence 1 are other streams, as they would not be with seed + sequence.
    assert not torch.equal(standard_noise(1, [0], 4, 4), standard_noise(0, [1], 4, 4))


def test_noise_is_pinned():
    # The perturbation set is frozen by its checksum, which only holds while the generator gives these very numbers.
    expected = [1.1176220178604126, -1.3871248960494995, -0.4265716075897217]
    assert standard_noise(0, [0], 1, 3).flatten().tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("scale", "rms", "deviation"), [("absolute", 3.0, 0.5), ("matched", 3.0, 1.5)])
def test_embeddings_get_sigma_times_the_noise(model, scale, rms, deviation):
    of = batch([4, 2])
    shift = embeddings(model, EmbeddingNoise(0.5, scale, seed=7), of, rms) - embeddings(model, Clean(), of)
    torch.testing.assert_close(shift, deviation * standard_noise(7, [4, 2], LENGTH, WIDTH), atol=1e-6, rtol=1e-5)


def test_batching_changes_nothing(model):
    noise = EmbeddingNoise(0.5)
    whole = embeddings(model, noise, batch([0, 1, 2, 3]))
    parts = torch.cat([embeddings(model, noise, batch(part)) for part in ([0], [1, 2, 3])])
    assert torch.equal(whole, parts)


def test_same_noise_for_every_sigma_and_scale(model):
    of = batch([1])
    clean = embeddings(model, Clean(), of)
    small, large = (embeddings(model, EmbeddingNoise(s), of) - clean for s in (0.1, 1.0))
    torch.testing.assert_close(10 * small, large, atol=1e-5, rtol=1e-4)


def test_the_model_is_left_as_it_was(model):
    before = embeddings(model, Clean(), batch([0]))
    with pytest.raises(RuntimeError, match="interrupted"), EmbeddingNoise(1.0).applied(model, 1.0):
        raise RuntimeError("interrupted")
    assert torch.equal(before, embeddings(model, Clean(), batch([0])))


def test_perturbations_are_frozen_values():
    assert EmbeddingNoise(0.5) == EmbeddingNoise(0.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        EmbeddingNoise(0.5).sigma = 1.0  # type: ignore[misc]
    assert all(isinstance(item, Perturbation) for item in standard_perturbations().items)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((-0.1,), "sigma of embedding noise must be a finite number above 0, received -0.1"),
        ((0,), "above 0, received 0; .* use Clean"),
        ((float("nan"),), "sigma .* received nan"),
        (("0.5",), "sigma .* received '0.5'"),
        ((0.5, "relative"), "scale of embedding noise must be 'absolute' or 'matched', received 'relative'"),
        ((0.5, "matched", -1), "seed of embedding noise must be a whole number of at least 0, received -1"),
    ],
)
def test_bad_noise_is_refused(arguments, says):
    with pytest.raises(ArgumentError, match=says):
        EmbeddingNoise(*arguments)


def test_a_set_is_known_by_its_checksum():
    chosen = standard_perturbations((0.5,), seed=3)
    assert [item.name for item in chosen.items] == ["clean", "noise 0.5", "noise 0.5 x RMS"]
    again = PerturbationSet.from_record(json.loads(json.dumps(chosen.record())))
    assert again == chosen and again.checksum == chosen.checksum
    others = {standard_perturbations((0.5,), seed=4).checksum, standard_perturbations((0.25,), seed=3).checksum}
    assert chosen.checksum not in others and len(others) == 2


def test_clean_is_put_first():
    assert [p.name for p in PerturbationSet((EmbeddingNoise(1.0), Clean())).items] == ["clean", "noise 1"]


def edited(**changes):
    record = standard_perturbations((0.5,)).record()
    return {**record, "items": [record["items"][0], {**record["items"][1], **changes}]}


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (edited(sigma=0.6), "was edited or belongs to another version"),
        (edited(kind="earthquake"), "received 'earthquake'"),
        (edited(colour="pink"), "wrong parameters .*colour"),
    ],
)
def test_an_edited_set_is_refused(record, says):
    with pytest.raises(ArgumentError, match=says):
        PerturbationSet.from_record(record)


def test_a_set_takes_perturbations_of_unique_names():
    with pytest.raises(ArgumentError, match=r"unique, received 'noise 0.5' twice"):
        PerturbationSet((EmbeddingNoise(0.5), EmbeddingNoise(0.5, seed=1)))
    with pytest.raises(ArgumentError, match="must be perturbations, received"):
        PerturbationSet(("typo",))  # type: ignore[arg-type]
