"""Messages with pictures and sounds, read for models with eyes, with ears, and with neither."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from treadle.chat.messages import MediaPolicy, PlacedPart, read_conversation
from treadle.errors import FileError, TemplateError, UnsupportedError

EYES = MediaPolicy(frozenset({"image"}))
FAR = MediaPolicy(frozenset({"image"}), local=False)
WAV = base64.b64encode(b"RIFF" + bytes(40)).decode()
DATA = base64.b64encode(b"GIF89a\x07\x00\x05\x00" + bytes(9)).decode()
GIF = "picture ({}7 x 5 pixels, 19 bytes)"


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "see"}, *parts]}]


def result(*parts: Any) -> list[dict[str, Any]]:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": list(parts)},
    ]


URL = {"type": "image_url", "image_url": {"url": f"data:image/gif;base64,{DATA}"}}
SOUND = {"type": "input_audio", "input_audio": {"data": WAV, "format": "wav"}}


def test_pictures_stand_beside_the_messages() -> None:
    """In the order of their parts; templates get types alone."""
    array = np.zeros((5, 7, 3), np.uint8)
    messages = [
        *user(URL, {"type": "text", "text": "and"}, {"type": "image", "image": array}),
        *result({"type": "image", "data": DATA, "mimeType": "image/gif"}, SOUND),
    ]
    made = read_conversation(messages, EYES)
    assert [part.kind for part in made.media] == ["image"] * 3
    assert made.media[0].source == made.media[2].source == base64.b64decode(DATA)
    assert made.media[1].source is array
    first, *_, last = made.messages
    assert [part["type"] for part in first["content"]] == ["text", "image", "text", "image"]
    assert first["content"][1] == first["content"][3] == {"type": "image"}
    assert last["content"][0] == {"type": "image"}
    assert "sound (audio/wav, 44 bytes) here" in last["content"][1]["text"]
    assert json.dumps(made.messages)  # JSON alone is left
    (warning,) = made.warnings
    assert warning.endswith("was dropped, because the model reads only text and pictures")
    assert messages[0]["content"][1] is URL  # the caller's own messages are as they were


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (URL, GIF.format("image/gif, ")),
        ({"type": "image", "image": base64.b64decode(DATA)}, GIF.format("")),
        ({"type": "image", "image": np.zeros((5, 7), np.uint8)}, "picture (7 x 5 pixels)"),
        ({"type": "image", "image": "/tmp/a b.png"}, "picture (a b.png)"),
        ({"type": "image", "image": Path("/tmp/c.png")}, "picture (c.png)"),
        ({"type": "image", "image": "https://a/b.png"}, "picture (https://a/b.png)"),
        ({"type": "image_url", "image_url": "no picture"}, "picture (7 bytes)"),
        (SOUND, "sound (audio/wav, 44 bytes)"),
        ({"type": "audio", "audio": np.zeros(9, np.float32)}, "sound"),
    ],
)
@pytest.mark.parametrize("of", [user, result])
def test_a_model_that_reads_text_alone(of: Any, part: Any, said: str) -> None:
    made = read_conversation(of(part), MediaPolicy())
    assert not made.media
    message = made.messages[-1]
    where = "tool result 'a'" if of is result else "message 0"
    assert made.warnings == (f"{where}: a {said} was dropped, because the model reads only text",)
    sentence = message["content"][-1]["text"]
    assert said in sentence
    assert sentence.endswith("It is left out: the model reads text alone.]")
    with pytest.raises(UnsupportedError) as raised:
        read_conversation(of(part), MediaPolicy(strict=True))
    place = f"messages[{len(made.messages) - 1}].content[{int(of is user)}]"
    assert str(raised.value) == f"{place}: a {said} cannot be read: the model reads text alone"


def test_a_picture_of_pillow_that_nobody_sees() -> None:
    image = pytest.importorskip("PIL.Image").new("RGB", (7, 5))
    made = read_conversation(user({"type": "image", "image": image}))
    assert "picture (7 x 5 pixels)" in made.warnings[0]


def test_parts_that_cannot_be_read() -> None:
    """A user's are errors that name the place; a tool may say anything: it becomes a sentence."""
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}}
    with pytest.raises(FileError, match=r"messages\[0\]\.content\[1\]\.image_url\.url"):
        read_conversation(user(broken), EYES)
    with pytest.raises(TemplateError, match=r"content\[1\]: a part of type image without"):
        read_conversation(user({"type": "image"}), EYES)
    for part in (broken, {"type": "image"}, {"type": "odd", "x": 1}):
        made = read_conversation(result(part), EYES)
        assert len(made.warnings) == 1
        assert made.messages[-1]["content"][0]["type"] == "text"
    with pytest.raises(UnsupportedError, match="message 0: parts of type 'video'"):
        read_conversation(user({"type": "video", "video": "x"}), EYES)


def test_files_of_this_machine_are_not_for_clients() -> None:
    part = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}
    with pytest.raises(UnsupportedError, match="not read for a client"):
        read_conversation(user(part), FAR)
    placed = PlacedPart(part, "input[4].content[2]")
    with pytest.raises(UnsupportedError, match=r"^input\[4\]\.content\[2\]\.image_url"):
        read_conversation(user(placed), FAR)


def test_a_result_of_any_json_is_kept() -> None:
    for content in ([1, {"type": "image"}], {"type": "image"}, [{"a": 1}]):
        messages = result()
        messages[-1]["content"] = content
        made = read_conversation(messages, EYES)
        assert made.messages[-1]["content"] == content
        assert not made.warnings


def test_a_library_call(tmp_path: Path) -> None:
    """The conversation goes on, with a warning; strict, it does not."""
    talk = user(URL)
    with treadle.load(threads=1, context=256) as model:
        said = model.chat_prompt(talk)
        assert f"see\n[A {GIF.format('image/gif, ')} was sent here." in said
        with pytest.warns(UserWarning, match=r"message 0: a picture .* was dropped"):
            assert isinstance(model.chat(talk, max_tokens=1).finish(), str)
        made = model.chat(talk, tools=[], max_tokens=1)
        assert len(made.warnings) == 1
        assert not model.modalities
    with (
        treadle.load(threads=1, context=256, strict=True) as model,
        pytest.raises(UnsupportedError, match="cannot be read: the model reads text alone"),
    ):
        model.chat(talk)
