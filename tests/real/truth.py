"""The real models in float32: transformers on the dequantised weights of their GGUF files.

``gguf``, the format's own package, dequantises; treadle only finds the bytes.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from treadle.files.gguf import open_gguf

TEXTS = Path(__file__).with_name("texts.txt")
VALUES = Path(__file__).with_name("values.json")
N_WINDOW = 128  # tokens of each text, at most

# Names of GGUF's tensors, and those of transformers.
NAMES = {
    r"token_embd\.": "model.embed_tokens.",
    r"output_norm\.": "model.norm.",
    r"^output\.": "lm_head.",
    r"blk\.(\d+)\.": r"model.layers.\1.",
    r"\.attn_([qkv])\.": r".self_attn.\1_proj.",
    r"\.attn_output\.": ".self_attn.o_proj.",
    r"\.attn_([qk])_norm\.": r".self_attn.\1_norm.",
    r"\.ffn_(gate|up|down)\.": r".mlp.\1_proj.",
}
LLAMA = {r"\.attn_norm\.": ".input_layernorm.", r"\.ffn_norm\.": ".post_attention_layernorm."}
GEMMA = {
    r"\.attn_norm\.": ".input_layernorm.",
    r"\.post_attention_norm\.": ".post_attention_layernorm.",
    r"\.ffn_norm\.": ".pre_feedforward_layernorm.",
    r"\.post_ffw_norm\.": ".post_feedforward_layernorm.",
}


@cache
def texts() -> dict[str, str]:
    """Texts of some languages and kinds, by their name."""
    parts = re.split(r"^== (\w+) ==\n", TEXTS.read_text("utf-8"), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def float32_model(path: Path) -> Any:
    """The transformers model of a GGUF file of Llama's or Gemma 3's architecture, in float32."""
    import gguf
    import torch
    import transformers as hf
    from transformers.initialization import no_init_weights

    file = open_gguf(path)
    arch = file.metadata["general.architecture"]

    def get(name: str) -> Any:
        return file.metadata.get(f"{arch}.{name}")

    n_head = int(get("attention.head_count"))
    n_embd = int(get("embedding_length"))
    sizes: dict[str, Any] = {
        "hidden_size": n_embd,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": n_head,
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": get("attention.key_length") or n_embd // n_head,
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": get("context_length"),
        "vocab_size": int(file.tensors["token_embd.weight"].shape[0]),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attn_implementation": "eager",
    }
    base = float(get("rope.freq_base"))
    if arch == "gemma3":
        full = {"rope_type": "default", "rope_theta": base}
        local = {"rope_type": "default", "rope_theta": 10_000.0}  # Gemma 3's, which no key has
        config: Any = hf.Gemma3TextConfig(
            **sizes,
            query_pre_attn_scalar=sizes["head_dim"],
            sliding_window=get("attention.sliding_window"),
            rope_parameters={"full_attention": full, "sliding_attention": local},
        )
    else:
        assert arch == "llama", arch
        config = hf.LlamaConfig(**sizes, rope_theta=base)
    with no_init_weights():  # all of them are loaded
        model = hf.AutoModelForCausalLM.from_config(config)
    weights = {}
    for name, tensor in file.tensors.items():
        kind = gguf.GGMLQuantizationType(tensor.ggml_type)
        values = gguf.dequantize(tensor.data, kind).astype(np.float32).reshape(tensor.shape)
        if arch == "gemma3" and name.endswith("norm.weight"):
            values = values - 1  # transformers multiplies by 1 + weight, GGUF has the sum
        if arch == "llama" and re.search(r"attn_[qk]\.", name):
            values = halves(values, n_head if "attn_q" in name else sizes["num_key_value_heads"])
        for pattern, new in (NAMES | (GEMMA if arch == "gemma3" else LLAMA)).items():
            name = re.sub(pattern, new, name)
        weights[name] = torch.from_numpy(values)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    return model.eval()


def halves(rows: np.ndarray[Any, Any], n_head: int) -> np.ndarray[Any, Any]:
    """A head's rows as transformers rotates them: in halves, where Llama's GGUF has pairs."""
    pairs = rows.reshape(n_head, -1, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))


def float32_logits(
    model: Any, ids: list[int], rows: list[int] | None = None
) -> np.ndarray[Any, Any]:
    """f32 ``[n_tokens, n_vocab]``, or of some ``rows`` alone."""
    import torch

    kept = 0 if rows is None else torch.tensor(rows)
    with torch.no_grad():
        logits = model(torch.tensor([ids]), logits_to_keep=kept).logits[0]
    found: np.ndarray[Any, Any] = logits.numpy()
    return found


def compare(expected: np.ndarray[Any, Any], logits: np.ndarray[Any, Any]) -> tuple[float, float]:
    """Mean over positions of KL(expected || logits) in nats, and the share of positions whose
    likeliest token is the same.
    """
    kl = []
    for wanted, got in zip(expected, logits, strict=True):  # few rows of 262144 at once
        p = log_softmax(wanted)
        q = log_softmax(got)
        kl.append(float(np.sum(np.exp(p) * (p - q), dtype=np.float64)))
    return float(np.mean(kl)), float(np.mean(expected.argmax(1) == logits.argmax(1)))


def log_softmax(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """In float32: its error of 1e-6 is a thousandth of what is measured."""
    x = x.astype(np.float32) - np.float32(x.max())
    found: np.ndarray[Any, Any] = x - np.log(np.sum(np.exp(x), dtype=np.float64)).astype(np.float32)
    return found


@cache
def values() -> Any:
    """What ``tools/real_values.py`` has written."""
    return json.loads(VALUES.read_text("utf-8"))
