"""Serves the explorer: on this machine only, unless told otherwise."""

__all__ = ["explorer_app", "serve_explorer"]

import asyncio
import ipaddress
import json
import socket
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import uvicorn  # type: ignore[import-not-found]  # an extra
from starlette.applications import Starlette  # type: ignore[import-not-found]  # an extra
from starlette.datastructures import MutableHeaders  # type: ignore[import-not-found]  # an extra
from starlette.exceptions import HTTPException  # type: ignore[import-not-found]  # an extra
from starlette.middleware import Middleware  # type: ignore[import-not-found]  # an extra
from starlette.middleware.trustedhost import TrustedHostMiddleware  # type: ignore[import-not-found]  # an extra
from starlette.requests import Request  # type: ignore[import-not-found]  # an extra
from starlette.responses import (  # type: ignore[import-not-found]  # an extra
    HTMLResponse,
    JSONResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route  # type: ignore[import-not-found]  # an extra

from support_tokens.errors import ArgumentError, SupportTokensError
from support_tokens.explorer.page import ASSETS, result_page, start_page
from support_tokens.explorer.results import Results
from support_tokens.explorer.service import Explorer

_LOCAL = ("127.0.0.1", "localhost", "[::1]", "::1")
_KINDS = {"html": "text/html; charset=utf-8", "json": "application/json"}
_LARGEST = 64 * 1024
_WAITING = 16
_HEADERS = {
    "content-security-policy": "object-src 'none'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
_GONE = "This result is not kept any more; analyze the text again."


def explorer_app(explorer: Explorer, hosts: tuple[str, ...] | None = _LOCAL) -> Any:
    """The explorer as an application (ASGI).

    A request must name a known host, against rebinding of names, and come from this page if it says where it comes
    from, so that no other site reaches the explorer through a visitor's browser.

    Args:
        explorer: Models and limits.
        hosts: Names under which it may be asked for; None: any.
    """
    results, pool, busy = Results(), ThreadPoolExecutor(_WAITING), set()

    async def start(_request: Request) -> Response:
        return HTMLResponse(start_page(explorer))

    async def asset(request: Request) -> Response:
        name = request.url.path[1:]
        return Response(ASSETS[name], media_type="text/css" if name.endswith("css") else "text/javascript")

    async def depth(request: Request) -> Response:
        content = await _content(request)
        try:
            label = str(content.get("model", ""))
            return JSONResponse(
                {"depth": await asyncio.get_running_loop().run_in_executor(pool, explorer.depth, label)}
            )
        except SupportTokensError as error:
            return JSONResponse({"error": str(error)})

    async def analyze(request: Request) -> Response:
        content = await _content(request)
        if len(busy) >= _WAITING:
            raise HTTPException(503, "Too many texts are waiting; try again.")
        return StreamingResponse(_events(explorer, results, pool, busy, content), media_type="text/event-stream")

    async def stop(request: Request) -> Response:
        return JSONResponse({"stopped": explorer.stop(str((await _content(request)).get("client", "")))})

    async def result(request: Request) -> Response:
        name = request.path_params["name"]
        content = results.get(name, "html")
        if content is None:
            raise HTTPException(404, _GONE)
        return HTMLResponse(result_page(explorer, name, content.decode()))

    async def record(request: Request) -> Response:
        name, kind = request.path_params["name"], request.path_params["kind"]
        content = results.get(name, kind)
        if content is None:
            raise HTTPException(404, _GONE)
        return Response(content, media_type=_KINDS[kind], headers={"content-security-policy": "sandbox allow-scripts"})

    async def changes(request: Request) -> Response:
        try:
            page = results.changes(request.path_params["before"], request.path_params["after"])
        except SupportTokensError as error:
            raise HTTPException(400, str(error)) from error
        if page is None:
            raise HTTPException(404, _GONE)
        return HTMLResponse(page)

    routes = [
        Route("/", start),
        *(Route(f"/{name}", asset) for name in ASSETS),
        Route("/result/{name}", result),
        Route("/record/{name}.{kind}", record),
        Route("/changes/{before}/{after}", changes),
        *(Route(f"/{action.__name__}", action, methods=["POST"]) for action in (depth, analyze, stop)),
    ]
    trusted = Middleware(TrustedHostMiddleware, allowed_hosts=["*"] if hosts is None else list(hosts))
    return Starlette(routes=routes, middleware=[Middleware(Guard), trusted])


class Guard:
    """Middleware (ASGI): strict headers, and no request from another site."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Hands on what does not come from another site, and adds headers to the answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def strict(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        headers = Request(scope).headers
        origin = headers.get("origin")
        foreign = origin is not None and origin.partition("://")[2] != headers.get("host")
        app = Response("Requests from another site are refused.", 403) if foreign else self._app
        await app(scope, receive, strict)


async def _content(request: Request) -> dict[str, Any]:
    """The JSON object of a request, which may hide its length."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _LARGEST:
            raise HTTPException(413, "The request is too large.")
    try:
        content = json.loads(body)
    except ValueError as error:
        raise HTTPException(400, "The request must be JSON.") from error
    if not isinstance(content, dict):
        raise HTTPException(400, "The request must be a JSON object.")
    return content


async def _events(
    explorer: Explorer, results: Results, pool: ThreadPoolExecutor, busy: set[object], content: dict[str, Any]
) -> AsyncIterator[str]:
    """Progress of one analysis, and at its end the name of the result or what went wrong."""
    loop, events = asyncio.get_running_loop(), asyncio.Queue()
    client, ticket = str(content.get("client", "")), object()
    busy.add(ticket)

    def tell(**event: Any) -> None:
        loop.call_soon_threadsafe(events.put_nowait, event)

    def work() -> None:
        try:
            report = explorer.analyze(
                str(content.get("model", "")), str(content.get("text", "")), _listed(content, "layers"),
                _listed(content, "views"), client=client, progress=lambda done, total: tell(done=done, total=total),
            )  # fmt: skip
            tell(name=results.keep(report))
        except SupportTokensError as error:
            tell(error=str(error))
        except KeyboardInterrupt:
            tell(error="stopped; nothing of this text is shown.")
        except BaseException:
            tell(error="the analysis failed; the terminal says why.")
            raise

    work_done = loop.run_in_executor(pool, work)
    try:
        while True:
            event = await events.get()
            yield f"data: {json.dumps(event)}\n\n"
            if "done" not in event:
                break
        await work_done
    finally:
        busy.discard(ticket)
        explorer.stop(client)  # nobody waits for what a closed page asked for


def _listed(content: dict[str, Any], name: str) -> list[Any]:
    value = content.get(name)
    return value if isinstance(value, list) else []


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
