from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from tests.cli.conftest import Run
from tests.cli.fake import FakeModel
from treadle.cli import plan
from treadle.cli.progress import ProgressBar
from treadle.cli.speed import kind_of


@pytest.fixture(autouse=True)
def peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"bytes_s": 1e9, "q8": 1e12, "bf16": 1e12, "f32": 1e12}
    monkeypatch.setattr(plan, "measured_peaks", lambda model, progress: known)


def test_the_table(run: Run, model: FakeModel, gguf: str) -> None:
    ran = run("plan", gguf)
    assert (ran.code, ran.err) == (0, "")
    lines = [line.split() for line in ran.out.splitlines()]
    assert lines[0] == ["label", "kernel", "shape", "bytes", "operations"]
    assert lines[2] == ["L0.attn.qkv", "gemv_Q8_0_q8_k8", "24×8", "216", "B", "384"]
    assert lines[5] == ["4", "steps", "680", "B", "784"]


def test_match(run: Run, model: FakeModel, gguf: str) -> None:
    rows = json.loads(run("plan", gguf, "--match", "L5.*", "--json").out)
    assert [row["label"] for row in rows] == ["L5.ffn.gate"]
    ran = run("plan", gguf, "--match", "L9.*")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == "treadle: error: no step's label matches 'L9.*'\n"


def test_tokens(run: Run, model: FakeModel, gguf: str) -> None:
    rows = json.loads(run("plan", gguf, "-p", "4", "--json").out)
    assert rows[0]["shape"] == [4, 8]
    assert rows[1]["n_flops"] == 4 * 384
    assert rows[3]["n_flops"] == 144  # the logits of one token


def test_profile(run: Run, model: FakeModel, gguf: str) -> None:
    rows = json.loads(run("plan", gguf, "--profile", "--json").out)
    assert rows[1]["seconds"] == 1e-6
    assert rows[1]["bytes_s"] == pytest.approx(216e6)
    assert rows[1]["ops_s"] == pytest.approx(384e6)
    assert rows[1]["share_of_peak"] == pytest.approx(0.216)
    last = run("plan", gguf, "--profile").out.splitlines()[-1].split()
    assert last[-1] == "4.0"


def test_a_profile_is_the_median_of_its_runs_but_the_first() -> None:
    runs = iter([9.0, 5.0, 1.0, 3.0, 2.0, 4.0])
    model = SimpleNamespace(profile=lambda n_tokens: [("L0.attn", next(runs) * n_tokens)])
    assert plan.profile_of(model, 2, ProgressBar()) == {"L0.attn": 6.0}


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [("gemv_Q8_0_q8_k8", "q8"), ("gemm_BF16_bf16_mr2", "bf16"), ("gemv_F32_f32", "f32"),
     ("rmsnorm", "f32")],
)  # fmt: skip
def test_the_kind_is_in_the_kernels_name(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind
