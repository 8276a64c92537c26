"""Prediction under latent noise, held against passes made one by one and against the law's Jacobian by autograd."""

import math

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from support_tokens.errors import ArgumentError
from support_tokens.generation.latent import _through, embedding_rms, predict_under_noise
from support_tokens.law import EmbeddingPrior
from support_tokens.models import hook_embeddings

WIDTH = 8


@pytest.fixture(scope="module")
def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=WIDTH, vocab_size=11, n_positions=16, initializer_range=0.5)
    return GPT2LMHeadModel(config).eval()


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(11, (3, 7), generator=torch.Generator().manual_seed(1))


def test_no_noise_is_the_plain_prediction(model, ids) -> None:
    plain = torch.log_softmax(model(ids).logits, -1)
    torch.testing.assert_close(predict_under_noise(model, ids, scale=0.0, samples=3), plain, atol=1e-5, rtol=0)


def test_a_model_in_training_predicts_as_in_evaluation_and_is_given_back(ids) -> None:
    config = GPT2Config(n_layer=2, n_head=2, n_embd=WIDTH, vocab_size=11, n_positions=16, resid_pdrop=0.5)
    model = GPT2LMHeadModel(config).train()
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    found = predict_under_noise(model, ids, scale=0.0, samples=2), embedding_rms(model, ids)
    assert [module.training for module in model.modules()] == modes
    model.eval()
    assert found[1] == embedding_rms(model, ids)
    torch.testing.assert_close(found[0], torch.log_softmax(model(ids).logits, -1), atol=1e-5, rtol=0)


def test_padding_on_the_left_moves_no_position(model, ids) -> None:
    wide = torch.nn.functional.pad(ids, (2, 0))
    mask = torch.nn.functional.pad(torch.ones_like(ids), (2, 0))
    plain = predict_under_noise(model, ids, scale=0.0, samples=2)
    padded = predict_under_noise(model, wide, mask, scale=0.0, samples=2)[:, 2:]
    torch.testing.assert_close(padded, plain, atol=1e-5, rtol=0)
    assert embedding_rms(model, wide, mask) == pytest.approx(embedding_rms(model, ids), rel=1e-6)


@pytest.mark.parametrize("lawful", [False, True])
def test_batched_samples_equal_single_passes(model, ids, lawful: bool) -> None:
    law = EmbeddingPrior(WIDTH, rank=3, generator=torch.Generator().manual_seed(2)) if lawful else None
    found = predict_under_noise(model, ids, scale=0.3, samples=4, law=law, generator=torch.Generator().manual_seed(3))
    noise = torch.randn(4, *ids.shape, WIDTH, generator=torch.Generator().manual_seed(3))
    total = torch.zeros_like(found)
    for drawn in noise:
        for row in range(len(ids)):

            def disturb(x, drawn=drawn, row=row):
                moved = drawn[row : row + 1]
                if law is not None:
                    moved = pushed(law, x, moved)
                return x + 0.3 * moved

            handle = hook_embeddings(model, disturb)
            total[row] += torch.softmax(model(ids[row : row + 1]).logits[0], -1) / 4
            handle.remove()
    torch.testing.assert_close(found, total.log(), atol=1e-5, rtol=1e-4)


def pushed(law: EmbeddingPrior, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """The inverse of each diagonal block of d noise(x) / dx, by autograd, times noise."""
    whole = torch.autograd.functional.jacobian(law.residual, x)[0, :, :, 0]  # type: ignore[index]
    blocks = torch.stack([whole[t, :, t] for t in range(x.shape[1])])
    return torch.linalg.solve(blocks, noise[0].unsqueeze(-1)).squeeze(-1).unsqueeze(0)


def test_noise_through_the_law_is_blind_to_padding() -> None:
    law = EmbeddingPrior(4, generator=torch.Generator().manual_seed(4)).double()
    draws = torch.Generator().manual_seed(5)
    x, noise = torch.randn(1, 6, 4, generator=draws).double(), torch.randn(2, 1, 6, 4, generator=draws).double()
    alone = _through(law.state(x), noise)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    wide = [torch.nn.functional.pad(a, (0, 0, 2, 0), value=9.0) for a in (x, noise)]
    torch.testing.assert_close(_through(law.state(wide[0], mask), wide[1])[:, :, 2:], alone)


def test_averaging_never_raises_the_mean_loss_of_its_members(model, ids) -> None:
    """Jensen: -log of the mean probability is at most the mean of -log over the same samples."""
    averaged = predict_under_noise(model, ids, scale=1.0, samples=16, generator=torch.Generator().manual_seed(6))
    draws = torch.Generator().manual_seed(6)
    handle = hook_embeddings(model, lambda x: x + torch.randn(x.shape, generator=draws))
    with torch.no_grad():
        single = torch.log_softmax(model(ids.repeat(16, 1)).logits, -1).reshape(16, *ids.shape, 11).mean(0)
    handle.remove()
    assert bool((averaged >= single - 1e-5).all())
    torch.testing.assert_close(averaged.exp().sum(-1), torch.ones(3, 7))


def test_what_comes_later_changes_nothing(model, ids) -> None:
    law = EmbeddingPrior(WIDTH, rank=3, generator=torch.Generator().manual_seed(7))
    other = torch.cat((ids[:, :5], (ids[:, 5:] + 1) % 11), dim=1)
    found = [
        predict_under_noise(model, t, scale=0.5, law=law, generator=torch.Generator().manual_seed(8))[:, :5]
        for t in (ids, other)
    ]
    torch.testing.assert_close(*found)


def test_root_mean_square_leaves_padding_out(model, ids) -> None:
    seen = []
    handle = hook_embeddings(model, seen.append)
    model(ids)
    handle.remove()
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    kept = torch.cat([seen[0][0, :4], *seen[0][1:]])
    assert embedding_rms(model, ids, mask) == pytest.approx(kept.square().mean().sqrt().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"scale": -0.1}, "scale must be a finite number of at least 0, received -0.1"),
        ({"scale": math.inf}, "scale must be a finite number"),
        ({"scale": 0.1, "samples": 0}, "samples must be a whole number of at least 1, received 0"),
        ({"scale": 0.1, "law": EmbeddingPrior(5)}, r"x must have shape \(B, T, 5\)"),
    ],
)
def test_errors_say_what_to_do_and_leave_the_model_alone(model, ids, options: dict, text: str) -> None:
    before = model(ids).logits
    with pytest.raises(ArgumentError, match=text):
        predict_under_noise(model, ids, **options)
    assert torch.equal(model(ids).logits, before)
