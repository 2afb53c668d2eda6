"""Encoding and decoding of speech models: the tiny Whisper beside transformers in float64."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.speech.whisper_cases import folder_model, folder_of, logits_off, off, opened, truth_of
from tests.twins import logits_of_twins
from treadle.base.fork_safety import UseLock
from treadle.devices import open_device
from treadle.engine.batch import BatchItem
from treadle.errors import ContextFullError, NoRoomError, TreadleError
from treadle.media.convolutions import rows_of_1d
from treadle.speech.encoder import SoundEncoder
from treadle.speech.model import SpeechModel
from treadle.speech.read import read_parts

TOLERANCE = 1e-5
ROUNDING = 1e-6  # of the largest logit: sums of other tiles


@pytest.fixture(scope="module")
def model(data: Path) -> Iterator[SpeechModel]:
    with opened(folder_of(data)) as made:
        yield made


@pytest.fixture(scope="module")
def truth(data: Path) -> dict[str, np.ndarray]:
    return truth_of(data)


def is_empty(model: SpeechModel) -> bool:
    """Whether no page is in use."""
    cache = model.engine.cache
    return all(len(pool.free) == pool.n_pages for pool in (*cache.pools, *cache.cross))


def test_states_of_the_encoder(data: Path, truth: dict[str, np.ndarray]) -> None:
    device = open_device("cpu", None, 1, None)
    with folder_model(data) as file:
        encoder = SoundEncoder(read_parts(file), device, UseLock(), exact=True)
        assert off(encoder.run(truth["input_features"][0]), truth["tower"][0]) < TOLERANCE
        encoder.close()
    device.close()


def test_logits(model: SpeechModel, truth: dict[str, np.ndarray]) -> None:
    assert logits_off(model, truth) < TOLERANCE
    assert is_empty(model)


def test_rows_of_a_batch_are_those_alone(model: SpeechModel, truth: dict[str, np.ndarray]) -> None:
    """Prompts of several lengths over two windows, more tokens than one run takes."""
    mel = truth["input_features"][0]
    windows = model.encode(np.stack([mel, mel[:, ::-1]]))
    ids = truth["decoder_input_ids"][0].tolist()
    which = [0, 1, 0, 1, 1, 0]
    prompts = [ids[: 2 + n] * (1 + n // 2) for n in range(6)]
    alone = []
    for i, prompt in zip(which, prompts, strict=True):
        with model.decoder([windows[i]]) as batch:
            alone.append([batch.step([prompt])[0], batch.step([[7]])[0]])
    with model.decoder([windows[i] for i in which]) as batch:
        first = batch.step(prompts)
        second = batch.step([[7]] * 6)
        assert batch.ids == [[*prompt, 7] for prompt in prompts]
    for window in windows:
        window.close()
    assert off(np.stack([first, second], 1), np.array(alone)) < ROUNDING
    assert off(first[0], first[1]) > 0.1  # other windows, other logits
    assert is_empty(model)


def test_rows_are_kept_reordered_and_duplicated(
    model: SpeechModel, truth: dict[str, np.ndarray]
) -> None:
    mel = truth["input_features"][0]
    first, second = model.encode(np.stack([mel, mel[:, ::-1]]))
    with model.decoder([first, second, first]) as batch:
        batch.step([[281, 282, 283], [281], [4, 5]])
        first.close()  # the batch holds its pages
        batch.select([1, 0, 0])
        assert batch.ids == [[281], [281, 282, 283], [281, 282, 283]]
        found = batch.step([[9, 10], [11], [12]])
        assert len(batch) == 3
        batch.select([2])
        assert batch.ids == [[281, 282, 283, 12]]
        again = batch.step([[13]])
        batch.select([])
        assert len(batch) == 0
        assert batch.step([]).shape == (0, 320)
    second.close()
    second.close()
    assert is_empty(model)
    (first, second) = model.encode(np.stack([mel, mel[:, ::-1]]))
    with model.decoder([second, first, first]) as batch:
        rows = [[281, 9, 10], [281, 282, 283, 11], [281, 282, 283, 12]]
        assert off(found, batch.step(rows)) < ROUNDING
        batch.select([2])
        assert off(again, batch.step([[13]])) < ROUNDING
    first.close()
    second.close()


def test_attention_weights_sum_to_one(model: SpeechModel, truth: dict[str, np.ndarray]) -> None:
    (window,) = model.encode(truth["input_features"])
    with window:
        weights = model.alignment(window, truth["decoder_input_ids"][0].tolist())
        few = model.alignment(window, [281, 282])
        with pytest.raises(TreadleError, match="no ids"):
            model.alignment(window, [])
        with pytest.raises(ContextFullError, match="65 ids"):
            model.alignment(window, [281] * 65)
    assert weights.shape == (4, 14, 150)  # all heads of the upper layer: the file names none
    assert weights.dtype == np.float32
    assert np.allclose(weights.sum(-1), 1, atol=1e-5)
    assert np.abs(weights - 1 / 150).max() > 0.01
    assert np.allclose(few, weights[:, :2], atol=1e-5) or few.shape == (4, 2, 150)
    assert is_empty(model)


def test_numpys_references_agree(model: SpeechModel, truth: dict[str, np.ndarray]) -> None:
    (window,) = model.encode(truth["input_features"])
    engine = model.engine
    for ids in ([281], [281, 282, 283, 7, 8, 9, 10, 11, 12]):
        row = engine.cache.sequence()
        row.attend_to(window.keys.hold())
        _, (expected,) = logits_of_twins(engine, [BatchItem(row, ids)])
        row.close()
        with model.decoder([window]) as batch:
            assert off(batch.step([ids])[0], expected) < TOLERANCE
    window.close()


def test_threads_take_turns(model: SpeechModel, truth: dict[str, np.ndarray]) -> None:
    mel = truth["input_features"][0]
    mels = [mel, mel[:, ::-1], mel[::-1]]

    def first(each: np.ndarray) -> np.ndarray:
        (window,) = model.encode(each[None])
        with window, model.decoder([window]) as batch:
            return batch.step([[281, 282]])

    alone = [first(each) for each in mels]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(first, mels))
    assert np.array_equal(alone, together)
    assert is_empty(model)


def test_errors(model: SpeechModel, data: Path, truth: dict[str, np.ndarray]) -> None:
    mel = truth["input_features"]
    with pytest.raises(TreadleError, match=r"mels of shape \[80, 300\]: expected \[n, 80, 300\]"):
        model.encode(mel[0])
    with pytest.raises(TreadleError, match="not finite"):
        model.encode(np.full_like(mel, np.nan))
    with pytest.raises(NoRoomError, match="close others first"):
        model.encode(np.repeat(mel, 5, 0))
    assert is_empty(model)
    (window,) = model.encode(mel)
    with model.decoder([window, window]) as batch:
        batch.step([[281], [281, 282]])
        for ids, what in {
            ((1,),): "ids of 1 rows: expected 2",
            ((1,), ()): "row 1: no ids",
            ((320,), (1,)): "outside 0..319",
            ((1,), (1,) * 63): "row 1: 65 ids: the decoder reads 64",
        }.items():
            with pytest.raises(TreadleError, match=what):
                batch.step(ids)
        assert batch.ids == [[281], [281, 282]]
        with pytest.raises(TreadleError, match="row 2"):
            batch.select([2])
        with pytest.raises(TreadleError, match="row 1: place 1: expected one of 1 ids"):
            batch.logits_at([[1], [1]], [0, 1])
        with pytest.raises(TreadleError, match="1 places for 2 rows"):
            batch.logits_at([[1], [1]], [0])
        many = [0] * 40  # rows share their pages until they are written to
        batch.select(many)
        with pytest.raises(NoRoomError):
            batch.step([[1]] * 40)
        assert batch.ids == [[281]] * 40
    window.close()
    with pytest.raises(TreadleError, match="window is closed"):
        model.decoder([window])
    with opened(folder_of(data)) as other:
        (window,) = other.encode(mel)
        with pytest.raises(TreadleError, match="another model's"):
            model.decoder([window])
    assert is_empty(model)


def test_rows_beside_each_other() -> None:
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    expected = [[0, 0, 2, 0, 1, 3], [2, 4, 6, 3, 5, 7]]
    assert np.array_equal(rows_of_1d(x, 2), expected)
    assert rows_of_1d(x, 1).shape == (4, 6)


@pytest.mark.slow
@pytest.mark.parametrize("isa", [None, "portable"])
def test_bits_do_not_depend_on_threads(
    data: Path, truth: dict[str, np.ndarray], isa: str | None
) -> None:
    found = []
    for threads in (1, 2):
        with opened(folder_of(data), threads=threads, isa=isa, exact=False) as model:
            (window,) = model.encode(truth["input_features"])
            with window, model.decoder([window] * 3) as batch:
                rows = batch.step([[281, 282, 283], [281], [281, 4, 5, 6, 7, 8, 9, 10]])
                found.append(np.concatenate([rows, batch.step([[1], [2], [3]])]))
    assert np.array_equal(found[0], found[1])


@pytest.mark.slow
def test_portable_kernels(data: Path, truth: dict[str, np.ndarray]) -> None:
    with opened(folder_of(data), isa="portable") as model:
        assert logits_off(model, truth) < TOLERANCE
