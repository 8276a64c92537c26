"""The penalty and the gradient of each regularizer against the textbook, in float64, on a tiny model."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import textbook_law as law
import textbook_rivals as rivals
from barrier_models import WIDTH, batch, language_model
from support_tokens import attach
from support_tokens.models import hook_embeddings
from support_tokens.regularizers import attached

CLOSE = {"rtol": 1e-6, "atol": 1e-7}  # transformers computes cross-entropy in float32
COUPLING = 0.8 / WIDTH**0.5


def drawn(shape: tuple[int, ...], kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    draw = torch.randn if kind == "normal" else torch.rand
    return draw(shape, generator=generator, dtype=torch.float64)


@pytest.fixture(autouse=True)
def known_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "randn_like", lambda x: drawn(tuple(x.shape), "normal").to(x.dtype))
    monkeypatch.setattr(torch, "rand_like", lambda x: drawn(tuple(x.shape), "uniform").to(x.dtype))


class Textbook:
    """A copy of the model whose embeddings may be shifted, and what the formulas need of a batch."""

    def __init__(self, model, data: dict[str, Tensor]) -> None:
        self.model, self.data = copy.deepcopy(model), data
        self.labels, self.mask = data["labels"], data.get("attention_mask")
        self.where, self.x = rivals.scored(self.labels), self.embeddings()
        self.normal, self.uniform = (drawn(tuple(self.x.shape), kind) for kind in ("normal", "uniform"))

    def logits(self, shift: Tensor) -> Tensor:
        hook = hook_embeddings(self.model, lambda x: x + shift)
        try:
            return self.model(input_ids=self.data["input_ids"], attention_mask=self.mask).logits
        finally:
            hook.remove()

    def embeddings(self) -> Tensor:
        seen: list[Tensor] = []
        hook = hook_embeddings(self.model, seen.append)
        self.model(input_ids=self.data["input_ids"], attention_mask=self.mask)
        hook.remove()
        return seen[0]

    @property
    def clean(self) -> Tensor:
        return rivals.cross_entropy(self.logits(torch.zeros_like(self.x)), self.labels)

    def rms(self) -> float:
        return rivals.root_mean_square(self.x.detach(), None if self.mask is None else self.mask.bool()).item()

    def valid(self) -> Tensor:
        return torch.ones_like(self.labels, dtype=torch.bool) if self.mask is None else self.mask.bool()


def of_tokens(values: Tensor, book: Textbook, counted: Tensor) -> Tensor:
    """Each sequence's mean over counted positions, weighted by its part of the real tokens."""
    means = torch.stack([law.mean_over(v[None], c[None]) for v, c in zip(values, counted, strict=True)])
    return (means * book.valid().sum(-1) / book.valid().sum()).sum()


def spread(book: Textbook) -> Tensor:
    counted = book.valid() & (book.valid().cumsum(-1) > 2)
    return of_tokens(law.spread(book.x, COUPLING, book.mask, zero="centring"), book, counted)


def scale_free(book: Textbook) -> Tensor:
    return of_tokens(law.scale_free_barrier(book.x, COUPLING, book.mask) / WIDTH, book, book.valid())


def smart(book: Textbook) -> Tensor:
    delta = rivals.smart_perturbation_per_position(book.logits, book.normal, book.x, 0.1, book.where, book.mask)
    return 0.5 * rivals.smart_penalty(book.logits, delta, book.where)


def alum(book: Textbook) -> Tensor:
    bound = 0.1 * book.rms()
    delta = rivals.alum_perturbation(
        book.logits, book.normal, book.where, sigma=1e-2 * bound, step_size=bound, epsilon=bound, steps=2
    )
    return rivals.alum_penalty(book.logits, delta, 1.0, book.where)


def freelb(book: Textbook) -> Tensor:
    norm = book.rms() * (book.labels.shape[1] * WIDTH) ** 0.5
    loss, _ = rivals.freelb_loss(
        book.logits,
        book.labels,
        2 * book.uniform - 1,
        steps=3,
        step_size=0.05 * norm,
        max_norm=0.06 * norm,
        init=0.02 * norm,
    )
    return loss - book.clean


def sdbn(book: Textbook) -> Tensor:
    delta = rivals.sdbn_perturbation(book.logits, book.labels, book.x, 0.05 * book.rms())
    return rivals.cross_entropy(book.logits(delta), book.labels) - book.clean


def r_drop(book: Textbook) -> Tensor:
    logits = book.logits(torch.zeros_like(book.x))
    return rivals.r_drop_loss(logits, logits, book.labels, 1.0, book.where) - book.clean


MEMBERS: dict[str, tuple[str, Callable[[Textbook], Tensor], str]] = {
    "spread": ("spread:weight=0.3", spread, "right"),
    "scale-free": ("scale-free:weight=0.3,positions=0", scale_free, "right"),
    "smart": ("smart:weight=0.3", smart, "right"),
    "alum": ("alum:weight=0.3,steps=2", alum, ""),
    "freelb": ("freelb:weight=0.3,steps=3,step=0.05,radius=0.06,start=0.02", freelb, ""),
    "freelb alone": ("freelb:steps=3,step=0.05,radius=0.06,start=0.02", freelb, ""),
    "sdbn": ("sdbn:weight=0.3", sdbn, ""),
    "rdrop": ("rdrop:weight=0.3,dropout=0", r_drop, "right"),
}


@pytest.mark.parametrize("name", MEMBERS)
def test_penalty_and_gradient_are_those_of_the_textbook(name: str) -> None:
    text, formula, padding = MEMBERS[name]
    model, data = language_model(), batch(padding=padding)
    book = Textbook(model, data)
    handle = attach(model, text, seed=0)
    model(**data).loss.backward()
    key, weight = handle.terms[0].name, handle.last[f"{handle.terms[0].name}.weight"]
    expected = formula(book)
    assert handle.last[f"{key}.penalty"] == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
    (book.clean + weight * expected).backward()
    for (label, found), (_, other) in zip(model.named_parameters(), book.model.named_parameters(), strict=True):
        assert_close(found.grad, other.grad, rtol=1e-4, atol=1e-6, msg=lambda m, label=label: f"{label}: {m}")


def test_sharpness_aware_gradient_is_that_of_the_textbook() -> None:
    model, data = language_model(), batch()
    bare = copy.deepcopy(model)
    names = [name for name, _ in bare.named_parameters()]

    def loss(parameters) -> Tensor:
        output = torch.func.functional_call(bare, dict(zip(names, parameters, strict=True)), kwargs=data)
        return rivals.cross_entropy(output.logits, data["labels"])

    expected, _ = rivals.sam_gradients(loss, [p for _, p in bare.named_parameters()], 0.05)
    attach(model, "sam:radius=0.05")
    model(**data).loss.backward()
    for (name, parameter), gradient in zip(model.named_parameters(), expected, strict=True):
        assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("unit", ["relative", "absolute"])
def test_noise_is_that_of_the_textbook(unit: str) -> None:
    model, data = language_model(), batch(padding="right")
    book = Textbook(model, data)
    shift = (
        rivals.relative_gaussian_noise(book.normal, book.x.detach(), 0.2, book.mask)
        if unit == "relative"
        else rivals.gaussian_noise(book.normal, 0.2)
    )
    expected = rivals.cross_entropy(book.logits(shift), book.labels)
    attach(model, f"noise:scale=0.2,unit={unit}")
    assert_close(model(**data).loss.double(), expected, **CLOSE)


def test_a_penalty_at_the_adversary_reads_the_embeddings_under_its_noise() -> None:
    """The combination that led the first contest: SMART, and a bound on the embeddings of SMART's own pass."""
    model, data = language_model(), batch()
    book = Textbook(model, data)
    handle = attach(model, "spread:weight=0.02,at=adversarial+smart:weight=0.15", seed=0)
    model(**data).loss.backward()
    delta = rivals.smart_perturbation_per_position(book.logits, book.normal, book.x, 0.1, book.where, book.mask)
    under = law.spread(book.x + delta, COUPLING, None, zero="centring")
    expected = of_tokens(under, book, book.valid() & (book.valid().cumsum(-1) > 2))
    assert handle.last["spread.penalty"] == pytest.approx(expected.item(), rel=1e-5)
    clean = spread(book).item()
    assert abs(clean - expected.item()) > 1e-4
    handle.remove()
    handle = attach(model, "spread:weight=0.02+smart:weight=0.15", seed=0)
    model(**data).loss.backward()
    assert handle.last["spread.penalty"] == pytest.approx(clean, rel=1e-5)
    assert attached(model) is not None


@pytest.mark.parametrize(("width", "length"), [(64, 32), (64, 512), (576, 128), (2048, 64)])
def test_spread_of_random_embeddings_is_near_zero_at_every_width_and_length(width: int, length: int) -> None:
    from support_tokens.regularizers import repulsive_state, token_spread

    x = torch.randn(1, length, width, generator=torch.Generator().manual_seed(0))
    state = repulsive_state(x, 0.8 / width**0.5, torch.ones(1, length, dtype=torch.bool))
    found = token_spread(state)[0, length // 2 :]
    assert found.mean().abs() < 0.03
