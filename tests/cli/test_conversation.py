from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.cli.conversation import COMMANDS, Conversation, Turn, read_record
from treadle.errors import FileError

TURN = Turn(
    n_prompt=10, n_cached=4, prefill_s=0.5, n_generated=9, decode_s=0.25, n_context=18, n_ctx=64
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


def test_unanswered_takes_only_a_message_back(talk: Conversation) -> None:
    talk.unanswered()
    assert len(talk.messages) == 2
    talk.enter("more")
    talk.unanswered()
    assert len(talk.messages) == 2


def test_stats(talk: Conversation) -> None:
    assert Conversation().enter("/stats").note == "no answer yet"
    assert str(TURN) == ("9 tokens, 32.0 tokens/s; read 6, 12.0 tokens/s; context 18 of 64")
    talk.answered("again", TURN)
    note = talk.enter("/stats").note
    assert "2 in all: wrote 18 tokens, 32.0 tokens/s; read 12, 12.0 tokens/s" in note
    assert "8 tokens were still in the cache" in note


def test_help_names_every_command(talk: Conversation) -> None:
    note = talk.enter("/help").note
    assert all(f"/{name}" in note for name in COMMANDS if name != "exit")


@pytest.mark.parametrize("line", ["/quit", "/exit"])
def test_leaving(talk: Conversation, line: str) -> None:
    assert talk.enter(line).leave


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
    other, pipe, record = tmp_path / "notes.txt", tmp_path / "pipe", tmp_path / "talk.json"
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
    assert "No space left" in talk.enter(f"/save {tmp_path}/talk.json").note
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["save", "load"])
@pytest.mark.parametrize("name", [".", "/", "..", "~nosuchuser/x", "a\0b", "x" * 300])
def test_names_that_cannot_be(talk: Conversation, command: str, name: str) -> None:
    outcome = talk.enter(f"/{command} {name}")
    assert outcome.note.startswith(("not saved: ", "cannot ")) or "is no file name" in outcome.note
    assert len(talk.messages) == 2


def test_half_a_surrogate_pair_is_saved(talk: Conversation, tmp_path: Path) -> None:
    talk.enter("bad \udc80 é")
    assert "3 messages saved" in talk.enter(f"/save {tmp_path}/talk.json").note
    after = Conversation()
    after.enter(f"/load {tmp_path}/talk.json")
    assert after.messages == talk.messages
