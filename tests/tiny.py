"""Small random models as GGUF files, of any architecture and format that treadle has a row for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.changed_gguf import write_changed
from tests.models.hf_tiny import N_VOCAB, byte_vocabulary
from treadle.files.gguf import GGUFWriter
from treadle.formats import by_name
from treadle.models.archs import ARCHS, EXPERTS_ROUTED, PATTERN, WINDOW
from treadle.models.config import Config
from treadle.models.graphs import GRAPHS
from treadle.models.graphs.experts import ROUTER
from treadle.models.keys import ArchMetadata

SIZES = {
    "n_layer": 3,
    "n_embd": 64,
    "n_ff": 96,
    "n_head": 4,
    "n_head_kv": 2,
    "head_dim": 32,
    "head_dim_v": 0,  # of a value; 0: head_dim
    "n_vocab": N_VOCAB,
    "n_ctx": 4096,
    "window": 0,
    "softcap": 0,  # of the logits
    "n_expert": 0,
    "n_expert_used": 2,  # by a token
    "n_ff_exp": 0,
    "n_expert_shared": 0,
    "n_q_rank": 32,  # of latent attention
    "head_norms": 0,  # 1: q/k norms have weights for each head
    "n_top": 0,  # keys or blocks of keys that an indexer chooses; 0: those of INDEXERS or BLOCKS
    "tied": 1,  # the embeddings are the output matrix as well
}
ALL_EXPERTS = (
    "early",
    "grove",
    "grok",
    "hyper",
    "blocks",
    "compressed",
    "kimi_k3",
    "inkling",
)  # graphs whose layers all have some
SMALL_EXPERTS = {
    "experts_per_group": 2,
    "expert_group_scale": 0.05,
    "expert_chunk_feed_forward_length": 32,
}
STATES = {  # of layers that have one
    "shortconv.l_cache": 3,
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 96,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 4,
    "ssm.group_count": 2,
    "kda.head_dim": 32,
    "kda.gate_lower_bound": -5.0,
    "wkv.head_size": 32,
    "attention.decay_lora_rank": 20,
    "attention.iclr_lora_rank": 16,
    "attention.value_residual_mix_lora_rank": 12,
    "attention.gate_lora_rank": 24,
}
INDEXERS = {  # of the keys that attention sees
    "attention.indexer.head_count": 8,
    "attention.indexer.key_length": 64,
    "attention.indexer.top_k": 12,
}
BLOCKS = {
    "attention.indexer.key_length": 32,
    "attention.indexer.top_k": 3,
    "attention.indexer.block_size": 4,
    "attention.indexer.local_blocks": 1,
}
HYPERS = {  # of several streams, and of n-grams in the first layer
    "hyper_connection.count": 3,
    "hyper_connection.low_rank": 16,
    "attention.indexer.head_count": 8,
    "attention.indexer.key_length": 32,
    "attention.indexer.top_k": 12,
    "ple.layers": [0],
    "ple.ngram_size": 3,
    "ple.heads_per_ngram": 2,
    "ple.conv_kernel": 3,
    "ple.eos_token_id": 5,
    "ple.layer_multipliers": [12345678901, 98765432123, 5551212345],
    "ple.head_vocab_sizes": [53, 59, 61, 67],
    "ple.head_offsets": [0, 53, 112, 173],
    "embedding_length_per_layer_input": 32,
}
COMPRESSED = {  # of rows that stand for several tokens
    "attention.sliding_window": 12,
    "attention.q_lora_rank": 32,
    "attention.output_group_count": 2,
    "attention.output_lora_rank": 16,
    "attention.compress_rope_freq_base": 160000.0,
    "rope.dimension_count": 16,
    "hash_layer_count": 1,
    "swiglu_clamp_exp": 1.5,
    "swiglu_clamp_shexp": 2.5,
    "hyper_connection.count": 3,
    "hyper_connection.sinkhorn_iterations": 20,
    "hyper_connection.epsilon": 1e-6,
}
POOLED = {  # of indexers of units, and streams
    "attention.indexer.kpool": 4,
    "hyper_connection.count": 3,
    "hyper_connection.sinkhorn_iterations": 20,
    "hyper_connection.epsilon": 1e-6,
    "swiglu_clamp_exp": 1.5,
    "swiglu_clamp_shexp": 2.5,
}
KIMI_K3 = {  # of attention residuals, narrow experts and SiTU
    "attn_res.block_size": 2,
    "expert_latent_length": 32,
    "activation.situ_beta": 1.5,
    "activation.situ_linear_beta": 4.0,
}
UNITS = (4, 64, 0)  # tokens of a row, by layer
INDEPENDENT = {
    "hyper_connection.count": 3,
    "hyper_connection.magnitude": 1.5,
    "hyper_connection.epsilon": 1e-3,
}
SWITCH: dict[str, Any] = {  # of three adapters, which tokens choose
    "count": 3,
    "lora_rank": 5,
    "token_ids_activate": [290, 291, 292],
    "token_ids_substitute": [7, 8, 8],
    "router_gain": 15.0,
}
RELATIVE_BIASES = {  # of distances, and short convolutions
    "attention.sliding_window": 12,
    "attention.sliding_window_pattern": [True, False, True],
    "d_rel": 8,
    "rel_extent": 17,
    "rel_extent_swa": 12,
    "shortconv_kernel": 4,
    "dense_block_count": 1,
    "logit_scale_denom": 0.5,
    "log_scaling_n_floor": 7,
    "log_scaling_alpha": 0.3,
}
CURVES = {"alpha_p": 0.6, "alpha_n": -0.4, "beta": 0.5, "eps": -1e-6}  # of Apertus' activation
I32 = 26  # ggml's number
LATENT = {"n_head_kv": 1, "head_dim": 96, "head_dim_v": 64}  # a row that all heads share


def write_model(
    path: Path,
    arch: str = "llama",
    fmt: str = "F32",
    *,
    others: Mapping[str, tuple[int, ...]] | None = None,
    vocabulary: Mapping[str, Any] | None = None,
    formats: tuple[tuple[str, str], ...] = (),
    empty: tuple[str, ...] = (),
    **sizes: int | list[int],
) -> None:
    """Norms and biases are F32, matrices ``fmt``, those whose names have a part of ``formats`` in
    them the one beside it; tensors that the architecture can lack, it lacks.
    ``empty``: tensors that are nothing but zeros. ``others``: tensors of zeros that no decoder
    knows. ``vocabulary``: keys of ``tokenizer.ggml.`` for ``n_vocab`` tokens, in place of
    ``byte_vocabulary``. ``n_ff``, ``n_head`` and ``n_head_kv``
    may be lists with a number for each layer.

    Weights keep activations near 1 and logits apart, as those of ``tests/models/hf_tiny.py`` do.
    """
    size: dict[str, Any] = SIZES | sizes
    if ARCHS[arch].graph == "halves":
        n_ff = size["n_ff"]
        n_head_kv = size["n_head_kv"]
        size["n_ff"] = ([0, n_ff] * size["n_layer"])[: size["n_layer"]]
        size["n_head_kv"] = ([0, 0, n_head_kv, 0] * size["n_layer"])[: size["n_layer"]]
    if ARCHS[arch].mixer.startswith("latent"):
        size |= LATENT | {"kv_b": ARCHS[arch].mixer.endswith("kv_b")}
    if ARCHS[arch].graph != "halves" and ARCHS[arch].state and "n_head_kv" not in sizes:
        size["n_head_kv"] = [0, size["n_head_kv"]] * size["n_layer"]
        size["n_head_kv"] = size["n_head_kv"][: size["n_layer"]]
    if ARCHS[arch].graph == "gemma3n":
        size["n_own"] = 32
    if ARCHS[arch].graph == "compressed":
        size |= {"n_head_kv": 1, "n_expert_shared": 1}
    if ARCHS[arch].graph in ALL_EXPERTS:
        size |= {"n_expert": 4, "n_ff_exp": 64} | sizes
    if ARCHS[arch].graph == "inkling":
        size |= {"n_expert_shared": 2}
    given = dict(ARCHS[arch].keys)
    if PATTERN in given and WINDOW not in given:  # else the file must say that it has none
        size["windowed"] = True
    writer = GGUFWriter(path)
    writer.add("general.architecture", arch)
    for key, value in in_full(arch, size).items():
        writer.add(key, value)
    for key, value in (vocabulary or byte_vocabulary()).items():
        writer.add(f"tokenizer.ggml.{key}", value)
    shapes = shapes_of(path, arch, size)
    rng = np.random.default_rng(list(arch.encode()))
    for name, shape in shapes.items():
        floats = "_inp" in name or name.endswith(("q_norm.weight", "k_norm.weight"))
        matrix = len(shape) >= 2 and name.endswith("weight") and not floats
        own = next((other for part, other in formats if part in name), fmt)
        weights = by_name(own if matrix else "F32")
        if name.endswith("tid2eid.weight"):
            rows = rng.permuted(np.tile(np.arange(size["n_expert"]), (shape[0], 1)), axis=1)
            rows = np.ascontiguousarray(rows[:, : shape[1]].astype("<i4"))
            writer.add_tensor(name, shape, I32, rows.view(np.uint8).reshape(-1))
            continue
        if name in empty:
            size_ = math.prod(shape) // weights.block * sum(weights.strides)
            writer.add_tensor(name, shape, weights, np.zeros(size_, np.uint8))
            continue
        writer.add_tensor(name, shape, weights, weights.quantize_rows(draw(rng, name, shape)))
    for name, shape in (others or {}).items():
        zeros = np.zeros(shape, np.float32)
        writer.add_tensor(name, shape, by_name("F32"), by_name("F32").quantize_rows(zeros))
    writer.write()


def shapes_of(path: Path, arch: str, size: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors that the architecture's graph asks for, layer by layer."""
    embd = SimpleNamespace(shape=(size["n_vocab"], size["n_embd"]))
    metadata = in_full(arch, size)
    file: Any = SimpleNamespace(path=path, metadata=metadata, tensors={"token_embd.weight": embd})
    if size["head_norms"]:
        norm = SimpleNamespace(shape=(size["n_head"], size["head_dim"]))
        file.tensors |= {f"blk.{i}.attn_q_norm.weight": norm for i in range(size["n_layer"])}
    if size.get("n_own"):
        table = SimpleNamespace(shape=(size["n_vocab"], size["n_own"] * size["n_layer"]))
        low = SimpleNamespace(shape=(16, size["n_embd"]))
        file.tensors |= {"per_layer_token_embd.weight": table, "blk.0.laurel_l.weight": low}
    row = ARCHS[arch]
    graph = GRAPHS[ARCHS[arch].graph]
    if row.graph == "gigachat35":
        rank = SimpleNamespace(shape=(8, size["n_embd"]))
        file.tensors["output_norm_gate_up.weight"] = rank
    if EXPERTS_ROUTED in dict(row.keys) and size["n_expert"]:  # every other layer has a router
        routers = {f"blk.{i}.{ROUTER}": embd for i in range(1, size["n_layer"], 2)}
        file.tensors |= routers
    found: dict[str, tuple[int, ...]] = {}
    for tensor, places in graph.tensors(graph.read(ArchMetadata(file, arch, row.keys), row)):
        asked = tensor.name in row.needs or (tensor.name == "output.weight" and not size["tied"])
        asked |= tensor.name == "per_layer_token_embd.weight" and row.graph == "hyper"
        asked |= "shexp" in tensor.name and size["n_expert_shared"] > 0
        if asked or not (tensor.optional or tensor.name in row.lacks):
            found |= {name: shape for name, shape in places.items() if name not in row.lacks}

    def layer(name: str) -> int:
        return int(name.split(".")[1]) if name.startswith("blk.") else -1

    return dict(sorted(found.items(), key=lambda item: layer(item[0])))


def in_full(arch: str, size: dict[str, Any]) -> dict[str, Any]:
    """GGUF's keys; those of an activation have no architecture in front."""
    made = {f"{arch}.{key}": value for key, value in keys(size).items()}
    if ARCHS[arch].graph == "apertus":
        made |= {f"xielu.{key}": value for key, value in CURVES.items()}
    if ARCHS[arch].graph == "hyper":
        ratios = [4 if heads else 0 for heads in size["n_head_kv"]]
        more = {**HYPERS, "attention.compress_ratios": ratios}
        made |= {f"{arch}.{key}": value for key, value in more.items()}
    if ARCHS[arch].graph == "compressed":
        ratios = (UNITS * size["n_layer"])[: size["n_layer"]]
        more = {**COMPRESSED, "attention.compress_ratios": list(ratios)}
        made |= {f"{arch}.{key}": value for key, value in more.items()}
    if ARCHS[arch].graph == "pooled":
        made |= {f"{arch}.{key}": value for key, value in POOLED.items()}
    if ARCHS[arch].graph == "kimi_k3":
        made |= {f"{arch}.{key}": value for key, value in KIMI_K3.items()}
    if ARCHS[arch].graph == "independent":
        made |= {f"{arch}.{key}": value for key, value in INDEPENDENT.items()}
    if ARCHS[arch].graph == "blocks":
        more = {**BLOCKS, "attention.indexer.head_count": size["n_head_kv"]}
        made |= {f"{arch}.{key}": value for key, value in more.items()}
    if ARCHS[arch].graph == "inkling":
        flags = RELATIVE_BIASES["attention.sliding_window_pattern"] * size["n_layer"]
        more = {**RELATIVE_BIASES, "attention.sliding_window_pattern": flags[: size["n_layer"]]}
        made |= {f"{arch}.{key}": value for key, value in more.items()}
    if ARCHS[arch].graph == "axk2":
        made[f"{arch}.gated_norm_rank"] = 8
    if ARCHS[arch].graph == "nanbeige":
        made[f"{arch}.num_loops"] = 2
    if ARCHS[arch].graph == "hrm":
        n = size["n_layer"]
        cycles = {"block_count": 4 * n, "hrm.layers_per_stack": n}
        cycles |= {"hrm.h_cycles": 2, "hrm.l_cycles": 1}
        made |= {f"{arch}.{key}": value for key, value in cycles.items()}
    if ARCHS[arch].graph == "grove":
        made |= {f"{arch}.{key}": value for key, value in SMALL_EXPERTS.items()}
    if ARCHS[arch].graph == "switched":
        made |= {f"{arch}.adapters.{key}": value for key, value in SWITCH.items()}
    if size["n_top"]:
        made[f"{arch}.attention.indexer.top_k"] = size["n_top"]
    return made


def keys(size: dict[str, Any]) -> dict[str, Any]:
    """GGUF's keys, without the architecture's prefix."""
    made = {
        "vocab_size": size["n_vocab"],
        "context_length": size["n_ctx"],
        "embedding_length": size["n_embd"],
        "block_count": size["n_layer"],
        "feed_forward_length": size["n_ff"],
        "attention.head_count": size["n_head"],
        "attention.head_count_kv": size["n_head_kv"],
        "attention.key_length": size["head_dim"],
        "attention.value_length": size["head_dim_v"] or size["head_dim"],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.layer_norm_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        **STATES,
        **INDEXERS,
    }
    if size["head_dim"] == LATENT["head_dim"]:
        made["rope.dimension_count"] = LATENT["head_dim"] - LATENT["head_dim_v"]
        made["attention.q_lora_rank"] = size["n_q_rank"]
        made["attention.kv_lora_rank"] = LATENT["head_dim_v"]
        heads = {"attention.key_length_mla": 128, "attention.value_length_mla": 32}
        if size.get("kv_b"):  # the sizes of heads alone: nothing says how wide a row is
            heads = {key.removesuffix("_mla"): n for key, n in heads.items()}
            heads["attention.head_count_kv"] = size["n_head"]
        made |= heads
    if size["window"] or size.get("windowed"):
        made["attention.sliding_window"] = size["window"]
    if size["n_expert"]:
        made["expert_count"], made["expert_used_count"] = size["n_expert"], size["n_expert_used"]
        made["expert_feed_forward_length"] = size["n_ff_exp"]
        made["expert_shared_count"] = size["n_expert_shared"]
    if size.get("n_own"):  # of layers that have values of their own, and sparse gates
        made["embedding_length_per_layer_input"] = size["n_own"]
        made["activation_sparsity_scale"] = [0.5] * 2 + [-math.inf] * (size["n_layer"] - 2)
    if size["softcap"]:
        made["final_logit_softcapping"] = float(size["softcap"])
    return made


def draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    x = rng.standard_normal(shape)
    if "norm" in name:
        x = 1.0 + 0.25 * x
    elif name.endswith("ssm_a"):
        x = -np.exp(0.5 * x)
    elif name.endswith("bias"):
        x = 0.5 * x
    elif "embd" in name:
        x = 0.35 * x
    elif "_lora_" in name:  # the first stands for no adapter
        x = x / math.sqrt(shape[-1])
        x[0] = 0.0
    elif name == "output.weight":
        x = 3.0 * x / math.sqrt(shape[1])
    else:
        x = 1.4 * x / math.sqrt(shape[-1])
    return x.astype(np.float32)


def without_vocabulary(source: Path, path: Path, said: str | None = "no_vocab") -> Path:
    """Write a model's file again without its vocabulary. ``said``: the kind that it names, None for
    none. Return ``path``.
    """
    keys = {"tokenizer.ggml.model": said}
    return write_changed(source, path, keys, without=lambda name: name.startswith("tokenizer."))


def rounding(config: Config) -> float:
    """How far f32 logits may be from exact ones, as a share of the largest of them.

    With n roundings of 2**-24 on the way from a token to its logits the error is at most about
    4 sqrt(n) 2**-24 of the terms (Higham and Mary, 2019: but for one case in thousands).
    """
    n = config.n_embd
    for layer in config.layers:
        n += 2 * config.n_embd + layer.n_head * layer.head_dim + layer.n_ff
        n += layer.n_own and 2 * config.n_embd + layer.n_own
        if config.n_streams > 1:  # two routers, and what each stream is made of
            n += 2 * config.n_embd + config.n_laurel + 2 * config.n_streams
        if config.attn_res_block_size:  # a square and a product of all values, for each half
            n += 4 * config.n_embd
        if layer.n_head:
            # Scores larger than usual: what they are off by is a factor of what a softmax gives.
            scores = int(layer.head_dim * max(0.0, config.attn_scale**2 * layer.head_dim - 1))
            n += scores
            if layer.n_cross:  # a second attention
                n += scores + config.n_embd + layer.n_head * layer.head_dim
        if layer.state is not None:
            n += layer.state.n_inner + layer.state.n_state + layer.state.n_conv
            if layer.state.n_rank:
                # Mamba-1 multiplies x, z, dt, B and C: relative errors of each one's sums add up.
                n += 3 * (config.n_embd + layer.state.n_conv + layer.state.n_inner)
                n += layer.state.n_rank
    return 4 * math.sqrt(n) * 2.0**-24
