"""Keys of latent attention: sizes, rope and scale."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.files.metadata import SIZE_MAX
from treadle.models.archs import TEMPERATURE_LENGTH
from treadle.models.config import Latent
from treadle.models.graphs.kinds import Q_RANK, has_kv_b
from treadle.models.keys import N_LAYER_MAX
from treadle.models.rope import scale_only

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.keys import ArchMetadata
    from treadle.models.rope import Rope

KV_RANK = "attention.kv_lora_rank"
KEY = "attention.key_length"
VALUE = "attention.value_length"
NORM_EPS = 1e-6  # of the norms of both ranks, as in transformers; independent of other norms
# Rows of a head's matrix must be a multiple of it, so that no tile spans two heads.
HEAD_ROWS = 16
LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"


def check_head_rows(keys: ArchMetadata, key: str, size: int) -> None:
    """Raise UnsupportedError if ``size``, the value of ``key`` and number of rows of a head's
    matrix, is no multiple of HEAD_ROWS.
    """
    if size % HEAD_ROWS:
        keys.refuse(key, f"{size}: expected a multiple of {HEAD_ROWS}")


def read_latent(
    keys: ArchMetadata,
    arch: Arch,
    ropes: tuple[Rope, ...],
    n_head_kv: int,
    head_dim: int,
    head_dim_v: int,
) -> tuple[Latent, tuple[Rope, ...], float]:
    """Return the sizes of latent attention, the rope tables (``ropes``, changed where latent
    attention needs it), and the scale of scores.

    ``head_dim`` and ``head_dim_v``: lengths of keys and values by the file. In old files, where one
    matrix makes keys and values, they are those of a head; otherwise they are the cached row's, and
    other keys have the heads' sizes.

    Raises FileError for sizes that do not match, UnsupportedError for heads whose rows are not a
    multiple of HEAD_ROWS.
    """
    kv_rank = keys.integer(KV_RANK, lo=1, hi=SIZE_MAX)
    own = "_mla"
    n_block = keys.integer("block_count", lo=1, hi=N_LAYER_MAX)
    if has_kv_b(keys, arch, range(n_block)) and not keys.has(f"{KEY}{own}"):
        own = ""
    n_q = keys.integer(f"{KEY}{own}", lo=1, hi=SIZE_MAX)
    n_rope = keys.integer("rope.dimension_count", lo=0 if arch.rope == "none" else 2, hi=n_q - 1)
    for key, found, expected in (
        ()
        if not own
        else (
            ("attention.head_count_kv", n_head_kv, 1),
            (VALUE, head_dim_v, kv_rank),
            (KEY, head_dim, kv_rank + n_rope),
        )
    ):
        if found != expected:
            keys.fail(key, f"is {found}", f"{expected}: one row shared by all heads")
    n_v = keys.integer(f"{VALUE}{own}", None if own else head_dim_v, lo=1, hi=SIZE_MAX)
    for key, size in ((KV_RANK, kv_rank), (f"{VALUE}{own}", n_v)):
        check_head_rows(keys, key, size)
    latent = Latent(
        n_q_rank=keys.integer(Q_RANK, 0, lo=0, hi=SIZE_MAX),
        n_kv_rank=kv_rank,
        n_nope=n_q - n_rope,
        n_rope=n_rope,
        n_v=n_v,
        norm_eps=NORM_EPS,
    )
    if len(ropes) > 1:  # the temperature scales whole queries: most of their dims have no rope
        plain, grown = ropes
        every = keys.integer(TEMPERATURE_LENGTH, 0, lo=0, hi=1 << 31) or plain.n_ctx_orig
        ropes = plain, scale_only(grown.temperature, every)
    scale = 1.0 / math.sqrt(n_q)
    multiplier = keys.number(LOG_MULTIPLIER, 0.0, lo=0.0)
    if not (multiplier and ropes) or ropes[0].scaling != "yarn":
        return latent, ropes, scale
    # YaRN's factor is in the scale, squared, and not in cosines. The key is a tenth of its value in
    # other architectures' files.
    factor = 1.0 + multiplier * math.log(max(1.0, ropes[0].scale))
    return latent, (replace(ropes[0], yarn_log_multiplier=1.0), *ropes[1:]), scale * factor**2
