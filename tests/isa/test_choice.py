"""Which row is chosen, and what is said when it cannot be."""

from __future__ import annotations

from importlib import import_module

import pytest

from treadle import isa
from treadle.errors import UnsupportedError
from treadle.isa import ROWS, choose, runnable
from treadle.jit.host import host_features

EVERYTHING = frozenset().union(*(row.needs for row in ROWS.values()))


@pytest.fixture(autouse=True)
def _not_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TREADLE_ISA", raising=False)


def test_any_machine_runs_something() -> None:
    assert choose(frozenset()).name == "portable"
    assert [row.name for row in runnable(frozenset())] == ["portable"]
    assert choose(host_features()) in runnable(host_features())


def test_the_best_row_is_chosen() -> None:
    haswell = {"sse4.2", "avx2", "fma", "f16c", "bmi2"}
    skylake_server = haswell | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}
    assert choose(haswell - {"fma"}).name == "portable"
    assert choose(haswell).name == "avx2"
    assert choose(haswell | {"avxvnni"}).name == "avx2_vnni"
    assert choose(skylake_server).name == "avx512"
    assert choose(skylake_server | {"avx512vnni"}).name == "avx512_vnni"
    assert choose(skylake_server | {"avx512vnni", "avxvnni"}).name == "avx512_vnni"
    ice_lake = skylake_server | {"avx512vnni", "avx512vbmi", "avx512bitalg", "gfni"}
    assert choose(ice_lake).name == "avx512_vbmi"
    zen_4 = ice_lake | {"avx512bf16"}
    assert choose(zen_4).name == "avx512_bf16"
    assert choose(zen_4 | {"amx-tile", "amx-bf16"}) == list(ROWS.values())[-1]
    assert choose(EVERYTHING) == list(ROWS.values())[-1]


@pytest.mark.parametrize(
    ("features", "row"),
    [
        ("neon lse", "neon"),
        ("neon dotprod fullfp16 lse", "neon_dotprod"),  # Cortex-A76, Neoverse N1, M1
        ("neon dotprod i8mm", "neon_i8mm"),
        ("neon dotprod i8mm bf16 sve sve2", "neon_bf16"),  # Neoverse N2, M2
        ("v zvl128b vlen128", "rvv128"),
        ("v zvl128b zvl256b vlen256 zba", "rvv256"),
        ("v zvl128b zvl256b vlen256 zvfh zvfhmin", "rvv256_zvfh"),  # SpacemiT X60
        ("v zvl128b zvl256b zvl512b zvl1024b zvfh", "rvv512_zvfh"),
        ("zba zbb", "portable"),
    ],
)
def test_the_best_row_of_other_machines(features: str, row: str) -> None:
    assert choose(frozenset(features.split())).name == row


def test_a_row_that_is_slow_here_is_left_unless_forced() -> None:
    """Sapphire Rapids, the kind with AMX, runs vdpbf16ps slower than f32's FMA; and the kernel may
    forbid a process its matrix registers.
    """
    sapphire_rapids = EVERYTHING - {"amx-tile"}
    assert choose(sapphire_rapids).name == "avx512_vbmi"
    assert "avx512_bf16" in [row.name for row in runnable(sapphire_rapids)]
    assert choose(sapphire_rapids, "avx512_bf16").name == "avx512_bf16"


def test_a_row_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(EVERYTHING, "avx2").name == "avx2"
    monkeypatch.setenv("TREADLE_ISA", "portable")
    assert choose(EVERYTHING).name == "portable"
    assert choose(EVERYTHING, "avx512").name == "avx512"  # an argument goes before the environment


def test_an_unknown_row_is_refused_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_ISA", "avx9000")
    with pytest.raises(
        UnsupportedError,
        match=r"avx9000: unknown instruction set; choose one of portable, neon, .*avx2",
    ):
        choose(EVERYTHING)


def test_a_row_that_the_cpu_lacks_is_refused_with_what_is_missing() -> None:
    with pytest.raises(
        UnsupportedError, match=r"this CPU does not support avx512bf16, avx512vnni$"
    ):
        choose(EVERYTHING - {"avx512bf16", "avx512vnni"}, "avx512_bf16")


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: row.name)
def test_rows_are_whole(row: object) -> None:
    from treadle.isa.isa import Isa

    assert isinstance(row, Isa)
    assert ROWS[row.name] is row
    assert row.vector_bits % 128 == 0
    assert row.lanes == row.vector_bits // 32
    assert row.regs in (16, 32)


def test_all_rows_of_a_family_need_its_feature() -> None:
    """Else a CPU without it would not be offered them."""
    for family, feature in isa.FAMILIES.items():
        rows = import_module(f"treadle.isa.{family}").ROWS
        assert all(feature in row.needs for row in rows)
        assert {row.name for row in rows} <= ROWS.keys()
