"""The command `support-tokens`. Exit status: 0 done, 1 failed (one sentence on stderr), 2 wrong usage."""

__all__ = ["main"]

import sys

from support_tokens._lazy import install_hint
from support_tokens.errors import SupportTokensError


def main() -> None:
    """Runs the verb named on the command line; an error becomes one sentence, never a traceback."""
    try:
        from support_tokens.cli.app import app

        app()
    except SupportTokensError as error:
        _end(str(error), 1)
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package == "support_tokens":
            raise  # a bug of this package, which no installation fixes
        if isinstance(error, ModuleNotFoundError):
            _end(f"the package {package} is not installed; run `{install_hint(package)}`.", 1)
        _end(" ".join(str(error).split()), 1)  # what a package says of another that it wants
    except OSError as error:
        path = error.filename or "a file"
        _end(f"'{path}' cannot be read or written ({error.strerror or error}); free space or check permissions.", 1)
    except KeyboardInterrupt as interrupt:  # while the verbs are being imported
        _end(str(interrupt) or "interrupted.", 130)
    except SystemExit as ended:
        # Typer exits from an interrupted verb without a message; the interrupt is still in the exit's context.
        interrupt = _cause(ended, KeyboardInterrupt)
        if interrupt is None:
            raise
        _end(str(interrupt) or "interrupted.", 130)


def _cause(error: BaseException | None, kind: type[BaseException]) -> BaseException | None:
    """The error of a kind in the chain of causes, if any."""
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error


def _end(sentence: str, code: int) -> None:
    print(f"support-tokens: {sentence}", file=sys.stderr)
    sys.exit(code)
