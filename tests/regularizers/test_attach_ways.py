"""Each way of training of the guide, run as the page has it, and with the gradient of one process on two."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides" / "attach.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^( *)```python\n(.*?)^\1```", flags=re.MULTILINE | re.DOTALL)
TABS = dict(re.findall(r"^### ([^\n]+)\n(.*?)(?=^### |^## )", PAGE, flags=re.MULTILINE | re.DOTALL))
PREAMBLE = textwrap.dedent(FENCE.search(PAGE)[2])  # type: ignore[index]
WITH_TORCHRUN = ("DDP", "FSDP2")

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{words}")
    for words in (
        "'pin_memory' argument is set as true",  # Trainer on a machine without an accelerator
        "The '.*' does not have many workers",  # Lightning about two cores
        "GPU available but not used",
        "You are resuming|Checkpoint directory|The number of training batches",
        ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated",
        "`gradient_checkpointing` is deprecated",  # by TRL, of transformers
        "Found .* module\\(s\\) in eval mode",
    )
]


def code(tab: str) -> str:
    return "\n".join(textwrap.dedent(body) for _, body in FENCE.findall(TABS[tab]))


def run(tab: str) -> dict:
    names: dict = {"__name__": "page"}
    exec(compile(PREAMBLE + code(tab), f"attach.md, {tab}", "exec"), names)
    return names


def weights(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("tab", [tab for tab in TABS if tab not in WITH_TORCHRUN])
def test_the_page_runs(tab: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    names = run(tab)
    handle = names["handle"]
    assert handle.counted == {"PyTorch": 9, "Accelerate": 4, "Trainer": 8, "TRL and PEFT": 4, "Lightning": 4}[tab]
    if tab == "TRL and PEFT":
        assert not handle.parameters()
    else:
        fresh: dict = {}
        exec(PREAMBLE, fresh)
        unmoved = fresh["attach_barrier"](fresh["new_model"]()).law
        assert not torch.equal(handle.law.w_q, unmoved.w_q)
    if tab in ("Trainer", "TRL and PEFT"):
        logs = [row for row in names["trainer"].state.log_history if "loss" in row]
        assert len(logs) == 4
        assert all(row["stability/penalty"] != 0 for row in logs)
    if tab == "Lightning":
        assert names["trainer"].callback_metrics["stability/penalty"].item() == pytest.approx(handle.last["penalty"])


def test_accelerate_has_the_weights_of_a_plain_loop(tmp_path: Path) -> None:
    names = run("Accelerate")
    model = names["new_model"]().train()
    names["attach_barrier"](model, weight=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number, batch in enumerate(torch.utils.data.DataLoader(names["rows"], batch_size=4)):
        (model(**batch).loss / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    expected = weights(model)
    for name, found in weights(names["model"]).items():
        assert_close(found, expected[name], rtol=1e-6, atol=1e-7, msg=name)


def test_lightning_has_the_weights_of_a_plain_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run("Lightning")
    model = names["new_model"]().train()
    names["attach_barrier"](model, weight=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in torch.utils.data.DataLoader(names["rows"], batch_size=4):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = weights(model)
    for name, found in weights(names["module"].model).items():
        assert_close(found, expected[name], rtol=1e-6, atol=1e-7, msg=name)
    path = next(Path("checkpoints").glob("*.ckpt"))
    again = names["Module"]()
    again.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    again.on_load_checkpoint(torch.load(path, weights_only=True))
    assert torch.equal(again.barrier.law.w_q, names["handle"].law.w_q)


def test_sft_trainer_computes_the_loss_of_the_model_plus_the_penalty(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run("TRL and PEFT")
    trainer, handle = names["trainer"], names["handle"]
    inputs = next(iter(trainer.get_train_dataloader()))
    model = trainer.model.train()
    items = (inputs["labels"][:, 1:] != -100).sum() * 2
    loss = trainer.compute_loss(model, dict(inputs), num_items_in_batch=items)
    found = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
    reference = model(**inputs, num_items_in_batch=items).loss
    expected = torch.autograd.grad(reference, [p for p in model.parameters() if p.requires_grad])
    assert_close(loss, reference, rtol=1e-5, atol=1e-6)
    for gradient, other in zip(found, expected, strict=True):
        assert_close(gradient, other, rtol=1e-4, atol=1e-6)
    model.eval()
    bare = trainer.compute_loss(model, dict(inputs), num_items_in_batch=items)
    # Two losses since the last step of an optimiser, each a part of a sum.
    assert 2 * bare.item() == pytest.approx(handle.last["ce"], rel=1e-5)


@pytest.fixture(scope="module")
def on_two_processes(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What two processes print that make the comparisons, and run the page's scripts, on a free port."""
    folder = tmp_path_factory.mktemp("torchrun")
    for tab in WITH_TORCHRUN:
        report = f"\nif handle.counted == 2 and handle.last['penalty'] != 0:\n    print('{tab} counted', flush=True)\n"
        (folder / f"{tab}.py").write_text(PREAMBLE + code(tab) + report)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "tests" / "ways" / "distributed.py"), "ddp", "fsdp", *(f"{tab}.py" for tab in WITH_TORCHRUN)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("tab", WITH_TORCHRUN)
def test_the_page_runs_on_two_processes(tab: str, on_two_processes: str) -> None:
    assert on_two_processes.count(f"{tab} counted") == 2


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_two_processes_have_the_loss_and_gradients_of_one(way: str, on_two_processes: str) -> None:
    assert float(re.search(rf"{way} apart (\S+)", on_two_processes)[1]) < 1e-5  # type: ignore[index]


def test_every_block_of_the_page_belongs_to_a_tab_that_is_run() -> None:
    assert list(TABS) == ["PyTorch", "Accelerate", "Trainer", "TRL and PEFT", "Lightning", "DDP", "FSDP2"]
    marked = PAGE.count("<!-- run by tests/regularizers/test_attach_ways.py -->")
    assert marked == sum(len(FENCE.findall(body)) for body in TABS.values())
