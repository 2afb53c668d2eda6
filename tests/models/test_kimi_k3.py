"""Kimi K3: folders in the published layout, in place and converted, against a twin in float64,
texts whose states are cut, forked and found again, files of llama.cpp's converter, and what is
refused.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests import tiny
from tests.convert.test_hf import convert, keys_of, worst
from tests.convert.test_hf_chatglm import ranks
from tests.kimi_k3_twin import TEXT, Twin, draw, pack, save
from tests.models import test_hybrids as hybrids
from tests.models.test_arch_truth import check_truth, ids_of
from tests.models.ways import PORTABLE, check_instruction_set, check_returns
from tests.reference import forward
from tests.tiny import rounding, write_model
from tests.twins import logits_of_twins
from treadle.chat.template.template import load_template
from treadle.convert.hf.folder import open_hf
from treadle.engine.batch import BatchItem
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import GGUFWriter, open_gguf
from treadle.formats import by_name
from treadle.kernels.activations import gated, situ_name
from treadle.models.load import load_config
from treadle.tokenizer.tokenizer import load_tokenizer

ARCH = "kimi-k3"
# What llama.cpp's loader asks for in layers.
NAMES = """
    attn_norm ffn_norm attn_res_score ffn_res_score ssm_conv1d_q ssm_conv1d_k ssm_conv1d_v attn_q
    attn_k attn_v ssm_f_a ssm_f_b ssm_beta ssm_a ssm_dt ssm_g ssm_norm attn_output attn_q_a
    attn_q_a_norm attn_q_b attn_kv_a_mqa attn_kv_a_norm attn_k_b attn_v_b attn_gate ffn_gate ffn_up
    ffn_down ffn_gate_inp exp_probs_b ffn_gate_exps ffn_up_exps ffn_down_exps ffn_routed_down
    ffn_routed_up ffn_routed_norm ffn_gate_shexp ffn_up_shexp ffn_down_shexp
"""
KEYS = """
    attention.layer_norm_rms_epsilon attention.key_length_mla attention.value_length_mla
    attention.q_lora_rank attention.kv_lora_rank ssm.conv_kernel kda.head_dim kda.gate_lower_bound
    expert_feed_forward_length expert_shared_count leading_dense_block_count expert_weights_scale
    expert_weights_norm expert_gating_func expert_latent_length attn_res.block_size
    activation.situ_beta activation.situ_linear_beta attention.head_count_kv rope.dimension_count
"""


def changed(**more: Any) -> dict[str, Any]:
    """The text part's keys; those of ``linear_attn_config`` behind "state_"."""
    text = copy.deepcopy(TEXT)
    for key, value in more.items():
        at = text["linear_attn_config"] if key.startswith("state_") else text
        at[key.removeprefix("state_")] = value
    return text


# -- folders --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """A folder, and the twin's logits of ``ids_of()``."""
    tensors = draw(TEXT)
    path = save(tmp_path_factory.mktemp("k3") / "hf", TEXT, tensors)
    return path, Twin(TEXT, tensors).logits(ids_of())


@pytest.fixture(scope="module")
def made(folder: tuple[Path, np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(folder[0], tmp_path_factory.mktemp("made") / "made.gguf")


def test_names_and_keys(made: Path) -> None:
    with open_gguf(made) as file:
        rest = [name.split(".", 2)[2] for name in file.tensors if name.startswith("blk.")]
        assert {re.sub(r"\.(weight|bias)$", "", name) for name in rest} == {*NAMES.split()}
        outside = {"token_embd.weight", "output.weight", "output_norm.weight"}
        outside.add("output_res_score.weight")
        assert {name for name in file.tensors if not name.startswith("blk.")} == outside
        assert file.tensors["blk.0.ssm_a"].shape == (4,)
        assert {f"{ARCH}.{key}" for key in KEYS.split()} <= file.metadata.keys()
        assert np.array_equal(file.metadata[f"{ARCH}.attention.head_count_kv"], [0, 0, 0, 1, 1])
        assert file.metadata[f"{ARCH}.attention.value_length"] == 64


@pytest.mark.slow
def test_twins_of_kernels(tmp_path: Path) -> None:
    """A text by the twins of all kernels: nothing is compiled."""
    write_model(tmp_path / "k.gguf", ARCH, n_layer=3)
    ids = hybrids.text(6)
    with treadle.load(tmp_path / "k.gguf", kv="f32", threads=1, context=64) as model:
        model.plan(1).check()
        kinds = [(at.mixer, at.ffn, at.activation) for at in model.config.layers]
        assert kinds[1] == ("latent_wide", "experts_routed", "situ_1.5_4")
        exact = forward(model.gguf, model.config, ids)
        engine = model.engine
        _, found = logits_of_twins(engine, [BatchItem(engine.cache.sequence(), ids, len(ids))])
        assert worst(found, exact) <= rounding(model.config)


@pytest.mark.slow
def test_in_every_way(folder: tuple[Path, np.ndarray], made: Path) -> None:
    path, truth = folder
    check_truth(made, truth)
    check_truth(path, truth)
    check_returns(made)


@pytest.mark.slow
def test_on_another_instruction_set(folder: tuple[Path, np.ndarray], made: Path) -> None:
    check_instruction_set(made, ids_of(), folder[1], PORTABLE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"q_lora_rank": None, "mla_use_output_gate": False},
        {"latent_moe_use_norm": False, "num_shared_experts": 0, "state_gate_lower_bound": None},
        {"activation_situ_linear_beta": None, "moe_renormalize": False, "attn_res_block_size": 1},
        {"attn_res_block_size": 12, "first_k_dense_replace": 0},
    ],
)
def test_other_models(change: dict[str, Any], tmp_path: Path) -> None:
    text = changed(**change)
    tensors = draw(text)
    truth = Twin(text, tensors).logits(ids_of(12))
    with treadle.load(save(tmp_path, text, tensors), threads=2, kv="f32") as model:
        assert model.config.ignored == ()
        assert worst(model.logits(ids_of(12)), truth) <= 2 * rounding(model.config)


@pytest.mark.slow
def test_packed_experts(tmp_path: Path) -> None:
    """MXFP4, as published: their codes and scales are taken over, to a file as well."""
    tensors = draw(TEXT)
    packed = pack(tensors)
    quantised = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    folder = save(tmp_path / "hf", {**TEXT, "quantization_config": quantised}, packed)
    made = convert(folder, tmp_path / "made.gguf")
    truth = Twin(TEXT, tensors).logits(ids_of(20))
    for path in (folder, made):
        with treadle.load(path, threads=1, kv="f32") as model:
            kinds = {t.type_name for n, t in model.gguf.tensors.items() if "_exps" in n}
            assert kinds == {"MXFP4"}
            assert worst(forward(model.gguf, model.config, ids_of(20)), truth) < 1e-6
            # Activations of these products have eight bits.
            errors = np.abs(model.logits(ids_of(20)) - truth).max(1) / np.abs(truth).max()
            assert np.median(errors) < 0.03


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"hidden_act": "silu"}, "hidden_act: 'silu': treadle supports only situ"),
        ({"mla_use_nope": False}, "mla_use_nope: is False"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func: is 'softmax'"),
        ({"num_expert_group": 2}, "num_expert_group: is 2"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers: is 1"),
        ({"attn_res_block_size": 0}, "attn_res_block_size: is 0"),
        ({"attn_res_block_size": None}, "attn_res_block_size: is missing"),
        ({"activation_situ_beta": 0.0}, "activation_situ_beta: is 0"),
        ({"activation_situ_linear_beta": "4"}, "activation_situ_linear_beta: is '4'"),
        ({"state_use_full_rank_gate": False}, r"linear_attn_config\.use_full_rank_gate: is false"),
        ({"state_gate_lower_bound": 5.0}, r"linear_attn_config\.gate_lower_bound: is 5"),
        ({"state_num_heads": 2}, "linear_attn_config: 2 heads have a state: expected"),
        ({"state_kda_layers": [1, 2]}, r"linear_attn_config\.full_attn_layers: is \[4, 5\]"),
        ({"routed_expert_hidden_size": 64}, r"routed_expert_\w+\.weight: shape \[.*\] \(expected"),
        ({"num_attention_heads": 8, "state_num_heads": 8}, r"A_log: shape \[6\] does not fit"),
    ],
)
def test_folders_that_are_refused(
    change: dict[str, Any], why: str, folder: tuple[Path, np.ndarray], tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").symlink_to(folder[0] / "model.safetensors")
    config = json.loads((folder[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "text_config": changed(**change)}))
    with pytest.raises((FileError, UnsupportedError), match=why):
        open_hf(tmp_path)


def test_scores_without_a_norm(tmp_path: Path) -> None:
    tensors = draw(TEXT)
    del tensors["model.layers.2.mlp_res_proj.weight"]
    with pytest.raises(
        FileError, match=r"exists, but \S*layers\.2\.mlp_res_proj\.weight is missing"
    ):
        open_hf(save(tmp_path, TEXT, tensors))


def test_keys_that_a_config_omits() -> None:
    text = {k: v for k, v in TEXT.items() if "_situ_" not in k and k != "routed_expert_hidden_size"}
    with pytest.raises(FileError, match="activation_situ_beta: is missing"):
        keys_of({"model_type": "kimi_k3", "text_config": text})
    told = keys_of({"model_type": "kimi_k3", "text_config": {**text, "activation_situ_beta": 4.0}})
    assert told[f"{ARCH}.activation.situ_linear_beta"] == 0.0
    assert f"{ARCH}.expert_latent_length" not in told


def test_the_vocabulary(tmp_path: Path) -> None:
    """A list of ranks; an answer ends with the token of config.json too. The folder has no template
    of prompts: the built-in one is used.
    """
    (tmp_path / "tiktoken.model").write_bytes(ranks(b"ab", b"abc"))
    marks = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "[EOS]")
    added = {str(260 + i): {"content": mark} for i, mark in enumerate(marks)}
    settings = {"added_tokens_decoder": added, "eos_token": "[EOS]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    save(tmp_path, TEXT, draw(TEXT), eos_token_id=263)
    with open_hf(tmp_path) as folder:
        ours = load_tokenizer(folder)
        assert load_template(folder, ARCH).builtin == "kimi-k3"
    assert (ours.model, ours.pre) == ("gpt2", "kimi-k2")
    assert ours.encode("ab<|open|>", special=True) == [256, 260]
    assert {263, 264} <= set(ours.eog)


# -- files ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_file_of_llama_cpp(made: Path, tmp_path: Path) -> None:
    """Its converter writes taps of four numbers; older ones no length of values. Some files have
    one matrix for keys and values.
    """
    for both in (False, True):
        writer = GGUFWriter(tmp_path / f"{both}.gguf")
        with open_gguf(made) as file:
            for key, value in file.metadata.items():
                if key != f"{ARCH}.attention.value_length":
                    writer.add(key, value)
            for name, tensor in file.tensors.items():
                wide = "conv1d" in name and not both
                shape = (1, tensor.shape[0], 1, tensor.shape[2]) if wide else tensor.shape
                if not (both and name.endswith(("attn_k_b.weight", "attn_v_b.weight"))):
                    writer.add_tensor(name, shape, by_name(tensor.type_name), tensor.data)
            for i in (3, 4) if both else ():
                k, v = (file.tensors[f"blk.{i}.attn_{x}_b.weight"].dequantize() for x in "kv")
                whole = np.concatenate([k.transpose(0, 2, 1), v], 1).reshape(-1, k.shape[1])
                f32 = by_name("F32")
                writer.add_tensor(
                    f"blk.{i}.attn_kv_b.weight", whole.shape, f32, f32.quantize_rows(whole)
                )
            writer.write()
    logits = []
    for path in (made, tmp_path / "False.gguf", tmp_path / "True.gguf"):
        with treadle.load(path, threads=1, kv="f32") as model:
            assert model.config.ignored == ()
            logits.append(model.logits(ids_of(20)))
    assert np.array_equal(logits[0], logits[1])
    assert worst(logits[2], logits[0]) < 1e-5


@pytest.mark.slow
def test_experts_of_full_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file without their width has no matrices around them."""
    narrow = {k: v for k, v in tiny.KIMI_K3.items() if k != "expert_latent_length"}
    monkeypatch.setattr(tiny, "KIMI_K3", narrow)
    write_model(tmp_path / "k.gguf", ARCH, n_layer=2)
    ids = hybrids.text(12)
    with treadle.load(tmp_path / "k.gguf", kv="f32", threads=2) as model:
        assert model.config.layers[1].ffn == "experts"
        exact = forward(model.gguf, model.config, ids)
        assert worst(model.logits(ids), exact) <= rounding(model.config)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"attn_res.block_size": None}, r"attn_res\.block_size: the key is missing"),
        ({"attn_res.block_size": 0}, r"attn_res\.block_size: is 0"),
        ({"activation.situ_beta": None}, r"situ_beta: the key is missing"),
        ({"activation.situ_beta": float("nan")}, r"situ_beta: is nan"),
        ({"activation.situ_linear_beta": None}, r"situ_linear_beta: the key is missing"),
        ({"kda.gate_lower_bound": 1.0}, r"kda\.gate_lower_bound: is 1"),
        ({"expert_latent_length": -1}, "expert_latent_length: is -1"),
        ({"expert_latent_length": 48}, r"ffn_routed_down\.weight: shape \[32, 64\]"),
        ({"expert_latent_length": 0}, r"ffn_gate_exps\.weight: shape \[4, 64, 32\]"),
        ({"attention.head_count_kv": [0, 2]}, "head_count_kv: is 2 "),
    ],
)
def test_files_that_are_refused(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    write_model(tmp_path / "k.gguf", ARCH, n_layer=2)
    with open_gguf(tmp_path / "k.gguf") as file:
        named = {f"{ARCH}.{key}": value for key, value in change.items()}
        keys = {**file.metadata, **named}
        file.metadata = {key: value for key, value in keys.items() if value is not None}
        with pytest.raises((FileError, UnsupportedError), match=why):
            load_config(file)


@pytest.mark.parametrize(
    "name", ["output_res_score.weight", "blk.1.attn_res_score.weight", "blk.0.ssm_g.weight"]
)
def test_a_tensor_is_missing(name: str, tmp_path: Path) -> None:
    write_model(tmp_path / "k.gguf", ARCH, n_layer=2)
    with open_gguf(tmp_path / "k.gguf") as file:
        del file.tensors[name]
        with pytest.raises(FileError, match=re.escape(name)):
            load_config(file)


def test_too_many_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "k.gguf", ARCH, n_layer=2)
    monkeypatch.setattr("treadle.models.graphs.kimi_k3.MOST_KEPT", 0)
    why = "is 2 for 2 layers: treadle supports up to 0"
    with open_gguf(tmp_path / "k.gguf") as file, pytest.raises(UnsupportedError, match=why):
        load_config(file)


def test_situ() -> None:
    gate = np.array([-1e4, -2.0, 0.0, 1e-3, 2.0, 1e4])
    up = np.array([1e4, 3.0, 1.0, -2.0, -3.0, -1e4])
    exact = 4 * np.tanh(gate / 4) / (1 + np.exp(np.minimum(-gate, 700)))
    assert np.allclose(gated(situ_name(4, 25), gate, up), exact * 25 * np.tanh(up / 25))
    assert np.allclose(gated(situ_name(4, 0), gate, up), exact * up)


# -- texts: the tests of other models with states -------------------------------------------------


@pytest.fixture(scope="module", params=[pytest.param(3, marks=pytest.mark.slow)])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[treadle.Model]:
    path = tmp_path_factory.mktemp("text") / "k.gguf"
    write_model(path, ARCH, n_layer=request.param)
    settings: dict[str, Any] = {"context": 512, "deterministic": True, "n_sequences": 3}
    with treadle.load(path, threads=2, **settings) as made:
        yield made


truth = hybrids.truth
OF_TEXTS: tuple[Callable[..., None], ...] = (
    test_cut := hybrids.test_bits_do_not_depend_on_the_cut,
    test_found := hybrids.test_a_prompt_is_found_up_to_its_last_page,
    test_taken_back := hybrids.test_a_text_is_taken_back,
    test_forks := hybrids.test_forks_go_their_own_ways,
    test_failing := hybrids.test_a_run_that_fails_has_changed_nothing,
    test_saved := hybrids.test_a_session_is_saved_with_its_state,
)
