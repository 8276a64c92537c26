"""Serves the explorer: on this machine only, unless told otherwise."""

__all__ = ["explorer_app", "serve_explorer"]

import ipaddress
import socket
from collections.abc import Callable
from typing import Any

import fastapi  # type: ignore[import-not-found]  # an extra
import uvicorn  # type: ignore[import-not-found]  # an extra
from fastapi.responses import Response  # type: ignore[import-not-found]  # an extra

from support_tokens.errors import ArgumentError
from support_tokens.explorer.guard import Guard
from support_tokens.explorer.page import STYLE, build_page, gr
from support_tokens.explorer.results import Results
from support_tokens.explorer.service import Explorer

_LOCAL = ("127.0.0.1", "localhost", "[::1]")
_KINDS = {"html": "text/html; charset=utf-8", "json": "application/json"}
# The page of a record brings its own policy; the sandbox holds where it is opened alone, too.
_RECORD_POLICY = "sandbox allow-scripts; frame-ancestors 'self'"


def explorer_app(explorer: Explorer, hosts: tuple[str, ...] | None = _LOCAL) -> Any:
    """The explorer as an application (ASGI).

    Args:
        explorer: Models and limits.
        hosts: Names under which it may be asked for; None: any.
    """
    results = Results()
    app = fastapi.FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/record/{name}.{kind}")
    def record(name: str, kind: str) -> Response:
        content = results.get(name, kind)
        if content is None:
            return Response("This result is not kept any more; analyze the text again.", 404, media_type="text/plain")
        return Response(content, media_type=_KINDS[kind], headers={"content-security-policy": _RECORD_POLICY})

    gr.mount_gradio_app(
        app,
        build_page(explorer, results),
        "/",
        footer_links=[],
        run_history=False,
        show_error=False,
        ssr_mode=False,
        mcp_server=False,
        pwa=False,
        enable_monitoring=False,
        theme=gr.themes.Default(primary_hue=gr.themes.colors.blue),  # pyright: ignore[reportPrivateImportUsage]
        css=STYLE,
        max_file_size=1,
    )
    return Guard(app, hosts)


def serve_explorer(
    explorer: Explorer, *, host: str = "127.0.0.1", port: int = 7860, ready: Callable[[str], None] = print
) -> None:
    """Serves until it is interrupted.

    Args:
        explorer: Models and limits.
        host: Address to listen on; any other than 127.0.0.1 lets others in.
        port: Port; 0 takes any that is free.
        ready: Called with the address as soon as the page can be opened.

    Raises:
        ArgumentError: The address cannot be listened on.
    """
    listening = _listen(host, port)
    address = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
    app = explorer_app(explorer, _LOCAL if _is_local(host) else None)
    config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, ws="none")
    ready(address)
    try:
        uvicorn.Server(config).run(sockets=[listening])
    finally:
        listening.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        listening.close()
        reason = getattr(error, "strerror", None) or error
        raise ArgumentError(
            f"{host}:{port} cannot be listened on ({reason}); choose another --port, or another --host."
        ) from error
    return listening


def _is_local(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
