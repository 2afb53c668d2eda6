"""MLX's folders of models with experts and states: what mlx-lm lays otherwise than transformers
is the same model, in floats and packed, in place and converted.

Checked by hand with mlx-lm 0.32.2, which wrote such folders and computed their logits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.mlx_files import set_config
from tests.convert.test_hf import convert, prompt
from tests.convert.test_hf_encoders import save
from tests.convert.test_hf_gemma4 import case as gemma4
from tests.convert.test_hf_hybrids import CASES as HYBRIDS
from tests.convert.test_hf_latent import CASES as LATENTS
from tests.convert.test_hf_mamba import CASES as MAMBAS
from tests.convert.test_hf_mixtures import CASES as MIXTURES
from tests.convert.test_hf_mixtures import own
from tests.convert.test_mlx import rms
from tests.mlx_package import import_mlx, to_numpy
from tests.models.hf_cases import Case
from treadle.convert.hf.folder import open_hf
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import GGUF, open_gguf
from treadle.files.tensor import PartedTensor

Arrays = dict[str, np.ndarray]
_THREE = ("gate", "up", "down")
_W = {"gate": "w1", "up": "w3", "down": "w2"}
# The largest share of a scale that f16 rounds away, times the largest code.
Q4_1 = 2.0**-11 * 2


def stacked(arrays: Arrays, of: str, to: str) -> Arrays:
    """Experts' matrices ``.. {of.format(i)}.weight`` as one, ``.. {to}.weight``."""
    pattern = re.compile(r"(.*\.)" + re.escape(of).replace(r"\{\}", r"(\d+)") + r"\.weight")
    made: Arrays = {}
    some: dict[str, dict[int, np.ndarray]] = {}
    for name, array in arrays.items():
        if match := pattern.fullmatch(name):
            some.setdefault(f"{match[1]}{to}.weight", {})[int(match[2])] = array
        else:
            made[name] = array
    return made | {
        name: np.stack([each[i] for i in range(len(each))]) for name, each in some.items()
    }


def experts(arrays: Arrays, at: str = "mlp") -> Arrays:
    for one in _THREE:
        arrays = stacked(arrays, f"{at}.experts.{{}}.{one}_proj", f"{at}.switch_mlp.{one}_proj")
    return arrays


def numbered(arrays: Arrays, at: str = "block_sparse_moe") -> Arrays:
    for one, name in _W.items():
        arrays = stacked(arrays, f"{at}.experts.{{}}.{name}", f"{at}.switch_mlp.{one}_proj")
    return arrays


def convolved(arrays: Arrays) -> Arrays:
    """[channels, 1, taps] as [channels, taps, 1]."""
    taps = (".conv1d.weight", ".conv.conv.weight")
    return {n: a.swapaxes(1, 2) if n.endswith(taps) else a for n, a in arrays.items()}


def renamed(arrays: Arrays, *pairs: tuple[str, str]) -> Arrays:
    made: Arrays = {}
    for name, array in arrays.items():
        for old, new in pairs:
            name = name.replace(old, new)
        made[name] = array
    return made


def delta(arrays: Arrays) -> Arrays:
    """Qwen's norms are larger by one there, but for that of the delta net itself."""
    made = convolved(experts(arrays))
    return {
        name: array + 1 if name.endswith("norm.weight") and "linear_attn" not in name else array
        for name, array in made.items()
    }


def latent(arrays: Arrays) -> Arrays:
    """What keys and values are made with, head by head and apart; keys' turned."""
    made = experts(arrays)
    for name in [name for name in made if name.endswith("kv_b_proj.weight")]:
        heads = made.pop(name).reshape(4, 64, -1)
        at = name.removesuffix("kv_b_proj.weight")
        made[f"{at}embed_q.weight"] = heads[:, :32].swapaxes(1, 2)
        made[f"{at}unembed_out.weight"] = heads[:, 32:]
    return made


def split(arrays: Arrays, at: str, to: str, axis: int, *, turn: bool = False) -> Arrays:
    """Gate and up, which are one matrix of each expert."""
    made: Arrays = {}
    for name, array in arrays.items():
        if not name.endswith(at):
            made[name] = array
            continue
        stem = name.removesuffix(at)
        halves = [array[..., ::2], array[..., 1::2]] if turn else np.split(array, 2, axis)
        for one, half in zip(("gate", "up"), halves, strict=True):
            made[f"{stem}{to.format(one)}"] = (
                half.swapaxes(1, 2) if half.ndim > 2 and turn else half
            )
    return made


def granite(arrays: Arrays) -> Arrays:
    at = "block_sparse_moe."
    made = split(arrays, f"{at}input_linear.weight", f"{at}switch_mlp.{{}}_proj.weight", 1)
    return convolved(renamed(made, ("moe.output_linear", "moe.switch_mlp.down_proj")))


def gemma(arrays: Arrays) -> Arrays:
    made = split(arrays, "experts.gate_up_proj", "experts.switch_glu.{}_proj.weight", 1)
    return {
        re.sub(r"experts\.down_proj$", "experts.switch_glu.down_proj.weight", n): a
        for n, a in made.items()
    }


def gpt_oss(arrays: Arrays) -> Arrays:
    made = split(arrays, "experts.gate_up_proj", "experts.{}_proj.weight", 2, turn=True)
    made = split(made, "experts.gate_up_proj_bias", "experts.{}_proj.bias", 1, turn=True)
    for name in [name for name in made if name.endswith("experts.down_proj")]:
        made[f"{name}.weight"] = made.pop(name).swapaxes(1, 2)
    return renamed(made, ("experts.down_proj_bias", "experts.down_proj.bias"))


def nemotron(arrays: Arrays) -> Arrays:
    for of, to in (("up_proj", "fc1"), ("down_proj", "fc2")):
        arrays = stacked(arrays, f"mixer.experts.{{}}.{of}", f"mixer.switch_mlp.{to}")
    return convolved(arrays)


def lfm2(arrays: Arrays) -> Arrays:
    made = convolved(numbered(arrays, "feed_forward"))
    return renamed(
        made, *((f"feed_forward.{w}.", f"feed_forward.{one}_proj.") for one, w in _W.items())
    )


LAID: dict[str, tuple[Callable[[], Case], Callable[[Arrays], Arrays]]] = {
    "qwen3moe": (lambda: own(MIXTURES["qwen3moe"]), experts),
    "mixtral": (lambda: own(MIXTURES["mixtral"]), numbered),
    "gpt-oss": (lambda: own(MIXTURES["gpt-oss"]), gpt_oss),
    "granitemoe": (lambda: own(MIXTURES["granitemoe"]), granite),
    "deepseek3": (lambda: own(LATENTS["deepseek3"]), latent),
    "gemma4-moe": (lambda: gemma4("gemma4-moe"), gemma),
    "lfm2moe": (lambda: own(HYBRIDS["lfm2moe"]), lfm2),
    "qwen3next": (lambda: own(HYBRIDS["qwen3next"]), delta),
    "qwen35": (lambda: own(HYBRIDS["qwen35"]), delta),
    "granitehybrid": (lambda: own(MAMBAS["granitehybrid"]), granite),
    "mamba2": (lambda: own(MAMBAS["mamba2"]), convolved),
    "nemotronh": (lambda: own(MAMBAS["nemotronh"]), nemotron),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Arrays]]:
    """The folder of transformers', and its tensors as mlx-lm lays them."""
    from safetensors.numpy import load_file

    root, made = tmp_path_factory.mktemp("laid"), dict[str, tuple[Path, Arrays]]()

    def write(name: str) -> tuple[Path, Arrays]:
        if name not in made:
            case, laid = LAID[name]
            save(case(), root / name)
            arrays = laid(load_file(root / name / "model.safetensors"))
            made[name] = root / name, arrays
        return made[name]

    return write


def write(arrays: Arrays, config: Path, folder: Path) -> None:
    from safetensors.numpy import save_file

    folder.mkdir()
    save_file({n: np.ascontiguousarray(a) for n, a in arrays.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text((config / "config.json").read_text())


def check(ours: GGUF, expected: GGUF, most: float = 0.0) -> None:
    assert ours.tensors.keys() == expected.tensors.keys()
    for name, tensor in ours.tensors.items():
        a = tensor.dequantize()
        b = expected.tensors[name].dequantize()
        allowed = most * np.abs(b).max() if tensor.type_name == "Q4_1" else 0.0
        np.testing.assert_allclose(a, b, rtol=0, atol=allowed, err_msg=name)


@pytest.mark.parametrize("name", LAID)
def test_floats(name: str, folders: Any, tmp_path: Path) -> None:
    """As mlx-lm saves a model that it does not pack."""
    folder, arrays = folders(name)
    write(arrays, folder, tmp_path / "mlx")
    with open_hf(tmp_path / "mlx") as ours, open_hf(folder) as expected:
        same = ours.tensors.keys() == expected.tensors.keys()
        assert same or name == "gemma4-moe"  # whose gate and up are one matrix in GGUF
        if same:
            check(ours, expected)
    ids = prompt()
    with (
        treadle.load(tmp_path / "mlx", threads=2, kv="f32") as ours,
        treadle.load(folder, threads=2, kv="f32") as expected,
    ):
        np.testing.assert_allclose(ours.logits(ids), expected.logits(ids), rtol=0, atol=1e-4)


# What activations of eight bits may cost: they make some tokens choose other experts. Q8_0 of
# the same Gemma is off by 0.29.
OFF = {"gemma4-moe": 0.4}
PACKED = [
    *((name, 4, 32, "affine") for name in LAID),
    ("qwen3moe", 8, 64, "affine"),
    ("qwen3next", 3, 32, "affine"),
    ("qwen35", 8, 32, "affine"),
    ("gpt-oss", 4, 32, "mxfp4"),
]


@pytest.mark.parametrize(("name", "bits", "group", "mode"), PACKED)
def test_packed(name: str, bits: int, group: int, mode: str, folders: Any, tmp_path: Path) -> None:
    """Every matrix of whole groups; routers in eight bits, as mlx-lm has most."""
    mx = import_mlx()
    folder, arrays = folders(name)
    plain = dict(arrays)
    packed = Arrays()
    settings = dict[str, Any]()
    for tensor, array in arrays.items():
        module = tensor.removesuffix(".weight")
        if array.ndim < 2 or array.shape[-1] % group or ".conv" in tensor or module == tensor:
            packed[tensor] = array
            continue
        own = mode
        each = {"bits": bits, "group_size": group}
        if module.endswith((".gate", ".router", "router.proj", "router.layer")):
            own = "affine"
            each = {"bits": 8, "group_size": 32}
            settings[module] = {**each, "mode": own}
        parts = mx.quantize(mx.array(array), mode=own, **each)
        for part, value in zip(("weight", "scales", "biases"), parts, strict=False):
            packed[f"{module}.{part}"] = np.array(value)
        plain[tensor] = to_numpy(mx.dequantize(*parts, mode=own, **each))
    write(packed, folder, tmp_path / "packed")
    write(plain, folder, tmp_path / "plain")
    said = {"group_size": group, "bits": bits, "mode": mode, **settings}
    set_config(tmp_path / "packed", quantization=said)
    with open_hf(tmp_path / "packed") as ours, open_hf(tmp_path / "plain") as expected:
        if bits < 8:  # else what is moved is rounded to bf16
            check(ours, expected, Q4_1)
        if mode == "affine":
            assert any(isinstance(tensor, PartedTensor) for tensor in ours.tensors.values())
    ids = prompt()
    with (
        treadle.load(tmp_path / "packed", threads=2, kv="f32") as model,
        treadle.load(tmp_path / "plain", threads=2, kv="f32") as other,
    ):
        exact = other.logits(ids)
        with model.session() as session:
            one_by_one = np.concatenate([session.logits([i]) for i in ids])
        for rows in (model.logits(ids), one_by_one):
            off = [rms(*pair) for pair in zip(rows, exact, strict=True)]
            assert np.median(off) < OFF.get(name, 0.1)


def test_is_converted(folders: Any, tmp_path: Path) -> None:
    folder, arrays = folders("mixtral")
    write(arrays, folder, tmp_path / "mlx")
    files = [convert(at, tmp_path / f"{i}.gguf") for i, at in enumerate((tmp_path / "mlx", folder))]
    with open_gguf(files[0]) as ours, open_gguf(files[1]) as expected:
        check(ours, expected)


def test_factors_that_mlx_multiplied_in(tmp_path: Path) -> None:
    """Falcon-H1's: read again they would be there twice."""
    from safetensors.numpy import load_file

    save(own(MAMBAS["falconh1"]), tmp_path / "hf")
    write(
        convolved(load_file(tmp_path / "hf/model.safetensors")), tmp_path / "hf", tmp_path / "mlx"
    )
    with pytest.raises(UnsupportedError, match="multiplied the model's factors"):
        open_hf(tmp_path / "mlx")


def test_experts_that_do_not_fit(folders: Any, tmp_path: Path) -> None:
    mx = import_mlx()
    folder, arrays = folders("qwen3moe")
    name = "model.layers.1.mlp.switch_mlp.up_proj"
    words, scales, biases = (
        np.array(part) for part in mx.quantize(mx.array(arrays[f"{name}.weight"]), 32, 4)
    )
    broken = {
        "an expert less": (words, scales[:-1], biases),
        "a row less": (words[:, :-1], scales[:, :-1], biases[:, :-1]),
        "no biases": (words, scales, None),
    }
    for what, parts in broken.items():
        made = {k: v for k, v in arrays.items() if k != f"{name}.weight"}
        for part, value in zip(("weight", "scales", "biases"), parts, strict=True):
            if value is not None:
                made[f"{name}.{part}"] = value
        write(made, folder, tmp_path / what)
        set_config(tmp_path / what, quantization={"group_size": 32, "bits": 4})
        with pytest.raises(FileError, match=re.escape(name)):
            open_hf(tmp_path / what)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3_moe"
