"""Latent attention: DeepSeek V2 Lite as transformers computes it, texts that share pages, what the
cache takes, and what tools make of the matrices of heads.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.changed_gguf import write_changed
from tests.conftest import WriteTiny
from tests.models import hf_tiny
from tests.models.hf_names import LLAMA
from tests.models.test_arch_truth import ids_of
from tests.reference import Layer, attention, forward, normed, rms_norm, rope, tensor_of
from tests.tiny import rounding
from treadle.engine.batch import BatchItem
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import GGUFWriter, open_gguf
from treadle.formats import by_name
from treadle.kernels.attention.records import PAGE
from treadle.models.load import load_config
from treadle.quantize.imatrix.collect import collect
from treadle.quantize.plan import find_mix, make_recipe
from treadle.quantize.write import write

ARCH = "deepseek2"
NOPE = 32
ROPE = 16
RANK = 64
VALUE = 32
LITE: dict[str, Any] = {  # V2-Lite's shape: no q_a, softmax that is not made to add up, YaRN
    "vocab_size": hf_tiny.N_VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
    "q_lora_rank": None,
    "kv_lora_rank": RANK,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": VALUE,
    "first_k_dense_replace": 1,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": False,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,  # three times in the prompt
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}
STEMS = {
    **LLAMA,
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}


def write_lite(path: Path, **changes: object) -> tuple[list[int], np.ndarray]:
    """Write the model as llama.cpp's converter does; a prompt, and its logits by transformers."""
    hf_tiny.require_transformers()
    import torch
    import transformers

    config = transformers.DeepseekV2Config(**LITE, rms_norm_eps=hf_tiny.EPS)
    config._experts_implementation = "eager"  # the grouped one has no float64
    kind = transformers.DeepseekV2ForCausalLM
    with hf_tiny.float64_only():
        model = kind(config).eval()
    rng = np.random.default_rng(3)
    tensors: dict[str, np.ndarray] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = hf_tiny._draw(rng, name, tuple(parameter.shape), False)
            if parameter.dim() == 3:  # of each expert [rows, columns]
                value = value * np.float32(np.sqrt(value.shape[1] / value.shape[2]))
            parameter.copy_(torch.from_numpy(value.astype(np.float64)))
            tensors |= converted(name, value)
    keys = {
        "vocab_size": hf_tiny.N_VOCAB,
        "context_length": 64,
        "embedding_length": 64,
        "block_count": 3,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 1,
        "attention.layer_norm_rms_epsilon": hf_tiny.EPS,
        "attention.kv_lora_rank": RANK,
        "attention.key_length": RANK + ROPE,
        "attention.value_length": RANK,
        "attention.key_length_mla": NOPE + ROPE,
        "attention.value_length_mla": VALUE,
        "leading_dense_block_count": 1,
        "expert_count": 5,
        "expert_used_count": 2,
        "expert_shared_count": 2,
        "expert_feed_forward_length": 32,
        "expert_weights_scale": 1.0,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": ROPE,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 16,
        "rope.scaling.yarn_log_multiplier": 0.0707,
        **changes,
    }
    writer = GGUFWriter(path)
    writer.add("general.architecture", ARCH)
    for key, given in keys.items():
        writer.add(f"{ARCH}.{key}", given)
    for key, given in hf_tiny.byte_vocabulary().items():
        writer.add(f"tokenizer.ggml.{key}", given)
    for name, value in tensors.items():
        writer.add_tensor(name, value.shape, by_name("F32"), np.ascontiguousarray(value))
    writer.write()
    ids = np.random.default_rng(7).integers(3, hf_tiny.N_VOCAB, hf_tiny.N_TOKENS).tolist()
    return ids, hf_tiny.compute_logits(model, ids)


def converted(name: str, value: np.ndarray) -> dict[str, np.ndarray]:
    """What a tensor of transformers' is in a file."""
    layer, _, stem = name.removeprefix("model.").removeprefix("layers.").partition(".")
    if not layer.isdecimal():
        return {f"{STEMS[name.removeprefix('model.').removesuffix('.weight')]}.weight": value}
    stem = stem.removesuffix(".weight")
    blk = f"blk.{layer}."
    if stem == "self_attn.kv_b_proj":
        heads = value.reshape(4, NOPE + VALUE, RANK)
        k_b = heads[:, :NOPE].swapaxes(1, 2)
        v_b = heads[:, NOPE:]
        return {f"{blk}attn_k_b.weight": k_b, f"{blk}attn_v_b.weight": v_b}
    if stem == "mlp.experts.gate_up_proj":
        gate, up = np.split(value, 2, axis=1)
        return {f"{blk}ffn_gate_exps.weight": gate, f"{blk}ffn_up_exps.weight": up}
    return {f"{blk}{STEMS[stem]}.weight": value}


def test_v2_lite_agrees_with_transformers(tmp_path: Path) -> None:
    """In one go and by decode; each part of what YaRN scales is seen."""
    ids, truth = write_lite(tmp_path / "lite.gguf")
    with treadle.load(tmp_path / "lite.gguf", threads=2, kv="f32") as model:
        assert {layer.mixer for layer in model.config.layers} == {"latent_q"}
        assert model.config.ignored == ()
        for n in (1, model.engine.max_tokens):
            model.plan(n).check()
        allowed = rounding(model.config) * np.abs(truth).max()
        exact = forward(model.gguf, model.config, ids)
        assert np.abs(exact - truth).max() <= allowed / 10
        session = model.session()
        rows = np.concatenate([session.logits([i]) for i in ids])
        session.close()
        for logits in (model.logits(ids), rows):
            assert np.abs(logits - truth).max() <= allowed
    write_lite(tmp_path / "cool.gguf", **{"rope.scaling.yarn_log_multiplier": 0.08})
    with treadle.load(tmp_path / "cool.gguf", threads=2, kv="f32") as model:
        assert np.abs(model.logits(ids) - truth).max() > 100 * allowed


def test_files_without_sizes_of_heads_are_refused(data: Path, tmp_path: Path) -> None:
    source = data / "arch" / "glm4moelite.gguf"
    write_changed(source, tmp_path / "old.gguf", without=lambda name: name.endswith("_mla"))
    with pytest.raises(FileError, match=r"attention\.key_length_mla: the key is missing"):
        treadle.load(tmp_path / "old.gguf")


@pytest.mark.parametrize("key", ["attention.value_length_mla", "attention.kv_lora_rank"])
def test_heads_that_end_within_a_tile(key: str, data: Path) -> None:
    with open_gguf(data / "arch" / "glm4moelite.gguf") as gguf:
        changes = {key: 24}
        if key == "attention.kv_lora_rank":
            changes |= {"attention.value_length": 24, "attention.key_length": 40}
        changes = {f"{ARCH}.{name}": size for name, size in changes.items()}
        gguf.metadata = {**gguf.metadata, **changes}
        says = rf"glm4moelite\.gguf: {ARCH}\.{key}: 24: expected a multiple of 16"
        with pytest.raises(UnsupportedError, match=says):
            load_config(gguf)


@pytest.fixture(scope="module")
def model(data: Path) -> Any:
    path = data / "arch" / "glm4moelite.gguf"
    with treadle.load(path, threads=2, context=256, deterministic=True, n_sequences=3) as made:
        yield made


def test_texts_that_share_pages(model: treadle.Model, tmp_path: Path) -> None:
    """Found again, saved, taken back and forked: the bits are those of one go."""
    ids = ids_of(3 * PAGE + 9)
    truth = model.logits(ids)
    model.engine.cache.forget()
    with closing(model.session()) as first, closing(model.session()) as second:
        assert np.array_equal(first.prefill(ids), truth[-1])
        assert second.match(ids) == 3 * PAGE
        assert np.array_equal(second.prefill(ids), truth[-1])
        first.truncate(len(ids) - 1)
        first.save(tmp_path / "saved")  # with an unfilled page
        model.engine.cache.forget()
        with closing(model.load_session(tmp_path / "saved")) as again:
            assert np.array_equal(again.feed(ids[-1:]), truth[-1])
        for n in (len(ids) - 1, 2 * PAGE, 5):
            first.truncate(n)
            assert np.array_equal(first.feed(ids[n : n + 1]), truth[n])
    seq = model.engine.cache.sequence()
    model.engine.run([BatchItem(seq, ids[:50], 0)])
    fork = model.engine.cache.fork(seq)  # in the middle of a page
    for each, n in ((seq, 60), (fork, 57), (fork, 70)):
        at = len(each.ids)
        assert np.array_equal(model.engine.run([BatchItem(each, ids[at:n], 1)])[0], truth[n - 1])
    seq.close()
    fork.close()


def test_a_token_keeps_one_row(model: treadle.Model) -> None:
    """32 + 16 values in each of four layers, of two bytes each."""
    (pool,) = model.engine.cache.pools
    assert pool.cell_bytes == PAGE * 4 * 48 * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv", "unit"),
    [("f16", 2.0**-11), ("bf16", 2.0**-8), ("q8_0", 1 / 254), ("q4_0", 1 / 16)],
)
def test_types_of_rows(kv: str, unit: float, tiny: WriteTiny) -> None:
    """As ``test_formats_of_keys_and_values``: ``unit`` is a value's rounding, which enters each of
    the layers as key and as value. Texts of one model side by side, found again, cut and forked
    have the bits of one go, for any number of threads.
    """
    path = tiny(ARCH, n_head=5)
    ids = ids_of(2 * PAGE + 6)
    bits = []
    with treadle.load(path, threads=2, kv="f32") as model:
        exact = model.logits(ids)
        n_layer = len(model.config.layers)
    for threads in (1, 2):
        load: dict[str, Any] = {
            "threads": threads,
            "kv": kv,
            "deterministic": True,
            "n_sequences": 3,
        }
        with treadle.load(path, **load) as model:
            bits.append(model.logits(ids))
            model.engine.cache.forget()
            with closing(model.session()) as first, closing(model.session()) as second:
                rows = [first.logits(ids[at : at + 7]) for at in range(0, len(ids), 7)]
                assert np.array_equal(np.concatenate(rows), bits[0])
                assert second.match(ids) == 2 * PAGE
                assert np.array_equal(second.prefill(ids), bits[0][-1])
                first.truncate(PAGE + 5)
                assert np.array_equal(first.feed(ids[PAGE + 5 : PAGE + 6]), bits[0][PAGE + 5])
            cache = model.engine.cache
            with closing(cache.sequence()) as seq:
                model.engine.run([BatchItem(seq, ids[:50], 0)])
                with closing(cache.fork(seq)) as fork:  # in the middle of a page
                    both = [BatchItem(fork, ids[50:57], 1), BatchItem(seq, ids[50:60], 1)]
                    assert np.array_equal(model.engine.run(both), bits[0][[56, 59]])
    assert np.array_equal(bits[0], bits[1])
    error = np.abs(bits[0] - exact).max() / np.abs(exact).max()
    assert unit / 8 < error <= 4 * unit * np.sqrt(2 * n_layer), error / unit


def test_rows_that_no_block_ends(data: Path) -> None:
    says = "multiple of 32, but this model has 48; use f16, bf16 or f32"
    with pytest.raises(UnsupportedError, match=says):
        treadle.load(data / "arch" / "glm4moelite.gguf", kv="q4_0")


def test_importances_of_each_head(tiny: WriteTiny) -> None:
    """What enters ``k_b`` and ``v_b`` of the first layer, head by head."""
    ids = ids_of(90)
    with treadle.load(tiny(ARCH, n_layer=2), context=90, threads=2, kv="f32") as model:
        found = collect(model.engine, np.array([ids], np.int32), "", bos=None).entries
        names = {name for name, t in model.gguf.tensors.items() if len(t.shape) == 3}
        assert names <= found.keys()
        maps = Layer(model.config, 0, tensor_of(model.gguf))
        sizes = maps.at.latent
        blk = "blk.0.attn"
        scale = model.config.attn_scale
        assert sizes is not None
        x = maps.tensor("token_embd.weight")[ids]
        h = normed(x, maps.tensor("blk.0.attn_norm.weight"), model.config)
        q = rms_norm(maps.linear(h, "attn_q_a"), maps.tensor(f"{blk}_q_a_norm.weight"), 1e-6)
        q = maps.linear(q, "attn_q_b").reshape(len(ids), maps.at.n_head, -1)
        row, turn = np.split(maps.linear(h, "attn_kv_a_mqa"), [sizes.n_kv_rank], axis=-1)
        row = rms_norm(row, maps.tensor(f"{blk}_kv_a_norm.weight"), 1e-6)[:, None]
        inv_freq, factor = model.config.ropes[0].frequencies()
        plain, turned = np.split(q, [sizes.n_nope], axis=-1)
        absorbed = np.einsum("thn,hrn->thr", plain, maps.tensor(f"{blk}_k_b.weight"))
        turned, turn = (rope(y, inv_freq, factor, "norm") for y in (turned, turn[:, None]))
        q = np.concatenate([absorbed, turned], -1)
        k = np.concatenate([row, turn], -1)
        given = attention(q, k, row, scale, 0.0, 0)
    for name, rows in ((f"{blk}_k_b.weight", plain), (f"{blk}_v_b.weight", given)):
        entry = found[name]
        assert entry.counts.tolist() == [90.0] * maps.at.n_head
        np.testing.assert_allclose(entry.sums, (rows**2).sum(0), rtol=1e-3)


@pytest.mark.slow
def test_quantised(tiny: WriteTiny, tmp_path: Path) -> None:
    """Matrices of heads are matrices: they are quantised, and the file is still read."""
    source = tiny(ARCH, "F32", n_layer=2)
    target = tmp_path / "small.gguf"
    ids = ids_of()
    with open_gguf(source) as gguf:
        write(gguf, make_recipe(gguf, find_mix("Q8_0")), target, n_threads=2)
    with open_gguf(target) as gguf:
        for name in ("attn_k_b", "attn_v_b", "attn_kv_a_mqa", "attn_q_a", "attn_q_b"):
            assert gguf.tensors[f"blk.0.{name}.weight"].type_name == "Q8_0", name
    with treadle.load(source, threads=2) as whole, treadle.load(target, threads=2) as small:
        exact = whole.logits(ids)
        logits = small.logits(ids)
    assert np.abs(logits - exact).max() < 0.1 * np.abs(exact).max()
