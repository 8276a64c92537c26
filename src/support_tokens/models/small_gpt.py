"""SmallGPT: a small character-level GPT-2 of transformers."""

__all__ = [
    "build_small_gpt",
    "character_tokenizer",
    "encode",
    "load_small_gpt",
    "quiet_transformers",
    "torch_threads",
    "unknown_rate",
]

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from support_tokens.errors import ArgumentError, DataError, RunFolderError

PAD, UNKNOWN = "\0", "\ufffd"
"""Special tokens are single characters, so that ordinary text such as the literal `<unk>` of WikiText is none."""


def character_tokenizer(text: str) -> PreTrainedTokenizerFast:
    r"""A tokenizer whose tokens are the characters (code points) of a text, in order of code point.

    One character is one token: `len(ids) == len(text)`, so nats per token are nats per character. Characters not in
    `text` become the token of U+FFFD. `save_pretrained` and `AutoTokenizer` save and load it.

    Args:
        text: Text that contains the alphabet, such as the training part of a corpus.

    Returns:
        The tokenizer, with `pad_token` (id 0) and `unk_token` (id 1).

    Raises:
        DataError: The text is empty.

    Example:
        >>> tokenizer = character_tokenizer("abba")
        >>> tokenizer("abc")["input_ids"]
        [2, 3, 1]
        >>> tokenizer.decode([2, 3, 3, 2])
        'abba'
    """
    if not text:
        raise DataError("text must have at least one character, received none; pass the training text.")
    alphabet = sorted(set(text) - {PAD, UNKNOWN})
    vocabulary = {character: index for index, character in enumerate([PAD, UNKNOWN, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor:
    r"""Token ids of a whole text under a character tokenizer, by one table lookup.

    Equal to `tokenizer(text)["input_ids"]`, but much faster.

    Args:
        tokenizer: A tokenizer from `character_tokenizer`.
        text: Any text.

    Returns:
        Ids, `(len(text),)`, int64.

    Raises:
        ArgumentError: The tokenizer has tokens of more than one character, or no unknown token.

    Example:
        >>> encode(character_tokenizer("abba"), "abc")
        tensor([2, 3, 1])
    """
    vocabulary = tokenizer.get_vocab()
    if tokenizer.unk_token_id is None or any(len(token) != 1 for token in vocabulary):
        raise ArgumentError(
            f"tokenizer must be a character tokenizer, received {type(tokenizer).__name__}; pass one from "
            "character_tokenizer."
        )
    points = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype=np.uint32)
    table = np.full(0x110000, tokenizer.unk_token_id, dtype=np.int64)
    for character, index in vocabulary.items():
        table[ord(character)] = index
    return torch.from_numpy(table[points])


def unknown_rate(tokenizer: PreTrainedTokenizerBase, ids: Tensor) -> float:
    """Fraction of ids that are the unknown token.

    Args:
        tokenizer: The tokenizer that made the ids.
        ids: Token ids of any shape, at least one.

    Example:
        >>> tokenizer = character_tokenizer("abba")
        >>> unknown_rate(tokenizer, encode(tokenizer, "abcd"))
        0.5
    """
    return torch.eq(ids, int(tokenizer.unk_token_id)).double().mean().item()  # type: ignore[arg-type]


def build_small_gpt(
    tokenizer: PreTrainedTokenizerBase, *, layers: int, heads: int, width: int, context: int, dropout: float = 0.0
) -> GPT2LMHeadModel:
    r"""A GPT-2 with random weights, drawn from torch's global generator.

    Args:
        tokenizer: Tokenizer of the model, whose vocabulary it gets.
        layers: Number of residual blocks.
        heads: Number of attention heads $H$; divides `width`.
        width: Model width $D$.
        context: Maximum number of tokens.
        dropout: Dropout probability of embeddings, attention and residuals.

    Returns:
        The model in train mode, float32; its input and output embeddings are tied.

    Raises:
        ArgumentError: `heads` does not divide `width`.

    Example:
        >>> model = build_small_gpt(character_tokenizer("abba"), layers=1, heads=2, width=8, context=16)
        >>> model.config.vocab_size, model.num_parameters()
        (4, 1048)
    """
    if width % heads:
        raise ArgumentError(f"heads must divide width, received heads={heads} and width={width}; change one of them.")
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_layer=layers,
        n_head=heads,
        n_embd=width,
        n_positions=context,
        # The GELU of GPT-2 by the kernel of torch, which takes half the time on a CPU.
        activation_function="gelu_pytorch_tanh",
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        resid_pdrop=dropout,
        # The ids of GPT-2 lie outside a vocabulary of characters.
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,  # type: ignore[arg-type]
    )
    return _with_loss(GPT2LMHeadModel(config)).train()


def load_small_gpt(folder: str | Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads model and tokenizer of a finished run from local files.

    Args:
        folder: The `model` folder of a run, or the run folder that holds it.

    Returns:
        The model in eval mode, and its tokenizer.

    Raises:
        RunFolderError: The folder holds no checkpoint, or it cannot be read.
    """
    folder = Path(folder)
    folder = folder / "model" if (folder / "model").is_dir() else folder
    if not (folder / "config.json").is_file():
        raise RunFolderError(f"'{folder}' holds no model (config.json is missing); pass the folder of a finished run.")
    try:
        with quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, use_safetensors=True)
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers, safetensors and tokenizers have no common base class of errors
        reason = " ".join(str(error).split())[:300]
        raise RunFolderError(f"the model in '{folder}' cannot be read ({reason}); train it again.") from error
    return _with_loss(model).eval(), tokenizer


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hides progress bars and warnings of transformers; errors are still shown."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Makes torch use `count` threads; 0 leaves the number unchanged.

    Example:
        >>> with torch_threads(1):
        ...     torch.get_num_threads()
        1
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _with_loss(model):
    # GPT2LMHeadModel names no loss_type, for which transformers warns before it uses this one.
    model.loss_type = "ForCausalLM"
    return model
