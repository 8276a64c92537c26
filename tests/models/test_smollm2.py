"""A pretrained model: SmolLM2-135M-Instruct, where `python scripts/fetch_smollm2.py` has put it."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from support_tokens.margins import JacobianBlocks, state_margins
from support_tokens.models import capture_attention, decoder_blocks

FOLDER = Path(__file__).parents[2] / "models" / "smollm2-135m"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
LAYERS = (0, 1, 15)
SENTENCE = (
    "The capital of France is Paris, and the river that runs through it is called the Seine; it was there, on a cold "
    "morning in March, that the two brothers met again."
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (FOLDER / GGUF).is_file(), reason="SmolLM2 is not in models/smollm2-135m: run scripts/fetch_smollm2.py"
    ),
]


@pytest.fixture(scope="module")
def loaded() -> tuple[nn.Module, dict]:
    pytest.importorskip("gguf", reason="the gguf package, which reads the file, is not installed")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(FOLDER, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=GGUF, dtype=torch.float32).eval()
    return model, dict(tokenizer(SENTENCE, return_tensors="pt"))


def test_margins_are_autograds_through_the_models_own_modules(loaded: tuple[nn.Module, dict]) -> None:
    model, batch = loaded
    calls = {}
    blocks = decoder_blocks(model)
    handles = [
        blocks[layer].register_forward_pre_hook(
            lambda _m, args, kwargs, layer=layer: calls.__setitem__(layer, (args[0], kwargs)), with_kwargs=True
        )
        for layer in LAYERS
    ]
    with torch.no_grad(), capture_attention(model, LAYERS) as capture:
        model(**batch, use_cache=False)
    for handle in handles:
        handle.remove()
    for layer, state in capture.states(batch["attention_mask"]).items():
        x, kwargs = calls[layer]
        for t in (0, 5, 20):

            def mean(z: torch.Tensor, x=x, t=t, layer=layer, kwargs=kwargs) -> torch.Tensor:
                stream = torch.cat([x[:, :t], z[None, None], x[:, t + 1 :]], dim=1)
                return blocks[layer].self_attn(blocks[layer].input_layernorm(stream), **kwargs)[0][0, t]

            jacobian = torch.autograd.functional.jacobian(mean, x[0, t], vectorize=True)
            block = JacobianBlocks(state).dense(slice(t, t + 1))[0, 0]
            assert_close(block, jacobian, rtol=0, atol=1e-5)
            for view, sign in (("noise", -1), ("block", 1)):
                expected = torch.linalg.slogdet(torch.eye(len(block)) + sign * jacobian)
                found = state_margins(state, view=view, positions=torch.tensor([[t]]))
                assert found.sign.item() == expected.sign.item()
                assert abs(found.log_abs_det.item() - expected.logabsdet.item()) < 1e-4


def test_the_block_map_folds_at_some_tokens_of_the_first_layers(loaded: tuple[nn.Module, dict]) -> None:
    model, batch = loaded
    with torch.no_grad(), capture_attention(model, LAYERS) as capture:
        model(**batch)
    states = capture.states(batch["attention_mask"])
    folds = {layer: int((state_margins(state, view="block").sign < 0).sum()) for layer, state in states.items()}
    assert batch["input_ids"].shape[1] == 38
    assert folds == {0: 5, 1: 6, 15: 1}
