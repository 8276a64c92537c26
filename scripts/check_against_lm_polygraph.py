"""Holds our uncertainty signals against the estimators of lm-polygraph, on one tiny model and its greedy text.

The two live in environments of their own, so it takes two commands:

    python scripts/check_against_lm_polygraph.py ours work.json           # here
    python scripts/check_against_lm_polygraph.py theirs work.json result.json   # where lm-polygraph is installed

The first writes our values and the weights of the model, the second gives the same model to lm-polygraph's own
calculators and estimators and writes both sides with their differences. What is compared with what:

- RAUQ: lm-polygraph gives 1 more than the formula of its paper, which is ours; the 1 is taken off.
- AttentionScore: theirs sums over the whole text, so that ours is asked for it with a prompt of one token.
- EigenScore: theirs compares embeddings of several answers; it is given the hidden states of one text's tokens, which
  is what LLM-Check's hidden score, ours, is made of.
- Token estimators: theirs leave out the last token.
"""

__all__ = ["ALPHABET", "PROMPT", "TOKENS", "ours", "theirs", "tiny_llama"]

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

ALPHABET = "abcdefghijklmnopqrst "
PROMPT, TOKENS, LAYERS = "the cat ", 12, 3


def tiny_llama(weights: dict[str, list] | None = None) -> LlamaForCausalLM:
    """A Llama of three layers with large random weights, or with given ones."""
    config = LlamaConfig(
        vocab_size=len(ALPHABET) + 2, hidden_size=16, intermediate_size=24, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
        attn_implementation="eager",
    )  # fmt: skip
    model = LlamaForCausalLM(config).float().eval()
    if weights is not None:
        model.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})
        return model
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter.dim() == 1) + 0.4 * torch.randn(parameter.shape, generator=generator))
    return model


def ours() -> dict:
    """Our values, the text, and the weights."""
    from support_tokens.generation import generate
    from support_tokens.generation.signals import score_sequences
    from support_tokens.models import character_tokenizer

    model, tokenizer = tiny_llama(), character_tokenizer(ALPHABET)
    (text,) = generate(model, tokenizer, PROMPT, max_new_tokens=TOKENS)
    ids = torch.tensor([[*tokenizer(PROMPT)["input_ids"], *(token.id for token in text.tokens)]])
    every = tuple(range(LAYERS))
    answer = score_sequences(model, ids, layers=every, prompt_lengths=text.prompt_tokens)
    # Theirs takes layers from a third to two thirds, both ends too; of three that is 1 and 2.
    middle = score_sequences(model, ids, layers=(1, 2), prompt_lengths=text.prompt_tokens, signals=["RAUQ"])
    whole = score_sequences(model, ids, layers=every, signals=["AttentionScore", "HiddenScore"])
    names = ("MaximumSequenceProbability", "Perplexity", "MeanTokenEntropy")
    values: dict[str, list[float]] = {name: answer[name].tolist() for name in names}
    values["RAUQ"] = middle["RAUQ"].tolist()
    for layer in every:
        values[f"AttentionScore (layer={layer})"] = whole[f"AttentionScore (layer={layer})"].tolist()
        values[f"EigenScore of tokens (layer={layer})"] = whole[f"HiddenScore (layer={layer})"].tolist()
    for name in ("TokenEntropy", "MaximumTokenProbability"):
        values[name] = [float(token.signals[name] or 0.0) for token in text.tokens[:-1]]
    return {
        "prompt": PROMPT,
        "prompt_tokens": text.prompt_tokens,
        "ids": ids[0].tolist(),
        "ours": values,
        "versions": {name: version(name) for name in ("support-tokens", "torch", "transformers")},
        "weights": {name: value.tolist() for name, value in model.state_dict().items()},
    }


class _Model:
    """What lm-polygraph's calculators ask of a model: its own wrapper loads from a hub."""

    model_type = "CausalLM"

    def __init__(self, record: dict) -> None:
        self.model, self.ids = tiny_llama(record["weights"]), record["ids"][: record["prompt_tokens"]]
        # Nothing is suppressed and nothing ends a text, as on our side.
        self.generation_parameters = type("", (), {"allow_newlines": True})()
        self.tokenizer = type("", (), {"eos_token_id": None, "decode": staticmethod(str)})()

    def tokenize(self, texts: list[str]) -> dict[str, torch.Tensor]:
        ids = torch.tensor([self.ids])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def device(self) -> torch.device:
        return torch.device("cpu")

    def generate(self, **options):
        options.pop("min_new_tokens"), options.pop("suppress_tokens")
        found = self.model.generate(**options, do_sample=False)
        # As their wrapper does: what they call scores are log-probabilities.
        found.scores = tuple(score.log_softmax(-1) for score in found.scores)
        return found


def theirs(record: dict) -> dict[str, list[float]]:
    """The values of lm-polygraph, by its calculators and estimators."""
    from lm_polygraph import estimators
    from lm_polygraph.stat_calculators import AttentionForwardPassCalculator, EntropyCalculator, GreedyProbsCalculator

    model = _Model(record)
    stats: dict = {"model": model}
    greedy = GreedyProbsCalculator(output_attentions=True, output_hidden_states=False)
    stats.update(greedy(stats, [record["prompt"]], model, max_new_tokens=TOKENS))
    if stats["greedy_tokens"][0] != record["ids"][record["prompt_tokens"] :]:
        raise SystemExit("the two sides wrote different texts, so that nothing can be compared.")
    stats.update(EntropyCalculator()(stats, [record["prompt"]], model))
    stats.update(AttentionForwardPassCalculator()(stats, [record["prompt"]], model))
    found: dict[str, list[float]] = {}
    for name in ("MaximumSequenceProbability", "Perplexity", "MeanTokenEntropy", "RAUQ"):
        found[name] = [float(value) for value in getattr(estimators, name)()(stats)]
    found["RAUQ"] = [value - 1 for value in found["RAUQ"]]
    with torch.no_grad():
        hidden = model.model(torch.tensor([record["ids"]]), output_hidden_states=True)
    states: dict[int, torch.Tensor] = {}
    model.model.model.layers[-1].register_forward_hook(lambda _m, _a, out: states.__setitem__(LAYERS - 1, out))
    with torch.no_grad():
        model.model(torch.tensor([record["ids"]]))
    for layer in range(LAYERS):
        found[f"AttentionScore (layer={layer})"] = [float(v) for v in estimators.AttentionScore(layer=layer)(stats)]
        # The last entry of hidden_states has passed the final norm, which is no part of the layer.
        own = states.get(layer, hidden.hidden_states[layer + 1])[0].double().numpy()
        score = estimators.EigenScore()({"sample_embeddings": [own]})
        found[f"EigenScore of tokens (layer={layer})"] = [float(v) for v in score]
    for name in ("TokenEntropy", "MaximumTokenProbability"):
        found[name] = [float(value) for value in getattr(estimators, name)()(stats)[0]]
    return found


def main(words: list[str]) -> None:
    if len(words) == 2 and words[0] == "ours":
        Path(words[1]).write_text(json.dumps(ours()), encoding="utf-8")
    elif len(words) == 3 and words[0] == "theirs":
        record = json.loads(Path(words[1]).read_text(encoding="utf-8"))
        values = theirs(record)
        record.pop("weights")
        record["theirs"] = values
        record["versions of theirs"] = {name: version(name) for name in ("lm-polygraph", "torch", "transformers")}
        record["largest difference"] = {
            name: max(abs(a - b) for a, b in zip(record["ours"][name], values[name], strict=True)) for name in values
        }
        Path(words[2]).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(record["largest difference"], indent=1))
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
