"""The machine's own row: it comes back as it was written, or is refused with a reason."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import treadle
from treadle.devices.cpu import tuned_rows
from treadle.devices.cpu.tuned_rows import path_of, reset, save, tuned_row
from treadle.errors import CacheError
from treadle.formats import by_name
from treadle.isa import ROWS
from treadle.isa.isa import Isa
from treadle.jit import cache
from treadle.kernels.matmul.select import SHIPPED, TunedTable, fits, matmul
from treadle.kernels.run_state import GEMV_TOKENS
from treadle.machine import topology

ISA = ROWS["avx512_vnni"]
TABLE = TunedTable({"Q8_0": {"mr": 1, "nr": 6}}, {("Q8_0", 1): {"mr": 16}}, {"Q8_0": 2, "F32": 8})


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel cache of the test's own."""
    made = tmp_path / "kernels"
    monkeypatch.setenv("TREADLE_CACHE", str(made))
    monkeypatch.delenv("TREADLE_TUNE", raising=False)
    return made


def change(path: Path, how: Callable[[dict[str, Any]], object]) -> None:
    said = json.loads(path.read_text())
    how(said)
    path.write_text(json.dumps(said))


def test_round_trip() -> None:
    path = save(ISA, TABLE)
    row = tuned_row(ISA)
    assert (row.table, row.isa, row.path, row.problem) == (TABLE, ISA.name, str(path), None)
    assert row.measured is not None
    assert row.formats == ["Q8_0", "F32"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_second_sweep_goes_over_the_first() -> None:
    save(ISA, TABLE)
    save(ISA, TunedTable({"F32": {"mr": 2, "nr": 4}}, {("Q8_0", 1): {"mr": 4}}))
    assert tuned_row(ISA).table == TunedTable(
        {"Q8_0": {"mr": 1, "nr": 6}, "F32": {"mr": 2, "nr": 4}},
        {("Q8_0", 1): {"mr": 4}},
        {"Q8_0": 2, "F32": 8},
    )


def test_what_was_measured_of_matrix_registers() -> None:
    amx = ROWS["amx_bf16"]
    save(
        amx, TunedTable({"Q8_0": {"mr": 1, "nr": 6}}, matrix={"F16": {"mr": 4}, "Q8_0": {"mr": 4}})
    )
    path = save(amx, TunedTable(matrix={"Q8_0": {"mr": 2}}, vector_tokens={"Q8_0": 0, "Q4_0": 8}))
    said = json.loads(path.read_text())["formats"]
    assert said == {
        "Q8_0": {"gemm": {"mr": 1, "nr": 6}, "matrix": {"mr": 2}, "vector_tokens": 0},
        "F16": {"matrix": {"mr": 4}},
        "Q4_0": {"vector_tokens": 8},
    }
    row = tuned_row(amx)
    assert row.table.matrix == {"F16": {"mr": 4}, "Q8_0": {"mr": 2}}
    assert row.table.vector_tokens == {"Q8_0": 0, "Q4_0": 8}
    assert row.formats == ["Q8_0", "F16", "Q4_0"]
    spec = matmul(by_name("Q8_0"), amx, 2048, 99, row.table)
    assert (spec.mr, spec.act) == (2, "bf16")


@pytest.mark.parametrize(
    "said",
    [{"mr": 1}, {"mr": 3}, {"mr": 0}, {"mr": 64}, {"nr": 32}, {"mr": 2, "kc": 512}, 2],
    ids=str,
)
def test_what_matrix_registers_cannot_use(said: object) -> None:
    amx = ROWS["amx_bf16"]
    path = save(amx, TunedTable(matrix={"Q8_0": {"mr": 2}}))
    change(path, lambda file: file["formats"].update(Q8_0={"matrix": said}))
    assert "damaged" in (tuned_row(amx).problem or "")


def test_where_nothing_was_tuned_next_to_nothing_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even the CPU's name, which takes a moment on a machine of a hundred cores."""

    def refuse(*args: object) -> str:
        raise AssertionError("read")

    monkeypatch.setattr(topology, "cpu_name", refuse)
    monkeypatch.setattr(cache, "source_hash", refuse)
    row = tuned_row(ISA)
    assert (row.table, row.measured, row.problem) == (SHIPPED, None, None)
    assert not folder.exists()


def test_the_kernel_cache_does_not_count_it() -> None:
    save(ISA, TABLE)
    state = cache.state()
    assert (state.n_kernels, state.n_stale, state.problem) == (0, 0, None)


def test_rows_are_of_an_instruction_set_and_a_cpu(tmp_path: Path) -> None:
    other_cpu = tmp_path / "proc"
    other_cpu.mkdir()
    (other_cpu / "cpuinfo").write_text("model name : Another\n")
    save(ISA, TABLE)
    for row in (tuned_row(ROWS["avx2"]), tuned_row(ISA, proc=other_cpu)):
        assert (row.table, row.problem) == (SHIPPED, None)
    save(ISA, SHIPPED, proc=other_cpu)
    assert tuned_row(ISA).table == TABLE
    assert tuned_row(ISA, proc=other_cpu).measured is not None


def test_reset() -> None:
    path = save(ISA, TABLE)
    assert reset(ISA) == path
    assert not path.exists()
    assert reset(ISA) is None
    assert tuned_row(ISA).table == SHIPPED


def test_without_an_argument_it_is_the_row_in_use_here() -> None:
    from treadle.profiling.report import row_in_use

    save(row_in_use(), TunedTable(gemv_tokens={"F32": 1}))
    assert tuned_row().table.gemv_tokens == {"F32": 1}


def test_a_variable_puts_it_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    save(ISA, TABLE)
    monkeypatch.setenv("TREADLE_TUNE", "0")
    row = tuned_row(ISA)
    assert row.table == SHIPPED
    assert "TREADLE_TUNE=0" in (row.problem or "")
    save(ISA, TunedTable(gemv_tokens={"Q8_0": 1}))  # nothing else of the row is lost
    monkeypatch.setenv("TREADLE_TUNE", "1")
    assert tuned_row(ISA).table.gemm == TABLE.gemm


def refused(reason: str, path: Path) -> None:
    """A row is there, says nothing, and the reason is told; a new one may take its place."""
    row = tuned_row(ISA)
    assert (row.table, row.measured, row.path) == (SHIPPED, None, str(path))
    assert reason in (row.problem or ""), row.problem
    assert str(path) in (row.problem or "")


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("cpu", "Pentium", "measured with cpu 'Pentium'"),
        ("isa", "avx2", "measured with isa 'avx2'"),
        ("treadle", "0.0", "measured with treadle '0.0'"),
        ("llvmlite", None, "measured with llvmlite 'None'"),
        ("kernels", "00", "measured with another version of the kernels: run `treadle tune` again"),
    ],
)
def test_what_was_measured_elsewhere_is_stale(key: str, value: object, reason: str) -> None:
    path = save(ISA, TABLE)
    change(path, lambda said: said.update({key: value}))
    refused(reason, path)
    save(ISA, TunedTable(gemv_tokens={"F32": 4}))
    assert tuned_row(ISA).table == TunedTable(gemv_tokens={"F32": 4})


def test_a_row_says_what_it_was_measured_with() -> None:
    said = json.loads(save(ISA, TABLE).read_text())
    assert (said["isa"], said["treadle"]) == (ISA.name, treadle.__version__)
    assert said["cpu"] == topology.cpu_name()
    assert said["formats"]["Q8_0"] == {
        "gemm": {"mr": 1, "nr": 6},
        "gemv": {"1": {"mr": 16}},
        "gemv_tokens": 2,
    }


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"\xff\xfe", b"[]", b"null", b"7", b"{}", b'{"formats": []}', b"[" * 100_000],
    ids=range(9),
)
def test_a_damaged_file(text: bytes) -> None:
    path = save(ISA, TABLE)
    path.write_bytes(text)
    refused("damaged", path)
    save(ISA, TABLE)
    assert tuned_row(ISA).table == TABLE


BAD_ROWS = [
    {"gemm": {"mr": 3, "nr": 4}},
    {"gemm": {"mr": 1, "nr": 10**9}},
    {"gemm": {"mr": 10**12, "nr": 1}},
    {"gemm": {"mr": 0, "nr": 0}},
    {"gemm": {"mr": -1, "nr": 4}},
    {"gemm": {"mr": 1.0, "nr": 4}},
    {"gemm": {"mr": True, "nr": 4}},
    {"gemm": {"mr": "1", "nr": 4}},
    {"gemm": {"mr": 1, "nr": 4, "bias": 1}},
    {"gemm": {"mr": 1, "nr": 4, "w": "F32"}},
    {"gemm": {"mr": 1, "nr": 4, "mystery": 1}},
    {"gemm": [1, 4]},
    {"gemv": {"1": {"mr": 5}}},
    {"gemv": {"1": {"mr": 1, "nr": 4}}},
    {"gemv": {"0": {"mr": 1}}},
    {"gemv": {"x": {"mr": 1}}},
    {"gemv": {"1000000": {"mr": 1}}},
    {"gemv_tokens": 0},
    {"gemv_tokens": 1000},
    {"gemv_tokens": True},
    {"gemv_tokens": None},
    {"gemw": {}},
    {"matrix": {"mr": 2}},  # this row has none
    7,
]


@pytest.mark.parametrize("row", BAD_ROWS, ids=str)
def test_a_number_that_no_sweep_gives(row: object) -> None:
    path = save(ISA, TABLE)
    change(path, lambda said: said["formats"].update(Q8_0=row))
    refused("damaged", path)


SMALL = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 70) | st.sampled_from(["mr", "1", "gemm", 8.5]),
    lambda inner: st.dictionaries(
        st.sampled_from(["gemm", "gemv", "gemv_tokens", "mr", "nr", "1", "4"]), inner, max_size=3
    ),
)


@pytest.mark.slow
@given(
    row=st.dictionaries(st.sampled_from(["gemm", "matrix", "gemv", "gemv_tokens"]), SMALL),
    isa=st.sampled_from([ISA, ROWS["amx_bf16"]]),
)
def test_whatever_it_says_a_model_can_run(
    tmp_path_factory: pytest.TempPathFactory, row: dict[str, Any], isa: Isa
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TREADLE_CACHE", str(tmp_path_factory.mktemp("kernels", numbered=True)))
        path = save(isa, TABLE)
        change(path, lambda said: said["formats"].update(Q8_0=row))
        found = tuned_row(isa)
        assert (found.problem is None) == (found.measured is not None)
        for tokens in (*GEMV_TOKENS, 99):
            spec = matmul(by_name("Q8_0"), isa, 2048, tokens, found.table)
            assert fits(spec, isa)
            assert spec.op == "gemv" or spec.nr > 0


# -- whose it is ----------------------------------------------------------------------------------

posix = pytest.mark.skipif(not hasattr(os, "getuid"), reason="files belong to nobody here")


@posix
def test_another_users_row(monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(ISA, TABLE)
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    refused("refused: the file belongs to another user", path)
    with pytest.raises(CacheError, match="belongs to another user"):
        save(ISA, TABLE)


@posix
def test_a_row_that_others_may_write(folder: Path) -> None:
    path = save(ISA, TABLE)
    path.chmod(0o666)
    refused("refused: the file is writable by others", path)
    path.chmod(0o600)
    for place in (path.parent, folder):
        place.chmod(0o777)
        row = tuned_row(ISA)
        assert row.table == SHIPPED
        assert "is writable by other users" in (row.problem or "")
        with pytest.raises(CacheError, match="is writable by other users"):
            save(ISA, TABLE)
        place.chmod(0o700)
    assert tuned_row(ISA).table == TABLE


@posix
def test_what_is_no_plain_file(tmp_path: Path) -> None:
    path = save(ISA, TABLE)
    moved = tmp_path / "elsewhere.json"
    path.rename(moved)
    path.symlink_to(moved)
    refused("cannot be read", path)
    path.unlink()
    path.mkdir()
    refused("damaged: expected a regular file of at most", path)
    path.rmdir()
    path.write_bytes(b" " * (tuned_rows.MAX_BYTES + 1))
    refused("damaged: expected a regular file of at most", path)


def test_no_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise CacheError("no home directory")

    monkeypatch.setattr(cache, "folder", none)
    row = tuned_row(ISA)
    assert (row.table, row.problem) == (SHIPPED, None)
    with pytest.raises(CacheError, match="no home"):
        save(ISA, TABLE)


def test_a_folder_that_cannot_be_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    save(ISA, TABLE)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CacheError, match="No space left"):
        save(ISA, TunedTable(gemv_tokens={"F32": 1}))
    path = path_of(ISA)
    assert tuned_row(ISA).table == TABLE
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # nothing half-written stays
