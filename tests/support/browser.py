"""Pages in a real browser: Chromium without a window, no network, and no error or request let pass unseen."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser. Skips the test where there is none."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("needs a Chromium (apt-get install chromium)")
    driver = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the extra dev")
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, path: Path, *, width: int = 1280, height: int = 900, theme: str = "light") -> Iterator[Any]:
    """A page from disk, drawn. At its end: nothing was asked of the network, and nothing went wrong in it."""
    faults: list[str] = []
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
    page = context.new_page()
    page.on("request", lambda request: request.url.startswith("file:") or faults.append(f"asks for {request.url}"))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: message.type in ("error", "warning") and faults.append(message.text))
    page.on("dialog", lambda dialog: (faults.append(f"says {dialog.message}"), dialog.dismiss()))
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready]", timeout=60_000)
    yield page
    assert not faults
    context.close()


def tooltip(page: Any) -> tuple[str, dict[str, str]]:
    """The tooltip's heading, and its figures by their words; empty where there is none."""
    box = page.locator("#tooltip")
    if box.is_hidden():
        return "", {}
    words, figures = box.locator("dt").all_inner_texts(), box.locator("dd").all_inner_texts()
    return box.locator("strong").inner_text(), dict(zip(words, figures, strict=True))
