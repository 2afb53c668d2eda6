"""Small random ``transformers`` models, written as GGUF the way llama.cpp's converter would.

``tiny_models()`` names them; ``write_tiny(name, path)`` writes one and returns what transformers
itself computes for a prompt, so that the reference and the compiled path have a truth that neither
of them wrote. Widths are multiples of 32: every weight format fits.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.models.hf_cases import ALL_CASES, ENCODER_CASES, Case
from tests.models.hf_names import FAMILIES, PLAIN, gguf_name
from treadle.files.gguf import GGUFWriter
from treadle.formats import by_name

N_TOKENS = 48  # of the prompt: three times the sliding window
N_VOCAB = 320
EPS = float(np.float32(1e-5))  # GGUF stores float32: transformers must use the very same number


def tiny_models() -> list[tuple[str, Callable[[], Any]]]:
    """Every case: its name, and a builder of the transformers model (float64, evaluation mode)."""
    return [(name, functools.partial(build, case)) for name, case in ALL_CASES.items()]


def write_tiny(name: str, path: Path) -> tuple[list[int], npt.NDArray[np.float64]]:
    """Write case ``name`` as an F32 GGUF; returns the prompt's ids and its logits by transformers.

    The logits, float64 [n_tokens, n_vocab], are computed in float64 throughout. Skips the test
    where torch or transformers is absent, and fails it under CI.
    """
    require_transformers()
    case = (ALL_CASES | ENCODER_CASES)[name]
    model = build(case)
    ids = np.random.default_rng(7).integers(3, N_VOCAB, N_TOKENS).tolist()
    write_gguf(case, model, path)
    return ids, compute_logits(model, ids)


def compute_logits(model: Any, ids: list[int]) -> npt.NDArray[np.float64]:
    """What transformers computes for one prompt: logits, float64 [n_tokens, n_vocab], or an
    encoder's last states.
    """
    made = run(model, ids)
    rows: npt.NDArray[np.float64] = getattr(made, "logits", made[0])[0].numpy()
    assert rows.dtype == np.float64
    return rows


def run(model: Any, ids: list[int], **wanted: Any) -> Any:
    """What transformers computes for one prompt, in float64; ``wanted``: as its models take it."""
    import torch
    from transformers.models.gemma3 import modeling_gemma3

    with float64_only(), torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        cap = getattr(model.config, "attn_logit_softcapping", None)
        if cap is not None:
            # transformers 5.23 keeps Gemma 3's setting but forgets to hand it to its own attention
            attention = functools.partial(modeling_gemma3.eager_attention_forward, softcap=cap)
            patch.setattr(modeling_gemma3, "eager_attention_forward", attention)
        return model(torch.tensor([ids]), **wanted)


def require_transformers() -> None:
    """Skip, or under CI fail, unless torch and transformers can be imported."""
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            message = f"{package} is not installed: no model to compare with"
            if os.environ.get("CI") == "true":
                pytest.fail(message)
            pytest.skip(message)


@contextlib.contextmanager
def float64_only() -> Iterator[None]:
    """Compute what transformers pins to float32 (norms, rope angles, softmax) in float64 too.

    A module first imported in here would keep float64 for float32 as long as the process lives, and
    so break whichever test comes later: what transformers imports late is imported before.
    """
    import safetensors.torch  # noqa: F401
    import torch
    import transformers.modeling_utils  # noqa: F401

    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(default)
    late = {name for name in set(sys.modules) - before if not name.startswith("torch.")}
    deceived = [name for name in late if getattr(sys.modules[name], "torch", None) is torch]
    assert not deceived, f"imported where torch.float32 was torch.float64: {deceived}"


def build(case: Case) -> Any:
    """The transformers model in float64; its weights (Gemma's norms + 1) are exact in float32."""
    import torch
    import transformers

    options = {
        "vocab_size": N_VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "attn_implementation": "eager",
        **case.options,
    }
    text = (
        "Text"
        if case.family
        in (
            *("Gemma3", "Gemma4", "Gemma4Unified", "Llama4", "Qwen3_5", "Qwen3_5Moe"),
            *("EmbeddingGemma2", "Qwen4Exp", "MiniMaxM3VL", "Dots3Note"),
            *("Inkling", "CohereCompass"),
        )
        else ""
    )
    kind = getattr(transformers, f"{case.family}{text}Config")
    names = (
        "rms_norm_eps",
        "layer_norm_eps",
        "layer_norm_epsilon",
        "norm_eps",
    )  # a family knows one
    config = kind(**{name: EPS for name in names if hasattr(kind(), name)} | options)
    model_class = getattr(transformers, f"{case.family}{case.head}")
    with float64_only():
        model = model_class(config).eval()
    rng = np.random.default_rng(sum(case.family.encode()))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = _draw(rng, name, tuple(parameter.shape), model.config.tie_word_embeddings)
            shift = (
                1.0 if case.family in ("Gemma", "Gemma3", "VaultGemma") and "norm" in name else 0.0
            )
            parameter.copy_(torch.from_numpy(value.astype(np.float64) - shift))
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "expert_bias")):  # of experts' scores
                buffer.copy_(torch.from_numpy(0.2 * rng.standard_normal(buffer.shape)).float())
            if name.endswith("tid2eid"):  # each token's experts, all of them different
                n, used = buffer.shape[0], case.options["n_routed_experts"]
                rows = rng.permuted(np.tile(np.arange(used), (n, 1)), axis=1)
                buffer.copy_(torch.from_numpy(rows[:, : buffer.shape[1]]))
            if name.endswith("layer_scalar"):  # of a layer's sum
                buffer.copy_(torch.from_numpy(1 + 0.2 * rng.standard_normal(buffer.shape)).float())
    return model


def _draw(
    rng: np.random.Generator, name: str, shape: tuple[int, ...], tied: bool
) -> npt.NDArray[np.float32]:
    """Weights that keep activations near 1, attention uneven, and logits of about 3."""
    x = rng.standard_normal(shape)
    if ("norm" in name.lower() or "ln_" in name) and not name.endswith("bias"):
        x = 1.0 + 0.25 * x
    elif name.endswith("bias") or len(shape) == 1:
        x = 0.5 * x
    elif any(stem in name for stem in ("embed", "wte", "wpe")):
        x = 0.35 * x if tied else x
    else:
        head = "lm_head" in name or "embed_out" in name
        x = x * (3.0 if head else 1.4) / math.sqrt(shape[1])
    return x.astype(np.float32)


def write_gguf(case: Case, model: Any, path: Path) -> None:
    """Write names, order of rows and offsets as llama.cpp's converter does."""
    config = model.config
    f32 = by_name("F32")
    writer = GGUFWriter(path)
    writer.add("general.architecture", case.arch)
    for key, value in hyper_parameters(config).items():
        writer.add(f"{case.arch}.{key}", value)
    for key, value in byte_vocabulary().items():
        writer.add(f"tokenizer.ggml.{key}", value)
    for name, parameter in model.named_parameters():
        if name.startswith("pooler."):  # of the masked language model
            continue
        to = gguf_name(case.family, name)
        stem = to.rpartition(".")[0].rpartition(".")[2]
        convert = FAMILIES.get(case.family, PLAIN).convert
        data = convert(config, stem, parameter.detach().numpy()).astype(np.float32)
        writer.add_tensor(to, data.shape, f32, data)
    factors = llama3_factors(config)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.shape, f32, factors)
    for length in ("short", "long"):
        given = (getattr(config, "rope_parameters", None) or {}).get(f"{length}_factor")
        if given is not None:
            some = np.array(given, np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", some.shape, f32, some)
    writer.write()


def hyper_parameters(config: Any) -> dict[str, Any]:
    """GGUF's keys, without the architecture's prefix."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # Of every layer, or for Gemma by the layer's type; GPT-2 has none.
    layers = getattr(config, "rope_parameters", None) or {"rope_type": "", "rope_theta": 1e4}
    rope = layers.get("full_attention", layers)
    inner = getattr(config, "intermediate_size", None) or config.n_inner
    kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    keys: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": inner,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": rope["rope_theta"],
    }
    if rope["rope_type"] in ("linear", "yarn"):
        keys["rope.scaling.type"] = rope["rope_type"]
        keys["rope.scaling.factor"] = rope["factor"]
    if (share := rope.get("partial_rotary_factor", 1.0)) != 1.0:
        keys["rope.dimension_count"] = int(head_dim * share)
    if rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        stretch = math.log(config.max_position_embeddings / original)
        keys["rope.scaling.attn_factor"] = math.sqrt(1 + stretch / math.log(original))
        keys["rope.scaling.original_context_length"] = original
    if rope["rope_type"] == "yarn":
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    for key, name in {
        "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
        "attention.temperature_scale": "llama_4_scaling_beta",
    }.items():
        if rope.get(name):
            keys[key] = rope[name]
    for key, attribute in {
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "attention.layer_norm_epsilon": "layer_norm_eps",
        "use_parallel_residual": "use_parallel_residual",
        "attention.sliding_window": "sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    }.items():
        if (value := getattr(config, attribute, None)) is not None:
            keys[key] = value
    if (eps := getattr(config, "layer_norm_epsilon", None)) is not None:
        keys["attention.layer_norm_epsilon"] = eps
    return keys


def llama3_factors(config: Any) -> npt.NDArray[np.float32] | None:
    """What each pair's frequency is divided by in Llama 3.1; None for other models.

    Long waves by ``factor``, short ones by 1, those between by the smooth step of Meta's code.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "llama3":
        return None
    dims = config.hidden_size // config.num_attention_heads
    wave = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, dims, 2) / dims)  # tokens per turn
    low = rope["low_freq_factor"]
    high = rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] / wave
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    factors = 1.0 / ((1.0 - smooth) / rope["factor"] + smooth)
    return np.asarray(factors, np.float32)


def byte_vocabulary() -> dict[str, Any]:
    """An SPM vocabulary without merges: controls, the 256 bytes, and pieces to fill N_VOCAB."""
    controls = ["<unk>", "<s>", "</s>"]
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    fill = [f"\u2581{i}" for i in range(N_VOCAB - len(controls) - len(pieces))]
    return {
        "model": "llama",
        "tokens": controls + pieces + fill,
        "scores": [0.0] * N_VOCAB,
        "token_type": [2, 3, 3] + [6] * len(pieces) + [1] * len(fill),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_bos_token": False,
    }
