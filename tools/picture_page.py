"""The picture of the server's page in the README: ``treadle serve``, seen by Debian's chromium.

::

    python tools/picture_page.py            # writes docs/page.png

SmolLM2, which tools/fetch_models.py fetches, answers; one token shows what might have stood in its
place. The text depends on the seed alone, the speed in the picture on the machine.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.fetch_models import fetch  # noqa: E402

PICTURE = ROOT / "docs" / "page.png"
SIZE = {"width": 960, "height": 600}
SETTINGS = {
    "temperature": "0.2",
    "top_p": "0.9",
    "repeat_penalty": "1.1",
    "seed": "5",
    "max_tokens": "160",
    "alternatives": "5",
}
QUESTION = "Write a Python function that reverses a string."
TOKEN = 28  # whose alternatives are shown


def main() -> None:
    """Start a server, ask, write the picture, end the server."""
    command = [sys.executable, "-m", "treadle", "serve", str(fetch("smollm2"))]
    command += ["--port", "0", "--no-log"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            with sync_playwright() as play:
                browser = play.chromium.launch(
                    executable_path=shutil.which("chromium"), args=["--no-sandbox"]
                )
                page = browser.new_page(viewport=SIZE, color_scheme="light")
                page.goto(server.stdout.readline().strip())
                ask(page)
                page.screenshot(path=PICTURE)
                browser.close()
        finally:
            server.terminate()
    print(f"{PICTURE}: {PICTURE.stat().st_size} bytes")


def ask(page: Page) -> None:
    """Have a question answered, and look at one of the answer's tokens."""
    page.locator("#model:not(:empty)").wait_for()
    page.click("#settings-open")
    for name, value in SETTINGS.items():
        page.fill(f"#set-{name}", value)
        page.locator(f"#set-{name}").blur()
    page.click("#settings-close")
    page.fill("#entry", QUESTION)
    page.press("#entry", "Enter")
    page.click('[data-does="tokens"]', timeout=120_000)
    page.locator(".token").nth(TOKEN).click()


if __name__ == "__main__":
    main()
