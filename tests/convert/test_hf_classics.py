"""Phi-2, Falcon, StarCoder and others of their years: folders of transformers, run in place and
converted, against transformers, in every way to read a text.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

import treadle
from tests.changed_gguf import write_changed
from tests.conftest import WriteTiny
from tests.convert.test_hf import convert
from tests.models.hf_cases import Case
from tests.models.hf_tiny import EPS, build, compute_logits, require_transformers
from tests.models.test_arch_truth import check_truth, ids_of
from tests.reference import forward
from tests.tiny import rounding
from treadle.convert.hf.config import read_config
from treadle.convert.hf.tokenizer.pretokenizer import find_pre
from treadle.errors import UnsupportedError
from treadle.files.gguf import GGUFWriter, open_gguf
from treadle.tokenizer.pretokenizers import PRE_TOKENIZERS

_FALCON = {"ffn_hidden_size": 256, "tie_word_embeddings": True, "num_key_value_heads": 1}
_NEW = {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}
_BLOOM = {"seq_length": 128, "tie_word_embeddings": True, "num_key_value_heads": None}
_MPT = {"max_seq_len": 128, "tie_word_embeddings": True, "num_key_value_heads": None}
_STARCODER = {"n_positions": 128, "tie_word_embeddings": True}
CASES: dict[str, Case] = {
    "phi": Case("Phi", "phi2", {"num_key_value_heads": 4, "intermediate_size": 256}),
    "phi-partial": Case(
        "Phi",
        "phi2",
        {
            "num_key_value_heads": 4,
            "hidden_size": 128,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.375,
            },
        },
    ),
    "falcon-7b": Case("Falcon", "falcon", {**_FALCON, "num_kv_heads": 1}),
    "falcon-40b": Case("Falcon", "falcon", _NEW),
    "falcon-11b": Case(
        "Falcon",
        "falcon",
        {**_NEW, "num_ln_in_parallel_attn": 1, "tie_word_embeddings": False},
    ),
    "falcon-heads": Case("Falcon", "falcon", {**_FALCON, "multi_query": False}),
    "starcoder": Case("GPTBigCode", "starcoder", {**_STARCODER, "num_key_value_heads": 1}),
    "olmo": Case("Olmo", "olmo"),
    "olmo-clamp": Case("Olmo", "olmo", {"clip_qkv": 0.75, "tie_word_embeddings": True}),
    "bloom": Case("Bloom", "bloom", {**_BLOOM, "num_attention_heads": 4}),
    "bloom-six": Case("Bloom", "bloom", {**_BLOOM, "num_attention_heads": 6, "hidden_size": 96}),
    "mpt": Case("Mpt", "mpt", _MPT),
    "mpt-six": Case(
        "Mpt",
        "mpt",
        {
            **_MPT,
            "num_attention_heads": 6,
            "hidden_size": 96,
            "attn_config": {"clip_qkv": 0.75},
        },
    ),
    "starcoder-heads": Case(
        "GPTBigCode",
        "starcoder",
        {**_STARCODER, "n_inner": 160, "multi_query": False, "num_key_value_heads": 4},
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """``saved(case)``: a directory written by transformers, and its model."""
    require_transformers()
    import torch

    made: dict[str, tuple[Path, Any]] = {}
    root = tmp_path_factory.mktemp("classics")

    def save(case: str) -> tuple[Path, Any]:
        if case not in made:
            model = build(CASES[case])
            model.to(torch.float32).save_pretrained(root / case)
            made[case] = root / case, model.to(torch.float64)
        return made[case]

    return save


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_transformers(
    case: str, saved: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    """In one go, in chunks and token by token, with the bits of any number of threads; and in
    place the same.
    """
    folder, model = saved(case)
    truth = compute_logits(model, ids_of())
    made = convert(folder, tmp_path / "made.gguf")
    assert truth.std() > 0.5
    with open_gguf(made) as file:
        assert file.metadata["general.architecture"] == CASES[case].arch
    check_truth(made, truth)
    with treadle.load(folder, threads=2, kv="f32") as loaded:
        assert loaded.config.ignored == ()
        error = np.abs(loaded.logits(ids_of()) - truth).max() / np.abs(truth).max()
        assert error <= rounding(loaded.config)


SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3, "vocab_size": 320}


def read(kind: str, **given: Any) -> dict[str, Any]:
    """GGUF's keys, "ARCH." cut off."""
    found = read_config({"model_type": kind, **SIZES, **given}, Path("config.json")).metadata
    return {key.partition(".")[2]: value for key, value in found.items()}


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        ("phi", {"qk_layernorm": True}, "qk_layernorm: is True"),
        ("falcon", {"alibi": True}, "alibi: is True"),  # Falcon RW
        ("falcon", {"parallel_attn": False}, "parallel_attn: is False"),
        ("falcon", {"bias": True}, "bias: is True"),
        ("gpt_bigcode", {"scale_attn_weights": False}, "scale_attn_weights: is False"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "post_layernorm: is True"),
        ("mpt", {"attn_config": {"alibi": False}}, "attn_config.alibi: is False"),
        ("mpt", {"attn_config": {"prefix_lm": True}}, "attn_config.prefix_lm: is True"),
        ("mpt", {"attn_config": {"softmax_scale": 0.5}}, "attn_config.softmax_scale: is 0.5"),
        ("mpt", {"norm_type": "rmsnorm"}, "norm_type: is 'rmsnorm'"),
        ("mpt", {"logit_scale": "inv_sqrt_d_model"}, "logit_scale: is 'inv_sqrt_d_model'"),
    ],
)
def test_what_is_refused(kind: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        read(kind, **given)


def test_words_of_bloom() -> None:
    """bigscience's own files say n_embed, and the newest hidden_size and n_head."""
    plain = read("bloom")
    older = {"hidden_size": None, "n_embed": 64, "num_hidden_layers": None, "n_layer": 3}
    assert read("bloom", **older) == plain
    assert read("bloom", num_attention_heads=None, n_head=4) == plain
    assert plain["feed_forward_length"] == 256
    assert plain["context_length"] == 2048


def test_keys_of_mpt() -> None:
    """StoryWriter's slopes: llama.cpp heeds them, and transformers does not."""
    sizes = {"d_model": 64, "n_heads": 4, "n_layers": 3}
    made = read("mpt", **sizes, attn_config={"alibi_bias_max": 16, "clip_qkv": 6})
    assert made["attention.max_alibi_bias"] == 16.0
    assert made["attention.clamp_kqv"] == 6.0
    made = read("mpt", **sizes)
    assert made["attention.max_alibi_bias"] == 8.0
    assert "attention.clamp_kqv" not in made


def test_norms_of_queries_and_keys_of_mpt(
    saved: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    """LayerNorm of all heads together, as MPT 1B has it; transformers knows none."""
    folder = saved("mpt")[0]
    shutil.copytree(folder, tmp_path / "hf")
    rng = np.random.default_rng(3)
    norms = {}
    for i in range(3):
        for one in "qk":
            name = f"transformer.blocks.{i}.attn.{one}_ln.weight"
            norms[name] = 1.0 + 0.3 * rng.standard_normal(64).astype(np.float32)
    tensors = load_file(folder / "model.safetensors") | norms
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    ids = ids_of()
    with treadle.load(convert(tmp_path / "hf", tmp_path / "m.gguf"), threads=2, kv="f32") as model:
        assert model.config.layers[0].wide_norm
        exact = forward(model.gguf, model.config, ids)
        found = model.logits(ids)
    assert np.abs(found - exact).max() <= rounding(model.config) * np.abs(exact).max()
    with treadle.load(folder, threads=2, kv="f32") as plain:
        assert np.abs(plain.logits(ids) - exact).max() > 0.1


def test_orion(tmp_path: Path) -> None:
    """Its code came with its folders; it computes what a StableLM does that turns whole heads."""
    case = Case("StableLm", "orion", {"partial_rotary_factor": 1.0, "rms_norm_eps": EPS})
    require_transformers()
    import torch

    model = build(case)
    model.to(torch.float32).save_pretrained(tmp_path / "hf")
    truth = compute_logits(model.to(torch.float64), ids_of())
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text()) | {
        "model_type": "orion",
        "architectures": ["OrionForCausalLM"],
    }
    path.write_text(json.dumps(config))
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    with open_gguf(made) as file:
        assert file.metadata["general.architecture"] == "orion"
    check_truth(made, truth)
    with treadle.load(tmp_path / "hf", threads=2, kv="f32") as loaded:
        error = np.abs(loaded.logits(ids_of()) - truth).max() / np.abs(truth).max()
        assert error <= rounding(loaded.config)


def test_codeshell(tiny: WriteTiny) -> None:
    """From GGUF files alone: against the twin in float64."""
    with treadle.load(tiny("codeshell", tied=0), threads=2, kv="f32") as model:
        assert "attn_output.bias" in model.config.optional
        exact = forward(model.gguf, model.config, ids_of())
        error = np.abs(model.logits(ids_of()) - exact).max() / np.abs(exact).max()
        assert error <= rounding(model.config)


def test_scales_of_awq_are_refused(
    saved: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    """Of MPT's activations: without them every layer would compute something else."""
    made = convert(saved("mpt")[0], tmp_path / "made.gguf")
    write_changed(made, tmp_path / "awq.gguf", tensors={"blk.1.ffn_act.scales": np.ones(256)})
    with pytest.raises(UnsupportedError, match=r"blk\.1\.ffn_act\.scales: AWQ activation scales"):
        treadle.load(tmp_path / "awq.gguf")


def test_one_matrix_of_queries_keys_and_values(
    saved: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    """Phi-2 as llama.cpp's converter wrote it at first: the same bits."""
    made = convert(saved("phi")[0], tmp_path / "made.gguf")
    writer = GGUFWriter(tmp_path / "fused.gguf")
    with open_gguf(made) as file:
        for key, value in file.metadata.items():
            writer.add(key, value, file.types[key])
        for name, tensor in file.tensors.items():
            q, k, v = (name.replace("attn_q.", f"attn_{x}.") for x in "qkv")
            if name == q and ".attn_q." in name:
                both = [file.tensors[each].dequantize() for each in (q, k, v)]
                rows = np.concatenate(both)
                writer.add_tensor(name.replace("attn_q.", "attn_qkv."), rows.shape, "F32", rows)
            elif ".attn_k." not in name and ".attn_v." not in name:
                writer.add_tensor(name, tensor.shape, tensor.ggml_type, tensor.data)
        writer.write()
    found = []
    for path in (made, tmp_path / "fused.gguf"):
        with treadle.load(path, threads=2, kv="f32") as model:
            assert model.config.ignored == ()
            found.append(model.logits(ids_of()))
    assert np.array_equal(found[0], found[1])


_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_BLOOM_CUTS: list[dict[str, Any]] = [
    {
        "type": "Split",
        "pattern": {"Regex": " ?[^(\\s|[.,!?…。，、।۔،])]+"},
        "behavior": "Isolated",
        "invert": False,
    },
    {**_BYTES, "use_regex": False},
]
_FALCON_CUTS: list[dict[str, Any]] = [
    {"type": "Punctuation", "behavior": "Contiguous"},
    {**_BYTES, "use_regex": True},
    {"type": "Digits", "individual_digits": False},
    {
        "type": "Split",
        "pattern": {"Regex": "[0-9][0-9][0-9]"},
        "behavior": "Isolated",
        "invert": False,
    },
]


def test_cuts_of_published_tokenizers() -> None:
    """As BLOOM's, Falcon's and Tiny Aya's tokenizer.json spell them."""
    path = Path("tokenizer.json")
    model = {"vocab": {"12": 0, "\u0120a": 1}, "merges": []}

    def found(cuts: Any, model: Any = model) -> str:
        whole = {"type": "Sequence", "pretokenizers": cuts}
        return find_pre({"pre_tokenizer": whole, "model": model}, path)

    assert found(_BLOOM_CUTS) == "bloom"
    assert found(_FALCON_CUTS) == "falcon"
    assert found([_FALCON_CUTS[i] for i in (0, 1, 3)]) == "falcon"
    expressions = r"\d{1,3}(?=(?:\d{3})*\b)", PRE_TOKENIZERS["gpt-4o"].patterns[0]
    aya = [
        {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False}
        for each in expressions
    ]
    assert found(aya) in ("tiny_aya", "cohere2moe")  # which are one
    with pytest.raises(UnsupportedError, match="no GGUF pre-tokenizer"):
        found(_FALCON_CUTS, {**model, "merges": [["\u0120", "1"]]})


@pytest.mark.parametrize("text", ["I've 12 x!\n\nyY (a) 。b", "a|b [c] d.e", " ( x", "漢、字 1,2"])
def test_blooms_class_in_a_class(text: str) -> None:
    """What treadle writes of BLOOM's expression cuts as its own spelling does."""
    own = _BLOOM_CUTS[0]["pattern"]["Regex"]
    split = [Split(Regex(it), "isolated") for it in (own, PRE_TOKENIZERS["bloom"].patterns[0])]
    assert split[0].pre_tokenize_str(text) == split[1].pre_tokenize_str(text)
