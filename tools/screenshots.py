"""Pictures of the pages for the guides, taken by Debian's chromium.

    python tools/screenshots.py RECORD.json COMPARISON.json [--explorer ADDRESS]

RECORD and COMPARISON are what `support-tokens analyze --json ... --compare-json ...` wrote; ADDRESS is that of a
running `support-tokens explore`. Look at the pictures before they are committed.
"""

import argparse
import io
import os
import shutil
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from support_tokens.report import tokens as views
from support_tokens.report.records import MarginChanges, MarginRecord

IMAGES = Path(__file__).parents[1] / "docs" / "images"
TEXT = "The capital of France is Paris, and the river that runs through it is called the Seine."


def keep(page: Page, name: str, **options) -> None:
    """Takes a picture and keeps it small: 128 colours are enough for a page."""
    picture = Image.open(io.BytesIO(page.screenshot(**options))).convert("RGB")
    IMAGES.mkdir(exist_ok=True)
    picture.quantize(128, dither=Image.Dither.NONE).save(IMAGES / f"{name}.png", optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("comparison", type=Path)
    parser.add_argument("--explorer", help="address of a running explorer")
    chosen = parser.parse_args()
    record = MarginRecord.from_json(chosen.record)
    pages = {
        "margins": views.margins_html(record),
        "changes": views.changes_html(MarginChanges.from_json(chosen.comparison)),
    }
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"] if os.geteuid() == 0 else []
        )
        for name, html in pages.items():
            path = Path(folder, f"{name}.html")
            path.write_text(html, encoding="utf-8")
            page = browser.new_page(viewport={"width": 1180, "height": 1180})
            page.goto(path.as_uri())
            page.wait_for_selector("html.ready")
            page.locator("#tokens .support").nth(1).click()
            page.evaluate("window.scrollTo(0, 0)")
            keep(page, f"{name}-wide")
            page.close()
        if chosen.explorer:
            page = browser.new_page(viewport={"width": 1180, "height": 1020})
            page.goto(chosen.explorer)
            page.locator("#ask-depth", has_text="of 0 to").wait_for(timeout=120_000)
            page.fill("#ask-text", TEXT)
            page.click("#ask-run")
            page.locator("html.ready.asks #tokens .support").first.hover(timeout=300_000)
            page.evaluate("window.scrollTo(0, 0)")
            keep(page, "explorer")
        browser.close()


if __name__ == "__main__":
    main()
