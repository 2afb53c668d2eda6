"""Comparison of two model files, tensor by tensor, for ``treadle inspect --diff``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.cli.metadata import described, written
from treadle.cli.ui.table import heading, print_table, shorten
from treadle.errors import TreadleError
from treadle.files.gguf import GGUF, GGUFArray, Tensor
from treadle.models.load import load_config

TASK_WEIGHTS = 1 << 20  # weights that a thread compares at a time
MISSING = "-"
Progress = Callable[[str, int, int], None]
Rows = npt.NDArray[np.intp]


def compare(a: GGUF, b: GGUF, n_threads: int, progress: Progress) -> dict[str, Any]:
    """Return all differences of two model files as a JSON object: metadata, presence of tensors,
    shapes, formats, weights. ``progress(stage, done, total)`` counts tensors.
    """
    order = order_of_b(a, b)
    names = [*a.tensors, *(name for name in b.tensors if name not in a.tensors)]
    rows = []
    with ThreadPoolExecutor(n_threads, "diff") as pool:
        for i, name in enumerate(names):
            progress("comparing", i, len(names))
            rows.append(compare_tensors(a.tensors.get(name), b.tensors.get(name), pool, order))
    progress("comparing", len(names), len(names))
    return {
        "a": str(a.path),
        "b": str(b.path),
        "n_bytes": [a.n_bytes, b.n_bytes],
        "metadata": compare_metadata(a, b),
        "tensors": rows,
        "identical": all(row["identical"] for row in rows) and not compare_metadata(a, b),
    }


def order_of_b(a: GGUF, b: GGUF) -> Callable[[str, int], Rows | None]:
    """Return how B's rows of query and key tensors are ordered, if RoPE pairs other rows in A.

    The result is a function of a tensor's name and its number of rows. It returns for each row of A
    the index of the same row in B, or None if the order is the same.
    """
    try:
        config, other = load_config(a), load_config(b)
    except TreadleError:  # not a supported model: its heads are unknown
        return lambda name, n: None
    if config.arch.rope == other.arch.rope:
        return lambda name, n: None
    heads = {
        f"blk.{i}.attn_{which}.{kind}": n
        for i, layer in enumerate(config.layers)
        for which, n in (("q", layer.n_head), ("k", layer.n_head_kv))
        for kind in ("weight", "bias")
    }

    def order(name: str, n: int) -> Rows | None:
        n_head = heads.get(name)
        if n_head is None or n % (2 * n_head):
            return None
        rows = np.arange(n).reshape(n_head, -1)
        if config.arch.rope == "neox":  # A pairs the halves of a head, B neighbouring rows
            return rows.reshape(n_head, -1, 2).swapaxes(1, 2).ravel()
        return rows.reshape(n_head, 2, -1).swapaxes(1, 2).ravel()

    return order


def compare_metadata(a: GGUF, b: GGUF) -> list[dict[str, Any]]:
    """Return an object (``key``, ``a``, ``b``) for each key whose value differs between the two
    files or that one of them lacks (None in its place).
    """
    out = []
    for key in [*a.metadata, *(key for key in b.metadata if key not in a.metadata)]:
        if content(a.metadata.get(key)) != content(b.metadata.get(key)):
            out.append(
                {
                    "key": key,
                    "a": described(a.metadata.get(key)),
                    "b": described(b.metadata.get(key)),
                }
            )
    return out


def content(value: object) -> object:
    """Return a metadata value in comparable form: arrays as bytes."""
    if isinstance(value, GGUFArray):
        return value.type, len(value), value.payload.tobytes()
    return type(value), repr(value)  # by repr a NaN equals itself


def compare_tensors(
    a: Tensor | None,
    b: Tensor | None,
    pool: ThreadPoolExecutor,
    order_of: Callable[[str, int], Rows | None] = lambda name, n: None,
) -> dict[str, Any]:
    """Compare the tensor ``a`` of file A with ``b`` of file B, None where a file lacks it. Return a
    JSON object: name, shapes, formats, whether they are identical, and three differences of the
    weights: ``rmse``, ``relative`` (``rmse`` over the root mean square of A's weights) and
    ``largest``, None if they cannot be compared.

    ``order_of``: the function that ``order_of_b`` returns. ``pool``: threads for the comparison.
    """
    some = a or b
    assert some is not None
    row: dict[str, Any] = {
        "name": some.name,
        "shapes": [a and list(a.shape), b and list(b.shape)],
        "formats": [a and a.type_name, b and b.type_name],
        "identical": False,
        "rmse": None,
        "relative": None,
        "largest": None,
    }
    if a is None or b is None or a.shape != b.shape:
        return row
    order = order_of(a.name, a.shape[0]) if a.shape else None
    if a.type_name == b.type_name and same(a, b, order):
        return row | {"identical": True, "rmse": 0.0, "relative": 0.0, "largest": 0.0}
    if a.format is None or b.format is None:
        return row
    return row | errors(a, b, pool, order)


def same(a: Tensor, b: Tensor, order: Rows | None) -> bool:
    """Return whether the bytes of two tensors are equal. ``order``: index in B of each row of A,
    None for the same.
    """
    if order is None:
        return all(map(np.array_equal, a.arrays, b.arrays))
    n = len(order)
    return np.array_equal(a.data.reshape(n, -1), b.data.reshape(n, -1)[order])


def errors(
    a: Tensor, b: Tensor, pool: ThreadPoolExecutor, order: Rows | None
) -> dict[str, float | None]:
    """Return ``rmse``, ``relative`` and ``largest`` (see ``compare_tensors``) of B's weights
    against A's, computed in strips of rows; None for a value that is not finite. ``order``: as of
    ``same``.
    """
    assert a.format is not None
    assert b.format is not None
    k = a.shape[-1] if len(a.shape) > 1 or (a.shape and order is None) else 1
    of_a, of_b = (t.data.reshape(-1, t.format.row_bytes(k)) for t in (a, b) if t.format)
    if order is not None:
        of_b = of_b[order]
    read_a = a.format.dequantize_rows
    read_b = b.format.dequantize_rows
    step = max(1, TASK_WEIGHTS // max(k, 1))

    def strip(at: int) -> tuple[float, float, float]:
        x = read_a(of_a[at : at + step]).astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            d = read_b(of_b[at : at + step]) - x
            return float((d * d).sum()), float((x * x).sum()), float(np.abs(d).max(initial=0.0))

    parts = np.array(list(pool.map(strip, range(0, len(of_a), step))) or [(0.0, 0.0, 0.0)])
    square = parts[:, 0].sum()
    size = parts[:, 1].sum()
    largest = parts[:, 2].max()
    n = max(len(of_a) * k, 1)
    found = {
        "rmse": np.sqrt(square / n),
        "relative": np.sqrt(square / size) if size else (0.0 if not square else np.inf),
        "largest": largest,
    }
    return {key: float(value) if np.isfinite(value) else None for key, value in found.items()}


def print_diff(report: Mapping[str, Any]) -> None:
    """Print the report for people; identical tensors are only counted."""
    heading(f"{report['a']} (A) and {report['b']} (B)")
    if report["metadata"]:
        print_table(
            ["key", "A", "B"],
            [(row["key"], *(shown(row[side]) for side in "ab")) for row in report["metadata"]],
        )
    else:
        print("the same metadata")
    print()
    rows = [row for row in report["tensors"] if not row["identical"]]
    if rows:
        print_table(
            ["tensor", "shape", "A", "B", "RMSE ", "relative ", "largest "],
            [
                (
                    row["name"],
                    shapes(row),
                    *(fmt or MISSING for fmt in row["formats"]),
                    *(number(row[key]) for key in ("rmse", "relative", "largest")),
                )
                for row in rows
            ],
        )
        print()
    same = len(report["tensors"]) - len(rows)
    print(f"{same} of {len(report['tensors'])} tensors are identical")


def shown(value: object) -> str:
    """Format a metadata value for a column."""
    return MISSING if value is None else shorten(written(value), 80)


def shapes(row: Mapping[str, Any]) -> str:
    """Format a tensor's shape, or both files' shapes if they differ; ``row``: as of
    ``compare_tensors``.
    """
    texts = ["×".join(map(str, shape)) for shape in row["shapes"] if shape is not None]
    return " / ".join(dict.fromkeys(texts))


def number(value: float | None) -> str:
    """Format a number with four digits."""
    return MISSING if value is None else f"{value:.3e}"
