"""Importance matrices: what is collected, against float64; both layouts; files that are none."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import treadle
from tests import reference
from tests.conftest import WriteTiny
from tests.loras import with_names
from treadle.engine.batch import BatchItem
from treadle.errors import FileError, TreadleError
from treadle.files.gguf import GGUFWriter, open_gguf
from treadle.files.tensor import Tensor
from treadle.quantize.imatrix.collect import collect
from treadle.quantize.imatrix.matrix import ImatrixEntry, ImportanceMatrix, read
from treadle.quantize.plan import is_matrix


class Watched:
    """A weight matrix that notes what is multiplied by it."""

    __array_ufunc__ = None  # so that numpy leaves ``x @ matrix`` to __rmatmul__

    def __init__(self, array: np.ndarray, seen: list[np.ndarray]) -> None:
        self.array = array
        self.seen = seen
        self.T = self

    def astype(self, dtype: Any) -> Watched:
        return Watched(self.array.astype(dtype), self.seen)

    def __getitem__(self, rows: Any) -> np.ndarray:
        picked: np.ndarray = self.array[rows]
        return picked

    def __rmatmul__(self, x: np.ndarray) -> np.ndarray:
        self.seen.append(x)
        product: np.ndarray = x @ self.array.T
        return product


def expected_sums(
    model: treadle.Model, windows: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> dict[str, np.ndarray]:
    """Sums of squares, float64 [K] by tensor, by the forward pass in plain numpy."""
    seen: dict[str, list[np.ndarray]] = {}

    plain = Tensor.dequantize

    def watched(tensor: Any) -> Any:
        array = plain(tensor)
        if array.ndim < 2:
            return array
        return Watched(array, seen.setdefault(tensor.name, []))

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "dequantize", watched)
        for row in windows:
            reference.forward(model.gguf, model.config, row.tolist())
    return {n: (np.concatenate(x) ** 2).sum(0) for n, x in seen.items() if x}


@pytest.mark.parametrize("with_output", [False, True])
@pytest.mark.parametrize(
    ("arch", "fmt", "tied"), [("llama", "F32", 0), ("gemma3", "BF16", 1), ("qwen3", "Q8_0", 1)]
)
def test_what_is_collected(
    tiny: WriteTiny,
    monkeypatch: pytest.MonkeyPatch,
    arch: str,
    fmt: str,
    tied: int,
    with_output: bool,
) -> None:
    n_ctx = 150
    windows = np.random.default_rng(6).integers(5, 200, (2, n_ctx)).astype(np.int32)
    windows[:, 0] = 1
    with treadle.load(tiny(arch, fmt, tied=tied), context=n_ctx, threads=2) as model:
        done: list[tuple[int, int]] = []
        matrix = collect(
            model.engine,
            windows,
            "a text",
            bos=1,
            with_output=with_output,
            progress=lambda *told: done.append(told),
        )
        expected = expected_sums(model, windows, monkeypatch)
        output = "token_embd.weight" if tied else "output.weight"
        if not with_output:
            del expected[output]
        names = {n for n, t in model.gguf.tensors.items() if is_matrix(n, t.shape)}
    assert (
        matrix.entries.keys()
        == expected.keys()
        == names - ({output, "token_embd.weight"} - expected.keys())
    )
    assert done[-1] == (2 * n_ctx, 2 * n_ctx)
    assert (matrix.n_chunks, matrix.chunk_size, matrix.datasets) == (2, n_ctx, ("a text",))
    # Keys and values are f16; products before this one may round their activations, to int8 at
    # worst: an error of 1/254 of a block's largest, squared and summed over 300 tokens.
    share = {"F32": 2e-3, "BF16": 0.02, "Q8_0": 0.03}[fmt]
    for name, sums in expected.items():
        found = matrix.entries[name]
        assert found.counts.tolist() == [2.0 * n_ctx]
        np.testing.assert_allclose(
            found.sums[0], sums, rtol=share, atol=share * sums.mean(), err_msg=name
        )


def test_runs_of_few_tokens(tiny: WriteTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their products read plain floats: no tap has to make them. So does a long window's end."""
    windows = np.array([[5, 9, 77]], np.int32)
    with treadle.load(tiny("llama", "F32"), context=64, threads=1, kv="f32") as model:
        matrix = collect(model.engine, windows, "", bos=None)
        expected = expected_sums(model, windows, monkeypatch)
    for name, found in matrix.entries.items():
        assert found.counts.tolist() == [3.0]
        np.testing.assert_allclose(found.sums, expected[name][None], rtol=1e-3, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "fmt", "n_expert", "rest"), [("qwen3moe", "Q8_0", 5, 3), ("gpt-oss", "F32", 8, 7)]
)
def test_what_experts_are_given(
    tiny: WriteTiny, monkeypatch: pytest.MonkeyPatch, arch: str, fmt: str, n_expert: int, rest: int
) -> None:
    """For each expert, by many tokens at once, and at the end of a window by few: slot by slot, and
    in groups.

    What int8 rounds may send a token elsewhere: one row in some 200, three times as large at most.
    """
    windows = np.random.default_rng(6).integers(5, 200, (1, 512 + rest)).astype(np.int32)
    seen: dict[tuple[str, int], list[np.ndarray]] = {}
    plain = Tensor.dequantize

    class Stack:
        """Matrices of several experts, which note what is multiplied by them."""

        def __init__(self, name: str, array: np.ndarray) -> None:
            self.name = name
            self.array = array

        def astype(self, dtype: Any) -> Stack:
            return Stack(self.name, self.array.astype(dtype))

        def __getitem__(self, e: int) -> Watched:
            return Watched(self.array[e], seen.setdefault((self.name, int(e)), []))

    path = tiny(arch, fmt, n_expert=n_expert, n_ff_exp=64, n_layer=2)
    with treadle.load(path, context=520, threads=2, kv="f32") as model:
        model.engine.max_tokens = 512
        matrix = collect(model.engine, windows, "", bos=None)
        with monkeypatch.context() as patch:
            patch.setattr(
                Tensor,
                "dequantize",
                lambda t: plain(t) if len(t.shape) < 3 else Stack(t.name, plain(t)),
            )
            reference.forward(model.gguf, model.config, windows[0].tolist())
    assert len({name for name, _ in seen}) == 6
    share = {"F32": 2e-3, "Q8_0": 0.05}[fmt]
    moved = {"F32": 0, "Q8_0": 3}[fmt]  # tokens
    for (name, e), rows in seen.items():
        found = matrix.entries[name]
        sums = (np.stack(rows) ** 2).sum(0)
        assert found.sums.shape == (n_expert, len(sums))
        assert abs(found.counts[e] - len(rows)) <= moved
        off = np.abs(found.sums[e] - sums).sum() / sums.sum()
        assert off <= share + 3 * moved / len(rows), (name, e, off)


def test_what_an_encoder_is_given(tiny: WriteTiny) -> None:
    """Although it makes no logits; those it has not, and says so."""
    windows = np.random.default_rng(6).integers(5, 200, (2, 24)).astype(np.int32)
    with treadle.load(tiny("bert", "F32"), context=24, threads=1) as model:
        with pytest.raises(TreadleError, match="bert does not generate text"):
            collect(model.engine, windows, "", bos=None, with_output=True)
        matrix = collect(model.engine, windows, "", bos=None)
        gguf = model.gguf
        eps = model.config.norm_eps
        names = {n for n, t in gguf.tensors.items() if n.startswith("blk.") and len(t.shape) == 2}

        def of(name: str) -> np.ndarray:
            return gguf.tensors[name].dequantize().astype(np.float64)

        x = of("token_embd.weight")[windows] + of("position_embd.weight")[:24]
        x = x + of("token_types.weight")[0]
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
        x = x * of("token_embd_norm.weight") + of("token_embd_norm.bias")
    assert matrix.entries.keys() == names
    assert {float(e.counts[0]) for e in matrix.entries.values()} == {48.0}
    sums = (x**2).sum((0, 1))
    np.testing.assert_allclose(matrix.entries["blk.0.attn_q.weight"].sums[0], sums, rtol=1e-4)


def test_entries_have_the_names_of_the_file(tiny: WriteTiny, tmp_path: Path) -> None:
    """Not the graph's: `quantize` looks for the file's."""
    names = {"blk.": "enc.blk.", "attn_output": "attn_o"}
    path = with_names(tiny("t5encoder", "F32"), tmp_path / "model.gguf", names)
    with treadle.load(path, context=24, threads=1) as model:
        matrix = collect(model.engine, np.arange(5, 29, dtype=np.int32)[None], "", bos=None)
    assert "enc.blk.0.attn_o.weight" in matrix.entries
    with open_gguf(path) as gguf:
        assert matrix.entries.keys() < gguf.tensors.keys()


def test_taps_see_what_int8_would_lose(tiny: WriteTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first product of a Q8_0 model: nothing before it is rounded but the embeddings."""
    windows = np.arange(5, 69, dtype=np.int32)[None]
    with treadle.load(tiny("llama", "Q8_0"), context=64, threads=2) as model:
        matrix = collect(model.engine, windows, "", bos=None)
        expected = expected_sums(model, windows, monkeypatch)
    name = "blk.0.attn_q.weight"
    np.testing.assert_allclose(matrix.entries[name].sums[0], expected[name], rtol=1e-5)


def test_normal_runs_are_as_before(tiny: WriteTiny) -> None:
    with treadle.load(tiny("llama", "Q8_0"), context=64, threads=2) as model:
        ids = list(range(5, 45))
        before = model.logits(ids)
        labels = [step.label for step in model.plan(len(ids))]
        collect(model.engine, np.array([ids], np.int32), "", bos=None)
        model.engine.cache.forget()
        assert np.array_equal(model.logits(ids), before)
        assert [step.label for step in model.plan(len(ids))] == labels
        seq = model.engine.cache.sequence()
        assert model.engine.run([BatchItem(seq, ids)]).shape == (1, model.config.n_vocab)


# -- files --------------------------------------------------------------------------------------


@pytest.fixture
def matrix() -> ImportanceMatrix:
    rng = np.random.default_rng(7)
    return ImportanceMatrix(
        {
            "blk.0.attn_q.weight": ImatrixEntry(rng.uniform(0, 9, (1, 8)), np.array([12.0])),
            "blk.0.ffn_up_exps.weight": ImatrixEntry(
                rng.uniform(0, 9, (3, 4)), np.array([3.0, 0.0, 9.0])
            ),
        },
        ("wiki.txt", "code.txt"),
        3,
        4,
    )


def test_llama_cpps_layout(tmp_path: Path, matrix: ImportanceMatrix) -> None:
    path = tmp_path / "imatrix.gguf"
    matrix.write(path)
    theirs = gguf.GGUFReader(path)
    assert theirs.fields["general.type"].contents() == "imatrix"
    assert theirs.fields["imatrix.datasets"].contents() == ["wiki.txt", "code.txt"]
    assert theirs.fields["imatrix.chunk_count"].contents() == 3
    assert theirs.fields["imatrix.chunk_size"].contents() == 4
    shapes = {t.name: t.shape.tolist() for t in theirs.tensors}  # fastest dimension first
    assert shapes["blk.0.ffn_up_exps.weight.in_sum2"] == [4, 3]
    assert shapes["blk.0.ffn_up_exps.weight.counts"] == [1, 3]
    found = read(path)
    assert (found.datasets, found.n_chunks, found.chunk_size) == (matrix.datasets, 3, 4)
    for name, entry in matrix.entries.items():
        np.testing.assert_allclose(found.entries[name].sums, entry.sums, rtol=1e-6)
        assert np.array_equal(found.entries[name].counts, entry.counts)
    weights = found.entries["blk.0.ffn_up_exps.weight"].weights()
    assert weights.dtype == np.float32
    np.testing.assert_allclose(
        weights[2], matrix.entries["blk.0.ffn_up_exps.weight"].sums[2] / 9, rtol=1e-6
    )
    assert weights[1].tolist() == [1.0] * 4  # no token came by: all columns matter alike


def binary(tail: bytes = b"") -> bytes:
    name = b"blk.0.attn_q.weight"
    entry = struct.pack("<i", len(name)) + name + struct.pack("<2i4f", 5, 4, 10.0, 0.0, 5.0, 2.5)
    return struct.pack("<i", 1) + entry + tail


def test_the_older_layout(tmp_path: Path) -> None:
    path = tmp_path / "imatrix.dat"
    path.write_bytes(binary())
    found = read(path).entries["blk.0.attn_q.weight"].weights()
    assert found.tolist() == [[2.0, 0.0, 1.0, 0.5]]
    path.write_bytes(binary(struct.pack("<2i", 7, 8) + b"wiki.txt"))
    assert (read(path).n_chunks, read(path).datasets) == (7, ("wiki.txt",))


def test_two_texts_together(matrix: ImportanceMatrix) -> None:
    name = "blk.0.attn_q.weight"
    more = ImportanceMatrix(
        {name: ImatrixEntry(np.ones((1, 8)), np.array([4.0]))}, ("more.txt",), 1, 4
    )
    both = matrix + more
    assert np.array_equal(both.entries[name].sums, matrix.entries[name].sums + 1)
    assert both.entries[name].counts.tolist() == [16.0]
    assert (both.n_chunks, both.datasets) == (4, ("wiki.txt", "code.txt", "more.txt"))
    other = ImportanceMatrix({name: ImatrixEntry(np.ones((1, 9)), np.array([4.0]))})
    with pytest.raises(FileError, match=r"attn_q.weight: has \(1, 9\) importances"):
        _ = matrix + other


def test_files_that_end_early(tmp_path: Path) -> None:
    path = tmp_path / "imatrix.dat"
    whole = binary(struct.pack("<2i", 7, 8) + b"wiki.txt")
    for n in range(len(whole)):
        if n == len(binary()):
            continue  # a sound file of the first kind
        path.write_bytes(whole[:n])
        with pytest.raises(FileError, match=r"imatrix\.dat"):
            read(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"# a text that is none", "number of entries"),
        (struct.pack("<2i", 1, -4), "length of a name is -4"),
        (struct.pack("<2i", 1, 2) + b"\xff\xfe", "UTF-8"),
        (struct.pack("<i", 0), "no entries"),
        (binary()[:-4] + struct.pack("<f", np.nan), "cannot be a sum of squares"),
        (binary()[:-4] + struct.pack("<f", -1.0), "cannot be a sum of squares"),
    ],
)
def test_files_that_are_none(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "imatrix.dat"
    path.write_bytes(content)
    with pytest.raises(FileError, match=message):
        read(path)
    with pytest.raises(FileError, match="cannot be opened"):
        read(tmp_path / "absent.dat")


@pytest.mark.parametrize(
    ("tensors", "kind", "message"),
    [
        ({"a.in_sum2": [[1.0, 2.0]], "a.counts": [[3.0]]}, "model", "of type 'model'"),
        ({"a.in_sum2": [[1.0, 2.0]]}, "imatrix", "a.counts: is missing"),
        ({"a.in_sum2": [[1.0, 2.0]], "a.counts": [[3.0], [4.0]]}, "imatrix", "2 counts"),
        (
            {"a.in_sum2": [[1.0, np.inf]], "a.counts": [[3.0]]},
            "imatrix",
            "cannot be a sum of squares",
        ),
        ({"a.weight": [[1.0]]}, "imatrix", "holds no importances"),
    ],
)
def test_gguf_files_that_are_none(
    tmp_path: Path, tensors: dict[str, list[list[float]]], kind: str, message: str
) -> None:
    path = tmp_path / "imatrix.gguf"
    writer = GGUFWriter(path)
    writer.add("general.type", kind)
    for name, values in tensors.items():
        array = np.array(values, np.float32)
        writer.add_tensor(name, array.shape, "F32", array)
    writer.write()
    with pytest.raises(FileError, match=message):
        read(path)


@pytest.mark.parametrize("empty", ["sums", "counts"])
def test_a_tensor_without_numbers(tmp_path: Path, empty: str) -> None:
    writer = GGUFWriter(tmp_path / "bad.gguf")
    writer.add("general.type", "imatrix")
    n = {"sums": 8, "counts": 1} | {empty: 0}
    writer.add_tensor("w.in_sum2", (1, n["sums"]), "F32", bytes(4 * n["sums"]))
    writer.add_tensor("w.counts", (n["counts"], 1), "F32", bytes(4 * n["counts"]))
    writer.write()
    where = {"sums": "w.in_sum2", "counts": "w.counts"}[empty]
    with pytest.raises(FileError, match=rf"bad\.gguf: {where}: is empty"):
        read(tmp_path / "bad.gguf")
