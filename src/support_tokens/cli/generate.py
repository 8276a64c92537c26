"""`support-tokens generate`: text as a model writes it, each token with its uncertainty."""

__all__ = ["generate"]

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from support_tokens.cli.options import (
    MODEL,
    Device,
    Dtype,
    File,
    GgufFile,
    parse_layers,
    read_text,
    split_words,
    writable,
)
from support_tokens.errors import ArgumentError

if TYPE_CHECKING:
    from support_tokens.report.records import GeneratedToken, Generation

SAMPLE, WATCH = "Sampling", "Uncertainty"

# From certain to uncertain, on dark and on light grounds alike; the last are bold too, for readers who see no colours.
_STYLES = ("default", "default", "default", "yellow", "dark_orange", "bold dark_orange", "bold red")


def generate(
    model: Annotated[str, typer.Option(help=MODEL)],
    gguf_file: GgufFile = None,
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue; may be repeated.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A UTF-8 file with one prompt.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send each prompt as a user's turn, by the model's template.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 64,
    layers: Annotated[
        str, typer.Option(help="Blocks whose margins are read: 0,1 or 0-5 or -1; each costs.", rich_help_panel=WATCH)
    ] = "0",
    view: Annotated[str, typer.Option(help="noise or block.", rich_help_panel=WATCH)] = "noise",
    signals: Annotated[
        str | None,
        typer.Option(help="Comma-separated; by default entropy, probability and margin.", rich_help_panel=WATCH),
    ] = None,
    color: Annotated[
        str | None,
        typer.Option(help="Signal that colours the text; by default the entropy.", rich_help_panel=WATCH),
    ] = None,
    stop_above: Annotated[
        list[str] | None,
        typer.Option(help="SIGNAL=VALUE: abstain before a token above it; may be repeated.", rich_help_panel=WATCH),
    ] = None,
    sample: Annotated[
        bool, typer.Option("--sample", help="Sample tokens instead of taking the most probable one.")
    ] = False,
    temperature: Annotated[float | None, typer.Option(help="Above 0.", rich_help_panel=SAMPLE)] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the k most probable tokens.", rich_help_panel=SAMPLE)] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Keep the tokens that hold this probability.", rich_help_panel=SAMPLE)
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Keep tokens of at least this fraction of the highest probability.", rich_help_panel=SAMPLE),
    ] = None,
    margin_rule: Annotated[
        str | None,
        typer.Option(
            help="temperature or min-p set by the margin, with options: temperature:pivot=1,slope=0.5.",
            rich_help_panel=SAMPLE,
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of the first prompt; each next one adds 1.", rich_help_panel=SAMPLE)
    ] = 0,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    table: Annotated[
        bool, typer.Option("--table", help="Print the signals of every token.", rich_help_panel="Output")
    ] = False,
    json_: Annotated[Path | None, typer.Option("--json", help="Record to write.", rich_help_panel="Output")] = None,
    html: File = None,
) -> None:
    """Continue a prompt and show how sure the model is of each token: entropy, margins, and abstaining by either."""
    sampling: dict[str, Any] = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "margin_rule": margin_rule,
    }  # fmt: skip
    sampling = {name: value for name, value in sampling.items() if value is not None}
    if sampling and not sample:
        raise ArgumentError(
            f"--{next(iter(sampling)).replace('_', '-')} needs --sample, received it alone; pass --sample too."
        )
    prompts = _prompts(prompt, prompt_file)
    limits = _limits(stop_above or ())
    with writable(("--json", json_), ("--html", html)):
        from support_tokens.files import versions, write_text
        from support_tokens.generation import DEFAULT_SIGNALS, encoded_prompts
        from support_tokens.generation import generate as generate_texts
        from support_tokens.generation.signals import TOKEN_SIGNALS, chosen_signals
        from support_tokens.models import checked_device, decoder_blocks, load_model
        from support_tokens.report import generation_html
        from support_tokens.report.records import GenerationRecord

        names = list(DEFAULT_SIGNALS) if signals is None else list(split_words(signals))
        if not names:
            raise ArgumentError("--signals must name one signal or more, received none; leave it out for the default.")
        chosen_signals(TOKEN_SIGNALS, names, law=False)
        shade = color or ("TokenEntropy" if "TokenEntropy" in names else names[0])
        if shade not in names:
            raise ArgumentError(
                f"--color must be one of the signals, {', '.join(names)}, received {color!r}; add it to them."
            )
        options = {key: value for key, value in sampling.items() if key != "margin_rule"}
        if margin_rule is not None:
            options["margin_rule"] = _rule(margin_rule)
        checked_device(device)
        loaded, tokenizer = load_model(model, gguf_file=gguf_file, dtype=dtype, device=device)
        inputs = [_turn(tokenizer, text, model) for text in prompts] if chat else prompts
        encoded_prompts(loaded, tokenizer, inputs, max_new_tokens)  # all of them, before the first is continued
        chosen = parse_layers(layers, len(decoder_blocks(loaded)))
        generations: list[Generation] = []
        try:
            for place, text in enumerate(inputs):
                shown = text if isinstance(text, str) else tokenizer.decode(text)
                stream = _Stream(shown, shade)
                (generation,) = generate_texts(
                    loaded, tokenizer, [text], max_new_tokens=max_new_tokens, layers=chosen, view=view, signals=names,
                    do_sample=sample, seed=seed + place, stop_above=limits, on_token=stream.token, **options,
                )  # fmt: skip
                generations.append(generation)
                stream.end(generation, table)
                if generation.finish_reason == "interrupted":
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            print("support-tokens: interrupted; what was written is kept.", file=sys.stderr)
            raise typer.Exit(130) from None
        finally:
            if generations:
                settings = {
                    "layers": list(chosen), "view": view, "max_new_tokens": max_new_tokens, "sample": sample,
                    "seed": seed, "dtype": dtype, "stop_above": limits, "chat": chat, "color": shade, **sampling,
                }  # fmt: skip
                record = GenerationRecord(model, tuple(generations), settings, versions())
                if json_ is not None:
                    record.to_json(json_)
                    print(f"Wrote {json_}")
                if html is not None:
                    write_text(html, generation_html(record, shade))
                    print(f"Wrote {html}")


class _Stream:
    """One text on the terminal as it is written, coloured where the terminal has colours.

    The prompt comes with the first token, so that an error before it stands alone.
    """

    def __init__(self, prompt: str, color: str) -> None:
        from rich.console import Console

        self._console, self._prompt, self._color = Console(), prompt, color
        self._values: list[float] = []
        self._printed: str | None = None

    def _print(self, text: str, style: str) -> None:
        from rich.text import Text

        from support_tokens.report import visible

        # A Text has no markup, and what is left of control characters acts on no terminal.
        lines = [visible(line) if line else "" for line in text.split("\n")]
        self._console.print(Text("\n".join(lines), style=style), end="", soft_wrap=True, highlight=False)

    def _begin(self) -> None:
        if self._printed is None:
            self._printed = ""
            self._print(self._prompt, "dim")

    def token(self, _row: int, token: "GeneratedToken") -> None:
        from support_tokens.report import band, signal_limits, signal_value

        self._begin()
        value, step = signal_value(token, self._color), 0
        if value is not None:
            self._values.append(value)
            low, high = signal_limits(self._color, self._values)
            step = band(-value, (-low, -high))
        self._printed = f"{self._printed}{token.text}"
        self._print(token.text, _STYLES[step])

    def end(self, generation: "Generation", table: bool) -> None:
        """What is left of the text, the legend, why it ended, and the table if it is wanted."""
        from support_tokens.report import generation_table, number, signal_limits

        self._begin()
        self._print(generation.text[len(self._printed or "") :] + "\n", "default")
        if self._values and not self._console.no_color and self._console.is_terminal:
            low, high = signal_limits(self._color, self._values)
            self._print(f"{self._color} {number(low)} ", "dim")
            for style in _STYLES[2:]:
                self._print("■", style)
            self._print(f" {number(high)}\n", "dim")
        self._print(generation.sentence + "\n", "dim")
        if table:
            self._console.print(generation_table(generation), highlight=False)


def _turn(tokenizer: Any, text: str, model: str) -> list[int]:
    """A user's turn by the chat template, up to where the assistant answers."""
    if not getattr(tokenizer, "chat_template", None):
        raise ArgumentError(
            f"--chat requires a chat template, received '{model}', whose tokenizer has none; leave --chat out."
        )
    turn = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    )
    return tokenizer(turn, add_special_tokens=False)["input_ids"]


def _prompts(prompt: list[str] | None, prompt_file: Path | None) -> list[str]:
    if bool(prompt) == (prompt_file is not None):
        raise ArgumentError(
            f"one of --prompt and --prompt-file is required, received {'both' if prompt else 'none'}; pass one."
        )
    return list(prompt or ()) if prompt_file is None else [read_text(prompt_file)]


def _limits(texts: Sequence[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        if name in found:
            raise ArgumentError(f"--stop-above must name a signal once, received {name} twice; keep the lower value.")
        try:
            found[name] = float(value)
        except ValueError as error:
            raise ArgumentError(
                f"--stop-above must be SIGNAL=VALUE, like NegativeLogMargin=3, received {text!r}; give a number."
            ) from error
    return found


def _rule(text: str):
    from support_tokens.generation import MarginMinP, MarginTemperature

    rules = {"temperature": MarginTemperature, "min-p": MarginMinP}
    name, _, options = text.partition(":")
    try:
        numbers = {key.strip(): float(value) for key, value in (word.split("=") for word in split_words(options))}
        return rules[name](**numbers)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(
            f"--margin-rule must be temperature or min-p, like min-p:pivot=1,slope=0.5, received {text!r}; "
            "see the guide for the options of each."
        ) from error
