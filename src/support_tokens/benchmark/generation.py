"""Generation with margins beside plain generation: steps of one text each, at the shape of SmolLM2-135M."""

__all__ = ["generation_steps"]

from typing import Any

import torch

from support_tokens.benchmark.measure import Step
from support_tokens.benchmark.tasks import smollm2_task
from support_tokens.generation import generate
from support_tokens.models import quiet_transformers


class _Letters:
    """A tokenizer for weights that are random: a letter a token."""

    pad_token_id, eos_token_id = 0, None

    def decode(self, ids: list[int], **_options: Any) -> str:
        return "".join(chr(97 + index % 26) for index in ids)


def generation_steps(length: int, tokens: int, *, device: str = "cpu") -> dict[str, Step]:
    """Greedy texts of `tokens` tokens after a prompt of `length`: plain, with signals of logits, with margins.

    Args:
        length: Tokens of the prompt.
        tokens: Tokens written.
        device: Where.
    """
    task = smollm2_task(1, length, device=device)
    model: Any = task.model.eval()
    model.generation_config.eos_token_id = None
    ids, prompt = task.ids, [task.ids[0].tolist()]

    def plain() -> None:
        with torch.no_grad(), quiet_transformers():
            model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            )

    def watched(**options: Any) -> Step:
        def step() -> None:
            generate(model, _Letters(), prompt, max_new_tokens=tokens, **options)

        return step

    middle = model.config.num_hidden_layers // 2
    return {
        "plain": plain,
        "entropy and probabilities": watched(signals=["TokenEntropy", "MaximumTokenProbability"]),
        "and the margin of one layer": watched(),
        "and the margins of three layers": watched(layers=(0, middle, -1)),
    }
