"""``make screenshot``: takes the pictures of the documentation. Needs chromium on the path.

docs/img/chat.png shows a conversation with SmolLM2 at /chat, docs/img/inspector.png the page at / while it answers,
docs/img/trace.png the page of ``paceline trace``, docs/img/site.png the first page built by ``make docs``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.serve.servers import free_port, running
from PIL import Image
from playwright.sync_api import Browser, FloatRect, Page, ViewportSize, expect, sync_playwright

MODEL = "smollm2-135m"
PICTURES = Path(__file__).parents[1] / "docs" / "img"
VIEWPORT: ViewportSize = {"width": 1360, "height": 960}
LAPTOP: ViewportSize = {"width": 1366, "height": 768}
TOP: FloatRect = {"x": 0, "y": 0, "width": 1360, "height": 1900}
COLOURS = 128  # of a picture: half the bytes, and no difference to see
PATIENCE = 120_000  # milliseconds
QUESTIONS = (
    "What is the capital of France?",
    "Write a short Python function that reverses a string, with an example of its use.",
)
PROMPT = (
    "Write a Python class Stack with the methods push, pop, peek and is_empty. Then write the same class once more, "
    "with a docstring in every method."
)


@contextmanager
def served() -> Iterator[str]:
    """The address of a server started for this run."""
    port = free_port()
    program = Path(sys.executable).with_name("paceline")
    command = [str(program), "serve", MODEL, "--port", str(port), "--max-batch-size", "8", "--max-model-len", "1024"]
    with tempfile.TemporaryDirectory() as scratch, running(command, port, Path(scratch) / "log") as url:
        yield url


def save(page: Page, name: str, **options: Any) -> None:
    """Write a picture of the page to docs/img."""
    path = PICTURES / f"{name}.png"
    page.screenshot(path=path, **options)
    Image.open(path).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


def send_requests(page: Page) -> None:
    """Send enough requests for the charts; some answers of the last one are still running."""
    page.get_by_role("textbox", name="Message", exact=True).fill(PROMPT)
    page.get_by_label("Seed").fill("5")
    for n, tokens, ended in ((1, 200, 1), (6, 200, 6), (3, 420, 1)):
        page.get_by_label("Answers", exact=True).fill(str(n))
        page.get_by_label("Max tokens").fill(str(tokens))
        page.get_by_role("button", name="Generate").click()
        expect(page.locator(".answer")).to_have_count(n)
        expect(page.locator(".answer.ended").nth(ended - 1)).to_be_visible(timeout=PATIENCE)


def traced(folder: Path) -> Path:
    """The trace page of an answer with draft trees."""
    out = folder / "trace.html"
    program = str(Path(sys.executable).with_name("paceline"))
    options = ["--speculation-width", "3", "--chat", "--max-tokens", "160", "--temperature", "0.4", "--seed", "1", "-q"]
    subprocess.run([program, "trace", str(out), MODEL, "--prompt", PROMPT, *options], check=True)
    return out


def chat(browser: Browser) -> None:
    """A conversation on the server's chat page."""
    page = browser.new_page(viewport=LAPTOP, color_scheme="light")
    with served() as url:
        page.goto(f"{url}/chat")
        expect(page.locator("#state")).to_have_text("ready", timeout=PATIENCE)
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Temperature").fill("0")
        for asked, question in enumerate(QUESTIONS, 1):
            page.get_by_role("textbox", name="Message", exact=True).fill(question)
            page.get_by_role("button", name="Send", exact=True).click()
            expect(page.locator(".turn.assistant.ended")).to_have_count(asked, timeout=PATIENCE)
        save(page, "chat")


def inspector(browser: Browser) -> None:
    """The server's first page while it answers."""
    page = browser.new_page(viewport=VIEWPORT, color_scheme="light")
    with served() as url:
        page.goto(url)
        send_requests(page)
        save(page, "inspector", full_page=True)


def trace(browser: Browser) -> None:
    """The top of the trace page: the answer, the tables, the first rounds."""
    page = browser.new_page(viewport=VIEWPORT, color_scheme="light")
    with tempfile.TemporaryDirectory() as scratch:
        page.goto(traced(Path(scratch)).as_uri())
        for line in page.get_by_text(str(Path.home())).all():
            line.evaluate(
                "(line, home) => { line.textContent = line.textContent.replaceAll(home, '~') }", str(Path.home())
            )
        save(page, "trace", full_page=True, clip=TOP)


def site(browser: Browser) -> None:
    """The first page of the documentation."""
    page = browser.new_page(viewport=VIEWPORT, color_scheme="light")
    page.goto((PICTURES.parents[1] / "build" / "docs" / "index.html").as_uri())
    save(page, "site")


PAGES = {"chat": chat, "inspector": inspector, "trace": trace, "site": site}


def main() -> None:
    """Take all screenshots, or those named on the command line."""
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("no chromium on the path: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name in sys.argv[1:] or PAGES:
            PAGES[name](browser)
            print(f"wrote {PICTURES / name}.png")


if __name__ == "__main__":
    main()
