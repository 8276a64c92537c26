"""Fine-tunes SmolLM2-135M on the King James text, full and by LoRA, with and without the barrier on its own attention.

    python scripts/fetch_smollm2.py
    python experiments/finetune_smollm2/run.py

Writes `result.json` beside this file: held-out cross-entropy and margins of layer 0 before and after. It is an example
of the way of training, with one seed and few steps, and no claim about the method.
"""

import argparse
import copy
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback

from support_tokens import RegularizerCallback, attach_barrier, model_margins
from support_tokens.files import versions, write_json
from support_tokens.training import load_corpus

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
LENGTH, LAYER, HELD_OUT = 128, 0, 16


class Blocks(Dataset):
    def __init__(self, ids: torch.Tensor) -> None:
        self.rows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def measure(model: nn.Module, rows: torch.Tensor) -> dict:
    """Cross-entropy in nats a token, and log margins of the chosen layer in the noise view, on held-out rows."""
    model.eval()
    with torch.inference_mode():
        losses = [model(input_ids=part, labels=part).loss.item() for part in rows.split(4)]
    margins = model_margins(model, rows[:4], layers=(LAYER,))[LAYER]
    return {
        "cross_entropy": sum(losses) / len(losses),
        "log_margin_mean": margins.log_abs_det.mean().item(),
        "log_margin_min": margins.log_abs_det.min().item(),
        "negative_share": (margins.sign < 0).double().mean().item(),
    }


def load(folder: Path) -> nn.Module:
    """The model with its weights in float32; read from GGUF it is marked as quantised, and the Trainer refuses that."""
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    config = copy.deepcopy(read.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    return model


def fine_tune(folder: Path, data: Blocks, held_out: torch.Tensor, *, lora: bool, weight: float, steps: int) -> dict:
    """One run; `weight` 0 is plain cross-entropy."""
    set_seed(0)
    model = load(folder)
    if lora:
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj"]))
    before = measure(model, held_out)
    handle = attach_barrier(model, weight, source="model", layer=LAYER, positions=16) if weight else None
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir="runs/finetune_smollm2",
            max_steps=steps,
            per_device_train_batch_size=2,
            learning_rate=1e-3 if lora else 2e-5,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            dataloader_pin_memory=False,
            disable_tqdm=True,
            seed=0,
        ),
        train_dataset=data,
    )
    trainer.remove_callback(PrinterCallback)
    if handle is not None:
        RegularizerCallback(handle).follow(trainer)
    trainer.train()
    last = handle.last if handle is not None else {}
    if handle is not None:
        handle.remove()
    row = {"way": "lora" if lora else "full", "weight": weight, "before": before, "after": measure(model, held_out)}
    print(row)
    return {**row, "last_step": last}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m"))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--weight", type=float, default=0.02)
    chosen = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(chosen.model, gguf_file=GGUF)
    corpus = load_corpus("kjv")
    ids = torch.tensor(tokenizer(corpus.train[:200_000])["input_ids"])
    held_out = torch.tensor(tokenizer(corpus.test[:40_000])["input_ids"])
    held_out = held_out[: HELD_OUT * LENGTH].view(HELD_OUT, LENGTH)
    data = Blocks(ids)
    runs = [
        fine_tune(chosen.model, data, held_out, lora=lora, weight=weight, steps=chosen.steps)
        for lora in (False, True)
        for weight in (0.0, chosen.weight)
    ]
    write_json(
        Path(__file__).with_name("result.json"),
        {
            "model": "SmolLM2-135M-Instruct, Q4_1 weights taken to float32",
            "corpus": corpus.identity(),
            "steps": chosen.steps,
            "length": LENGTH,
            "batch_size": 2,
            "layer": LAYER,
            "view": "noise",
            "positions": 16,
            "seeds": [0],
            "held_out_sequences": HELD_OUT,
            "runs": runs,
            "versions": versions(),
        },
    )


if __name__ == "__main__":
    main()
