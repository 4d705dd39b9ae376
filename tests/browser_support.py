"""Pages of a live server in headless Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from server_support import Live

PHONE = {"width": 360, "height": 740}
LAPTOP = {"width": 1366, "height": 768}
DESKTOP = {"width": 1280, "height": 900}
PATIENCE = 30_000  # milliseconds; enough for a loaded machine

expect.set_options(timeout=PATIENCE)


@contextmanager
def chromium() -> Iterator[Browser]:
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no chromium on the path: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


def opened(browser: Browser, live: Live, path: str = "/", refusals: str = "none", **options: object) -> Iterator[Page]:
    """A loaded page. Any console message of the browser fails the test, except for the status in ``refusals``."""
    context = browser.new_context(**{"viewport": DESKTOP} | options)  # type: ignore[arg-type]
    page, complaints = context.new_page(), []
    page.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.set_default_timeout(PATIENCE)
    page.goto(live.url + path)
    yield page
    context.close()
    live.wait_until_idle()
    assert [text for text in complaints if f"status of {refusals}" not in text] == []
