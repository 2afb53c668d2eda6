"""The picture of the server's page in the README: ``treadle serve``, seen by Debian's chromium.

::

    python tools/picture_page.py            # writes docs/page.png

The packaged model goes on with a function; one token shows what might have stood in its place.
The text depends on the seed alone, the speed in the picture on the machine.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "page.png"
SIZE = {"width": 960, "height": 600}
SETTINGS = {
    "temperature": "0.6",
    "repeat_penalty": "1.2",
    "seed": "8",
    "max_tokens": "110",
    "alternatives": "5",
}
BEGINNING = "def read_text(path):"
TOKEN = 4  # whose alternatives are shown


def main() -> None:
    """Start a server, ask, write the picture, end the server."""
    command = [sys.executable, "-m", "treadle", "serve", "--port", "0", "--no-log"]
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
    """Have a text written, and look at one of its tokens."""
    page.locator("#model:not(:empty)").wait_for()
    page.click("#settings-open")
    for name, value in SETTINGS.items():
        page.fill(f"#set-{name}", value)
        page.locator(f"#set-{name}").blur()
    page.click("#settings-close")
    page.fill("#entry", BEGINNING)
    page.press("#entry", "Enter")
    page.click('[data-does="tokens"]', timeout=120_000)
    page.locator(".token").nth(TOKEN).click()


if __name__ == "__main__":
    main()
