"""Keys of recurrent layers: which layers have a state instead of keys and values, and its sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.files.metadata import SIZE_MAX
from treadle.models.config import Recurrence
from treadle.models.keys import N_LAYER_MAX

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.keys import ArchMetadata

RMS_EPS = "attention.layer_norm_rms_epsilon"
LAYER_EPS = "attention.layer_norm_epsilon"
FLAGS = "attention.recurrent_layers"
INTERVAL = "full_attention_interval"
PARTS_NORM = "ssm.dt_b_c_rms"
PARTS_EPS = "ssm.dt_b_c_rms_epsilon"  # treadle's own key
KDA_FLOOR = "kda.gate_lower_bound"  # of the logarithm of a decay
KDA_SAFE = "kda.safe_gate"
KDA_HEAD = "kda.head_dim"  # of keys and of values
N_CONV_MAX = 64


def read_heads(keys: ArchMetadata, arch: Arch, n: int) -> tuple[list[int], list[int]]:
    """Return for each of ``n`` layers the number of query heads, and of key/value heads; 0 for
    recurrent layers.

    Files with one head count for all layers mark recurrent layers by flags, or give the interval of
    layers with attention. Raises FileError for counts that do not divide.
    """
    least = int(not arch.state)
    n_head = list(keys.per_layer("attention.head_count", n, lo=least))
    n_head_kv = list(keys.per_layer("attention.head_count_kv", n, n_head, lo=least))
    flags = keys.get(FLAGS)
    interval = keys.integer(INTERVAL, 1, lo=1, hi=N_LAYER_MAX)
    if not arch.state or not isinstance(flags, Sequence) or isinstance(flags, (str, bytes)):
        flags = [bool(arch.state and (i + 1) % interval) for i in range(n)]
    if len(flags) != n or any(flag not in (0, 1) for flag in flags):
        keys.fail(FLAGS, f"has {len(flags)} entries", f"{n} flags")
    for i, (heads, heads_kv) in enumerate(zip(n_head, n_head_kv, strict=True)):
        if flags[i] or not heads_kv:
            n_head[i] = n_head_kv[i] = 0
        elif heads % heads_kv:
            keys.fail("attention.head_count_kv", f"{heads_kv} does not divide {heads} heads")
    return n_head, n_head_kv


def read_recurrence(keys: ArchMetadata, arch: Arch, n_embd: int) -> Recurrence | None:
    """Return the sizes of recurrent layers; None for architectures without such layers, or whose
    graph reads the sizes itself. Raises FileError for sizes out of range, or that do not divide.
    """
    if arch.state in ("", "linear", "wkv"):
        return None
    if arch.state == "shortconv":
        return Recurrence(keys.integer("shortconv.l_cache", lo=2, hi=N_CONV_MAX), n_embd)
    if arch.state in ("kda", "kda_signed", "kda_bounded", "kda_floored", "kda_whole"):
        n_head = keys.integer("attention.head_count", lo=1, hi=SIZE_MAX)
        size = keys.integer(KDA_HEAD, lo=1, hi=SIZE_MAX)
        return Recurrence(
            n_conv=keys.integer("ssm.conv_kernel", lo=2, hi=N_CONV_MAX),
            n_channels=3 * n_head * size,
            n_head=n_head,
            head_dim=size,
            n_state=size,
            n_group=n_head,
            norm_eps=read_norm_eps(keys, arch),
            floor=_floor(keys, arch),
            beta_most=2.0 if arch.state == "kda_signed" else 1.0,
        )
    n_inner = keys.integer("ssm.inner_size", lo=1, hi=SIZE_MAX)
    if arch.state == "mamba1":
        return Recurrence(
            n_conv=keys.integer("ssm.conv_kernel", lo=2, hi=N_CONV_MAX),
            n_channels=n_inner,
            n_head=n_inner,
            head_dim=1,
            n_state=keys.integer("ssm.state_size", lo=1, hi=SIZE_MAX),
            norm_eps=keys.number(PARTS_EPS, read_norm_eps(keys, arch), lo=0.0, hi=1.0),
            n_rank=keys.integer("ssm.time_step_rank", lo=1, hi=SIZE_MAX),
            normed=keys.flag(PARTS_NORM, False),
        )
    n_head = keys.integer("ssm.time_step_rank", lo=1, hi=SIZE_MAX)
    n_group = keys.integer("ssm.group_count", 1, lo=1, hi=SIZE_MAX)
    if n_inner % n_head:
        keys.fail("ssm.time_step_rank", f"{n_head} does not divide inner_size {n_inner}")
    if n_head % n_group:
        keys.fail("ssm.group_count", f"{n_group} does not divide {n_head} heads")
    n_state = keys.integer("ssm.state_size", lo=1, hi=SIZE_MAX)
    return Recurrence(
        n_conv=keys.integer("ssm.conv_kernel", lo=2, hi=N_CONV_MAX),
        n_channels=n_inner + 2 * n_group * n_state,
        n_head=n_head,
        head_dim=n_inner // n_head,
        n_state=n_state,
        n_group=n_group,
        norm_eps=read_norm_eps(keys, arch),
    )


def _floor(keys: ArchMetadata, arch: Arch) -> float:
    """Return the lower bound of the logarithm of decays in Kimi Delta Attention (below 0), 0.0 if
    there is none. Raises UnsupportedError if the file says that its decays are not bounded.
    """
    if arch.state in ("kda", "kda_signed") or (
        arch.state == "kda_whole" and not keys.has(KDA_FLOOR)
    ):
        return 0.0
    if not keys.flag(KDA_SAFE, True):
        keys.refuse(KDA_SAFE, "is false: treadle supports only decays with a lower bound")
    return keys.number(KDA_FLOOR, lo=-1e3, hi=-1e-3)


def with_norm(keys: ArchMetadata, arch: Arch) -> Arch:
    """Return the architecture. If its norm is ``told``, it is replaced by "rms" if the file has the
    key of RMS norm's epsilon, else by "layer".
    """
    if arch.norm != "told":
        return arch
    return replace(arch, norm="rms" if keys.has(RMS_EPS) else "layer")


def read_norm_eps(keys: ArchMetadata, arch: Arch) -> float:
    """Return the epsilon of the model's norms. If the file has only the key of the other kind of
    norm, its value is used: LayerNorm's for RMS norms (Nemotron-H), RMS norm's for LayerNorms
    (Phi's MoE).
    """
    own, other = (RMS_EPS, LAYER_EPS) if "rms" in arch.norm else (LAYER_EPS, RMS_EPS)
    return keys.number(own if keys.has(own) or not keys.has(other) else other, lo=0.0, hi=1.0)
