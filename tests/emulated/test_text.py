"""Whole models on emulated rows, by a device whose kernels run in a guest: llama.cpp's text.

Here each row reads one file, and another than its neighbour in the list; with TREADLE_EMULATED=all
(``make emulated``) each row reads all of them. In ``test_models.py`` Python itself is emulated too.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from tests import reference
from tests.emulated.device import GuestCpu
from tests.emulated.rows import EMULATED
from tests.reference import kl_divergence
from tests.tiny import write_model
from treadle.cli import main
from treadle.devices.cpu.device import Cpu
from treadle.engine.batch import BatchItem
from treadle.engine.engine import Engine
from treadle.files.gguf import open_gguf
from treadle.isa import ROWS
from treadle.models.load import load_config

# Of these tokens each is the largest logit by 0.13 at least in F32, by 0.8 in the other files, and
# eight bits of activations cost up to 0.23.
N_TOKENS = 12
FILES = {
    "stories260K-F32": "stories260K.gguf",
    "babyllama105-F32": "babyllama105/babyllama105-F32.gguf",
    "babyllama105-F16": "babyllama105/babyllama105-F16.gguf",
    "babyllama105-Q8_0": "babyllama105/babyllama105-Q8_0.gguf",
    "babyllama105-Q4_0": "babyllama105/babyllama105-Q4_0.gguf",
    "babyllama105pad256-Q4_K_S": "babyllama105_pad256/Q4_K_S.gguf",
}
EVERY = os.environ.get("TREADLE_EMULATED") == "all"
SLOWLY = "rvv"  # rows that qemu runs at a tenth of the others' speed: vectors of any length
LARGE, SMALL = "babyllama105-F32", "stories260K-F32"


def files_of(i: int, row: str) -> list[str]:
    """The files that a row reads: one, in turns, and of the two in F32 the small one where qemu is
    slow; or all of them.
    """
    if EVERY:
        return list(FILES)
    name = list(FILES)[i % len(FILES)]
    return [SMALL if name == LARGE and row.startswith(SLOWLY) else name]


CASES = [(row, name) for i, row in enumerate(EMULATED) for name in files_of(i, row)]


def logits(row: str, path: Path, ids: list[int], theirs: list[int], threads: int) -> np.ndarray:
    """f32 ``[len(theirs), n_vocab]``: behind the prompt, and behind each of their tokens."""
    return logits_of(GuestCpu(EMULATED[row], threads), path, ids, theirs)


def logits_of(device: Cpu, path: Path, ids: list[int], theirs: list[int]) -> np.ndarray:
    """The same on any device."""
    with open_gguf(path) as gguf:
        engine = Engine(gguf, load_config(gguf), device, n_ctx=128, kv="f32", n_sequences=1)
        sequence = engine.cache.sequence()
        rows = []
        for part in (ids, *([token] for token in theirs[:-1])):
            rows.append(engine.run([BatchItem(sequence, part)])[0].copy())
        sequence.close()
        engine.close()
    return np.array(rows)


def known(data: Path, name: str) -> tuple[list[int], list[int]]:
    """The prompt's tokens and llama.cpp's."""
    file = "llamacpp_greedy_pad256.json" if "pad256" in name else "llamacpp_greedy.json"
    case = json.loads((data / "truth" / file).read_text())[name][0]
    return case["prompt_tokens"], case["tokens"][:N_TOKENS]


@pytest.mark.parametrize(("row", "name"), CASES)
def test_text_is_that_of_llamacpp(row: str, name: str, data: Path) -> None:
    """On one thread and on others the same bits: of the prompt and of one token, or of all. By
    default rows that qemu runs slowly write half the text.
    """
    path = data / "models" / FILES[name]
    (ids, theirs) = known(data, name)
    theirs = theirs if EVERY or not row.startswith(SLOWLY) else theirs[: N_TOKENS // 2]
    found = logits(row, path, ids, theirs, 1)
    assert found.argmax(-1).tolist() == theirs
    for threads, n in ((2, N_TOKENS), (3, N_TOKENS)) if EVERY else ((3, 2),):
        assert np.array_equal(logits(row, path, ids, theirs[:n], threads), found[:n])


@pytest.mark.parametrize("row", list(EMULATED) if EVERY else ["neon_dotprod", "rvv256_zvfh"])
@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0", "Q4_K"] if EVERY else ["Q4_K"])
def test_files_that_treadle_quantizes(row: str, kind: str, data: Path, tmp_path: Path) -> None:
    """From F32, by ``treadle quantize``: the text of F32, of llama.cpp."""
    source = data / "models/babyllama105_pad256/F32.gguf"
    made = tmp_path / "made.gguf"
    assert main(["quantize", str(source), str(made), kind]) == 0
    ids, theirs = known(data, "babyllama105pad256-F32")
    assert logits(row, made, ids, theirs, 2).argmax(-1).tolist() == theirs


@pytest.mark.parametrize("row", list(EMULATED) if EVERY else ["neon_i8mm"])
@pytest.mark.parametrize("arch", ["qwen3moe", "deepseek2"])
def test_rows_of_experts_and_heads_lie_as_products_read_them(
    arch: str, row: str, tmp_path: Path
) -> None:
    """A prompt of many tokens, sorted by expert: as near the truth as eight bits of activations are
    on this machine (0.0009 and 0.018), where all rounding is to eight bits. A row that lies
    elsewhere is off by whole units.
    """
    path = tmp_path / "made.gguf"
    write_model(path, arch, "Q8_0", n_expert=8, n_ff_exp=64)
    ids = np.random.default_rng(0).integers(1, 200, 50).tolist()
    with open_gguf(path) as gguf:
        truth = reference.forward(gguf, load_config(gguf), [*ids, 5])[-2:]
    here = logits_of(Cpu(ROWS["portable"], 1), path, ids, [5, 7])
    there = logits(row, path, ids, [5, 7], 2)
    assert kl_divergence(truth, there) < 2 * kl_divergence(truth, here)
