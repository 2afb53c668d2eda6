"""Pictures and sounds on the command line and in a chat, with tiny models that read them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from shutil import copy
from typing import Any

import click
import pytest

from tests.changed_gguf import write_changed
from tests.cli.conftest import Run
from tests.cli.fake import FakeModel
from treadle.cli.conversation import AnswerCost, Conversation, Outcome
from treadle.cli.media_files import (
    MediaFile,
    dropped_files,
    message_parts,
    open_media_file,
    split_paths,
    usage_text,
)
from treadle.cli.options import projector
from treadle.cli.transcript import read_record
from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.scheduler.output import Timings
from treadle.scheduler.request import MediaUsage

PNG = b"\x89PNG\r\n\x1a\n" + bytes(16)
WAV = b"RIFF" + bytes(4) + b"WAVE" + bytes(16)
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<start_of_image>{% else %}{{ p.text }}"
    "{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
FAST = ("-t", "1", "-c", "256", "-n", "3", "--temp", "0", "--kv", "f32")


@pytest.fixture(scope="module")
def media(data: Path) -> Path:
    return data / "media"


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "a cat.png"
    path.write_bytes(PNG)
    return path


# -- names of files ----------------------------------------------------------------------------


def test_files_are_told_by_their_bytes(tmp_path: Path, picture: Path) -> None:
    sound = tmp_path / "picture.png"
    sound.write_bytes(WAV)
    assert open_media_file(str(picture)) == MediaFile("image", str(picture))
    assert open_media_file(picture.as_uri()).source == str(picture)
    assert open_media_file(str(sound)).kind == "audio"
    assert open_media_file(str(sound)).part == {"type": "audio", "audio": str(sound)}
    address = open_media_file("https://example.org/cat.png")
    assert address.part == {"type": "image", "image": "https://example.org/cat.png"}
    assert address.name == address.source


def test_paths_are_kept_whole(
    tmp_path: Path, picture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A saved conversation is loaded from another folder, too."""
    monkeypatch.chdir(tmp_path)
    assert open_media_file("a cat.png").source == str(picture)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_media_file("~/a cat.png").source == str(picture)


def test_files_that_are_neither(tmp_path: Path) -> None:
    for name, octets, said in [
        ("a.txt", b"hello", "is neither a picture nor a sound: expected PNG"),
        ("a.svg", b"<svg></svg>", "is SVG: expected PNG"),
    ]:
        (tmp_path / name).write_bytes(octets)
        with pytest.raises(UnsupportedError, match=said):
            open_media_file(str(tmp_path / name))
    for name in (str(tmp_path / "no.png"), str(tmp_path), "a\0b"):
        with pytest.raises(FileError):
            open_media_file(name)
    with pytest.raises(FileError, match="an empty name"):
        open_media_file("")
    (tmp_path / "empty.png").touch()
    with pytest.raises(FileError, match=r"an empty file \(expected a picture or a sound\)"):
        open_media_file(str(tmp_path / "empty.png"))


@pytest.mark.skipif(os.name != "posix", reason="how terminals here escape blanks")
@pytest.mark.parametrize(
    "form", ["{}", "'{}'", '"{}"', "{escaped}", "  {escaped}  ", "{uri}", "{escaped} '{}'"]
)
def test_a_dropped_file(form: str, picture: Path) -> None:
    """As terminals write it: quoted, with escaped blanks, or as it is; several with blanks."""
    line = form.format(picture, escaped=str(picture).replace(" ", "\\ "), uri=picture.as_uri())
    found = dropped_files(line)
    assert [file.source for file in found] == [str(picture)] * (2 if "} '" in form else 1)


def test_messages_are_not_dropped_files(
    tmp_path: Path, picture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hello").write_text("a text")
    for line in (
        "hello",  # a file, but no picture
        f"'{picture}' what is this?",
        "What's up",
        "https://example.org/cat.png",
        "missing.png",
        "",
        "   ",
        f"'{picture}'\n'{picture}'",
        f"{picture}" + " " * 5000 + "x",
    ):
        assert dropped_files(line) == []
    assert split_paths("it's") == ["it's"]


def test_where_files_stand_in_a_text() -> None:
    a, b = MediaFile("image", "/a.png"), MediaFile("audio", "/b.wav")
    text = {"type": "text", "text": "see"}
    assert message_parts("see", [a, b]) == [a.part, b.part, text]
    assert message_parts("see", []) == [text]
    assert message_parts("", [a]) == [a.part]
    assert message_parts("<__media__>see<__media__>", [a, b]) == [a.part, text, b.part]
    for line in ("<__media__>", "<__media__>" * 3):
        with pytest.raises(click.UsageError, match="one for each picture or sound, or none"):
            message_parts(line, [a, b])


def test_what_a_prompt_had() -> None:
    picture = MediaUsage("image", 256, (480, 640), (896, 896))
    sound = MediaUsage("audio", 1, (1, 16000), (1, 16000))
    assert usage_text([picture], 12.34) == "picture of 256 tokens, encoded in 12.3 s"
    assert usage_text([picture, picture, sound], 0.0) == (
        "2 pictures of 512 tokens, sound of 1 token"
    )
    assert usage_text([], 1.0) == ""
    timings = Timings(n_prompt=300, n_generated=2, prefill_s=1.0, decode_s=1.0, media_s=2.0)
    line = str(AnswerCost(timings, 302, 512, [picture]))
    assert "; picture of 256 tokens, encoded in 2.0 s; context 302 of 512" in line


# -- options -------------------------------------------------------------------------------------


def test_projector_options(run: Run, model: FakeModel, gguf: str, tmp_path: Path) -> None:
    file = tmp_path / "mmproj.gguf"
    file.touch()
    for words, expected in (
        ([], {}),
        (["--mmproj", str(file)], {"mmproj": file}),
        (["--no-mmproj"], {"mmproj": False}),
        (["--image-max-tokens", "64"], {"image_max_tokens": 64}),
    ):
        for command in ("run", "chat"):
            assert run(command, gguf, *words, stdin="hello\n").code == 0
            (settings,) = (call[2] for call in model.calls if call[0] == "load")
            assert {k: settings[k] for k in ("mmproj", "image_max_tokens") if k in settings} == (
                expected
            )
            model.calls.clear()
    ran = run("run", gguf, "x", "--mmproj", str(file), "--no-mmproj")
    assert (ran.code, "--mmproj and --no-mmproj exclude each other" in ran.err) == (2, True)
    ran = run("run", gguf, "x", "--mmproj", str(tmp_path / "mmprj.gguf"))
    assert ran.code == 1
    assert f"no such file; did you mean {file}?" in ran.err
    with pytest.raises(click.UsageError, match="an empty name"):
        projector("", False)


# -- run -----------------------------------------------------------------------------------------


def test_run_with_a_picture(run: Run, media: Path) -> None:
    model = str(media / "gemma3" / "text.gguf")
    plain = str(media / "media" / "plain.png")
    ran = run("run", model, "hello", "--image", plain, *FAST, "--json")
    report = json.loads(ran.out)
    assert report["media"] == [
        {"kind": "image", "n_tokens": 16, "size": [61, 97], "resized": [224, 224]}
    ]
    assert report["timings"]["media_s"] > 0
    rows = [id for id in report["prompt_ids"] if id >= 1 << 16]
    assert len(rows) == 16
    marked = run("run", model, "<__media__>hello", "--image", plain, *FAST, "--json")
    assert json.loads(marked.out)["prompt_ids"] == report["prompt_ids"]
    ran = run("run", model, "hello", "--image", plain, *FAST, "--stats")
    assert ran.out == report["text"]
    assert "pictures picture of 16 tokens, encoded in " in ran.err
    assert "media" not in json.loads(run("run", model, "hello", *FAST, "--json").out)


@pytest.mark.parametrize("name", ["qwen3asr", "voxtral"])
def test_run_with_a_sound(name: str, run: Run, media: Path) -> None:
    model = media / name / "text.gguf"
    sound = media / "media" / "s16.wav"
    made = run("run", str(model), "What is said?", "--audio", str(sound), "--json", *FAST)
    assert made.code == 0, made.err
    (heard,) = json.loads(made.out)["media"]
    assert heard["kind"] == "audio"
    assert heard["n_tokens"] == (13 if name == "qwen3asr" else 37)
    refused = run("run", str(model), "x", "--image", str(media / "media" / "plain.png"), *FAST)
    assert refused.code == 1
    assert "a picture, but text.gguf reads text and sounds only" in refused.err


def test_run_asks_by_the_chat_template_of_the_file(
    run: Run, media: Path, tmp_path: Path, with_template: Any
) -> None:
    model = str(with_template(media / "gemma3", tmp_path, "Q:" + TEMPLATE + "A:"))
    plain = str(media / "media" / "plain.png")
    asked = json.loads(run("run", model, "hi", "--image", plain, *FAST, "--json").out)
    raw = json.loads(run("run", model, "hi", "--image", plain, *FAST, "--json", "--raw").out)
    assert bytes(id for id in asked["prompt_ids"] if id < 256).startswith(b"Q:")
    assert bytes(asked["prompt_ids"][-2:]) == b"A:"
    assert not bytes(id for id in raw["prompt_ids"] if id < 256).startswith(b"Q:")


@pytest.fixture
def with_template() -> Any:
    """Copies a model and its projector, with a chat template in the model's file."""

    def write(folder: Path, to: Path, template: str) -> Path:
        copy(folder / "mmproj.gguf", to / "mmproj.gguf")
        keys = {"tokenizer.chat_template": template}
        return write_changed(folder / "text.gguf", to / "text.gguf", keys)

    return write


def test_what_run_refuses(run: Run, media: Path, tmp_path: Path) -> None:
    model = str(media / "gemma3" / "text.gguf")
    plain = str(media / "media" / "plain.png")
    for words, code, said in [
        (["--image", "no.png"], 1, "no.png: No such file"),
        (["--image", str(media / "README.md")], 1, "is neither a picture nor a sound"),
        (["--audio", str(media / "media" / "float.wav")], 1, "reads text and pictures only"),
        (["--image", plain, "--no-mmproj"], 1, "reads text only: name its projector with --mmproj"),
        (["--image", plain, "--mmproj", model], 1, "not a projector file"),
        (
            ["--image", plain] * 2 + ["<__media__>"],
            2,
            "<__media__> 1 time: expected 2",
        ),
    ]:
        prompt = [] if words[-1] == "<__media__>" else ["hello"]
        ran = run("run", model, *prompt, *words, *FAST)
        assert (ran.code, ran.out) == (code, ""), words
        assert said in ran.err


# -- chat ----------------------------------------------------------------------------------------


def talk(*lines: str) -> tuple[Conversation, list[Outcome]]:
    conversation = Conversation()
    return conversation, [conversation.enter(line) for line in lines]


def test_a_picture_goes_with_the_next_message(picture: Path) -> None:
    conversation, outcomes = talk(f"/image {picture}", str(picture), "/image", "look")
    assert [outcome.ask for outcome in outcomes] == [False, False, False, True]
    assert outcomes[0].note == "a cat.png: with your next message; /undo removes it"
    assert outcomes[2].note.splitlines() == [str(picture)] * 2
    part = {"type": "image", "image": str(picture)}
    content = [part, part, {"type": "text", "text": "look"}]
    assert conversation.messages == [{"role": "user", "content": content}]
    assert conversation.attached == []
    conversation.unanswered()  # an error: nothing is lost
    assert conversation.messages == []
    assert len(conversation.attached) == 2
    assert conversation.enter("/undo").note == "2 files removed; the messages stay"
    assert conversation.attached == []


def test_what_cannot_be_attached(picture: Path, tmp_path: Path) -> None:
    conversation, (missing,) = talk(f"/image {tmp_path / 'no.png'}")
    assert missing.failed
    assert "no.png" in missing.note

    def refuse(file: MediaFile) -> str:
        raise UnsupportedError(f"{file.name}: reads text only")

    conversation.look = refuse
    for line in (f"/image {picture}", str(picture)):
        outcome = conversation.enter(line)
        assert (outcome.failed, outcome.ask) == (True, False)
        assert "reads text only" in outcome.note
    assert conversation.attached == []
    assert "a path alone sends a picture" in conversation.enter("/tmp/none.png").note
    conversation.look = lambda file: "5 x 5 pixels"
    assert conversation.enter(f"/audio {picture}").note.startswith("a cat.png (5 x 5 pixels): ")
    outcome = conversation.enter("<__media__> and <__media__>")
    assert (outcome.failed, len(conversation.attached)) == (True, 1)


def test_a_saved_talk_keeps_its_pictures(picture: Path, tmp_path: Path) -> None:
    conversation, _ = talk(str(picture), "look")
    conversation.answered("a cat")
    assert not conversation.enter(f"/save {tmp_path / 'talk.json'}").failed
    assert read_record(tmp_path / "talk.json") == ("", conversation.messages)
    odd: list[Any] = [{"type": "video", "video": "x"}, {"type": "image"}, "x", {"type": []}]
    for part in odd:
        message = {"role": "user", "content": [part]}
        (tmp_path / "odd.json").write_text(json.dumps({"system": "", "messages": [message]}))
        with pytest.raises(TreadleError, match="not a message"):
            read_record(tmp_path / "odd.json")


def test_chat_with_a_picture(run: Run, media: Path, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(TEMPLATE)
    plain = media / "media" / "plain.png"
    lines = [
        f"/image {plain}",
        "hello",
        "more",
        "/stats",
        f"/audio {media / 'media' / 'float.wav'}",
    ]
    words = ["--chat-template", str(template), *FAST]
    model = str(media / "gemma3" / "text.gguf")
    ran = run("chat", model, *words, stdin="\n".join(lines))
    assert ran.code == 1  # the sound
    assert len(ran.out.splitlines()) == 2
    first, second, *_ = (line for line in ran.err.splitlines() if line.startswith("3 tokens, "))
    assert "picture of 16 tokens, encoded in " in first
    assert "picture of 16 tokens; " in second  # from the cache
    assert "plain.png (97 x 61 pixels): with your next message" in ran.err
    assert "a sound, but text.gguf reads text and pictures only" in ran.err
