"""Signals of tokens and texts: each against its textbook formula on the model's own outputs, in float64."""

from collections.abc import Mapping

import pytest
import torch
from scipy.linalg import eigvalsh
from torch import Tensor
from torch.testing import assert_close

from support_tokens.errors import ArgumentError
from support_tokens.generation.signals import (
    SEQUENCE_SIGNALS,
    TOKEN_SIGNALS,
    HiddenGram,
    predictive_quantities,
    score_sequences,
    score_tokens,
)
from support_tokens.law import EmbeddingLaw, EmbeddingPrior
from support_tokens.models import AttentionCapture, hook_embeddings
from tiny_models import attention_jacobians, left_and_right_padding, tiny_model

FAMILIES = ("gpt2", "llama", "mistral", "gemma2", "gpt_oss", "olmo2", "opt")
IDS, MASK = left_and_right_padding()
REAL = MASK.bool()
FOLLOWED = REAL & torch.nn.functional.pad(REAL[:, 1:], (0, 1))


CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # norms of most families run in float32, whatever the model is in


def law_of(width: int) -> EmbeddingPrior:
    return EmbeddingPrior(width, 3, generator=torch.Generator().manual_seed(0)).double()


def scored(model, ids: Tensor = IDS, mask: Tensor | None = MASK, **options) -> dict[str, Tensor]:
    return score_tokens(model, ids, mask, signals=list(TOKEN_SIGNALS), law=law_of(model.config.hidden_size), **options)


def own_weights(model, ids: Tensor, layer: int) -> Tensor:
    """Diagonals of the attention that the model itself reports, `(B, H, T)`."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attention = model(ids, output_attentions=True).attentions[layer]
    return attention.diagonal(dim1=-2, dim2=-1)


def rauq_by_hand(p: list[float], weight: Tensor) -> tuple[list[list[float]], list[float]]:
    """Confidences of every head, and token values, of one text: p[t] and weight[h, t] at t."""
    heads = [[p[0]] for _ in weight]
    values = [-float(torch.tensor(p[0]).log())]
    for t in range(1, len(p)):
        for h, confidence in enumerate(heads):
            confidence.append(0.2 * p[t] + 0.8 * float(weight[h, t]) * confidence[-1])
        means = [float(weight[h, 1 : t + 1].mean()) for h in range(len(weight))]
        values.append(-float(torch.tensor(heads[means.index(max(means))][-1]).log()))
    return heads, values


def test_predictive_quantities_are_those_of_a_categorical_distribution() -> None:
    logits = 3 * torch.randn(2, 5, 11, dtype=torch.float64)
    logits[0, 0, :4] = -torch.inf  # tokens that cannot come
    ids = torch.randint(4, 11, (2, 5))
    found = predictive_quantities(logits, ids)
    law = torch.distributions.Categorical(logits=logits)
    p = law.probs
    assert_close(found["entropy"], -torch.xlogy(p, p).sum(-1))
    assert_close(found["log_max_prob"], p.amax(-1).log())
    assert_close(found["log_chosen"], law.log_prob(ids))


def test_logits_that_are_no_numbers_are_no_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.zeros(2, 3, 4)
    logits[0, 1, 2] = torch.nan
    monkeypatch.setattr("support_tokens.generation.signals.logits._CHUNK", 8)  # a position at a time
    for name, value in predictive_quantities(logits, torch.zeros(2, 3, dtype=torch.long)).items():
        assert value.isnan().tolist() == [[False, True, False], [False, False, False]], name


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_margins_are_those_of_the_autograd_jacobian(family: str) -> None:
    model = tiny_model(family)
    found = scored(model, IDS[2:], None, layers=(0, 1), view="block")
    for layer, jacobian in attention_jacobians(model, family, (0, 1), input_ids=IDS[2:]).items():
        matrix = torch.eye(jacobian.shape[-1], dtype=torch.float64) + jacobian
        sign, log_abs_det = torch.linalg.slogdet(matrix)
        assert_close(found[f"NegativeLogMargin (layer={layer})"], -log_abs_det, **CLOSE)
        assert_close(found[f"NegativeSign (layer={layer})"], -sign, **CLOSE)
        assert_close(found[f"NegativeSigmaMin (layer={layer})"], -torch.linalg.svdvals(matrix)[..., -1], **CLOSE)


@pytest.mark.parametrize("family", ["gpt2", "mistral", "gemma2", "gpt_oss"])
def test_attention_scores_and_rauq_are_those_of_the_models_own_weights(family: str) -> None:
    model, ids = tiny_model(family), IDS[2:]
    found, whole = scored(model, ids, None), score_sequences(model, ids, layers=(0, 1))
    p = model(ids).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).exp()[0, :, 0].tolist()
    scores = []
    for layer in (0, 1):
        weight = own_weights(model, ids, layer).double()
        heads, values = rauq_by_hand(p, weight[0])
        head = int(weight[0, :, 1:-1].mean(-1).argmax())
        scores.append(-torch.tensor(heads[head]).log().mean())
        assert_close(whole[f"AttentionScore (layer={layer})"], -weight.log().mean(1).sum(-1), **CLOSE)
        if layer == 0:
            assert_close(found["AttentionScore (layer=0)"], -weight.log().mean(1), **CLOSE)
            assert_close(found["RAUQ (layer=0)"][0, :-1], torch.tensor(values).double(), **CLOSE)
    assert_close(whole["RAUQ"], torch.stack(scores).max().double()[None], **CLOSE)


def test_hidden_scores_are_eigenvalues_of_the_models_own_hidden_states() -> None:
    model, ids = tiny_model("llama"), IDS[2:]
    hidden = model(ids, output_hidden_states=True).hidden_states[1][0].detach()
    z = hidden - hidden.mean(-1, keepdim=True)
    expected = [eigvalsh((z @ z.T).numpy() + 1e-3 * torch.eye(len(z)).numpy())]
    found = scored(model, ids, None)["HiddenScore (layer=0)"]
    assert float(found.mean()) == pytest.approx(float(torch.tensor(expected[0]).log().mean()), abs=1e-9)
    parts = score_sequences(model, ids, prompt_lengths=4, signals=["HiddenScore"])
    assert_close(parts["HiddenScore (layer=0)"], found[:, 3:].mean(-1))


def test_hidden_states_of_one_text_that_are_no_numbers_stay_with_it() -> None:
    hidden, gram = torch.randn(2, 4, 3), HiddenGram()
    hidden[0, 2] = torch.nan
    found = gram(hidden, torch.ones(2, 4, dtype=torch.bool))
    assert found[1].isfinite().all()
    assert not found[0, 2].isfinite()


def test_densities_sum_to_the_log_density_of_the_law() -> None:
    model, seen = tiny_model("llama"), []
    handle = hook_embeddings(model, seen.append)  # type: ignore[arg-type]
    prior = law_of(12)
    for law in (prior, EmbeddingLaw(prior, 7)):
        found = score_tokens(model, IDS, MASK, signals=["NegativeLogDensity"], law=law)["NegativeLogDensity"]
        assert_close(-found.nansum(-1), prior.log_prob(seen[-1].double(), MASK), **CLOSE)
        assert_close(found.isnan(), ~REAL)
    handle.remove()


@pytest.mark.parametrize("family", FAMILIES)
def test_no_signal_depends_on_padding_or_on_the_rest_of_a_batch(family: str) -> None:
    # In float64 the eager attention of this family makes NaN of padding, by itself.
    model = tiny_model(family, dtype=torch.float32 if family == "gemma2" else torch.float64)
    batch = scored(model, layers=(0, 1))
    options = {"layers": (0, 1), "law": law_of(model.config.hidden_size), "signals": list(SEQUENCE_SIGNALS)}
    whole = score_sequences(model, IDS, MASK, **options)
    for row in range(len(IDS)):
        ids = IDS[row, REAL[row]][None]
        for name, value in scored(model, ids, None, layers=(0, 1)).items():
            assert_close(batch[name][row, REAL[row]], value[0], **CLOSE, equal_nan=True, msg=name)
        for name, value in score_sequences(model, ids, **options).items():
            assert_close(whole[name][row], value[0], **CLOSE, msg=name)


def test_numbers_stand_where_a_signal_is_defined() -> None:
    for name, value in scored(tiny_model("llama")).items():
        follows = TOKEN_SIGNALS[name.split(" ")[0]].follows
        assert torch.equal(~value.isnan(), FOLLOWED if follows else REAL), name


def test_sequences_are_read_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    expected = scored(model)
    monkeypatch.setattr("support_tokens.generation.signals.scoring._LOGIT_BYTES", 1)
    for name, value in scored(model).items():
        assert_close(value, expected[name], rtol=1e-6, atol=1e-6, equal_nan=True, msg=name)


def test_sequence_signals_of_an_answer_leave_the_prompt_out() -> None:
    model, ids = tiny_model("llama"), IDS[2:]
    tokens = scored(model, ids, None)
    found = score_sequences(model, ids, prompt_lengths=torch.tensor([3]))
    p, margin = tokens["NegativeLogLikelihood"][0], tokens["NegativeLogMargin (layer=0)"][0]
    expected: Mapping[str, Tensor] = {
        "MaximumSequenceProbability": p[2:-1].sum(),
        "Perplexity": p[2:-1].mean(),
        "MeanTokenEntropy": tokens["TokenEntropy"][0, 2:-1].mean(),
        "MeanNegativeLogMargin (layer=0)": margin[2:].mean(),
        "MaximumNegativeLogMargin (layer=0)": margin[2:].max(),
        "NegativeSignShare (layer=0)": (tokens["NegativeSign (layer=0)"][0, 2:] > 0).double().mean(),
    }
    for name, value in expected.items():
        assert_close(found[name], value[None].to(found[name]), msg=name)


def test_a_sequence_in_which_no_position_counts_has_no_score() -> None:
    for name, value in score_sequences(tiny_model("llama"), IDS[2:], prompt_lengths=9).items():
        assert value.isnan().all(), name


def test_the_model_is_left_as_it_was() -> None:
    model = tiny_model("llama").train()
    hooks = lambda: sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())  # noqa: E731
    before = hooks()
    with pytest.raises(ArgumentError):
        scored(model, layers=(7,))
    scored(model)
    assert (hooks(), model.training) == (before, True)


def test_signals_of_logits_need_no_readable_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args, **_options) -> None:
        raise AssertionError

    monkeypatch.setattr(AttentionCapture, "__init__", refuse)
    found = score_tokens(tiny_model("llama"), IDS, MASK, signals=["TokenEntropy"])
    assert list(found) == ["TokenEntropy"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"signals": ["Entropy"]}, "signals may name TokenEntropy"),
        ({"signals": "TokenEntropy"}, "pass \\['TokenEntropy'\\]"),
        ({"signals": ["NegativeLogDensity"]}, "law must be given for NegativeLogDensity"),
        ({"signals": ["NegativeLogDensity"], "law": torch.nn.Linear(1, 1)}, "received Linear"),
        ({"layers": (2,)}, "layers must be"),
        ({"view": "side"}, "view must be"),
        ({"attention_mask": MASK[:2]}, "attention_mask must have the shape"),
        ({"prompt_lengths": 0}, "prompt_lengths must be at least 1"),
        ({"input_ids": IDS[:, :0]}, "at least one, received \\(3, 0\\)"),
        ({"input_ids": IDS.double()}, "input_ids must be integers"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(options: dict, match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        score_tokens(tiny_model("llama"), **{"input_ids": IDS, **options})
