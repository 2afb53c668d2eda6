"""Folders of transformers' models without transformers: their config.json, and names and shapes of
their tensors, as it saves them; and what treadle makes of such a folder.

``tests/golden/hf_folders.json`` has both for a small model of many families. The values of tensors
follow from their names. Rows that are moved, joined or computed otherwise change a projection of
the tensor. That treadle computes what transformers does is shown by the other tests here; these
need no transformers, and take no time.

``python -m tests.convert.recorded`` writes the file anew: the folders of the cases that it names,
by transformers, and what treadle makes of them now.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from treadle.convert.hf.folder import open_hf_source
from treadle.files.safetensors import open_safetensors
from treadle.formats import FORMATS, by_name

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "hf_folders.json"
LOCAL = "transformers_version", "dtype", "torch_dtype"  # of config.json, without meaning here


def values_of(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Float32 of about 1, which differ for each name."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    rows = rng.uniform(0.1, 2, shape) * rng.choice([-1, 1], shape)
    return np.asarray(rows, np.float32)


def write_folder(folder: Path, about: Mapping[str, Any]) -> Path:
    """A folder with these tensors and config.json."""
    from safetensors.numpy import save_file

    folder.mkdir()
    made = {name: values_of(name, tuple(shape)) for name, shape in about["tensors"].items()}
    save_file(made, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(about["config"]))
    return folder


def projection(name: str, values: np.ndarray) -> float:
    """A number that a change of any value changes, or of two values' places; of about 1."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    along = rng.uniform(-1, 1, values.size)
    flat = values.astype(np.float64).reshape(-1)
    return float(along @ flat / np.sqrt(1 + (flat * flat).sum()))


def made_of(folder: Path) -> dict[str, Any]:
    """GGUF's keys, and each tensor's type, shape and projection."""
    source = open_hf_source(folder)
    try:
        tensors = {}
        for tensor in source.tensors.values():
            kind = FORMATS[tensor.ggml_type].name
            found = by_name(kind).dequantize_rows(np.frombuffer(bytes(tensor.read()), np.uint8))
            tensors[tensor.name] = [kind, list(tensor.shape), projection(tensor.name, found)]
        keys = json.loads(json.dumps(source.metadata, default=str))
    finally:
        source.close()
    return {"keys": keys, "tensors": tensors}


def record(reference: str) -> dict[str, Any]:
    """What transformers saves of a case: ``MODULE NAME [KEY]``, a case of the tests."""
    import torch

    from tests.models.hf_tiny import build

    module, name, *key = reference.split()
    where = import_module(module)
    case = getattr(where, name)[key[0]] if key else getattr(where, name)
    if hasattr(where, "own"):
        case = where.own(case)
    with TemporaryDirectory() as at:
        build(case).to(torch.float32).save_pretrained(at)
        config = json.loads(Path(at, "config.json").read_text())
        tensors = open_safetensors(Path(at, "model.safetensors")).tensors
        shapes = {name: list(tensor.shape) for name, tensor in sorted(tensors.items())}
    return {"config": {k: v for k, v in config.items() if k not in LOCAL}, "tensors": shapes}


def write_golden(recorded: Mapping[str, Any]) -> None:
    """The file, with what treadle makes of each folder."""
    lines = []
    for reference, about in recorded.items():
        with TemporaryDirectory() as at:
            made = made_of(write_folder(Path(at, "hf"), about))
        for each in made["tensors"].values():
            each[2] = round(each[2], 6)
        whole = {"config": about["config"], "tensors": about["tensors"], "made": made}
        parts = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in whole.items()]
        lines.append(f"{json.dumps(reference)}: {{\n" + ",\n".join(parts) + "\n}")
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    write_golden({each: record(each) for each in json.loads(GOLDEN.read_text())})
