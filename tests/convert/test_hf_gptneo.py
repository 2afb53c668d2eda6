"""GPT-Neo: folders in place and converted, against transformers, also behind the window."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.test_hf import convert, prompt, worst
from tests.convert.test_hf_encoders import save
from tests.models.hf_cases import Case
from tests.models.hf_tiny import compute_logits
from tests.reference import forward
from tests.tiny import rounding
from treadle.convert.hf.folder import open_hf
from treadle.convert.llamacpp_differences import reading_differences
from treadle.errors import FileError
from treadle.files.gguf import open_gguf
from treadle.models.load import load_config

OPTIONS: dict[str, Any] = {
    "num_layers": 3,
    "num_heads": 4,
    "intermediate_size": 160,
    "num_key_value_heads": 4,  # else those of all tests
    "attention_types": [[["global", "local"], 1], [["local"], 1]],
    "window_size": 9,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CASE = Case("GPTNeo", "gptneo", OPTIONS)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[int], np.ndarray]:
    """A folder, what is converted of it, and its logits in float64."""
    folder = tmp_path_factory.mktemp("gptneo")
    model = save(CASE, folder / "hf")
    ids = prompt()
    return (
        folder / "hf",
        convert(folder / "hf", folder / "made.gguf"),
        ids,
        compute_logits(model, ids),
    )


def test_agrees_with_transformers(made: Any) -> None:
    """In one go, in pieces, one by one, and with the bits of any number of threads."""
    folder, file, ids, expected = made
    assert len(ids) > 4 * OPTIONS["window_size"]
    bits = []
    for path in (folder, file):
        for threads in (1, 2):
            with treadle.load(path, threads=threads, kv="f32") as model:
                assert model.config.ignored == ()
                assert [layer.window for layer in model.config.layers] == [0, 9, 9]
                bound = rounding(model.config)
                bits.append(model.logits(ids))
                assert worst(bits[-1], expected) <= bound
                for n in (1, 3, 64):
                    with model.session() as session:
                        rows = [session.logits(ids[i : i + n]) for i in range(0, len(ids), n)]
                    assert worst(np.concatenate(rows), expected) <= bound
    assert all(np.array_equal(each, bits[0]) for each in bits)


def test_the_reference(made: Any) -> None:
    _, file, ids, expected = made
    with open_gguf(file) as gguf:
        assert np.abs(forward(gguf, load_config(gguf), ids) - expected).max() < 1e-5
        assert gguf.metadata["gptneo.attention.scale"] == 1.0
        notes = reading_differences(gguf.metadata, gguf.tensors)
        assert any("llama.cpp has no architecture gptneo" in note for note in notes)


@pytest.mark.parametrize(
    ("types", "why"),
    [
        ([[["global", "local"], 1]], "global or local for each of 3 layers"),
        ([[["global", "far", "local"], 1]], "global or local for each of 3 layers"),
        ([["global", 3]], "pairs of a list of words"),
        ([[["global"], 10**9]], "pairs of a list of words"),
    ],
)
def test_kinds_of_layers(types: Any, why: str, made: Any, tmp_path: Path) -> None:
    config = json.loads((made[0] / "config.json").read_text()) | {"attention_types": types}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(made[0] / "model.safetensors")
    with pytest.raises(FileError, match=f"attention_types.*{why}"):
        open_hf(tmp_path)
