"""The tool for new architectures: known ones that agree with transformers, and rows of the table
with one fault each, whose label it must name.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.models.hf_tiny import require_transformers
from treadle.models.archs import ARCHS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    require_transformers()
    import torch
    import transformers

    assert torch.__version__
    assert transformers.__version__
    path = ROOT / "tools" / "new_architecture.py"
    spec = importlib.util.spec_from_file_location("new_architecture", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


Make = Callable[..., tuple[Any, Path]]


@pytest.fixture(scope="module")
def make(tool: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A model of a type, and the file that treadle converted it to, beside the folder ``hf``."""
    made: dict[str, tuple[Any, Path]] = {}

    def build(kind: str) -> tuple[Any, Path]:
        if kind not in made:
            network = tool.build(kind, tool.scaled_config(kind, {}))
            folder = tmp_path_factory.mktemp(kind) / "hf"
            tool.save(network, folder)
            assert tool.convert_by_treadle(folder, folder.parent / "made.gguf") == ""
            made[kind] = network, folder.parent / "made.gguf"
        return made[kind]

    return build


def first(tool: ModuleType, made: tuple[Any, Path]) -> str | None:
    """The label of the first difference between a converted model and transformers."""
    network, path = made
    report = tool.compare(path, network, path.with_name("hf"), None)
    assert "error" not in report, report
    assert report["same_top"] is not None
    found: dict[str, Any] | None = report["first"]
    return None if found is None else found["label"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "qwen3_next", "lfm2"])
@pytest.mark.every_case
def test_known_architectures(kind: str, tool: ModuleType, make: Make) -> None:
    assert first(tool, make(kind)) is None


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize(
    ("kind", "arch", "fault", "label"),
    [
        ("qwen3_moe", "qwen3moe", {"rope": "norm"}, "L0.attn.rope"),
        ("qwen3_moe", "qwen3moe", {"norm_last": True}, "L0.attn.rope"),
        ("llama", "llama", {"activation": "gelu"}, "L0.ffn.gelu"),
        ("llama", "llama", {"embd_scale": True}, "token_embd"),
        ("qwen3_next", "qwen3next", {"rope": "norm"}, "L3.attn.rope"),
    ],
)
def test_the_label_of_a_broken_row(
    kind: str,
    arch: str,
    fault: dict[str, Any],
    label: str,
    tool: ModuleType,
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ARCHS, arch, replace(ARCHS[arch], **fault))
    assert first(tool, make(kind)) == label


def test_names(tool: ModuleType) -> None:
    assert tool.find_type("qwen3moe") == "qwen3_moe"
    assert tool.find_type("Llama") == "llama"
    with pytest.raises(tool.NewArchitectureError, match="no causal model of the type 'lama'; near"):
        tool.find_type("lama")


def test_layers_of_each_kind(tool: ModuleType) -> None:
    kinds = ["a"] * 3 + ["b"] + ["a"] * 4
    assert tool.layers_of({"num_hidden_layers": 8, "layer_types": kinds}) == (
        4,
        {"layer_types": kinds[:4]},
    )
    late = ["a"] * 20 + ["b"]
    n, lists = tool.layers_of({"num_hidden_layers": 21, "layer_types": late})
    assert (n, lists) == (2, {"layer_types": ["a", "b"]})
    assert tool.layers_of({"num_hidden_layers": 2}) == (2, {})


def test_changes_of_the_configuration(tool: ModuleType) -> None:
    assert tool.parsed("norm_topk_prob=true") == ("norm_topk_prob", True)
    assert tool.parsed("hidden_act=gelu") == ("hidden_act", "gelu")
    config = tool.scaled_config("qwen3_moe", {"norm_topk_prob": True, "num_experts": 4})
    assert (config.num_experts, config.norm_topk_prob, config.hidden_size) == (4, True, 64)
    with pytest.raises(tool.NewArchitectureError, match="change"):
        tool.build("llama", tool.scaled_config("llama", {"num_attention_heads": 0}))


def test_a_converter_that_is_not_there(tool: ModuleType, tmp_path: Path) -> None:
    assert tool.llamacpp_folder(None, tmp_path) is None
    with pytest.raises(tool.NewArchitectureError, match="has no folders conversion and gguf-py"):
        tool.llamacpp_folder(str(tmp_path), tmp_path)


def test_a_converter_that_lacks_it(tool: ModuleType, tmp_path: Path) -> None:
    """Stand-ins for the modules of llama.cpp's converter."""
    (tmp_path / "gguf-py" / "gguf").mkdir(parents=True)
    (tmp_path / "gguf-py" / "gguf" / "__init__.py").write_text("")
    (tmp_path / "conversion").mkdir()
    (tmp_path / "conversion" / "__init__.py").write_text(
        "class ModelType: TEXT = 0\n"
        "class ModelBase:\n"
        "    load_hparams = staticmethod(lambda folder, mistral: {})\n"
        "def get_model_architecture(hparams, kind): return 'SomeForCausalLM'\n"
        "def get_model_class(arch): raise NotImplementedError\n"
    )
    root = tool.llamacpp_folder(str(tmp_path), tmp_path)
    said = tool.convert_by_llamacpp(root, tmp_path, tmp_path / "x.gguf")
    assert said == "llama.cpp's converter has no SomeForCausalLM"
