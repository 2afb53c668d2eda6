"""What is asked and shown: answers that stream, end early, have branches, survive a reload."""

from __future__ import annotations

import json
import threading
from typing import Any

from playwright.sync_api import Page, expect

from tests.page.conftest import Opened, file
from tests.page.scripted import CONTROL, CUT, N_CTX, Scripted, end, says
from tests.server.conftest import until

TOO_LONG = "exceed_context_size_error"


def ask(page: Page, text: str) -> None:
    page.fill("#entry", text)
    page.press("#entry", "Enter")


def last(page: Page) -> str:
    return str(page.locator(".message").last.locator(".markdown, .plain").last.inner_text())


def test_an_answer_comes_in_parts(script: Scripted, visit: Opened) -> None:
    more = threading.Event()
    script.answers.append([says(role="assistant"), says("One "), more, says("**two**"), end(n=7)])
    page = visit(script.url)
    ask(page, "Count, please")
    log = page.get_by_role("log")
    expect(log).to_contain_text("One")
    assert not page.locator("strong", has_text="two").count()
    expect(page.locator("#stop")).to_be_visible()
    more.set()
    expect(page.locator(".markdown strong")).to_have_text("two")
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator(".stats")).to_have_text(
        "7 tokens · 31.5 tokens/s · Prompt tokens: 42 · Reused from cache: 30 · "
        "Prompt speed: 1200 tokens/s"
    )
    expect(page.locator("#used")).to_have_text(f"49 of {N_CTX}")
    expect(page.locator("#status")).to_have_text("Answer finished: 7 tokens")
    assert page.title() == "Count, please · treadle"
    (body,) = script.bodies
    assert body["messages"] == [{"role": "user", "content": "Count, please"}]
    assert body["stream"] is True


def test_stop_ends_the_stream_and_keeps_what_there_is(script: Scripted, visit: Opened) -> None:
    script.answers.append([says("Half of "), threading.Event()])
    page = visit(script.url)
    ask(page, "Go")
    expect(page.get_by_role("log")).to_contain_text("Half of")
    page.click("#stop")
    expect(page.locator(".note").last).to_have_text("Stopped")
    expect(page.locator("#entry")).to_be_focused()
    until(lambda: script.left == 1)
    script.answers.append([says("it."), end()])
    page.click('[data-does="resume"]')
    expect(page.locator(".stats").last).to_contain_text("tokens/s")
    assert last(page) == "Half of it."
    assert script.bodies[1]["messages"][-1] == {"role": "assistant", "content": "Half of "}


def test_what_was_thought_is_told_where_an_answer_is_gone_on_with(
    script: Scripted, visit: Opened
) -> None:
    script.answers.append([says(reasoning_content="hm"), says("Half of "), threading.Event()])
    page = visit(script.url)
    ask(page, "Go")
    expect(page.get_by_role("log")).to_contain_text("Half of")
    page.click("#stop")
    script.answers.append([says("it."), end()])
    page.click('[data-does="resume"]')
    expect(page.locator(".stats").last).to_contain_text("tokens/s")
    assert script.bodies[1]["messages"][-1] == {
        "role": "assistant",
        "content": "Half of ",
        "reasoning_content": "hm",
    }


def test_escape_stops_too(script: Scripted, visit: Opened) -> None:
    script.answers.append([says("On"), threading.Event()])
    page = visit(script.url)
    ask(page, "Go")
    expect(page.get_by_role("log")).to_contain_text("On")
    page.keyboard.press("Escape")
    expect(page.locator(".note").last).to_have_text("Stopped")
    until(lambda: script.left == 1)


def test_other_answers_and_edits_are_branches(script: Scripted, visit: Opened) -> None:
    script.answers.extend([[says(f"Answer {i}"), end()] for i in range(1, 4)])
    page = visit(script.url)
    ask(page, "First")
    expect(page.get_by_role("log")).to_contain_text("Answer 1")
    page.click('[data-does="again"]')
    expect(page.get_by_role("log")).to_contain_text("Answer 2")
    expect(page.locator(".branches")).to_contain_text("2 of 2")
    page.click('[data-does="Previous version"]')
    expect(page.get_by_role("log")).to_contain_text("Answer 1")
    page.locator('.user [data-does="edit"]').click()
    edit = page.get_by_label("Edit message")
    expect(edit).to_be_focused()
    edit.fill("Second")
    page.locator(".edit").get_by_role("button", name="Send").click()
    expect(page.get_by_role("log")).to_contain_text("Answer 3")
    assert script.bodies[2]["messages"] == [{"role": "user", "content": "Second"}]
    page.locator(".user").get_by_role("button", name="Previous version").click()
    expect(page.get_by_role("log")).to_contain_text("First")
    assert last(page).startswith("Answer")


def test_an_answer_can_be_edited_and_deleted(script: Scripted, visit: Opened) -> None:
    script.answers.append([says("Wrong"), end()])
    page = visit(script.url)
    ask(page, "Q")
    page.locator('.assistant [data-does="edit"]').click()
    page.get_by_label("Edit message").press("Escape")
    expect(page.locator('.assistant [data-does="edit"]')).to_be_focused()
    page.locator('.assistant [data-does="edit"]').click()
    page.get_by_label("Edit message").fill("Right")
    page.locator(".edit").get_by_role("button", name="Save").click()
    expect(page.locator(".assistant .markdown")).to_have_text("Right")
    expect(page.locator(".branches")).to_contain_text("2 of 2")
    page.locator('.assistant [data-does="delete"]').click()
    expect(page.locator(".assistant .markdown")).to_have_text("Wrong")
    page.locator('.user [data-does="delete"]').click()
    expect(page.locator(".message")).to_have_count(0)


def test_a_reload_in_mid_answer_goes_on_where_it_was(script: Scripted, visit: Opened) -> None:
    script.answers.append([says("The first half, "), threading.Event()])
    page = visit(script.url)
    ask(page, "Go")
    expect(page.get_by_role("log")).to_contain_text("The first half,")
    script.answers.append([says("and the second."), end()])
    page.reload()
    expect(page.locator(".stats").last).to_contain_text("tokens/s")
    assert last(page) == "The first half, and the second."
    assert script.bodies[1]["messages"] == [
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": "The first half, "},
    ]
    until(lambda: script.left == 1)
    page.reload()
    expect(page.get_by_role("log")).to_contain_text("The first half, and the second.")
    assert len(script.bodies) == 2  # it was whole


def test_a_draft_survives_a_reload(script: Scripted, visit: Opened) -> None:
    page = visit(script.url)
    page.fill("#entry", "not yet said")
    page.reload()
    expect(page.locator("#entry")).to_have_value("not yet said")


def test_ten_thousand_tokens(script: Scripted, visit: Opened) -> None:
    """What is whole is never drawn again: its element stays the same to the end."""
    begun = threading.Event()
    words = [f"word{i}{chr(10) * 2 if i % 100 == 99 else ' '}" for i in range(10_000)]
    script.answers.append([*map(says, words[:250]), begun, *map(says, words[250:]), end(n=10_000)])
    page = visit(script.url)
    ask(page, "Write a lot")
    expect(page.get_by_role("log")).to_contain_text("word249")
    page.evaluate("document.querySelector('.markdown .block').mark = 'the first'")
    begun.set()
    expect(page.locator(".stats").last).to_contain_text("10000 tokens")
    assert page.locator(".markdown .block").count() == 100
    assert page.evaluate("document.querySelector('.markdown .block').mark") == "the first"
    assert last(page).split() == "".join(words).split()
    expect(page.locator("#newest")).to_be_hidden()  # it has followed the text


ERRORS: list[tuple[Any, str]] = [
    (
        (400, {"type": TOO_LONG, "message": "x", "n_prompt_tokens": 5000, "n_ctx": 4096}),
        "The conversation is too long: 5000 tokens, context 4096.",
    ),
    ((503, {"code": "overloaded", "message": "512 texts"}), "The server is busy: 512 texts."),
    ((400, {"message": "top_k: expected a number"}), "Top_k: expected a number"),
    ((500, "no JSON object"), "Status 500"),
    ([says("Half"), {"error": {"message": "the file shrank"}}], "The file shrank"),
    ([says("Half"), CUT], "Connection lost: the answer is incomplete."),
]


def test_errors_in_words(script: Scripted, visit: Opened) -> None:
    page = visit(script.url, expected="Failed to load resource")
    for i, (answer, said) in enumerate(ERRORS):
        script.answers.append(answer)
        if i:
            page.locator('.assistant [data-does="again"]').click()
        else:
            ask(page, "Go")
        expect(page.locator(".note.wrong")).to_contain_text(said)
        expect(page.locator("#status")).to_contain_text(said)
    script.answers.append([says("Well."), end()])
    page.locator('.assistant [data-does="again"]').click()
    expect(page.locator(".assistant .markdown")).to_have_text("Well.")
    expect(page.locator(".note.wrong")).to_have_count(0)


def test_the_queue_and_progress_of_the_prompt(script: Scripted, visit: Opened) -> None:
    more = threading.Event()
    begun = threading.Event()
    progress = {"total": 3000, "cache": 500, "processed": 0, "time_ms": 100, "queue": 2}
    reading = {**progress, "processed": 1500, "queue": 0}
    script.answers.append(
        [
            says(role="assistant") | {"prompt_progress": progress},
            begun,
            says() | {"prompt_progress": reading},
            more,
            says("So."),
            end(),
        ]
    )
    page = visit(script.url)
    ask(page, "Go")
    expect(page.locator(".note")).to_have_text("Queued at position 2")
    expect(page.get_by_role("progressbar")).to_have_count(0)
    begun.set()
    expect(page.locator(".note")).to_have_text("Processing the prompt: 1500 of 3000 tokens")
    assert page.get_by_role("progressbar").get_attribute("value") == "1500"
    more.set()
    expect(page.get_by_role("progressbar")).to_have_count(0)


def test_where_a_prompt_left_the_cache(script: Scripted, visit: Opened) -> None:
    left = {"memory": 30, "files": 8, "left_at": 30, "piece": " <b>", "why": "evicted"}
    last = end()
    last["timings"]["cache"] = left
    script.answers.append([says("So."), last])
    page = visit(script.url)
    ask(page, "Go")
    expect(page.locator(".stats")).to_contain_text(
        "Reused from cache: 30 (8 from disk) · Prompt speed: 1200 tokens/s · "
        "Reuse ended at token 30 (“ <b>”): the rest was evicted"
    )


def test_reasoning_is_folded(script: Scripted, visit: Opened) -> None:
    more = threading.Event()
    script.answers.append(
        [
            says(reasoning_content="Let me ", reasoning="Let me "),
            more,
            says(reasoning_content="see.", reasoning="see."),
            says("42"),
            end(),
        ]
    )
    page = visit(script.url)
    ask(page, "Why?")
    summary = page.locator(".reasoning summary")
    expect(summary).to_have_text("Reasoning… (2 words)")
    more.set()
    expect(page.locator(".markdown")).to_have_text("42")
    expect(summary).to_have_text("Reasoning (3 words)")
    expect(page.locator(".reasoning .plain")).to_be_hidden()
    summary.click()
    expect(page.locator(".reasoning .plain")).to_have_text("Let me see.")


def test_reasoning_is_ended_by_a_button(script: Scripted, visit: Opened) -> None:
    more = threading.Event()
    thought = {**says(reasoning_content="Let me ", reasoning="Let me "), "id": "chatcmpl-7"}
    script.answers.append([thought, more, says("42"), end()])
    page = visit(script.url)
    ask(page, "Why?")
    now = page.locator('[data-does="answer-now"]')
    expect(now).to_be_visible()
    assert script.bodies[0]["reasoning_control"] is True
    now.click()
    until(lambda: len(script.bodies) == 2)
    assert script.paths[1] == CONTROL
    assert script.bodies[1] == {"id": "chatcmpl-7", "action": "reasoning_end"}
    more.set()
    expect(page.locator(".markdown")).to_have_text("42")
    expect(now).to_be_hidden()


def test_earlier_reasoning_is_sent_where_the_server_keeps_it(
    script: Scripted, visit: Opened
) -> None:
    for preserve in (None, True):
        script.props["treadle"]["reasoning_preserve"] = preserve
        said = [says(reasoning_content="Let me ", reasoning="Let me "), says("42"), end()]
        script.answers += [said, [says("So."), end()]]
        page = visit(script.url)
        ask(page, "Why?")
        expect(page.locator(".markdown")).to_have_text("42")
        ask(page, "And?")
        expect(page.locator(".markdown").last).to_have_text("So.")
        _, answer, _ = script.bodies[-1]["messages"]
        assert answer.get("reasoning_content") == ("Let me " if preserve else None)


def test_calls_of_tools_are_shown_and_answered(script: Scripted, visit: Opened) -> None:
    def part(**function: str) -> dict[str, object]:
        return says(
            tool_calls=[
                {
                    "index": 0,
                    **({"id": "call_1"} if "name" in function else {}),
                    "function": function,
                }
            ]
        )

    script.answers.append(
        [
            part(name="weather", arguments=""),
            part(arguments='{"city":'),
            part(arguments='"Ulm"}'),
            end("tool_calls"),
        ]
    )
    page = visit(script.url)
    ask(page, "How is the weather?")
    expect(page.locator(".call")).to_contain_text('"city": "Ulm"')
    script.answers.append([says("It rains."), end()])
    page.get_by_label("Result of tool weather").fill("rain")
    page.get_by_role("button", name="Submit result").click()
    expect(page.get_by_role("log")).to_contain_text("It rains.")
    _, call, result = script.bodies[1]["messages"]
    assert call["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city":"Ulm"}'}
    assert result == {"role": "tool", "content": "rain", "tool_call_id": "call_1"}


def test_tools_of_servers_are_run_when_allowed(script: Scripted, visit: Opened) -> None:
    """Once, always from then on, and one that fails; the user's own tools go along."""
    functions = [{"type": "function", "function": {"name": name}} for name in ("s__add", "s__no")]
    problem = {"name": "t", "error": "it ended"}
    script.tools = {"data": functions, "servers": [{"name": "s", "error": None}, problem]}
    script.props["treadle"]["mcp"] = ["s", "t"]
    script.results["s__add"] = "5"

    def calls(*names: str) -> list[Any]:
        made = [
            {"index": i, "id": f"c{i}", "function": {"name": name, "arguments": "{}"}}
            for i, name in enumerate(names)
        ]
        return [says(tool_calls=made), end("tool_calls")]

    page = visit(script.url, expected="404")
    expect(page.locator("#notice")).to_contain_text("Tool server t: it ended.")
    script.answers += [calls("s__add"), [says("Five."), end()]]
    ask(page, "2 + 3?")
    page.get_by_role("button", name="Run once").click()
    expect(page.get_by_role("log")).to_contain_text("Five.")
    assert script.bodies[0]["tools"] == functions
    assert script.bodies[1]["messages"][-1] == {
        "role": "tool",
        "content": "5",
        "tool_call_id": "c0",
    }
    script.answers += [calls("s__add"), calls("s__add"), [says("Ten."), end()]]
    ask(page, "4 + 6?")
    page.get_by_role("button", name="Always allow this tool").click()
    expect(page.get_by_role("log")).to_contain_text("Ten.")
    assert script.paths.count("s__add {}") == 3
    script.answers += [calls("s__no", "own"), [says("Well."), end()]]
    ask(page, "And?")
    page.get_by_role("button", name="Run once").click()  # the user's own tool has none
    expect(page.locator("#notice")).to_contain_text("No such tool")
    for name in ("s__no", "own"):
        page.get_by_label(f"Result of tool {name}").fill("none")
        page.get_by_role("button", name="Submit result").first.click()
    expect(page.get_by_role("log")).to_contain_text("Well.")


def test_alternatives_of_a_token(script: Scripted, visit: Opened) -> None:
    def token(text: str, *others: str) -> dict[str, object]:
        tops = [{"token": each, "logprob": -0.5 - i} for i, each in enumerate((text, *others))]
        chunk = says(text)
        chunk["choices"][0]["logprobs"] = {"content": [{**tops[0], "top_logprobs": tops}]}
        return chunk

    script.answers.append([token("The", "A"), token(" cat", " dog", "<b>"), end()])
    page = visit(script.url)
    page.click("#settings-open")
    page.get_by_label("Top log probabilities").fill("2")
    page.keyboard.press("Tab")
    page.keyboard.press("Escape")
    ask(page, "Who?")
    page.click('[data-does="tokens"]')
    expect(page.get_by_role("button", name="The, 60.7 %")).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".alternatives")).to_contain_text("<b> 8.2 %")
    script.answers.append([says(" barks"), end()])
    page.locator(".alternatives").get_by_role("button", name="dog").click()
    expect(page.locator(".assistant .markdown")).to_have_text("The dog barks")
    assert (script.bodies[0]["logprobs"], script.bodies[0]["top_logprobs"]) == (True, 2)
    assert script.bodies[1]["messages"][-1] == {"role": "assistant", "content": "The dog"}
    expect(page.locator(".branches")).to_contain_text("2 of 2")


def test_a_model_that_knows_no_conversation_goes_on_with_a_text(
    script: Scripted, visit: Opened
) -> None:
    script.props["treadle"] = {"builtin_template": "plain"}
    tail = {
        "content": "",
        "stop": True,
        "stop_type": "limit",
        "tokens_evaluated": 4,
        "tokens_predicted": 3,
    }
    script.answers.append([{"content": "\n    return 1", "stop": False}, tail])
    page = visit(script.url)
    ask(page, "def f():")
    expect(page.locator(".note")).to_have_text("Stopped at the token limit")
    assert script.paths == ["/completion"]
    assert script.bodies[0]["prompt"] == "def f():"
    script.answers.append([{"content": "\n", "stop": False}, tail])
    page.click('[data-does="resume"]')
    until(lambda: len(script.bodies) == 2)
    assert script.bodies[1]["prompt"] == "def f():\n    return 1"


def test_files_are_sent_as_text(script: Scripted, visit: Opened) -> None:
    page = visit(script.url)
    files = [file("a.md", "naive ```code``` ï"), file("b.bin", b"\xff\x00\x01")]
    page.set_input_files("#attach-file", files)
    expect(page.locator("#notice")).to_contain_text("b.bin: not a text")
    expect(page.locator("#attached li")).to_have_count(1)
    page.evaluate(
        """text => {
        const data = new DataTransfer();
        data.setData('text/plain', text);
        const paste = {clipboardData: data, bubbles: true, cancelable: true};
        document.querySelector('#entry').dispatchEvent(new ClipboardEvent('paste', paste));
        }""",
        "long " * 2000,
    )
    expect(page.locator("#attached li")).to_have_count(2)
    page.get_by_role("button", name="Remove pasted text").click()
    script.answers.append([says("Read."), end()])
    ask(page, "What is this?")
    expect(page.get_by_role("log")).to_contain_text("Read.")
    assert script.bodies[0]["messages"][0]["content"] == (
        "a.md:\n````\nnaive ```code``` ï\n````\n\nWhat is this?"
    )
    expect(page.locator("#attached li")).to_have_count(0)
    expect(page.locator(".file summary")).to_have_text("a.md (18 characters)")


def test_a_key_is_asked_for(script: Scripted, visit: Opened) -> None:
    script.key = "open sesame"
    page = visit(script.url, expected="401")
    expect(page.locator("#key")).to_be_visible()
    page.fill("#key-value", "open sesame")
    page.keyboard.press("Enter")
    expect(page.locator("#model")).to_have_text("scripted")
    script.answers.append([says("Welcome."), end()])
    ask(page, "May I?")
    expect(page.get_by_role("log")).to_contain_text("Welcome.")
    assert script.keys[-1] == "Bearer open sesame"
    assert "sesame" not in json.dumps(script.bodies)


def test_an_answer_is_written_on_while_another_conversation_is_read(
    script: Scripted, visit: Opened
) -> None:
    more = threading.Event()
    script.answers.append([says("Slow "), more, says("answer"), end()])
    page = visit(script.url)
    ask(page, "One")
    expect(page.get_by_role("log")).to_contain_text("Slow")
    page.click("#new")
    expect(page.locator(".message")).to_have_count(0)
    more.set()
    page.get_by_role("link", name="One").click()
    expect(page.locator(".markdown")).to_have_text("Slow answer")
