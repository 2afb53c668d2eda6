"""The tool that shows that logits stay the same: it must tell where they do not."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import WriteTiny
from tests.kernels.rows import ALL, MADE_UP
from treadle.files.gguf import open_gguf
from treadle.isa import ROWS

TOOLS = Path(__file__).resolve().parents[2] / "tools"
BEST = ALL[-1].name
NAMES = [f"tiny {BEST} f16 {threads}t: prompt 7" for threads in (2, 1)]


@pytest.fixture(scope="module")
def tool() -> Iterator[Any]:
    """tools/logits_digest.py as a module; what it changes of the process is put back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(TOOLS), *sys.path])
        patch.setenv("TREADLE_TUNE", "0")
        patch.setitem(ROWS, MADE_UP.name, MADE_UP)
        import logits_digest  # type: ignore[import-not-found]

        yield logits_digest


@pytest.fixture
def model(tiny: WriteTiny, tmp_path: Path) -> Path:
    """The file of the only model in the folder of shared data."""
    path = tmp_path / "data" / "models" / "tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(tiny("llama", "F32", n_layer=1).read_bytes())
    return path


def run(tool: Any, model: Path, out: str, *args: str) -> int:
    data = model.parent.parent
    home = model.parents[2]
    only = [word for name in NAMES for word in ("--only", name)]
    command = ["--data", str(data), "--out", str(home / out), "--jobs", "1", *only, *args]
    status: int = tool.main(command)
    return status


def test_an_unchanged_model_has_the_same_digests(tool: Any, model: Path) -> None:
    home = model.parents[2]
    assert run(tool, model, "old.json") == 0
    assert run(tool, model, "new.json", "--compare", str(home / "old.json")) == 0
    old, new = (json.loads((home / name).read_text()) for name in ("old.json", "new.json"))
    assert list(old["cases"]) == NAMES
    assert old["cases"] == new["cases"]
    digest, largest, samples = old["cases"][NAMES[0]]
    assert len(bytes.fromhex(digest)) == 8
    assert 0 < max(map(abs, samples)) <= largest


def test_the_lowest_bit_of_one_weight_is_told(
    tool: Any, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = model.parents[2]
    assert run(tool, model, "old.json") == 0
    with open_gguf(model) as gguf:
        weights = gguf.tensors["output_norm.weight"].data.tobytes()
    changed = bytearray(model.read_bytes())
    changed[changed.index(weights)] ^= 1
    model.write_bytes(changed)
    capsys.readouterr()
    assert run(tool, model, "new.json", "--compare", str(home / "old.json")) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[:3] for line in lines if "differs" in line] == [
        ["differs", *name.split(": ")] for name in NAMES
    ]
    assert "apart in 8 samples" in lines[1]
    assert lines[-1] == "2 cases, 2 complaints"


def test_a_case_that_is_no_more_and_one_that_threads_change_are_told(tool: Any) -> None:
    here = ("aa", 1.0, [1.0])
    there = ("bb", 1.0, [0.5])
    assert tool.changed({}, {"m: a": here, "m: b": here}, {"m: a"}) == ["is gone: m: a"]
    assert tool.changed({"m: a": here}, {}, {"m: a"}) == []
    cases = {"m r f16 1t: a": here, "m r f16 2t: a": there, "m r f16 2t: b": here}
    assert [line.split(": ")[:3] for line in tool.by_threads(cases)] == [
        ["depends on threads", "m r f16 2t", "a"]
    ]
    assert tool.by_threads({**cases, "m r f16 2t: a": here}) == []
