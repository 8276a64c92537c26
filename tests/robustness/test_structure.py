"""Structure: figures against plain formulas, what scale changes and what it does not, padding, and records."""

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from support_tokens.errors import ArgumentError
from support_tokens.models import model_margins
from support_tokens.robustness import COUPLING_LEVELS, measure_structure
from tiny_models import attention_jacobians

WIDTH = 8


def model(scale: float = 1.0) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=WIDTH, vocab_size=11, n_positions=16, initializer_range=0.4, bos_token_id=None,
        eos_token_id=None, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    made = GPT2LMHeadModel(config).double().eval()
    with torch.no_grad():
        made.transformer.wte.weight *= scale
        made.transformer.wpe.weight *= scale
    return made


def ids(n: int = 3, length: int = 10) -> torch.Tensor:
    return torch.randint(0, 11, (n, length), generator=torch.Generator().manual_seed(1))


def structure(*args, **options) -> SimpleNamespace:
    """The record of one model, with the only figure of each column."""
    fields = vars(measure_structure(*args, **options)).items()
    return SimpleNamespace(**{name: value[0] if isinstance(value, tuple) else value for name, value in fields})


def test_figures_equal_plain_formulas():
    one, text = model(), ids()
    found = structure(one, text, positions=8)
    x = (one.transformer.wte(text) + one.transformer.wpe(torch.arange(10))).detach().reshape(-1, WIDTH)
    assert found.embedding_rms == pytest.approx(float(x.square().mean().sqrt()), rel=1e-5)
    values = torch.linalg.svdvals(x - x.mean(0)).square()
    p = values / values.sum()
    assert found.effective_rank == pytest.approx(math.exp(-float((p * p.log()).sum())), rel=1e-5)
    assert found.dispersion == pytest.approx(1 - float(x.mean(0).square().sum() / x.square().sum(-1).mean()), rel=1e-5)
    margins = model_margins(one, text)[0]
    log_margin = margins.log_abs_det[:, 2:]
    assert found.n_positions == log_margin.numel()
    assert found.log_margin_mean == pytest.approx(float(log_margin.mean()), rel=1e-5)
    assert found.log_margin_min == pytest.approx(float(log_margin.min()), rel=1e-5)
    assert found.negative_fraction == pytest.approx(float((margins.sign[:, 2:] < 0).double().mean()))


def test_coupling_is_the_symmetric_part_of_the_jacobian_by_autograd():
    one, text = model(), ids(2)
    found = structure(one, text, positions=8)
    jacobian = attention_jacobians(one, "gpt2", (0,), input_ids=text)[0][:, 2:]
    values = torch.linalg.eigvalsh(0.5 * (jacobian + jacobian.mT)).flatten()
    expected = torch.quantile(values, torch.tensor(COUPLING_LEVELS, dtype=values.dtype))
    torch.testing.assert_close(
        torch.tensor(found.coupling_quantiles, dtype=values.dtype), expected, rtol=1e-5, atol=1e-7
    )
    assert found.attractive_fraction == pytest.approx(float(values.clamp_min(0).sum() / values.abs().sum()), rel=1e-5)
    sigma = torch.linalg.svdvals(torch.eye(WIDTH, dtype=values.dtype) - jacobian)[..., -1].flatten()
    assert found.sigma_min_low == pytest.approx(float(sigma.quantile(0.05)), rel=1e-5)


def test_signal_is_what_attention_adds():
    one, text, added = model(), ids(), []
    with torch.no_grad():
        one.transformer.h[0].attn.c_proj.bias.zero_()
    handle = one.transformer.h[0].attn.register_forward_hook(lambda _m, _a, output: added.append(output[0].detach()))
    found = structure(one, text)
    handle.remove()
    x = (one.transformer.wte(text) + one.transformer.wpe(torch.arange(10))).detach()
    signal, noise = added[0][:, 2:], (x - added[0])[:, 2:]
    assert found.signal_to_noise == pytest.approx(float(signal.square().sum() / noise.square().sum()), rel=1e-4)


def test_larger_embeddings_have_other_margins_and_equal_ones_at_equal_scale():
    small, large = structure(model(), ids()), structure(model(3.0), ids())
    assert large.embedding_rms == pytest.approx(3 * small.embedding_rms, rel=1e-6)
    assert large.effective_rank == pytest.approx(small.effective_rank, rel=1e-6)
    assert large.dispersion == pytest.approx(small.dispersion, rel=1e-6)
    # A layer norm stands before attention, so its Jacobian shrinks as the embeddings grow: margins move to zero.
    assert abs(large.log_margin_mean) < abs(small.log_margin_mean)
    equal = structure(model(3.0), ids(), scaled_by=1 / 3)
    assert equal.log_margin_mean == pytest.approx(small.log_margin_mean, rel=1e-3)
    assert equal.coupling_quantiles == pytest.approx(small.coupling_quantiles, rel=1e-3, abs=1e-6)


def test_padding_never_counts():
    text, mask = ids(2), torch.ones(2, 10, dtype=torch.long)
    mask[1, 6:] = 0
    first, second = (structure(model(), text.masked_fill(mask == 0, fill), mask) for fill in (3, 9))
    assert first == second
    assert first.n_positions == 8 + 4


def test_the_model_is_left_as_it_was():
    one = model()
    before = one(input_ids=ids()).logits
    structure(one, ids(), scaled_by=2.0)
    assert torch.equal(one(input_ids=ids()).logits, before)


def test_records_have_a_column_a_seed():
    record = measure_structure([model(s) for s in (1.0, 2.0)], ids(), arm="ce", setting="scaled", scaled_by=(2.0, 1.0))
    assert (record.arm, record.setting) == ("ce", "scaled")
    alone = [structure(model(s), ids(), scaled_by=f) for s, f in ((1.0, 2.0), (2.0, 1.0))]
    assert record.embedding_rms == tuple(s.embedding_rms for s in alone)
    assert record.n_positions == sum(s.n_positions for s in alone)
    assert len(record.coupling_quantiles) == 2 and record.coupling_levels == COUPLING_LEVELS


@pytest.mark.parametrize(
    ("options", "says"),
    [({"scaled_by": 0.0}, "must be above 0, received 0.0"), ({"positions": 0}, "received 0 positions")],
)
def test_bad_requests_are_refused(options, says):
    with pytest.raises(ArgumentError, match=says):
        structure(model(), ids(), **options)
