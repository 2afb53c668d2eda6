"""Fixtures of the page: Debian's chromium without windows, and a server that says what a test has
written.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urljoin, urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, FilePayload, Page, expect, sync_playwright

from tests.page.scripted import Scripted

# The same engine without a browser's own windows takes half the processor time.
INSTALLED = shutil.which("chromium-headless-shell") or shutil.which("chromium")
CHROMIUM = os.environ.get("TREADLE_CHROMIUM") or INSTALLED or ""
Opened = Callable[..., Page]
PATIENCE_MS = 120_000  # a machine may be busy; nothing here waits so long that is not broken

expect.set_options(timeout=PATIENCE_MS)


@contextmanager
def chromium(*given: str) -> Iterator[Browser]:
    """A browser, started with further arguments."""
    if not CHROMIUM:
        reason = (
            "chromium is absent: apt-get install chromium-headless-shell, or set TREADLE_CHROMIUM"
        )
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    arguments = [*given, *(["--no-sandbox"] if os.geteuid() == 0 else [])]  # root has no sandbox
    # Tabs of a site share a process (see Tabs), and none is started before it is needed.
    arguments += ["--process-per-site", "--disable-site-isolation-trials"]
    with sync_playwright() as play:
        started = play.chromium.launch(
            executable_path=CHROMIUM, args=arguments, timeout=PATIENCE_MS
        )
        yield started
        started.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One a module, not one a run: while Playwright is there its event loop counts as running, and
    other tests could not call ``asyncio.run``.
    """
    with chromium() as started:
        yield started


@pytest.fixture
def script() -> Iterator[Scripted]:
    made = Scripted()
    yield made
    made.close()


VIEWPORT = {"width": 1000, "height": 700}


class Tabs:
    """Pages of one browser. All addresses of this machine are one site, whose tabs share a process
    as long as one of them is open; and each port is an origin, with a store of its own. So a first
    visit to an origin is one without a past, though what the browser takes longest to make, a
    context and a process, is there already.
    """

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._shared: BrowserContext | None = None
        self._seen: set[str] = set()

    def open(self, url: str, settings: dict[str, Any]) -> tuple[Page, Callable[[], None]]:
        """A new page, not yet at ``url``, and what closes it. Settings of its own, and another
        visit to an origin, take a context of its own.
        """
        origin = urlsplit(url).netloc
        if settings or origin in self._seen:
            own = self._context(settings)
            return own.new_page(), own.close
        self._seen.add(origin)
        if self._shared is None:
            self._shared = self._context({})
            self._shared.new_page().goto(urljoin(url, "/health"))  # stays open
        return self._shared.new_page(), self._close_shared

    def _close_shared(self) -> None:
        """Close a test's pages, those that it has opened itself too, but for the first."""
        assert self._shared is not None
        for page in self._shared.pages[1:]:
            page.close()

    def _context(self, settings: dict[str, Any]) -> BrowserContext:
        made = self._browser.new_context(**{"viewport": VIEWPORT, **settings})
        made.set_default_timeout(PATIENCE_MS)
        return made


@pytest.fixture(scope="module")
def tabs(browser: Browser) -> Tabs:
    return Tabs(browser)


@pytest.fixture
def visit(tabs: Tabs) -> Iterator[Opened]:
    """Opens an address in a browser without a past. What the page complains of, a policy that was
    broken among it, fails the test; ``expected`` is a regular expression of what it may say.
    """
    opened: list[Callable[[], None]] = []
    said: list[str] = []

    def hear(text: str, expected: str) -> None:
        if not (expected and re.search(expected, text)):
            said.append(text)

    def open_page(url: str, expected: str = "", **settings: Any) -> Page:
        page, close = tabs.open(url, settings)
        opened.append(close)
        page.on("pageerror", lambda error: hear(f"{error.message} {error.stack}", expected))
        page.on("console", lambda line: hear(line.text, expected) if line.type == "error" else None)
        page.goto(url)
        page.locator("#model:not(:empty), dialog[open]").first.wait_for()  # it is connected
        return page

    yield open_page
    for close in opened:
        close()
    assert said == []


def file(name: str, content: str | bytes) -> FilePayload:
    """A file that somebody chooses."""
    raw = content.encode() if isinstance(content, str) else content
    return {"name": name, "mimeType": "text/plain", "buffer": raw}
