"""``treadle transcribe``, with a model that follows a script."""

from __future__ import annotations

import errno
import io
import json
import wave
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.speech.scripted import Attempt, recognizer, said, voice
from treadle.cli.commands import serve, transcribe
from treadle.cli.speech import is_speech_model

HI = Attempt(said(0.0, " hi", 1.0, 1.0, " you", 1.5))


def wav(seconds: float = 2.0) -> bytes:
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes((voice(seconds) * 32767).astype("<i2").tobytes())
    return made.getvalue()


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    path = tmp_path / "talk.wav"
    path.write_bytes(wav())
    return path


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The settings of each transcription; every model is a scripted one."""
    found: list[Any] = []
    speech = recognizer(HI)
    run = speech.run

    def noted(sound: Any, settings: Any, **more: Any) -> Any:
        found.append(settings)
        return run(sound, settings, **more)

    monkeypatch.setattr(speech, "run", noted)
    monkeypatch.setattr(transcribe, "speech_model_path", lambda model, progress: Path(model))
    monkeypatch.setattr(transcribe, "load_recognizer", lambda *_: speech)
    return found


def test_text_and_subtitles(run: Run, sound: Path, settings: list[Any]) -> None:
    ran = run("transcribe", "-m", "m", str(sound))
    assert (ran.code, ran.out) == (0, "hi\nyou\n")
    assert settings[0].beams == 5
    ran = run("transcribe", "-m", "m", "--srt", str(sound))
    assert ran.out.startswith("1\n00:00:00,000 --> 00:00:01,000\nhi\n\n2\n")
    assert run("transcribe", "-m", "m", "--vtt", "-", stdin=wav()).out.startswith("WEBVTT\n\n00:")
    ran = run("transcribe", "-m", "m", "--json", "--words", str(sound))
    value = json.loads(ran.out)
    assert (value["text"], value["duration"]) == ("hi you", 2.0)
    assert value["words"][1]["word"] == "you"


def test_settings(run: Run, sound: Path, settings: list[Any]) -> None:
    options = ["-l", "German", "--translate", "--beams", "2", "--temperature", "0.5"]
    options += ["--no-text-before", "--batch", "2", "--voice-activity", "off", "--seed", "4"]
    ran = run("transcribe", "-m", "m", *options, "--prompt", "Names", str(sound))
    assert ran.code == 0, ran.err
    (given,) = settings
    assert (given.language, given.task, given.beams, given.temperatures) == (
        "German",
        "translate",
        2,
        (0.5,),
    )
    assert (given.text_before, given.batch, given.voice_activity) == (False, 2, "off")
    assert (given.seed, given.prompt) == (4, "Names")


def test_files_of_text(
    run: Run,
    sound: Path,
    settings: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = tmp_path / "other.wav"
    other.write_bytes(wav())
    ran = run("transcribe", "-m", "m", str(sound), str(other))
    assert ran.out == f"==> {sound} <==\nhi\nyou\n==> {other} <==\nhi\nyou\n"
    target = tmp_path / "new" / "folder"
    options = ["--text", "--lrc", "--tsv", "--json", "--output", str(target)]
    ran = run("transcribe", "-m", "m", *options, str(sound), str(other))
    assert (ran.code, ran.out) == (0, "")
    names = sorted(path.name for path in target.iterdir())
    assert names == [
        f"{stem}.{end}" for stem in ("other", "talk") for end in ("json", "lrc", "tsv", "txt")
    ]
    assert (target / "talk.txt").read_text("utf-8") == "hi\nyou\n"
    assert run("transcribe", "-m", "m", "--beside", "--srt", str(sound)).code == 0
    assert sound.with_suffix(".srt").exists()

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        ran = run("transcribe", "-m", "m", "--json", "--output", str(target), str(sound))
    assert ran.code == 1
    assert "talk.json: cannot be written: the disk is full" in ran.err
    assert "hi you" in (target / "talk.json").read_text("utf-8")  # as it was
    blocked = tmp_path / "file"
    blocked.write_text("")
    ran = run("transcribe", "-m", "m", "-o", str(blocked / "x"), str(sound))
    assert ran.code == 1
    assert "file" in ran.err


def test_one_of_several_files_is_damaged(
    run: Run, sound: Path, settings: list[Any], tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged.wav"
    damaged.write_bytes(b"hello")
    ran = run("transcribe", "-m", "m", str(damaged), str(sound))
    assert ran.code == 1
    assert ran.out == f"==> {sound} <==\nhi\nyou\n"
    assert "damaged.wav: a file of unknown format" in ran.err
    assert "1 of 2 files could not be transcribed" in ran.err
    ran = run("transcribe", "-m", "m", "-", stdin=b"")
    assert ran.code == 1
    assert "standard input: an empty file" in ran.err


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--srt", "--vtt", "a"], "several formats: name a folder"),
        (["--srt", "a", "b"], "several files in one output"),
        (["-o", "d", "--beside", "a"], "choose one"),
        (["--beside", "-"], "standard input has no folder"),
        (["-", "-"], "standard input can be read once"),
        (["-o", "d", "x/a.mp3", "y/a.mp3"], "would be written twice"),
        (["--words", "a"], "only --json has the times of words"),
        (["--temperature", "3", "a"], "3"),
    ],
)
def test_what_makes_no_sense(run: Run, settings: list[Any], args: list[str], text: str) -> None:
    ran = run("transcribe", "-m", "m", *args)
    assert ran.code == 2
    assert text in ran.err


def test_wrong_names(run: Run, sound: Path, data: Path) -> None:
    ran = run("transcribe", "-m", "m", "/no/such.wav")
    assert ran.code == 1
    assert "/no/such.wav: No such file" in ran.err
    assert "--model" in run("transcribe", str(sound)).err
    demo = str(Path(transcribe.__file__).parents[2] / "data" / "demo.gguf")
    ran = run("transcribe", "-m", demo, str(sound))
    assert ran.code == 1
    assert "not a speech model: expected Whisper" in ran.err
    assert is_speech_model(data / "media" / "whisper")
    assert not is_speech_model(sound)


def test_other_commands_say_what_it_is(run: Run, data: Path) -> None:
    folder = str(data / "media" / "whisper")
    for command in (["run", folder, "hi"], ["chat", folder], ["plan", folder]):
        ran = run(*command)
        assert ran.code == 1
        assert "a speech model: it transcribes sound, with treadle transcribe" in ran.err
    report = json.loads(run("inspect", folder, "--json").out)
    assert report["problems"] == []
    assert report["metadata"]["general.architecture"] == "whisper"
    ggml = json.loads(run("inspect", str(data / "media" / "whisper" / "ggml.bin"), "--json").out)
    assert ggml["problems"] == []
    ran = run("show", folder)
    assert "sound; gives text" in ran.out
    assert "transcription" in ran.out


def test_a_server_of_speech_says_which_options_it_leaves_out(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "speech_model_path", lambda model, progress: Path(model))
    monkeypatch.setattr(serve, "_serve_speech", lambda *_: None)
    ran = run("serve", "m", "--port", "0", "-t", "1", "--alias", "ear", "--api-key", "k")
    assert (ran.code, ran.err) == (0, "")
    monkeypatch.setenv("TREADLE_SERVE_CONTEXT", "99")
    ran = run("serve", "m", "--kv", "q8_0", "--lora", "a.gguf", "--temp", "1")
    assert ran.code == 0
    for option in ("--context", "--kv", "--lora", "--temperature"):
        assert option in ran.err
    assert "m is a speech model: " in ran.err
    assert ran.err.endswith(" left out\n")
