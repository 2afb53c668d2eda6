"""Fewer cases meet every spec, and every row with every option."""

from __future__ import annotations

from collections import Counter
from itertools import product

from tests.kernels import rows
from tests.kernels.pairwise import covering, options
from tests.kernels.registry import PACKS
from treadle.isa import ROWS
from treadle.kernels.elementwise.elementwise import Pack

EVERY = [*product(PACKS, ROWS.values())]


def met(cases: list[tuple[Pack, object]]) -> Counter[object]:
    found: Counter[object] = Counter(spec for spec, _ in cases)
    return found + Counter((o, isa) for spec, isa in cases for o in options(spec, ("act", "fn")))


def test_every_spec_and_every_pair_of_an_option_and_a_row_is_met() -> None:
    kept = covering(EVERY, together=("act", "fn"))
    assert len(kept) < len(EVERY)
    assert set(met([*kept])) == set(met([*EVERY]))
    assert kept == [case for case in EVERY if case in kept]


def test_no_case_can_be_left_out() -> None:
    kept = covering(EVERY)
    assert len(kept) < len(covering(EVERY, together=("act", "fn")))
    count = Counter(
        each for spec, isa in kept for each in (spec, *((o, isa) for o in options(spec)))
    )
    for spec, isa in kept:
        assert any(count[each] == 1 for each in (spec, *((o, isa) for o in options(spec))))


def test_on_one_row_every_spec_stays() -> None:
    assert covering([*product(PACKS, rows.ALL[-1:])]) == [*product(PACKS, rows.ALL[-1:])]


def test_numbers_are_met_where_they_are_not_the_default() -> None:
    plain, sliced = options(Pack("copy", "q8", 96, 4)), options(Pack("copy", "q8", 96, 4, 16))
    assert len(set(plain) - set(sliced)) == 1
    assert options(Pack("copy", "q8", 32, 1)) == plain
