r"""Text generation with the uncertainty of every token, by `model.generate` with a KV cache."""

__all__ = ["DEFAULT_SIGNALS", "generate"]

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from numbers import Integral
from typing import Any

from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from support_tokens.errors import ArgumentError, UnsupportedModelError
from support_tokens.generation.prompts import Prompts, encoded_prompts, end_tokens
from support_tokens.generation.rules import Rule
from support_tokens.generation.run import Run
from support_tokens.generation.sampling import RowSampler
from support_tokens.generation.signals.observer import Observer
from support_tokens.generation.signals.table import TOKEN_SIGNALS, chosen_signals
from support_tokens.law import EmbeddingLaw, EmbeddingPrior
from support_tokens.models import evaluating, in_turn, quiet_transformers
from support_tokens.report.records import GeneratedToken, Generation

DEFAULT_SIGNALS = (
    "TokenEntropy",
    "MaximumTokenProbability",
    "NegativeLogLikelihood",
    "NegativeLogMargin",
    "NegativeSign",
)
"""Signals that cost one LU factorisation per token and layer."""


def generate(
    model: nn.Module,
    tokenizer: Any,
    prompts: Prompts,
    *,
    max_new_tokens: int = 64,
    layers: Sequence[int] = (0,),
    view: str = "noise",
    signals: Sequence[str] | None = None,
    law: EmbeddingLaw | EmbeddingPrior | None = None,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | Sequence[int] = 0,
    margin_rule: Rule | None = None,
    stop_above: Mapping[str, float] | None = None,
    on_token: Callable[[int, GeneratedToken], None] | None = None,
    num_beams: int = 1,
) -> list[Generation]:
    r"""Continues prompts and returns every token with its uncertainty.

    Each forward pass costs one LU factorisation per text and layer. A text depends neither on the others in its batch
    nor on padding, and its signals equal those of `score_tokens` on the finished text. Of the model's own generation
    settings only the end tokens are used: penalties and biases would change the logits that the signals describe.

    Args:
        model: A causal language model of transformers, of a supported family; read in evaluation mode.
        tokenizer: Its tokenizer.
        prompts: A text, or a list of texts or lists of token ids.
        max_new_tokens: Maximum number of new tokens.
        layers: Indices of blocks.
        view: `noise` or `block`.
        signals: Names of `TOKEN_SIGNALS`; None: `DEFAULT_SIGNALS`.
        law: Law of the embeddings, for `NegativeLogDensity`.
        do_sample: Whether to sample; False takes the most probable token and ignores temperature and truncation.
        temperature: Above 0; divides the logits before sampling. Signals describe the unscaled logits.
        top_k: Number of tokens kept for sampling.
        top_p: Cumulative probability of the tokens kept for sampling.
        min_p: Smallest probability kept, relative to that of the best token.
        seed: Text i samples with `seed + i`, or `seed[i]`, independently of the rest of the batch.
        margin_rule: `MarginTemperature` or `MarginMinP`, applied to the margin of the first of `layers`;
            neither changes the most probable token.
        stop_above: Largest allowed value by name of a signal, in any layer if the name has none; a text abstains before
            a token whose signal is larger or NaN.
        on_token: Called with the index of the text and each new token.
        num_beams: Must be 1. Beam search moves texts between rows at every step, so signals that depend on earlier
            tokens (RAUQ, thresholds) would mix texts.

    Returns:
        One `Generation` per prompt. KeyboardInterrupt returns the tokens written so far; it is raised if there are
        none.

    Raises:
        ArgumentError: A prompt is empty or exceeds the context, or an option is out of range.
        UnsupportedModelError: The attention of the model cannot be read exactly, or it has no `generate`.

    Example:
        >>> from support_tokens.models import character_tokenizer, build_small_gpt
        >>> tokenizer = character_tokenizer("abc ")
        >>> model = build_small_gpt(tokenizer, layers=1, heads=2, width=8, context=32)
        >>> found = generate(model, tokenizer, ["ab", "cab a"], max_new_tokens=5)
        >>> [(len(one.tokens), one.finish_reason) for one in found]
        [(5, 'length'), (5, 'length')]
        >>> sorted(found[0].tokens[0].signals)[:2]
        ['MaximumTokenProbability', 'NegativeLogLikelihood']
    """
    if num_beams != 1:
        raise ArgumentError(
            f"num_beams must be 1, received {num_beams}: beam search moves texts between rows at every step, and "
            "signals would mix texts; sample, or decode greedily."
        )
    _check_options(max_new_tokens, temperature, top_k, top_p, min_p)
    if not hasattr(model, "generate"):
        raise UnsupportedModelError(
            f"{type(model).__name__} must have a method generate, received none; pass a causal language model of "
            "transformers."
        )
    encoded = encoded_prompts(model, tokenizer, prompts, max_new_tokens)
    limits = dict(stop_above or {})
    names = list(DEFAULT_SIGNALS if signals is None else signals) if not isinstance(signals, str) else signals
    chosen = chosen_signals(TOKEN_SIGNALS, names, law=law is not None)
    stops = chosen_signals(TOKEN_SIGNALS, [name.partition(" (")[0] for name in limits], law=law is not None)
    watched = tuple(dict.fromkeys((*chosen, *stops)))
    margin = () if margin_rule is None else (TOKEN_SIGNALS["NegativeLogMargin"],)
    ends = end_tokens(model, tokenizer)
    seeds = list(seed) if isinstance(seed, Sequence) else [seed + row for row in range(len(encoded.rows))]
    if not all(_whole(one) and -(2**63) <= int(one) < 2**63 for one in seeds):
        raise ArgumentError(f"seed must be whole numbers of 64 bits, received {seed!r:.60}; 0 is the default.")
    if len(seeds) != len(encoded.rows):
        raise ArgumentError(f"seed must be one number, or one a prompt, received {len(seeds)} for {len(encoded.rows)}.")
    drawing = [*_warpers(temperature, top_k, top_p, min_p), RowSampler(seeds)] if do_sample else []
    with ExitStack() as after:
        after.enter_context(in_turn(model))
        observer = Observer(model, (*watched, *margin), layers, view, law)
        after.callback(observer.remove)
        run = Run(observer, watched, tokenizer, encoded, ends, max_new_tokens, limits, margin_rule, on_token)
        for lent in (quiet_transformers(), evaluating(model), _generating_plainly(model, ends, encoded.pad)):
            after.enter_context(lent)
        try:
            model.generate(  # type: ignore[operator]
                input_ids=encoded.ids,
                attention_mask=encoded.mask,
                max_new_tokens=max_new_tokens,
                logits_processor=LogitsProcessorList([_Before(run), *drawing]),
                stopping_criteria=StoppingCriteriaList([run.after]),  # type: ignore[list-item]
                do_sample=False,  # RowSampler has drawn already
                num_beams=1,
                use_cache=True,
            )
        except KeyboardInterrupt:
            if not run.begun:
                raise
    return run.generations()


@contextmanager
def _generating_plainly(model: nn.Module, ends: frozenset[int], pad: int) -> Iterator[None]:
    """Within it the model's generation settings name its end and padding tokens, and nothing else.

    `model.generate` reads from them whatever its caller leaves open: penalties and biases, which change the logits
    before anything else sees them, stopping by time or by words, other caches and other searches.
    """
    owners = [vars(module) for module in model.modules() if "generation_config" in vars(module)]  # wrapped ones too
    before = [attributes["generation_config"] for attributes in owners]
    plain = GenerationConfig(eos_token_id=sorted(ends) or None, pad_token_id=pad)
    for attributes in owners:
        attributes["generation_config"] = plain
    try:
        yield
    finally:
        for attributes, settings in zip(owners, before, strict=True):
            attributes["generation_config"] = settings


class _Before(LogitsProcessor):
    """`Run.before` as an object; transformers inspects the signature of a bare method at every token (0.5 ms)."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.run.before(input_ids, scores)


def _check_options(
    max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None, min_p: float | None
) -> None:
    for name, value, fits, required in (
        (
            "max_new_tokens",
            max_new_tokens,
            _whole(max_new_tokens) and max_new_tokens >= 1,
            "a whole number, at least 1",
        ),
        ("temperature", temperature, 0 < temperature < float("inf"), "a finite number above 0"),
        ("top_k", top_k, top_k is None or (_whole(top_k) and top_k >= 1), "a whole number, at least 1"),
        ("top_p", top_p, top_p is None or 0 < top_p <= 1, "above 0 and at most 1"),
        ("min_p", min_p, min_p is None or 0 <= min_p <= 1, "from 0 to 1"),
    ):
        if not fits:
            raise ArgumentError(f"{name} must be {required}, received {value}; leave it out for its default.")


def _whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _warpers(temperature: float, top_k: int | None, top_p: float | None, min_p: float | None) -> list[LogitsProcessor]:
    """In the order in which transformers applies them."""
    found: list[LogitsProcessor] = [] if temperature == 1.0 else [TemperatureLogitsWarper(temperature)]
    found += [] if top_k is None else [TopKLogitsWarper(top_k)]
    found += [] if top_p is None else [TopPLogitsWarper(top_p)]
    return found if not min_p else [*found, MinPLogitsWarper(min_p)]
