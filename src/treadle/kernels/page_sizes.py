"""Sizes of KV-cache pages, and of the formats of keys and values. Without the code that reads and
writes them (``attention/page_layout.py``), so that a run imports little.
"""

from __future__ import annotations

from treadle.base.fast_classes import dataclass
from treadle.errors import UnsupportedError
from treadle.kernels.run_state import PAGE

BLOCK = 32  # dims of a token that share a scale


@dataclass(frozen=True)
class KVSizes:
    """The sizes of a storage format of keys or values."""

    name: str
    n_bytes: int  # bytes of a value, or of two if packed
    scaled: bool
    packed: bool = False  # a byte has two dims of a block, half a block apart
    fifth: bool = False  # codes have a fifth bit, in words of a block's 32 dims
    minimum: bool = False  # ``d * code + m``

    def parts(self, dims: int) -> list[tuple[int, int]]:
        """Return the arrays that a token of ``dims`` dims has, each as (number of elements, bytes
        of one): codes, fifth bits, scales, minimums, as far as the format has them.
        """
        made = [(dims // (2 if self.packed else 1), self.n_bytes)]
        made += [(dims // 8, 1)] if self.fifth else []
        return made + [(dims // BLOCK, 4)] * (self.scaled + self.minimum)

    def offsets(self, dims: int, rows: int) -> list[int]:
        """Return the byte offset of each of these arrays of ``rows`` tokens, one array after
        another, then that of the end.
        """
        made = [0]
        for n, size in self.parts(dims):
            made.append(made[-1] + rows * n * size)
        return made


KV_SIZES = {
    row.name: row
    for row in (
        KVSizes("f16", 2, False),
        KVSizes("bf16", 2, False),
        KVSizes("f32", 4, False),
        KVSizes("q8_0", 1, True),
        KVSizes("q5_1", 1, True, packed=True, fifth=True, minimum=True),
        KVSizes("q5_0", 1, True, packed=True, fifth=True),
        KVSizes("iq4_nl", 1, True, packed=True),
        KVSizes("q4_0", 1, True, packed=True),
    )
}


def kv_of(keys: str, values: str) -> str:
    """Return the name of the pair of formats ``keys`` and ``values``: ``KEYS-VALUES``, or one name
    if both are the same.
    """
    return keys if keys == values else f"{keys}-{values}"


def kv_sizes(kv: str) -> tuple[KVSizes, KVSizes]:
    """Return the sizes of the formats of keys and of values that ``kv`` names: one name, or
    ``KEYS-VALUES``. Raises UnsupportedError for an unknown name.
    """
    keys, dash, values = kv.partition("-")
    for name in (keys, values) if dash else (keys,):
        if name not in KV_SIZES:
            raise UnsupportedError(
                f"unknown KV format {name!r}; choose one of {', '.join(KV_SIZES)}, or two of "
                "them, KEYS-VALUES"
            )
    return KV_SIZES[keys], KV_SIZES[values if dash else keys]


def rows_of(unit: int) -> int:
    """Return the number of rows in a page if ``unit`` consecutive tokens share one row. A unit
    longer than a page has one row, in the page of its last token. 0 if ``unit`` is 0: tokens have
    keys and values of their own.
    """
    return PAGE // min(unit, PAGE) if unit else 0


@dataclass(frozen=True)
class PageSizes:
    """Sizes of one layer's part of a page, in bytes. Raises UnsupportedError if head dims are no
    multiple of 32 and a format needs that.
    """

    kv: str  # one format, or two: KEYS-VALUES
    n_head_kv: int
    head_dim: int
    head_dim_v: int
    latent: bool = False  # a value is its key's first dims, not stored separately
    rows: int = 0  # rows of keys, side by side (``PoolSpec.unit``); 0: PAGE, transposed

    def __post_init__(self) -> None:
        keys, values = kv_sizes(self.kv)
        if self.latent:
            values = keys
        for fmt, dims in ((keys, self.head_dim), (values, self.head_dim_v)):
            if fmt.scaled and dims % BLOCK:
                *others, last = (row.name for row in KV_SIZES.values() if not row.scaled)
                raise UnsupportedError(
                    f"KV format {fmt.name} needs head dims that are a multiple of {BLOCK}, but "
                    f"this model has {dims}; use {', '.join(others)} or {last}"
                )

    @property
    def v_off(self) -> int:
        """Byte offset of the values in a head's part."""
        return kv_sizes(self.kv)[0].offsets(self.head_dim, self.rows or PAGE)[-1]

    @property
    def head_bytes(self) -> int:
        if self.latent:
            return self.v_off
        return self.v_off + kv_sizes(self.kv)[1].offsets(self.head_dim_v, PAGE)[-1]

    @property
    def layer_bytes(self) -> int:
        return self.n_head_kv * self.head_bytes
