"""Keys of rope tables: dims, base, scaling and factors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from treadle.errors import FileError, UnsupportedError
from treadle.files.metadata import SIZE_MAX
from treadle.models.archs import LOCAL_BASE, ROPE_HALVED, YARN_TRUNCATE
from treadle.models.rope import DYNAMIC, FACTORS, LONG, SHORT, Rope

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF
    from treadle.models.keys import ArchMetadata

ROPE_SCALINGS = ("none", "linear", "yarn", "llama3", "longrope")


def read_ropes(keys: ArchMetadata, head_dim: int, n_ctx_train: int) -> tuple[Rope, ...]:
    """Return the rope table of all layers; if layers with a window have a base of their own, return
    the table of the other layers, then that of those with a window. Scaling (linear, YaRN, factors)
    applies to the first table only, since layers with a window never see more tokens than in
    training.

    Raises FileError for keys out of range or missing factors, UnsupportedError for an unknown type
    of scaling.
    """
    most = rope_dims = keys.integer("rope.dimension_count", head_dim, lo=2, hi=head_dim)
    if halved := keys.flag(ROPE_HALVED, False):
        rope_dims //= 2
    if rope_dims % 2:
        keys.fail("rope.dimension_count", f"{rope_dims} is odd", "pairs")
    scaling = keys.text("rope.scaling.type", "linear")
    if scaling not in ROPE_SCALINGS:
        raise UnsupportedError(
            f"{keys.gguf.path}: {keys.arch}.rope.scaling.type {scaling!r}: "
            f"treadle supports {', '.join(ROPE_SCALINGS)}"
        )
    factor = keys.number("rope.scaling.factor", 0.0, lo=0.0)
    factor = factor or keys.number("rope.scale_linear", 0.0, lo=0.0) or 1.0  # the key's old name
    factors, short, long = (_rope_factors(keys.gguf, name) for name in (FACTORS, SHORT, LONG))
    if scaling == "llama3" and factors is None:
        keys.fail("rope.scaling.type", "is llama3, but its factors are missing", FACTORS)
    if (short is None) != (long is None) or (scaling == "longrope" and long is None):
        keys.fail("rope.scaling.type", f"is {scaling}", f"both {SHORT} and {LONG}")
    if scaling in ("none", "llama3", "longrope") or (scaling == "linear" and factor == 1.0):
        scaling = "none"
        factor = 1.0
    n_factors = most // 2 if halved and factors else 0
    if factors and halved:
        factors = factors[: rope_dims // 2]
    ext_factor = keys.number("rope.scaling.yarn_ext_factor", -1.0, lo=-1.0, hi=1.0)
    base = keys.number("rope.freq_base", 10000.0, lo=1.001)
    if alpha := keys.number("rope.scaling.alpha", 0.0, lo=0.0, hi=1e9):  # Hunyuan's
        base *= alpha ** (rope_dims / max(rope_dims - 2, 1))
    full = Rope(
        dims=rope_dims,
        base=base,
        scaling=scaling,
        scale=factor,
        attn_factor=keys.number("rope.scaling.attn_factor", 1.0, lo=0.0),
        factors=short or factors,
        n_factors=n_factors,
        long_factors=long,
        n_ctx_orig=keys.integer(
            "rope.scaling.original_context_length", n_ctx_train, lo=1, hi=1 << 31
        ),
        yarn_ext_factor=ext_factor if ext_factor >= 0.0 else 1.0,  # negative: not set
        yarn_beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0, lo=1e-3),
        yarn_beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0, lo=1e-3),
        yarn_truncate=keys.flag(YARN_TRUNCATE, True),
        yarn_log_multiplier=keys.number("rope.scaling.yarn_log_multiplier", 0.0, lo=0.0),
        dynamic=keys.gguf.metadata.get(DYNAMIC) is True,
    )
    if keys.get(LOCAL_BASE) is None:
        return (full,)
    head_dim = keys.integer("attention.key_length_swa", head_dim, lo=2, hi=SIZE_MAX)
    dims = keys.integer("rope.dimension_count_swa", min(most, head_dim), lo=2, hi=head_dim)
    if dims % 2:
        keys.fail("rope.dimension_count_swa", f"{dims} is odd", "pairs")
    own = keys.get(LOCAL_BASE) != 0  # 0 means the base of the others
    return full, Rope(dims, keys.number(LOCAL_BASE, lo=1.001) if own else full.base)


def _rope_factors(gguf: GGUF, name: str) -> tuple[float, ...] | None:
    tensor = gguf.tensors.get(name)
    if tensor is None:
        return None
    if tensor.format is None or tensor.format.block > 1:
        found = f"has ggml type {tensor.ggml_type}"
        raise FileError(found, path=gguf.path, where=tensor.name, expected="floats, such as F32")
    factors = tensor.format.dequantize_rows(tensor.data).astype(np.float64)
    if not bool(np.all(np.isfinite(factors) & (factors > 0.0))):
        found = "holds a factor that is not a positive number"
        raise FileError(found, path=gguf.path, where=tensor.name, offset=tensor.offset)
    return tuple(factors.tolist())
