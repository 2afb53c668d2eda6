"""Gemma 4: who keeps keys and values, texts that go back and share a beginning, every step against
its twin, and what tools make of the new tensors. Its logits: test_arch_truth.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import treadle
from tests.changed_gguf import write_changed
from tests.stepwise import walk
from treadle.engine.batch import BatchItem
from treadle.errors import FileError
from treadle.files.gguf import open_gguf
from treadle.kernels.run_state import PAGE
from treadle.kvcache.media import MediaEntry
from treadle.models.config import PoolSpec
from treadle.models.graphs import GRAPHS

LONG = 3 * PAGE + 12  # six windows


def text(n: int, seed: int = 7) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(3, 300, n).tolist()
    return ids


@pytest.fixture(scope="module", params=["gemma4-e", "gemma4-moe"])
def model(request: pytest.FixtureRequest, data: Path) -> Iterator[treadle.Model]:
    """Deterministic: then bits depend on nothing but the text."""
    path = data / "arch" / f"{request.param}.gguf"
    with treadle.load(path, threads=2, context=256, deterministic=True, n_sequences=3) as made:
        yield made


def test_texts_that_begin_alike(model: treadle.Model) -> None:
    """Found in pages, taken back, forked: the bits are those of one go."""
    engine = model.engine
    ids = text(LONG)
    other = [*text(2 * PAGE), *text(30, 8)]
    truth = model.logits(ids)
    others = model.logits(other)
    engine.cache.forget()
    with closing(model.session()) as first, closing(model.session()) as second:
        assert np.array_equal(first.prefill(ids), truth[-1])
        assert second.match(other) == 2 * PAGE
        assert np.array_equal(second.prefill(other), others[-1])
        first.truncate(LONG - 5)
        assert np.array_equal(first.feed(ids[LONG - 5 :]), truth[-1])
        with closing(engine.cache.fork(second.seq)) as fork:
            rows = [engine.run([BatchItem(seq, [5], 1)])[0].copy() for seq in (second.seq, fork)]
        assert np.array_equal(*rows)


@pytest.mark.slow
def test_every_step_agrees_with_its_twin(data: Path) -> None:
    for name in ("gemma4-e", "gemma4-moe"):
        path = data / "arch" / f"{name}.gguf"
        with treadle.load(path, threads=2, kv="f32", n_sequences=2, context=256) as model:
            engine = model.engine
            ids = text(100)
            with closing(engine.cache.sequence()) as long, closing(engine.cache.sequence()) as one:
                engine.run([BatchItem(long, ids[:60], 0)])
                for batch in (
                    [BatchItem(long, ids[60:]), BatchItem(one, ids[:3])],
                    [BatchItem(long, [6])],
                ):
                    worst = max(walk(engine, batch), key=lambda compared: compared.error)
                    assert worst.error <= 1, (name, worst.label, worst.kind, worst.error)


@pytest.mark.slow
def test_who_keeps_keys_and_values(data: Path, tmp_path: Path) -> None:
    """The last six of twelve layers read the last ones of their kind, and keys that a file has for
    them all the same are left out.
    """
    path = data / "arch" / "gemma4-e.gguf"
    with treadle.load(path, threads=1) as model:
        sources = [layer.kv_from for layer in model.config.layers]
        assert sources == [0, 1, 2, 3, 4, 5, 4, 4, 4, 4, 4, 5]
        pools = GRAPHS["gemma4"].pools(model.config)
        found = [(p.layers, p.window, p.head_dim) for p in pools if isinstance(p, PoolSpec)]
        assert found == [((5,), 0, 64), ((0, 1, 2, 3, 4), 16, 32)]
        expected = model.logits(text(20))
    more = "blk.6.attn_k.weight"
    write_changed(path, tmp_path / "more.gguf", tensors={more: np.zeros((64, 64))})
    with treadle.load(tmp_path / "more.gguf", threads=1) as model:
        assert model.config.ignored == (more,)
        assert np.array_equal(model.logits(text(20)), expected)


@pytest.mark.parametrize(
    ("changes", "lost", "message"),
    [
        ({}, "per_layer_proj_norm.weight", "per_layer_proj_norm.weight: the tensor is missing"),
        ({}, "blk.3.inp_gate.weight", r"blk\.3\.inp_gate\.weight: the tensor is missing"),
        ({"attention.shared_kv_layers": 10}, "", "leaves layer 5 without keys and values"),
        ({"rope.dimension_count_swa": 31}, "", "31 is odd"),
    ],
)
def test_files_that_are_not_whole(
    changes: dict[str, int], lost: str, message: str, data: Path, tmp_path: Path
) -> None:
    keys = {f"gemma4.{key}": value for key, value in changes.items()}
    source = data / "arch" / "gemma4-e.gguf"
    write_changed(source, tmp_path / "bad.gguf", keys, {lost: None} if lost else {})
    with pytest.raises(FileError, match=message):
        treadle.load(tmp_path / "bad.gguf")


def test_rows_of_media_have_the_first_per_layer_embeddings(data: Path, tmp_path: Path) -> None:
    """Of a picture's row, itself is projected, and the row of token 0 is looked up beside it: as
    transformers and llama.cpp do. So rows that equal a token's embeddings give its logits, if that
    token's per-layer embeddings are those of token 0; a token's own would be far off.
    """
    source = data / "arch" / "gemma4-e.gguf"
    table = "per_layer_token_embd.weight"
    ids = text(12)
    first = 4
    inside = ids[first : first + 5]
    with open_gguf(source) as gguf:
        own = gguf.tensors[table].dequantize().copy()
        embeddings = gguf.tensors["token_embd.weight"].dequantize()[inside].copy()
    assert all(np.abs(own[id] - own[0]).max() > 0.1 for id in inside)
    own[inside] = own[0]
    write_changed(source, tmp_path / "same.gguf", tensors={table: own})
    with treadle.load(tmp_path / "same.gguf", kv="f32", threads=1, context=64) as model:
        expected = model.logits(ids)
        entry = model.engine.media.enter(MediaEntry(b"rows".ljust(32), len(inside)))
        entry.rows = np.ascontiguousarray(embeddings * model.config.embd_scale, np.float32)
        given = [*ids[:first], *entry.ids, *ids[first + len(inside) :]]
        with closing(model.session()) as session:
            found = session.logits(given)
    with treadle.load(source, kv="f32", threads=1, context=64) as model:
        other = model.logits(ids)
    largest = np.abs(expected).max()
    assert np.abs(found - expected).max() < 3e-6 * largest
    assert np.abs(other - expected).max() > 1e-2 * largest
