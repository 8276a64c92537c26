"""How people really train: accumulation, checkpointing, 16 bits, padding, packing, a cache; one gradient, whatever."""

import pytest
import torch
from torch.testing import assert_close

from barrier_models import KINDS, SOURCES, attached, batch, gradients, language_model, unless_refused
from support_tokens import CaptureError
from support_tokens.margins import state_margins
from support_tokens.models import capture_attention

both = pytest.mark.parametrize("source", SOURCES)
every = pytest.mark.parametrize("kind", KINDS)
CLOSE = {"rtol": 1e-6, "atol": 1e-8}  # transformers computes cross-entropy in float32


def equal(found: dict, expected: dict, **tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert_close(found[name], expected[name], **{**CLOSE, **tolerance}, msg=lambda m, name=name: f"{name}: {m}")


def ragged() -> dict[str, torch.Tensor]:
    """Seven rows: prompts without labels, padding on the right, one row that has no label at all."""
    data = batch(7, 8, padding="right")
    data["labels"][:, :2] = -100
    data["labels"][4] = -100
    return data


@every
@both
@pytest.mark.parametrize("penalty", ["log", "hinge"])
def test_any_split_into_micro_batches_has_one_gradient(kind: str, source: str, penalty: str) -> None:
    data, found = ragged(), {}
    items = (data["labels"][:, 1:] != -100).sum()
    options = {"target_margin": 1.0} if penalty == "hinge" else {}
    for parts in (1, 2, 4, 7):
        model = language_model(kind)
        attached(model, source, penalty=penalty, **options)
        size = -(-7 // parts)
        losses = []
        for start in range(0, 7, size):  # 7; 4 + 3; 2 + 2 + 2 + 1; one by one
            micro = {name: tensor[start : start + size] for name, tensor in data.items()}
            losses.append(model(**micro, num_items_in_batch=items).loss)
            losses[-1].backward()
        found[parts] = (sum(loss.item() for loss in losses), gradients(model))
    for parts in (2, 4, 7):
        assert found[parts][0] == pytest.approx(found[1][0], abs=1e-6)
        equal(found[parts][1], found[1][1])


@every
@both
def test_eight_micro_batches_of_eight_sequences(kind: str, source: str) -> None:
    data, found = batch(8, 6), {}
    for parts in (1, 8):
        model = language_model(kind)
        attached(model, source)
        for rows in range(parts):
            micro = {name: tensor[rows::parts] for name, tensor in data.items()}
            (model(**micro).loss / parts).backward()  # equal micro-batches: the plain mean of means is the mean
        found[parts] = gradients(model)
    equal(found[8], found[1])


@every
@both
def test_checkpointing_counts_the_penalty_once_with_the_right_gradient(kind: str, source: str) -> None:
    data, found = batch(padding="right"), {}
    for checkpointing in (False, True):
        model = language_model(kind)
        handle = attached(model, source, layer=(0, 1) if source == "model" else 0)
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        loss = model(**data, use_cache=False).loss
        loss.backward()
        found[checkpointing] = (loss, gradients(model), handle.last, handle.step)
    assert found[True][3] == found[False][3] == 1
    assert torch.equal(found[True][0], found[False][0])
    assert found[True][2] == found[False][2]
    equal(found[True][1], found[False][1], rtol=1e-12, atol=1e-14)


@every
@both
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpointing_has_the_right_gradient_or_is_refused(kind: str, source: str) -> None:
    data = batch(padding="right")
    plain, model = language_model(kind), language_model(kind)
    attached(plain, source)
    attached(model, source)
    plain(**data, use_cache=False).loss.backward()
    model.activation_checkpointing_enable({"use_reentrant": True})
    loss = unless_refused(lambda: model(**data, use_cache=False).loss, "use_reentrant")
    if loss is not None:
        loss.backward()
        equal(gradients(model), gradients(plain), rtol=1e-12, atol=1e-14)


@every
@both
def test_checkpointing_and_accumulation_with_a_metrics_pass_in_between(kind: str, source: str) -> None:
    data, other, found = batch(), batch(seed=1), {}
    for disturbed in (False, True):
        model = language_model(kind)
        handle = attached(model, source)
        model.activation_checkpointing_enable({"use_reentrant": False})
        logits = model(input_ids=data["input_ids"], use_cache=False).logits
        if disturbed:
            with torch.no_grad():
                model(**other, use_cache=False)
        (logits.square().mean() + handle.weighted_penalty(data["labels"][:, 1:], 60)).backward()
        found[disturbed] = gradients(model)
    equal(found[True], found[False], rtol=0, atol=0)


@every
@both
@pytest.mark.parametrize("pure", [False, True], ids=["autocast", "pure"])
def test_sixteen_bits_around_leave_the_linear_algebra_in_32(kind: str, source: str, pure: bool) -> None:
    model, data = language_model(kind, dtype=torch.bfloat16 if pure else torch.float32), batch(padding="left")
    handle = attached(model, source, weight=0.5)
    kept: list = []
    barrier = model.support_tokens.term_0
    inner = barrier._note
    barrier._note = lambda margins, penalty: (kept.extend(m.log_abs_det for m in margins), inner(margins, penalty))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not pure):
        loss = model(**data).loss
    assert kept[0].dtype == torch.float32 and loss.dtype == torch.float32
    loss.backward()
    assert all(torch.isfinite(g).all() for g in gradients(model).values())
    assert kept[0].isfinite().all() and handle.last["penalty"] == pytest.approx(-handle.last["log_margin_mean"])


@every
@pytest.mark.parametrize("pure", [False, True], ids=["autocast", "pure"])
def test_sixteen_bit_activations_have_the_margins_of_the_same_activations_in_32(kind: str, pure: bool) -> None:
    model, data = language_model(kind, dtype=torch.bfloat16 if pure else torch.float32), batch(padding="left")
    handle = attached(model, rank=4)
    seen = []
    blocks = model.transformer.h if kind == "gpt2" else model.model.layers
    hook = blocks[0].register_forward_pre_hook(
        lambda _m, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not pure):
        model(**data).loss.backward()
    hook.remove()
    exact = handle.law.float().margins(seen[0].detach().float(), data["attention_mask"])
    assert handle.last["log_margin_mean"] == pytest.approx(exact.log_abs_det[exact.valid].mean().item(), abs=2e-6)


@every
@both
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_no_margin_and_makes_no_nan(kind: str, side: str, source: str) -> None:
    data = batch(5, 8, padding=side)
    data["attention_mask"][4] = 0  # a row with no key
    data["labels"][4] = -100
    model = language_model(kind)
    handle = attached(model, source)
    loss = model(**data).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(g).all() for g in gradients(model).values())
    together, total = handle.last["log_margin_mean"], 0.0
    for row in range(4):
        real = data["attention_mask"][row] == 1
        ids = data["input_ids"][row : row + 1, real]
        # Positions count padding unless a model is told: the unpadded sequence is given those it had.
        places = torch.arange(8)[real][None]
        alone = language_model(kind)
        other = attached(alone, source)
        alone(input_ids=ids, labels=ids, position_ids=places)
        total += other.last["log_margin_mean"] * int(real.sum())
    assert together == pytest.approx(total / int(data["attention_mask"].sum()), abs=1e-9)


@every
@both
def test_packed_documents_do_not_see_each_other(kind: str, source: str) -> None:
    lengths, data = (3, 5, 4), batch(1, 12)
    places = torch.cat([torch.arange(n) for n in lengths])[None]
    model = language_model(kind)
    handle = attached(model, source)
    model(**data, position_ids=places, use_cache=False).loss.backward()
    together, total, start = handle.last["log_margin_mean"], 0.0, 0
    for length in lengths:
        part = data["input_ids"][:, start : start + length]
        model(input_ids=part, labels=part)
        total, start = total + handle.last["log_margin_mean"] * length, start + length
    assert together == pytest.approx(total / 12, abs=1e-9)
    model(**data)
    assert handle.last["log_margin_mean"] != pytest.approx(together, abs=1e-4)


def test_a_mask_that_the_law_cannot_read_is_refused() -> None:
    model, data = language_model("llama"), batch(2, 6)
    attached(model)
    square = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    with pytest.raises(CaptureError, match=r"of shape \(B, T\)"):
        model(**data, attention_mask=square)
    model.eval()(**data, attention_mask=square)


@every
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_margins_token_by_token_with_a_cache_are_those_of_the_whole(kind: str, context) -> None:
    model, ids = language_model(kind).eval(), batch(2, 6)["input_ids"]
    for barrier in ("none", "attached"):
        if barrier == "attached":
            attached(model, "model")
        with context(), capture_attention(model, layers=(0, 1)) as captured:
            model(ids)
            whole = {layer: state_margins(state) for layer, state in captured.states().items()}
            cache = None
            for t in range(6):
                cache = model(ids[:, t : t + 1], cache=cache, use_cache=True).cache
                for layer, state in captured.states().items():
                    found = state_margins(state)
                    assert_close(found.log_abs_det[:, 0], whole[layer].log_abs_det[:, t], rtol=0, atol=1e-9)
                    assert torch.equal(found.sign[:, 0], whole[layer].sign[:, t])


@every
@both
@pytest.mark.parametrize("when", ["before", "after"])
def test_dispatch_and_offload_hooks(kind: str, source: str, when: str) -> None:
    from accelerate import cpu_offload, dispatch_model

    plain, data = language_model(kind, dtype=torch.float32), batch()
    attached(plain, source)
    expected = plain(**data).loss
    for hooked in (lambda m: dispatch_model(m, {"": "cpu"}), lambda m: cpu_offload(m, execution_device="cpu")):
        model = language_model(kind, dtype=torch.float32)
        if when == "before":
            attached(model, source)
        model = hooked(model).train()
        if when == "after":
            attached(model, source)
        loss = unless_refused(lambda model=model: model(**data).loss, "after the model was dispatched")
        if loss is None:
            assert when == "before" and source == "prior"
        else:
            assert_close(loss, expected)


def test_positions_of_a_longer_mask_are_those_of_the_last_tokens() -> None:
    model, data = language_model("llama"), batch(2, 6)
    handle = attached(model)
    with torch.no_grad():
        cache = model.eval()(data["input_ids"][:, :2], use_cache=True).cache
    rest = data["input_ids"][:, 2:]
    mask = torch.ones(2, 6, dtype=torch.long)
    model.train()(input_ids=rest, labels=rest, cache=cache, attention_mask=mask).loss.backward()
    with_cache = handle.last["penalty"]
    model(input_ids=rest, labels=rest).loss.backward()
    assert handle.last["penalty"] == with_cache  # the law reads embeddings, which know of no cache
