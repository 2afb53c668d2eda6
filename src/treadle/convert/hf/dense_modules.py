"""sentence-transformers' Dense modules: matrices applied to the vector after pooling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from treadle.convert.hf.config import HfConfig
from treadle.convert.hf.pooling import check_in_and_out, read_modules
from treadle.convert.hf.tensors import GGML_TYPE, MappedTensor
from treadle.errors import UnsupportedError
from treadle.files.safetensors import SafeTensors, open_safetensors, read_json
from treadle.models.pooling_head import DENSE

_TANH = "torch.nn.modules.activation.Tanh"  # the default


def read_dense(
    folder: Path, hyper: HfConfig, weights: SafeTensors
) -> tuple[dict[str, MappedTensor], dict[str, Any]]:
    """Return the Dense matrices by GGUF name, and the GGUF keys of their sizes.

    The modules' safetensors files are added to ``weights``, which closes them. Raises FileError for
    damaged files, UnsupportedError for biases, residuals and activations.
    """
    named: dict[str, MappedTensor] = {}
    keys: dict[str, Any] = {}
    width = hyper.sizes["n_embd"]
    modules = [place for kind, place in read_modules(folder) if kind == "Dense"]
    for name, module in zip(DENSE, modules, strict=False):
        path = folder / module
        said = read_json(path / "config.json")
        check_in_and_out(said, path / "config.json")
        if said.get("use_residual"):
            what = "use_residual is true: residuals after pooling are not supported"
            raise UnsupportedError(f"{path}: {what}")
        activation = str(said.get("activation_function", _TANH))
        if not activation.endswith(".Identity"):
            what = f"activation_function {activation:.60}: only Identity is supported after pooling"
            raise UnsupportedError(f"{path}: {what}")
        found = open_safetensors(path)
        weights.join(found)
        tensor = found.tensors.get("linear.weight")
        if tensor is None or len(found.tensors) > 1 or tensor.dtype not in GGML_TYPE:
            has = ", ".join(f"{each.name} in {each.dtype}" for each in found.tensors.values())
            what = f"has {has:.120}: treadle supports only linear.weight, in floating point"
            raise UnsupportedError(f"{path}: {what}")
        if len(tensor.shape) != 2 or tensor.shape[1] != width:
            raise tensor.error(f"shape {list(tensor.shape)}", f"[any, {width}]")
        named[name] = MappedTensor(name, tensor, GGML_TYPE[tensor.dtype], tensor.shape)
        stem = f"{hyper.family.arch}.{name.removesuffix('.weight')}_feat"
        keys |= {f"{stem}_in": width, f"{stem}_out": tensor.shape[0]}
        width = tensor.shape[0]
    return named, keys
