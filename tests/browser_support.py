"""Pages of a live server in headless Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Error, Page, expect, sync_playwright

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
    """A loaded page. Any console message of the browser fails the test, except for the status in ``refusals``.

    options: of a browser context. Without any, tests take turns with one page, because a new one takes half a second.
    """
    page = _page_of_all(browser) if not options else _new_page(browser, **options)
    complaints: list[str] = []

    def note(message: ConsoleMessage) -> None:
        if message.type != "log":
            complaints.append(message.text)

    def note_error(error: Error) -> None:
        complaints.append(str(error))

    page.on("console", note)
    page.on("pageerror", note_error)
    page.goto(live.url + path)
    try:
        yield page
    finally:
        page.remove_listener("console", note)
        page.remove_listener("pageerror", note_error)
        if options:
            page.context.close()
        else:
            _forget(page, live)
    live.wait_until_idle()
    assert [text for text in complaints if f"status of {refusals}" not in text] == []


def _new_page(browser: Browser, **options: object) -> Page:
    page = browser.new_context(**{"viewport": DESKTOP} | options).new_page()  # type: ignore[arg-type]
    page.set_default_timeout(PATIENCE)
    return page


def _page_of_all(browser: Browser) -> Page:
    return browser.contexts[0].pages[0] if browser.contexts else _new_page(browser)


def _forget(page: Page, live: Live) -> None:
    """Leave the page as a new one would be: nothing goes on, is stored, allowed, replaced or resized."""
    page.unroute_all(behavior="ignoreErrors")
    page.context.clear_permissions()
    page.goto(f"{live.url}/version")  # of the same origin, and without scripts that store anything
    page.evaluate("localStorage.clear(), sessionStorage.clear()")
    page.set_viewport_size(DESKTOP)  # type: ignore[arg-type]
