"""Models that a process loads once."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest

import treadle
from tests.conftest import WriteTiny


def test_one_path_is_loaded_once_while_it_is_used(tiny: WriteTiny) -> None:
    path = tiny()
    model = treadle.load_shared(path, threads=1, context=64)
    assert treadle.load_shared(str(path), context=64, threads=1) is model
    other = treadle.load_shared(path, threads=1, context=32)
    assert other is not model
    assert other.n_ctx == 32
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert treadle.load_shared(path, threads=1, context=64).n_ctx == 64


def test_a_loaded_model_is_itself(tiny: WriteTiny) -> None:
    with treadle.load(tiny(), threads=1) as model:
        assert treadle.load_shared(model) is model
        with pytest.raises(TypeError, match="context: settings of"):
            treadle.load_shared(model, context=64)


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(treadle.FileError):
        treadle.load_shared(tmp_path / "none.gguf")
    with pytest.raises(TypeError, match="model is int"):
        treadle.load_shared(3)  # type: ignore[arg-type]
