"""What the tests of generation share: prompts, their tokenizer, and a tiny model that never ends a text by itself."""

__all__ = ["PROMPTS", "TOKENIZER", "endless"]

from support_tokens.models import character_tokenizer
from tiny_models import tiny_model

TOKENIZER = character_tokenizer("abcdefghijklmnopqrst ")  # as many tokens as the tiny models have
PROMPTS = ["a", "bad cab", "the"]


def endless(family: str = "llama", **options):
    """A tiny model that names no end token."""
    model = tiny_model(family, **options)
    model.generation_config.eos_token_id = None
    return model
