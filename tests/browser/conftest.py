"""A real browser: Debian's Chromium, driven by Playwright."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
REQUIRED = os.environ.get("SUPPORT_TOKENS_BROWSER") == "required"
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items) -> None:
    """Without a browser these tests are skipped and say so, unless one is required: then they fail."""
    if CHROMIUM or REQUIRED:
        return
    skip = pytest.mark.skip(reason="there is no chromium: apt-get install chromium, or SUPPORT_TOKENS_BROWSER=required")
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def browser() -> Iterator:
    from playwright.sync_api import sync_playwright

    assert CHROMIUM, "a browser is required, and there is no chromium: apt-get install chromium"
    # Root may not use Chromium's sandbox; the pages are this package's own.
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield started
        started.close()


class Watched:
    """A page, with all that it complained of and all that it asked for."""

    def __init__(self, page) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.requests: list[str] = []
        page.on(
            "console", lambda said: self.complaints.append(said.text) if said.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))

    def _said(self, message) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)


@pytest.fixture
def watch(browser) -> Iterator:
    """Opens pages of a width, a phone's or a desk's; closed again after the test."""
    contexts = []

    def opened(width: int = 1280, *, dark: bool = False, **options) -> Watched:
        scheme = "dark" if dark else "light"
        context = browser.new_context(
            viewport={"width": width, "height": 844}, color_scheme=scheme, has_touch=width < 500, **options
        )
        context.set_default_timeout(120_000)  # a machine may be busy; nothing is waited for longer than it takes
        contexts.append(context)
        return Watched(context.new_page())

    yield opened
    for context in contexts:
        context.close()
