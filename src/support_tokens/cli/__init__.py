"""The command `support-tokens`. Exit 0: done; 1: failed, with one sentence on stderr; 2: wrong usage."""

__all__ = ["main"]

import sys

from support_tokens.errors import SupportTokensError

INTERRUPTED = "interrupted; where a verb has --resume, that goes on from the last good state."


def main() -> None:
    """Runs the verb that the command line names; an error becomes one sentence, never a traceback."""
    try:
        from support_tokens.cli import analyze, bench, explore, generate, reproduce  # noqa: F401  # each file adds its verbs
        from support_tokens.cli.verbs import app

        app()
    except SupportTokensError as error:
        _end(str(error), 1)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("support_tokens"):
            raise  # a fault of this package, which no installation mends
        _end(f"the package {error.name} is not installed; run `pip install 'support-tokens[train]'`.", 1)
    except OSError as error:
        where = error.filename or "a file"
        _end(f"'{where}' cannot be read or written ({error.strerror or error}); free space or check permissions.", 1)
    except KeyboardInterrupt as interrupt:  # while the verbs are being imported
        _end(str(interrupt) or INTERRUPTED, 130)
    except SystemExit as ended:
        # Typer ends an interrupted verb without a word; what was raised still hangs on its exit.
        interrupt = _cause(ended, KeyboardInterrupt)
        if interrupt is None:
            raise
        _end(str(interrupt) or INTERRUPTED, 130)


def _cause(error: BaseException | None, kind: type[BaseException]) -> BaseException | None:
    """The error of a kind that led to this one, if any."""
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error


def _end(sentence: str, code: int) -> None:
    print(f"support-tokens: {sentence}", file=sys.stderr)
    sys.exit(code)
