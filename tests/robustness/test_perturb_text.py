"""Typos and other text: targets stay clean and aligned, draws are nested, and everything is the same for all arms."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from support_tokens.errors import ArgumentError
from support_tokens.robustness import EvaluationData, measure
from support_tokens.robustness.perturbations import (
    Batch,
    Clean,
    DomainShift,
    PerturbationSet,
    TokenDrop,
    Typos,
    chosen_perturbations,
    misspell,
)

OPERATIONS = ("replace", "drop", "insert", "swap", "mixed")
PINNED = ([0, 1, 11, 2, 3, 5, 4, 3, 8, 7, 9, 10], [0, 1, -100, 2, 3, 4, -100, 6, 7, -100, 9, 10])


def model(seed: int = 0) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=30, n_positions=16, initializer_range=0.3)
    ).eval()


def ids(n: int = 5, length: int = 16) -> torch.Tensor:
    return torch.randint(0, 30, (n, length), generator=torch.Generator().manual_seed(1))


def batch(rows: list[int], spelling=None, source: torch.Tensor | None = None) -> Batch:
    chosen = (ids() if source is None else source)[rows]
    return Batch(torch.tensor(rows), chosen, torch.ones_like(chosen), chosen, spelling=spelling)


def read(perturbation, of: Batch) -> Batch:
    with perturbation.applied(model(), 1.0) as reader:
        return reader(of)


class Words:
    """Tokens of one to three letters; token 3 is part of a character and has no text of its own."""

    words = ("a", "b", "ab", "\ufffd", "abc", "c", " ", " a")

    def text(self, token: int) -> str:
        return self.words[token]

    def tokens(self, text: str) -> list[int]:
        if text == "\ufffd":
            return [7, 7]
        found = []
        while text:
            longest = max((w for w in self.words if text.startswith(w)), key=len)
            found.append(self.words.index(longest))
            text = text[len(longest) :]
        return found


def test_each_operation_does_what_it_says():
    clean = [10, 11, 12, 13]
    forms = {o: misspell(clean, 1.0, o, np.random.default_rng(0))[0] for o in OPERATIONS[:4]}
    assert forms["drop"] == [[10], [], [], []]
    assert forms["swap"] == [[10], [12], [11], [13]]
    assert forms["replace"][0] == [10] and all(f != [c] for f, c in zip(forms["replace"][1:], clean[1:], strict=True))
    assert all(f[0] == c and len(f) == 2 for f, c in zip(forms["insert"][1:], clean[1:], strict=True))
    assert {symbol for form in forms["insert"] + forms["replace"] for symbol in form} <= set(clean)


def test_a_reader_is_asked_for_clean_tokens_given_what_stands_before_them():
    source = torch.arange(10, 16)[None]
    dropped = read(Typos(1.0, "drop"), batch([0], source=source))
    assert dropped.input_ids[0, :1].tolist() == [10] and dropped.attention_mask[0].tolist() == [1, 0, 0, 0, 0, 0]
    assert dropped.labels[0].tolist() == [10, 11, -100, -100, -100, -100]
    swapped = read(Typos(1.0, "swap"), batch([0], source=source))
    assert swapped.input_ids[0].tolist() == [10, 12, 11, 14, 13, 15]
    assert swapped.labels[0].tolist() == [10, 11, -100, 13, -100, 15]
    replaced = read(Typos(1.0, "replace"), batch([0], source=source))
    assert replaced.labels[0].tolist() == source[0].tolist() and (replaced.input_ids[0, 1:] != source[0, 1:]).all()
    inserted = read(Typos(1.0, "insert"), batch([0], source=source))
    assert inserted.labels[0].tolist() == [10, 11, -100, 12, -100, 13]
    assert inserted.input_ids[0, [0, 1, 3, 5]].tolist() == [10, 11, 12, 13]


@given(share=st.floats(0.01, 1.0), operation=st.sampled_from(OPERATIONS), seed=st.integers(0, 1000))
def test_no_target_is_corrupt_and_none_is_shown_before_it(share, operation, seed):
    source = torch.arange(20)[None]  # every token once, so that a token tells its place
    found = read(Typos(share, operation, seed), batch([0], source=source))
    shown = found.input_ids[0].tolist()
    for place, label in enumerate(found.labels[0].tolist()):
        # A replaced or inserted character is one of the same text, and may be the very one that is asked for.
        assert operation in ("replace", "insert", "mixed") or label not in shown[:place]
    labels = [label for label in found.labels[0].tolist() if label != -100]
    assert labels == sorted(set(labels)), "clean order, each once"
    assert int(found.units[0].sum()) == len(labels)


@pytest.mark.parametrize("operation", ["replace", "drop", "insert", "swap"])
def test_what_is_hit_at_one_share_is_hit_at_every_larger_one(operation):
    of = ids(1, 400)[0].tolist()
    draws = lambda: np.random.default_rng(3)  # noqa: E731
    hits = []
    for share in (0.01, 0.05, 0.1):
        forms, _ = misspell(of, share, operation if operation != "swap" else "replace", draws())
        hits.append({place for place, form in enumerate(forms) if form != [of[place]]})
    assert hits[0] < hits[1] < hits[2]
    assert len(hits[2]) == pytest.approx(40, abs=20)


def test_typos_depend_on_the_sequence_and_not_on_the_batch():
    typos = Typos(0.3)
    whole = read(typos, batch([0, 1, 2, 3]))
    parts = [read(typos, batch(rows)) for rows in ([0], [1, 2, 3])]
    for name in ("input_ids", "attention_mask", "labels", "units"):
        assert torch.equal(getattr(whole, name), torch.cat([getattr(part, name) for part in parts]))
    assert not torch.equal(whole.input_ids, read(Typos(0.3, seed=1), batch([0, 1, 2, 3])).input_ids)


def test_typos_are_pinned():
    # The set is frozen by its checksum, which only holds while these very characters are hit.
    found = read(Typos(0.7, "mixed", seed=0), batch([0], source=torch.arange(12)[None]))
    assert found.input_ids[0].tolist() == PINNED[0]
    assert found.labels[0].tolist() == PINNED[1]


def test_nats_are_those_of_a_loop_over_targets():
    one, typos = model(), Typos(0.4)
    data = EvaluationData(ids(), characters=1)
    measured = measure(one, data, PerturbationSet((typos,)))
    for row in range(5):
        found, nats = read(typos, batch([row])), 0.0
        for place in range(1, 16):
            label = int(found.labels[0, place])
            if label != -100:  # nothing but what stands before it is given to the model
                logits = one(input_ids=found.input_ids[:, :place]).logits[0, -1].detach().double()
                nats -= float(logits.log_softmax(-1)[label])
        assert measured.nats[typos.name][row] == pytest.approx(nats, rel=1e-5)
        assert measured.units[typos.name][row] == int((found.labels[:, 1:] != -100).sum())


def test_tokens_of_many_characters_are_spelled_again_and_keep_their_place():
    source = torch.tensor([[0, 4, 3, 6, 2, 4, 5, 7]])
    found = read(Typos(1.0, "insert"), batch([0], Words(), torch.cat([source, source], 1)))
    shown, labels = found.input_ids[0].tolist(), found.labels[0].tolist()
    assert labels[1] == 4 and shown[0] == 0
    spelled = "".join(Words().text(token) for token in shown[1 : labels.index(3)])
    assert len(spelled) == 6 and spelled[::2] == "abc", "a letter after each of its letters"
    assert shown[labels.index(3)] == 3, "what cannot be spelled is left alone"
    swapped = read(Typos(1.0, "swap"), batch([0], Words(), torch.tensor([[0, 4, 2, 6]])))
    # a|abc|ab|_ becomes a|baa|c_|b, cut at the length of the clean text.
    assert swapped.input_ids[0].tolist() == [0, 1, 0, 0]
    assert swapped.labels[0].tolist() == [0, 4, -100, -100]


def test_padding_is_never_edited():
    data, mask = ids(2), torch.ones(2, 16, dtype=torch.long)
    mask[1, 6:] = 0
    padded = measure(model(), EvaluationData(data, mask, 1), PerturbationSet((Typos(0.5), TokenDrop(0.5))))
    other = measure(model(), EvaluationData(data * mask, mask, 1), PerturbationSet((Typos(0.5), TokenDrop(0.5))))
    for name in padded.nats:
        np.testing.assert_allclose(padded.nats[name], other.nats[name], rtol=1e-6)


def test_dropped_tokens_are_zero_and_nested():
    seen = {}
    of, one = batch([0, 1]), model()
    for share in (0.2, 0.6):
        hidden = []
        with TokenDrop(share).applied(one, 1.0) as reader, torch.no_grad():
            handle = one.transformer.h[0].register_forward_pre_hook(
                lambda _m, args, hidden=hidden: hidden.append(args[0])
            )
            one(input_ids=reader(of).input_ids)
            handle.remove()
        seen[share] = (hidden[0] == 0).all(-1)
        clean = one.transformer.wte(of.input_ids) + one.transformer.wpe(torch.arange(16))
        torch.testing.assert_close(hidden[0][~seen[share]], clean[~seen[share]])
    assert (seen[0.2] <= seen[0.6]).all() and seen[0.2].sum() < seen[0.6].sum()


def test_other_text_takes_the_place_of_the_data():
    text = DomainShift.of("sermons", ids(5) // 2, torch.full((5, 16), 2))
    measured = measure(model(), EvaluationData(ids(), characters=1), PerturbationSet((text,)))
    alone = measure(model(), EvaluationData(ids(5) // 2), PerturbationSet((Clean(),)))
    np.testing.assert_allclose(measured.nats[text.name], alone.nats["clean"], rtol=1e-6)
    assert measured.units[text.name].tolist() == [30.0] * 5 and measured.tokens[text.name].tolist() == [15.0] * 5
    described = PerturbationSet.from_record(PerturbationSet((text,)).record())
    assert described == PerturbationSet((text,))
    with pytest.raises(ArgumentError, match="received its checksum only"):
        measure(model(), EvaluationData(ids()), described)
    with pytest.raises(ArgumentError, match="as many sequences as the evaluation data, received 2"):
        measure(model(), EvaluationData(ids()), PerturbationSet((DomainShift.of("short", ids(2)),)))


def test_families_make_a_set_that_goes_through_json():
    chosen = chosen_perturbations(("noise", "worst-case", "typos", "typos-by-kind", "token-drop", "rounding"), (0.5,))
    assert PerturbationSet.from_record(chosen.record()) == chosen
    assert len({p.family for p in chosen.items}) == 1 + 2 + 4 + 1 + 4 + 1 + 1
    with pytest.raises(ArgumentError, match=r"A family of perturbations must be one of noise, .*received 'earthquake'"):
        chosen_perturbations(("earthquake",))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Typos(0.0), "share of typos must be a number above 0 and at most 1, received 0.0"),
        (lambda: Typos(0.1, "shout"), r"operation of typos must be one of mixed, .*received 'shout'"),
        (lambda: Typos(0.1, seed=-1), "seed of typos"),
        (lambda: TokenDrop(1.5), r"share of dropped tokens .* received 1.5"),
    ],
)
def test_bad_perturbations_are_refused(make, says):
    with pytest.raises(ArgumentError, match=says):
        make()
