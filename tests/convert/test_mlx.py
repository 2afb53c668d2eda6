"""MLX's quantised directories: run in place, converted, and refused where they are damaged.

The truth is transformers on the weights that mlx itself unpacks (``mlx_files.py``).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.cli.conftest import Run
from tests.cli.conftest import run as run  # a fixture
from tests.convert.mlx_files import save, set_config, write_mlx
from tests.engine.test_engine import decode, prefill
from tests.lowered import lowered
from tests.mlx_package import import_mlx, to_numpy
from tests.models.hf_cases import CASES, Case
from tests.models.hf_tiny import build, compute_logits, require_transformers
from tests.reference import forward
from tests.tiny import rounding
from treadle.convert.hf.folder import HFModel, open_hf, open_hf_source
from treadle.convert.recipe import Options
from treadle.convert.writer import convert
from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.files.tensor import PartedTensor
from treadle.formats import by_name
from treadle.models.load import load_config

N_IDS = 40
WIDE = {"hidden_size": 128, "intermediate_size": 256}  # every group divides them
CASE_OF = {
    "llama": "llama3",
    "llama-tied": "llama-bias",
    "gemma3": "gemma3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
}
# What mlx-lm writes: most in the model's own BF16; F16 by older ones.
WRITTEN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"bits": 4, "group": 64, "dtype": "F16", "shard_bytes": 20_000}),
    "llama-tied": ("llama-tied", {"bits": 6, "group": 32, "dtype": "BF16"}),
    "gemma3": ("gemma3", {"bits": 4, "group": 64, "dtype": "BF16", "shard_bytes": 60_000}),
    "qwen2": ("qwen2", {"bits": 8, "group": 128, "dtype": "BF16"}),
    "qwen3": ("qwen3", {"bits": 5, "group": 32, "dtype": "F32"}),
    "qwen3-3bit": ("qwen3", {"bits": 3, "group": 64, "dtype": "F16"}),
    "qwen2-2bit": ("qwen2", {"bits": 2, "group": 64, "dtype": "F32"}),
    "llama-mixed": (
        "llama",
        {
            "bits": 4,
            "group": 64,
            "dtype": "F16",
            "modules": {
                "model.embed_tokens": {"group_size": 32, "bits": 6},
                "model.layers.0.self_attn.q_proj": {"group_size": 64, "bits": 8},
                "model.layers.1.mlp.down_proj": {"group_size": 32, "bits": 8, "mode": "affine"},
                "model.layers.2.mlp.gate_proj": False,
                "model.layers.2.mlp.up_proj": True,
                "lm_head": False,
            },
        },
    ),
}

Saved = Callable[[str], tuple[Path, Any]]


def wide(case: str) -> Any:
    made = CASES[case]
    options = {**made.options, **WIDE}
    if "num_hidden_layers" in options:
        options["num_hidden_layers"] = 6  # the last is Gemma's global one
    return build(replace(made, options=options))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """``saved(name)``: a directory of WRITTEN, and the model whose weights it has."""
    require_transformers()
    import_mlx()
    made: dict[str, tuple[Path, Any]] = {}
    root = tmp_path_factory.mktemp("mlx")

    def write(name: str) -> tuple[Path, Any]:
        if name not in made:
            case, how = WRITTEN[name]
            model = wide(CASE_OF[case])
            write_mlx(model, root / name, **how)
            made[name] = root / name, model
        return made[name]

    return write


def prompt() -> list[int]:
    return [int(i) for i in np.random.default_rng(7).integers(3, 320, N_IDS)]


def worst(logits: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(logits - expected).max() / np.abs(expected).max())


def rms(logits: np.ndarray, expected: np.ndarray) -> float:
    return float(np.sqrt(np.mean((logits - expected) ** 2) / np.mean(expected**2)))


# -- the same logits --------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITTEN)
def test_runs_in_place(name: str, saved: Saved) -> None:
    """What treadle reads is exactly the model; what it computes is off by its int8 activations.

    Those cost each product 2.2 / 127 / sqrt(12) = 0.5 % (see test_seams.py); products come one
    after the other, four a layer. Twice that.
    """
    folder, model = saved(name)
    ids = prompt()
    expected = compute_logits(model, prompt())
    with treadle.load(folder, threads=2, kv="f32") as loaded:
        exact = forward(loaded.gguf, loaded.config, ids)
        assert worst(exact, expected) <= rounding(loaded.config)
        most = 2 * 0.005 * np.sqrt(4 * loaded.config.n_layer + 1)
        for rows in (loaded.logits(ids), decode(loaded.engine, ids), prefill(loaded.engine, ids)):
            assert rms(rows, expected) < most
        for n in (1, 2, 4, 40):
            lowered(loaded.engine, n).check()


@pytest.mark.parametrize("name", WRITTEN)
def test_weights_stay_in_the_files(name: str, saved: Saved) -> None:
    """Every array that a step is given is a view of the mapping, but for norms and biases."""
    folder, _ = saved(name)
    with treadle.load(folder, threads=1) as loaded:
        loaded.plan(1)
        gguf = loaded.gguf
        assert isinstance(gguf, HFModel)
        maps = {file.path: np.frombuffer(file, np.uint8) for file in gguf._maps.files}
        assert set(maps) == set(gguf.paths)
        packed = 0
        for tensor_name, tensor in gguf.tensors.items():
            if len(tensor.shape) == 1:
                continue
            for const, array in zip(
                loaded.engine._weights[tensor_name], tensor.arrays, strict=True
            ):
                inside = [whole for whole in maps.values() if np.shares_memory(whole, const.array)]
                assert len(inside) == 1
                assert not const.array.flags.owndata
                assert not const.array.flags.writeable
                assert const.array.ctypes.data == array.ctypes.data
            if isinstance(tensor, PartedTensor):
                packed += 1
                assert tensor.n_bytes == sum(array.nbytes for array in tensor.arrays)
        assert packed >= 7
    if name == "llama":  # shards are so small that codes and scales lie in several
        assert len(maps) > 8


FLOATS = {"mxfp4": (32, 4, "MXFP4"), "nvfp4": (16, 4, "NVFP4"), "mxfp8": (32, 8, "BF16")}


def write_floats(model: Any, folder: Path, mode: str, affine: tuple[str, ...] = ()) -> None:
    """``model`` in one of MLX's modes of floats, but for the modules of ``affine``; its weights are
    those that mlx unpacks then.
    """
    import torch

    mx = import_mlx()
    group, bits, _ = FLOATS[mode]
    arrays: dict[str, Any] = {}
    for name, parameter in dict(model.named_parameters()).items():
        values = mx.array(parameter.detach().numpy().astype(np.float32))
        module = name.removesuffix(".weight")
        own = (64, 8, "affine") if module in affine else (group, bits, mode)
        if values.ndim == 2:
            parts = mx.quantize(values, own[0], own[1], mode=own[2])
            for end, part in zip(("weight", "scales", "biases"), parts, strict=False):
                arrays[f"{module}.{end}"] = part
            values = mx.dequantize(*parts, group_size=own[0], bits=own[1], mode=own[2])
        else:
            arrays[name] = values
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(to_numpy(values).astype(np.float64)))
    save(arrays, folder, 1 << 30)
    model.config.save_pretrained(folder)
    each = {module: {"group_size": 64, "bits": 8, "mode": "affine"} for module in affine}
    set_config(folder, quantization={"group_size": group, "bits": bits, "mode": mode, **each})


@pytest.mark.parametrize("mode", FLOATS)
def test_modes_of_floats(mode: str, tmp_path: Path) -> None:
    """Weights are blocks with the same numbers, or in BF16, which holds them."""
    require_transformers()
    import_mlx()
    model = wide("llama")
    write_floats(model, tmp_path / "q", mode, ("model.embed_tokens",))
    ids = prompt()
    expected = compute_logits(model, prompt())
    with treadle.load(tmp_path / "q", threads=2, kv="f32") as loaded:
        kinds = {name: t.type_name for name, t in loaded.gguf.tensors.items()}
        assert kinds["token_embd.weight"] == "MLX8_G64_F32"
        assert kinds["blk.0.attn_q.weight"] == kinds["output.weight"] == FLOATS[mode][2]
        exact = forward(loaded.gguf, loaded.config, ids)
        assert worst(exact, expected) <= rounding(loaded.config)
        assert rms(loaded.logits(ids), expected) < 2 * 0.005 * np.sqrt(
            4 * loaded.config.n_layer + 1
        )


def test_nvfp4_in_rows_of_no_whole_blocks(tmp_path: Path) -> None:
    """96 weights are no blocks of 64: they are multiplied out, to BF16."""
    require_transformers()
    import_mlx()
    options = {**CASES["llama"].options, "hidden_size": 96, "head_dim": 32}
    model = build(Case("Llama", "llama", {**options, "num_hidden_layers": 1}))
    write_floats(model, tmp_path / "q", "nvfp4")
    with open_hf(tmp_path / "q") as gguf:
        tensor = gguf.tensors["blk.0.attn_q.weight"]
        assert tensor.type_name == "BF16"
        truth = model.model.layers[0].self_attn.q_proj.weight.detach().numpy()
        assert np.abs(tensor.dequantize() - truth).max() <= 2.0**-8 * np.abs(truth).max()


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda q: q.pop("weight"), "scales: has no"),
        (lambda q: q.update(scales=q["scales"][:, :1]), "scales: shape"),
        (lambda q: q.update(scales=q["scales"].astype("float16")), "U32 and U8"),
    ],
)
def test_damaged_modules_of_floats(change: Any, where: str, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    require_transformers()
    import_mlx()
    write_floats(wide("llama"), tmp_path / "q", "mxfp4")
    file = next((tmp_path / "q").glob("*.safetensors"))
    arrays = load_file(file)
    at = "model.layers.0.self_attn.q_proj."
    module = {end: arrays.pop(at + end) for end in ("weight", "scales")}
    change(module)
    arrays |= {at + end: np.ascontiguousarray(array) for end, array in module.items()}
    for other in (tmp_path / "q").glob("*safetensors*"):
        other.unlink()
    save_file(arrays, tmp_path / "q/model.safetensors")
    with pytest.raises(FileError) as caught:
        open_hf(tmp_path / "q").close()
    assert where in str(caught.value)


def test_settings_of_single_modules(saved: Saved) -> None:
    folder, _ = saved("llama-mixed")
    with open_hf(folder) as gguf:
        kinds = {name: t.type_name for name, t in gguf.tensors.items() if len(t.shape) == 2}
    assert kinds["token_embd.weight"] == "MLX6_G32"
    assert kinds["output.weight"] == kinds["blk.2.ffn_gate.weight"] == "F16"
    assert kinds["blk.0.attn_q.weight"] == "MLX8_G64"
    assert kinds["blk.1.ffn_down.weight"] == "MLX8_G32"
    assert kinds["blk.2.ffn_up.weight"] == kinds["blk.1.attn_q.weight"] == "MLX4_G64"


def test_shapes_speak_for_modules_without_settings(saved: Saved, tmp_path: Path) -> None:
    """As mlx-lm has it: settings of the model are for those whose shapes they fit."""
    folder = copy(saved("llama-mixed")[0], tmp_path)
    settings = {"group_size": 64, "bits": 4}
    set_config(folder, quantization=settings)
    with open_hf(saved("llama-mixed")[0]) as a, open_hf(folder) as b:
        assert [t.type_name for t in a.tensors.values()] == [
            t.type_name for t in b.tensors.values()
        ]


def test_gemmas_output_of_its_own(tmp_path: Path) -> None:
    """Early Gemmas of mlx-lm: an lm_head beside a config.json that ties it; it is used."""
    require_transformers()
    made = CASES["gemma3"]
    options = {**made.options, **WIDE, "tie_word_embeddings": False}
    model = build(Case(made.family, made.arch, options))
    modules = {"lm_head": {"bits": 8, "group_size": 64}}
    write_mlx(model, tmp_path, bits=4, group=64, dtype="BF16", modules=modules)
    set_config(tmp_path, tie_word_embeddings=True)
    with open_hf(tmp_path) as gguf:
        assert gguf.tensors["output.weight"].type_name == "MLX8_G64_BF16"
        config = load_config(gguf)
        error = worst(forward(gguf, config, prompt()), compute_logits(model, prompt()))
        assert error <= rounding(config)


def test_the_text_part_of_a_model_of_text_and_images(tmp_path: Path) -> None:
    """The names that mlx-lm gives to gemma3, in tensors and in settings; images stay outside."""
    require_transformers()
    mx = import_mlx()
    model = wide("gemma3")
    stem = "language_model.model.layers.0.mlp.down_proj"
    write_mlx(
        model,
        tmp_path,
        bits=4,
        group=64,
        dtype="BF16",
        modules={stem: {"group_size": 32, "bits": 8}},
        rename=lambda name: f"language_model.{name}",
    )
    config = json.loads((tmp_path / "config.json").read_text())
    quantization = config.pop("quantization")
    config.pop("quantization_config")
    inner = config | {"model_type": "gemma3_text"}
    outer = {"model_type": "gemma3", "text_config": inner, "quantization": quantization}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    arrays = dict(mx.load(str(tmp_path / "model.safetensors")))
    tower = mx.quantize(mx.zeros((32, 64)), 64, 4)
    for part, array in zip(("weight", "scales", "biases"), tower, strict=True):
        arrays[f"vision_tower.layer.{part}"] = array
    save(arrays, tmp_path, 1 << 30)
    with open_hf(tmp_path) as gguf:
        kinds = [gguf.tensors[f"blk.{i}.ffn_down.weight"].type_name for i in (0, 1)]
        assert kinds == ["MLX8_G32_BF16", "MLX4_G64_BF16"]
        config_ = load_config(gguf)
        error = worst(forward(gguf, config_, prompt()), compute_logits(model, prompt()))
        assert error <= rounding(config_)


# -- converted --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2", "qwen3", "llama-mixed"])
def test_converts(name: str, saved: Saved, tmp_path: Path) -> None:
    """In F32, exactly; by default in the type of its scales, each weight rounded once."""
    folder, model = saved(name)
    ids = prompt()
    expected = compute_logits(model, prompt())
    for kind in ("F32", None, "Q8_0"):
        source = open_hf_source(folder)
        path = tmp_path / f"{kind}.gguf"
        convert(source, path, Options(type=by_name(kind) if kind else None))
        source.close()
        with open_gguf(path) as made, open_hf(folder) as straight:
            config = load_config(made)
            for tensor in made.tensors.values():
                own = straight.tensors.get(tensor.name)
                if own is None or len(tensor.shape) < 2:
                    continue
                same = own.type_name.split("_")[-1]
                scales = same if same in ("BF16", "F32") else "F16"
                assert tensor.type_name == (kind or scales)
                if "attn_q" not in tensor.name and "attn_k" not in tensor.name:
                    want = by_name(tensor.type_name)
                    rounded = want.dequantize_rows(want.quantize_rows(own.dequantize()))
                    np.testing.assert_array_equal(tensor.dequantize(), rounded)
            if kind == "F32":
                assert worst(forward(made, config, ids), expected) <= rounding(config)
            else:  # each weight is rounded once: to 2**-9 in BF16, and in Q8_0 of its block's top
                share = 2.0**-8 if kind is None else 0.01
                error = rms(forward(made, config, ids), expected)
                assert error < share * np.sqrt(4 * config.n_layer + 1)


def test_says_what_becomes_of_the_weights(saved: Saved, tmp_path: Path, run: Run) -> None:
    ran = run(
        "convert", str(saved("gemma3")[0]), str(tmp_path / "a.gguf"), "--set", "general.name=x"
    )
    assert ran.code == 0, ran.err
    assert "MLX4_G64_BF16 weights have no GGUF format" in ran.err
    assert "written as BF16" in ran.err
    assert "--type" in ran.err


def test_a_scale_that_is_no_number_is_not_converted(saved: Saved, tmp_path: Path) -> None:
    mx = import_mlx()
    folder = copy(saved("qwen2")[0], tmp_path)
    arrays = dict(mx.load(str(folder / "model.safetensors")))
    scales = np.array(arrays["model.layers.1.mlp.up_proj.scales"].astype(mx.float32))
    scales[3, 0] = np.inf
    arrays["model.layers.1.mlp.up_proj.scales"] = mx.array(scales).astype(mx.bfloat16)
    save(arrays, folder, 1 << 30)
    source = open_hf_source(folder)
    target = tmp_path / "made.gguf"
    where = r"model\.layers\.1\.mlp\.up_proj\.weight \(blk\.1\.ffn_up\.weight\)"
    with pytest.raises(FileError, match=rf"model\.safetensors: {where}: .*row 3, colu"):
        convert(source, target, Options())
    source.close()
    assert not target.exists()


# -- the commands -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stories(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained model as mlx-lm would pack it; ffn_down, rows of 172, it leaves alone."""
    import shutil

    mx = import_mlx()
    folder = tmp_path_factory.mktemp("stories")
    names = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "token_embd": "embed_tokens",
        "output_norm": "norm",
    }
    arrays: dict[str, Any] = {}
    with open_gguf(data / "models" / "stories260K.gguf") as gguf:
        for name, tensor in gguf.tensors.items():
            values = tensor.data.view("<f4").reshape(tensor.shape)
            if name.endswith(("attn_q.weight", "attn_k.weight")):
                pairs = values.reshape(8 if "attn_q" in name else 4, -1, 2, values.shape[1])
                values = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
            *layer, stem, _ = name.split(".")
            module = (
                ".".join(["model", *(["layers", layer[1]] if layer else []), names[stem]])
                if stem in names
                else "lm_head"
            )
            given = mx.array(values.copy())
            if values.ndim == 2 and values.shape[1] % 32 == 0:
                for part, array in zip(
                    ("weight", "scales", "biases"), mx.quantize(given, 32, 8), strict=True
                ):
                    arrays[f"{module}.{part}"] = array
            else:
                arrays[f"{module}.weight"] = given
        keys = {k.removeprefix("llama."): v for k, v in gguf.metadata.items()}
    save(arrays, folder, 100_000)
    config = {
        "model_type": "llama",
        "hidden_size": keys["embedding_length"],
        "intermediate_size": keys["feed_forward_length"],
        "num_hidden_layers": keys["block_count"],
        "num_attention_heads": keys["attention.head_count"],
        "num_key_value_heads": keys["attention.head_count_kv"],
        "rms_norm_eps": keys["attention.layer_norm_rms_epsilon"],
        "max_position_embeddings": keys["context_length"],
        "vocab_size": 512,
        "tie_word_embeddings": "lm_head.weight" not in arrays,
    }
    (folder / "config.json").write_text(json.dumps(config))
    set_config(folder, quantization={"group_size": 32, "bits": 8})
    shutil.copy(data / "models" / "tok512.model", folder / "tokenizer.model")
    return folder


def test_a_trained_model_tells_its_story(stories: Path, data: Path) -> None:
    greedy = treadle.Sampling(temperature=0)
    said = []
    for path in (data / "models" / "stories260K.gguf", stories):
        with treadle.load(path, threads=2) as model:
            said.append("".join(model.generate("Once upon a time", max_tokens=25, sampling=greedy)))
    assert said[0] == said[1]
    assert ", there was a little girl named Lily" in said[1]


@pytest.mark.slow
@pytest.mark.usefixtures("small_buffers")
def test_the_commands_take_the_folder(stories: Path, data: Path, tmp_path: Path, run: Run) -> None:
    def told(*words: str) -> str:
        ran = run(*words)
        assert ran.code == 0, ran.err
        return ran.out

    folder = str(stories)
    story = told("run", folder, "Once upon a time", "-n", "12", "--temp", "0")
    assert "there was a little girl" in story
    report = json.loads(told("inspect", folder, "--json"))
    assert not [p for p in report["problems"] if "chat" not in p]
    formats = {row["format"]: row for row in report["formats"]}
    assert formats["MLX8_G32_F32"]["bits_per_weight"] == 8 + 64 / 32
    assert formats["MLX8_G32_F32"]["n_tensors"] > 25
    assert "MLX8_G32_F32" in told("inspect", folder)
    assert "gemv_MLX8_G32_F32_q8" in told("plan", folder)
    text = tmp_path / "story.txt"
    text.write_text("Once upon a time, there was a little girl named Lily. " * 40)
    scores = [
        json.loads(told("perplexity", path, str(text), "-c", "128", "--json"))
        for path in (folder, str(data / "models" / "stories260K.gguf"))
    ]
    assert scores[0]["perplexity"] == pytest.approx(scores[1]["perplexity"], rel=0.02)
    speed = json.loads(told("bench", folder, "-p", "16", "-n", "4", "-r", "1", "--json"))
    assert {row["test"] for row in speed} == {"pp16", "tg4"}
    same = json.loads(told("inspect", "--diff", folder, folder, "--json"))
    assert all(row["identical"] for row in same["tensors"])


# -- damaged ----------------------------------------------------------------------------------


def copy(folder: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(folder, tmp_path / "copy"))


UP = "model.layers.1.mlp.up_proj"


def _drop(kind: str) -> Callable[[Any, dict[str, Any]], None]:
    def damage(mx: Any, arrays: dict[str, Any]) -> None:
        del arrays[f"{UP}.{kind}"]

    return damage


def _change(kind: str, change: Callable[[Any, Any], Any]) -> Callable[[Any, dict[str, Any]], None]:
    def damage(mx: Any, arrays: dict[str, Any]) -> None:
        arrays[f"{UP}.{kind}"] = change(mx, arrays[f"{UP}.{kind}"])

    return damage


def _plain(mx: Any, arrays: dict[str, Any]) -> None:
    del arrays[f"{UP}.scales"], arrays[f"{UP}.biases"]


DAMAGED: dict[str, tuple[Callable[[Any, dict[str, Any]], None], str]] = {
    "no scales": (_drop("scales"), rf"{UP}\.biases: has no {UP}\.scales"),
    "no biases": (_drop("biases"), rf"{UP}\.scales: has no {UP}\.biases"),
    "no codes": (_drop("weight"), rf"{UP}\.(scales|biases): has no {UP}\.weight"),
    "neither": (_plain, rf"{UP}\.weight: holds packed codes but has no scales"),
    "fewer rows": (_change("scales", lambda mx, a: a[:-1]), rf"{UP}\.scales: shape \[255, 1\]"),
    "more scales": (
        _change("scales", lambda mx, a: mx.concatenate([a, a], 1)),
        rf"{UP}\.(weight|biases): shape",
    ),
    "fewer biases": (_change("biases", lambda mx, a: a[:7]), rf"{UP}\.biases: shape \[7, 1\]"),
    "fewer codes": (_change("weight", lambda mx, a: a[:, :-1]), rf"{UP}\.weight: shape \[256, 31"),
    "flat codes": (_change("weight", lambda mx, a: a.reshape(-1)), rf"{UP}\.weight: shape"),
    "other biases": (
        _change("biases", lambda mx, a: a.astype(mx.float16)),
        rf"{UP}\.biases: is in F16",
    ),
    "whole scales": (_change("scales", lambda mx, a: a.astype(mx.int32)), rf"{UP}\.scales: is in"),
    "float codes": (
        _change("weight", lambda mx, a: a.astype(mx.float32)),
        rf"{UP}\.weight: is in F32 but has scales",
    ),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_tensors_are_named(what: str, saved: Saved, tmp_path: Path) -> None:
    mx = import_mlx()
    damage, message = DAMAGED[what]
    folder = copy(saved("qwen2")[0], tmp_path)
    arrays = dict(mx.load(str(folder / "model.safetensors")))
    damage(mx, arrays)
    save(arrays, folder, 1 << 30)
    with pytest.raises(FileError, match=rf"model\.safetensors.*{message}"):
        open_hf(folder)


SETTINGS: list[tuple[dict[str, Any], type[TreadleError], str]] = [
    ({"bits": 4}, FileError, "quantization.group_size: is missing"),
    ({"group_size": 64}, FileError, "quantization.bits: is missing"),
    ({"group_size": 128, "bits": "8"}, FileError, "quantization.bits: is '8'"),
    ({"group_size": 32, "bits": 4, "mode": "mxint4"}, UnsupportedError, "mode 'mxint4'"),
    ({"group_size": 32, "bits": 4, "mode": "mxfp4"}, FileError, r"U32 and U8 \(mxfp4\)"),
    (
        {"group_size": 128, "bits": 8, UP: {"group_size": 16, "bits": 4, "mode": "nvfp4"}},
        FileError,
        rf"{UP}.*U32 and U8 \(nvfp4\)",
    ),
    (
        {"group_size": 128, "bits": 8, UP: {"group_size": 128, "bits": 7}},
        UnsupportedError,
        rf"{UP}.*bits 7: MLX supports 2, 3, 4, 5, 6, 8",
    ),
    (
        {"group_size": 128, "bits": 8, UP: {"group_size": 48, "bits": 8}},
        UnsupportedError,
        rf"{UP}.*group_size 48: MLX supports 32, 64, 128",
    ),
    (
        {"group_size": 128, "bits": 8, UP: {"group_size": 128, "bits": 6}},
        FileError,
        rf"{UP}\.weight: shape \[256, 32\] does not fit 6 bits in groups of 128.*24 words",
    ),
    (
        {"group_size": 128, "bits": 8, UP: {"group_size": 64, "bits": 8}},
        FileError,
        rf"{UP}\.weight: shape \[256, 32\] does not fit 8 bits in groups of 64",
    ),
    ({"group_size": 128, "bits": 8, UP: False}, FileError, rf"{UP}\.weight: is packed, but"),
    (
        {"group_size": 128, "bits": 8, UP: {"group_size": 64, "bits": 16}},
        UnsupportedError,
        "bits 16",
    ),
]


@pytest.mark.parametrize(("settings", "error", "message"), SETTINGS)
def test_settings_that_do_not_fit(
    settings: dict[str, Any], error: type[TreadleError], message: str, saved: Saved, tmp_path: Path
) -> None:
    folder = copy(saved("qwen2")[0], tmp_path)
    set_config(folder, quantization=settings)
    with pytest.raises(error, match=message):
        open_hf(folder)


def test_a_module_that_should_be_packed(saved: Saved, tmp_path: Path) -> None:
    folder = copy(saved("llama-mixed")[0], tmp_path)
    set_config(folder, quantization={"group_size": 64, "bits": 4, "lm_head": True})
    with pytest.raises(FileError, match=r"lm_head\.weight: is not packed, but config\.json says"):
        open_hf(folder)


def test_settings_in_the_newer_key_alone(saved: Saved, tmp_path: Path) -> None:
    folder = copy(saved("qwen2")[0], tmp_path)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["quantization"]
    path.write_text(json.dumps(config))
    with open_hf(folder) as gguf:
        assert gguf.tensors["blk.0.ffn_up.weight"].type_name == "MLX8_G128_BF16"


def test_without_settings_packed_codes_are_refused(saved: Saved, tmp_path: Path) -> None:
    folder = copy(saved("qwen2")[0], tmp_path)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["quantization"], config["quantization_config"]
    path.write_text(json.dumps(config))
    with pytest.raises(TreadleError, match=r"model\.safetensors"):
        open_hf(folder)
