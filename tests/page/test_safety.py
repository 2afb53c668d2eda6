"""What a model, a file or a conversation says stays text: nothing is run, nothing is fetched."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import expect

from tests.page.conftest import Opened, file
from tests.page.scripted import Scripted, end, says
from tests.page.test_answers import ask

HIT = "window.hit = 1"
EVIL = [
    f"<script>{HIT}</script>",
    f"<img src=x onerror='{HIT}'>",
    f"<svg onload='{HIT}'><animate onbegin='{HIT}'></svg>",
    f"<iframe srcdoc='<script>parent.{HIT}</script>'></iframe>",
    f"<a href='javascript:{HIT}'>a</a>",
    f"[click](javascript:{HIT.replace(' ', '')})",
    f"[click](data:text/html,<script>{HIT}</script>)",
    "![secret](http://127.0.0.1:9/leak)",
    f'```"><script>{HIT}</script>\ncode</code></pre><script>{HIT}</script>\n```',
    f"```html\n<script>{HIT}</script>\n```",
    f"| a |\n|---|\n| <script>{HIT}</script> |",
    f"- [x] <b onclick='{HIT}'>b</b>",
    f"[ref]: javascript:{HIT}\n\n[ref]",
    "<style>* { display: none }</style><form action=http://127.0.0.1:9><input name=q></form>",
    f"<math><mtext><table><mglyph><style><img src=x onerror='{HIT}'>",
]
TAGS = "script, img, svg, iframe, style, form:not(.edit), object, embed, math, b, input, [onerror]"


@pytest.mark.parametrize("where", ["content", "reasoning", "user"])
def test_script_stays_text(where: str, script: Scripted, visit: Opened) -> None:
    text = "\n\n".join(EVIL)
    said = says("ok", reasoning_content=text) if where == "reasoning" else says(text)
    script.answers.append([said, end()])
    page = visit(script.url)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    ask(page, text if where == "user" else "Attack me")
    expect(page.locator(".stats").last).to_contain_text("tokens/s")
    if where == "reasoning":
        page.locator(".reasoning summary").click()
    for link in page.locator("#log a").all():
        assert (link.get_attribute("href") or "http").startswith("http")
        assert link.get_attribute("rel") == "noopener noreferrer nofollow"
    assert page.locator("#log").locator(TAGS).count() == 0
    assert f"<script>{HIT}</script>" in page.locator("#log").inner_text()
    assert page.evaluate("window.hit") is None
    assert all(url.startswith(script.url) for url in asked)


def test_calls_files_and_conversations_stay_text(script: Scripted, visit: Opened) -> None:
    evil = EVIL[1]
    call = {
        "index": 0,
        "id": evil,
        "function": {"name": evil, "arguments": json.dumps({"a": evil})},
    }
    script.answers.append([says(tool_calls=[call]), end("tool_calls")])
    page = visit(script.url)
    attached = file(f"{evil}.txt", evil)
    page.set_input_files("#attach-file", attached)
    expect(page.locator("#attached li")).to_have_count(1)
    ask(page, evil)
    expect(page.locator(".call")).to_contain_text("onerror")
    talk = {
        "title": evil,
        "nodes": {evil: {"role": "assistant", "content": evil, "model": evil, "error": evil}},
    }
    bad = [{"id": "x", "nodes": {"a": {"role": "user", "parent": "a"}}}]
    for i, (found, said) in enumerate(
        [([talk], "Imported 1 conversation"), (bad, "a cycle"), ([3], "no messages found")]
    ):
        text = json.dumps({"conversations": found})
        page.set_input_files("#import-file", file(f"{i}.json", text))
        expect(page.locator("#notice")).to_contain_text(said)
    page.locator("#talks a", has_text="onerror").last.click()
    page.locator("#talks a", has_text="onerror").first.click()
    expect(page.locator(".message").last).to_contain_text("onerror")
    assert page.locator("body").locator("img, script:not([src])").count() == 0
    assert page.evaluate("window.hit") is None


TRICKS = [
    "document.body.innerHTML = '<p>x</p>'",
    "document.body.setAttribute('onclick', 'window.hit = 1'); document.body.click()",
    "setTimeout('window.hit = 1', 0)",
    "document.createElement('script').text = 'window.hit = 1'",
    "document.createElement('script').src = 'http://127.0.0.1:9/x.js'",
]


def test_the_policy_forbids_what_might_slip_through(script: Scripted, visit: Opened) -> None:
    page = visit(script.url, expected="This document requires|violates the following")
    for trick in TRICKS:
        tried = page.evaluate(f"() => {{ try {{ {trick} }} catch (e) {{ return e.name }} }}")
        assert tried == "TypeError", trick
    assert page.evaluate("window.hit") is None


def test_the_policy_fetches_nothing_from_elsewhere(script: Scripted, visit: Opened) -> None:
    page = visit(script.url, expected="violates the following")
    fetched = page.evaluate(
        """() => new Promise((done) => {
        const image = new Image();
        image.onload = () => done('loaded');
        image.onerror = () => done('refused');
        image.src = 'data:image/gif;base64,' +
            'R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw==';
        })"""
    )
    assert fetched == "refused"
