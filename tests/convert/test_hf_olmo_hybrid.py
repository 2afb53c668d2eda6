"""OLMo Hybrid: folders as transformers writes them and as they are published, in place and
converted; texts whose states are cut, forked and found again; and what is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.test_hf import convert, prompt, worst
from tests.convert.test_hf_kin import saved
from tests.loras import draw_pairs, write_peft
from tests.matrix_rounding import bf16_limit
from tests.models import test_hybrids as hybrids
from tests.models.hf_cases import Case
from tests.models.hf_tiny import compute_logits
from tests.models.test_arch_truth import check_truth, ids_of
from tests.reference import forward
from tests.tiny import rounding, write_model
from treadle.convert.hf.config import read_config
from treadle.convert.hf.folder import open_hf
from treadle.convert.llamacpp_differences import reading_differences
from treadle.errors import FileError
from treadle.files.gguf import open_gguf
from treadle.models.load import load_config

ARCH = "olmo_hybrid"
FULL = "full_attention"
STATE = "linear_attention"
N_KEYS = 4 * 16
N_VALUES = 4 * 32
OPTIONS: dict[str, Any] = {
    "num_hidden_layers": 4,  # of which the last one has keys and values
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
MORE: dict[str, dict[str, Any]] = {
    "still": {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
    "otherwise": {
        "layer_types": [FULL, STATE, FULL, STATE],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_allow_neg_eigval": False,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
}


def save(folder: Path, **more: Any) -> Any:
    return saved(Case("OlmoHybrid", ARCH, {**OPTIONS, **more}), folder)


def test_in_every_way(tmp_path: Path) -> None:
    model = save(tmp_path / "hf")
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    check_truth(made, compute_logits(model, ids_of()))
    with open_gguf(made) as file:
        (note,) = reading_differences(file.metadata, file.tensors)
        config = load_config(file)
    assert "llama.cpp has no architecture olmo_hybrid" in note
    states = [layer.state for layer in config.layers]
    assert {(state.norm_eps, state.beta_most) for state in states if state} == {(1e-5, 2.0)}
    mixers = [layer.mixer for layer in config.layers]
    assert mixers == ["delta_signed"] * 3 + ["attention_post_norm"]


@pytest.mark.parametrize("more", MORE)
def test_in_place_and_converted(more: str, tmp_path: Path) -> None:
    model = save(tmp_path / "hf", **MORE[more])
    expected = compute_logits(model, prompt())
    for each in (tmp_path / "hf", convert(tmp_path / "hf", tmp_path / "made.gguf")):
        with treadle.load(each, threads=2, kv="f32") as loaded:
            assert loaded.config.ignored == ()
            assert bool(loaded.config.ropes) == (more != "still")
            error = worst(loaded.logits(prompt()), expected)
            assert error <= rounding(loaded.config), (each, error / rounding(loaded.config))


def respell(folder: Path, whole: bool) -> None:
    """Attention's norms by transformers' own names, and a tensor of taps for each of queries, keys
    and values, or ``whole``: one for all. transformers writes thirds of them.
    """
    from safetensors.numpy import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if ".q_conv1d." in name]:
        names = [name.replace("q_conv", f"{x}_conv") for x in "qkv"]
        taps = np.concatenate([tensors.pop(each) for each in names])
        assert len(taps) == 2 * N_KEYS + N_VALUES
        if whole:
            tensors[name.replace("q_conv", "conv")] = taps
            continue
        for each, part in zip(names, np.split(taps, [N_KEYS, 2 * N_KEYS]), strict=True):
            tensors[each] = np.ascontiguousarray(part)
    norm = tensors.pop("model.layers.3.feedforward_layer_norm.weight")
    tensors["model.layers.3.post_attention_layernorm.weight"] = norm
    save_file(tensors, path)


def test_as_it_is_published(tmp_path: Path) -> None:
    save(tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    written = path.read_bytes()
    found = []
    for whole in (None, False, True):
        path.write_bytes(written)
        if whole is not None:
            respell(tmp_path / "hf", whole)
        with treadle.load(tmp_path / "hf", threads=1, kv="f32") as model:
            found.append(model.logits(prompt()))
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


def test_adapters_of_a_folder_and_of_its_file(tmp_path: Path) -> None:
    save(tmp_path / "hf")
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    pairs = draw_pairs(made, 4, 4, ("attn_q", "ssm_out"))
    peft = {}
    for stem, pair in pairs.items():
        i = int(stem.split(".")[1])
        part = "self_attn" if i == 3 else "linear_attn"
        module = f"{part}.q_proj" if "attn_q" in stem else f"{part}.o_proj"
        for side, matrix in zip("AB", pair, strict=True):
            peft[f"base_model.model.model.layers.{i}.{module}.lora_{side}.weight"] = matrix
    adapter = write_peft(tmp_path / "peft", peft)
    with open_gguf(made) as file:
        config = load_config(file)
        for stem, (a, b) in pairs.items():
            matrix = file.tensors[stem].dequantize() + 2.0 * b @ a  # alpha is 8, of rank 4
            file.tensors[stem] = _Merged(matrix)  # type: ignore[assignment]
        expected = forward(file, config, prompt())
    for each in (tmp_path / "hf", made):
        with treadle.load(each, threads=1, kv="f32", lora=[adapter]) as loaded:
            assert worst(loaded.logits(prompt()), expected) <= 2 * rounding(config)


class _Merged:
    """A tensor of a file, as the reference reads it."""

    type_name = "F64"

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows

    def dequantize(self) -> np.ndarray:
        return self.rows


def test_matrices_of_several_formats(tmp_path: Path) -> None:
    """Queries, keys and values that are products of their own lie in the same rows."""
    write_model(tmp_path / "x.gguf", ARCH, "F16", formats=(("attn_v", "F32"), ("gate", "BF16")))
    with treadle.load(tmp_path / "x.gguf", threads=2, kv="f32") as model:
        exact = forward(model.gguf, model.config, prompt())
        assert worst(model.logits(prompt()), exact) <= bf16_limit(2.0**-8, model.isa)


def test_a_missing_tensor_has_the_name_of_its_part(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    save(tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    for i, part in ((1, "linear_attn"), (3, "self_attn")):
        name = f"model.layers.{i}.{part}.k_proj.weight"
        save_file({k: v for k, v in tensors.items() if k != name}, path)
        with pytest.raises(FileError, match=f"{name}: the tensor is missing"):
            open_hf(tmp_path / "hf")


SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 320}


def read(**given: Any) -> dict[str, Any]:
    config = {"model_type": ARCH, **SIZES, "num_hidden_layers": 4, **given}
    return read_config(config, Path("config.json")).metadata


def test_keys() -> None:
    """A base that is null is none; without the key it is transformers' own."""
    key = "olmo_hybrid.rope.scaling.finetuned"
    theta = "olmo_hybrid.rope.freq_base"
    rope = {"rope_type": "default", "rope_theta": 5e5}
    assert read()[theta] == read(rope_parameters=None)[theta] == 1e4
    assert read(rope_parameters=rope, rope_theta=None)[theta] == 5e5
    assert key not in read(rope_parameters=rope, rope_theta=None)
    assert read(rope_parameters=None, rope_theta=None)[key] is False
    assert read(rope_parameters={**rope, "rope_theta": None}, rope_theta=5e5)[key] is False
    flags = "olmo_hybrid.attention.recurrent_layers"
    assert read()[flags] == [True, True, True, False]
    assert read(num_hidden_layers=2)[flags] == [True, False]
    with pytest.raises(FileError, match=r"linear_num_value_heads: is 4 .*a multiple of 3"):
        read(linear_num_key_heads=3)


def test_a_norm_behind_must_be_there(tmp_path: Path) -> None:
    write_model(tmp_path / "x.gguf", ARCH, n_layer=2)
    for name in ("blk.1.post_ffw_norm.weight", "blk.0.post_attention_norm.weight"):
        with open_gguf(tmp_path / "x.gguf") as file:
            del file.tensors[name]
            with pytest.raises(FileError, match=f"{name}: the tensor is missing"):
                load_config(file)


# -- texts: the tests of other models with states -------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[treadle.Model]:
    path = tmp_path_factory.mktemp("text") / "x.gguf"
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
