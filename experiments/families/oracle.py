r"""What attention and the law do, by autograd through the model's own block: no formula and no table of the package.

$\mu$ is what the block adds to its input once its feed-forward part is silenced, all in float64.
"""

__all__ = [
    "OracleError",
    "attention_jacobians",
    "attention_layers",
    "everything_in_float64",
    "law_penalty",
    "residual_blocks",
]

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_OUTSIDE = re.compile(r"vision|visual|audio|expert|tower|perceiver|connector|projector|qformer|image|speech")
_ATTENTION = re.compile(r"(?<!linear_)attn|attention")
_NORM = re.compile(r"norm|ln_|layrnorm")
_FEED_FORWARD = re.compile(r"mlp|moe|ffn|feed_forward|feedforward|ff$|^fc2$|^output$|experts")


class OracleError(Exception):
    """A block of which the oracle cannot tell what its attention adds."""


class _Float64(TorchFunctionMode):
    """Turns a model's own casts to float32 into casts to float64: what is left to differ is the formula."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.float:
            return args[0].double()
        wide = lambda a: torch.float64 if a is torch.float32 else a  # noqa: E731
        if func in (torch.Tensor.to, torch.Tensor.type, torch.Tensor.softmax, torch.softmax, nn.functional.softmax):
            args, kwargs = tuple(map(wide, args)), {k: wide(v) for k, v in kwargs.items()}
        return func(*args, **kwargs)


@contextmanager
def everything_in_float64() -> Iterator[None]:
    """Lets what runs inside compute in float64 where it would cast to float32."""
    with _Float64():
        yield


def residual_blocks(model: nn.Module) -> nn.ModuleList:
    """The blocks of the text decoder: the first list of modules of which one has an attention, or else the first.

    Raises:
        OracleError: There is none.
    """
    lists = [m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) and not _OUTSIDE.search(n)]
    if not lists:
        raise OracleError("no list of blocks was found")
    return next((blocks for blocks in lists if any(_attentions(block) for block in blocks)), lists[0])


def attention_layers(model: nn.Module) -> tuple[int, ...]:
    """Indices of the blocks that have an attention; in a hybrid model the others have none."""
    return tuple(index for index, block in enumerate(residual_blocks(model)) if _attentions(block))


def attention_jacobians(model: nn.Module, layers: tuple[int, ...], batch: dict[str, Tensor]) -> dict[int, Tensor]:
    r"""$\partial\mu_t/\partial x_t$ `(B, T, D, D)` of each layer.

    Raises:
        OracleError: What attention adds cannot be told from what else the block does.
    """
    blocks, calls = residual_blocks(model), {}
    handles = [
        blocks[layer].register_forward_pre_hook(
            lambda _module, args, kwargs, layer=layer: calls.__setitem__(layer, (args, dict(kwargs))), with_kwargs=True
        )
        for layer in layers
    ]
    try:
        with torch.no_grad(), everything_in_float64():
            model(**batch, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    with everything_in_float64():
        return {layer: _jacobian(blocks[layer], *calls[layer]) for layer in layers}


def law_penalty(x: Tensor, w_q: Tensor, w_k: Tensor, mask: Tensor | None) -> Tensor:
    r"""Mean over real tokens of $-\log|\det(I - \partial\mu_t/\partial x_t)|$, $\mu_t$ the softmax mean of earlier
    embeddings.

    Args:
        x: Embeddings, `(B, T, D)`.
        w_q: `(R, D)`.
        w_k: `(R, D)`.
        mask: 1 at real tokens, `(B, T)`, or None.
    """
    penalties = []
    for row in range(x.shape[0]):
        tokens = x[row] if mask is None else x[row][mask[row].bool()]
        for t in range(len(tokens)):
            past = tokens[:t]

            def mean(own: Tensor, past: Tensor = past) -> Tensor:
                logits = (past @ w_k.T) @ (w_q @ own) / w_q.shape[0] ** 0.5
                return torch.softmax(logits, 0) @ past

            jacobian = torch.autograd.functional.jacobian(mean, tokens[t]) if t else torch.zeros(2 * x.shape[-1:])
            penalties.append(-torch.linalg.slogdet(torch.eye(x.shape[-1]).to(x) - jacobian).logabsdet)
    return torch.stack(penalties).mean()


def _attentions(block: nn.Module) -> list[nn.Module]:
    return [m for n, m in block.named_children() if _ATTENTION.search(n) and not _NORM.search(n)]


def _jacobian(block: nn.Module, args: tuple, kwargs: dict) -> Tensor:
    if args:
        x, call = args[0], lambda x: block(x, *args[1:], **kwargs)
    else:
        x, call = kwargs.pop("hidden_states"), lambda x: block(hidden_states=x, **kwargs)

    def added(x: Tensor) -> Tensor:
        out = call(x)
        return (out[0] if isinstance(out, tuple) else out) - x

    silent = [m for n, m in block.named_children() if _FEED_FORWARD.search(n) and not _NORM.search(n)]
    handles = [module.register_forward_hook(_silence) for module in silent]
    try:
        _check_alone(block, added, x)
        return _diagonal(added, x)
    finally:
        for handle in handles:
            handle.remove()


def _silence(_module: nn.Module, _args: tuple, output):
    return (0 * output[0], *output[1:]) if isinstance(output, tuple) else 0 * output


def _check_alone(block: nn.Module, added, x: Tensor) -> None:
    """Without attention too, the block must add the same to any input."""
    attentions = _attentions(block)
    if not attentions:
        raise OracleError(f"{type(block).__name__} has no attention of its own")
    handles = [module.register_forward_hook(_silence) for module in attentions]
    try:
        with torch.no_grad():
            generator = torch.Generator().manual_seed(1)
            other = x + torch.randn(x.shape, generator=generator, dtype=x.dtype)
            difference = (added(x) - added(other)).abs().max()
    finally:
        for handle in handles:
            handle.remove()
    if not difference < 1e-9:
        raise OracleError(f"{type(block).__name__} changes its input by more than attention and feed-forward part")


def _diagonal(function, x: Tensor) -> Tensor:
    x = x.detach().clone().requires_grad_()
    value = function(x)
    batch, length, width = x.shape
    blocks = torch.zeros(batch, length, width, width, dtype=x.dtype)
    dimensions = torch.arange(width)
    for t in range(length):
        # Sequences of a batch do not see each other: one backward pass serves them all, and one call all dimensions.
        seeds = torch.zeros(width, batch, length, width, dtype=x.dtype)
        seeds[dimensions, :, t, dimensions] = 1
        (gradients,) = torch.autograd.grad(value, x, seeds, retain_graph=True, is_grads_batched=True)
        blocks[:, t] = gradients[:, :, t].transpose(0, 1)
    return blocks
