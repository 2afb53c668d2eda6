"""Gemma 4 E2B's and E4B's kind of model beside transformers in float64: from a picture's file to
logits, of a folder and of the files that ``convert`` makes of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import treadle
from tests.matrix_rounding import sharp_isa
from tests.media.bounded_tower import bounds_of_all
from tests.media.decoder_cases import error
from tests.media.gemma4_small import SmallGemma4, small_gemma4
from tests.media.media_cases import off, picture
from tests.media.test_end_to_end import encode, marked
from treadle.api.media import ModelMedia
from treadle.chat.media_parts import MediaPart
from treadle.convert.hf.folder import open_hf_source
from treadle.convert.recipe import Options
from treadle.convert.writer import convert
from treadle.devices import open_device
from treadle.errors import UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.formats import by_name
from treadle.media.projector import Projector, open_projector
from treadle.media.projector_source import open_projector_source

TOLERANCE = 1e-5
LOGITS = 5e-5  # as of the other Gemma 4: its final softcap follows large sums


@pytest.fixture(scope="module")
def truth(data: Path, tmp_path_factory: pytest.TempPathFactory) -> SmallGemma4:
    return small_gemma4(data / "media" / "gemma4", tmp_path_factory.mktemp("gemma4") / "small")


@pytest.fixture(scope="module")
def mmproj(truth: SmallGemma4) -> Path:
    """The projector file that is made of the folder."""
    to = truth.folder.parent / "mmproj.gguf"
    with closing(open_projector_source(truth.folder, by_name("F16"))) as source:
        (note,) = source.notes
        assert note.startswith("the audio part (gemma4a) is left out: its sound goes through")
        assert convert(source, to, Options()) == [to]
    return to


@pytest.fixture(scope="module")
def text(truth: SmallGemma4) -> Path:
    """The model's file, of F32: products with BF16 matrices round their inputs."""
    to = truth.folder.parent / "text.gguf"
    with closing(open_hf_source(truth.folder)) as source:
        assert convert(source, to, Options(type=by_name("F32"))) == [to]
    return to


@pytest.fixture(params=["folder", "file"])
def projector(
    request: pytest.FixtureRequest, truth: SmallGemma4, mmproj: Path
) -> Iterator[Projector]:
    path = truth.folder if request.param == "folder" else mmproj
    made = open_projector(path, open_device("cpu", sharp_isa(), 1, None), exact=True)
    yield made
    made.close()


def test_rows_are_those_of_transformers(truth: SmallGemma4, projector: Projector) -> None:
    assert off(truth.free, truth.rows) > 0.1  # the bounds count
    prepared = projector.prepare(picture())
    assert off(projector.encode(prepared), truth.rows) < TOLERANCE
    tower = projector.towers["image"]
    tower.projectors = []
    tower.family.projectors = ()
    assert off(projector.encode(prepared), truth.states) < TOLERANCE


def test_from_a_png_to_logits(
    truth: SmallGemma4, projector: Projector, text: Path, data: Path
) -> None:
    """A row of a picture has the per-layer embeddings of token 0, the padding, and a projection of
    itself.
    """
    with treadle.load(text, kv="f32", threads=1, context=256, n_sequences=2) as model:
        assert not model.config.media.spans
        assert all(layer.n_own for layer in model.config.layers)
        media = ModelMedia(projector, model.engine, model.tokenizer)
        source = MediaPart("image", data / "media" / "media" / "plain.png", "the picture")
        prompt = media.raw_ids(["the cat ", source, " is in the hat"])
        assert marked(model, media, prompt) == truth.ids
        encode(prompt)
        with model.session() as session:
            found = session.logits(list(prompt))
        with model.session() as session:
            plain = session.logits(truth.ids)
    assert error(found, truth.logits) < LOGITS
    assert error(plain, truth.logits) > 100 * LOGITS


def test_bounds_have_the_names_of_llama_cpp(truth: SmallGemma4, mmproj: Path) -> None:
    """Infinite ones, which mean none, are not written."""
    ends = ("input_min", "input_max", "output_min", "output_max")
    with open_gguf(mmproj) as gguf:
        bounds = {name: t for name, t in gguf.tensors.items() if name.endswith(ends)}
        for (layer, matrix), values in bounds_of_all().items():
            for end, value in zip(ends, values, strict=True):
                tensor = bounds.pop(f"v.blk.{layer}.{matrix}.{end}", None)
                assert (tensor is None) == bool(np.isinf(value))
                if tensor is not None:
                    assert tensor.shape == (1,)
                    assert tensor.type_name == "F32"
                    assert tensor.dequantize()[0] == value
        assert not bounds
        assert not any(name.startswith("a.") for name in gguf.tensors)


def test_sound_is_refused_by_name(truth: SmallGemma4, text: Path) -> None:
    with treadle.load(text, mmproj=truth.folder, threads=1, context=128) as model:
        assert model.modalities == {"image"}
        sound = {"type": "audio", "audio": (np.zeros(8000, np.float32), 16000)}
        with pytest.raises(UnsupportedError, match="'gemma4a' is not supported: its sound goes"):
            model.generate("<__media__> x", media=[sound], max_tokens=1)
