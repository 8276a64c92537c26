"""Generation: what each text is told with is what scoring the finished text says, whatever stood beside it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import DynamicCache

from generating import PROMPTS, TOKENIZER, endless
from support_tokens.errors import ArgumentError, RunFolderError
from support_tokens.generation import MarginMinP, MarginProcessor, MarginTemperature, RowSampler, generate
from support_tokens.generation.signals import TOKEN_SIGNALS, score_tokens
from support_tokens.law import EmbeddingPrior
from support_tokens.models import character_tokenizer, model_margins
from support_tokens.report.records import Generation, GenerationRecord
from tiny_models import tiny_model

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def ids_of(text: Generation) -> Tensor:
    return torch.tensor([[*TOKENIZER(text.prompt)["input_ids"], *(token.id for token in text.tokens)]])


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "gemma2", "gpt_oss", "olmo2", "opt"])
def test_signals_are_those_of_the_finished_text_read_alone_and_at_once(family: str) -> None:
    # In float64 the eager attention of gemma2 makes NaN of padding, by itself.
    model = endless(family, dtype=torch.float32 if family == "gemma2" else torch.float64)
    law = EmbeddingPrior(model.config.hidden_size, 2, generator=torch.Generator().manual_seed(0)).double()
    options = {"layers": (0, 1), "signals": list(TOKEN_SIGNALS), "law": law}
    for text in generate(model, TOKENIZER, PROMPTS, max_new_tokens=6, **options):
        alone = model.generate(ids_of(text)[:, : text.prompt_tokens], do_sample=False, max_new_tokens=6)
        assert torch.equal(ids_of(text), alone)
        found = score_tokens(model, alone, prompt_lengths=text.prompt_tokens, **options)
        assert found.keys() == text.tokens[0].signals.keys()
        for name, value in found.items():
            written = torch.tensor([token.signals[name] for token in text.tokens], dtype=value.dtype)
            assert_close(written, value[0, text.prompt_tokens - 1 : -1], **CLOSE, msg=lambda m, n=name: f"{n}: {m}")


def test_draws_do_not_depend_on_the_batch() -> None:
    model = endless()
    draws = {"do_sample": True, "temperature": 1.3, "top_k": 20, "top_p": 0.99, "min_p": 0.001, "max_new_tokens": 8}
    adapt = MarginTemperature(pivot=1.0, slope=0.5)
    batch = generate(model, TOKENIZER, PROMPTS, seed=7, margin_rule=adapt, **draws)
    for row, text in enumerate(batch):
        (alone,) = generate(model, TOKENIZER, text.prompt, seed=[7 + row], margin_rule=adapt, **draws)
        assert alone.text == text.text
    assert len({text.text for text in generate(model, TOKENIZER, ["a"] * 3, **draws)}) == 3
    (best,) = generate(model, TOKENIZER, "a", do_sample=True, top_k=1, max_new_tokens=8)
    assert best.text == generate(model, TOKENIZER, "a", max_new_tokens=8)[0].text


def test_tokens_are_drawn_as_often_as_they_are_probable() -> None:
    logits = torch.tensor([0.5, 0.0, 0.2, 0.3]).log()
    drawn = RowSampler(range(4000))(torch.zeros(1), logits.expand(4000, -1)).argmax(-1).bincount(minlength=4) / 4000
    assert_close(drawn, logits.exp(), rtol=0, atol=0.04)
    assert drawn[1] == 0


def test_a_rule_is_told_the_margin_of_the_position() -> None:
    seen: list[Tensor] = []

    def rule(scores: Tensor, log_margin: Tensor) -> Tensor:
        seen.append(log_margin)
        return scores

    model = endless()
    texts = generate(model, TOKENIZER, PROMPTS, max_new_tokens=4, layers=(1, 0), margin_rule=rule)
    for row, text in enumerate(texts):
        expected = torch.tensor([token.signals["NegativeLogMargin (layer=1)"] for token in text.tokens])
        assert_close(-torch.stack(seen)[:, row], expected.double(), **CLOSE)
    inputs = TOKENIZER(PROMPTS, padding=True, padding_side="left", return_tensors="pt")
    kept, seen = seen, []
    with MarginProcessor(model, rule, layer=1) as adapt:
        model.generate(
            inputs["input_ids"], attention_mask=inputs["attention_mask"], do_sample=False, max_new_tokens=4,
            logits_processor=[adapt],
        )  # fmt: skip
        # Another text, as long as the first would have become: it begins anew.
        model.generate(
            torch.full((3, inputs["input_ids"].shape[1] + 4), 5), do_sample=False, max_new_tokens=2,
            logits_processor=[adapt],
        )  # fmt: skip
    assert_close(torch.stack(seen[:4]), torch.stack(kept), **CLOSE)
    assert len(seen) == 6


def test_beams_are_refused() -> None:
    model = endless()
    with pytest.raises(ArgumentError, match="signals would mix texts"):
        generate(model, TOKENIZER, "a", num_beams=2)
    with MarginProcessor(model, MarginMinP()) as adapt, pytest.raises(ArgumentError, match="reordered"):
        model.generate(
            torch.tensor([[3, 4]]), do_sample=False, num_beams=4, max_new_tokens=12, logits_processor=[adapt]
        )


@pytest.mark.parametrize("passed_before", [False, True])
def test_candidates_that_the_model_has_not_read_are_refused(passed_before: bool) -> None:
    """Prompt lookup asks processors about tokens before the model reads them: a margin would be that of another one."""
    model, ids = endless(), torch.tensor([[3, 4, 5, 6, 3, 4, 5, 6, 3, 4]])
    reason = "assisted decoding and prompt lookup do not"
    with MarginProcessor(model, MarginMinP()) as adapt, torch.no_grad():
        if passed_before:
            model(ids)
        with pytest.raises(ArgumentError, match=reason):
            model.generate(ids, do_sample=False, max_new_tokens=6, prompt_lookup_num_tokens=3, logits_processor=[adapt])


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma3"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_second_turn_goes_on_from_the_cache(family: str, count: int) -> None:
    """Each margin is that of the last token of the text so far, also where a cache of a sliding window forgets."""
    model = tiny_model(family)
    model.generation_config.eos_token_id = None
    ids, seen = torch.tensor([[3, 4, 5, 6, 7, 8]]).repeat(count, 1), []

    class Noting(MarginProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            scores = super().__call__(input_ids, scores)
            seen.append((input_ids.clone(), self.log_margin))
            return scores

    options = {"do_sample": False, "max_new_tokens": 3, "pad_token_id": 0}
    with Noting(model, lambda scores, _margin: scores) as adapt:
        cache = DynamicCache(config=model.config)
        first = model.generate(ids, logits_processor=[adapt], cache=cache, **options)
        turn = torch.cat((first, torch.tensor([[3, 5]]).repeat(count, 1)), dim=1)
        model.generate(turn, logits_processor=[adapt], cache=cache, **options)
    assert len(seen) == 6
    for text, margin in seen:
        assert_close(margin, model_margins(model, text)[0].log_abs_det[:, -1], **CLOSE)


def test_a_text_abstains_before_the_token_over_the_threshold() -> None:
    model = endless()
    free = generate(model, TOKENIZER, PROMPTS, max_new_tokens=8)
    values = [[token.signals["TokenEntropy"] for token in text.tokens] for text in free]
    limit = sorted(values[1])[4]
    for text, before, own in zip(
        generate(model, TOKENIZER, PROMPTS, max_new_tokens=8, stop_above={"TokenEntropy": limit, "RAUQ": 1e9}),
        free, values, strict=True,
    ):  # fmt: skip
        over = [t for t, value in enumerate(own) if value > limit]
        kept = over[0] if over else 8
        assert [token.id for token in text.tokens] == [token.id for token in before.tokens[:kept]]
        assert before.text.startswith(text.text)
        if over:
            assert text.finish_reason == "abstained"
            assert f"before token {kept + 1}: TokenEntropy was {own[kept]:.4g}, above {limit:g}" in text.sentence
        else:
            assert f"TokenEntropy never rose above {limit:g}: it was at most {max(own):.4g}" in text.sentence
            assert "RAUQ (layer=0) never rose above 1e+09" in text.sentence


@pytest.mark.parametrize("limit", [99.0, float("inf")])
def test_a_signal_that_is_no_number_is_below_no_threshold(limit: float, monkeypatch) -> None:
    signal = replace(TOKEN_SIGNALS["TokenEntropy"], of=lambda q: torch.full_like(q["entropy"], torch.nan))
    monkeypatch.setitem(TOKEN_SIGNALS, "TokenEntropy", signal)
    (text,) = generate(endless(), TOKENIZER, "a", max_new_tokens=3, stop_above={"TokenEntropy": limit})
    assert (text.finish_reason, text.tokens) == ("abstained", ())
    assert "TokenEntropy was nan, where a number is required" in text.sentence


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("made", [torch.nan, -torch.inf])
def test_no_token_is_chosen_from_what_a_rule_leaves_without_numbers(sampled: bool, made: float) -> None:
    def rule(scores: Tensor, log_margin: Tensor) -> Tensor:
        return scores.index_fill(0, torch.tensor([1]), made)

    texts = generate(endless(), TOKENIZER, PROMPTS, max_new_tokens=2, margin_rule=rule, do_sample=sampled)
    assert [text.finish_reason for text in texts] == ["length", "nonfinite", "length"]
    assert texts[1].tokens == ()


def test_padding_needs_no_token_that_the_model_has() -> None:
    model, tokenizer = endless(), character_tokenizer("abcdefghijklmnopqrst ")
    plain = generate(model, TOKENIZER, PROMPTS, max_new_tokens=3)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer.pad_token_id >= model.config.vocab_size
    assert generate(model, tokenizer, PROMPTS, max_new_tokens=3) == plain


def test_an_end_token_ends_its_text_alone() -> None:
    model = endless()
    free = generate(model, TOKENIZER, PROMPTS, max_new_tokens=8)
    end = free[1].tokens[2].id
    model.generation_config.eos_token_id = [end]
    for text, before in zip(generate(model, TOKENIZER, PROMPTS, max_new_tokens=8), free, strict=True):
        ids = [token.id for token in before.tokens]
        kept = ids[: ids.index(end) + 1] if end in ids else ids
        assert [token.id for token in text.tokens] == kept
        assert text.finish_reason == ("end" if end in ids else "length")
    assert "has no end token" in free[0].sentence


def test_logits_that_are_no_numbers_end_their_text_and_no_other() -> None:
    model = endless()
    free = generate(model, TOKENIZER, PROMPTS, max_new_tokens=6)
    calls = []

    def poison(_module, _args, logits: Tensor) -> Tensor:
        calls.append(0)
        logits[1, -1, 0] = torch.nan if len(calls) > 3 else logits[1, -1, 0]
        return logits

    handle = model.lm_head.register_forward_hook(poison)
    texts = generate(model, TOKENIZER, PROMPTS, max_new_tokens=6, do_sample=False, margin_rule=MarginMinP())
    handle.remove()
    assert [text.finish_reason for text in texts] == ["length", "nonfinite", "length"]
    assert [text.tokens for text in texts] == [free[0].tokens, free[1].tokens[:3], free[2].tokens]
    assert "before token 4, whose logits are not finite" in texts[1].sentence


def test_an_interrupt_keeps_what_was_written() -> None:
    pieces: list[str] = []

    def interrupt(at: int) -> Callable:
        def on_token(row: int, token) -> None:
            pieces.append(token.text)
            if len(pieces) == at:
                raise KeyboardInterrupt

        return on_token

    model = endless()
    (text,) = generate(model, TOKENIZER, "a", max_new_tokens=8, on_token=interrupt(3))
    assert (text.text, text.finish_reason, len(text.tokens)) == ("".join(pieces), "interrupted", 3)
    assert "interrupted after 3 tokens" in text.sentence

    def at_once(*_args) -> None:
        raise KeyboardInterrupt

    handle = model.lm_head.register_forward_hook(at_once)
    with pytest.raises(KeyboardInterrupt):
        generate(model, TOKENIZER, "a", max_new_tokens=8)
    handle.remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("kind", ["level", "fallback"])
@pytest.mark.parametrize(
    ("prompt", "written", "pieces"),
    [
        (b"b", "éa".encode(), ["", "é", "a"]),
        (b"b", "€😀".encode(), ["", "", "€", "", "", "", "😀"]),
        # A prompt that ends inside of a character, and one whose last ids begin inside of one.
        (b"b\xc3", b"\xa9a", ["é", "a"]),
        (b"b\xe2\x82", b"\xaca", ["€", "a"]),
        ("b😀é".encode(), "é".encode(), ["", "é"]),
    ],
)
def test_characters_of_several_tokens_are_streamed_whole(kind, prompt, written, pieces) -> None:
    """Tokens are bytes: pieces make up the text, and hold no sign of a character that was not complete yet."""
    from tokenizers import Tokenizer, decoders, models
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    used = sorted({*prompt, *written})
    if kind == "level":
        shown = [c for c, _ in ByteLevel(add_prefix_space=False).pre_tokenize_str((prompt + written).decode())]
        names = dict(zip(prompt + written, "".join(shown), strict=True))
        decoder = decoders.ByteLevel()
    else:
        names, decoder = (
            {b: chr(b) if b < 128 else f"<0x{b:02X}>" for b in used},
            decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]),
        )
    vocabulary = {"<unk>": 0, **{names[b]: place for place, b in enumerate(used, 1)}}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.decoder = decoder
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    ids = {b: place for place, b in enumerate(used, 1)}
    model, found = endless(), []

    def force(_module, _args, logits: Tensor) -> Tensor:
        logits[..., ids[written[min(len(found), len(written) - 1)]]] = 1e3
        return logits

    model.lm_head.register_forward_hook(force)
    given = [[ids[b] for b in prompt]]
    (text,) = generate(
        model, tokenizer, given, max_new_tokens=len(written), signals=["TokenEntropy"],
        on_token=lambda _, token: found.append(token.text),
    )  # fmt: skip
    assert (found, text.text) == (pieces, "".join(pieces))


def test_rules_by_hand() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    cold = MarginTemperature(pivot=1.0, slope=0.25, lowest=0.5)(logits, torch.tensor([0.0]))
    assert_close(cold, logits / 0.75)
    assert_close(MarginTemperature(pivot=1.0, slope=0.25, lowest=0.5)(logits, torch.tensor([-9.0])), logits / 0.5)
    few = MarginMinP(pivot=1.0, slope=0.5, highest=0.9)(logits, torch.tensor([0.0]))
    assert few.isfinite().tolist() == [[True, True, False]]
    assert torch.equal(MarginMinP()(logits, torch.tensor([2.0])), logits)


def test_a_record_goes_to_json_and_back(tmp_path) -> None:
    texts = generate(endless(), TOKENIZER, PROMPTS, max_new_tokens=2)
    record = GenerationRecord("tiny", tuple(texts), {"seed": "0"}, {"torch": "2"})
    record.to_json(tmp_path / "g.json")
    assert GenerationRecord.from_json(tmp_path / "g.json") == record
    (tmp_path / "g.json").write_text('{"schema_version": 1, "kind": "benchmark"}')
    with pytest.raises(RunFolderError, match="generation"):
        GenerationRecord.from_json(tmp_path / "g.json")


@pytest.mark.parametrize(
    ("prompts", "options", "match"),
    [
        ("", {}, "prompt 0 must have at least one token"),
        ([], {}, "at least one prompt"),
        (["a", []], {}, "prompt 1 must have at least one token"),
        ([[23]], {}, "ids from 0 to 22, received 23"),
        ("a" * 60, {"max_new_tokens": 5}, "received 60 tokens and max_new_tokens = 5"),
        ([3, 4], {}, r"pass \[ids\] for the token ids of one prompt"),
        (None, {}, "prompts must be a text"),
        ([[3.5]], {}, "prompt 0 must be a text or whole numbers"),
        ([["a"]], {}, "prompt 0 must be a text or whole numbers"),
        ([[-1]], {}, "ids from 0 to 22, received -1"),
        ("a\udcff", {}, "half a surrogate pair at position 1"),
        ("a", {"max_new_tokens": 0}, "max_new_tokens must be a whole number, at least 1"),
        ("a", {"max_new_tokens": 2.5}, "max_new_tokens must be a whole number, at least 1"),
        ("a", {"top_k": 2.5}, "top_k must be a whole number"),
        ("a", {"seed": 2.5}, "seed must be whole numbers"),
        ("a", {"seed": 2**64}, "seed must be whole numbers"),
        ("a", {"stop_above": {"TokenEntropy": None}}, "stop_above must give a number"),
        ("a", {"temperature": 0.0}, "temperature must be"),
        ("a", {"top_p": 1.5}, "top_p must be"),
        ("a", {"top_k": 0}, "top_k must be"),
        ("a", {"min_p": -0.1}, "min_p must be"),
        ("a", {"seed": [1, 2]}, "one a prompt, received 2 for 1"),
        ("a", {"signals": ["Margin"]}, "signals may name"),
        ("a", {"stop_above": {"Margin": 1.0}}, "signals may name"),
        ("a", {"stop_above": {"NegativeLogMargin (layer=1)": 1.0}}, "stop_above must give a number to one of"),
        ("a", {"stop_above": {"TokenEntropy": float("nan")}}, "stop_above must give a number"),
        ("a", {"layers": (2,)}, "layers must be"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(prompts, options, match) -> None:
    with pytest.raises(ArgumentError, match=match):
        generate(endless(), TOKENIZER, prompts, **{"max_new_tokens": 8, **options})


@pytest.mark.parametrize("made", [lambda: MarginTemperature(slope=-1), lambda: MarginMinP(highest=0)])
def test_rules_refuse_numbers_out_of_range(made) -> None:
    with pytest.raises(ArgumentError, match="must have slope >= 0 and"):
        made()
