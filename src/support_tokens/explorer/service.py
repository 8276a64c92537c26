r"""What the explorer does, apart from any page: it holds models, keeps limits, and analyzes one text at a time."""

__all__ = ["Explorer", "Limits"]

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from support_tokens.analysis import MarginReport, analyze
from support_tokens.errors import ArgumentError, DataError, SupportTokensError
from support_tokens.explorer.sources import ModelChoice
from support_tokens.models import decoder_blocks, load_model

_MOST_CLIENTS = 1024


@dataclass(frozen=True)
class Limits:
    """What one request may ask for.

    Args:
        characters: Of the text.
        tokens: Of the text.
        layers: At once.
        per_minute: Requests of one client.
    """

    characters: int = 2000
    tokens: int = 256
    layers: int = 4
    per_minute: int = 20


class Explorer:
    r"""Analyzes texts with the models it was given, and with no other.

    Args:
        sources: Models, the first of which is the default; read when they are first used, one in memory at a time.
        limits: What one request may ask for.
        clock: Seconds, for the limit by time.

    Raises:
        ArgumentError: There is no model, or two have one name.
    """

    def __init__(
        self,
        sources: Sequence[ModelChoice],
        limits: Limits | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sources = {source.label: source for source in sources}
        if not sources or len(self._sources) < len(sources):
            raise ArgumentError(
                "The explorer needs one model or more, each of its own name, received "
                f"{[source.label for source in sources]}; train one by `support-tokens demo`, fetch one by "
                "scripts/fetch_smollm2.py, or pass --model."
            )
        self.limits = limits or Limits()
        self._clock = clock
        self._working = threading.Lock()
        self._loaded: tuple[str, nn.Module, Any] | None = None
        self._seen: OrderedDict[str, deque[float]] = OrderedDict()
        self._stops: dict[str, threading.Event] = {}

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the models, the default first."""
        return tuple(self._sources)

    def depth(self, label: str) -> int:
        """The number of blocks of a model, which is read for it.

        Raises:
            ArgumentError: There is no such model.
            RunFolderError: It cannot be read.
        """
        with self._working:
            return len(decoder_blocks(self._model(label)[0]))

    def analyze(
        self,
        label: str,
        text: str,
        layers: Sequence[int],
        views: Sequence[str],
        *,
        client: str = "",
        progress: Callable[[int, int], None] | None = None,
    ) -> MarginReport:
        """The margins of a text.

        Args:
            label: Name of a model.
            text: The text.
            layers: Indices of blocks.
            views: `noise`, `block`, or both.
            client: Who asks; limits by time hold for each client.
            progress: Called with the numbers of tokens done and of all tokens.

        Raises:
            ArgumentError: There is no such model, layer or view, or a limit is passed.
            DataError: The text is empty or too long.
            KeyboardInterrupt: `stop` was called for this client.
        """
        self._count(client)
        self._check(text, layers)
        stop = self._stops[client] = threading.Event()

        def heard(done: int, total: int) -> None:
            if stop.is_set():
                raise KeyboardInterrupt
            if progress is not None:
                progress(done, total)

        with self._working:
            try:
                model, tokenizer = self._model(label)
                tokens = len(tokenizer(text, verbose=False)["input_ids"])
                if tokens > self.limits.tokens:
                    raise DataError(
                        f"the text has {tokens} tokens and at most {self.limits.tokens} are read here; shorten it, or "
                        "use `support-tokens analyze`, which has no such limit."
                    )
                return analyze(model, tokenizer, text, tuple(layers), tuple(views), name=label, progress=heard)
            finally:
                self._stops.pop(client, None)

    def stop(self, client: str) -> bool:
        """Ends the analysis of a client soon; False where there is none."""
        event = self._stops.get(client)
        if event is not None:
            event.set()
        return event is not None

    def _model(self, label: str) -> tuple[nn.Module, Any]:
        if self._loaded is None or self._loaded[0] != label:
            if label not in self._sources:
                raise ArgumentError(f"there is no such model here; choose one of {', '.join(self._sources)}.")
            source = self._sources[label]
            self._loaded = None  # before the next is read: one in memory
            try:
                self._loaded = (label, *load_model(source.path, gguf_file=source.gguf_file))
            except SupportTokensError:
                raise
            except OSError as error:
                raise DataError(f"the model '{label}' cannot be read ({error.strerror or error}).") from error
        return self._loaded[1:]

    def _check(self, text: str, layers: Sequence[int]) -> None:
        if not text.strip():
            raise DataError("there is no text; type one.")
        if len(text) > self.limits.characters:
            raise DataError(
                f"the text has {len(text)} characters and at most {self.limits.characters} are read here; shorten it."
            )
        if not 0 < len(layers) <= self.limits.layers:
            raise ArgumentError(f"choose 1 to {self.limits.layers} layers, received {len(layers)}.")

    def _count(self, client: str) -> None:
        now = self._clock()
        seen = self._seen.setdefault(client, deque())
        self._seen.move_to_end(client)
        while len(self._seen) > _MOST_CLIENTS:
            self._seen.popitem(last=False)
        while seen and now - seen[0] >= 60:
            seen.popleft()
        if len(seen) >= self.limits.per_minute:
            wait = max(1, round(60 - (now - seen[0])))
            raise ArgumentError(f"at most {self.limits.per_minute} texts a minute are read here; wait {wait} s.")
        seen.append(now)
