"""Where the embeddings enter a causal language model: the one site that law, noise and analysis share."""

__all__ = ["decoder_blocks", "hook_embeddings", "trains_before"]

from collections.abc import Callable

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from support_tokens.errors import UnsupportedModelError


def decoder_blocks(model: nn.Module) -> nn.ModuleList:
    r"""The residual blocks of a causal language model, in order of depth.

    They are the one `ModuleList` whose length is the configuration's number of layers; wrappers (PEFT, DDP,
    `torch.compile`) are seen through, since only names change under them.

    Args:
        model: A causal language model of transformers, wrapped or not.

    Returns:
        The list of blocks; block 0 reads the embeddings $x$.

    Raises:
        UnsupportedModelError: No list of modules, or more than one, has that length.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=8))
        >>> len(decoder_blocks(model))
        2
    """
    config = next((c for m in model.modules() if (c := getattr(m, "config", None)) is not None), None)
    if config is not None and hasattr(config, "get_text_config"):
        config = config.get_text_config(decoder=True)
    depth = getattr(config, "num_hidden_layers", None)
    found = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
    if len(found) != 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} has {len(found)} lists of {depth} modules where exactly one list of decoder "
            f"blocks, "
            "as long as config.num_hidden_layers, is required; pass a causal language model of transformers."
        )
    return found[0]


def hook_embeddings(model: nn.Module, function: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    r"""Calls `function(x)` on the embeddings $x$ `(B, T, D)` that enter the first block, in every forward pass.

    A tensor that `function` returns takes the place of $x$ (additive noise, say); None leaves it as it is.

    Args:
        model: A causal language model of transformers.
        function: Receives $x$, returns a tensor of the same shape or None.

    Returns:
        A handle; its `remove()` takes the hook away.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=8))
        >>> seen = []
        >>> handle = hook_embeddings(model, lambda x: seen.append(tuple(x.shape)))
        >>> _ = model(torch.zeros(1, 4, dtype=torch.long))
        >>> handle.remove()
        >>> seen
        [(1, 4, 8)]
    """

    return decoder_blocks(model)[0].register_forward_pre_hook(_EmbeddingHook(function), with_kwargs=True)


def trains_before(decoder: nn.Module, blocks: nn.ModuleList, layer: int) -> bool:
    """Whether any parameter is trained that shapes the input of block `layer`: embeddings, or an earlier block.

    Args:
        decoder: The base model, without head.
        blocks: Its residual blocks.
        layer: Index of a block.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=8))
        >>> _ = model.requires_grad_(False), model.transformer.h[0].requires_grad_(True)
        >>> [trains_before(model.transformer, model.transformer.h, layer) for layer in (0, 1)]
        [False, True]
    """
    waiting = [decoder]
    while waiting:
        module = waiting.pop()
        if module is blocks:
            waiting.extend(blocks[:layer])  # type: ignore[arg-type]
        elif any(p is not None and p.requires_grad for p in module._parameters.values()):
            return True
        else:
            waiting.extend(module.children())
    return False


class _EmbeddingHook:
    """A forward pre-hook; an object rather than a closure, so that a deep copy or a pickle of the model has one of its
    own."""

    def __init__(self, function: Callable[[Tensor], Tensor | None]) -> None:
        self.function = function

    def __call__(self, _block: nn.Module, args: tuple, kwargs: dict):
        x = args[0] if args else kwargs["hidden_states"]
        replaced = self.function(x)
        if replaced is None:
            return None
        if args:
            return (replaced, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": replaced}
