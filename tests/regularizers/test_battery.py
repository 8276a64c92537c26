"""One battery of laws for every regularizer, by parametrisation over the registry."""

import copy
import itertools

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from barrier_models import VOCABULARY, batch, gradients, language_model
from support_tokens import ArgumentError, CaptureError, UnsupportedModelError, attach
from support_tokens.regularizers import REGULARIZERS, CrossEntropy, parse_regularizer, regularizer_label
from support_tokens.regularizers import adversarial as adversarial_module
from support_tokens.regularizers import noise as noise_module

EVERY = [name for name in REGULARIZERS if name != "ce"]
WITH_PENALTY = [
    "barrier:weight=0.3", "barrier:weight=0.3,penalty=map", "barrier:weight=0.3,penalty=hinge,target_margin=0.2",
    "barrier:weight=0.3,source=model,view=block", "spread:weight=0.3", "scale-free:weight=0.3", "target-margin",
    "smart:weight=0.5", "smart:weight=0.5,steps=2,bregman=0.5", "alum:weight=0.5", "freelb", "sdbn", "sam", "rdrop",
]  # fmt: skip
SPLITS_ALIKE = [text for text in WITH_PENALTY if not text.startswith(("sam", "target-margin"))]
"""SAM climbs the gradient of each micro-batch, and a controller moves at each loss: both by definition."""
CLOSE = {"rtol": 1e-9, "atol": 1e-10}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise that is the same in every row, of one size in every batch: what a law of splits can be stated for."""

    def same_rows(draw):
        def drawn(x: Tensor) -> Tensor:
            row = draw(x.shape[1:], generator=torch.Generator().manual_seed(3), dtype=torch.float64)
            return row.to(x.dtype).expand_as(x).clone()

        return drawn

    monkeypatch.setattr(torch, "randn_like", same_rows(torch.randn))
    monkeypatch.setattr(torch, "rand_like", same_rows(torch.rand))
    for module in (adversarial_module, noise_module):
        monkeypatch.setattr(module, "embeddings_rms", lambda x, valid: torch.tensor(0.5, dtype=torch.float64))


def step(model, data: dict, **more) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    torch.manual_seed(0)
    loss = model(**data, **more).loss
    loss.backward()
    return loss.detach(), gradients(model)


def regularized(text: str, kind: str = "gpt2", **options):
    model = language_model(kind, **options)
    handle = attach(model, text, seed=0)
    for term in handle.terms:
        term.to(next(model.parameters()).dtype)
    return model, handle


def without_dropout(text: str) -> str:
    return text.replace("rdrop", "rdrop:dropout=0") if text == "rdrop" else text


def same(found: dict[str, Tensor], expected: dict[str, Tensor], **close) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(found[name], gradient, msg=lambda m, name=name: f"{name}: {m}", **(close or CLOSE))


@pytest.mark.parametrize("text", EVERY)
def test_the_label_names_it_and_reads_back(text: str) -> None:
    regularizer = parse_regularizer(text)
    assert regularizer_label(regularizer).startswith(text)
    assert regularizer.kind in {"law", "rival", "control"}
    assert regularizer.summary[0].isalpha()


ZEROES = ["barrier:weight=0", "spread:weight=0", "scale-free:weight=0", "smart:weight=0", "alum:weight=0",
          "freelb:weight=0", "sdbn:weight=0", "sam:weight=0", "rdrop:weight=0,dropout=0", "noise:scale=0",
          "neftune:alpha=0", "dropout:rate=0", "decay:decay=0", "scale:factor=1"]  # fmt: skip


@pytest.mark.parametrize("text", ZEROES)
def test_zero_weight_changes_nothing_bit_for_bit(text: str) -> None:
    plain, data = language_model(), batch(padding="right")
    expected_loss, expected = step(plain, data)
    model, _ = regularized(text)
    loss, found = step(model, data)
    assert torch.equal(loss, expected_loss)
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


PAIRS = list(itertools.combinations([name for name in EVERY if name not in {"spectral", "sigma-reparam"}], 2))


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=lambda name: name)
def test_order_makes_no_difference_bit_for_bit(first: str, second: str) -> None:
    model, data = language_model(), batch(padding="right")
    other = copy.deepcopy(model)
    if {first, second} <= {"freelb", "sdbn", "sam"}:
        for text in (f"{first}+{second}", f"{second}+{first}"):
            with pytest.raises(ArgumentError, match="place of cross-entropy"):
                attach(model, text, seed=0)
        return
    attach(model, f"{first}+{second}", seed=0)
    attach(other, f"{second}+{first}", seed=0)
    (loss, found), (other_loss, expected) = step(model, data), step(other, data)
    assert torch.equal(loss, other_loss)
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


@pytest.mark.parametrize("text", WITH_PENALTY)
@pytest.mark.parametrize("padding", ["", "right"])
def test_the_figures_add_up_to_the_loss(text: str, padding: str) -> None:
    model, handle = regularized(without_dropout(text))
    loss, _ = step(model, batch(padding=padding))
    last, name = handle.last, handle.terms[0].name
    assert last["total"] == pytest.approx(loss.item(), abs=1e-9)
    assert last["ce"] + last[f"{name}.weight"] * last[f"{name}.penalty"] == pytest.approx(loss.item(), abs=1e-6)


@pytest.mark.parametrize("text", [*WITH_PENALTY, "noise", "dropout:rate=0"])
def test_what_stands_at_padding_is_not_seen(text: str) -> None:
    data = batch(padding="right")
    changed = {**data, "input_ids": torch.where(data["attention_mask"] == 0, 5, data["input_ids"])}
    assert not torch.equal(changed["input_ids"], data["input_ids"])
    model, _ = regularized(without_dropout(text))
    loss, found = step(model, data)
    again, _ = regularized(without_dropout(text))
    other_loss, expected = step(again, changed)
    assert_close(loss, other_loss, **CLOSE)
    for name, gradient in expected.items():
        if "wte" not in name and "wpe" not in name:
            assert_close(found[name], gradient, **CLOSE)


@pytest.mark.parametrize("text", SPLITS_ALIKE)
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_every_split_has_one_gradient_and_one_set_of_figures(text: str, parts: int) -> None:
    data = batch(8, padding="right")
    items = (data["labels"][:, 1:] != -100).sum()
    model, handle = regularized(without_dropout(text))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    expected_loss, expected = step(model, data, num_items_in_batch=items)
    optimizer.step()
    whole = handle.last
    torch.manual_seed(0)
    model.zero_grad()
    total = 0.0
    for rows in torch.arange(8).chunk(parts):
        loss = model(**{key: value[rows] for key, value in data.items()}, num_items_in_batch=items).loss
        loss.backward()
        total += loss.item()
    optimizer.step()
    assert total == pytest.approx(expected_loss.item(), abs=1e-5)  # transformers computes cross-entropy in float32
    same(gradients(model), expected)
    assert handle.last == pytest.approx(whole, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("text", EVERY)
def test_evaluation_is_bare(text: str) -> None:
    model, data = language_model(), batch(padding="left")
    if text in {"scale", "spectral"}:
        return  # their weights are another function, in evaluation too
    bare = model.eval()(**data).loss
    handle = attach(model, text, seed=0)
    assert torch.equal(model(**data).loss, bare) or text == "sigma-reparam"
    assert_close(model(**data).loss, bare, rtol=1e-6, atol=1e-6)
    assert "total" not in handle.last


def hooks_of(model) -> list[tuple[str, list, list]]:
    return [(name, list(m._forward_hooks), list(m._forward_pre_hooks)) for name, m in model.named_modules()]


@pytest.mark.parametrize("text", [name for name in EVERY if name not in {"scale", "spectral", "sigma-reparam"}])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_remove_leaves_no_trace(text: str, kind: str) -> None:
    model, data = language_model(kind), batch(padding="right")
    before = hooks_of(model)
    loss, expected = step(model, data)
    if (text, kind) == ("rdrop", "llama"):
        with pytest.raises(UnsupportedModelError, match="dropout modules"):
            attach(model, text, seed=0)
    else:
        handle = attach(model, text, seed=0)
        model(**data).loss.backward()
        handle.remove()
        handle.remove()
    again, found = step(model, data)
    assert torch.equal(loss, again)
    same(found, expected, rtol=0, atol=0)
    assert hooks_of(model) == before
    assert "support_tokens" not in model._modules and "_loss_function" not in model.__dict__


@pytest.mark.parametrize("text", [*WITH_PENALTY, "noise", "dropout", "neftune"])
def test_checkpointing_has_the_same_gradient(text: str) -> None:
    data = batch(padding="right")
    model, _ = regularized(without_dropout(text))
    loss, expected = step(model, data)
    other, _ = regularized(without_dropout(text))
    other.activation_checkpointing_enable({"use_reentrant": False})
    if text == "sam":
        with pytest.raises(CaptureError, match="checkpointing must be off for SAM"):
            step(other, data)
        return
    other_loss, found = step(other, data)
    assert_close(loss, other_loss, **CLOSE)
    same(found, expected)


@pytest.mark.parametrize("text", [*WITH_PENALTY, "noise", "dropout", "neftune"])
def test_sixteen_bits_stay_finite(text: str) -> None:
    model, _ = regularized(text, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**batch(padding="right")).loss
    loss.backward()
    assert loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


@pytest.mark.parametrize("text", [*WITH_PENALTY, "noise", "decay", "smart:weight=0.2,every=2+spread:every=3"])
def test_a_run_that_is_taken_up_again_is_the_uninterrupted_one(text: str) -> None:
    def train(model, optimizer, steps: range) -> None:
        for number in steps:
            torch.manual_seed(number)
            model(**batch(seed=number)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    model, handle = regularized(text)
    optimizer = torch.optim.AdamW([*model.parameters()], lr=1e-2)
    train(model, optimizer, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), handle.state_dict()))
    train(model, optimizer, range(3, 6))
    again, taken = regularized(text, seed=7)
    fresh = torch.optim.AdamW([*again.parameters()], lr=1e-2)
    again.load_state_dict(saved[0])
    fresh.load_state_dict(saved[1])
    taken.load_state_dict(saved[2])
    train(again, fresh, range(3, 6))
    assert taken.step == handle.step == 6
    for (name, value), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(value, other), name


@pytest.mark.parametrize("name", [name for name in EVERY if hasattr(REGULARIZERS[name], "every")])
def test_a_penalty_every_few_steps_has_the_mean_of_every_step(name: str) -> None:
    """Over k steps on one batch at fixed weights, the sum of gradients is that of k steps with the penalty in each."""

    def summed(text: str) -> dict[str, Tensor]:
        model, _ = regularized(text)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(6):
            torch.manual_seed(0)
            model(**batch()).loss.backward()
            optimizer.step()
        return gradients(model)

    still = ",dropout=0" if name == "rdrop" else ",positions=0" if name == "scale-free" else ""
    same(summed(f"{name}:weight=0.3,every=3{still}"), summed(f"{name}:weight=0.3{still}"), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("text", ["spread", "scale-free", "decay"])
def test_a_penalty_on_frozen_embeddings_is_refused(text: str) -> None:
    model = language_model()
    model.requires_grad_(False)
    model.transformer.h[0].requires_grad_(True)
    with pytest.raises((CaptureError, UnsupportedModelError), match="must be trained"):
        attach(model, text)
    assert "support_tokens" not in model._modules


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("spreads", "a regularizer must be one of ce, barrier, spread"),
        ("spread:wieght=1", "an option of regularizer 'spread' must be one of weight, coupling, at, every"),
        ("spread:weight=-1", "weight must be a finite number of at least 0"),
        ("spread:weight=much", "must be written NAME=NUMBER"),
        ("spread:at=adversarial", "needs one adversary beside it, received none"),
        ("freelb+sam", "one regularizer may put another loss in the place of cross-entropy"),
        ("spread+spread", "must name each regularizer once"),
        ("barrier:layers=2", "go with source=model"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(text: str, words: str) -> None:
    model = language_model()
    with pytest.raises(ArgumentError, match=words) as refused:
        attach(model, text)
    assert "\n" not in str(refused.value)
    assert "support_tokens" not in model._modules


@pytest.mark.parametrize("text", ["scale", "spectral"])
def test_what_would_ruin_a_trained_model_is_refused(text: str) -> None:
    model = language_model()
    model.config.name_or_path = "somebody/model"
    model.name_or_path = "somebody/model"
    with pytest.raises(UnsupportedModelError, match="must be freshly initialised"):
        attach(model, text)


def test_cross_entropy_alone_is_bare() -> None:
    model, data = language_model(), batch()
    expected = step(model, data)
    attach(model, CrossEntropy())
    assert torch.equal(step(model, data)[0], expected[0])
    assert VOCABULARY > 1
