"""What the page keeps: conversations and settings."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.page.conftest import Opened, file
from tests.page.scripted import Scripted, end, says
from tests.page.test_answers import ask
from tests.server.conftest import until
from treadle.sampling import Sampling
from treadle.server.protocols.llamacpp_answer import sampling_dict
from treadle.server.requests.generation_request import SAMPLERS


def say(script: Scripted, page: Page, text: str, answer: str) -> None:
    script.answers.append([says(answer), end()])
    ask(page, text)
    expect(page.locator(".assistant .markdown").last).to_have_text(answer)
    expect(page.locator("#send")).to_be_visible()  # it has ended


def test_conversations_are_found_exported_and_imported(script: Scripted, visit: Opened) -> None:
    page = visit(script.url)
    say(script, page, "About cats", "They purr.")
    page.click("#new")
    say(script, page, "About dogs", "They bark.")
    expect(page.locator("#talks a")).to_have_text(["About dogs", "About cats"])
    page.get_by_label("Search conversations").fill("PURR they")
    expect(page.locator("#talks a")).to_have_text(["About cats"])
    with page.expect_download() as download:
        page.click("#export")
    text = download.value.path().read_text("utf-8")
    assert {talk["title"] for talk in json.loads(text)["conversations"]} == {
        "About cats",
        "About dogs",
    }

    other = visit(script.url)  # a browser without a past
    assert other.locator("#talks a").count() == 0
    other.set_input_files("#import-file", file("t.json", text))
    expect(other.locator("#notice")).to_contain_text("Imported 2 conversations.")
    other.get_by_role("link", name="About cats").click()
    expect(other.locator(".assistant .markdown")).to_have_text("They purr.")
    other.reload()
    expect(other.locator(".assistant .markdown")).to_have_text("They purr.")
    other.get_by_role("button", name="Delete About cats").click()
    expect(other.locator("#talks a")).to_have_text(["About dogs"])
    expect(other.locator(".message")).to_have_count(0)


def test_what_treadle_chat_saved_can_be_imported(script: Scripted, visit: Opened) -> None:
    page = visit(script.url)
    record: dict[str, Any] = {
        "system": "Be brief.",
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}],
    }
    page.set_input_files("#import-file", file("c.json", json.dumps(record)))
    page.get_by_role("link", name="Hi").click()
    expect(page.locator(".assistant .markdown")).to_have_text("Yo")
    say(script, page, "More", "No")
    assert script.bodies[0]["messages"] == [
        {"role": "system", "content": "Be brief."},
        *record["messages"],
        {"role": "user", "content": "More"},
    ]


def fill_all(page: Page, samplers: dict[str, Any]) -> None:
    """Type the server's own values into every field of sampling."""
    for name, value in samplers.items():
        field = page.locator(f"#set-{name}")
        if isinstance(value, bool):
            field.check()
            continue
        typed = json.dumps(value) if name == "logit_bias" else f"{value}"
        if name in ("samplers", "dry_sequence_breakers"):
            between = ";" if name == "samplers" else "\n"
            typed = between.join(each.replace("\n", "\\n") for each in value)
        field.fill(typed)
        field.blur()


def test_every_sampler_can_be_set(script: Scripted, visit: Opened) -> None:
    page = visit(script.url)
    own = sampling_dict(Sampling()) | {"logit_bias": [[5, -1.5]]}
    assert set(own) == {*SAMPLERS, "seed", "logit_bias"}
    page.click("#settings-open")
    assert page.locator("#set-min_p").get_attribute("placeholder") == "0.05"
    fill_all(page, own)
    page.click("#settings-close")
    expect(page.locator("#settings-open")).to_have_text(f"Settings ({len(own)})")
    page.reload()
    say(script, page, "Hi", "Yo")
    sent = script.bodies[0]
    assert {name: sent[name] for name in own} == own | {
        "ignore_eos": True,
        "samplers": ";".join(own["samplers"]),
    }
    page.click("#settings-open")
    page.click("#settings-clear")
    page.click("#settings-close")
    expect(page.locator("#settings-open")).to_have_text("Settings")


def test_what_is_no_value_is_marked_and_not_sent(script: Scripted, visit: Opened) -> None:
    page = visit(script.url)
    page.click("#settings-open")
    page.locator("#set-top_k").fill("many")
    page.locator("#set-json_schema").fill("{")
    page.locator("#set-max_tokens").fill("7")
    page.locator("#set-max_tokens").blur()
    expect(page.locator("#set-top_k")).to_have_attribute("aria-invalid", "true")
    expect(page.locator(".wrong:not(:empty)")).to_have_text(["not a number", "not valid JSON"])
    page.click("#settings-close")
    say(script, page, "Hi", "Yo")
    assert script.bodies[0]["max_tokens"] == 7
    assert not {"top_k", "json_schema", "response_format"} & set(script.bodies[0])


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_can_be_chosen(theme: str, script: Scripted, visit: Opened) -> None:
    page = visit(script.url, color_scheme="light" if theme == "dark" else "dark")
    page.click("#settings-open")
    page.select_option("#theme", theme)
    page.reload()
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(21, 24, 22)"}[theme]


def test_the_system_prompt_is_a_conversations_own(script: Scripted, visit: Opened) -> None:
    page = visit(script.url)
    page.click("#settings-open")
    page.get_by_label("System prompt").fill("Be brief.")
    page.click("#settings-close")
    say(script, page, "Hi", "Yo")
    assert script.bodies[0]["messages"][0] == {"role": "system", "content": "Be brief."}


def test_another_tab_sees_what_is_said(script: Scripted, visit: Opened) -> None:
    page = visit(script.url)
    other = page.context.new_page()
    other.goto(script.url)
    say(script, page, "Hi", "Yo")
    expect(other.get_by_role("link", name="Hi")).to_be_visible()
    other.get_by_role("link", name="Hi").click()
    expect(other.locator(".assistant .markdown")).to_have_text("Yo")
    say(script, page, "More", "And more")
    expect(other.locator(".assistant .markdown").last).to_have_text("And more")
    until(lambda: len(script.bodies) == 2)
