"""The tasks that benchmarks run: models of two shapes, training steps on random tokens, penalties by themselves."""

__all__ = ["Task", "barrier_step", "law_penalty", "model_penalty", "peer_step", "small_gpt_task", "smollm2_task"]

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from support_tokens.benchmark import peers
from support_tokens.benchmark.measure import Step
from support_tokens.law import EmbeddingPrior
from support_tokens.margins import fused_penalty
from support_tokens.models import capture_attention
from support_tokens.regularizers.barrier import attach_barrier


@dataclass(frozen=True)
class Task:
    """A model in train mode, and tokens `(B, T)`."""

    model: Any
    ids: Tensor

    def optimiser(self) -> torch.optim.Optimizer:
        """AdamW over what the model trains now."""
        return torch.optim.AdamW(self.model.parameters(), lr=1e-4)


def small_gpt_task(batch: int = 16, length: int = 256, *, dropout: float = 0.0, device: str = "cpu") -> Task:
    """SmallGPT, D = 128, on random characters."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=100,
        n_layer=4,
        n_head=4,
        n_embd=128,
        n_positions=length,
        activation_function="gelu_pytorch_tanh",
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        resid_pdrop=dropout,
        bos_token_id=None,
        eos_token_id=None,
    )
    return _task(GPT2LMHeadModel(config), batch, length, device)


def smollm2_task(batch: int = 2, length: int = 512, *, device: str = "cpu") -> Task:
    """The shape of SmolLM2-135M with random weights, on random tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        max_position_embeddings=max(2048, length),
    )
    return _task(LlamaForCausalLM(config), batch, length, device)


def _task(model: Any, batch: int, length: int, device: str) -> Task:
    # The class does not say which loss is its own, and transformers then warns before it takes the same one.
    model.loss_type = "ForCausalLM"
    ids = torch.randint(0, model.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))
    return Task(model.to(device).train(), ids.to(device))


def peer_step(
    task: Task, loss: Callable[[Any, Tensor], Tensor] = peers.plain, optimiser: torch.optim.Optimizer | None = None
) -> Step:
    """A training step by a loss of `peers`, with an optimiser of its own unless one is given."""
    chosen = task.optimiser() if optimiser is None else optimiser

    device = task.ids.device.type

    def step() -> None:
        # Forward in 16 bits where that is the custom; the barrier's own linear algebra stays in 32.
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            value = loss(task.model, task.ids)
        value.backward()
        chosen.step()
        # At the end and not at the beginning, so that a step frees what it made.
        chosen.zero_grad()

    return step


@contextmanager
def barrier_step(task: Task, optimiser: torch.optim.Optimizer | None = None, **options: Any) -> Iterator[Step]:
    """Within it, a training step with a barrier attached; `options` are those of `attach_barrier`."""
    handle = attach_barrier(task.model, **options)
    try:
        yield peer_step(task, optimiser=optimiser)
    finally:
        handle.remove()


def law_penalty(
    batch: int,
    length: int,
    width: int = 128,
    rank: int = 32,
    positions: int | None = None,
    device: str = "cpu",
) -> Step:
    """The penalty of the law by itself, with its gradient by embeddings and coupling."""
    generator = torch.Generator().manual_seed(0)
    law = EmbeddingPrior(width, rank, generator=generator).to(device)
    x = torch.randn(batch, length, width, generator=generator).to(device).requires_grad_()
    rows = None if positions is None else _drawn(batch, length, positions).to(device)
    count = batch * (length if positions is None else positions)
    weight = torch.full((batch, count // batch), 1 / count, device=device)

    def step() -> None:
        value, _ = fused_penalty(law.state(x), weight, torch.neg, positions=rows)
        torch.autograd.grad(value, [x, law.w_q, law.w_k])

    return step


def model_penalty(task: Task, positions: int) -> Step:
    """The penalty of the first layer of a model by itself, with its gradient by what the layer captured."""
    with capture_attention(task.model, layers=(0,)) as captured:
        task.model(task.ids)
    state = captured.states()[0]
    batch, length = task.ids.shape
    rows = _drawn(batch, length, positions).to(task.ids.device)
    weight = torch.full((batch, positions), 1 / (batch * positions), device=task.ids.device)
    wanted = [t.detach().requires_grad_() for t in (state.query, state.key, state.value)]
    state = replace(state, query=wanted[0], key=wanted[1], value=wanted[2])

    def step() -> None:
        value, _ = fused_penalty(state, weight, torch.neg, positions=rows)
        torch.autograd.grad(value, wanted)

    return step


def _drawn(batch: int, length: int, positions: int) -> Tensor:
    scores = torch.rand(batch, length, generator=torch.Generator().manual_seed(2))
    return scores.topk(positions, dim=-1).indices.sort(dim=-1).values
