"""Which projector a model opens, what is said of others, and the progress of an encoding."""

from __future__ import annotations

import logging
from pathlib import Path
from shutil import copy

import pytest

import treadle
from tests.tiny import without_vocabulary
from treadle.api.engine_plans import compile_plans
from treadle.api.media import DETAIL_ROWS
from treadle.errors import TreadleError, UnsupportedError


@pytest.fixture(scope="module")
def media(data: Path) -> Path:
    return data / "media"


def place(media: Path, folder: Path, **projectors: str) -> Path:
    """A model of Qwen3-VL with the projectors of these cases beside it, by their names' ends."""
    for name, case in projectors.items():
        copy(media / case / "mmproj.gguf", folder / f"mmproj-{name}.gguf")
    return Path(copy(media / "qwen3vl" / "text.gguf", folder / "Qwen3VL-2B-Q8_0.gguf"))


def test_of_several_the_one_that_fits(
    media: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder of downloads has other models' too; they are not said."""
    path = place(media, tmp_path, **{"a-F16": "gemma3", "F16": "gemma4", "z-BF16": "qwen3vl"})
    with treadle.load(path, threads=1) as model:
        assert model.modalities == {"image"}
        assert model.media is not None
        assert model.media.projector.gguf.path == tmp_path / "mmproj-z-BF16.gguf"
    assert not caplog.records


def test_one_that_does_not_fit_is_said_when_it_is_needed(
    media: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = place(media, tmp_path, F16="gemma3")
    with treadle.load(path, threads=1) as model:
        assert not caplog.records
        assert not model.modalities
        assert not model.modalities
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "the model reads text only: " in record.getMessage()
    assert "mmproj-F16.gguf: its image rows are for models of type gemma3" in record.getMessage()
    with pytest.raises(TreadleError, match="no projector file beside it fits"):
        treadle.load(path, threads=1, mmproj=True)


def test_a_file_without_a_vocabulary_reads_ids_only(
    media: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A projector beside it is of no use, one that is named an error; `treadle warm` compiles the
    plans of its ids.
    """
    copy(media / "qwen3vl" / "mmproj.gguf", tmp_path / "mmproj-F16.gguf")
    path = without_vocabulary(media / "qwen3vl" / "text.gguf", tmp_path / "bare-F16.gguf")
    with treadle.load(path, threads=1, context=64) as model:
        compile_plans(model)
        assert model.media is None
    (record,) = caplog.records
    assert "the model reads text only: " in record.getMessage()
    assert "has no vocabulary" in record.getMessage()
    with pytest.raises(UnsupportedError, match="has no vocabulary"):
        treadle.load(path, threads=1, mmproj=tmp_path / "mmproj-F16.gguf")


def test_another_models_projector_alone_is_not_said(
    media: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = place(media, tmp_path, **{"gemma-3-4b-F16": "gemma3"})
    with treadle.load(path, threads=1) as model:
        assert not model.modalities
    assert not caplog.records


def test_a_model_of_text_has_no_projector(caplog: pytest.LogCaptureFixture) -> None:
    with treadle.load(threads=1, context=256) as model:
        assert model.media is None
    assert not caplog.records


def test_progress_of_an_encoding(media: Path) -> None:
    """It rises to the end, and a picture that is in the cache has none."""
    calls: list[tuple[str, int, int]] = []
    path = media / "smolvlm" / "text.gguf"  # a picture has several tiles

    def report(stage: str, done: int, total: int) -> None:
        calls.append((stage, done, total))

    with treadle.load(path, threads=1, context=1024, progress=report) as model:
        for _ in range(2):
            picture = media / "media" / "plain.png"
            answer = model.generate("hello", media=[picture], max_tokens=1)
            answer.finish()
            assert [each.kind for each in answer.media] == ["image"]
            shares = [done for stage, done, total in calls if stage == "reading the picture"]
            assert shares == sorted(shares)
            assert shares[-1] == 100
            assert len(shares) > 2
            n_calls = len(shares)
        assert n_calls == sum(stage == "reading the picture" for stage, _, _ in calls)


def test_detail_is_a_wish(media: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LLaVA's pictures have one size: a client's ``low`` is no error."""
    from base64 import b64encode

    monkeypatch.setitem(DETAIL_ROWS, "low", 4)
    data = b64encode((media / "media" / "plain.png").read_bytes()).decode()
    template = (
        "{% for m in messages %}{% for p in m.content %}{% if p.type == 'image' %}<image>"
        "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
    )
    url = {"url": f"data:image/png;base64,{data}", "detail": "low"}
    talk = [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]
    path = media / "llava" / "text.gguf"
    with treadle.load(path, threads=1, context=512, chat_template=template) as model:
        assert model.chat(talk, max_tokens=1).media[0].n_tokens == 16
    with (
        treadle.load(
            path, threads=1, context=512, chat_template=template, image_max_tokens=4
        ) as model,
        pytest.raises(TreadleError, match="at least 16"),
    ):
        model.chat(talk)
