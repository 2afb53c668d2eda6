"""Differences between the readings of a written file by llama.cpp (and programs built on it) and
by treadle.

GGUF has more keys than any one program reads. This module states what llama.cpp's sources of 2026
do with the architectures that treadle supports: each row of ROWS checks one thing and describes the
difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from treadle.base.fast_classes import dataclass
from treadle.models.archs import (
    ARCHS,
    EXPERTS_NORM,
    LOCAL_BASE,
    PATTERN,
    QKV_BIAS,
    TEMPERATURE,
    TEMPERATURE_LENGTH,
    WINDOW,
    Arch,
)
from treadle.models.graphs.encoder_decoder import LOGIT_SCALE
from treadle.models.graphs.kinds import Q_RANK
from treadle.models.graphs.missing_keys import minicpm_scales
from treadle.models.graphs.switched import LATEST, N_ADAPTERS, TOKENS
from treadle.models.sentence import HEAD_ACTIVATION
from treadle.models.structure import layer_of

BETAS = {"fast": 32.0, "slow": 1.0}  # YaRN betas that llama.cpp uses without its command-line flags
ANY_BIAS = frozenset(
    {*QKV_BIAS, "attn_output.bias", "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"}
)
# Architectures in which llama.cpp reads ANY_BIAS; it reads only FEW_BIASES in the others.
WITH_BIASES = frozenset(
    {"llama", "gpt-oss", "gpt2", "gptneox", "starcoder2"}
    | {"gte", "bert", "jina-bert-v2", "jina-bert-v3", "nomic-bert-moe", "jais2", "granite_swa"}
)
# Architectures whose files say which layers have the window (so do all with a usual pattern), and
# those whose files give the attention scale.
WITH_WINDOWS = frozenset(
    {
        "gemma4",
        "olmo2",
        "granite_swa",
        "cohere2moe",
        "dots3note",
        "inkling",
        "mellum",
        "laguna",
        "maple",
        "step35",
        "mimo2",
        "spark2_5",
    }
)
WITH_SCALE = frozenset({"granite", "granitemoe", "granitehybrid", "granite_swa", "graniteswitch"})
FEW_BIASES = QKV_BIAS
# Biases that llama.cpp requires in every file.
REQUIRED_BIASES = {"phimoe": ("attn_output.bias", "output.bias")}
FIXED_WINDOW = {"smallthinker": 4096}  # the file's value is ignored
# Architectures that llama.cpp computes differently from the trained models, whatever the file says.
TRAINED = {
    "dots3note": "the indexer's RoPE turns halves of its rows, so texts beyond its choice differ",
    "phimoe": "its norms are RMS norms, and expert weights sum to 1 (no SparseMixer)",
    "spark2_5": "its GELU is the approximation by tanh",
    "grovemoe": "small experts read the other experts' output, weighted by another's score",
}
# Tensor names of treadle's own, and biases that llama.cpp lacks in these architectures.
EXTRA_TENSORS = frozenset(
    {"ffn_exps_bias.weight", "attn_q_a.bias", "attn_kv_a_mqa.bias"}
    | {f"ffn_{one}.bias" for one in ("gate_shexp", "up_shexp", "down_shexp")}
    | {"ffn_latent_down.bias", "ffn_latent_up.bias", "output.bias"}
)
# Whether llama.cpp normalises expert weights to a sum of 1, in architectures where it does not read
# this from the file.
NORMED = {
    "llama": True,
    "qwen3moe": True,
    "qwen3vlmoe": True,
    "maple": True,
    "mellum": True,
    "qwen2moe": False,
    "olmoe": False,
    "deepseek": False,
    "mimo2": True,
    "dbrx": True,
}
# llama.cpp requires attn_k and attn_v in every layer, even in layers that share those of others. It
# assumes this number of first layers with their own, and this number of first sparse gates.
N_UNSHARED_LAYERS = {"gemma3n": (20, 10)}
UNKNOWN_ARCHS = frozenset(
    {"flex_olmo", "gptneo", "gte", "nanochat", "olmo_hybrid", "vaultgemma"}
    | {"axk2", "cohere-compass", "gigachat35", "inkling", "solar-open2"}
)  # architectures that llama.cpp 0.3.36's sources lack
ONE_BASE = frozenset({"mellum"})  # one RoPE base, also for layers with a window
FIXED_SCALES = frozenset({"minicpm3"})  # scales from the model's size; the file's are ignored
# Tensors that llama.cpp does not load there: direct or low-rank queries, a separate output matrix.
UNKNOWN = {"minicpm3": ("attn_q.weight",), "plm": ("attn_q_a.weight", "output.weight")}
# Architectures whose queries may lack the low-rank step only for certain layer counts: layer count
# -> vocabulary size (0: any).
IN_ONE_STEP = {"deepseek2": {26: 0, 27: 0, 48: 128256}}


@dataclass(frozen=True)
class OutputMetadata:
    """Metadata of an output file: its architecture, GGUF keys without the architecture's prefix,
    and tensor names.
    """

    arch: Arch
    keys: Mapping[str, Any]
    tensors: Collection[str]


def reading_differences(metadata: Mapping[str, Any], tensors: Collection[str]) -> list[str]:
    """Return a sentence for each difference between llama.cpp's reading of a file and treadle's; []
    for an architecture that treadle does not know. ``metadata``: the file's keys; ``tensors``: the
    names of its tensors.
    """
    arch = ARCHS.get(str(metadata.get("general.architecture")))
    if arch is None:
        return []
    prefix = f"{arch.name}."
    keys = {key.removeprefix(prefix): v for key, v in metadata.items() if key.startswith(prefix)}
    if HEAD_ACTIVATION in metadata:
        keys[HEAD_ACTIVATION] = metadata[HEAD_ACTIVATION]
    found = (row(OutputMetadata(arch, keys, tensors)) for row in ROWS)
    return [f"llama.cpp will read this file differently: {text}" for text in found if text]


def _number(file: OutputMetadata, key: str) -> float | None:
    """Return a key's number; None if the key is absent or holds something else (after
    ``--set``).
    """
    value = file.keys.get(key)
    return value if isinstance(value, (int, float)) else None


def _window(file: OutputMetadata) -> str:
    flags = file.keys.get("attention.sliding_window_pattern")
    window = _number(file, "attention.sliding_window")
    name = file.arch.name
    usual = dict(file.arch.keys).get(PATTERN)
    if window and window != FIXED_WINDOW.get(name, window):
        return f"in {name} its window is {FIXED_WINDOW[name]} tokens; the file says {window}"
    if not window or not isinstance(flags, Collection) or usual or name in WITH_WINDOWS:
        return ""
    n_layer = sum(bool(flag) for flag in flags)
    return (
        f"it has no sliding window in {name}; in the file {n_layer} of {len(flags)} layers have "
        f"one of {window} tokens, so longer prompts differ"
    )


def _fixed(file: OutputMetadata) -> str:
    own = dict(file.arch.keys)
    if TEMPERATURE not in own:
        return ""
    keys = [key for key in (WINDOW, TEMPERATURE, TEMPERATURE_LENGTH) if key in file.keys]
    values = ", ".join(f"{own[key]:g}" for key in keys)
    return f"in {file.arch.name} it fixes {', '.join(keys)} at {values}" if keys else ""


def _attention_scale(file: OutputMetadata) -> str:
    scale = _number(file, "attention.scale")
    if not scale or file.arch.name in WITH_SCALE:
        return ""
    return (
        f"it derives the attention scale from the model's size; the file says {scale:.4g} "
        f"(query_pre_attn_scalar {scale**-2:.4g})"
    )


def _bases(file: OutputMetadata) -> str:
    base = _number(file, "rope.freq_base")
    local = _number(file, LOCAL_BASE)
    if not base or not local or base == local or file.arch.name not in ONE_BASE:
        return ""
    return f"llama.cpp uses RoPE base {base:g} in window layers; the file says {local:g}"


def _softcap(file: OutputMetadata) -> str:
    cap = _number(file, "attn_logit_softcapping")
    return f"it has no attention softcap in {file.arch.name}; the file says {cap:g}" if cap else ""


def _yarn(file: OutputMetadata) -> str:
    betas = {which: _number(file, f"rope.scaling.yarn_beta_{which}") for which in BETAS}
    other = {which: beta for which, beta in betas.items() if beta not in (None, BETAS[which])}
    if not other:
        return ""
    flags = " ".join(f"--yarn-beta-{which} {beta:g}" for which, beta in other.items())
    usual = " and ".join(f"{beta:g}" for beta in BETAS.values())
    return f"it uses YaRN betas {usual}; run it with {flags}"


def _biases(file: OutputMetadata) -> str:
    asked = REQUIRED_BIASES.get(file.arch.name, ())
    known = ANY_BIAS if file.arch.name in WITH_BIASES else FEW_BIASES | {*asked}
    stems = {layer_of(name)[1] for name in file.tensors}
    found = sorted(stems & (ANY_BIAS - known | EXTRA_TENSORS - {*asked}))
    if not found:
        lacking = ", ".join(name for name in asked if name not in stems)
        return f"it refuses {file.arch.name} without {lacking}" if lacking else ""
    return f"it refuses {file.arch.name} with {', '.join(found)} ('wrong number of tensors')"


def _experts(file: OutputMetadata) -> str:
    here = file.keys.get(EXPERTS_NORM)
    there = NORMED.get(file.arch.name)
    if not isinstance(here, bool) or there in (None, here):
        return ""
    so = "normalises expert weights to sum to 1" if there else "does not normalise expert weights"
    return f"in {file.arch.name} it {so} and ignores the file's {EXPERTS_NORM}"


def _trained(file: OutputMetadata) -> str:
    what = TRAINED.get(file.arch.name)
    return f"in {file.arch.name} {what}" if what else ""


def _sharing(file: OutputMetadata) -> str:
    name = file.arch.name
    keys = file.keys
    n_layer = keys.get("block_count")
    n_shared = _number(file, "attention.shared_kv_layers")
    if name not in N_UNSHARED_LAYERS or not isinstance(n_layer, int) or n_shared is None:
        return ""
    if not all(f"blk.{i}.attn_k.weight" in file.tensors for i in range(n_layer)):
        return f"it refuses {name} whose last {n_shared:g} layers have no attn_k and attn_v"
    n_own, n_sparse = N_UNSHARED_LAYERS[name]
    cuts = keys.get("activation_sparsity_scale", ())
    sparse = [i for i, cut in enumerate(cuts) if cut > -math.inf]
    if n_layer - n_shared != n_own or sparse != list(range(n_sparse)):
        return (
            f"in {name} the first {n_own} layers have keys and values and the first {n_sparse} "
            "gates are sparse; the file says otherwise"
        )
    return ""


def _scales(file: OutputMetadata) -> str:
    n_layer, n_embd = (_number(file, key) for key in ("block_count", "embedding_length"))
    if file.arch.name not in FIXED_SCALES or not n_layer or not n_embd:
        return ""
    usual = minicpm_scales(int(n_layer), int(n_embd))
    given = {key: _number(file, key) or there for key, there in usual.items()}
    off = [key for key, here in given.items() if not math.isclose(here, usual[key], rel_tol=1e-6)]
    values = ", ".join(f"{usual[key]:.4g} (file: {given[key]:.4g})" for key in off)
    return f"in {file.arch.name} it fixes {', '.join(off)} at {values}" if off else ""


def _unknown(file: OutputMetadata) -> str:
    name, stems = file.arch.name, {layer_of(name)[1] for name in file.tensors}
    found = [stem for stem in UNKNOWN.get(name, ()) if stem in stems]
    return f"it refuses {name} with {', '.join(found)} ('wrong number of tensors')" if found else ""


def _queries(file: OutputMetadata) -> str:
    name = file.arch.name
    n_layer = file.keys.get("block_count")
    if name not in IN_ONE_STEP or not isinstance(n_layer, int) or _number(file, Q_RANK):
        return ""
    n_tokens = IN_ONE_STEP[name].get(n_layer)
    if n_tokens == 0 or (n_tokens and n_tokens == file.keys.get("vocab_size")):
        return ""
    return f"it does not load {name} files with {n_layer} layers and without {Q_RANK}"


def _lacking(file: OutputMetadata) -> str:
    return (
        f"llama.cpp has no architecture {file.arch.name}" if file.arch.name in UNKNOWN_ARCHS else ""
    )


def _unscaled(file: OutputMetadata) -> str:
    scale = _number(file, LOGIT_SCALE) if file.arch.encoder else None
    if scale in (None, 1.0):
        return ""
    return f"it multiplies no logits of {file.arch.name}; the file says {scale:.4g}"


def _switch(file: OutputMetadata) -> str:
    if file.keys.get(LATEST) is not True:
        return ""
    tokens = file.keys.get(TOKENS)
    if isinstance(tokens, Collection) and len(tokens) != file.keys.get(N_ADAPTERS):
        return f"it refuses {file.arch.name} with a control token for no adapter"
    return (
        "the mean of all control tokens of a text chooses the adapter; in the file the last one "
        "does, so texts with several different ones differ"
    )


def _head(file: OutputMetadata) -> str:
    kind = file.keys.get(HEAD_ACTIVATION, "tanh")
    return "" if kind == "tanh" else f"its scoring head uses tanh; the file says {kind}"


ROWS: tuple[Callable[[OutputMetadata], str], ...] = (
    _window,
    _fixed,
    _attention_scale,
    _bases,
    _softcap,
    _yarn,
    _biases,
    _experts,
    _trained,
    _sharing,
    _scales,
    _unknown,
    _queries,
    _unscaled,
    _switch,
    _head,
    _lacking,
)
