"""A second load from what the first one has stored: the same text, and nothing is read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
import treadle.models.load
from tests.conftest import WriteTiny
from tests.loras import draw_pairs, write_gguf
from tests.tiny_t5 import write_t5
from treadle.files import stored_entries
from treadle.files.bundled import START, BundleHeader
from treadle.files.gguf_header import Header
from treadle.jit.cache import checked_folder

IDS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_PLANS", "1")
    entries = tmp_path / "entries"
    monkeypatch.setattr(stored_entries, "entries_folder", lambda: checked_folder(entries))


def text(path: Path, **settings: Any) -> tuple[list[int], list[np.ndarray]]:
    """Ids of an answer, and the logits of a text, where a model without a prompt has some."""
    with treadle.load(path, threads=1, context=64, **settings) as model:
        made = model.generate(IDS, max_tokens=8, temperature=0)
        made.finish()
        found = [] if model.config.encoder else [model.logits(IDS)]
        return made.ids, found


def parts(path: Path) -> list[str]:
    """What of a file is read or checked in a load of it."""
    calls: list[str] = []

    def counted(name: str, function: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            calls.append(name)
            return function(*given, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Header, "_read", counted("header", Header._read))
        load_config = "treadle.models.load.load_config"
        patch.setattr(load_config, counted("configuration", treadle.models.load.load_config))
        treadle.load(path, threads=1, context=64).close()
    return calls


def check(path: Path, **settings: Any) -> None:
    ids, logits = text(path, **settings)
    again, others = text(path, **settings)
    assert again == ids
    assert [one.tobytes() for one in others] == [one.tobytes() for one in logits]
    assert parts(path) == []


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["llama", "gemma3", "lfm2"])
def test_models(tiny: WriteTiny, arch: str) -> None:
    check(tiny(arch))


@pytest.mark.slow
def test_with_a_drafter_and_an_adapter(tiny: WriteTiny, tmp_path: Path) -> None:
    path = tiny()
    check(path, draft=tiny("llama", n_layer=1))
    adapter = write_gguf(tmp_path / "lora.gguf", draw_pairs(path, 5, 5, ("attn_q", "ffn_down")))
    check(path, lora=[(adapter, 0.5)])
    with_adapter = text(path, lora=[(adapter, 0.5)])[1][0]
    assert not np.array_equal(with_adapter, text(path)[1][0])


@pytest.mark.slow
def test_an_encoder_with_its_decoder(tmp_path: Path) -> None:
    check(write_t5(tmp_path / "t5.gguf", "flan"))


@pytest.mark.slow
def test_a_bundle(tiny: WriteTiny, tmp_path: Path) -> None:
    model = tiny().read_bytes()
    path = tmp_path / "talk"
    head = BundleHeader("model.gguf", START, len(model), "run", ()).head(b"exit\n")
    path.write_bytes(head + model + bytes(-len(model) % START) + b"PK")
    check(path)
    assert text(path)[0] == text(tiny())[0]
