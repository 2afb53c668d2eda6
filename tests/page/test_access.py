"""For everybody: by the keyboard, on a phone, in the dark, with a screen reader."""

from __future__ import annotations

from importlib import resources
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.page.conftest import Opened
from tests.page.scripted import Scripted, end, says
from tests.page.test_answers import ask

RICH = """# Head

Some *text* with `code` and a [link](https://example.org).

- [x] done
- open

```python
def f(x: int) -> str:  # a comment
    return "text" * 3
```

| a | b |
|---|---|
| 1 | 2 |

> quoted
"""
LONG = f"{'x' * 300}\n\n```\n{'y' * 300}\n```\n\n| {' | '.join('abcdefgh' * 3)} |\n|{'---|' * 24}\n"


def axe(page: Page) -> list[str]:
    """What axe-core finds, each with its impact and the first element."""
    source = (resources.files("axe_playwright_python") / "axe.min.js").read_text("utf-8")
    page.evaluate(source + "\n;undefined")
    found: Any = page.evaluate("axe.run()")
    return [f"{v['impact']}: {v['id']}: {v['nodes'][0]['html'][:150]}" for v in found["violations"]]


def conversation(script: Scripted, page: Page) -> None:
    call = {"index": 0, "id": "c", "function": {"name": "tool", "arguments": "{}"}}
    script.answers.append(
        [says(reasoning_content="Hm."), says(RICH), says(tool_calls=[call]), end("tool_calls")]
    )
    ask(page, "Everything, please")
    expect(page.locator(".call")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(scheme: str, script: Scripted, visit: Opened) -> None:
    page = visit(script.url, color_scheme=scheme)
    conversation(script, page)
    assert axe(page) == []
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(21, 24, 22)"}[scheme]
    page.locator(".reasoning summary").click()
    page.locator('.user [data-does="edit"]').click()
    page.click("#settings-open")
    assert axe(page) == []


def test_axe_finds_a_fault(script: Scripted, visit: Opened) -> None:
    """So it looks at what is there."""
    page = visit(script.url)
    page.evaluate("document.querySelector('#search').labels[0].remove()")
    page.evaluate("document.querySelector('#search').removeAttribute('placeholder')")
    assert [found.split(": ")[:2] for found in axe(page)] == [["critical", "label"]]


def test_axe_finds_nothing_on_a_phone(script: Scripted, visit: Opened) -> None:
    page = visit(script.url, viewport={"width": 320, "height": 600})
    assert axe(page) == []
    conversation(script, page)
    page.click("#side-open")
    assert axe(page) == []


def test_nothing_is_wider_than_320_px(script: Scripted, visit: Opened) -> None:
    page = visit(script.url, viewport={"width": 320, "height": 600})
    script.answers.append([says(LONG), end()])
    ask(page, "z" * 400)
    expect(page.locator(".stats")).to_contain_text("tokens/s")
    widest = (
        "Math.max(document.documentElement.scrollWidth, document.querySelector('#log').scrollWidth)"
    )
    assert page.evaluate(widest) <= 320
    for name in ("#send", "#attach", "#settings-open", "#side-open"):
        box = page.locator(name).bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 320
    page.click("#side-open")
    expect(page.locator("#new")).to_be_in_viewport()
    page.keyboard.press("Escape")
    expect(page.locator("#new")).to_be_hidden()
    expect(page.locator("#side-open")).to_be_focused()
    page.click("#settings-open")
    assert page.evaluate("document.querySelector('#settings').scrollWidth") <= 320


def test_by_the_keyboard_alone(script: Scripted, visit: Opened) -> None:
    """From the message to its buttons, to the settings and back, without a pointer."""
    script.answers.extend([[says("One"), end()], [says("Two"), end()]])
    page = visit(script.url)
    expect(page.locator("#entry")).to_be_focused()
    page.keyboard.type("Hi")
    page.keyboard.press("Enter")
    expect(page.locator(".assistant .markdown")).to_have_text("One")
    expect(page.locator("#send")).to_be_visible()  # it has ended
    reach(page, '.assistant [data-does="again"]', "Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.locator(".assistant .markdown")).to_have_text("Two")
    expect(
        page.locator('.assistant [data-does="again"]')
        .or_(page.locator("#entry"))
        .and_(page.locator(":focus"))
    ).to_have_count(1)
    reach(page, "#settings-open", "Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#settings")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#settings")).to_be_hidden()
    expect(page.locator("#settings-open")).to_be_focused()


def reach(page: Page, name: str, key: str) -> None:
    for _ in range(40):
        if page.locator(f"{name}:focus").count():
            return
        page.keyboard.press(key)
    raise AssertionError(f"{key} does not lead to {name}")


def test_what_is_said_to_a_screen_reader(script: Scripted, visit: Opened) -> None:
    page = visit(script.url, reduced_motion="reduce")
    log = page.get_by_role("log")
    assert log.get_attribute("aria-live") == "polite"
    script.answers.append([says("Hello"), end(n=3)])
    ask(page, "Hi")
    expect(page.get_by_role("status")).to_have_text("Answer finished: 3 tokens")
    expect(log.get_by_role("article", name="scripted")).to_have_attribute("aria-busy", "false")
    moving = """[...document.querySelectorAll('*')].filter(
        (each) => parseFloat(getComputedStyle(each).transitionDuration) > 0).length"""
    assert page.evaluate(moving) == 0
