"""The pictures of the server's page in the README: ``treadle serve``, seen by Debian's chromium.

::

    python tools/picture_page.py            # writes docs/page.png and docs/page_picture.png

In the first SmolLM2, which tools/fetch_models.py fetches, answers; one token shows what might have
stood in its place. The text depends on the seed alone, the speed in the picture on the machine.

In the second a picture was dropped on the page, and the question about it is not sent yet: no model
that reads pictures is in the package registry. The page is that of a tiny Gemma 3 of random weights
in ``../shared/data/media``.
"""

from __future__ import annotations

import base64
import io
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image, ImageDraw
from playwright.sync_api import Page, ViewportSize, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.fetch_models import fetch  # noqa: E402

PICTURE = ROOT / "docs" / "page.png"
SIZE: ViewportSize = {"width": 960, "height": 600}
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

PICTURE_DROPPED = ROOT / "docs" / "page_picture.png"
SIZE_DROPPED: ViewportSize = {"width": 960, "height": 340}
SEEING = ROOT.parent / "shared" / "data" / "media" / "gemma3" / "text.gguf"
TEMPLATE = """{% for message in messages %}{% for part in message.content %}
{%- if part.type == "image" %}<start_of_image>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endfor %}"""
ALT = "Mountains and a lake at sunset"
QUESTION_DROPPED = "Where could this be, and at what time of the day?"
DROP = """([name, data]) => { const transfer = new DataTransfer();
    const bytes = Uint8Array.from(atob(data), (each) => each.charCodeAt(0));
    transfer.items.add(new File([bytes], name, {type: "image/png"}));
    const shared = {dataTransfer: transfer, bubbles: true, cancelable: true};
    document.querySelector("#log").dispatchEvent(new DragEvent("drop", shared)); }"""


def main() -> None:
    """Write both pictures."""
    with served(str(fetch("smollm2"))) as address:
        screenshot(address, PICTURE, SIZE, ask)
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "template.jinja"
        template.write_text(TEMPLATE)
        options = ("--chat-template", str(template), "--alias", "tiny-gemma-3")
        with served(str(SEEING), *options) as address:
            screenshot(address, PICTURE_DROPPED, SIZE_DROPPED, drop)


@contextmanager
def served(*options: str) -> Iterator[str]:
    """Start a server, give the address of its page, and end it."""
    command = [sys.executable, "-m", "treadle", "serve", *options, "--port", "0", "--no-log"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.terminate()


def screenshot(
    address: str, picture: Path, size: ViewportSize, act: Callable[[Page], None]
) -> None:
    """Open a page, do something with it, and write what is to be seen."""
    with sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport=size, color_scheme="light")
        page.goto(address)
        page.locator("#model:not(:empty)").wait_for()
        act(page)
        page.screenshot(path=picture)
        browser.close()
    print(f"{picture}: {picture.stat().st_size} bytes")


def ask(page: Page) -> None:
    """Have a question answered, and look at one of the answer's tokens."""
    page.click("#settings-open")
    for name, value in SETTINGS.items():
        page.fill(f"#set-{name}", value)
        page.locator(f"#set-{name}").blur()
    page.click("#settings-close")
    page.fill("#entry", QUESTION)
    page.press("#entry", "Enter")
    page.click('[data-does="tokens"]', timeout=120_000)
    page.locator(".token").nth(TOKEN).click()


def drop(page: Page) -> None:
    """Drop a picture on the page, and write a question about it."""
    page.evaluate(DROP, ["lake.png", base64.b64encode(lake()).decode()])
    page.get_by_label("Alt text of lake.png").fill(ALT)
    page.fill("#entry", QUESTION_DROPPED)


def lake() -> bytes:
    """A PNG of a lake: sky and water of colours that pass into each other, a sun, mountains."""
    width, height, shore = 960, 640, 400
    made = Image.new("RGB", (width, height))
    draw = ImageDraw.Draw(made)
    for y in range(height):
        t = (y if y < shore else 2 * shore - y) / shore  # the water mirrors the sky
        colour = (int(70 + 180 * t), int(90 + 80 * t), int(160 - 60 * t))
        draw.line((0, y, width, y), colour)
    draw.ellipse((410, 240, 530, 360), "#ffe9a8")
    for left, top, right, colour in ((-80, 130, 520, "#4a4763"), (430, 210, 1010, "#37354d")):
        middle = (left + right) // 2 - 40
        draw.polygon([(left, shore), (middle, top), (right, shore)], colour)
        draw.polygon([(left, shore), (middle, 2 * shore - top), (right, shore)], "#5d5470")
    for i in range(9):
        y = shore + 20 + 24 * i
        draw.rectangle((450 - 4 * i, y, 490 + 4 * i, y + 5), "#ffdf9b")
    out = io.BytesIO()
    made.save(out, "PNG")
    return out.getvalue()


if __name__ == "__main__":
    main()
