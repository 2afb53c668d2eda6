"""Things done together, or at the wrong moment."""

from __future__ import annotations

import threading

from playwright.sync_api import expect

from tests.page.conftest import Opened, file
from tests.page.scripted import Scripted, end, says
from tests.page.test_answers import ask


def test_again_on_an_earlier_answer_while_another_is_written(
    script: Scripted, visit: Opened
) -> None:
    """The answer under way gives way: what was asked for last is what is written."""
    never = threading.Event()
    script.answers.append([says("One"), end()])
    script.answers.append([says("Two"), never, says("late"), end()])
    script.answers.append([says("Three"), end()])
    page = visit(script.url)
    ask(page, "First")
    expect(page.locator("#send")).to_be_visible()
    ask(page, "Second")
    expect(page.locator(".assistant .markdown").last).to_have_text("Two")
    page.locator('.assistant [data-does="again"]').first.click()
    expect(page.locator(".assistant .markdown").last).to_have_text("Three")
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator(".branches")).to_contain_text("2 of 2")
    assert len(script.bodies) == 3
    assert script.left == 1
    page.get_by_role("button", name="Previous version").click()
    expect(page.locator(".assistant .markdown").last).to_have_text("Two")
    expect(page.locator(".note").last).to_have_text("Stopped")
    never.set()


def test_each_of_two_calls_gets_its_result(script: Scripted, visit: Opened) -> None:
    calls = [
        {"index": i, "id": f"c{i}", "function": {"name": name, "arguments": "{}"}}
        for i, name in enumerate(("rain", "wind"))
    ]
    script.answers.append([says(tool_calls=calls), end("tool_calls")])
    script.answers.append([says("Wet."), end()])
    page = visit(script.url)
    ask(page, "How is the weather?")
    page.get_by_label("Result of tool rain").fill("much")
    submit = page.get_by_role("button", name="Submit result")
    submit.first.click()
    expect(submit).to_have_count(1)  # a click on one of two is an error
    page.get_by_label("Result of tool wind").fill("none")
    submit.click()
    expect(page.get_by_role("log")).to_contain_text("Wet.")
    results = [m for m in script.bodies[1]["messages"] if m["role"] == "tool"]
    assert [(m["tool_call_id"], m["content"]) for m in results] == [("c0", "much"), ("c1", "none")]


def test_who_writes_a_result_goes_on_when_the_message_is_drawn_anew(
    script: Scripted, visit: Opened
) -> None:
    """As when the other call gets its result, or the answer ends just then."""
    calls = [
        {"index": i, "id": f"c{i}", "function": {"name": name, "arguments": "{}"}}
        for i, name in enumerate(("rain", "wind"))
    ]
    script.answers.append([says(tool_calls=calls), end("tool_calls")])
    page = visit(script.url)
    ask(page, "How is the weather?")
    wind = page.get_by_label("Result of tool wind")
    wind.fill("none")
    wind.press("ArrowLeft")
    # The button of the other call, without taking the focus.
    page.get_by_role("button", name="Submit result").first.evaluate("button => button.click()")
    expect(page.get_by_role("button", name="Submit result")).to_have_count(1)
    expect(wind).to_be_focused()
    page.keyboard.type("x")
    expect(wind).to_have_value("nonxe")


def test_a_browser_that_can_keep_no_more_says_so(script: Scripted, visit: Opened) -> None:
    script.answers.extend([[says("One"), end()], [says("Two"), end()]])
    page = visit(script.url)
    page.evaluate(
        """() => { IDBObjectStore.prototype.put = () => {
        throw new DOMException("full", "QuotaExceededError"); }; }"""
    )
    ask(page, "First")
    expect(page.locator(".assistant .markdown").last).to_have_text("One")
    expect(page.locator("#notice")).to_contain_text("full")
    expect(page.locator("#send")).to_be_visible()
    ask(page, "Second")
    expect(page.locator(".assistant .markdown").last).to_have_text("Two")


PASTE = """() => { const data = new DataTransfer(); data.setData("text/plain", "1\\t2");
    data.items.add(new File([new Uint8Array(9)], "image.png", {type: "image/png"}));
    const event = new ClipboardEvent("paste",
        {clipboardData: data, bubbles: true, cancelable: true});
    return document.querySelector("#entry").dispatchEvent(event); }"""
DROP = """(what) => { const data = new DataTransfer();
    if (what === "file") data.items.add(new File(["text"], "a.txt", {type: "text/plain"}));
    else data.setData("text/plain", "words");
    return ["dragover", "drop"].map((name) => document.querySelector("#entry").dispatchEvent(
        new DragEvent(name, {dataTransfer: data, bubbles: true, cancelable: true}))); }"""


def test_cells_of_a_sheet_are_pasted_as_text(script: Scripted, visit: Opened) -> None:
    """Office programs put a picture of what was copied beside its text."""
    page = visit(script.url)
    assert page.evaluate(PASTE)  # true: the browser does what it does with a text
    expect(page.locator("#attached li")).to_have_count(0)
    expect(page.locator("#notice")).to_be_hidden()


def test_a_text_can_be_dragged_into_the_message(script: Scripted, visit: Opened) -> None:
    page = visit(script.url)
    assert page.evaluate(DROP, "text") == [True, True]
    assert page.evaluate(DROP, "file") == [False, False]
    expect(page.locator("#attached li")).to_have_count(1)


def test_a_file_of_odd_values_is_shown_or_refused(script: Scripted, visit: Opened) -> None:
    page = visit(script.url)
    odd = (
        '{"title": "odd", "nodes": {"a": {"role": "assistant", "content": "hello", "timings": '
        '{"predicted_per_second": "x", "prompt_per_second": {}, "cache": 3}}}, "leaf": "a"}'
    )
    page.set_input_files("#import-file", file("odd.json", odd))
    expect(page.locator("#notice")).to_contain_text("Imported 1 conversation")
    page.locator("#talks a", has_text="odd").click()
    expect(page.locator(".message")).to_contain_text("hello")
    for text in (
        '[{"role": "user", "content": "x", "tool_calls": {}}]',
        '[{"role": "user", "content": "x", "tool_calls": 3}]',
    ):
        page.set_input_files("#import-file", file("calls.json", text))
        expect(page.locator("#notice")).to_contain_text("Imported 1 conversation")


def test_an_edited_call_stays_a_call(script: Scripted, visit: Opened) -> None:
    call = {"index": 0, "id": "c", "function": {"name": "tool", "arguments": "{}"}}
    script.answers.append([says("Let me see."), says(tool_calls=[call]), end("tool_calls")])
    page = visit(script.url)
    ask(page, "Go")
    expect(page.locator(".call")).to_be_visible()
    page.locator('.assistant [data-does="edit"]').click()
    page.get_by_label("Edit message").fill("Let me look.")
    page.get_by_role("button", name="Save").click()
    expect(page.locator(".assistant .markdown")).to_have_text("Let me look.")
    expect(page.locator(".call")).to_be_visible()


def test_what_is_exported_comes_back_whole(script: Scripted, visit: Opened) -> None:
    """A text that was gone on with stays one, with the alternatives of its tokens."""
    script.props["treadle"] = {"builtin_template": "plain"}
    token = {"token": " 1", "logprob": -0.5, "top_logprobs": [{"token": " 2", "logprob": -1.5}]}
    tail = {"content": "", "stop": True, "stop_type": "limit"}
    tail |= {"tokens_evaluated": 4, "tokens_predicted": 3}
    part = {"content": " 1", "stop": False, "completion_probabilities": [token]}
    script.answers.extend([[part, tail], [{"content": " + 1", "stop": False}, tail]])
    page = visit(script.url)
    ask(page, "x =")
    expect(page.locator("#send")).to_be_visible()
    with page.expect_download() as download:
        page.click("#export")
    text = download.value.path().read_text("utf-8")
    other = visit(script.url)
    other.set_input_files("#import-file", file("talks.json", text))
    other.locator("#talks a").click()
    expect(other.locator('[data-does="tokens"]')).to_be_visible()
    other.click('[data-does="resume"]')
    expect(other.locator(".assistant .code-text")).to_have_text("1 + 1")
    assert script.paths[1] == "/completion"
    assert script.bodies[1]["prompt"] == "x = 1"
