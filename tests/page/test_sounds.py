"""Sounds on the page: picked, dropped, recorded, made WAV, sent, kept, refused in words."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, FilePayload, Page, expect

from tests.media.sound_cases import RATE, sound, wav
from tests.page.conftest import Opened, chromium, file
from tests.page.scripted import Scripted, end, says
from tests.page.test_access import axe
from tests.page.test_kept import say
from tests.page.test_pictures import give, n_stored, picture
from tests.server.conftest import until
from treadle.media.source import read_sound

WAV = "audio/wav"
STEP = 2.0**-15  # of 16-bit samples


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Chromium with a microphone that plays a file again and again, and asks nobody."""
    spoken = tmp_path_factory.mktemp("microphone") / "sound.wav"
    spoken.write_bytes(wav(np.asarray(np.rint(sound(2.0) * 32767), np.int16)))
    with chromium(
        "--use-fake-ui-for-media-stream",
        "--use-fake-device-for-media-stream",
        f"--use-file-for-fake-audio-capture={spoken}",
    ) as started:
        yield started


@pytest.fixture
def listening(script: Scripted) -> Scripted:
    """A server whose model reads sounds."""
    script.props["modalities"] = {"vision": False, "audio": True}
    return script


def spoken(name: str = "hello.wav", seconds: float = 1.0) -> FilePayload:
    """A sound that somebody chooses."""
    return {"name": name, "mimeType": WAV, "buffer": wav(sound(seconds))}


def pick(page: Page, *chosen: FilePayload) -> None:
    page.set_input_files("#sound-file", list(chosen))


def heard(message: dict[str, Any]) -> list[np.ndarray]:
    """The samples of a message's sounds that the server got, which stand before its text."""
    parts = [part for part in message["content"] if part["type"] == "input_audio"]
    assert message["content"][: len(parts)] == parts
    assert all(part["input_audio"]["format"] == "wav" for part in parts)
    raw = [base64.b64decode(part["input_audio"]["data"], validate=True) for part in parts]
    for each in raw:
        assert each[20:36] == bytes.fromhex("01000100803e0000007d000002001000")  # PCM, 16 kHz
    return [read_sound(each) for each in raw]


def test_a_sound_is_picked_sent_and_played(listening: Scripted, visit: Opened) -> None:
    page = visit(listening.url)
    expect(page.get_by_role("button", name="Add pictures")).to_be_hidden()
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Add sounds").click()
    chooser.value.set_files([spoken()])
    expect(page.locator("#attached .sound")).to_have_text("hello.wav (0:01)×")
    expect(page.locator("#status")).to_have_text("Sound attached: hello.wav (0:01)")
    expect(page.locator("#entry")).to_be_focused()
    say(listening, page, "What is said?", "Hello.")
    (message,) = listening.bodies[0]["messages"]
    (got,) = heard(message)
    assert message["content"][1] == {"type": "text", "text": "What is said?"}
    assert np.abs(got - sound(1.0)).max() <= STEP
    player = page.locator(".user audio")
    expect(player).to_have_attribute("aria-label", "hello.wav")
    player.evaluate("(player) => { player.preload = 'metadata'; }")
    until(lambda: player.evaluate("(player) => player.duration") == 1.0)
    assert axe(page) == []
    # It is kept, and sent again with the next question.
    page.reload()
    expect(page.locator(".user .sounds")).to_contain_text("hello.wav (0:01)")
    say(listening, page, "And?", "No more.")
    assert np.array_equal(heard(listening.bodies[1]["messages"][0])[0], got)


def test_files_of_other_rates_and_channels(listening: Scripted, visit: Opened, data: Path) -> None:
    """The browser resamples them; the channels' mean is sent."""
    page = visit(listening.url)
    for name in ("stereo44.wav", "s48.flac", "s48.ogg", "s16.mp3"):
        page.click("#new")
        pick(
            page,
            {"name": name, "mimeType": "", "buffer": (data / f"media/media/{name}").read_bytes()},
        )
        expect(page.locator("#attached .sound")).to_have_count(1)
        say(listening, page, "", "Yes.")
        (got,) = heard(listening.bodies[-1]["messages"][-1])
        # Encoders shift by some thousand samples; each has the sound's loudness.
        assert len(got) >= 15_900
        loud = 0.75 if name == "stereo44.wav" else 1.0
        assert got.std() == pytest.approx(loud * sound(3.0)[: len(got)].std(), rel=0.1), name


def test_sounds_are_dropped_with_texts_and_pictures(script: Scripted, visit: Opened) -> None:
    script.props["modalities"] = {"vision": True, "audio": True}
    page = visit(script.url)
    notes = file("notes.txt", "words")
    give(page, "drop", "#log", spoken("note.txt"), picture(), notes)  # by content, not by name
    expect(page.locator("#attached li")).to_have_count(3)
    say(script, page, "What are these?", "A cat that speaks.")
    kinds = [part["type"] for part in script.bodies[0]["messages"][0]["content"]]
    assert kinds == ["image_url", "input_audio", "text"]
    assert n_stored(page) == 2


def test_the_microphone(listening: Scripted, visit: Opened) -> None:
    """What is recorded is attached when it is stopped, as WAV of 16 kHz."""
    page = visit(listening.url)
    page.get_by_role("button", name="Record").click()
    button = page.locator("#record")
    expect(button).to_have_attribute("aria-pressed", "true")
    expect(button).to_have_text("Stop recording (0:02)")
    button.click()
    expect(page.locator("#attached .sound")).to_contain_text("recording (0:0")
    expect(button).to_have_text("Record")
    expect(button).to_have_attribute("aria-pressed", "false")
    say(listening, page, "", "Hello.")
    (got,) = heard(listening.bodies[0]["messages"][0])
    assert 1.5 * RATE < len(got) < 20 * RATE
    assert got.std() > 0.05  # it is not silent


def test_a_microphone_that_is_refused(listening: Scripted, visit: Opened) -> None:
    page = visit(listening.url)
    page.evaluate(
        """() => { navigator.mediaDevices.getUserMedia = async () => {
        throw new DOMException("Permission denied", "NotAllowedError"); }; }"""
    )
    page.get_by_role("button", name="Record").click()
    expect(page.locator("#notice")).to_contain_text(
        "the microphone cannot be used: Permission denied"
    )
    expect(page.locator("#record")).to_have_text("Record")
    expect(page.locator("#attached li")).to_have_count(0)


def test_without_a_microphone_or_ears(script: Scripted, visit: Opened) -> None:
    """Buttons are there only where the model and the browser have what they need."""
    page = visit(script.url)
    for name in ("Add sounds", "Record", "Add pictures"):
        expect(page.get_by_role("button", name=name)).to_be_hidden()
    give(page, "drop", "#entry", spoken())
    expect(page.locator("#notice")).to_contain_text("hello.wav: scripted does not read sounds")
    expect(page.locator("#attached li")).to_have_count(0)


def test_what_is_no_sound_is_refused_in_words(
    listening: Scripted, visit: Opened, data: Path
) -> None:
    page = visit(listening.url)
    cut = wav(sound())[:30]
    for name, content, why in [
        ("not.wav", b"words", "not a sound: expected WAV, MP3"),
        ("cut.wav", cut, "the sound is damaged, or of a format that this browser cannot read"),
        ("empty.wav", wav(np.zeros(0, np.float32)), "the sound is damaged"),
    ]:
        pick(page, {"name": name, "mimeType": WAV, "buffer": content})
        expect(page.locator("#notice")).to_contain_text(f"{name}: {why}")
    give(page, "drop", "#entry", {"name": "not.wav", "mimeType": WAV, "buffer": b"words"})
    expect(page.locator("#notice")).to_contain_text("not.wav: not a sound")
    pick(page, picture())
    expect(page.locator("#notice")).to_contain_text("cat.png: not a sound")
    long = wav(np.zeros(1501 * 3000, np.int16), rate=3000)
    pick(page, {"name": "long.wav", "mimeType": WAV, "buffer": long})
    expect(page.locator("#notice")).to_contain_text("long.wav: 25:01 long: the limit is 25:00")
    expect(page.locator("#attached li")).to_have_count(0)


def test_a_conversation_s_file_has_its_sounds(
    listening: Scripted, visit: Opened, tmp_path: Path
) -> None:
    page = visit(listening.url)
    pick(page, spoken())
    expect(page.locator("#attached .sound")).to_have_count(1)
    say(listening, page, "What is said?", "Hello.")
    with page.expect_download() as download:
        page.click("#export")
    path = tmp_path / "talks.json"
    download.value.save_as(path)
    assert "data:audio/wav;base64," in path.read_text("utf-8")
    other = visit(listening.url)
    other.set_input_files("#import-file", path)
    other.get_by_role("link", name="What is said?").click()
    expect(other.locator(".user .sounds")).to_contain_text("hello.wav (0:01)")
    say(listening, other, "And?", "No more.")
    got = heard(listening.bodies[1]["messages"][0])[0]
    assert np.abs(got - sound(1.0)).max() <= STEP
    # Messages of other programs bring theirs; what is no sound is left out.
    raw = base64.b64encode(wav(sound(1.0))).decode()
    parts = [
        {"type": "input_audio", "input_audio": {"data": raw, "format": "wav"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "text", "text": "Listen"},
    ]
    messages = json.dumps([{"role": "user", "content": parts}])
    other.set_input_files("#import-file", file("messages.json", messages))
    expect(other.locator("#notice")).to_contain_text("sounds that could not be read: 1.")
    other.get_by_role("link", name="Listen").click()
    expect(other.locator(".user .sounds li")).to_have_count(1)


def test_a_deleted_message_s_sound_is_forgotten(listening: Scripted, visit: Opened) -> None:
    page = visit(listening.url)
    pick(page, spoken(), spoken("other.wav", 0.5))
    expect(page.locator("#attached .sound")).to_have_count(2)
    page.get_by_role("button", name="Remove other.wav").click()
    until(lambda: n_stored(page) == 1)
    last = end()
    last["timings"] |= {"media_n": 1, "media_ms": 1234.0}
    listening.answers.append([says("Hello."), last])
    page.fill("#entry", "What is said?")
    page.press("#entry", "Enter")
    expect(page.locator(".stats")).to_contain_text("Reading sounds: 1.2 s")
    page.locator(".user [data-does='delete']").click()
    until(lambda: n_stored(page) == 0)
