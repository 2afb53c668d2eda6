"""What kind each layer is of: its window, its rope, and what its tensors say of its halves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.errors import UnsupportedError
from treadle.models.archs import DISTANCES, PATTERN, ROPE_PATTERN, WINDOW, Arch
from treadle.models.ffns import FUSED_EXPERTS, LATENT_EXPERTS, PLAIN_EXPERTS
from treadle.models.ffns.gated import FUSED as FUSED_FFN
from treadle.models.ffns.gated import FUSED_UP_FIRST
from treadle.models.graphs.experts import LATENT_SIZE, has_experts
from treadle.models.keys import N_LAYER_MAX, Keys
from treadle.models.mixers.attention import FUSED as FUSED_MIXER
from treadle.models.mixers.attention import (
    HEAD_NORMS,
    OWN_DISTANCES,
    SINKS,
    SINKS_FUSED,
    SOFTPLUS,
    SOFTPLUS_HEADS,
)
from treadle.models.rope import Rope, read_ropes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from treadle.files.tensor import Tensor

FFN_STEM, ATTENTION_STEM = "ffn_norm", "post_attention_norm"
FIRST_STEM, SECOND_STEM = "attn_norm", "attn_norm_2"
POOLINGS = {2: "first", 3: "last"}  # llama.cpp's numbers; all others: the mean
RANK = 4
Q_NORM = "attn_q_norm.weight"
Q_RANK = "attention.q_lora_rank"
LATENT, KV_B = "latent", "_kv_b"  # one matrix makes keys and values
OWN_NORMS = "post_ffw_norm", "layer_output_norm"  # of an FFN that need not have one before it
GATE_UP_EXPS = "ffn_gate_up_exps.weight"
NOPE_PERIOD = 4  # layers, of which the last does not turn, in archs with ``nope="fourth"``


def read_windows(keys: Keys, n_layer: int, n_block: int) -> tuple[int, tuple[bool, ...]]:
    """The window, and which layers have it: the key of the pattern is a period, of which the last
    sees everything (the first, if it is negative), or one flag per layer, perhaps of those too that
    predict further tokens. Without that key no layer has one, as in llama.cpp: Qwen2 files carry a
    window that the model does not use.
    """
    flags = keys.get(PATTERN)
    # Of a pattern without a window nothing says how far those layers see.
    window = keys.integer(WINDOW, 0 if flags is None else None, lo=0, hi=1 << 31)
    if not window or flags is None:
        return 0, (False,) * n_layer
    if isinstance(flags, Sequence) and not isinstance(flags, (str, bytes)):
        n_flags = n_block if len(flags) == n_block else n_layer
        return window, keys.flags(PATTERN, n_flags, False)[:n_layer]
    period = keys.integer(PATTERN, lo=-N_LAYER_MAX, hi=N_LAYER_MAX)
    return window, tuple(by_period(period, n_layer))


def by_period(period: int, n_layer: int) -> list[bool]:
    """Which layers have the window where the last of each period sees everything, or the first if
    the period is negative; all of them if it is 0.
    """
    if period < 0:
        return [i % -period > 0 for i in range(n_layer)]
    return [period == 0 or i % period < period - 1 for i in range(n_layer)]


def read_tables(
    keys: Keys,
    arch: Arch,
    window: int,
    local: Sequence[bool],
    head_dim: int,
    n_ctx_train: int,
) -> tuple[tuple[Rope, ...], tuple[int | None, ...]]:
    """The tables of the rope, and which of them each layer has. Layers with a window have one of
    their own where there is a base for it. ``window`` is the file's, even where no layer has it.
    """
    told = arch.nope == "told" and not keys.flag("rope.scaling.finetuned", True)
    if arch.rope == "none" or told:
        return (), (None,) * len(local)
    ropes = read_ropes(keys, head_dim, n_ctx_train)
    own = len(ropes) > 1 and any(local)
    tables: list[int | None] = [int(own and here) for here in local]
    turned = by_period(NOPE_PERIOD, len(local))
    flags = keys.flags(ROPE_PATTERN, len(local), True)
    for i, here in enumerate(local):
        if not flags[i]:
            tables[i] = None
        if arch.nope == "fourth" and not turned[i]:
            tables[i] = None
        wide = window and not here
        if wide and (arch.nope == "global" or (arch.nope == "sparse" and has_experts(keys, i))):
            tables[i] = None
    return ropes[: 1 + own], tuple(tables)


def read_temperature(keys: Keys, ropes: tuple[Rope, ...]) -> tuple[Rope, ...]:
    """The same, and a table of queries that grow with their position, where the file asks for it:
    the temperature of attention, as Ministral 3 has it.
    """
    temperature = keys.number("attention.temperature_scale", 0.0, lo=0.0)
    if not temperature:
        return ropes
    if len(ropes) != 1:
        keys.refuse("attention.temperature_scale", "treadle has it with one rope for all layers")
    return *ropes, replace(ropes[0], temperature=temperature)


def pooling_of(keys: Keys, arch: Arch) -> str:
    """How a text's states become one vector. What scores pairs ("rank") looks at one of them, also
    where llama.cpp's converter has not said that it scores.
    """
    scores = keys.n_rows("cls.output.weight") == 1
    kind = keys.integer("pooling_type", RANK if scores else 1, lo=0, hi=RANK)
    if kind == RANK:
        usual = 2 if arch.graph == "encoder" else 3
        kind = keys.integer("classifier.pooling_type", usual, lo=1, hi=3)
    return POOLINGS.get(kind, "mean")


def mixer_of(
    keys: Keys, arch: Arch, i: int, n_head: int, n_head_kv: int, local: bool = False
) -> str:
    """That of the architecture; or whether queries, keys and values are one matrix, their norms
    have weights for each head, a gate one value for each, distances numbers of the layer's own,
    or queries are made of the states at once. Sinks are of layers with a window, ``local``.
    """
    if not n_head_kv:
        return arch.state
    if arch.mixer == SOFTPLUS and keys.n_rows(f"blk.{i}.attn_gate.weight") == n_head:
        return SOFTPLUS_HEADS
    if arch.mixer.startswith(LATENT):
        kind = LATENT if keys.integer(Q_RANK, 0, lo=0) else "latent_q"
        return kind + KV_B * has_kv_b(keys, arch)
    if arch.mixer not in ("attention", SINKS):
        return arch.mixer
    if i and arch.needs >= DISTANCES and f"blk.{i}.attn_rel_b.weight" in keys.gguf.tensors:
        return OWN_DISTANCES
    sinks = arch.mixer == SINKS and local
    if f"blk.{i}.attn_qkv.weight" in keys.gguf.tensors:
        return SINKS_FUSED if sinks else FUSED_MIXER
    if arch.mixer == SINKS:
        return SINKS if sinks else "attention"
    norm = keys.gguf.tensors.get(f"blk.{i}.{Q_NORM}")
    return HEAD_NORMS if norm is not None and len(norm.shape) == 2 else arch.mixer


def has_kv_b(keys: Keys, arch: Arch) -> bool:
    """Whether latent attention has one matrix that makes keys and values: in some architectures,
    and in files of the others that are older than the spring of 2025.
    """
    return arch.mixer.endswith(KV_B) or f"blk.0.attn{KV_B}.weight" in keys.gguf.tensors


def ffn_of(keys: Keys, arch: Arch, i: int, n_ff: int) -> str:
    """Whether there are experts, or a gate, and whether it is one matrix with what it gates."""
    if not n_ff:
        return ""
    if (name := f"blk.{i}.ffn_act.scales") in keys.gguf.tensors:
        what = "AWQ's scales of activations, by which treadle does not divide"
        raise UnsupportedError(f"{keys.gguf.path}: {name}: {what}")
    if has_experts(keys, i) and not arch.gated:
        return LATENT_EXPERTS if keys.integer(LATENT_SIZE, 0, lo=0) else PLAIN_EXPERTS
    if has_experts(keys, i):
        return FUSED_EXPERTS if f"blk.{i}.{GATE_UP_EXPS}" in keys.gguf.tensors else "experts"
    if not arch.gated:
        return "plain"
    fused = f"blk.{i}.ffn_gate.weight" not in keys.gguf.tensors
    if not fused or keys.n_rows(f"blk.{i}.ffn_up.weight") != 2 * n_ff:
        return "gated"
    # Jina's BERT for code has them the other way round than its others, and no key says which.
    return FUSED_UP_FIRST if f"blk.{i}.{SECOND_STEM}.weight" in keys.gguf.tensors else FUSED_FFN


def has_wide_norm(keys: Keys, i: int, mixer: str, n_q: int, head_dim: int) -> bool:
    """Whether q/k norms are of all heads together."""
    name = f"blk.{i}.{Q_NORM}"
    norm = keys.gguf.tensors.get(name)
    if norm is None or mixer == HEAD_NORMS:
        return False
    if len(norm.shape) == 2:
        raise UnsupportedError(
            f"{keys.gguf.path}: {name}: weights of its own for each head: treadle has q/k norms "
            "that all heads share, or of all heads together, in this architecture"
        )
    return norm.shape == (n_q,) and n_q != head_dim


def ffn_norm_of(keys: Keys, arch: Arch) -> str:
    """What the norm before the FFN is called; "" where it reads what the mixer reads.

    ``post_attention_norm`` is Gemma's norm behind the product, but the one before the FFN in files
    that have no other. Falcon 40B has two norms before halves side by side: ``attn_norm`` is the
    FFN's, and attention has ``attn_norm_2``.
    """
    tensors: Mapping[str, Tensor] = keys.gguf.tensors
    found = {
        stem
        for stem in (FFN_STEM, ATTENTION_STEM, *OWN_NORMS)
        if f"blk.0.{stem}.weight" in tensors or f"{stem}.weight" in arch.needs
    }
    if arch.norm == "bare":
        return FFN_STEM
    if f"{FFN_STEM}.weight" not in arch.lacks or found & {FFN_STEM, *OWN_NORMS}:
        return FFN_STEM
    if {f"blk.0.{FIRST_STEM}.weight", f"blk.0.{SECOND_STEM}.weight"} <= tensors.keys():
        return FIRST_STEM
    return ATTENTION_STEM if ATTENTION_STEM in found else ""
