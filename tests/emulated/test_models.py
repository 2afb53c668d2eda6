"""A whole model on an emulated CPU: Python, numpy, LLVM and the threads are that machine's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.emulated.foreign import run_python
from tests.media.media_cases import BY_NAME, opened, picture, prompt_of, truth_of

THREADS = (1, 2, 3)
SCRIPT = """
import json, sys
import treadle

greedy = treadle.Sampling(temperature=0)
case = json.load(open(sys.argv[1]))[0]
for threads in map(int, sys.argv[3:]):
    with treadle.load(sys.argv[2], threads=threads) as model:
        made = model.generate(case["prompt"], max_tokens=60, sampling=greedy)
        text = case["prompt"] + made.finish()
        print(model.isa.name, threads, case["text"].startswith(text) and len(text), flush=True)
"""
# The emulated CPU, and the row that it is to choose. SME is off: OpenBLAS's code for it gives wrong
# numbers under qemu.
CPUS = [
    ("aarch64", "cortex-a53", "neon"),
    ("aarch64", "cortex-a76", "neon_dotprod"),
    ("aarch64", "max,sme=off,pauth-impdef=on", "neon_bf16"),
    ("riscv64", "rv64,v=true,vlen=128", "rvv128"),
    ("riscv64", "rv64,v=true,vlen=256,zvfh=true", "rvv256_zvfh"),
    ("riscv64", "rv64,v=true,vlen=1024,zvfh=true", "rvv512_zvfh"),
]


@pytest.mark.parametrize(("machine", "cpu", "row"), CPUS, ids=[row for _, _, row in CPUS])
def test_known_text(machine: str, cpu: str, row: str, data: Path, tmp_path: Path) -> None:
    """The row is the one that was found, and the text that of llama2.c on any number of threads."""
    files = data / "truth/llama2c_stories260K_greedy.json", data / "models/stories260K.gguf"
    args = map(str, (*files, *THREADS))
    printed = run_python(machine, cpu, tmp_path / "cache", "-c", SCRIPT, *args)
    said = [line.split() for line in printed.splitlines()]
    assert [line[:2] for line in said] == [[row, str(n)] for n in THREADS]
    assert all(line[2].isdigit() and int(line[2]) > 100 for line in said), printed


PICTURES = """
import sys
import numpy as np
import treadle
from treadle.kvcache.media import MediaEntry
from treadle.media.prepared import PreparedMedia, TowerInput
from treadle.media.projector import open_projector

text, mmproj, given = sys.argv[1:]
given = np.load(given, allow_pickle=False)
with treadle.load(text, kv="f32", threads=2, context=256) as model:
    projector = open_projector(mmproj, model.engine.device, exact=True, lock=model.engine.lock)
    grid = tuple(int(n) for n in given["grid"])
    n_rows = int(given["n_rows"])
    positions = given["positions"] if "positions" in given else None
    spans = tuple((int(a), int(b)) for a, b in given["spans"])
    sizes = (1, 1), (1, 1)
    made = PreparedMedia(
        "image", (TowerInput(given["patches"], grid),), (range(n_rows),), n_rows, positions,
        int(given["advance"]), spans, *sizes, b"picture",
    )
    entry = MediaEntry(made.digest, n_rows, positions, made.advance, spans)
    entry = model.engine.media.enter(entry)
    entry.rows = projector.encode(made)
    ids = given["ids"].tolist()
    first = ids.index(-1)
    ids[first : first + n_rows] = entry.ids
    with model.session() as session:
        found = session.logits(ids)
    error = np.abs(found - given["logits"]).max() / np.abs(given["logits"]).max()
    print(model.isa.name, error)
"""
ONE_OF_EACH = [CPUS[2], CPUS[4]]


@pytest.mark.parametrize("name", ["qwen3vl", "gemma3"])
@pytest.mark.parametrize(
    ("machine", "cpu", "row"), ONE_OF_EACH, ids=[row for _, _, row in ONE_OF_EACH]
)
def test_pictures(machine: str, cpu: str, row: str, name: str, data: Path, tmp_path: Path) -> None:
    """A tower, its projector and a decoder with three streams of positions and rows behind layers,
    or with spans, give the truth's logits. The picture is prepared here: Pillow is not there.
    """
    case = BY_NAME[name]
    projector = opened(case, data, isa=None)
    made = projector.prepare(picture(), case.max_rows)
    ids, where = prompt_of(case, projector, [made], data)
    arrays: dict[str, Any] = {
        "patches": made.inputs[0].patches,
        "grid": np.array(made.inputs[0].grid),
        "n_rows": np.array(made.n_rows),
        "advance": np.array(made.advance),
        "spans": np.array(made.bidirectional, int).reshape(-1, 2),
        "ids": np.array([-1 if i in where else id for i, id in enumerate(ids)]),
        "logits": truth_of(case, data)["logits"],
    }
    if made.positions is not None:
        arrays["positions"] = made.positions
    np.savez(tmp_path / "given.npz", **arrays)
    folder = data / "media" / name
    files = folder / "text.gguf", folder / "mmproj.gguf", tmp_path / "given.npz"
    printed = run_python(machine, cpu, tmp_path / "cache", "-c", PICTURES, *map(str, files))
    found, error = printed.split()[-2:]
    assert found == row
    assert float(error) < 2e-5
