"""MTP layers of models with several streams of states: folders in place, files that hold them
beside the model's layers, and files of them alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import treadle
from tests.convert.test_hf import convert
from tests.convert.test_hf_deepseek4 import V4
from tests.convert.test_hf_encoders import save
from tests.convert.test_hf_glm_next import saved
from tests.convert.test_hf_mixtures import own
from tests.convert.test_hf_nextn import Tensors, rewrite
from tests.convert.test_hf_tokenizer import tiny_byte_level
from tests.spec_decode.test_mtp import drafter_of
from tests.spec_decode.tiny_drafters import check_texts, ids_of, load
from treadle.convert.hf.folder import open_hf_source
from treadle.convert.open import open_model
from treadle.errors import UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.files.safetensors import open_safetensors

N_LAYER = 4
N = 64


def drawn(name: str, *shape: int) -> np.ndarray:
    rng = np.random.default_rng(sum(name.encode()))
    rows = rng.standard_normal(shape)
    made = 1 + 0.2 * rows if "norm" in name else rows / np.sqrt(shape[-1])
    return np.asarray(made, np.float32)


def add_v4(tensors: Tensors, config: dict[str, Any]) -> None:
    """As DeepSeek's own checkpoints have it; layer 3 once more, without its units."""
    for name in [name for name in tensors if name.startswith("model.layers.3.")]:
        if "compressor" not in name and "indexer" not in name:
            tensors[name.replace("model.layers.3.", "mtp.0.")] = tensors[name]
    for name in ("e_proj", "h_proj"):
        tensors[f"mtp.0.{name}.weight"] = drawn(name, N, N)
    for name in ("enorm", "hnorm", "norm"):
        tensors[f"mtp.0.{name}.weight"] = drawn(f"{name} norm", N)
    tensors["mtp.0.hc_head_fn"] = drawn("fn", 3, 3 * N)
    tensors["mtp.0.hc_head_base"] = drawn("base", 3)
    tensors["mtp.0.hc_head_scale"] = drawn("scale", 1)
    config["num_nextn_predict_layers"] = 1


def add_glm(tensors: Tensors, config: dict[str, Any]) -> None:
    """Layer 1, which has an indexer and experts, once more, without the weights of streams."""
    (prefix,) = {n[: n.index("layers.1.")] for n in tensors if "language_model.layers.1." in n}
    to = f"{prefix}layers.{N_LAYER}."
    for name in [name for name in tensors if name.startswith(f"{prefix}layers.1.")]:
        if "hc" not in name:
            tensors[name.replace(f"{prefix}layers.1.", to)] = tensors[name]
    tensors[f"{to}eh_proj.weight"] = drawn("eh_proj", N, 2 * N)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{to}{name}.weight"] = drawn(name, N)
    config["text_config"]["num_nextn_predict_layers"] = 1


def save_v4(folder: Path) -> None:
    save(own(V4, max_position_embeddings=256), folder)


def folder_of(at: Path, write: Callable[[Path], Any], change: Any) -> Path:
    write(at)
    rewrite(at, change)
    tiny_byte_level().save(str(at / "tokenizer.json"))
    (at / "tokenizer_config.json").write_text('{"bos_token": "a", "eos_token": "b"}')
    return at


@pytest.fixture(scope="module")
def v4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("v4") / "hf", save_v4, add_v4)


@pytest.fixture(scope="module")
def v4_files(v4: Path) -> tuple[Path, Path]:
    """The model's file, and that of its MTP layer."""
    at = v4.parent
    return convert(v4, at / "model.gguf"), convert(v4, at / "mtp.gguf", mtp=True)


def test_files_of_deepseek4(v4: Path, v4_files: tuple[Path, Path]) -> None:
    """In llama.cpp's names: the mix behind the layer has that of the model."""
    with closing(open_hf_source(v4)) as source:
        assert [note for note in source.notes if "--mtp writes a file of them alone" in note]
    with open_gguf(v4_files[0]) as model, open_gguf(v4_files[1]) as alone:
        assert not [name for name in model.tensors if name.startswith("blk.4.")]
        assert "deepseek4.nextn_predict_layers" not in model.metadata
        assert model.metadata["deepseek4.block_count"] == N_LAYER
        assert alone.metadata["deepseek4.block_count"] == N_LAYER + 1
        assert np.array_equal(
            alone.metadata["deepseek4.attention.compress_ratios"], [0, 4, 16, 4, 0]
        )
        assert {name.split(".")[0] for name in alone.tensors} == {
            *("token_embd", "output_norm", "output", "blk"),
            *("output_hc_fn", "output_hc_base", "output_hc_scale"),
        }
        assert {name for name in alone.tensors if "nextn" in name} == {
            f"blk.4.nextn.{name}.weight"
            for name in ("eh_proj", "enorm", "hnorm", "shared_head_norm")
        }
        joined = alone.tensors["blk.4.nextn.eh_proj.weight"].dequantize()
        both = np.concatenate([drawn("e_proj", N, N), drawn("h_proj", N, N)], 1)
        assert np.array_equal(joined, both)
        assert np.array_equal(
            alone.tensors["output_hc_fn.weight"].dequantize(), drawn("fn", 3, 192)
        )


def test_drafts_of_deepseek4(v4: Path, v4_files: tuple[Path, Path]) -> None:
    """The folder drafts by itself, the file by its layer's file, with the same drafts."""
    ids = ids_of(40)
    model, alone = v4_files
    found = []
    for path, draft in ((v4, None), (model, alone), (v4, alone)):
        with load(path, draft, deterministic=True, kv="f32") as opened:
            assert drafter_of(opened).engine.gguf.tensors
            text = opened.generate(ids, max_tokens=24, temperature=0, ignore_eos=True)
            text.finish()
            assert text.timings.n_drafted > 3
            found.append((text.ids, text.timings.n_drafted, text.timings.n_accepted))
    assert found[0] == found[1] == found[2]
    check_texts(
        lambda **more: load(model, None, **more),
        lambda **more: load(model, alone, **more),
        {"temperature": 0},
    )


def test_a_file_of_mtp_layers_of_another_model(
    v4: Path, v4_files: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=r"only MTP layers.*--draft"):
        treadle.load(v4_files[1])
    save(own(V4, num_hidden_layers=3, layer_types=None, mlp_layer_types=None), tmp_path / "hf")
    says = "it has the MTP layers of deepseek4 with 4 layers, the model is deepseek4 with 3"
    with pytest.raises(UnsupportedError, match=says):
        treadle.load(tmp_path / "hf", draft=v4_files[1])
    with pytest.raises(UnsupportedError, match=r"no file of MTP layers.*its weights have none"):
        open_hf_source(tmp_path / "hf", mtp=True)


def test_layers_that_are_not_whole(tmp_path: Path) -> None:
    def lose(tensors: Tensors, config: dict[str, Any]) -> None:
        add_v4(tensors, config)
        del tensors["mtp.0.h_proj.weight"]

    folder = folder_of(tmp_path / "hf", save_v4, lose)
    with pytest.raises(UnsupportedError, match=r"h_proj\.weight is missing"):
        open_hf_source(folder, mtp=True)


def test_glm_next(tmp_path: Path) -> None:
    """Its layer is beside the model's in one file, as llama.cpp's converter writes it."""
    folder = folder_of(tmp_path / "hf", saved, add_glm)
    made = convert(folder, tmp_path / "made.gguf")
    with open_gguf(made) as gguf:
        found = {key.partition(".")[2]: value for key, value in gguf.metadata.items()}
        assert found["block_count"] == N_LAYER + 1
        assert found["nextn_predict_layers"] == 1
        assert np.array_equal(found["attention.head_count_kv"], [0, 1, 1, 0, 1])
        assert not [name for name in gguf.tensors if name.startswith("blk.4.hc")]
    texts = []
    for path in (folder, made):
        for speculate in (None, False):
            with load(path, None, deterministic=True, kv="f32", speculate=speculate) as model:
                text = model.generate(ids_of(20), max_tokens=24, temperature=0, ignore_eos=True)
                text.finish()
                assert (text.timings.n_drafted > 3) == (speculate is None)
                texts.append(text.ids)
    assert all(text == texts[0] for text in texts)


# -- DSpark, in the folder of its model -----------------------------------------------------------


def add_dspark(tensors: Tensors, config: dict[str, Any]) -> None:
    """Two stages: layer 3 twice, without its units."""
    for stage in (0, 1):
        for name in [name for name in tensors if name.startswith("model.layers.3.")]:
            if "compressor" not in name and "indexer" not in name:
                tensors[name.replace("model.layers.3.", f"mtp.{stage}.")] = tensors[name]
    tensors["mtp.0.main_proj.weight"] = drawn("main", N, 2 * N)
    tensors["mtp.0.main_norm.weight"] = drawn("main norm", N)
    tensors["mtp.1.norm.weight"] = drawn("norm", N)
    tensors["mtp.1.markov_head.markov_w1.weight"] = drawn("w1", 320, 32)
    tensors["mtp.1.markov_head.markov_w2.weight"] = drawn("w2", 320, 32)
    tensors["mtp.1.confidence_head.proj.weight"] = drawn("proj", 1, N + 32)
    tensors["mtp.1.hc_head_fn"] = drawn("fn", 3, 3 * N)
    tensors["mtp.1.hc_head_base"] = drawn("base", 3)
    tensors["mtp.1.hc_head_scale"] = drawn("scale", 1)
    config |= {
        "num_nextn_predict_layers": 1,
        "dspark_block_size": 5,
        "dspark_target_layer_ids": [1, 3],
        "dspark_noise_token_id": 7,
        "dspark_markov_rank": 32,
    }


def test_dspark_of_deepseek4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is model and drafter; ``convert`` writes the drafter in llama.cpp's names. Its
    weights are opened once.
    """
    folder = folder_of(tmp_path / "hf", save_v4, add_dspark)
    opened = Mock(wraps=open_safetensors)
    monkeypatch.setattr("treadle.convert.hf.folder.open_safetensors", opened)
    open_model(folder, drafter=True).close()
    assert opened.call_count == 1
    made = convert(folder, tmp_path / "dspark.gguf", mtp=True)
    with open_gguf(made) as gguf:
        assert gguf.metadata["general.architecture"] == "dflash"
        found = {key.partition(".")[2]: value for key, value in gguf.metadata.items()}
        assert (found["block_count"], found["block_size"]) == (2, 5)
        assert np.array_equal(found["target_layers"], [2, 4])
        assert np.array_equal(found["attention.compress_ratios"], [0, 0])
        assert found["hyper_connection.count"] == 3
        assert gguf.metadata["tokenizer.ggml.mask_token_id"] == 7
        assert {name for name in gguf.tensors if not name.startswith("blk.")} == {
            *("fc.weight", "enc.output_norm.weight", "output_norm.weight", "conf_proj.weight"),
            *("markov_w1.weight", "markov_w2.weight"),
            *(f"output_hc_{part}.weight" for part in ("fn", "base", "scale")),
        }
    texts = []
    for draft in (None, folder, made):
        with pytest.warns(UserWarning, match="its drafter is DSpark, which the same folder names"):
            model = load(folder, draft, deterministic=True, kv="f32")
        with model:
            text = model.generate(ids_of(40), max_tokens=24, temperature=0, ignore_eos=True)
            text.finish()
            assert (text.timings.n_drafted > 3) == (draft is not None)
            texts.append((text.ids, text.timings.n_drafted, text.timings.n_accepted))
    assert texts[0][0] == texts[1][0]
    assert texts[1] == texts[2]
