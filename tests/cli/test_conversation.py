from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.chat.tools import ToolCall
from treadle.cli.conversation import ALONE, COMMANDS, AnswerCost, Conversation, Outcome
from treadle.cli.settings import AnswerSettings
from treadle.cli.transcript import read_record
from treadle.errors import FileError, SamplingError
from treadle.scheduler.output import Timings

TURN = AnswerCost(
    Timings(n_prompt=10, n_cached=4, prefill_s=0.5, n_generated=9, decode_s=0.25), 18, n_ctx=64
)


@pytest.fixture
def talk() -> Conversation:
    """One question, one answer."""
    conversation = Conversation()
    assert conversation.enter("hi").ask
    conversation.answered("hello", TURN)
    return conversation


def said(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in conversation.messages]


def test_messages_alternate(talk: Conversation) -> None:
    assert said(talk) == [("user", "hi"), ("assistant", "hello")]
    assert talk.request() == talk.messages


@pytest.mark.parametrize("line", ["", "   ", "\n"])
def test_an_empty_line_is_nothing(talk: Conversation, line: str) -> None:
    assert not talk.enter(line).ask
    assert len(talk.messages) == 2


def test_two_slashes_are_one(talk: Conversation) -> None:
    assert talk.enter("//usr/bin").ask
    assert talk.messages[-1]["content"] == "/usr/bin"


@pytest.mark.parametrize(("line", "hint"), [("/rety", "did you mean /retry?"), ("/xyz", "/help")])
def test_a_misspelt_command(talk: Conversation, line: str, hint: str) -> None:
    outcome = talk.enter(line)
    assert hint in outcome.note
    assert not outcome.ask
    assert len(talk.messages) == 2


@pytest.mark.parametrize("name", sorted(ALONE))
def test_words_behind_a_command_that_takes_none(talk: Conversation, name: str) -> None:
    before = list(talk.messages)
    outcome = talk.enter(f"/{name} 3 x")
    assert outcome == Outcome(f"/{name} takes nothing behind it, found '3 x'", failed=True)
    assert talk.messages == before


def test_system(talk: Conversation) -> None:
    assert "no system prompt" in talk.enter("/system").note
    talk.enter("/system Be brief.")
    assert talk.request()[0] == {"role": "system", "content": "Be brief."}
    assert talk.enter("/SYSTEM").note == "Be brief."
    talk.enter('/system ""')
    assert talk.request() == talk.messages


def test_undo(talk: Conversation) -> None:
    talk.enter("more")
    talk.answered("no")
    talk.enter("/undo")
    assert said(talk) == [("user", "hi"), ("assistant", "hello")]
    talk.enter("/undo")
    assert said(talk) == []
    assert talk.enter("/undo").note == "nothing to undo"


def test_retry(talk: Conversation) -> None:
    assert talk.enter("/retry").ask
    assert said(talk) == [("user", "hi")]
    talk.answered("hey")
    assert said(talk) == [("user", "hi"), ("assistant", "hey")]
    assert not Conversation().enter("/retry").ask


def test_prefill_puts_words_into_the_models_mouth(talk: Conversation) -> None:
    assert not talk.enter("/prefill Arr,").ask
    assert talk.enter("who are you?").ask
    assert talk.request()[-1] == {"role": "assistant", "content": "Arr,"}
    talk.answered(" matey")
    assert talk.messages[-1] == {"role": "assistant", "content": "Arr, matey"}
    assert talk.prefill == ""


def test_prefill_without_words_takes_it_back(talk: Conversation) -> None:
    talk.enter("/prefill Arr,")
    talk.enter("/prefill")
    assert talk.request() == talk.messages


def test_swap_changes_places(talk: Conversation) -> None:
    assert talk.enter("/swap").ask
    assert said(talk) == [("assistant", "hi"), ("user", "hello")]
    # Templates want the user to open, so the request gets an empty opening.
    assert talk.request()[0] == {"role": "user", "content": ""}
    talk.answered("what's new?")
    assert not Conversation().enter("/swap").ask


def test_swap_begins_with_all_that_was_said(talk: Conversation) -> None:
    """Calls and results go with the roles, so that what was dropped cannot be counted."""
    talk.enter("more")
    talk.answered("", calls=[ToolCall("c", "echo", "{}")])
    talk.messages.append({"role": "tool", "content": "x"})
    talk.answered("no")
    talk.n_dropped = 4
    assert talk.enter("/swap").ask
    assert [m["content"] for m in talk.request()] == ["", "hi", "hello", "more", "no"]
    talk.unanswered()
    assert (len(talk.messages), talk.n_dropped) == (6, 4)


def test_unanswered_takes_only_a_message_back(talk: Conversation) -> None:
    talk.unanswered()
    assert len(talk.messages) == 2
    talk.enter("more")
    talk.unanswered()
    assert len(talk.messages) == 2


def test_stats(talk: Conversation) -> None:
    assert Conversation().enter("/stats").note == "no answer yet"
    assert str(TURN) == ("9 tokens, 32.0 tokens/s; prompt 6, 12.0 tokens/s; context 18 of 64")
    talk.answered("again", TURN)
    note = talk.enter("/stats").note
    assert "2 answers: generated 18 tokens, 32.0 tokens/s; prompts 12, 12.0 tokens/s" in note
    assert "8 prompt tokens reused from the cache" in note


def test_help_names_every_command(talk: Conversation) -> None:
    note = talk.enter("/help").note
    assert all(f"/{name}" in note for name in COMMANDS if name != "exit")


@pytest.mark.parametrize("line", ["/quit", "/exit"])
def test_leaving(talk: Conversation, line: str) -> None:
    assert talk.enter(line).leave


@pytest.mark.slow
@given(
    system=st.text(st.characters(codec="utf-8")),
    texts=st.lists(st.text(st.characters(codec="utf-8"))),
)
def test_what_is_saved_is_what_is_loaded(
    tmp_path_factory: pytest.TempPathFactory, system: str, texts: list[str]
) -> None:
    path = tmp_path_factory.mktemp("talk") / "talk.json"
    before = Conversation(system=system)
    for i, text in enumerate(texts):
        before.messages.append({"role": ("user", "assistant")[i % 2], "content": text})
    before.save(str(path))
    after = Conversation(prefill="x")
    after.load(str(path))
    assert (after.system, after.messages, after.prefill) == (system, before.messages, "")
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"messages": 3}',
        '{"messages": [], "system": 3}',
        '{"messages": [3]}',
        '{"messages": [{"role": "tool", "content": ""}]}',
        '{"messages": [{"role": "user", "content": null}]}',
        '{"messages": [{"role": [], "content": "x"}]}',
        "[" * 100_000,
    ],
)
def test_a_file_that_is_no_conversation(talk: Conversation, tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(FileError, match="not a"):
        read_record(path)
    assert "not a" in talk.enter(f"/load {path}").note
    assert len(talk.messages) == 2  # what was there stays


@pytest.mark.parametrize("command", ["save", "load"])
def test_files_that_cannot_be(talk: Conversation, tmp_path: Path, command: str) -> None:
    assert "needs a file name" in talk.enter(f"/{command}").note
    note = talk.enter(f"/{command} {tmp_path}/absent/talk.json").note
    assert "absent/talk.json: cannot be written" in note or "No such file or directory" in note
    path = tmp_path / "binary.json"
    path.write_bytes(b"\xff\xfe")
    assert "not a conversation" in talk.enter(f"/load {path}").note
    path.write_text(json.dumps({"messages": []}))
    assert talk.enter(f"/load {path}").note.startswith("0 messages loaded")


@pytest.mark.parametrize("line", ["more", "/retry", "/swap"])
def test_what_failed_left_the_conversation_as_it_was(talk: Conversation, line: str) -> None:
    before = said(talk)
    assert talk.enter(line).ask
    talk.unanswered()
    assert said(talk) == before


def test_a_failed_retry_of_a_failed_retry(talk: Conversation) -> None:
    before = said(talk)
    for line in ("/stats", "/retry", "/retry", "/undone"):
        talk.enter(line)
        talk.unanswered()
    assert said(talk) == before


def test_saving_never_costs_another_file(talk: Conversation, tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    pipe = tmp_path / "pipe"
    record = tmp_path / "talk.json"
    other.write_text("mine")
    os.mkfifo(pipe)
    assert "not a conversation" in talk.enter(f"/save {other}").note
    assert other.read_text() == "mine"
    assert "is no regular file" in talk.enter(f"/save {pipe}").note
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert "2 messages saved" in talk.enter(f"/save {record}").note
    assert "2 messages saved" in Conversation(messages=talk.messages).enter(f"/save {record}").note
    record.write_text("damaged")  # the one saved last is ours all the same
    assert "2 messages saved" in talk.enter(f"/save {record}").note
    assert {p.name for p in tmp_path.iterdir()} == {"notes.txt", "pipe", "talk.json"}


def test_a_part_does_not_stay(
    talk: Conversation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(part: Path, octets: bytes) -> int:
        part.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert "the disk is full" in talk.enter(f"/save {tmp_path}/talk.json").note
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["save", "load"])
@pytest.mark.parametrize("name", [".", "/", "..", "~nosuchuser/x", "a\0b", "x" * 300])
def test_names_that_cannot_be(talk: Conversation, command: str, name: str) -> None:
    outcome = talk.enter(f"/{command} {name}")
    assert (
        outcome.note.startswith(("not saved: ", "cannot ")) or "is not a file name" in outcome.note
    )
    assert len(talk.messages) == 2


def test_half_a_surrogate_pair_is_saved(talk: Conversation, tmp_path: Path) -> None:
    talk.enter("bad \udc80 é")
    assert "3 messages saved" in talk.enter(f"/save {tmp_path}/talk.json").note
    after = Conversation()
    after.enter(f"/load {tmp_path}/talk.json")
    assert after.messages == talk.messages


def test_clear_keeps_the_system_prompt_and_the_settings(talk: Conversation) -> None:
    for line in ("/system Be brief.", "/prefill Arr,", "/set temperature 0"):
        talk.enter(line)
    talk.n_dropped = 2
    assert talk.enter("/clear").note == "cleared; the system prompt stays"
    assert talk.enter("again").ask
    assert said(talk) == [("user", "again")]
    assert talk.request() == [{"role": "system", "content": "Be brief."}, talk.messages[0]]
    assert talk.settings.sampling.greedy
    assert Conversation().enter("/clear").note == "cleared"


def test_what_was_dropped_is_not_asked_and_is_saved(talk: Conversation, tmp_path: Path) -> None:
    talk.enter("more")
    talk.answered("no")
    talk.enter("still")
    assert talk.turn_ends() == [2, 4]
    talk.n_dropped = 2
    assert [m["content"] for m in talk.request()] == ["more", "no", "still"]
    assert talk.turn_ends() == [4]
    talk.enter(f"/save {tmp_path}/talk.json")
    assert len(read_record(tmp_path / "talk.json")[1]) == 5
    for line in ("/undo", "/undo"):
        talk.enter(line)
    assert talk.request() == talk.messages  # what is left is shown to the model again


def test_what_was_dropped_for_nothing_comes_back(talk: Conversation) -> None:
    talk.enter("more")
    talk.n_dropped = 2
    talk.unanswered()
    assert (said(talk), talk.n_dropped) == ([("user", "hi"), ("assistant", "hello")], 0)


def test_set(talk: Conversation) -> None:
    assert talk.enter("/set").note == AnswerSettings().table()
    assert talk.enter("/set temperature 0.2").note == ("* temperature           0.2  (default 0.8)")
    assert talk.enter("/set temp").note.startswith("* temperature")
    talk.enter("/set --top-k=7")
    assert (talk.settings.sampling.temperature, talk.settings.sampling.top_k) == (0.2, 7)
    assert talk.enter("/set temperature default").note == "  temperature           0.8"
    assert talk.settings.sampling.top_k == 7


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("temprature 1", "unknown setting 'temprature'; did you mean temperature?"),
        ("zzz 1", "unknown setting 'zzz'; /set lists the settings"),
        ("temperature hot", "temperature: 'hot' is not a valid float"),
        ("min_p 2", "min_p: min_p = 2.0 is out of range (expected 0 to 1)"),
        ("max_tokens 0", "max_tokens: 0 tokens: expected 1 or more, or -1 for no limit"),
        ("when-full maybe", "when-full: 'maybe' is not one of 'refuse', 'drop'"),
        ("markdown maybe", "markdown: 'maybe' is not on or off"),
        ("stop 'a", "stop: No closing quotation"),
        ("grammar absent.gbnf", "grammar: File 'absent.gbnf' does not exist"),
        ("custom x", "unknown setting 'custom'; /set lists the settings"),
    ],
)
def test_a_setting_that_cannot_be(talk: Conversation, line: str, why: str) -> None:
    outcome = talk.enter(f"/set {line}")
    assert (outcome.note, outcome.failed) == (why, True)
    assert talk.settings == AnswerSettings()


def test_a_setting_that_the_model_cannot_have(talk: Conversation) -> None:
    def check(settings: AnswerSettings) -> None:
        assert settings.sampling.logit_bias == {999: 1.0}
        raise SamplingError("there are 257 tokens")

    talk.check = check
    outcome = talk.enter("/set logit-bias 999+1")
    assert (outcome.note, outcome.failed) == ("there are 257 tokens", True)
    assert talk.settings == AnswerSettings()


@pytest.mark.parametrize("line", ["/save", "/load absent.json", "/rety", "/set x 1"])
def test_what_could_not_be_carried_out_says_so(talk: Conversation, line: str) -> None:
    assert talk.enter(line).failed
    assert not talk.enter("/stats").failed


def test_a_conversation_without_an_end() -> None:
    with pytest.raises(FileError, match="/dev/zero: has more than 67108864 bytes"):
        read_record(Path("/dev/zero"))
