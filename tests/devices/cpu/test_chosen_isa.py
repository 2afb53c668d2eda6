"""The instruction set that a start has chosen, stored for later ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from treadle.devices.cpu.chosen_isa import PORTABLE, ChosenIsa, choose_stored, row_of
from treadle.errors import UnsupportedError
from treadle.isa import ROWS, choose
from treadle.jit.kernel import isa_key
from treadle.kernels.matmul.sizes import batch_sizes

AVX2 = frozenset({"avx2", "fma", "f16c", "bmi2"})


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path))
    monkeypatch.setenv("TREADLE_PLANS", "1")
    monkeypatch.delenv("TREADLE_ISA", raising=False)
    return tmp_path / "plans"


def is_like(chosen: ChosenIsa, name: str) -> bool:
    """Return whether it says of row ``name`` what the row says."""
    row = ROWS[name]
    sizes = batch_sizes(row, True), batch_sizes(row, False)
    same = isa_key(chosen) == isa_key(row) and row_of(chosen) is row
    return same and (chosen.sizes_of_floats, chosen.sizes) == sizes


def test_a_later_start_reads_what_the_first_has_chosen(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_like(choose_stored(AVX2), "avx2")
    assert is_like(choose_stored(AVX2, "portable"), "portable")
    assert is_like(choose_stored(frozenset()), "portable")
    assert len(list(folder.glob("*.isa"))) == 3
    monkeypatch.setattr("treadle.isa.choose", None)
    assert is_like(choose_stored(AVX2), "avx2")
    monkeypatch.setenv("TREADLE_ISA", "portable")
    assert is_like(choose_stored(AVX2), "portable")


def test_nothing_is_stored_or_read_where_plans_are_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TREADLE_PLANS", "0")
    assert is_like(choose_stored(AVX2), "avx2")
    assert not folder.exists()


def test_a_program_with_rows_of_its_own_stores_and_reads_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process, without these rows, would read a name that it does not have."""
    choose_stored(AVX2, "avx2")
    (entry,) = folder.glob("*.isa")
    for name in ("own", "avx2"):
        with monkeypatch.context() as patch:
            row = replace(ROWS["avx2"], name=name, features="+avx2")
            patch.setitem(ROWS, name, row)
            chosen = choose_stored(AVX2, name)
            assert row_of(chosen) is row
            assert chosen.features == "+avx2"
    assert list(folder.glob("*.isa")) == [entry]


def test_a_damaged_entry_is_written_anew(folder: Path) -> None:
    choose_stored(AVX2)
    (entry,) = folder.glob("*.isa")
    whole = entry.read_bytes()
    entry.write_bytes(whole[:-1])
    assert is_like(choose_stored(AVX2), "avx2")
    assert entry.read_bytes() == whole


@pytest.mark.parametrize("name", ["neon", "unheard_of"])
def test_a_name_that_cannot_be_chosen(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnsupportedError) as ours:
        choose_stored(AVX2, name)
    with pytest.raises(UnsupportedError) as theirs:
        choose(AVX2, name)
    assert str(ours.value) == str(theirs.value)
    monkeypatch.setenv("TREADLE_ISA", name)
    with pytest.raises(UnsupportedError, match=f"^TREADLE_ISA={name}: "):
        choose_stored(AVX2)
    assert not list(folder.glob("*.isa"))


def test_the_row_of_any_machine() -> None:
    assert isa_key(PORTABLE) == isa_key(ROWS["portable"])
    assert row_of(PORTABLE) is row_of(ROWS["portable"]) is ROWS["portable"]
