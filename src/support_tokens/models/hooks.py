"""Where a causal language model is hooked: its decoder, its residual blocks, and the embeddings that enter them."""

__all__ = ["Decoder", "decoder_blocks", "evaluating", "find_decoder", "hook_embeddings", "trains_before"]

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from support_tokens.errors import UnsupportedModelError
from support_tokens.models.compat import execution_device
from support_tokens.models.inputs import text_config, transformers_model


def decoder_blocks(model: nn.Module) -> nn.ModuleList:
    r"""The residual blocks of a causal language model, in order of depth.

    They are the one `ModuleList` whose length is the configuration's number of decoder layers. Wrappers (PEFT, DDP,
    `torch.compile`) only change names, so they may surround the model.

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
    config = text_config(model)
    # The decoder of an encoder-decoder family keeps the depth of the encoder under num_hidden_layers.
    names = ("decoder_layers", "num_decoder_layers", "num_hidden_layers")
    depth = next((n for name in names if isinstance(n := getattr(config, name, None), int)), None)
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
    if len(lists) != 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} must have exactly one list of decoder blocks as long as the configuration's "
            f"number of layers, received {len(lists)} lists of {depth} modules; pass a causal language model of "
            "transformers."
        )
    return lists[0]


@dataclass(frozen=True)
class Decoder:
    """The modules of a causal language model that a forward pass with labels goes through.

    Attributes:
        causal_model: The transformers model that computes logits and loss, without wrappers.
        module: The module called inside it whose output enters the language-model head.
        blocks: The residual blocks inside `module`, in order of depth.
        embedding: The token embedding.
    """

    causal_model: nn.Module
    module: nn.Module
    blocks: nn.ModuleList
    embedding: nn.Module


def find_decoder(model: nn.Module) -> Decoder:
    r"""Finds which modules a forward pass of `model` calls, proven by one forward pass of two tokens.

    `base_model` is not always among them: `OPTForCausalLM` calls `model.model.decoder`, so hooks on `model.model`
    never fire. The pass runs in evaluation mode on the model's own device, without a KV cache; modes, random number
    generators and hooks are afterwards what they were. It proves that every block is called once, in order, that
    block 0 reads embeddings of the configuration's width, and that a gradient of the logits reaches them through the
    first output of `module`.

    Args:
        model: A causal language model of transformers, wrapped (PEFT, DDP, `torch.compile`) or not.

    Raises:
        UnsupportedModelError: No causal language model is inside, the pass fails, or one of these proofs does.

    Example:
        >>> from transformers import OPTConfig, OPTForCausalLM
        >>> model = OPTForCausalLM(
        ...     OPTConfig(
        ...         num_hidden_layers=2,
        ...         hidden_size=8,
        ...         num_attention_heads=2,
        ...         ffn_dim=8,
        ...         vocab_size=11,
        ...         word_embed_proj_dim=8,
        ...         max_position_embeddings=8,
        ...     )
        ... )
        >>> found = find_decoder(model)
        >>> found.module is model.model.decoder, len(found.blocks)
        (True, 2)
    """
    causal_model, embedding, head = _causal_model(model)
    blocks = decoder_blocks(causal_model)
    name = type(causal_model).__name__
    # Modules around the blocks, outermost first; those around the head too compute logits and not what enters it.
    around = [m for m in causal_model.modules() if blocks in set(m.modules()) and head not in set(m.modules())]
    seen = _probe(name, causal_model, embedding, blocks, around)
    if seen.called != list(range(len(blocks))):
        raise UnsupportedModelError(
            f"{name} must call each of its {len(blocks)} blocks once and in order, received calls of {seen.called} in "
            "one forward pass; use a model without skipped, shared or repeated blocks."
        )
    width = text_config(causal_model).hidden_size
    if tuple(seen.embeddings.shape) != (1, 2, width):
        raise UnsupportedModelError(
            f"block 0 of {name} must read embeddings of shape (B, T, {width}), received "
            f"{tuple(seen.embeddings.shape)} for B = 1, T = 2; use a model with one residual stream of that width."
        )
    module = next((m for m in around if m in seen.outputs), None)
    if module is None or not _depends(seen.logits, seen.outputs[module]):
        raise UnsupportedModelError(
            f"{name} must compute its logits from the first output of a module that holds the blocks, received "
            f"{'none that is called' if module is None else type(module).__name__ + ', whose output is not used'}; "
            "use a causal language model that transformers ships."
        )
    if not _depends(seen.outputs[module], seen.embeddings):
        raise UnsupportedModelError(
            f"{name} must give the embeddings a gradient of its logits, received none; use a model whose forward pass "
            "neither detaches nor disables gradients."
        )
    return Decoder(causal_model, module, blocks, embedding)


class _Probe:
    """What the hooks of a probing pass keep."""

    def __init__(self) -> None:
        self.called: list[int] = []
        self.outputs: dict[nn.Module, Tensor] = {}
        self.embeddings: Tensor
        self.logits: Tensor


def _probe(name: str, model: nn.Module, embedding: nn.Module, blocks: nn.ModuleList, around: list[nn.Module]) -> _Probe:
    seen = _Probe()

    def enter(x: Tensor) -> Tensor:
        # A leaf that asks for a gradient, whatever is frozen.
        seen.embeddings = x.detach().requires_grad_()
        return seen.embeddings

    def leave(module: nn.Module, _args: tuple, output) -> None:
        seen.outputs[module] = output if isinstance(output, Tensor) else output[0]

    place = torch.device(execution_device(embedding))
    with ExitStack() as after:
        after.enter_context(evaluating(model))
        after.enter_context(torch.random.fork_rng([place] if place.type == "cuda" else []))
        after.enter_context(torch.inference_mode(False))
        after.enter_context(torch.enable_grad())
        after.enter_context(torch.compiler.set_stance("force_eager"))
        after.callback(blocks[0].register_forward_pre_hook(_EmbeddingHook(enter), with_kwargs=True).remove)
        for index, block in enumerate(blocks):
            after.callback(block.register_forward_pre_hook(lambda *_, n=index: seen.called.append(n)).remove)
        for module in around:
            after.callback(module.register_forward_hook(leave).remove)
        ids = torch.arange(2, device=place).unsqueeze(0)
        try:
            seen.logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)[0]
        except Exception as error:  # a model's own code raises whatever it likes
            reason = " ".join(str(error).split())[:200]
            raise UnsupportedModelError(
                f"{name} must accept a batch of token ids alone, received {type(error).__name__} ({reason}) for two "
                "tokens; pass a causal language model of transformers that reads text."
            ) from error
    return seen


def _depends(result: Tensor, source: Tensor) -> bool:
    """Whether `source` is in the autograd graph of `result`, which is walked so that no hook on a gradient runs."""
    if result is source:
        return True
    waiting, met = [result.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in met:
            continue
        if node is source.grad_fn or getattr(node, "variable", None) is source:
            return True
        met.add(node)
        waiting.extend(following for following, _ in node.next_functions)
    return False


def _causal_model(model: nn.Module) -> tuple[nn.Module, nn.Module, nn.Module]:
    """The transformers model that computes the loss, under any wrapper, its token embedding and its head."""
    inner = transformers_model(model)
    if hasattr(inner, "can_generate") and inner.can_generate() and not inner.config.is_encoder_decoder:
        embedding, head = inner.get_input_embeddings(), inner.get_output_embeddings()
        if isinstance(embedding, nn.Module) and isinstance(head, nn.Module):
            return inner, embedding, head
    raise UnsupportedModelError(
        f"model must be a causal language model of transformers with a language-model head, received "
        f"{type(inner).__name__}; load it with AutoModelForCausalLM."
    )


def hook_embeddings(model: nn.Module, function: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    r"""Calls `function(x)` on the embeddings $x$ `(B, T, D)` that enter the first block, in every forward pass.

    A tensor that `function` returns replaces $x$ (additive noise, for example); None leaves it unchanged.

    Args:
        model: A causal language model of transformers.
        function: Receives $x$, returns a tensor of the same shape or None.

    Returns:
        A handle; its `remove()` removes the hook.

    Example:
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


class _EmbeddingHook:
    """A forward pre-hook that is an object and no closure, so that a copied or pickled model has one of its own."""

    def __init__(self, function: Callable[[Tensor], Tensor | None]) -> None:
        self.function = function

    def __call__(self, _block: nn.Module, args: tuple, kwargs: dict):
        replaced = self.function(args[0] if args else kwargs["hidden_states"])
        if replaced is None:
            return None
        return ((replaced, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": replaced})


def trains_before(decoder: nn.Module, blocks: nn.ModuleList, layer: int) -> bool:
    """Whether any trainable parameter shapes the input of block `layer`: embeddings, or an earlier block.

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
        elif any(p.requires_grad for p in module.parameters(recurse=False)):
            return True
        else:
            waiting.extend(module.children())
    return False


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode within it; afterwards each module has its own mode again.

    Example:
        >>> model = nn.Sequential(nn.Dropout(), nn.Dropout())
        >>> _ = model[1].eval()
        >>> with evaluating(model):
        ...     model[0].training
        False
        >>> model[0].training, model[1].training
        (True, False)
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        model.train(modes[model])
        for module, training in modes.items():
            module.training = training
