"""The search of ik_llama.cpp's trellis formats: nearest points, tables, signs, rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from treadle.formats import by_name
from treadle.formats.ik_trellis import points, values_of
from treadle.formats.trellis_search import TrellisSearch

F32Array = npt.NDArray[np.float32]


def search(name: str) -> TrellisSearch:
    made = by_name(name).search
    assert isinstance(made, TrellisSearch)
    return made


def rows(n: int, k: int, seed: int = 3) -> F32Array:
    return np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)


def errors(u: F32Array, y: F32Array, w: F32Array | None = None) -> float:
    return float((np.square(u - y) * (1 if w is None else w)).sum())


def test_values_by_the_rule_of_their_file() -> None:
    """A generator multiplies a word by a constant; a value is the sum of six bits of each byte."""
    for index in (0, 1, 8191, 65535):
        word = index + 4096
        for got in values_of(np.array(index + 4096), 8):
            word = word * 0xCBAC1FED % (1 << 32)
            assert got == sum(byte & 63 for byte in word.to_bytes(4, "little")) - 126
    assert np.array_equal(np.abs(points(15, 4)), points(15, 4, magnitudes=True))
    assert np.array_equal(points(15, 4, table=1)[0], values_of(np.array(4096 + 32768), 4))


@pytest.mark.parametrize("name", ["IQ1_KT", "IQ4_KT"])
def test_nearest_points_are_nearly_the_best(name: str) -> None:
    how = search(name)
    (table, *_) = how.tables
    u = rows(512, how.group) * np.float32(how.unit)
    w = np.random.default_rng(4).gamma(0.5, size=u.shape).astype(np.float32)
    for given in (None, w):
        weight = np.ones_like(u) if given is None else given
        cross = (weight * u) @ table.points.T
        exact = (cross - weight @ (np.square(table.points) / 2).T).argmax(axis=1)
        best = errors(u, table.points[exact], given)
        for careful, most in ((True, 1.06), (False, 1.3)):
            found = table.points[table.nearest(u, given, careful)]
            assert best <= errors(u, found, given) <= most * (1 if given is None else 1.5) * best


def test_a_group_beyond_all_points_gets_one_of_its_corner() -> None:
    (table,) = search("IQ1_KT").tables
    u = np.full((2, 8), 300, np.float32)
    u[1, ::2] = -300
    found = table.points[table.nearest(u, None, True)]
    assert (np.sign(found).sum(axis=1) * np.sign(u).sum(axis=1) >= 0).all()
    assert (np.sign(found) == np.sign(u)).mean() > 0.8


def test_a_second_table_and_either_sign_lower_the_error() -> None:
    x = rows(8, 256)
    how = search("IQ4_KT")
    fmt = by_name("IQ4_KT")

    def off(changed: TrellisSearch) -> float:
        return errors(x, fmt.dequantize_rows(fmt.quantize_rows(x, None, changed.run)))

    whole = off(how)
    assert whole < 0.99 * off(replace(how, tables=how.tables[:1]))
    assert whole < 0.99 * off(replace(how, scales=tuple(s for s in how.scales if s > 0)))
    found = how.run(x, None)
    assert 0.3 < (found.codes >= 1 << 15).mean() < 0.7
    assert found.negative.size == 0


def test_signs_are_apart_where_points_are_magnitudes() -> None:
    x = rows(2, 256)
    x[0, 7] = -0.0
    found = search("IQ3_KT").run(x, None)
    assert np.array_equal(found.negative, np.signbit(x))
    fmt = by_name("IQ3_KT")
    back = fmt.dequantize_rows(fmt.quantize_rows(x))
    assert np.array_equal(np.signbit(back), np.signbit(x))


def test_rows_do_not_depend_on_their_neighbours() -> None:
    x = rows(6, 512)
    fmt = by_name("IQ1_KT")
    alone = np.concatenate([fmt.quantize_rows(row[None]) for row in x])
    together = fmt.quantize_rows(x)
    for row, one, same in zip(x, alone, together, strict=True):
        assert errors(row, fmt.dequantize_rows(one[None])[0]) == pytest.approx(
            errors(row, fmt.dequantize_rows(same[None])[0]), rel=1e-3
        )
