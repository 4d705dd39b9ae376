"""``make screenshot``: takes the pictures of the documentation. Needs chromium on the path.

docs/img/playground.png shows the page at / while SmolLM2 answers, docs/img/trace.png the page of ``paceline trace``,
docs/img/site.png the first page built by ``make docs``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.serve.servers import free_port, running
from playwright.sync_api import Browser, FloatRect, Page, ViewportSize, sync_playwright

MODEL = "smollm2-135m"
PICTURES = Path(__file__).parents[1] / "docs" / "img"
VIEWPORT: ViewportSize = {"width": 1360, "height": 960}
TOP: FloatRect = {"x": 0, "y": 0, "width": 1360, "height": 1900}
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


def send_requests(page: Page) -> None:
    """Send enough requests for the charts; some answers of the last one are still running."""
    page.get_by_role("textbox", name="Message", exact=True).fill(PROMPT)
    page.get_by_label("Seed").fill("5")
    for n, tokens, ended in ((1, 200, 1), (6, 200, 6), (3, 420, 1)):
        page.get_by_label("Answers", exact=True).fill(str(n))
        page.get_by_label("Max tokens").fill(str(tokens))
        page.get_by_role("button", name="Generate").click()
        page.wait_for_function("n => document.querySelectorAll('.answer.ended').length >= n", arg=ended)


def traced(folder: Path) -> Path:
    """The trace page of an answer with draft trees."""
    out = folder / "trace.html"
    program = str(Path(sys.executable).with_name("paceline"))
    options = ["--speculation-width", "3", "--chat", "--max-tokens", "160", "--temperature", "0.4", "--seed", "1", "-q"]
    subprocess.run([program, "trace", str(out), MODEL, "--prompt", PROMPT, *options], check=True)
    return out


def playground(browser: Browser) -> None:
    """The server's page while it answers."""
    page = browser.new_page(viewport=VIEWPORT, color_scheme="light")
    with served() as url:
        page.goto(url)
        send_requests(page)
        page.screenshot(path=PICTURES / "playground.png", full_page=True)


def trace(browser: Browser) -> None:
    """The top of the trace page: the answer, the tables, the first rounds."""
    page = browser.new_page(viewport=VIEWPORT, color_scheme="light")
    with tempfile.TemporaryDirectory() as scratch:
        page.goto(traced(Path(scratch)).as_uri())
        for line in page.get_by_text(str(Path.home())).all():
            line.evaluate(
                "(line, home) => { line.textContent = line.textContent.replaceAll(home, '~') }", str(Path.home())
            )
        page.screenshot(path=PICTURES / "trace.png", full_page=True, clip=TOP)


def site(browser: Browser) -> None:
    """The first page of the documentation."""
    page = browser.new_page(viewport=VIEWPORT, color_scheme="light")
    page.goto((PICTURES.parents[1] / "build" / "docs" / "index.html").as_uri())
    page.screenshot(path=PICTURES / "site.png")


PAGES = {"playground": playground, "trace": trace, "site": site}


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
