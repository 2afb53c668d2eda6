"""Kinds of mixers, FFNs, norms and pooling of a layer, by a file's keys and tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from treadle.errors import UnsupportedError
from treadle.models.archs import DISTANCES, Arch
from treadle.models.ffns import FUSED_EXPERTS, LATENT_EXPERTS, PLAIN_EXPERTS
from treadle.models.ffns.gated import FUSED as FUSED_FFN
from treadle.models.ffns.gated import FUSED_UP_FIRST
from treadle.models.graphs.experts import LATENT_SIZE, has_experts
from treadle.models.keys import N_LAYER_MAX, ArchMetadata
from treadle.models.mixers.names import FUSED as FUSED_MIXER
from treadle.models.mixers.names import (
    HEAD_NORMS,
    INDEX_SHARED,
    INDEXED,
    OWN_DISTANCES,
    SIGMOID_FUSED,
    SIGMOID_HEADS,
    SINKS,
    SINKS_FUSED,
    SOFTPLUS,
    SOFTPLUS_HEADS,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from treadle.files.tensor import Tensor

FFN_STEM = "ffn_norm"
ATTENTION_STEM = "post_attention_norm"
FIRST_STEM = "attn_norm"
SECOND_STEM = "attn_norm_2"
POOLINGS = {0: "none", 2: "first", 3: "last"}  # llama.cpp's numbers; all others: the mean
RANK = 4
Q_NORM = "attn_q_norm.weight"
Q_RANK = "attention.q_lora_rank"
LATENT = "latent"
KV_B = "_kv_b"  # one matrix makes keys and values
OWN_NORMS = "post_ffw_norm", "layer_output_norm"  # of an FFN, which then needs no input norm
INDEXER_TYPES = "attention.indexer.types"  # a flag for each layer: it has one of its own
GATE_UP_EXPS = "ffn_gate_up_exps.weight"


def pooling_of(keys: ArchMetadata, arch: Arch) -> str:
    """Return the pooling of hidden states: "none", "first", "last" or "mean" (``Config.pooling``).
    Models that score pairs of texts (rerankers) use the first or the last state: those whose
    pooling type is "rank", or, if the file has no type, those whose head has a single row.
    """
    scores = keys.n_rows("cls.output.weight") == 1
    kind = keys.integer("pooling_type", RANK if scores else 1, lo=0, hi=RANK)
    if kind == RANK:
        usual = 2 if arch.graph == "encoder" else 3
        kind = keys.integer("classifier.pooling_type", usual, lo=1, hi=3)
    return POOLINGS.get(kind, "mean")


def mixer_of(
    keys: ArchMetadata, arch: Arch, i: int, n_head: int, n_head_kv: int, local: bool = False
) -> str:
    """Return the mixer of layer ``i``, a name in MIXERS: the architecture's, or a variant of it
    that the file's tensors and keys show (fused q, k and v; q/k norm weights or gate values for
    each head; the layer's own relative bias; queries by a single matrix).

    local: whether the layer has a window: only such layers have sinks.
    """
    if not n_head_kv:
        return arch.state
    if arch.mixer == SOFTPLUS and keys.n_rows(f"blk.{i}.attn_gate.weight") == n_head:
        return SOFTPLUS_HEADS
    if arch.mixer == INDEXED:
        return INDEXED if has_indexer(keys, i) else INDEX_SHARED
    fused = f"blk.{i}.attn_qkv.weight" in keys.gguf.tensors
    if arch.mixer == SIGMOID_HEADS and fused:
        return SIGMOID_FUSED
    if arch.mixer.startswith(LATENT):
        kind = LATENT if keys.integer(Q_RANK, 0, lo=0) else "latent_q"
        return kind + KV_B * has_kv_b(keys, arch, (i,))
    if arch.mixer not in ("attention", SINKS):
        return arch.mixer
    if i and arch.needs >= DISTANCES and f"blk.{i}.attn_rel_b.weight" in keys.gguf.tensors:
        return OWN_DISTANCES
    sinks = arch.mixer == SINKS and local
    if fused:
        return SINKS_FUSED if sinks else FUSED_MIXER
    if arch.mixer == SINKS:
        return SINKS if sinks else "attention"
    norm = keys.gguf.tensors.get(f"blk.{i}.{Q_NORM}")
    return HEAD_NORMS if norm is not None and len(norm.shape) == 2 else arch.mixer


def has_indexer(keys: ArchMetadata, i: int) -> bool:
    """Return whether layer ``i`` has an indexer of its own; if not, it attends to the keys that the
    last indexer before it has chosen.
    """
    n_block = keys.integer("block_count", lo=1, hi=N_LAYER_MAX)
    kinds = keys.get(INDEXER_TYPES)
    n = len(kinds) if isinstance(kinds, Sequence) else n_block  # files may leave out further layers
    return i >= n or keys.flags(INDEXER_TYPES, n, default=True)[i]


def has_kv_b(keys: ArchMetadata, arch: Arch, layers: Iterable[int]) -> bool:
    """Return whether the latent attention of one of ``layers`` has one matrix for keys and values:
    in some architectures always, and in the others in files from before the spring of 2025.
    """
    names = (f"blk.{i}.attn{KV_B}.weight" for i in layers)
    return arch.mixer.endswith(KV_B) or any(name in keys.gguf.tensors for name in names)


def ffn_of(keys: ArchMetadata, arch: Arch, i: int, n_ff: int) -> str:
    """Return the FFN of layer ``i``, a name in FFNS: experts, gated (perhaps with gate and up
    fused), or plain; "" if its width ``n_ff`` is 0. Raises UnsupportedError for AWQ activation
    scales.
    """
    if not n_ff:
        return ""
    if (name := f"blk.{i}.ffn_act.scales") in keys.gguf.tensors:
        what = "AWQ activation scales are not supported"
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
    # Jina's BERT for code has the opposite order of its other models, and no key for it.
    return FUSED_UP_FIRST if f"blk.{i}.{SECOND_STEM}.weight" in keys.gguf.tensors else FUSED_FFN


def has_wide_norm(keys: ArchMetadata, i: int, mixer: str, n_q: int, head_dim: int) -> bool:
    """Return whether the q/k norms of layer ``i`` span all heads together (``n_q`` values) and not
    each head's ``head_dim`` values. Raises UnsupportedError for separate weights for each head in a
    ``mixer`` that does not support them.
    """
    name = f"blk.{i}.{Q_NORM}"
    norm = keys.gguf.tensors.get(name)
    if norm is None or mixer == HEAD_NORMS:
        return False
    if len(norm.shape) == 2:
        raise UnsupportedError(
            f"{keys.gguf.path}: {name}: separate weights for each head: treadle supports q/k "
            "norms shared by all heads, or over all heads together, in this architecture"
        )
    return norm.shape == (n_q,) and n_q != head_dim


def ffn_norm_of(keys: ArchMetadata, arch: Arch) -> str:
    """Return the stem of the norm before the FFN; "" if the FFN reads the same input as the mixer.

    ``post_attention_norm`` is Gemma's norm after attention, but in files without another norm it is
    the one before the FFN. Falcon 40B has two norms before its parallel halves: ``attn_norm`` is
    the FFN's, and attention has ``attn_norm_2``.
    """
    tensors: Mapping[str, Tensor] = keys.gguf.tensors
    found = {
        stem
        for stem in (FFN_STEM, ATTENTION_STEM, *OWN_NORMS)
        if f"blk.0.{stem}.weight" in tensors or f"{stem}.weight" in arch.needs
    }
    if arch.norm in ("bare", "bare_rms"):
        return FFN_STEM
    if f"{FFN_STEM}.weight" not in arch.lacks or found & {FFN_STEM, *OWN_NORMS}:
        return FFN_STEM
    if {f"blk.0.{FIRST_STEM}.weight", f"blk.0.{SECOND_STEM}.weight"} <= tensors.keys():
        return FIRST_STEM
    return ATTENTION_STEM if ATTENTION_STEM in found else ""
