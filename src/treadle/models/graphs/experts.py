"""Keys of experts: which layers have them, their number and sizes, and how the router weighs
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.files.metadata import SIZE_MAX
from treadle.models.archs import (
    EXPERTS_GATING,
    EXPERTS_JITTER,
    EXPERTS_MEAN,
    EXPERTS_ROUTED,
    LEADING_DENSE,
)
from treadle.models.config import Experts
from treadle.models.graphs.limits import LIMIT, activation_of

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.keys import ArchMetadata

ROUTER = "ffn_gate_inp.weight"
BY_TENSORS = -1  # as LEADING_DENSE: layers with a dense FFN's gate have no experts
EVERY_N = "moe_every_n_layers"
N_EXPERT_MAX = 4096
LATENT_SIZE = "moe_latent_size"
# llama.cpp's numbers; 0: not set in the file.
SIGMOID = 2
GATINGS = {0: "softmax", 1: "softmax", SIGMOID: "sigmoid", 3: "softmax", 4: "sqrt_softplus"}
CHOSEN_ALONE = 3


def has_experts(keys: ArchMetadata, i: int) -> bool:
    """Return whether layer ``i`` has experts. The first layers, as many as the key LEADING_DENSE
    says, have none. Of the others, depending on the architecture and its keys, these have: all;
    those whose router is in the file; those without a dense gate in the file; or every n-th (the
    second of n in Nomic's BERT, the last of n elsewhere).
    """
    n_dense = keys.integer(LEADING_DENSE, 0, lo=BY_TENSORS)
    if not keys.integer("expert_count", 0, lo=0) or i < n_dense:
        return False
    if n_dense == BY_TENSORS and f"blk.{i}.ffn_gate.weight" in keys.gguf.tensors:
        return False
    every = keys.integer(EVERY_N, 0, lo=0)
    if every == 1 or keys.flag(EXPERTS_ROUTED, False):  # a period of 1 has no second layer
        return f"blk.{i}.{ROUTER}" in keys.gguf.tensors
    if every:
        return i % every == 1
    return (i + 1) % keys.integer("interleave_moe_layer_step", 1, lo=1) == 0


def read_experts(keys: ArchMetadata, arch: Arch, i: int, n_ff: int) -> Experts | None:
    """Return the experts of layer ``i``, None if it has none. ``n_ff``: width of a dense FFN, which
    is the experts' too if the file has no key for theirs; 0: the layer has no FFN. A shared
    expert's width is that of its matrix in the file.

    Raises FileError for keys out of range, UnsupportedError for an unknown gating function.
    """
    if not n_ff or not has_experts(keys, i):
        return None
    n = keys.integer("expert_count", lo=1, hi=N_EXPERT_MAX)
    width = keys.integer("expert_feed_forward_length", n_ff)
    shared = width * keys.integer("expert_shared_count", 0, lo=0, hi=N_EXPERT_MAX)
    shared = keys.integer("expert_shared_feed_forward_length", 0, lo=0) or shared
    n_up = keys.n_rows(f"blk.{i}.ffn_up_shexp.weight")
    fused = f"blk.{i}.ffn_gate_shexp.weight" not in keys.gguf.tensors and n_up == 2 * shared > 0
    func = keys.integer(EXPERTS_GATING, 0, lo=0) or _lacking_gating(keys, arch, i)
    if func not in GATINGS:
        keys.refuse(EXPERTS_GATING, f"{func}: treadle supports {', '.join(map(str, GATINGS))}")
    n_groups = keys.integer("expert_group_count", 0, lo=0) or 1
    if n % n_groups:
        keys.fail("expert_group_count", f"{n_groups} does not divide {n} experts")
    per = n // n_groups
    used = keys.integer("expert_group_used_count", 0, lo=0, hi=n_groups) or n_groups
    return Experts(
        n=n,
        n_used=keys.integer("expert_used_count", lo=1, hi=per * used),
        n_ff=width,
        n_ff_shared=shared if fused else n_up or shared,
        shared_fused=fused,
        shared_mean=keys.flag(EXPERTS_MEAN, False),
        gating=GATINGS[func],
        # The softmax of the chosen scores equals that of all scores, normalised to sum to 1.
        norm=func == CHOSEN_ALONE or keys.flag("expert_weights_norm", False),
        scale=keys.number("expert_weights_scale", 0.0, lo=0.0) or 1.0,
        jitter=keys.number(EXPERTS_JITTER, 0.0, lo=0.0, hi=1.0),
        n_groups=n_groups,
        n_groups_used=used,
        n_latent=keys.integer(LATENT_SIZE, 0, lo=0, hi=SIZE_MAX),
        activation=activation_of(keys, arch, i, LIMIT),
    )


def _lacking_gating(keys: ArchMetadata, arch: Arch, i: int) -> int:
    """Return the gating of layer ``i`` (a key of GATINGS) for a file that does not state it:
    sigmoid if attention is latent and the router has a bias (GLM 4.7 Flash), else softmax (DeepSeek
    2, of the same architecture).
    """
    by_bias = f"blk.{i}.exp_probs_b.bias" in keys.gguf.tensors
    return SIGMOID if arch.mixer.startswith("latent") and by_bias else 0
