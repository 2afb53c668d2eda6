"""Keys, names and rules shared by families with Kimi Delta Attention (KDA): Kimi Linear, Kimi K3,
Solar Open 2, GLM-5.3-Flash and Ling 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from treadle.convert.hf.tensor_names import Names
from treadle.convert.sources.derived_tensors import DerivationRule, Make, Rows, decay, flat
from treadle.files.metadata import MetadataReader
from treadle.models.graphs.recurrence import KDA_HEAD

KDA_AT = "self_attn."
FORGET_GATE = "forget_gate."  # transformers' module of the decays in some families


def kda_names(at: str = KDA_AT) -> Names:
    """Return the GGUF names of a layer's KDA tensors after ``kda_rules``, by checkpoint name;
    ``at``: the prefix of the checkpoint names.
    """
    return {
        **{f"{at}{x}_conv1d": f"ssm_conv1d_{x}" for x in "qkv"},
        **{f"{at}{x}_proj": f"ssm_{x}" for x in ("f_a", "f_b", "g_a", "g_b")},
        f"{at}b_proj": "ssm_beta",
        f"{at}dt": "ssm_dt",
        f"{at}decay": "ssm_a",
        f"{at}o_norm": "ssm_norm",
    }


def kda_config(keys: MetadataReader) -> MetadataReader:
    """Return a reader of ``linear_attn_config``, which published folders have; an empty one for
    folders that transformers writes.
    """
    return keys.within("linear_attn_config") or MetadataReader({}, keys.path)


def kda_sizes(keys: MetadataReader, *, heads: int, head_dim: int) -> dict[str, Any]:
    """Return the keys of KDA's convolution and heads, from ``linear_attn_config`` or from the keys
    that transformers has in its place.

    heads, head_dim: defaults for folders with neither. Raises UnsupportedError if the number of
        heads differs from attention's.
    """
    inner = kda_config(keys)
    n_head = keys.integer("num_attention_heads")
    found = inner.integer("num_heads", keys.integer("linear_num_heads", heads))
    if found != n_head:
        what = f"{found} heads have a state: expected num_attention_heads, {n_head}"
        keys.refuse("linear_attn_config", what)
    taps = keys.integer("linear_conv_kernel_dim", 4)
    return {
        "ssm.conv_kernel": inner.integer("short_conv_kernel_size", taps),
        KDA_HEAD: inner.integer("head_dim", keys.integer("linear_head_dim", head_dim)),
    }


def kda_rules(
    rates: Make, at: str = KDA_AT, *, within: tuple[str, ...] = ("",)
) -> Iterator[DerivationRule]:
    """Return rules for the convolutions, time steps and decay rates of a KDA layer.

    rates: the function from ``A_log`` to decay rates, in the shape that GGUF has for the
        architecture.
    at: the prefix of the layer's tensors. within: prefixes, after ``at``, of the modules that may
        hold ``A_log`` and ``dt_bias``.
    """
    for x in "qkv":
        name = f"{at}{x}_conv1d.weight"
        yield DerivationRule((name,), {name: taps_of_parts})
    for module in within:
        yield DerivationRule((f"{at}{module}dt_bias",), {f"{at}dt.bias": flat})
        yield DerivationRule((f"{at}{module}A_log",), {f"{at}decay.weight": rates}, floats=True)


def taps_of_parts(rows: Rows) -> Rows:
    """Return convolution taps as [channels, 1, taps], from that shape or [channels, taps]."""
    return rows.reshape(rows.shape[0], 1, -1)


def decay_of_heads(rows: Rows) -> Rows:
    """Return the decay rates -exp(A_log), one per head, as [1, heads, 1]."""
    return decay(rows).reshape(1, -1, 1)
