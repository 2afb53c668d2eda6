"""The reading of a decoder's or an encoder's keys into a ``Config``."""

from __future__ import annotations

import math

from treadle.errors import FileError, UnsupportedError
from treadle.files.metadata import SIZE_MAX
from treadle.models.archs import ALIBI, ARCHS, EMBD_NORMED, POST_EPS, STANDALONE, Arch
from treadle.models.config import Config, Layer
from treadle.models.graphs.experts import read_experts
from treadle.models.graphs.kinds import (
    FIRST_STEM,
    INDEXER_TYPES,
    SECOND_STEM,
    ffn_norm_of,
    ffn_of,
    has_wide_norm,
    mixer_of,
    pooling_of,
)
from treadle.models.graphs.limits import SHARED_LIMIT, activation_of, with_activation
from treadle.models.graphs.positions import read_tables, read_temperature, read_windows
from treadle.models.graphs.recurrence import (
    read_heads,
    read_norm_eps,
    read_recurrence,
    with_norm,
)
from treadle.models.keys import N_LAYER_MAX, NEXTN, ArchMetadata
from treadle.models.mixers.names import INDEX_SHARED, INDEXED

DECODERS = [name for name in STANDALONE if ARCHS[name].graph != "encoder"]
DECODERS_ONLY = f"treadle supports these decoders: {', '.join(DECODERS)}"
POSITIONS = "position_embd.weight"
CLAMP = "attention.clamp_kqv"


def read(keys: ArchMetadata, arch: Arch) -> Config:
    """Return the config of a decoder. Raises UnsupportedError for an encoder, FileError for invalid
    keys.
    """
    if not keys.flag("attention.causal", True):
        what = "with bidirectional attention (an encoder)"
        raise UnsupportedError(f"{keys.gguf.path}: {keys.arch} {what}: {DECODERS_ONLY}")
    return read_config(keys, arch)


def read_config(keys: ArchMetadata, arch: Arch) -> Config:
    """Return the config of a decoder or an encoder, read from the keys that most architectures
    share. Raises FileError for invalid keys, UnsupportedError for variants that treadle lacks.
    """
    arch = with_activation(keys, with_norm(keys, arch))
    n_block = keys.integer("block_count", lo=1, hi=N_LAYER_MAX)
    # Layers for multi-token prediction follow the others, and are left out.
    n_layer = n_block - keys.integer(NEXTN, 0, lo=0, hi=n_block - 1)
    n_embd = keys.integer("embedding_length", lo=1, hi=SIZE_MAX)
    n_head, n_head_kv = read_heads(keys, arch, n_block)
    heads = next(filter(None, n_head), 1)
    head_dim, head_dim_v = _head_dims(keys, n_embd, heads)
    n_ctx_train = keys.integer("context_length", lo=1, hi=1 << 31)
    window, local = read_windows(keys, n_layer, n_block)
    plain, tables = read_tables(keys, arch, window, local, head_dim, n_ctx_train)
    ropes = read_temperature(keys, plain)
    n_ff = keys.per_layer("feed_forward_length", n_block, lo=int(not arch.state))
    state = read_recurrence(keys, arch, n_embd)
    attn_scale = keys.number("attention.scale", 0.0, lo=0.0)
    latent = None
    if arch.mixer.startswith("latent"):
        from treadle.models.graphs.latent import read_latent

        latent, ropes, attn_scale = read_latent(
            keys, arch, ropes, max(n_head_kv) or 1, head_dim, head_dim_v
        )
        head_dim = latent.n_row
        head_dim_v = latent.n_kv_rank
        n_head_kv = [min(n, 1) for n in n_head_kv]  # all heads share one row
    indexer = None
    if arch.mixer == INDEXED:
        from treadle.models.graphs.indexing import read_indexer

        indexer = read_indexer(keys, arch, latent)
    mixers = [mixer_of(keys, arch, i, n_head[i], n_head_kv[i], local[i]) for i in range(n_layer)]
    choosers = _choosers(keys, mixers)
    layers = tuple(
        Layer(
            n_head=n_head[i],
            n_head_kv=n_head_kv[i],
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            n_ff=n_ff[i],
            kv_from=i,
            window=window if local[i] else 0,
            rope=tables[i],
            q_rope=len(plain) if len(ropes) > len(plain) else None,
            mixer=mixers[i],
            ffn=ffn_of(keys, arch, i, n_ff[i]),
            activation=activation_of(keys, arch, i, SHARED_LIMIT),
            experts=read_experts(keys, arch, i, n_ff[i]),
            wide_norm=has_wide_norm(keys, i, mixers[i], n_head[i] * head_dim, head_dim),
            state=state,
            latent=latent,
            indexer=indexer,
            chosen_by=choosers[i],
        )
        for i in range(n_layer)
    )
    width = n_embd / heads if n_layer in arch.width_scaled else head_dim
    ffn_norm = ffn_norm_of(keys, arch)
    # x + r h, layer by layer, is r (x / r + h): the residual stream is kept divided by r. Norms
    # give the same result if their eps is divided by r**2.
    residual = keys.number("residual_scale", 0.0, lo=0.0) or 1.0
    embd_scale = math.sqrt(n_embd) if arch.embd_scale else 1.0
    logit_scale = keys.number("logit_scale", 0.0, lo=0.0) or 1.0
    _check_output(keys)
    return Config(
        arch=arch,
        n_embd=n_embd,
        n_vocab=keys.n_vocab(lent="token_embd.weight" in arch.lacks),
        n_ctx_train=n_ctx_train,
        norm_eps=read_norm_eps(keys, arch) / residual**2,
        embd_norm=keys.flag(EMBD_NORMED, False),
        post_norm_eps=keys.number(POST_EPS, 0.0, lo=0.0, hi=1.0) / residual**2,
        embd_scale=(keys.number("embedding_scale", 0.0, lo=0.0) or embd_scale) / residual,
        attn_scale=attn_scale or 1.0 / math.sqrt(width),
        attn_softcap=keys.number("attn_logit_softcapping", 0.0, lo=0.0),
        clamp=_clamp(keys, arch),
        value_scale=keys.number("attention.value_scale", 0.0, lo=0.0) or 1.0,
        residual_scale=residual,
        alibi=keys.number(ALIBI, 0.0, lo=0.0, hi=64.0),
        logit_scale=1.0 / logit_scale if arch.divide_logits else logit_scale,
        logit_softcap=keys.number("final_logit_softcapping", 0.0, lo=0.0),
        pooling=pooling_of(keys, arch),
        scores=keys.n_rows("cls.output.weight") == 1,
        ropes=ropes,
        layers=layers,
        parallel=ffn_norm in ("", FIRST_STEM) or keys.flag("use_parallel_residual", False),
        attn_norm=SECOND_STEM if ffn_norm == FIRST_STEM else FIRST_STEM,
        ffn_norm=ffn_norm,
        n_positions=keys.n_rows(POSITIONS) or (n_ctx_train if POSITIONS in arch.needs else 0),
        n_types=keys.n_rows("token_types.weight"),
    )


def _choosers(keys: ArchMetadata, mixers: list[str]) -> list[int]:
    """Return for each layer the number of the earlier layer whose indexer chooses its keys; -1 if
    it has its own indexer or none. ``mixers``: the name of each layer's mixer. Raises FileError if
    the first layer needs an earlier one.
    """
    found: list[int] = []
    last = -1  # layer with an indexer
    for i, mixer in enumerate(mixers):
        if mixer == INDEX_SHARED and not i:
            keys.fail(INDEXER_TYPES, "the first layer has no indexer", "one to choose its keys")
        if mixer != INDEX_SHARED:
            last = i
        found.append(last if mixer == INDEX_SHARED else -1)
    return found


def _head_dims(keys: ArchMetadata, n_embd: int, heads: int) -> tuple[int, int]:
    """Return the dims of a head's key, and of its value: the file's keys, by default
    ``n_embd / heads``. Raises FileError if that is no integer.
    """
    if n_embd % heads and not keys.has("attention.key_length"):
        keys.fail("attention.head_count", f"{heads} does not divide embedding_length {n_embd}")
    head_dim = keys.integer("attention.key_length", n_embd // heads, lo=1, hi=SIZE_MAX)
    return head_dim, keys.integer("attention.value_length", n_embd // heads, lo=1, hi=SIZE_MAX)


def _check_output(keys: ArchMetadata) -> None:
    """Raise FileError if the file has a bias of the output but no output matrix."""
    if {"output.bias", "output.weight"} & keys.gguf.tensors.keys() == {"output.bias"}:
        what = "has no matrix"
        expected = "output.weight in the same file"
        raise FileError(what, path=keys.gguf.path, where="output.bias", expected=expected)


def _clamp(keys: ArchMetadata, arch: Arch) -> float:
    """Return the limit to which queries, keys and values are clamped; 0.0 if there is none. Raises
    UnsupportedError for a limit in another mixer than plain attention.
    """
    limit = keys.number(CLAMP, 0.0, lo=0.0, hi=math.inf)
    if limit and arch.mixer != "attention":
        keys.refuse(CLAMP, f"clamping is not supported in {arch.mixer}")
    return limit if math.isfinite(limit) else 0.0
