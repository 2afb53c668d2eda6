"""Sizes, counts and reasons, as messages write them."""

from __future__ import annotations

import errno
import os

import pytest

from treadle.base.humanize import n_bytes, n_weights, scaled
from treadle.errors import why


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.0K"),
        (292_800, "293K"),
        (999_600, "1.0M"),
        (110_000_000, "110M"),
        (1_100_048_384, "1.1B"),
        (8.03e9, "8.0B"),
        (405e9, "405B"),
        (1.04e12, "1040B"),
    ],
)
def test_weights_are_counted_as_models_are_named(number: float, text: str) -> None:
    assert n_weights(number) == text


def test_sizes() -> None:
    assert (n_bytes(512), n_bytes(1536), n_bytes(1 << 30)) == ("512 B", "1.5 KiB", "1.0 GiB")
    assert scaled(1.5e9, "B/s") == "1.5 GB/s"


@pytest.mark.parametrize("number", [errno.EACCES, errno.ELOOP, errno.ENOSPC, errno.EISDIR])
def test_why_a_file_is_refused(number: int) -> None:
    text = why(OSError(number, os.strerror(number), "some/path"))
    assert text
    assert "Errno" not in text
    assert "some/path" not in text


def test_why_a_name_is_refused() -> None:
    assert why(ValueError("embedded null byte")) == "its name holds a NUL byte"
    assert why(OSError("what a library says")) == "what a library says"
