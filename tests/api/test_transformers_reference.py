"""What transformers computes, by the labels of treadle's steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import treadle
from tests.convert.test_hf_encoders import save
from tests.convert.test_hf_families import SHARED
from tests.models.hf_cases import ALL_CASES
from tests.models.hf_tiny import require_transformers
from treadle.api.step_diff import LOGITS, START
from treadle.api.transformers_reference import compare_with, load_transformers
from treadle.cli import main
from treadle.errors import TreadleError, UnsupportedError

# Norms after products, two bases, scaled residuals, fused products, parallel sums, positions.
CASES = ("gemma3", "granite", "phi3", "glm4", "cohere2", "gpt2", "mixtral", "gpt-oss")


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("name", CASES)
def test_agrees(name: str, tmp_path: Path) -> None:
    from tests.convert.test_hf_mixtures import CASES as MIXTURES
    from tests.convert.test_hf_mixtures import own

    cases = ALL_CASES | SHARED
    folder = tmp_path / "hf"
    save(cases[name] if name in cases else own(MIXTURES[name]), folder)
    ids = list(range(3, 43))
    with treadle.load(folder, threads=1, kv="f32", context=64) as model:
        found = compare_with(model, load_transformers(folder), folder, ids)
    assert found.first is None
    keys = {step.key for step in found.steps}
    assert {LOGITS, "L0", "L1", "L2"} <= keys
    assert len(keys) > 18
    assert START not in keys


def test_folders_that_cannot_be_a_reference(tmp_path: Path) -> None:
    require_transformers()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nothing"}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(TreadleError, match="transformers cannot load it: "):
        load_transformers(tmp_path)
    with pytest.raises(TreadleError, match="is no Hugging Face folder"):
        load_transformers(tmp_path / "model.gguf")


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(ALL_CASES["llama"], tmp_path / "hf")
    path = str(tmp_path / "hf")
    assert main(["diff", path, path, "--reference", "transformers", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["first"] is None
    assert report["by"] == "transformers"
    assert {"L0.attn.rope", "L2.ffn.silu"} <= {step["key"] for step in report["steps"]}


@pytest.mark.slow
def test_another_number_of_layers(tmp_path: Path) -> None:
    from dataclasses import replace

    case = ALL_CASES["llama"]
    deep = replace(case, options={**case.options, "num_hidden_layers": 4})
    save(case, tmp_path / "hf")
    save(deep, tmp_path / "deep")
    network = load_transformers(tmp_path / "deep")
    with (
        treadle.load(tmp_path / "hf", threads=1) as model,
        pytest.raises(UnsupportedError, match=r"different numbers of layers: .* has 3, .* 4"),
    ):
        compare_with(model, network, tmp_path / "deep", [3, 4, 5])
