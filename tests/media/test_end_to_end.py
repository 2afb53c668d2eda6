"""From a file to logits: pictures and sounds read, prepared, encoded, put into the prompt, run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.media import media_cases, picture_cases, sound_cases
from tests.media.decoder_cases import CASES, error, load
from treadle.api.media import ModelMedia
from treadle.chat.media_parts import MediaPart
from treadle.files.gguf import GGUF, open_gguf
from treadle.media.mel_input import MelInput
from treadle.media.prepared import PreparedMedia
from treadle.media.projector import open_projector
from treadle.scheduler.request import MediaPrompt

DECODERS = {case.name: case for case in CASES}
FAMILIES = [*media_cases.BY_NAME, *picture_cases.BY_NAME]
SOUNDS = sound_cases.BY_NAME
TWO = [case.name for case in CASES if case.two]
TOLERANCE = 2e-5  # towers' errors come on top of the decoder's
LOOSE = 5e-5  # of Gemma 4, GLM and the hybrid decoder


def projector_of(name: str, data: Path) -> tuple[GGUF, int | None]:
    """A family's projector with the settings of the truth, and its most rows."""
    if name in media_cases.BY_NAME:
        case = media_cases.BY_NAME[name]
        return media_cases.file_of(case, data), case.max_rows
    if name in SOUNDS:
        return open_gguf(data / "media" / name / "mmproj.gguf"), None
    other = picture_cases.BY_NAME[name]
    gguf = open_gguf(data / "media" / name / "mmproj.gguf")
    bounds = {"image_min_pixels": other.min_pixels, "image_max_pixels": other.max_pixels}
    keys = {f"clip.vision.{key}": value for key, value in bounds.items() if value}
    gguf.metadata = {**gguf.metadata, **keys}
    return gguf, other.max_rows


@contextmanager
def opened(
    name: str, data: Path, *, real: bool = False, **settings: Any
) -> Iterator[tuple[treadle.Model, ModelMedia]]:
    """A model and its media. ``real``: sounds as the family prepares them, not as the truth's."""
    with load(data / "media", DECODERS[name], **settings) as model:
        gguf, max_rows = projector_of(name, data)
        device = model.engine.device
        projector = open_projector(gguf, device, exact=True, lock=model.engine.lock)
        if name == "voxtral" and not real:  # its truth has one window of a sound that is longer
            family = projector.family("audio")
            prepare = family.prepare

            def first_window(pixels: np.ndarray, max_rows: int | None) -> PreparedMedia:
                return sound_cases.of_truth(SOUNDS[name], prepare(pixels, max_rows))

            family.prepare = first_window  # type: ignore[method-assign]
        media = ModelMedia(projector, model.engine, model.tokenizer, max_rows=max_rows)
        yield model, media
        media.close()


def picture(source: Any, place: str = "the picture") -> MediaPart:
    return MediaPart("image", source, place)


def pieces_of(
    name: str, pictures: list[MediaPart], sound: np.ndarray | None = None
) -> list[str | MediaPart]:
    """The truth's prompt: the text of ``make/one.py`` beside the data's README."""
    made: list[str | MediaPart] = ["the cat ", pictures[0], " is in the hat"]
    for each in pictures[1:]:
        made += [" and ", each, " on"]
    if sound is not None:
        made += [" ", MediaPart("audio", (sound, 16000), "the sound")]
    return made


def sound_pieces(name: str, *sounds: np.ndarray) -> list[str | MediaPart]:
    """The truth's prompt with each of several sounds in place of its own, as WAV files."""
    before, behind = SOUNDS[name].text
    parts = [MediaPart("audio", sound_cases.wav(each), "the sound") for each in sounds]
    pieces: list[str | MediaPart] = [before, *parts, behind]
    return [piece for piece in pieces if piece != ""]


def encode(prompt: MediaPrompt) -> None:
    for entry, encoder in prompt.encoders.items():
        runs = encoder.begin([encoder.prepared])
        while True:
            try:
                next(runs)
            except StopIteration as done:
                (entry.rows,) = done.value
                break


def marked(model: treadle.Model, media: ModelMedia, prompt: MediaPrompt) -> list[int]:
    """The prompt's ids with the families' marks in place of rows."""
    families = {kind: media.projector.family(kind) for kind in media.modalities}
    kinds = dict(zip(prompt.encoders, (each.kind for each in prompt.usage), strict=True))
    registry = model.engine.media
    found = []
    for id in prompt:
        if id < registry.first_id:
            found.append(id)
            continue
        mark = families[kinds[registry.entry_of(id)]].row_mark
        found += model.tokenize(mark, bos=False)
    return found


@pytest.mark.parametrize("name", [*FAMILIES, *SOUNDS])
def test_from_a_file_to_logits(name: str, data: Path) -> None:
    truth = np.load(data / "media" / name / "truth.npz")
    with opened(name, data) as (model, media):
        if name in SOUNDS:
            pieces = sound_pieces(name, sound_cases.sound())
        else:
            # Gemma 4 12B reads samples as they are.
            sound = truth["input_features"].ravel() if name == "gemma4u" else None
            pieces = pieces_of(name, [picture(data / "media" / "media" / "plain.png")], sound)
        prompt = media.raw_ids(pieces)
        assert marked(model, media, prompt) == truth["input_ids"][0].tolist()
        encode(prompt)
        with model.session() as session:
            found = session.logits(list(prompt))
        tolerance = LOOSE if DECODERS[name].tolerance > 1e-5 else TOLERANCE
        assert error(found, truth["logits"]) < tolerance


@pytest.mark.parametrize("name", TWO)
def test_two_pictures(name: str, data: Path) -> None:
    """Two pictures in one prompt; swapped, they give other logits."""
    truth = np.load(data / "media" / name / "truth.npz")
    pictures = [picture(media_cases.picture(97, 61)), picture(media_cases.picture(50, 120))]
    with opened(name, data) as (model, media):
        prompt = media.raw_ids(pieces_of(name, pictures))
        assert marked(model, media, prompt) == truth["two.input_ids"][0].tolist()
        encode(prompt)
        with model.session() as session:
            found = session.logits(list(prompt))
        assert error(found, truth["two.logits"]) < TOLERANCE
        swapped = media.raw_ids(pieces_of(name, pictures[::-1]))
        assert set(swapped.encoders) == set(prompt.encoders)
        with model.session() as session:
            other = session.logits(list(swapped))
        n = min(len(found), len(other))
        assert error(other[-n:], found[-n:]) > 1000 * TOLERANCE


@pytest.mark.parametrize("name", SOUNDS)
def test_two_sounds(name: str, data: Path) -> None:
    """Each has its own rows; swapped, they give other logits."""
    one, other = sound_cases.sound(), sound_cases.sound(2.0)[::-1]
    with opened(name, data) as (model, media):
        prompt = media.raw_ids(sound_pieces(name, one, other))
        assert [each.kind for each in prompt.usage] == ["audio", "audio"]
        encode(prompt)
        rows = [entry.rows for entry in prompt.encoders]
        for sound, own in zip((one, other), rows, strict=True):
            alone = media.projector.prepare(sound, None, "audio")
            assert own is not None
            assert np.array_equal(own, media.projector.encode(alone))
        with model.session() as session:
            found = session.logits(list(prompt))
        swapped = media.raw_ids(sound_pieces(name, other, one))
        assert set(swapped.encoders) == set(prompt.encoders)
        with model.session() as session:
            assert error(session.logits(list(swapped))[-3:], found[-3:]) > 1000 * TOLERANCE


def ask_of(name: str, data: Path) -> list[str | MediaPart]:
    """A picture, or a sound, and a question about it."""
    if name in SOUNDS:
        return [*sound_pieces(name, sound_cases.sound()), "a" * 40, " what is this?"]
    return [picture(data / "media" / "media" / "plain.png"), "a" * 40, " what is this?"]


@pytest.mark.parametrize("name", ["qwen3vl", *SOUNDS])
def test_a_second_question_reads_only_its_own_tokens(name: str, data: Path) -> None:
    with opened(name, data) as (model, media):
        ask = ask_of(name, data)
        first = media.raw_ids(ask)
        text = model.generate(first, max_tokens=4, temperature=0)
        text.finish()
        assert text.timings.media_s > 0
        second = media.raw_ids([*ask, " and that?"])
        answer = model.generate(second, max_tokens=4, temperature=0)
        answer.finish()
        assert answer.timings.media_s == 0
        assert answer.timings.n_cached >= len(first) // 32 * 32 > 0


def test_a_second_question_computes_no_frames(data: Path) -> None:
    """Counting a sound's tokens, and finding it in the cache, need its length and digest alone."""
    with opened("qwen3asr", data) as (model, media):
        ask = ask_of("qwen3asr", data)
        model.generate(media.raw_ids(ask), max_tokens=2, temperature=0).finish()
        again = media.raw_ids([*ask, " and that?"])
        model.generate(again, max_tokens=2, temperature=0).finish()
        for encoder in again.encoders.values():
            for each in encoder.prepared.inputs:
                assert isinstance(each, MelInput)
                assert "frames" not in vars(each.sound)


def test_counting_runs_no_tower(data: Path) -> None:
    with opened("qwen3vl", data) as (model, media):
        prompt = media.raw_ids([picture(data / "media" / "media" / "plain.png"), "x"])
        (usage,) = prompt.usage
        assert usage.size == (61, 97)
        assert usage.n_tokens == sum(id >= model.engine.media.first_id for id in prompt)
        assert all(entry.rows is None for entry in prompt.encoders)


@pytest.mark.parametrize("isa", ["portable"])
def test_on_another_row_of_the_machine(isa: str, data: Path) -> None:
    """Spans, three streams of positions and rows behind layers, with other kernels."""
    for name in ("gemma3", "qwen3vl"):
        truth = np.load(data / "media" / name / "truth.npz")
        with opened(name, data, isa=isa) as (model, media):
            pieces = pieces_of(name, [picture(data / "media" / "media" / "plain.png")])
            prompt = media.raw_ids(pieces)
            encode(prompt)
            with model.session() as session:
                found = session.logits(list(prompt))
            assert error(found, truth["logits"]) < TOLERANCE
