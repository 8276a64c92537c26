"""Architectures as tables: where each family of models keeps projections, norms and rotations."""

__all__ = [
    "TABLES",
    "Architecture",
    "Norm",
    "architecture_of",
    "effective_weight",
    "has_attention",
    "supported_families",
]

from torch import nn

from support_tokens.errors import UnsupportedModelError
from support_tokens.models.architectures.families import TABLES
from support_tokens.models.architectures.missing import missing_for
from support_tokens.models.architectures.table import Architecture, Norm
from support_tokens.models.architectures.weights import effective_weight
from support_tokens.models.hooks import decoder_blocks
from support_tokens.models.inputs import text_config


def supported_families() -> tuple[str, ...]:
    """Names of the families whose attention is read exactly, in the order of the tables.

    Example:
        >>> supported_families()[:3]
        ('GPT-2', 'GPT-BigCode (StarCoder)', 'GPT-NeoX (Pythia)')
    """
    return tuple(table.family for table in TABLES)


def architecture_of(model: nn.Module) -> Architecture:
    """The table of the family that `model` belongs to.

    Args:
        model: A causal language model of transformers; wrappers (PEFT, DDP, `torch.compile`) are seen through.

    Returns:
        The table, checked against the modules of every block.

    Raises:
        UnsupportedModelError: No table describes the model, or the model departs from its table.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=8))
        >>> architecture_of(model).family
        'GPT-2'
    """
    config = text_config(model)
    name = type(model).__name__
    if config is None:
        raise UnsupportedModelError(
            f"{name} has no configuration of transformers, which is required to know its attention; pass a causal "
            "language model of transformers."
        )
    table = next((t for t in TABLES if config.model_type in t.model_types), None)
    if table is None:
        raise UnsupportedModelError(
            f"{name} (model_type {config.model_type!r}) must be of a family whose attention is read exactly, and "
            f"{missing_for(config.model_type)}; use one of {', '.join(supported_families())}."
        )
    for attribute, value in table.required:
        found = getattr(config, attribute, value)
        if found != value:
            raise UnsupportedModelError(
                f"{name} has {attribute} = {found!r} where the formula for {table.family} requires {value!r}; "
                "use a model without it."
            )
    blocks = decoder_blocks(model)
    attending = [block for block in blocks if not table.hybrid or has_attention(table, block)]
    for block in attending or blocks:
        _check_paths(name, table, block)
    return table


def has_attention(table: Architecture, block: nn.Module) -> bool:
    """Whether `block` has a module where the table has the attention; in hybrid models some have none."""
    try:
        block.get_submodule(table.attention)
    except AttributeError:
        return False
    return True


def _check_paths(name: str, table: Architecture, block: nn.Module) -> None:
    within = [f"{table.attention}.{path}" for path in (*table.projections, table.output)]
    within += [norm.path for norm in (table.input_norm, table.output_norm) if norm is not None and not norm.switch]
    for norm in (table.query_norm, table.key_norm):
        within += [f"{table.attention}.{norm.path}"] if norm is not None and not norm.switch else []
    for path in within:
        try:
            block.get_submodule(path)
        except AttributeError:
            raise UnsupportedModelError(
                f"{name} has no module {path!r} in {type(block).__name__} where the table of {table.family} "
                "requires it; use the class that transformers ships for this model_type."
            ) from None
