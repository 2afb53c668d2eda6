"""A server with several models: which one answers, what is loaded, and what the choice brings."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.page.conftest import Opened
from tests.page.scripted import Scripted, end, says
from tests.page.test_access import axe, reach
from tests.page.test_answers import ask
from treadle.sampling import Sampling
from treadle.server.protocols.llamacpp_answer import sampling_dict


def model(name: str, state: str, kind: str = "text", **more: Any) -> dict[str, Any]:
    meta = {"n_ctx": 8192, "size": 98_362_432, "kind": kind}
    architecture = {"input_modalities": ["text"], "output_modalities": ["text"]}
    own = {"id": name, "status": {"value": state}, "meta": meta, "architecture": architecture}
    return {**own, "aliases": [], **more}


@pytest.fixture
def several(script: Scripted) -> Scripted:
    sees: dict[str, Any] = {"architecture": {"input_modalities": ["text", "image"]}}
    script.models = [
        model("small", "loaded", aliases=["gpt-4o"]),
        model("large", "unloaded", **sees),
        model("vectors", "unloaded", "vectors"),
    ]
    cool = sampling_dict(Sampling(temperature=0.25))
    settings = {"n_ctx": 2048, "params": cool}
    script.props_of["small"] = {
        "default_generation_settings": settings,
        "treadle": {"builtin_template": None, "reasoning": "off"},
    }
    return script


def hint(page: Page, name: str) -> Any:
    return page.locator(".model", has=page.get_by_label(name, exact=True)).locator(".hint")


def test_one_model_is_shown_as_ever(script: Scripted, visit: Opened) -> None:
    page = visit(script.url)
    expect(page.locator("#models-open")).to_be_hidden()
    script.answers.append([says("Hello"), end()])
    ask(page, "Hi")
    expect(page.locator(".stats")).to_contain_text("tokens/s")
    assert "model" not in script.bodies[0]


def test_a_model_is_chosen_loaded_and_kept(several: Scripted, visit: Opened) -> None:
    """The choice is that of the conversation, and of the next new one."""
    page = visit(several.url)
    expect(page.locator("#model")).to_have_text("small")  # the one that is loaded
    page.click("#settings-open")
    expect(page.get_by_label("Temperature", exact=True)).to_have_attribute("placeholder", "0.25")
    expect(page.get_by_label("Reasoning", exact=True)).to_contain_text("default (off)")
    page.click("#settings-close")
    several.answers.extend([[says(f"Answer {i}"), end()] for i in range(3)])
    ask(page, "First")
    expect(page.locator("#used")).to_have_text("44 of 2048")
    assert several.bodies[0]["model"] == "small"
    first = page.url

    page.click("#new")
    page.click("#models-open")
    expect(hint(page, "small")).to_have_text("loaded · 98 MB · context 8192 · also gpt-4o")
    expect(hint(page, "large")).to_have_text("not loaded · 98 MB · context 8192 · reads pictures")
    expect(hint(page, "vectors")).to_have_text("not loaded · 98 MB · computes vectors")
    expect(page.get_by_label("vectors", exact=True)).to_be_disabled()
    assert axe(page) == []
    page.get_by_label("large", exact=True).check()
    page.click("#models-close")
    expect(page.locator("#model")).to_have_text("large")
    expect(page.locator("#model-state")).to_have_text("not loaded")
    expect(page.locator("#picture")).to_be_visible()

    several.hold_loads.set()
    ask(page, "Second")
    expect(page.locator("#model-state")).to_have_text("loading 40 %")
    assert len(several.bodies) == 1  # it waits for the model
    several.hold_loads.clear()
    expect(page.get_by_role("log")).to_contain_text("Answer 1")
    expect(page.locator("#model-state")).to_have_text("")
    assert several.bodies[1]["model"] == "large"

    page.goto(first)
    page.reload()
    expect(page.locator("#model")).to_have_text("small")
    page.click("#new")
    expect(page.locator("#model")).to_have_text("small")


def test_an_edited_message_is_kept_when_its_model_cannot_be_loaded(
    several: Scripted, visit: Opened
) -> None:
    several.answers.append([says("Hello"), end()])
    page = visit(several.url, expected="500")
    ask(page, "First")
    expect(page.locator(".stats")).to_contain_text("tokens/s")
    several.broken.add("small")
    several.props_of.clear()
    several.note("small", "unloaded")
    expect(page.locator("#model-state")).to_have_text("not loaded")
    page.locator('.user [data-does="edit"]').click()
    page.get_by_label("Edit message").fill("Second")
    page.locator(".edit").get_by_role("button", name="Send").click()
    expect(page.locator("#notice")).to_contain_text("Small cannot be loaded")
    expect(page.get_by_role("log")).to_contain_text("Second")
    page.reload()
    expect(page.get_by_role("log")).to_contain_text("Second")


def test_loads_and_unloads_by_the_keyboard(several: Scripted, visit: Opened) -> None:
    page = visit(several.url)
    reach(page, "#models-open", "Shift+Tab")
    page.keyboard.press("Enter")
    unload = page.get_by_role("button", name="Unload small")
    unload.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Load small")).to_be_focused()
    assert several.paths == ["/models/unload small"]
    expect(page.locator("#status")).to_have_text("small: not loaded")
    several.hold_loads.set()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Cancel small")).to_be_focused()
    expect(hint(page, "small")).to_contain_text("loading 40 %")
    several.hold_loads.clear()
    expect(page.get_by_role("button", name="Unload small")).to_be_focused()
    assert several.paths[1:] == ["/models/load small"]
    # A load that fails, and a model that is gone, by what the server tells.
    several.models[1]["status"] = {"value": "unloaded", "failed": True, "error": "too large"}
    several.events.put({"model": "*", "event": "models_reload", "data": {}})
    expect(hint(page, "large")).to_contain_text("failed: too large")
    del several.models[0]
    several.events.put({"model": "small", "event": "model_remove", "data": {}})
    expect(page.get_by_label("small", exact=True)).to_have_count(0)
    page.keyboard.press("Escape")
    expect(page.locator("#model")).to_have_text("large")
