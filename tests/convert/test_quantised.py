"""Quantised checkpoints: the weights that they stand for, run in place and converted, and refused
where they are damaged. ``quantised_files.py`` writes them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.quantised_files import WRITTEN, float8, quantise, rounded
from tests.convert.test_hf import convert, prompt
from tests.convert.test_hf_encoders import save
from tests.convert.test_mlx import WIDE, rms
from tests.lowered import lowered
from tests.models.hf_cases import ALL_CASES, Case
from treadle.convert.hf.folder import open_hf, open_hf_source
from treadle.convert.hf.tensors import MappedTensor
from treadle.convert.open import open_model
from treadle.convert.quantized.checkpoint import unquantised
from treadle.convert.quantized.float_formats import _packed
from treadle.convert.quantized.unpack import float8 as float8_values
from treadle.convert.quantized.unpack import from_mxfp4, split_words
from treadle.convert.recipe import Options
from treadle.convert.sources.derived_tensors import (
    DerivationRule,
    make_tensors,
    stacked,
    transposed,
    upper,
)
from treadle.convert.writer import convert as write_checked
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import GGUF, open_gguf
from treadle.files.metadata import MetadataReader
from treadle.files.safetensors import open_safetensors
from treadle.formats import by_name
from treadle.machine.memory import MemoryBound

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MODELS = {
    "llama": Case("Llama", "llama", {**WIDE, "num_hidden_layers": 1}),
    "phi3": Case(  # queries, keys and values in one matrix, gate and up in another
        "Phi3", "phi3", {**WIDE, "num_hidden_layers": 1, "pad_token_id": 0}
    ),
    "qwen3moe": Case(
        "Qwen3Moe", "qwen3moe", {**WIDE, **_EXPERTS, "head_dim": 32, "num_hidden_layers": 1}
    ),
}
# Of every method one more model than llama.
OTHERS = ("fp8-blocks", "ct-w4-zeros", "ct-nvfp4", "modelopt-nvfp4", "gptq", "awq", "nf4")

Plain = Callable[[str], Path]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """A folder in float32, as transformers saves it."""
    root, made = tmp_path_factory.mktemp("plain"), dict[str, Path]()

    def write(model: str) -> Path:
        if model not in made:
            save(MODELS[model], root / model)
            made[model] = root / model
        return made[model]

    return write


def weights(model: GGUF) -> dict[str, np.ndarray]:
    """All of them, with factors multiplied in."""
    found = {name: tensor.dequantize() for name, tensor in model.tensors.items()}
    for name in [name for name in found if name.endswith(".scale")]:
        matrix = f"{name.removesuffix('.scale')}.weight"
        factor = found.pop(name)
        found[matrix] = found[matrix] * factor.reshape(-1, *[1] * (found[matrix].ndim - 1))
        found[matrix] = found[matrix].reshape(model.tensors[matrix].shape)
    return found


def check(ours: GGUF, expected: GGUF, kind: str, n_quantised: int) -> None:
    """The same numbers; in Q4_1 minimums are rounded to f16, by less than 2**-11 of themselves."""
    a = weights(ours)
    b = weights(expected)
    assert a.keys() == b.keys()
    for name, values in a.items():
        most = 2.0**-11 * 2 * np.abs(b[name]).max() if kind == "Q4_1" else 0.0
        np.testing.assert_allclose(values, b[name], rtol=0, atol=most, err_msg=name)
    kinds = [t.type_name for t in ours.tensors.values()]
    assert kinds.count(kind) == n_quantised


@pytest.mark.parametrize("method", WRITTEN)
def test_weights_are_those_of_the_package(method: str, plain: Plain, tmp_path: Path) -> None:
    for model in ("llama", *(("phi3", "qwen3moe") if method in OTHERS else ())):
        at = tmp_path / model
        at.mkdir()
        names = quantise(plain(model), at / "q", WRITTEN[method], at / "f32")
        n = len({name for name in names if ".experts." not in name})
        n += 3 if len(names) > n else 0  # experts' are three in all
        with open_hf(at / "q") as ours, open_hf(at / "f32") as expected:
            check(ours, expected, WRITTEN[method].kind, n)
        files = [convert(at / name, at / f"{name}.gguf") for name in ("q", "f32")]
        with open_gguf(files[0]) as ours, open_gguf(files[1]) as expected:
            check(ours, expected, WRITTEN[method].kind, n)


@pytest.mark.parametrize("method", ["fp8-blocks", "gptq", "awq", "ct-nvfp4", "ct-w8"])
@pytest.mark.parametrize("model", ["llama", "qwen3moe"])
def test_runs_in_place(method: str, model: str, plain: Plain, tmp_path: Path) -> None:
    """The logits are those of the weights in F32, but for activations in int8: 0.5 % a product,
    twice that (see test_mlx.py). A router that nearly ties may choose other experts for a token:
    half of them must be right to the same bound.
    """
    quantise(plain(model), tmp_path / "q", WRITTEN[method], tmp_path / "f32")
    ids = prompt()
    with (
        treadle.load(tmp_path / "q", threads=2, kv="f32") as ours,
        treadle.load(tmp_path / "f32", threads=2, kv="f32") as theirs,
    ):
        rows = ours.logits(ids)
        expected = theirs.logits(ids)
        for n in (1, 4, 40):
            lowered(ours.engine, n).check()
    each = [rms(row, truth) for row, truth in zip(rows, expected, strict=True)]
    assert np.median(each) < 2 * 0.005 * np.sqrt(5)
    assert rms(rows, expected) < (2 * 0.005 * np.sqrt(5) if model == "llama" else 0.3)


def test_modelopts_own_file(plain: Plain, tmp_path: Path) -> None:
    """Its first versions say nothing in config.json."""
    written = WRITTEN["modelopt-nvfp4"]
    quantise(plain("llama"), tmp_path / "q", written, tmp_path / "f32")
    config = json.loads((tmp_path / "q/config.json").read_text())
    settings = config.pop("quantization_config")
    (tmp_path / "q/config.json").write_text(json.dumps(config))
    said = {"producer": {"name": "modelopt"}, "quantization": settings}
    (tmp_path / "q/hf_quant_config.json").write_text(json.dumps(said))
    with open_hf(tmp_path / "q") as ours, open_hf(tmp_path / "f32") as expected:
        check(ours, expected, "NVFP4", 7)


@pytest.mark.parametrize("place", ["compression_config", "text_config"])
def test_settings_in_other_places(place: str, plain: Plain, tmp_path: Path) -> None:
    """As compressed-tensors wrote them first, and as the text part of a larger model has them."""
    at = tmp_path / "made"
    written = WRITTEN["ct-w8"]
    quantise(plain("llama"), at, written, tmp_path / "expected")
    config = json.loads((at / "config.json").read_text())
    own = config.pop("quantization_config")
    if place == "text_config":
        config = {"model_type": "mistral3", place: {**config, "quantization_config": own}}
        config["text_config"]["model_type"] = "llama"
    else:
        config[place] = own
    (at / "config.json").write_text(json.dumps(config))
    with open_hf(at) as ours, open_hf(tmp_path / "expected") as expected:
        check(ours, expected, written.kind, 7)
    own["quant_method"] = "quanto"
    (at / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=f"{place}.*quant_method: .*quanto"):
        open_hf(at)


def test_rows_of_no_whole_blocks(tmp_path: Path) -> None:
    """96 weights are no blocks of 64: NVFP4 is multiplied out, to BF16."""
    case = Case("Llama", "llama", {"hidden_size": 96, "num_hidden_layers": 1, "head_dim": 32})
    save(case, tmp_path / "plain")
    quantise(tmp_path / "plain", tmp_path / "q", WRITTEN["ct-nvfp4"], tmp_path / "f32")
    with open_hf(tmp_path / "q") as ours, open_hf(tmp_path / "f32") as expected:
        kinds = {name: t.type_name for name, t in ours.tensors.items()}
        assert kinds["blk.0.attn_q.weight"] == "BF16"
        assert kinds["blk.0.attn_output.weight"] == "NVFP4"
        for name, values in weights(ours).items():
            truth = weights(expected)[name]
            assert np.abs(values - truth).max() <= 2.0**-8 * np.abs(truth).max()


def test_several_matrices_with_scales(plain: Plain, tmp_path: Path) -> None:
    """transformers 5 has experts' matrices in one, [E, M, K], without ``weight`` behind the name:
    a scale for each block, or one a matrix.
    """
    import torch
    from safetensors.torch import save_file

    rng = np.random.default_rng(0)
    tensors = {}
    truth = {}
    for name, block in (("blocks", (48, 64)), ("matrices", None)):
        write = float8(block, "scale")
        each = [write(rng.standard_normal((96, 128)).astype(np.float32)) for _ in range(3)]
        tensors[name] = torch.stack([parts["weight"] for parts, _ in each])
        tensors[f"{name}_scale_inv"] = torch.stack([parts["scale"] for parts, _ in each])
        truth[name] = np.stack([weights for _, weights in each])
    save_file(tensors, tmp_path / "model.safetensors")
    settings = MetadataReader({"quant_method": "fp8", "weight_block_size": [48, 64]}, tmp_path)
    with open_safetensors(tmp_path / "model.safetensors") as file:
        found = unquantised(file.tensors, settings)
        assert found.keys() == truth.keys()
        for name, tensor in found.items():
            assert (tensor.dtype, tensor.shape) == ("BF16", (3, 96, 128))
            values = by_name("BF16").dequantize_rows(tensor.data).reshape(tensor.shape)
            assert np.array_equal(values, truth[name])


def test_a_converter_says_what_it_multiplied_out(plain: Plain, tmp_path: Path) -> None:
    for method, told in (("fp8-blocks", "F8_E4M3"), ("nf4", "U8"), ("gptq", "")):
        at = tmp_path / method
        at.mkdir()
        quantise(plain("llama"), at / "q", WRITTEN[method], at / "f32")
        source = open_hf_source(at / "q")
        notes = [note for note in source.notes if "dequantised" in note]
        assert [f"({told}) are dequantised and written as BF16" in n for n in notes] == (
            [True] if told else []
        )
        source.close()


def test_made_when_first_read(
    plain: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What looks at names and shapes does not wait; what loads to run is told how far it is."""
    quantise(plain("llama"), tmp_path / "q", WRITTEN["gptq"], tmp_path / "f32")
    made: list[str] = []
    rows = MappedTensor.rows

    def told_rows(self: MappedTensor) -> np.ndarray:
        made.append(self.name)
        return rows(self)

    monkeypatch.setattr(MappedTensor, "rows", told_rows)
    with open_model(tmp_path / "q") as model:
        assert sum(tensor.n_bytes for tensor in model.tensors.values()) > 0
        assert not made
        first = model.tensors["blk.0.attn_q.weight"].data
        assert len(made) == 7
        assert model.tensors["blk.0.attn_q.weight"].data is first
        assert len(made) == 7
    told: list[tuple[str, int, int]] = []
    with open_model(tmp_path / "q", lambda *said: told.append(said)):
        assert told == [("unpack", i + 1, 7) for i in range(7)]


def test_more_than_memory_holds(
    plain: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told before anything is unpacked, and what to do instead."""
    quantise(plain("llama"), tmp_path / "q", WRITTEN["gptq"], tmp_path / "f32")
    bound = MemoryBound(1 << 10, 1 << 20, "the machine's free memory", "stop other programs")
    monkeypatch.setattr("treadle.convert.hf.in_memory.usable_memory", lambda: bound)
    with (
        open_model(tmp_path / "q") as model,
        pytest.raises(FileError, match=r"leaves 1\.0 KiB.*treadle convert"),
    ):
        model.tensors["blk.0.attn_q.weight"].dequantize()


# -- bad input --------------------------------------------------------------------------------


def spoil(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    tensors = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")


Q = "model.layers.0.self_attn.q_proj."
BROKEN: list[tuple[str, str, Callable[[dict[str, Any]], Any], str]] = [
    ("fp8-blocks", "scale gone", lambda t: t.pop(Q + "weight_scale_inv"), "weight_scale"),
    (
        "fp8-blocks",
        "scale of another shape",
        lambda t: t.update({Q + "weight_scale_inv": t[Q + "weight_scale_inv"][:2]}),
        "weight_scale_inv",
    ),
    (
        "fp8-blocks",
        "scale in F64",
        lambda t: t.update({Q + "weight_scale_inv": t[Q + "weight_scale_inv"].double()}),
        "F32, F16, BF16",
    ),
    ("gptq", "zeros gone", lambda t: t.pop(Q + "qzeros"), "qzeros"),
    ("gptq", "groups cut", lambda t: t.update({Q + "g_idx": t[Q + "g_idx"][:96]}), "qweight"),
    ("gptq", "group beyond", lambda t: t.update({Q + "g_idx": t[Q + "g_idx"] + 1}), "g_idx"),
    ("gptq", "scales cut", lambda t: t.update({Q + "scales": t[Q + "scales"][:, :8]}), "scales"),
    (
        "gptq",
        "scales beyond f16",
        lambda t: t.update({Q + "scales": t[Q + "scales"].float() * 1e9}),
        "not finite in f16",
    ),
    ("awq", "scales gone", lambda t: t.pop(Q + "scales"), "scales"),
    ("awq", "zeros cut", lambda t: t.update({Q + "qzeros": t[Q + "qzeros"][:, :1]}), "qzeros"),
    ("ct-w4", "scale gone", lambda t: t.pop(Q + "weight_scale"), "weight_scale"),
    (
        "ct-w4",
        "shape of other bits",
        lambda t: t[Q + "weight_shape"].__imul__(t[Q + "weight_shape"].new_tensor([1, 2])),
        "weights per row of 4 bits",
    ),
    ("ct-nvfp4", "number gone", lambda t: t.pop(Q + "weight_global_scale"), "global_scale"),
    (
        "ct-nvfp4",
        "scale cut",
        lambda t: t.update({Q + "weight_scale": t[Q + "weight_scale"][:, :2]}),
        "one scale per 16",
    ),
    ("nf4", "absmax gone", lambda t: t.pop(Q + "weight.absmax"), "absmax"),
    ("nf4", "weight gone", lambda t: t.pop(Q + "weight"), "quant_state"),
    (
        "nf4",
        "state is not JSON",
        lambda t: t[Q + "weight.quant_state.bitsandbytes__nf4"].fill_(65),
        "not JSON",
    ),
    (
        "bnb-int8",
        "scales of another shape",
        lambda t: t.update({Q + "SCB": t[Q + "SCB"][:3]}),
        "SCB",
    ),
]


@pytest.mark.parametrize(("method", "what", "change", "where"), BROKEN, ids=[b[1] for b in BROKEN])
def test_damaged(
    method: str,
    what: str,
    change: Callable[[dict[str, Any]], Any],
    where: str,
    plain: Plain,
    tmp_path: Path,
) -> None:
    quantise(plain("llama"), tmp_path / "q", WRITTEN[method], tmp_path / "f32")
    spoil(tmp_path / "q", change)
    with pytest.raises((FileError, UnsupportedError)) as caught, open_hf(tmp_path / "q") as model:
        model.tensors["blk.0.attn_q.weight"].dequantize()
    assert where in str(caught.value), what


SETTINGS: list[tuple[str, dict[str, Any], str]] = [
    ("fp8-blocks", {"quant_method": "hqq"}, "hqq"),
    ("gptq", {"bits": "four"}, "quantization_config.bits"),
    ("gptq", {"checkpoint_format": "marlin"}, "marlin"),
    ("awq", {"version": "gemv"}, "gemv"),
    ("awq", {"bits": 8}, "bits"),
    ("auto-round", {"packing_format": "auto_round:fp8"}, "packing_format"),
    ("ct-w4", {"transform_config": {"config_groups": {"a": {}}}}, "transform_config"),
    ("ct-w4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
    ("ct-w4", {"config_groups": {}}, "of no bits"),
]


@pytest.mark.parametrize(("method", "changes", "where"), SETTINGS, ids=[s[2] for s in SETTINGS])
def test_settings(
    method: str, changes: dict[str, Any], where: str, plain: Plain, tmp_path: Path
) -> None:
    quantise(plain("llama"), tmp_path / "q", WRITTEN[method], tmp_path / "f32")
    path = tmp_path / "q/config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= changes
    path.write_text(json.dumps(config))
    with pytest.raises((FileError, UnsupportedError)) as caught:
        open_hf(tmp_path / "q").close()
    assert where in str(caught.value)


@pytest.mark.parametrize("method", ["gptq", "nf4"])
def test_gpt2s_matrices(method: str, tmp_path: Path) -> None:
    """They are [in, out], but packages that quantise them write a linear layer's [out, in]."""
    save(ALL_CASES["gpt2"], tmp_path / "q")
    config = json.loads((tmp_path / "q/config.json").read_text())
    config["quantization_config"] = WRITTEN[method].settings
    (tmp_path / "q/config.json").write_text(json.dumps(config))
    rows = np.random.default_rng(0).standard_normal((192, 64)).astype(np.float32)
    parts, stood = WRITTEN[method].parts(rows)

    def change(tensors: dict[str, Any]) -> None:
        at = next(n for n in tensors if n.endswith("h.0.attn.c_attn.weight")).removesuffix("weight")
        del tensors[at + "weight"]
        tensors.update({at + end: part for end, part in parts.items()})

    spoil(tmp_path / "q", change)
    with open_hf(tmp_path / "q") as ours:
        tensor = ours.tensors["blk.0.attn_qkv.weight"]
        assert tensor.type_name == WRITTEN[method].kind
        assert np.array_equal(tensor.dequantize(), stood)


def test_a_rule_that_moves_rows_moves_blocks(plain: Plain, tmp_path: Path) -> None:
    """And one that would take blocks apart, or put two kinds into one, has them multiplied out."""
    import torch
    from safetensors.torch import save_file

    rng = np.random.default_rng(0)
    truth = dict[str, np.ndarray]()
    tensors: dict[str, Any] = {}
    for name in ("a", "b"):
        parts, weights = WRITTEN["gptq"].parts(rng.standard_normal((64, 64)).astype(np.float32))
        at = f"model.layers.0.{name}."
        tensors |= {at + end: part for end, part in parts.items()}
        truth[name] = weights
    tensors["model.layers.0.c.weight"] = torch.from_numpy(truth["a"]).bfloat16()
    save_file(tensors, tmp_path / "model.safetensors")
    moved: dict[str, tuple[Any, ...]] = {
        "upper": (("a.weight",), upper, "Q4_0", truth["a"][:32]),
        "both": (("a.weight", "b.weight"), stacked, "Q4_0", np.stack([truth["a"], truth["b"]])),
        "transposed": (("b.weight",), transposed, "BF16", rounded(truth["b"], "bfloat16").T),
        "mixed": (
            ("a.weight", "c.weight"),
            stacked,
            "BF16",
            np.stack([rounded(truth["a"], "bfloat16")] * 2),
        ),
    }
    with open_safetensors(tmp_path / "model.safetensors") as file:
        found = unquantised(file.tensors, MetadataReader(WRITTEN["gptq"].settings, tmp_path))
        for name, (of, make, kind, expected) in moved.items():
            made = make_tensors(found, [DerivationRule(of, {name: make})])[f"model.layers.0.{name}"]
            assert (made.dtype, made.shape) == (kind, expected.shape)
            values = by_name(kind).dequantize_rows(made.data).reshape(made.shape)
            assert np.array_equal(values, expected), name


# -- numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "name"), [("F8_E4M3", "float8_e4m3fn"), ("F8_E5M2", "float8_e5m2")]
)
def test_every_float_of_eight_bits(dtype: str, name: str) -> None:
    """NaNs and infinities too, or a checkpoint that has some would be taken."""
    torch = pytest.importorskip("torch")
    codes = np.arange(256, dtype=np.uint8)
    truth = torch.from_numpy(codes).view(getattr(torch, name)).float().numpy()
    finite = np.isfinite(truth)
    assert finite.sum() in (254, 248)
    ours = float8_values(codes, dtype)
    assert np.array_equal(ours[finite].view(np.uint32), truth[finite].view(np.uint32))
    assert np.array_equal(ours, truth, equal_nan=True)


@pytest.mark.parametrize(
    ("method", "stem", "said"),
    [
        ("fp8-blocks", "weight", r"holds a weight that is not finite, in row \d+, column 2"),
        ("ct-nvfp4", "weight_scale", "has a non-finite scale in row 5"),
    ],
)
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_codes_of_no_number(
    code: int, method: str, stem: str, said: str, plain: Plain, tmp_path: Path
) -> None:
    """E4M3's NaN was read as 480: refused as in other types, by the tensor's name."""
    quantise(plain("llama"), tmp_path / "q", WRITTEN[method], tmp_path / "f32")

    def change(tensors: dict[str, Any]) -> None:
        torch = pytest.importorskip("torch")
        tensors[Q + stem].view(torch.uint8)[5, 2] = code

    spoil(tmp_path / "q", change)
    with pytest.raises(FileError, match=said) as caught:
        write_checked(open_hf_source(tmp_path / "q"), tmp_path / "q.gguf", Options())
    assert "q_proj" in str(caught.value) or "attn_q" in str(caught.value)
    with pytest.raises(FileError, match=said) as caught:
        open_model(tmp_path / "q", lambda *_: None)
    assert "q_proj" in str(caught.value)


@pytest.mark.parametrize("method", ["fp8-number", "ct-fp8-rows", "fp8-blocks"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scales_of_no_number(method: str, value: float, plain: Plain, tmp_path: Path) -> None:
    """Refused where the folder runs in place, too: by ``load``, before a token is read."""
    quantise(plain("llama"), tmp_path / "q", WRITTEN[method], tmp_path / "f32")

    def change(tensors: dict[str, Any]) -> None:
        (name,) = (n for n in tensors if n.startswith(f"{Q}weight_scale"))
        tensors[name].view(-1)[0] = value

    spoil(tmp_path / "q", change)
    with pytest.raises(FileError, match=r"q_proj.*not finite, in row 0, column 0"):
        open_model(tmp_path / "q", lambda *_: None)


def test_experts_of_no_number(plain: Plain, tmp_path: Path) -> None:
    """Which are put together of several matrices."""
    quantise(plain("qwen3moe"), tmp_path / "q", WRITTEN["fp8-blocks"], tmp_path / "f32")

    def change(tensors: dict[str, Any]) -> None:
        name = next(n for n in tensors if "experts.2.up_proj.weight_scale" in n)
        tensors[name].view(-1)[0] = np.nan

    spoil(tmp_path / "q", change)
    with pytest.raises(FileError, match=r"not finite, in row \d+, column 0"):
        open_model(tmp_path / "q", lambda *_: None)


def test_mxfp4s_scale_of_no_number() -> None:
    def error(what: str) -> FileError:
        return FileError(what, path="x")

    scale: Any = SimpleNamespace(dtype="F8_E8M0", error=error)
    make = _packed(scale, from_mxfp4)
    pairs = np.zeros((2, 16), np.uint8)
    scales = np.full((2, 1), 127, np.uint8)
    assert make(pairs, scales).size == 2 * 17
    scales[1] = 255
    with pytest.raises(FileError, match="non-finite scale in row 1"):
        make(pairs, scales)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_words_of_codes(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (3, 96))
    whole = [sum(int(code) << (bits * i) for i, code in enumerate(row)) for row in codes]
    words = np.stack([np.frombuffer(w.to_bytes(12 * bits, "little"), "<i4") for w in whole])
    assert np.array_equal(split_words(words, bits), codes)


def test_a_gguf_of_factors_is_read(plain: Plain, tmp_path: Path) -> None:
    """A converted NVFP4 checkpoint has the numbers that llama.cpp's converter writes."""
    quantise(plain("qwen3moe"), tmp_path / "q", WRITTEN["modelopt-nvfp4"], tmp_path / "f32")
    with open_gguf(convert(tmp_path / "q", tmp_path / "q.gguf")) as gguf:
        assert gguf.tensors["blk.0.attn_q.scale"].shape == (1,)
        assert gguf.tensors["blk.0.ffn_gate_exps.scale"].shape == (4,)
        assert gguf.tensors["blk.0.ffn_gate_exps.weight"].type_name == "NVFP4"
