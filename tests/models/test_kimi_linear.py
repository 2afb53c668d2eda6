"""Kimi Linear: transformers' logits, texts whose states are cut, forked and found again, the file
of llama.cpp's converter, and what is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.test_hf import keys_of, prompt
from tests.convert.test_hf_chatglm import ranks
from tests.convert.test_hf_mixtures import check_both, own
from tests.convert.test_hf_tokenizer import read
from tests.models import test_hybrids as hybrids
from tests.models.hf_cases import Case
from tests.reference import forward
from tests.tiny import rounding, write_model
from treadle.convert.hf.folder import open_hf
from treadle.convert.hf.tokenizer.tokenizer import read_tokenizer
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import GGUFWriter, open_gguf
from treadle.formats import by_name
from treadle.models.load import load_config
from treadle.quantize.plan import find_mix, make_recipe
from treadle.quantize.write import write

ARCH = "kimi-linear"
TINY: dict[str, Any] = {
    "num_hidden_layers": 5,  # of which the last one has keys and values
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 64,  # the sizes of tests/tiny.py: the kernels are the same ones
    "qk_nope_head_dim": 96,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "linear_head_dim": 32,
    "linear_num_heads": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CASE = own(Case("KimiLinear", ARCH, TINY))
SIZES: dict[str, Any] = {"n_layer": 2, "n_expert": 8, "n_ff_exp": 32, "n_expert_shared": 1}


def published(config: dict[str, Any]) -> dict[str, Any]:
    """The same in the words of the published folder."""
    made = dict(config)
    kinds = config["layer_types"]
    full = [i + 1 for i, kind in enumerate(kinds) if kind == "full_attention"]
    made["linear_attn_config"] = {
        "full_attn_layers": full,
        "kda_layers": [i for i in range(1, len(kinds) + 1) if i not in full],
        "head_dim": made.pop("linear_head_dim"),
        "num_heads": made.pop("linear_num_heads"),
        "short_conv_kernel_size": made.pop("linear_conv_kernel_dim"),
    }
    made["first_k_dense_replace"] = made.pop("mlp_layer_types").count("dense")
    del made["layer_types"], made["qk_head_dim"]
    return made | {
        "head_dim": 72,  # of nothing
        "mla_use_nope": True,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "num_nextn_predict_layers": 0,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "use_grouped_topk": True,
    }


# -- folders --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In place and converted it gives transformers' logits; ``hf``, and ``made.gguf``."""
    path = tmp_path_factory.mktemp("kimi")
    check_both(CASE, path)
    return path


def test_published_words(folder: Path, tmp_path: Path) -> None:
    """config.json's, and the dense layer's, which transformers writes otherwise."""
    from safetensors.numpy import load_file, save_file

    config = json.loads((folder / "hf" / "config.json").read_text())
    assert {"model_max_length", "moe_renormalize", "num_expert_group"} <= config.keys()
    told = keys_of(published(config))
    assert told == keys_of(config)
    assert told[f"{ARCH}.attention.head_count_kv"] == [0, 0, 0, 0, 1]
    assert told[f"{ARCH}.expert_used_count"] == 2
    assert keys_of({**config, "q_lora_rank": 48})[f"{ARCH}.attention.q_lora_rank"] == 48

    tensors = load_file(folder / "hf" / "model.safetensors")
    moved = {n.replace(".0.block_sparse_moe.", ".0.mlp."): t for n, t in tensors.items()}
    taps = {n: t.squeeze(1) for n, t in moved.items() if n.endswith("conv1d.weight")}
    assert len(taps) == 12
    save_file(moved | taps, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(published(config)))
    logits = []
    for path in (folder / "made.gguf", tmp_path):
        with treadle.load(path, threads=1, kv="f32") as model:
            assert model.config.ignored == ()
            logits.append(model.logits(prompt()[:20]))
    assert np.array_equal(logits[0], logits[1])


def test_the_file_of_llama_cpp(folder: Path, tmp_path: Path) -> None:
    """Its converter writes shapes of four numbers, a length of values that nobody uses, and leaves
    out that weights add up to 1.
    """
    writer = GGUFWriter(tmp_path / "theirs.gguf")
    with open_gguf(folder / "made.gguf") as made:
        keys = {**made.metadata, f"{ARCH}.attention.value_length": 72}
        del keys[f"{ARCH}.expert_weights_norm"], keys[f"{ARCH}.expert_group_count"]
        for key, value in keys.items():
            writer.add(key, value)
        for name, tensor in made.tensors.items():
            wide = "conv1d" in name or name.endswith("ssm_a")
            shape = (1, *tensor.shape) if wide else tensor.shape
            writer.add_tensor(name, shape, by_name(tensor.type_name), tensor.data)
        writer.write()
    logits = []
    for path in (folder / "made.gguf", tmp_path / "theirs.gguf"):
        with treadle.load(path, threads=1, kv="f32") as model:
            logits.append(model.logits(prompt()[:20]))
    assert np.array_equal(logits[0], logits[1])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"linear_num_heads": 2}, "linear_attn_config: 2 heads have a state: expected"),
        ({"layer_types": ["full_attention"]}, "layer_types: is "),
        ({"layer_types": ["linear_attention"] * 4 + ["other"]}, "layer_types: 'other': treadle"),
        (
            {
                "layer_types": None,
                "linear_attn_config": {"full_attn_layers": [5], "kda_layers": []},
            },
            r"linear_attn_config\.full_attn_layers: is \[5\] \(expected layers 1 to 5",
        ),
        ({"mla_use_nope": False}, "mla_use_nope: is False"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func: is 'softmax'"),
        ({"mlp_layer_types": ["sparse", "dense"] + ["sparse"] * 3}, "mlp_layer_types: is "),
        ({"linear_head_dim": 12}, r"q_proj\.weight: shape \[128, 64\] \(expected \[48, 64\]"),
    ],
)
def test_what_is_at_odds(change: dict[str, Any], why: str, folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "hf" / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(folder / "hf" / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises((FileError, UnsupportedError), match=why):
        open_hf(tmp_path)


def test_the_list_of_ranks(tmp_path: Path) -> None:
    """Without a tokenizer.json: pieces by rank, and special tokens up to the last row."""
    (tmp_path / "tiktoken.model").write_bytes(ranks(b"ab", b"abc", "漢字".encode()))
    added = {"259": {"content": "[BOS]"}, "261": {"content": "<|im_end|>"}}
    settings = {"added_tokens_decoder": added, "bos_token": "[BOS]", "eos_token": "[EOS]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours = read(tmp_path, 264, model_type="kimi_linear", eos_token_id=261)
    assert (ours.model, ours.pre) == ("gpt2", "kimi-k2")
    assert ours.encode("abcab漢字<|im_end|>", special=True) == [257, 256, 258, 261]  # whole words
    assert [ours.piece(i) for i in (259, 260, 263)] == [
        *("[BOS]", "<|reserved_token_260|>", "<|reserved_token_263|>")
    ]
    assert (ours.bos, ours.add_bos) == (259, False)
    assert 261 in ours.eog
    with pytest.raises(FileError, match=r"tiktoken\.model: has 259 tokens \(expected at most 258"):
        read(tmp_path, 258, model_type="kimi_linear")
    assert read_tokenizer(tmp_path, {"model_type": "llama"}, 264) == {}


# -- files ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_chunks_and_threads(tmp_path: Path) -> None:
    """In one go, in chunks, by single tokens."""
    write_model(tmp_path / "k.gguf", ARCH, **SIZES)
    ids = hybrids.text(70)
    first = None
    for threads in (1, 3):
        with treadle.load(tmp_path / "k.gguf", kv="f32", threads=threads) as model:
            made = []
            for chunk in (70, 64, 3, 1):
                model.engine.cache.forget()
                session = model.session()
                rows = [session.logits(ids[at : at + chunk]) for at in range(0, 70, chunk)]
                made.append(np.concatenate(rows))
                session.close()
            if first is None:
                first = made
                exact = forward(model.gguf, model.config, ids)
                for found in made:
                    error = np.abs(found - exact).max() / np.abs(exact).max()
                    assert error <= rounding(model.config)
            assert all(map(np.array_equal, made, first))


@pytest.mark.slow
def test_narrow_formats(tmp_path: Path) -> None:
    """Taps and decays stay f32. Rows of 32 are too short for Q4_K, and their products are steps
    apart. Activations lose at most what the file's weights have lost: eight bits of the largest
    of 32 values, on every instruction set. So the whole is at most twice as far off as the
    weights alone.
    """
    write_model(tmp_path / "f32.gguf", ARCH, n_layer=2)
    ids = hybrids.text(40)
    with open_gguf(tmp_path / "f32.gguf") as source:
        exact = forward(source, load_config(source), ids)
        for mix in ("Q8_0", "Q4_K_M"):
            recipe = make_recipe(source, find_mix(mix))
            write(source, recipe, tmp_path / f"{mix}.gguf", n_threads=2)
    with open_gguf(tmp_path / "Q4_K_M.gguf") as file:
        kinds = {name: tensor.type_name for name, tensor in file.tensors.items()}
        assert {t for n, t in kinds.items() if "conv1d" in n or n.endswith("ssm_a")} == {"F32"}
        assert kinds["blk.0.ssm_f_b.weight"] not in ("F32", "F16", "Q4_K")
    with open_gguf(tmp_path / "Q8_0.gguf") as file:
        weights_alone = distance(forward(file, load_config(file), ids), exact)
    assert 1e-4 < weights_alone < 2 / 256 * np.sqrt(2 * 15)  # of 15 products one after the other
    for kv in ("f16", "q8_0"):
        with treadle.load(tmp_path / "Q8_0.gguf", threads=2, kv=kv) as model:
            assert 1e-4 < distance(model.logits(ids), exact) < 2 * weights_alone


def distance(found: np.ndarray, exact: np.ndarray) -> float:
    """The root of the mean square of the difference, by that of the exact values."""
    return float(np.sqrt(np.mean((found - exact) ** 2) / np.mean(exact**2)))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kda.head_dim": 0}, r"kimi-linear\.kda\.head_dim: is 0"),
        ({"attention.key_length_mla": None}, r"attention\.key_length_mla: the key is missing"),
        ({"attention.head_count_kv": [0, 2, 0, 1]}, r"head_count_kv: is 2 \(expected 1"),
    ],
)
def test_keys_that_are_refused(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    write_model(tmp_path / "k.gguf", ARCH, n_layer=4)
    with open_gguf(tmp_path / "k.gguf") as file:
        named = {f"{ARCH}.{key}": value for key, value in change.items()}
        keys = {**file.metadata, **named}
        file.metadata = {key: value for key, value in keys.items() if value is not None}
        with pytest.raises((FileError, UnsupportedError), match=why):
            load_config(file)


def test_no_layer_with_keys(tmp_path: Path) -> None:
    """As a part of a model may have none."""
    write_model(tmp_path / "k.gguf", ARCH, n_layer=1)
    ids = hybrids.text(20)
    with treadle.load(tmp_path / "k.gguf", kv="f32", threads=1) as model:
        exact = forward(model.gguf, model.config, ids)
        error = np.abs(model.logits(ids) - exact).max() / np.abs(exact).max()
        assert error <= rounding(model.config)


# -- texts: the tests of other models with states -------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[treadle.Model]:
    path = tmp_path_factory.mktemp("text") / "k.gguf"
    write_model(path, ARCH, n_layer=2)
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
