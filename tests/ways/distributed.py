"""One step with the barrier on two processes by DDP or FSDP2, and on one: prints the greatest difference of gradients.

`torchrun --nproc-per-node 2 tests/ways/distributed.py {ddp|fsdp|SCRIPT} ...`; scripts are run as they are. All in one
start, since most of its time goes into imports.
"""

import gc
import os
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from barrier_models import KINDS, SOURCES, attached, batch, language_model
from support_tokens import ArgumentError, MarginController, attach_barrier


def model_and_handle(kind: str, source: str, **options):
    model = language_model(kind, dtype=torch.float64)
    return model, attached(model, source, layer=(0, 1) if source == "model" else 0, **options)


def wrapped(model: nn.Module, way: str, kind: str) -> nn.Module:
    if way == "ddp":
        return DistributedDataParallel(model)
    for block in model.transformer.h if kind == "gpt2" else model.model.layers:
        fully_shard(block)
    return fully_shard(model)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gradients(model: nn.Module) -> dict[str, Tensor]:
    named = {name.removeprefix("module."): p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: whole(gradient) for name, gradient in named.items()}


def differences(way: str, source: str, kind: str) -> list[float]:
    rank, size = dist.get_rank(), dist.get_world_size()
    data = batch(4, 6, padding="right")
    items = (data["labels"][:, 1:] != -100).sum()
    single, handle = model_and_handle(kind, source)
    loss = single(**data, num_items_in_batch=items).loss
    loss.backward()

    model, other = model_and_handle(kind, source)
    model = wrapped(model, way, kind)
    part = {name: tensor[rank::size] for name, tensor in data.items()}
    # As the Trainer does: items of all processes, and losses times their number, since gradients are averaged.
    mine = model(**part, num_items_in_batch=items).loss * size
    mine.backward()
    mean = mine.detach() / size
    dist.all_reduce(mean)
    expected, found = gradients(single), gradients(model)
    assert expected.keys() == found.keys(), expected.keys() ^ found.keys()
    assert (source == "model") == (not any("law" in name for name in found))
    apart = [(expected[name] - found[name]).abs().max().item() for name in expected]
    state = other.state_dict()
    for name, parameter in handle.state_dict().items():
        if name.startswith("law."):
            assert torch.equal(state[name], parameter), name
    other.load_state_dict(state)
    return [abs(loss.item() - mean.item()), *apart]


def controllers_agree() -> None:
    model = language_model(dtype=torch.float64)
    handle = attach_barrier(model, MarginController(target=2.0, rate=0.5))
    ddp = DistributedDataParallel(model)
    for step in range(2):
        ddp(**batch(2, 6, seed=10 * step + dist.get_rank())).loss.backward()
    weights = [torch.zeros(()) for _ in range(2)]
    dist.all_gather(weights, torch.tensor(handle.current_weight))
    assert weights[0] == weights[1] != 0.01, weights


def too_late(way: str) -> None:
    model = wrapped(language_model(dtype=torch.float64), way, "gpt2")
    with pytest.raises(ArgumentError, match="attach the barrier before"):
        attach_barrier(model)


def compare(way: str) -> None:
    apart = max(max(differences(way, source, kind)) for source in SOURCES for kind in KINDS)
    too_late(way)
    if way == "ddp":
        controllers_agree()
    if dist.get_rank() == 0:
        print(f"{way} apart {apart:.2e}", flush=True)


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    # Scripts make and destroy their group; gloo does not bear to be made anew at once, so they share this one.
    end, dist.init_process_group, dist.destroy_process_group = dist.destroy_process_group, print, lambda: None
    for argument in arguments:
        dist.barrier()
        if argument.endswith(".py"):
            runpy.run_path(argument)
        else:
            compare(argument)
    gc.collect()  # reducers of DDP hold threads that must be gone before their group is
    dist.barrier()
    end()
    sys.stdout.flush()
    os._exit(0)  # gloo's own threads sometimes abort an interpreter that takes itself down


if __name__ == "__main__":
    main(sys.argv[1:])
