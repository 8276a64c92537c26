"""What stands between the network and the page: known hosts, known paths, small requests, and strict headers."""

__all__ = ["Guard"]

import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

# All that the page needs of gradio. What is not named here, uploads, files and proxies among it, is not there.
_READ = re.compile(
    r"/|/(config|theme\.css|favicon\.ico|manifest\.json|robots\.txt)|/(assets|static|svelte)/[\w./@-]+"
    r"|/record/[\w-]{1,64}\.(html|json)"
    r"|/gradio_api/(config|info|startup-events|app_id|token|theme\.css|queue/data|heartbeat/\w+)"
)
_WRITE = re.compile(r"/gradio_api/(queue/join|cancel|reset)/?")

_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; frame-src 'self'; object-src 'none'; "
    "base-uri 'self'; form-action 'self'; frame-ancestors 'self'"
)
_HEADERS = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
_LARGEST = 64 * 1024


class Guard:
    """Middleware (ASGI) around an application.

    Another site cannot reach the page through a visitor's browser: a request must name a known host (against rebinding
    of names) and, if it says where it came from, come from there.

    Args:
        app: The application.
        hosts: Names under which the page may be asked for, without port; None: any.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], hosts: Iterable[str] | None) -> None:
        self._app = app
        self._hosts = None if hosts is None else frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hands on what is allowed, and answers the rest itself."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # web sockets are closed unanswered: the page uses none
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        refused = self._refused(scope["method"], scope["path"], headers)
        if refused is not None:
            await _drained(_limited(receive))
            await _answer(send, *refused)
            return

        async def strict(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                known = {name for name, _ in message.get("headers", [])}
                added = [(name, value) for name, value in _HEADERS if name not in known]
                message = {**message, "headers": [*message.get("headers", []), *added]}
            await send(message)

        await self._app(scope, _limited(receive), strict)

    def _refused(self, method: str, path: str, headers: MutableMapping[bytes, str]) -> tuple[int, str] | None:
        host = headers.get(b"host", "")
        if self._hosts is not None and _name(host) not in self._hosts:
            return 421, "This page is not served under that name."
        origin = headers.get(b"origin")
        if origin is not None and origin.partition("://")[2] != host:
            return 403, "Requests from another site are refused."
        allowed = _READ if method in ("GET", "HEAD") else _WRITE if method == "POST" else None
        if allowed is None or not allowed.fullmatch(path):
            return 404, "There is nothing here."
        length = headers.get(b"content-length", "0")
        if not length.isdecimal() or int(length) > _LARGEST:
            return 413, "The request is too large."
        return None


def _name(host: str) -> str:
    """A host without its port."""
    return host.rpartition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]


def _limited(receive: Receive) -> Receive:
    """A body that says no length, or a wrong one, is cut off too."""
    read = 0

    async def limited() -> MutableMapping[str, Any]:
        nonlocal read
        message = await receive()
        read += len(message.get("body", b""))
        return {"type": "http.disconnect"} if read > _LARGEST else message

    return limited


async def _drained(receive: Receive) -> None:
    """Reads what a small request still says: an answer before its end reaches no one."""
    while (message := await receive())["type"] == "http.request" and message.get("more_body", False):
        pass


async def _answer(send: Send, status: int, sentence: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), *_HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": sentence.encode()})
