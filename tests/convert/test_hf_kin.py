"""Families near Llama: Hugging Face folders, run in place and converted.

Some families have no class in transformers, their folders bring code of their own. Of these a
twin is written out: a model of transformers that computes the same, in the family's own names.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.test_hf import convert, prompt, worst
from tests.matrix_rounding import bf16_limit
from tests.models.hf_cases import Case
from tests.models.hf_tiny import build, compute_logits, require_transformers
from tests.models.test_arch_truth import check_truth, ids_of
from tests.reference import forward
from tests.tiny import rounding, write_model
from treadle.convert.hf.config import read_config
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.models.load import load_config

Tensors = dict[str, np.ndarray]
Spell = Callable[[Tensors], Tensors]

N_HEAD = 4
N_KV = 2
HEAD_DIM = 16
_FILES = {"num_hidden_layers": 3, "hidden_size": 64, "vocab_size": 320}
_ROPE = {"rope_theta": 10000.0}


def saved(case: Case, folder: Path, *, unit_head: bool = False) -> Any:
    """The model that transformers wrote into ``folder``, in float64; ``unit_head``: the rows of its
    head are of length 1.
    """
    import torch

    require_transformers()
    model = build(case)
    if unit_head:
        head = model.lm_head.weight.data
        head.copy_((head / head.norm(dim=-1, keepdim=True)).float())
    model.to(torch.float32).save_pretrained(folder)
    return model.to(torch.float64)


def respelt(folder: Path, spell: Spell, config: Mapping[str, Any]) -> None:
    """Write the folder's tensors by other names, and another config.json."""
    from safetensors.numpy import load_file, save_file

    path = folder / "model.safetensors"
    tensors = {k: np.ascontiguousarray(v) for k, v in spell(load_file(path)).items()}
    save_file(tensors, path)
    (folder / "config.json").write_text(json.dumps(config))


def renamed(tensors: Tensors, *words: tuple[str, str]) -> Tensors:
    """In each name the first word that is in it is replaced, then the next."""
    found = {}
    for name, rows in tensors.items():
        for theirs, own in words:
            name = name.replace(theirs, own)
        found[name] = rows
    return found


def joined(tensors: Tensors, into: str, *parts: str, by_group: bool = False) -> Tensors:
    """Matrices of each layer below one another, ``into`` in the place of the first of ``parts``;
    ``by_group``: the rows of each key's heads together.
    """
    found = dict(tensors)
    for name in tensors:
        if parts[0] not in name:
            continue
        rows = [found.pop(name.replace(parts[0], part)) for part in parts]
        inner = rows[0].shape[1:]
        if by_group:
            rows = [each.reshape(N_KV, -1, *inner) for each in rows]
        whole = np.concatenate(rows, int(by_group)).reshape(-1, *inner)
        found[name.replace(parts[0], into)] = whole
    return found


def _qkv(into: str, **how: Any) -> Callable[[Tensors], Tensors]:
    parts = [f"self_attn.{x}_proj" for x in "qkv"]
    return lambda tensors: joined(tensors, into, *parts, **how)


def _internlm2(tensors: Tensors) -> Tensors:
    return renamed(
        _qkv("attention.wqkv", by_group=True)(tensors),
        ("embed_tokens", "tok_embeddings"),
        ("lm_head", "output"),
        ("self_attn.o_proj", "attention.wo"),
        ("mlp.gate_proj", "feed_forward.w1"),
        ("mlp.down_proj", "feed_forward.w2"),
        ("mlp.up_proj", "feed_forward.w3"),
        ("input_layernorm", "attention_norm"),
        ("post_attention_layernorm", "ffn_norm"),
    )


def _chatglm(tensors: Tensors) -> Tensors:
    return {
        "transformer.rotary_pos_emb.inv_freq": np.ones(4, np.float32),
        **renamed(
            _qkv("self_attention.query_key_value")(tensors),
            ("model.embed_tokens", "transformer.embedding.word_embeddings"),
            ("model.norm", "transformer.encoder.final_layernorm"),
            ("model.layers", "transformer.encoder.layers"),
            ("lm_head", "transformer.output_layer"),
            ("self_attn.o_proj", "self_attention.dense"),
            ("mlp.gate_up_proj", "mlp.dense_h_to_4h"),
            ("mlp.down_proj", "mlp.dense_4h_to_h"),
        ),
    }


def _baichuan2(tensors: Tensors) -> Tensors:
    """Rows of the head are of any length in the file."""
    found = _qkv("self_attn.W_pack")(tensors)
    length = 2.0 ** np.random.default_rng(3).integers(-3, 4, (320, 1)).astype(np.float32)
    return found | {"lm_head.weight": found["lm_head.weight"] * length}


def _same(tensors: Tensors) -> Tensors:
    return tensors


_LLAMA = {
    **_FILES,
    **_ROPE,
    "intermediate_size": 96,
    "num_attention_heads": N_HEAD,
    "num_key_value_heads": N_KV,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_MINICPM = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16}
_GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": float(np.float32(1.4 / 3**0.5)),
    "logits_scaling": 4.0,
    "attention_multiplier": HEAD_DIM**-0.5,
}
_DYNAMIC = {"type": "dynamic", "factor": 2.0}
_LONG = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 32,  # a text of 48 has the long factors
    "short_factor": [1.0] * 8,
    "long_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 3.0, 4.0, 4.0],
}

# The twin, how its tensors are spelt, and config.json.
TWINS: dict[str, tuple[Case, Spell, dict[str, Any]]] = {
    "internlm2": (Case("Llama", "llama"), _internlm2, {**_LLAMA, "rope_scaling": _DYNAMIC}),
    "internlm2-bias": (Case("Llama", "llama", {"attention_bias": True}), _internlm2, _LLAMA),
    "chatglm": (
        Case(
            "Glm",
            "chatglm",
            {
                "head_dim": HEAD_DIM,
                "pad_token_id": 0,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 50000.0,
                    "partial_rotary_factor": 0.5,
                },
            },
        ),
        _chatglm,
        {
            "padded_vocab_size": 320,
            "vocab_size": 320,
            "num_layers": 3,
            "hidden_size": 64,
            "ffn_hidden_size": 96,
            "kv_channels": HEAD_DIM,
            "num_attention_heads": N_HEAD,
            "multi_query_attention": True,
            "multi_query_group_num": N_KV,
            "seq_length": 128,
            "layernorm_epsilon": 1e-5,
            "rope_ratio": 5,
            "add_qkv_bias": True,
            "original_rope": True,
        },
    ),
    "minicpm": (Case("Granite", "granite", _GRANITE), _same, {**_LLAMA, **_MINICPM}),
    "minicpm-tied-long": (
        Case(
            "Granite",
            "granite",
            {**_GRANITE, "tie_word_embeddings": True, "rope_parameters": {**_LONG, **_ROPE}},
        ),
        _same,
        {**_LLAMA, **_MINICPM, "tie_word_embeddings": True, "rope_scaling": _LONG},
    ),
    "baichuan": (
        Case("Llama", "llama", {"num_key_value_heads": N_HEAD}),
        _qkv("self_attn.W_pack"),
        {k: v for k, v in _LLAMA.items() if k != "num_key_value_heads"},
    ),
    "baichuan-2": (
        Case("Llama", "llama", {"num_key_value_heads": N_HEAD}),
        _baichuan2,
        {**_LLAMA, "num_key_value_heads": N_HEAD, "z_loss_weight": 0},
    ),
    "PanguEmbedded": (Case("Llama", "llama", {"attention_bias": True}), _same, _LLAMA),
}
CASES = {
    "bitnet": Case("BitNet", "bitnet-b1.58", {"tie_word_embeddings": True}),
    "apertus": Case("Apertus", "apertus", {"head_dim": HEAD_DIM}),
    "apertus-rope": Case(
        "Apertus",
        "apertus",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "glm": Case("Glm", "chatglm", {"head_dim": HEAD_DIM, "pad_token_id": 0}),
    "glm-half": Case("Glm", "chatglm", {"head_dim": 32, "pad_token_id": 0}),
}
ALIKE = ("exaone", "internlm3")  # transformers computes them by its class of Llama
Made = tuple[Path, np.ndarray, np.ndarray]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """``made(case)``: a folder, its logits of ``prompt()`` and of ``ids_of()``."""
    found: dict[str, Made] = {}
    root = tmp_path_factory.mktemp("kin")

    def make(case: str) -> Made:
        if case in found:
            return found[case]
        folder = root / case
        if case in TWINS:
            twin, spell, config = TWINS[case]
            model = saved(twin, folder, unit_head=spell is _baichuan2)
            kind = case.partition("-")[0]
            named = {"model_type": kind, "architectures": ["XForCausalLM"]}
            respelt(folder, spell, {**named, **config})
        elif case in CASES:
            model = saved(CASES[case], folder)
        else:
            model = saved_alike(case, folder)
        found[case] = folder, compute_logits(model, prompt()), compute_logits(model, ids_of())
        return found[case]

    return make


def saved_alike(kind: str, folder: Path) -> Any:
    """Llama's weights in a folder that transformers wrote of its own family."""
    import torch
    import transformers

    require_transformers()
    llama = build(Case("Llama", "llama", {"head_dim": HEAD_DIM}))
    own = llama.config.to_dict()
    del own["model_type"], own["architectures"]
    config = transformers.AutoConfig.for_model(kind, **own)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(llama.to(torch.float32).state_dict())
    model.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == kind
    return llama.to(torch.float64)


@pytest.mark.filterwarnings("ignore:with a context over .* long rope factors")
@pytest.mark.parametrize("case", [*TWINS, *CASES, *ALIKE])
def test_runs_in_place_and_converted(
    case: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    folder, expected, of_ids = made(case)
    path = convert(folder, tmp_path / "made.gguf")
    for each in (folder, path):
        with treadle.load(each, threads=2, kv="f32") as loaded:
            assert loaded.config.ignored == ()
            error = worst(loaded.logits(prompt()), expected)
            assert error <= rounding(loaded.config), (each, error / rounding(loaded.config))
    check_truth(path, of_ids)


def read(kind: str, **given: Any) -> dict[str, Any]:
    return read_config({"model_type": kind, **given}, Path("config.json")).metadata


def test_exaone_as_its_own_code_spelt_it() -> None:
    """The keys of published folders, which transformers renames since it has the family."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    older = {"num_layers": 3, "layer_norm_epsilon": 2e-5, "activation_function": "silu"}
    newer = {"num_hidden_layers": 3, "rms_norm_eps": 2e-5, "hidden_act": "silu"}
    assert read("exaone", **sizes, **older) == read("exaone", **sizes, **newer)
    with pytest.raises(UnsupportedError, match="activation_function: 'gelu'"):
        read("exaone", **sizes, **{**older, "activation_function": "gelu"})


def test_keys_that_files_of_minicpm_lacked(tmp_path: Path) -> None:
    """Those of 2024 have the scales that all models had, by their sizes."""
    write_model(tmp_path / "x.gguf", "minicpm", n_layer=3, n_embd=64)
    with open_gguf(tmp_path / "x.gguf") as gguf:
        config = load_config(gguf)
        residual = 1.4 / 3**0.5
        assert config.embd_scale == pytest.approx(12.0 / residual)
        assert config.logit_scale == pytest.approx(256 / 64)
        scales = {"embedding_scale": 3.0, "residual_scale": 0.5, "logit_scale": 8.0}
        gguf.metadata = {**gguf.metadata, **{f"minicpm.{k}": v for k, v in scales.items()}}
        told = load_config(gguf)
        assert (told.embd_scale, told.logit_scale) == (6.0, 0.125)


@pytest.mark.slow
def test_scores_of_baichuan_13b_fall_with_distance(tmp_path: Path) -> None:
    """Its layers are 40, and no key says so. llama.cpp has the same logits, to 7e-6."""
    sizes: dict[str, Any] = {"n_embd": 32, "n_head": 5, "n_head_kv": 5, "head_dim": 8, "n_ff": 32}
    write_model(tmp_path / "x.gguf", "baichuan", n_layer=40, **sizes)
    ids = prompt()
    with treadle.load(tmp_path / "x.gguf", threads=2, kv="f32") as model:
        assert (model.config.alibi, model.config.ropes) == (8.0, ())
        exact = forward(model.gguf, model.config, ids)
        assert worst(model.logits(ids), exact) <= rounding(model.config)
        session = model.session()
        rows = np.concatenate([session.logits([i]) for i in ids])
        assert worst(rows, exact) <= rounding(model.config)
        session.close()
    write_model(tmp_path / "y.gguf", "baichuan", n_layer=39, **sizes)
    with open_gguf(tmp_path / "y.gguf") as gguf:
        config = load_config(gguf)
        assert config.alibi == 0.0
        assert config.ropes


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("chatglm", "multi_query_attention", False),
        ("chatglm", "apply_residual_connection_post_layernorm", True),
        ("minicpm", "num_experts", 8),
        ("internlm2", "hidden_act", "gelu"),
    ],
)
def test_what_would_be_wrong_is_refused(kind: str, key: str, value: Any) -> None:
    config = {"model_type": kind, **TWINS[kind][2]}
    read_config(config, Path("config.json"))
    with pytest.raises(UnsupportedError, match=key):
        read_config({**config, key: value}, Path("config.json"))


def test_groups_that_do_not_fit(made: Callable[[str], Made], tmp_path: Path) -> None:
    """Rows that are no whole groups are an error that names the tensor."""
    folder = shutil.copytree(made("internlm2")[0], tmp_path / "x")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 3}))
    with pytest.raises(FileError, match=r"wqkv\.weight"):
        treadle.load(folder)


def test_numbers_of_an_activation(made: Callable[[str], Made], tmp_path: Path) -> None:
    """Apertus has four in each layer, in a folder as tensors, in a file as keys."""
    from safetensors.numpy import load_file, save_file

    folder = shutil.copytree(made("apertus")[0], tmp_path / "x")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.act_fn.alpha_n"
    path = convert(folder, tmp_path / "x.gguf")
    with open_gguf(path) as gguf:
        metadata = dict(gguf.metadata)
        assert list(metadata["xielu.alpha_n"])[1] == tensors[name].item()  # type: ignore[arg-type]

        def read_with(*value: Any) -> Any:
            gguf.metadata = {**metadata, "xielu.alpha_n": value[0]} if value else metadata
            return load_config(gguf)

        for wrong, said in (([0.5], "has 1 entries"), ([0.5, "a", 1.0], "holds nan")):
            with pytest.raises(FileError, match=said):
                read_with(wrong)
        assert len({layer.curve[1] for layer in read_with(0.5).layers}) == 1  # one for all
        del metadata["xielu.alpha_n"]
        with pytest.raises(FileError, match=r"xielu\.alpha_n: the key is missing"):
            read_with()
    others = {k: v for k, v in tensors.items() if k != name}
    for damaged in ({}, {name: np.ones(2, np.float32)}, {name: np.ones(1, np.int32)}):
        save_file({**others, **damaged}, folder / "model.safetensors")
        with pytest.raises(FileError, match=r"layers\.1\.mlp\.act_fn\.alpha_n"):
            treadle.load(folder)


def test_master_weights_become_ternary(tmp_path: Path) -> None:
    """BitNet's published folder of BF16, as its code computes with it but for what that rounds of
    activations. The truth has the ternary weights.
    """
    import torch
    from safetensors.numpy import load_file, save_file

    model = saved(CASES["bitnet"], tmp_path / "x")
    masters = load_file(tmp_path / "x" / "model.safetensors")
    for name, parameter in model.named_parameters():
        if "_proj" not in name:
            continue
        scale = float(np.abs(masters[name]).mean(dtype=np.float64))
        ternary = np.clip(np.rint(masters[name] / np.float32(scale)), -1, 1)
        assert len(np.unique(ternary)) == 3
        rounded = torch.tensor(scale).to(torch.bfloat16).to(torch.float64)
        parameter.data.copy_(torch.from_numpy(ternary) * rounded)
    save_file(masters, tmp_path / "x" / "model.safetensors")
    path = tmp_path / "x" / "config.json"
    config = json.loads(path.read_text())
    how = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
    path.write_text(json.dumps({**config, "quantization_config": how}))
    expected = compute_logits(model, prompt())
    for each in (tmp_path / "x", convert(tmp_path / "x", tmp_path / "made.gguf")):
        with treadle.load(each, threads=2, kv="f32") as loaded:
            assert loaded.gguf.tensors["blk.0.ffn_up.weight"].type_name == "BF16"
            error = worst(loaded.logits(prompt()), expected)
            assert error <= bf16_limit(2.0**-9, loaded.isa), (each, error)
    for wrong in ({"quantization_mode": "offline"}, {"linear_class": "bitlinear"}):
        path.write_text(json.dumps({**config, "quantization_config": {**how, **wrong}}))
        with pytest.raises(UnsupportedError, match="master weights"):
            treadle.load(tmp_path / "x")
