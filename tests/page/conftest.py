"""Fixtures of the page: Debian's chromium, and a server that says what a test has written."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, FilePayload, Page, expect, sync_playwright

from tests.page.scripted import Scripted

CHROMIUM = os.environ.get("TREADLE_CHROMIUM") or shutil.which("chromium") or ""
Opened = Callable[..., Page]
PATIENCE_MS = 120_000  # a machine may be busy; nothing here waits so long that is not broken

expect.set_options(timeout=PATIENCE_MS)


@contextmanager
def chromium(*given: str) -> Iterator[Browser]:
    """A browser, started with further arguments."""
    if not CHROMIUM:
        reason = "chromium is absent: apt-get install chromium, or TREADLE_CHROMIUM=PATH"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    arguments = [*given, *(["--no-sandbox"] if os.geteuid() == 0 else [])]  # root has no sandbox
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


@pytest.fixture
def visit(browser: Browser) -> Iterator[Opened]:
    """Opens an address in a browser without a past. What the page complains of, a policy that was
    broken among it, fails the test; ``expected`` is a regular expression of what it may say.
    """
    contexts = []
    said: list[str] = []

    def hear(text: str, expected: str) -> None:
        if not (expected and re.search(expected, text)):
            said.append(text)

    def open_page(url: str, expected: str = "", **settings: Any) -> Page:
        settings.setdefault("viewport", {"width": 1000, "height": 700})
        context = browser.new_context(**settings)
        context.set_default_timeout(PATIENCE_MS)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: hear(f"{error.message} {error.stack}", expected))
        page.on("console", lambda line: hear(line.text, expected) if line.type == "error" else None)
        page.goto(url)
        page.locator("#model:not(:empty), dialog[open]").first.wait_for()  # it is connected
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []


def file(name: str, content: str | bytes) -> FilePayload:
    """A file that somebody chooses."""
    raw = content.encode() if isinstance(content, str) else content
    return {"name": name, "mimeType": "text/plain", "buffer": raw}
