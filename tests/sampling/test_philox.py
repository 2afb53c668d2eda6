"""Random bits: numpy's own Philox is the reference."""

from __future__ import annotations

from itertools import islice

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from treadle.sampling.philox import philox


@given(st.integers(0, 2**128 - 1))
def test_the_bits_are_those_of_numpy(key: int) -> None:
    expected = np.random.Philox(key=key).random_raw(11).tolist()
    assert list(islice(philox(key), 11)) == expected
