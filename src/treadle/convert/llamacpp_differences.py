"""What llama.cpp, and what is built on it, reads otherwise than treadle in a file that is written.

GGUF has keys for more than each program reads. Here is what llama.cpp's sources of 2026 do with
the architectures that treadle has: a row of ROWS looks at one thing and says what will differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from treadle.base.fast_dataclass import dataclass
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
from treadle.models.graphs.kinds import Q_RANK
from treadle.models.graphs.unsaid import minicpm_scales
from treadle.models.sentence import HEAD_ACTIVATION
from treadle.models.structure import layer_of

BETAS = {"fast": 32.0, "slow": 1.0}  # YaRN's, where llama.cpp is not told on its command line
ANY_BIAS = frozenset(
    {*QKV_BIAS, "attn_output.bias", "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"}
)
# Architectures whose files have them or may have them; the others take those of FEW_BIASES.
WITH_BIASES = frozenset(
    {"llama", "gpt-oss", "gpt2", "gptneox", "starcoder2"}
    | {"gte", "bert", "jina-bert-v2", "jina-bert-v3", "nomic-bert-moe", "jais2", "granite_swa"}
)
# Where the file says which layers have the window (as all do that have a usual pattern), and where
# it says the scale of scores.
WITH_WINDOWS = frozenset(
    {"gemma4", "olmo2", "granite_swa", "cohere2moe", "mellum", "laguna", "step35", "mimo2"}
)
WITH_SCALE = frozenset({"granite", "granitemoe", "granitehybrid", "granite_swa"})
FEW_BIASES = QKV_BIAS
# Those that it asks all files for.
ASKED = {"phimoe": ("attn_output.bias", "output.bias")}
FIXED_WINDOW = {"smallthinker": 4096}  # whatever the file's
# What it computes otherwise than the models were trained, whatever their files say.
TRAINED = {
    "phimoe": "its norms are without the mean, and weights of experts add up to 1 (no SparseMixer)",
    "grovemoe": "small experts read what the others give, and another expert's score weighs them",
}
# treadle's own names, and biases of matrices that have none there in these architectures.
OWN = frozenset(
    {"ffn_exps_bias.weight", "attn_q_a.bias", "attn_kv_a_mqa.bias"}
    | {f"ffn_{one}.bias" for one in ("gate_shexp", "up_shexp", "down_shexp")}
    | {"ffn_latent_down.bias", "ffn_latent_up.bias", "output.bias"}
)
# Whether it makes the weights of a token's experts add up to 1, where it does not ask the file.
NORMED = {
    "llama": True,
    "qwen3moe": True,
    "qwen3vlmoe": True,
    "mellum": True,
    "qwen2moe": False,
    "olmoe": False,
    "deepseek": False,
    "mimo2": True,
    "dbrx": True,
}
# It wants keys and values of every layer there, also of those that read others' and have none; it
# takes the first so many layers to have some, and the first so many gates to be sparse.
SHARING = {"gemma3n": (20, 10)}
LACKING = frozenset(
    {"flex_olmo", "gptneo", "gte", "nanochat", "olmo_hybrid", "vaultgemma"}
)  # architectures that it does not have
ONE_BASE = frozenset({"mellum"})  # of ropes, whatever that of layers with a window is
FIXED_SCALES = frozenset({"minicpm3"})  # of the model's size, whatever the file says
# Which it does not look for there: queries made in one step or in two, an output's own matrix.
UNKNOWN = {"minicpm3": ("attn_q.weight",), "plm": ("attn_q_a.weight", "output.weight")}
# Where queries may be made in one step by the model's layers alone: of how many, and with how many
# tokens (0: any).
IN_ONE_STEP = {"deepseek2": {26: 0, 27: 0, 48: 128256}}


@dataclass(frozen=True)
class OutputMetadata:
    """A file as it will be: GGUF's keys without the architecture's name, and names of tensors."""

    arch: Arch
    keys: Mapping[str, Any]
    tensors: Collection[str]


def read_otherwise(metadata: Mapping[str, Any], tensors: Collection[str]) -> list[str]:
    """A sentence for each thing that llama.cpp will not read as treadle does."""
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
    """A key's number; None without one, and for what --set may have put there that is none."""
    value = file.keys.get(key)
    return value if isinstance(value, (int, float)) else None


def _window(file: OutputMetadata) -> str:
    flags = file.keys.get("attention.sliding_window_pattern")
    window = _number(file, "attention.sliding_window")
    name, usual = file.arch.name, dict(file.arch.keys).get(PATTERN)
    if window and window != FIXED_WINDOW.get(name, window):
        return f"in {name} the window is {FIXED_WINDOW[name]} tokens there, and not {window}"
    if not window or not isinstance(flags, Collection) or usual or name in WITH_WINDOWS:
        return ""
    n_layer = sum(bool(flag) for flag in flags)
    return (
        f"it has no sliding window in {name}; here {n_layer} of {len(flags)} layers see {window} "
        "tokens, so longer texts differ"
    )


def _fixed(file: OutputMetadata) -> str:
    own = dict(file.arch.keys)
    if TEMPERATURE not in own:
        return ""
    keys = [key for key in (WINDOW, TEMPERATURE, TEMPERATURE_LENGTH) if key in file.keys]
    values = ", ".join(f"{own[key]:g}" for key in keys)
    return f"in {file.arch.name} {', '.join(keys)} are {values} there" if keys else ""


def _attention_scale(file: OutputMetadata) -> str:
    scale = _number(file, "attention.scale")
    if not scale or file.arch.name in WITH_SCALE:
        return ""
    return (
        f"it takes the attention's scale from the model's size, not from the file's {scale:.4g} "
        f"(query_pre_attn_scalar {scale**-2:.4g})"
    )


def _bases(file: OutputMetadata) -> str:
    base, local = _number(file, "rope.freq_base"), _number(file, LOCAL_BASE)
    if not base or not local or base == local or file.arch.name not in ONE_BASE:
        return ""
    return f"in {file.arch.name} it turns layers with a window by {base:g}, and not by {local:g}"


def _softcap(file: OutputMetadata) -> str:
    cap = _number(file, "attn_logit_softcapping")
    return f"it caps no attention scores in {file.arch.name}; here at {cap:g}" if cap else ""


def _yarn(file: OutputMetadata) -> str:
    betas = {which: _number(file, f"rope.scaling.yarn_beta_{which}") for which in BETAS}
    other = {which: beta for which, beta in betas.items() if beta not in (None, BETAS[which])}
    if not other:
        return ""
    flags = " ".join(f"--yarn-beta-{which} {beta:g}" for which, beta in other.items())
    usual = " and ".join(f"{beta:g}" for beta in BETAS.values())
    return f"it takes YaRN's betas as {usual} unless it is told {flags}"


def _biases(file: OutputMetadata) -> str:
    asked = ASKED.get(file.arch.name, ())
    known = ANY_BIAS if file.arch.name in WITH_BIASES else FEW_BIASES | {*asked}
    stems = {layer_of(name)[1] for name in file.tensors}
    found = sorted(stems & (ANY_BIAS - known | OWN - {*asked}))
    if not found:
        lacking = ", ".join(name for name in asked if name not in stems)
        return f"it refuses {file.arch.name} without {lacking}" if lacking else ""
    return f"it refuses {file.arch.name} with {', '.join(found)} ('wrong number of tensors')"


def _experts(file: OutputMetadata) -> str:
    here, there = file.keys.get(EXPERTS_NORM), NORMED.get(file.arch.name)
    if not isinstance(here, bool) or there in (None, here):
        return ""
    so = "makes weights of experts add up to 1" if there else "takes weights of experts as they are"
    return f"in {file.arch.name} it {so}, whatever the file's {EXPERTS_NORM} says"


def _trained(file: OutputMetadata) -> str:
    what = TRAINED.get(file.arch.name)
    return f"in {file.arch.name} {what}" if what else ""


def _sharing(file: OutputMetadata) -> str:
    name, keys = file.arch.name, file.keys
    n_layer, n_shared = keys.get("block_count"), _number(file, "attention.shared_kv_layers")
    if name not in SHARING or not isinstance(n_layer, int) or n_shared is None:
        return ""
    if not all(f"blk.{i}.attn_k.weight" in file.tensors for i in range(n_layer)):
        return f"it refuses {name} whose last {n_shared:g} layers have no attn_k and attn_v"
    n_own, n_sparse = SHARING[name]
    cuts = keys.get("activation_sparsity_scale", ())
    sparse = [i for i, cut in enumerate(cuts) if cut > -math.inf]
    if n_layer - n_shared != n_own or sparse != list(range(n_sparse)):
        return (
            f"in {name} the first {n_own} layers have keys and values and the first {n_sparse} "
            "gates are sparse, whatever the file says"
        )
    return ""


def _scales(file: OutputMetadata) -> str:
    n_layer, n_embd = (_number(file, key) for key in ("block_count", "embedding_length"))
    if file.arch.name not in FIXED_SCALES or not n_layer or not n_embd:
        return ""
    usual = minicpm_scales(int(n_layer), int(n_embd))
    given = {key: _number(file, key) or there for key, there in usual.items()}
    off = [key for key, here in given.items() if not math.isclose(here, usual[key], rel_tol=1e-6)]
    values = ", ".join(f"{usual[key]:.4g} (here {given[key]:.4g})" for key in off)
    return f"in {file.arch.name} {', '.join(off)} are {values} there" if off else ""


def _unknown(file: OutputMetadata) -> str:
    name, stems = file.arch.name, {layer_of(name)[1] for name in file.tensors}
    found = [stem for stem in UNKNOWN.get(name, ()) if stem in stems]
    return f"it refuses {name} with {', '.join(found)} ('wrong number of tensors')" if found else ""


def _queries(file: OutputMetadata) -> str:
    name, n_layer = file.arch.name, file.keys.get("block_count")
    if name not in IN_ONE_STEP or not isinstance(n_layer, int) or _number(file, Q_RANK):
        return ""
    n_tokens = IN_ONE_STEP[name].get(n_layer)
    if n_tokens == 0 or (n_tokens and n_tokens == file.keys.get("vocab_size")):
        return ""
    return f"of {name} with {n_layer} layers it does not load files without {Q_RANK}"


def _lacking(file: OutputMetadata) -> str:
    return f"it refuses {file.arch.name}, of which it has none" if file.arch.name in LACKING else ""


def _head(file: OutputMetadata) -> str:
    kind = file.keys.get(HEAD_ACTIVATION, "tanh")
    return "" if kind == "tanh" else f"scores are of a head with tanh there, and of {kind} here"


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
    _head,
    _lacking,
)
