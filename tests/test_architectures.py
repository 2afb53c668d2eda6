"""Every architecture against transformers, on every instruction set that this machine can run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import treadle
from tests.kernels.rows import ALL, DISTINCT
from tests.models.hf_cases import ALL_CASES, CASES
from tests.models.hf_tiny import write_tiny
from tests.reference import forward
from tests.tiny import rounding
from treadle.files.gguf import open_gguf
from treadle.isa.isa import Isa
from treadle.models.load import load_config

# Of a model whose context is longer than it was before it was stretched.
pytestmark = pytest.mark.filterwarnings("ignore:with a context over .* long rope factors")
BEST = ALL[-1]


@dataclass(frozen=True)
class Truth:
    path: Path
    ids: list[int]
    logits: np.ndarray  # float64 [n_tokens, n_vocab], by transformers


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Truth]:
    """Written when first asked for, and then kept: torch takes its time."""
    folder = tmp_path_factory.mktemp("hf")

    class Cases(dict[str, Truth]):
        def __missing__(self, case: str) -> Truth:
            ids, logits = write_tiny(case, folder / f"{case}.gguf")
            self[case] = Truth(folder / f"{case}.gguf", ids, logits)
            return self[case]

    return Cases()


def paths(model: treadle.Model, ids: list[int]) -> dict[str, np.ndarray]:
    """Logits of every token, [n_tokens, n_vocab], by each way to read a text."""
    found = {"prefill": model.logits(ids)}
    for chunk in (1, 5, 13):
        model.engine.cache.forget()
        session = model.session()
        rows = [session.logits(ids[at : at + chunk]) for at in range(0, len(ids), chunk)]
        found[f"chunks of {chunk}"] = np.concatenate(rows)
        session.close()
    return found


def check(rows: dict[str, np.ndarray], expected: np.ndarray, share: float) -> None:
    scale = np.abs(expected).max()
    for way, logits in rows.items():
        assert logits.dtype == np.float32
        error = np.abs(logits - expected)
        worst = tuple(int(i) for i in np.unravel_index(error.argmax(), error.shape))
        assert error[worst] <= share * scale, (way, worst, error[worst] / scale, share)


@pytest.mark.parametrize("case", ALL_CASES)
def test_agrees_with_transformers(case: str, truth: dict[str, Truth]) -> None:
    """In f32 throughout, by every path, on the best row of this machine."""
    t = truth[case]
    with treadle.load(t.path, threads=2, kv="f32", isa=BEST.name) as model:
        check(paths(model, t.ids), t.logits, rounding(model.config))


OTHERS = [row for row in DISTINCT if row is not BEST]


@pytest.mark.parametrize(
    ("case", "isa"),
    [
        pytest.param(case, OTHERS[i % len(OTHERS)], id=f"{case}-{OTHERS[i % len(OTHERS)].name}")
        for i, case in enumerate(CASES if OTHERS else ())
    ],
)
def test_other_instruction_sets_agree_too(isa: Isa, case: str, truth: dict[str, Truth]) -> None:
    """One row of each kind of vector, in turns over the cases: in f32 those with other dot products
    do the same, and each kernel is tested on each row by itself.
    """
    t = truth[case]
    with treadle.load(t.path, threads=2, kv="f32", isa=isa.name) as model:
        assert model.isa is isa
        check(paths(model, t.ids), t.logits, rounding(model.config))


@pytest.fixture(scope="module")
def exact(data: Path) -> Callable[[str], np.ndarray]:
    """Logits of a trained model in float64, by its format; computed once for all rows."""

    @cache
    def of(fmt: str) -> np.ndarray:
        ids = np.load(data / "truth" / f"logits_babyllama105-{fmt}.npz")["tokens"].tolist()
        path = data / "models" / "babyllama105" / f"babyllama105-{fmt}.gguf"
        with open_gguf(path) as gguf:
            return forward(gguf, load_config(gguf), ids)

    return of


# Rows with products of bf16 have BF16, the others Q4_1, whose products are of bytes. The first,
# whose bf16 are converted, and the best have both.
PRODUCTS = [
    (row, fmt)
    for i, row in enumerate(ALL)
    for fmt in ("BF16", "Q4_1")
    if row is BEST or ("bf16" in row.name) == (fmt == "BF16") or (not i and fmt == "BF16")
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("isa", "fmt"), [pytest.param(*each, id=f"{each[0].name}-{each[1]}") for each in PRODUCTS]
)
def test_dot_products_of_every_instruction_set(
    isa: Isa, fmt: str, data: Path, exact: Callable[[str], np.ndarray]
) -> None:
    """A trained model, for formats whose products differ from row to row.

    Activations of 8 bits (or of bf16's) move the logits; how far is known from llama.cpp, which
    rounds them just so: no more than 1.5 times as far.
    """
    folder = data / "models" / "babyllama105"
    saved = np.load(data / "truth" / f"logits_babyllama105-{fmt}.npz")
    ids = saved["tokens"].tolist()
    with treadle.load(folder / f"babyllama105-{fmt}.gguf", threads=2, kv="f32", isa=isa.name) as m:
        theirs = np.sqrt(np.mean((saved["logits"] - exact(fmt)) ** 2))
        for way, logits in paths(m, ids).items():
            ours = np.sqrt(np.mean((logits - exact(fmt)) ** 2))
            assert ours <= 1.5 * theirs, (way, ours, theirs)
