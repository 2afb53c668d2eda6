"""Pictures and sounds in messages: every protocol's spelling of a part."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from treadle.chat.media_parts import (
    MediaPart,
    read_images,
    read_media_part,
    read_multimodal_prompt,
    split_at_markers,
)
from treadle.errors import FileError, TemplateError, TreadleError, UnsupportedError
from treadle.media.limits import MediaLimits
from treadle.media.source import read_picture

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEAG7buVgAAAABJRU5ErkJggg=="
)
WAV = b"RIFF\x26\0\0\0WAVEfmt \x10\0\0\0\1\0\1\0\x80\x3e\0\0\0\x7d\0\0\2\0\x10\0data\2\0\0\0\0\0"
PNG_64 = base64.b64encode(PNG).decode()
WAV_64 = base64.b64encode(WAV).decode()
URL = "https://pictures.example/a.png"
DATA_URL = f"data:image/png;base64,{PNG_64}"
PLACE = "messages[2].content[1]"


def found(part: dict[str, Any], *, local: bool = False, **options: Any) -> MediaPart:
    made = read_media_part(part, PLACE, local=local, **options)
    assert made is not None
    return made


# The part, its kind, its source, and where in the part that stands.
SPELLINGS: list[tuple[dict[str, Any], str, Any, str]] = [
    ({"type": "image_url", "image_url": {"url": DATA_URL}}, "image", PNG, "image_url.url"),
    (
        {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
        "image",
        URL,
        "image_url.url",
    ),
    ({"type": "image_url", "image_url": URL}, "image", URL, "image_url"),
    ({"type": "input_image", "image_url": DATA_URL, "detail": "auto"}, "image", PNG, "image_url"),
    ({"type": "input_image", "image_url": URL, "file_id": None}, "image", URL, "image_url"),
    (
        {"type": "input_audio", "input_audio": {"data": WAV_64, "format": "wav"}},
        "audio",
        WAV,
        "input_audio.data",
    ),
    ({"type": "audio_url", "audio_url": {"url": URL}}, "audio", URL, "audio_url.url"),
    (
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG_64}},
        "image",
        PNG,
        "source.data",
    ),
    ({"type": "image", "source": {"type": "url", "url": URL}}, "image", URL, "source.url"),
    ({"type": "image", "data": PNG_64, "mimeType": "image/png"}, "image", PNG, "data"),
    ({"type": "audio", "data": WAV_64, "mimeType": "audio/wav"}, "audio", WAV, "data"),
    ({"type": "image", "url": URL}, "image", URL, "url"),
    ({"type": "image", "base64": PNG_64}, "image", PNG, "base64"),
    ({"type": "image", "image": DATA_URL}, "image", PNG, "image"),
    (
        {"type": "audio", "audio": "HTTP://a.example/b.wav"},
        "audio",
        "HTTP://a.example/b.wav",
        "audio",
    ),
]


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize(("part", "kind", "source", "where"), SPELLINGS)
def test_every_spelling(
    part: dict[str, Any], kind: str, source: Any, where: str, local: bool
) -> None:
    before = json.dumps(part)
    made = found(part, local=local)
    assert (made.kind, made.source, made.place) == (kind, source, f"{PLACE}.{where}")
    assert made.template_part == {"type": kind}
    assert json.dumps(part) == before


def test_what_a_program_gives() -> None:
    picture = np.zeros((2, 3, 3), np.uint8)
    image = Image.new("RGB", (3, 2))
    samples = np.zeros(99, np.float32)
    kept: list[Any] = [PNG, bytearray(PNG), Path("a.png"), picture, image]
    for value in kept:
        assert found({"type": "image", "image": value}, local=True).source is value
    for value in (samples, (samples, 8000), WAV):
        assert found({"type": "audio", "audio": value}, local=True).source is value
    pair = found({"type": "audio", "audio": {"array": samples, "sampling_rate": 8000}}, local=True)
    assert pair.source[0] is samples
    assert pair.source[1] == 8000
    for text in ("b/a.png", "/b/a.png", "a b.png"):
        for part in ({"type": "image", "image": text}, {"type": "image", "path": text}):
            assert found(part, local=True).source == Path(text)
    url = found({"type": "image_url", "image_url": {"url": "file:///b/a%20b.png"}}, local=True)
    assert url.source == Path("/b/a b.png")
    sound = {"type": "input_audio", "input_audio": {"data": WAV}}
    assert found(sound, local=True).source == WAV
    assert read_picture(found({"type": "image", "image": PNG}, local=True).source).shape == (
        1,
        1,
        3,
    )


@pytest.mark.parametrize(
    "text",
    [
        "/etc/passwd",
        "a.png",
        "file:///etc/passwd",
        "FILE:///etc/passwd",
        "",
        " https://a",
        "ftp://a/b",
    ],
)
def test_a_client_names_no_file_of_this_machine(text: str) -> None:
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": text}},
        {"type": "image_url", "image_url": text},
        {"type": "input_image", "image_url": text},
        {"type": "image", "image": text},
        {"type": "image", "path": text},
        {"type": "image", "url": text},
        {"type": "audio", "audio": text},
        {"type": "image", "source": {"type": "url", "url": text}},
    ]
    for part in parts:
        with pytest.raises(UnsupportedError, match=r"^messages\[2\]\.content\[1\]\..* not read"):
            found(part)
    block = parts[-1]  # Anthropic's API has no paths, whoever calls
    with pytest.raises(UnsupportedError, match="files of this machine are not read"):
        found(block, local=True)
    for part in ({"type": "image", "data": text}, {"type": "image", "base64": text}):
        if text:
            with pytest.raises(FileError, match="not base64"):
                found(part)
        else:
            assert found(part).source == b""


def test_objects_of_a_client_are_refused() -> None:
    for value in (PNG, Path("a.png"), np.zeros((2, 2), np.uint8), 5, ["a"], {"array": 1}):
        for part in (
            {"type": "image", "image": value},
            {"type": "image", "data": value},
            {"type": "image_url", "image_url": value},
            {"type": "input_audio", "input_audio": {"data": value}},
        ):
            with pytest.raises(TemplateError, match=r"^messages\[2\]\.content\[1\]\."):
                found(part)


def test_other_parts() -> None:
    for part in (
        {"type": "text", "text": "a"},
        {"type": "thinking", "thinking": "a"},
        {"type": "video_url", "video_url": {"url": URL}},
        {"type": "document", "source": {"type": "url", "url": URL}},
        {"type": ["image"]},
        {},
    ):
        assert read_media_part(part, PLACE, local=True) is None


INVALID: list[tuple[dict[str, Any], type[TreadleError], str]] = [
    (
        {"type": "image"},
        TemplateError,
        ": a part of type image without a picture",
    ),
    ({"type": "input_audio"}, TemplateError, ": .* without a sound: expected input_audio"),
    ({"type": "image_url", "image_url": {}}, TemplateError, ".image_url.url is NoneType"),
    (
        {"type": "image_url", "image_url": {"url": None}},
        TemplateError,
        ".image_url.url is NoneType",
    ),
    (
        {"type": "image_url", "image_url": {"url": {"url": URL}}},
        TemplateError,
        ".image_url.url is dict",
    ),
    ({"type": "input_audio", "input_audio": WAV_64}, TemplateError, ".input_audio is str"),
    (
        {"type": "input_audio", "input_audio": {"format": "wav"}},
        TemplateError,
        ".input_audio.data is NoneType",
    ),
    ({"type": "image", "image": URL, "url": URL}, TemplateError, ": has both image and url"),
    ({"type": "image", "source": {"type": "base64"}}, TemplateError, ".source.data is NoneType"),
    ({"type": "image", "source": {"data": PNG_64}}, TemplateError, ".source.type is None"),
    ({"type": "image", "source": {"type": "file"}}, UnsupportedError, ".source: files are not"),
    ({"type": "input_image", "file_id": "f"}, UnsupportedError, ".file_id: files are not stored"),
    ({"type": "image", "data": "?"}, FileError, ".data: not base64"),
    ({"type": "image", "data": PNG_64[:-1]}, FileError, ".data: not base64"),
    (
        {"type": "image_url", "image_url": {"url": "data:image/png,abc"}},
        FileError,
        ".image_url.url: .* is not a data: URL of base64",
    ),
]


@pytest.mark.parametrize(("part", "kind", "words"), INVALID)
def test_invalid_parts(part: dict[str, Any], kind: type[TreadleError], words: str) -> None:
    for local in (False, True):
        with pytest.raises(kind, match=rf"^messages\[2\]\.content\[1\]{words}"):
            found(part, local=local)


def test_limits_hold_before_decoding() -> None:
    limits = MediaLimits(picture_bytes=len(PNG) - 1)
    for part in (
        {"type": "image", "data": PNG_64},
        {"type": "image_url", "image_url": {"url": DATA_URL}},
    ):
        with pytest.raises(UnsupportedError, match="the limit for a picture"):
            found(part, limits=limits)
    sound = {"type": "input_audio", "input_audio": {"data": WAV_64}}
    assert found(sound, limits=limits).source == WAV
    with pytest.raises(UnsupportedError, match="the limit for a sound"):
        found(sound, limits=MediaLimits(sound_bytes=10))


# -- Ollama, llama.cpp -----------------------------------------------------------------------------


def test_images_of_ollama() -> None:
    parts = read_images([PNG_64, DATA_URL], "messages[0].images")
    assert [(part.kind, part.source) for part in parts] == [("image", PNG)] * 2
    assert [part.place for part in parts] == ["messages[0].images[0]", "messages[0].images[1]"]
    assert read_images([], "images") == []
    for images, words in (("abc", "is str"), (None, "is NoneType"), ([1], r"\[0\] is int")):
        with pytest.raises(TemplateError, match=rf"^images ?{words}"):
            read_images(images, "images")
    with pytest.raises(FileError, match=r"^images\[1\]: not base64"):
        read_images([PNG_64, "/etc/passwd.png"], "images")


def pieces(prompt: dict[str, Any], **options: Any) -> list[Any]:
    made = read_multimodal_prompt(prompt, "prompt", **options)
    return [piece if isinstance(piece, str) else (piece.kind, piece.source) for piece in made]


def test_prompts_of_llamacpp() -> None:
    mark = "<__media__>"
    prompt = {
        "prompt_string": f"a {mark} b {mark}{mark}",
        "multimodal_data": [PNG_64, WAV_64, PNG_64],
    }
    truth = ["a ", ("image", PNG), " b ", ("audio", WAV), ("image", PNG)]
    assert pieces(prompt) == truth
    assert pieces({"prompt_string": "a"}) == ["a"]
    assert pieces({"prompt_string": "a", "multimodal_data": None}) == ["a"]
    assert pieces({"prompt_string": "a<m>", "multimodal_data": [PNG_64]}, marker="<m>") == [
        "a",
        ("image", PNG),
    ]
    unknown = base64.b64encode(b"abc").decode()  # the picture's reader will say what is expected
    assert pieces({"prompt_string": mark, "multimodal_data": [unknown]}) == [("image", b"abc")]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ({}, r"prompt.prompt_string is NoneType"),
        ({"prompt_string": "a", "multimodal_data": [PNG_64]}, "0 times: expected 1"),
        ({"prompt_string": "<__media__>"}, "1 time: expected 0"),
        ({"prompt_string": "<__media__>", "multimodal_data": PNG_64}, "multimodal_data is str"),
        ({"prompt_string": "<__media__>", "multimodal_data": [5]}, r"multimodal_data\[0\] is int"),
    ],
)
def test_invalid_prompts_of_llamacpp(prompt: dict[str, Any], words: str) -> None:
    with pytest.raises(TemplateError, match=words):
        read_multimodal_prompt(prompt, "prompt")


@pytest.mark.parametrize(
    ("text", "n", "pieces"),
    [
        ("", 0, []),
        ("see", 0, ["see"]),
        ("", 2, [0, 1]),
        ("see", 2, [0, 1, "see"]),
        ("<__media__>see<__media__>", 2, [0, "see", 1]),
        ("a<__media__><__media__>b", 2, ["a", 0, 1, "b"]),
    ],
)
def test_texts_between_markers(text: str, n: int, pieces: list[str | int]) -> None:
    assert split_at_markers(text, n, "the prompt") == pieces


@pytest.mark.parametrize(("text", "n"), [("<__media__>", 0), ("<__media__>", 2), ("", 1)])
def test_as_many_markers_as_media(text: str, n: int) -> None:
    n_found = len(text) // 11
    with pytest.raises(TemplateError, match=rf"^p has <__media__> {n_found} time.*expected {n}, "):
        split_at_markers(text, n, "p", required=True)


def test_a_large_picture_among_any_data() -> None:
    prompt = {"prompt_string": "<__media__>", "multimodal_data": [PNG_64]}
    with pytest.raises(UnsupportedError, match=r"prompt\.multimodal_data\[0\]: .* for a picture"):
        read_multimodal_prompt(prompt, "prompt", limits=MediaLimits(picture_bytes=10))


def test_reading_parts_imports_no_decoder() -> None:
    """Text alone pays for none of them."""
    script = "import json, sys, treadle.chat.media_parts; print(json.dumps(list(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    heavy = {"PIL", "av", "soundfile", "ssl", "http.client", "urllib.request", "subprocess"}
    assert not heavy & set(json.loads(done.stdout))
