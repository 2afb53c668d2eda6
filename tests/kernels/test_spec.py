"""A kernel's name: its cache key, so two kernels never share one, and what people read."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.kernels.elementwise.elementwise import Norm
from treadle.kernels.spec import Spec

F32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def norm(eps: float) -> Norm:
    return Norm("f32", 64, 1, eps)


@pytest.mark.parametrize(
    ("eps", "digits"),
    [
        (float(np.float32(1e-5)), "1e-05"),  # as a file has it: 9.999999747378752e-06
        (1e-6, "1e-06"),
        (64**-0.5, "0.125"),
        (32**-0.5, "0.17677669"),
    ],
)
def test_a_number_is_written_in_the_fewest_digits(eps: float, digits: str) -> None:
    assert norm(eps).name == f"norm_f32_k64_group1_eps{digits}"


@given(F32)
def test_a_name_gives_its_number_back(value: float) -> None:
    found = re.search(r"eps(.*)", norm(value).name)
    assert found
    assert np.float32(found.group(1)) == np.float32(value)


@given(F32)
def test_neighbours_have_names_of_their_own(value: float) -> None:
    other = float(np.nextafter(np.float32(value), np.float32(np.inf)))
    assert norm(value).name != norm(other).name


@given(st.floats(-1e30, 1e30), st.floats(-1e30, 1e30))
def test_specs_of_one_name_are_equal(one: float, other: float) -> None:
    """The code has f32: what f32 cannot tell apart is the same kernel, and makes the same code."""
    a: Spec = norm(one)
    b: Spec = norm(other)
    assert (a.name == b.name) == (a == b)
    assert norm(float(np.float32(one))) == a
