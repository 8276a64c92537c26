"""Each arm: paired with the others, deterministic, resumed to the bit, and what it says it does by its own formula."""

import dataclasses
import gc
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM, TrainerCallback, set_seed

from support_tokens import attached_barriers
from support_tokens.errors import ArgumentError
from support_tokens.models import build_small_gpt, character_tokenizer
from support_tokens.regularizers import (
    SMART,
    Arm,
    Barrier,
    Combined,
    ConditionPenalty,
    EmbeddingDecay,
    EmbeddingDropout,
    EmbeddingScale,
    HeldMargin,
    InvariantBarrier,
    LawNoise,
    NEFTune,
    RDrop,
    SigmaReparam,
    SpectralNorm,
    TrainingNoise,
    Variational,
    arm_config,
    parse_arm,
    through_law,
)
from support_tokens.training import Corpus, TrainingPlan, train
from support_tokens.training import trainer as training

WORDS = "In the beginning God created the heaven and the earth . And the earth was without form , and void ; "
CORPUS = Corpus("toy", WORDS * 20, WORDS * 2, WORDS + "?")
PLAN = TrainingPlan(
    layers=1, heads=2, width=8, context=16, steps=4, batch_size=2, accumulation=2, learning_rate=1e-2, warmup=0.3,
    log_every=1, evaluate_every=100, evaluate_windows=2, save_every=2, device="cpu",
)  # fmt: skip
KINDS = [
    Barrier(0.1, "hinge", "model", 4, 1.0),
    Barrier(0.1, "map"),
    Barrier(0.1, "log", "model", view="block", layers=1, warmup=1, fade=4),
    TrainingNoise(0.5, "absolute"),
    HeldMargin(2.0, 0.1),
    InvariantBarrier(0.1, positions=4),
    ConditionPenalty(1.0),
    LawNoise(0.5),
    Variational(0.01, positions=4),
    NEFTune(),
    EmbeddingScale(),
    EmbeddingDropout(),
    EmbeddingDecay(10.0),
    RDrop(),
    SMART(),
    SpectralNorm(),
    SigmaReparam(),
    Combined((TrainingNoise(0.3), InvariantBarrier(0.1, positions=4), Barrier(0.1), NEFTune())),
]
EACH_KIND = pytest.mark.parametrize("arm", KINDS, ids=lambda arm: arm.name)


class Killed(BaseException):
    pass


@dataclasses.dataclass(frozen=True)
class Watched:
    """An arm that notes initial weights and batches, and is killed at a step."""

    name = "ce"
    summary = "a test"

    base: Arm
    notes: dict
    kill_at: int = 100

    def attach(self, model, *, seed):
        self.notes["initial"] = {key: value.clone() for key, value in model.state_dict().items()}
        attached, watched = self.base.attach(model, seed=seed), self

        class Callback(TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                if state.global_step == 0:
                    watched.notes["batches"] = []
                    model.register_forward_pre_hook(
                        lambda _m, _a, kwargs: watched.notes["batches"].append(kwargs["input_ids"].clone()),
                        with_kwargs=True,
                    )
                if state.global_step == watched.kill_at:
                    raise Killed

        return dataclasses.replace(attached, callbacks=(*attached.callbacks, Callback()))


@pytest.fixture(autouse=True, scope="module")
def imported_modules_are_no_garbage():
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def as_its_base(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(training, "arm_config", lambda arm: arm_config(arm.base if isinstance(arm, Watched) else arm))


def run(folder: Path, arm: Arm, **options):
    return train(PLAN, CORPUS, arm, folder, progress=False, **options)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> tuple[dict, dict]:
    """Weights and notes of the plain arm."""
    folder, notes = tmp_path_factory.mktemp("plain") / "run", {}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(training, "arm_config", lambda arm: arm_config(arm.base))
        run(folder, Watched(parse_arm("ce"), notes))
    return weights(folder), notes


def model(**changes):
    set_seed(0)
    options = {"layers": 1, "heads": 2, "width": 8, "context": 16, **changes}
    return build_small_gpt(character_tokenizer(WORDS), **options)


def batch(n: int = 4) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 10, (n, 16), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


@EACH_KIND
def test_an_arm_is_paired_resumes_to_the_bit_and_leaves_a_stock_model(tmp_path: Path, arm: Arm, plain):
    notes: dict = {}
    run(tmp_path / "whole", Watched(arm, notes))
    with pytest.raises(Killed):
        run(tmp_path / "killed", Watched(arm, {}, kill_at=3))
    run(tmp_path / "killed", arm, resume=True)
    whole, resumed = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert whole.keys() == resumed.keys() == plain[0].keys()
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)
    assert (tmp_path / "whole/metrics.jsonl").read_bytes() == (tmp_path / "killed/metrics.jsonl").read_bytes()
    assert any(not torch.equal(whole[key], plain[0][key]) for key in whole), "the arm does something"
    # The same initial weights and, in each of the eight micro-batches, the same text as every other arm.
    assert all(torch.equal(notes["initial"][key], value) for key, value in plain[1]["initial"].items())
    distinct = [b for i, b in enumerate(notes["batches"]) if i == 0 or not torch.equal(b, notes["batches"][i - 1])]
    assert all(torch.equal(*pair) for pair in zip(distinct[:8], plain[1]["batches"][:8], strict=True))
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "whole/model", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


@pytest.mark.parametrize(
    "arm",
    [RDrop(weight=0.0, dropout=0.0), SMART(weight=0.0), InvariantBarrier(weight=0.0), ConditionPenalty(weight=0.0)],
)
def test_a_penalty_of_weight_zero_is_the_plain_run(tmp_path: Path, arm: Arm, plain):
    run(tmp_path / "run", arm)
    for key, value in weights(tmp_path / "run").items():
        torch.testing.assert_close(value, plain[0][key], atol=1e-5, rtol=1e-4)


def test_the_weight_of_a_barrier_rises_and_fades():
    one = model(layers=2)
    attachment = Barrier(0.4, source="model", layers=2, view="block", warmup=2, fade=4).attach(one, seed=0)
    (handle,) = attached_barriers(one)
    weights = []
    for step in range(5):
        handle.step = step
        weights.append(handle.present_weight)
    assert weights == pytest.approx([0.0, 0.2, 0.4, 0.2, 0.0], abs=1e-6)
    attachment.remove()


def test_combined_arms_add_their_penalties_and_come_off_together():
    one, of = model(), batch()
    parts = (InvariantBarrier(1.0, positions=0), InvariantBarrier(0.5, 0.3, positions=0))
    attachments = [part.attach(one, seed=0) for part in parts]
    expected = sum(float(a.penalty(one, of, one(**of)).detach()) for a in attachments)
    for attachment in attachments:
        attachment.remove()
    attachment = Combined(parts).attach(one, seed=0)
    assert float(attachment.penalty(one, of, one(**of)).detach()) == pytest.approx(expected, rel=1e-5)
    attachment.remove()
    assert not one.transformer.h[0]._forward_pre_hooks
    with pytest.raises(ArgumentError, match="two of its parts set neftune_noise_alpha"):
        Combined((NEFTune(), NEFTune(2.0))).attach(one, seed=0)


def test_rdrop_is_the_mean_of_two_losses_and_their_divergence():
    one, of = model(), batch()
    attachment = RDrop(weight=0.7, dropout=0.3).attach(one, seed=0)
    assert {m.p for m in one.modules() if isinstance(m, torch.nn.Dropout)} == {0.3}
    torch.manual_seed(5)
    outputs = one(**of)
    total = outputs.loss + attachment.penalty(one, of, outputs)
    torch.manual_seed(5)
    passes = [one(**of) for _ in range(2)]
    p, q = (o.logits[:, :-1].log_softmax(-1) for o in passes)
    divergence = sum(
        torch.nn.functional.kl_div(a, b, log_target=True, reduction="none").sum(-1).mean() for a, b in ((p, q), (q, p))
    )
    torch.testing.assert_close(total, 0.5 * (passes[0].loss + passes[1].loss) + 0.7 * 0.5 * divergence)
    attachment.remove()
    assert {m.p for m in one.modules() if isinstance(m, torch.nn.Dropout)} == {0.0}


def test_smart_finds_noise_that_disturbs_more_than_a_random_one():
    one, of = model(), batch()
    attachment = SMART(weight=1.0, radius=0.5).attach(one, seed=0)
    outputs = one(**of)
    found = float(attachment.penalty(one, of, outputs).detach())
    attachment.remove()
    x = one.transformer.wte(of["input_ids"]) + one.transformer.wpe(torch.arange(16))
    random = []
    for seed in range(5):
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
        noise = noise / noise.square().mean(-1, keepdim=True).sqrt() * 0.5 * x.square().mean().sqrt()
        moved = one(inputs_embeds=one.transformer.wte(of["input_ids"]) + noise).logits[:, :-1].log_softmax(-1)
        clean = outputs.logits[:, :-1].log_softmax(-1)
        random.append(float((0.5 * ((clean.exp() - moved.exp()) * (clean - moved)).sum(-1).mean()).detach()))
    assert found > max(random) > 0
    assert not one.transformer.h[0]._forward_pre_hooks


def covariance(row: torch.Tensor, t: int, coupling: float) -> torch.Tensor:
    """Of the past of position t under weights that repel."""
    if t == 0:
        return torch.zeros(row.shape[1], row.shape[1], dtype=row.dtype)
    alpha = torch.softmax(-coupling * row[:t] @ row[t], 0)
    mean = alpha @ row[:t]
    return torch.einsum("s,sd,se->de", alpha, row[:t] - mean, row[:t] - mean)


def test_the_invariant_barrier_does_not_see_the_scale_of_embeddings():
    arm, of, values = InvariantBarrier(weight=1.0, coupling=0.3, positions=0), batch(), []
    for scale in (1.0, 10.0):
        one = model()
        with torch.no_grad():
            one.transformer.wte.weight *= scale
            one.transformer.wpe.weight *= scale
        attachment = arm.attach(one, seed=0)
        values.append(attachment.penalty(one, of, one(**of)))
        attachment.remove()
    torch.testing.assert_close(values[0], values[1], rtol=1e-3, atol=1e-6)
    values[0].backward()
    # By the textbook: the log-determinant of I + c Sigma_t, position by position, in float64.
    one = model().double()
    x = (one.transformer.wte(of["input_ids"]) + one.transformer.wpe(torch.arange(16))).detach()
    x = x / x.square().mean(-1, keepdim=True).sqrt()
    total = 0.0
    for row in x:
        for t in range(16):
            total += float(torch.logdet(torch.eye(8, dtype=x.dtype) + 0.3 * covariance(row, t, 0.3)))
    assert float(values[0].detach()) == pytest.approx(-total / 64, rel=1e-3)


def test_noise_through_the_law_has_the_power_of_plain_noise():
    one, of, entered = model(), batch(16), []
    attachment = LawNoise(scale=0.5, coupling=3.0).attach(one, seed=0)
    one.transformer.h[0].register_forward_pre_hook(lambda _m, args: entered.append(args[0].detach()))
    one.train()(**of)
    one.eval()(**of)
    noise, clean = entered[0] - entered[1], entered[1]
    assert float(noise.square().mean().sqrt()) == pytest.approx(0.5 * float(clean.square().mean().sqrt()), rel=1e-4)
    attachment.remove()


def test_noise_through_the_law_is_the_inverse_jacobian_of_the_textbook():
    x, noise = (torch.randn(1, 9, 4, generator=torch.Generator().manual_seed(s)).double() for s in (0, 1))
    moved = through_law(x, noise, 0.5)[0]
    row = x[0] / x[0].square().mean(-1, keepdim=True).sqrt()
    for t in range(9):
        jacobian = torch.eye(4, dtype=x.dtype) + 0.5 * covariance(row, t, 0.5)
        torch.testing.assert_close(jacobian @ moved[t], noise[0, t], atol=1e-4, rtol=1e-4)


def test_dropout_zeroes_coordinates_in_training_only():
    one, of, entered = model(width=64), batch(), []
    attachment = EmbeddingDropout(rate=0.25).attach(one, seed=0)
    one.transformer.h[0].register_forward_pre_hook(lambda _m, args: entered.append(args[0].detach()))
    one.train()(**of)
    one.eval()(**of)
    assert float((entered[0] == 0).float().mean()) == pytest.approx(0.25, abs=0.03)
    kept = entered[0] != 0
    torch.testing.assert_close(entered[0][kept], entered[1][kept] / 0.75)
    attachment.remove()


def test_scale_multiplies_both_tables():
    one, other = model(), model()
    EmbeddingScale(10.0).attach(other, seed=0)
    for name in ("wte", "wpe"):
        torch.testing.assert_close(getattr(other.transformer, name).weight, 10 * getattr(one.transformer, name).weight)


def test_decay_shrinks_tables_by_the_learning_rate():
    one = model()
    before = one.transformer.wte.weight.detach().clone()
    (callback,) = EmbeddingDecay(2.0).attach(one, seed=0).callbacks
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    callback.on_pre_optimizer_step(None, None, None, optimizer=optimizer)
    torch.testing.assert_close(one.transformer.wte.weight, 0.8 * before)


def test_spectral_norms_are_one_and_stay_when_the_arm_is_taken_off():
    one, of = model(width=16), batch()
    attachment = SpectralNorm().attach(one, seed=0)
    for _ in range(50):
        one(**of)
    attachment.remove()
    for matrix in (one.transformer.h[0].attn.c_attn, one.transformer.h[0].attn.c_proj):
        assert not parametrize.is_parametrized(matrix)
        assert float(torch.linalg.matrix_norm(matrix.weight.detach(), 2)) == pytest.approx(1, rel=1e-3)


def test_sigma_reparametrisation_starts_from_the_same_function_and_learns_its_gain():
    one, of = model(width=16), batch()
    before = one.eval()(**of).logits
    attachment = SigmaReparam().attach(one, seed=0)
    torch.testing.assert_close(one.eval()(**of).logits, before, atol=1e-5, rtol=1e-4)
    one.train()(**of).loss.backward()
    gains = {name: p for name, p in one.named_parameters() if name.endswith("gain")}
    assert len(gains) == 2 and all(math.isfinite(float(p.grad)) and float(p.grad) != 0 for p in gains.values())
    attachment.remove()
    assert not any(name.endswith("gain") for name, _ in one.named_parameters())
