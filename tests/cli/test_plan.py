from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.cli.fake import FakeEngine, FakeModel, FakeStep
from treadle.cli import profile
from treadle.cli.commands import plan
from treadle.cli.profile import Profile, kinds_of, profile_of, summary_of
from treadle.cli.speed import PassCost, kind_of, part_of
from treadle.cli.ui.progress import ProgressBar

PEAKS = {"bandwidth": 1e9, "int8": 1e12, "bf16": 1e12, "f32": 1e11}


@pytest.fixture(autouse=True)
def peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of PEAKS, on which every whole run takes 6 us."""
    monkeypatch.setattr(plan, "measured_peaks", lambda model, progress: PEAKS)
    ticks = (6e-6 * n for i in range(1000) for n in (i, i + 1))
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))


def test_the_table(run: Run, model: FakeModel, gguf: str) -> None:
    ran = run("plan", gguf)
    assert (ran.code, ran.err) == (0, "")
    lines = [line.split() for line in ran.out.splitlines()]
    assert lines[0] == ["label", "kernel", "shape", "bytes", "operations"]
    assert lines[2] == ["L0.attn.qkv", "gemv_Q8_0_q8_k8", "24×8", "216", "B", "384"]
    assert lines[6] == ["5", "steps", "682", "B", "788"]


def test_tables_fit_a_terminal(
    run: Run, model: FakeModel, gguf: str, terminal: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels' names fold; a profile leaves out what the plan shows without it."""
    name = "rope_norm_f16_n_head32_n_head_kv8_head_dim128_rope_dims128_scale0.088388346"
    rows = [FakeStep("L31.ffn.gate_up_silu", name, (151936, 4096), 10**9, 10**12)]
    monkeypatch.setattr(FakeModel, "plan", lambda self, n=1, n_outputs=1: rows)
    for options in ([], ["--profile"]):
        out = run("plan", gguf, *options).out
        assert max(map(len, out.splitlines())) <= terminal
        assert "(shape" in out or "(kernel" in out or "151936×4096" in out
        assert "1.0 T" in out or "op/s" in out


def test_a_profile_against_caches_says_so(
    run: Run, model: FakeModel, gguf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks = {"caches" if name == "bandwidth" else name: rate for name, rate in PEAKS.items()}
    monkeypatch.setattr(plan, "measured_peaks", lambda model, progress: peaks)
    lines = run("plan", gguf, "--profile").out.splitlines()
    (matmul,) = (line.split() for line in lines if line.startswith("matmul"))
    assert matmul[-2:] == ["22%", "caches"]
    assert lines[-1].startswith("caches: too little free memory")


def test_match(run: Run, model: FakeModel, gguf: str) -> None:
    rows = json.loads(run("plan", gguf, "--match", "L5.f*", "--json").out)
    assert [row["label"] for row in rows] == ["L5.ffn.gate"]
    ran = run("plan", gguf, "--match", "L9.*", "--profile")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == "treadle: error: no step's label matches 'L9.*'\n"


def test_tokens_and_depth(run: Run, model: FakeModel, gguf: str) -> None:
    rows = json.loads(run("plan", gguf, "--tokens", "4", "--depth", "10", "--json").out)
    assert rows[0]["shape"] == [4, 8]
    assert rows[1]["n_flops"] == 4 * 384
    assert (rows[2]["n_bytes"], rows[2]["n_flops"]) == (2 * 44, 4 * 44)  # what the fake one reads
    assert rows[4]["n_flops"] == 144  # the logits of one token


def test_profile(run: Run, model: FakeModel, gguf: str) -> None:
    found = json.loads(run("plan", gguf, "--profile", "--match", "L*", "--json").out)
    row = found["steps"][0]
    assert row["label"] == "L0.attn.qkv"
    assert row["seconds"] == pytest.approx(1e-6)
    assert row["bytes_s"] == pytest.approx(216e6)
    assert row["ops_s"] == pytest.approx(384e6)
    assert (row["share_of_peak"], row["peak"]) == (pytest.approx(0.216), "bandwidth")
    assert row["share_of_time"] == pytest.approx(0.2)  # of all five steps, not of those shown
    assert found["sum_s"] == pytest.approx(5e-6)
    assert found["whole_s"] == pytest.approx(6e-6)
    assert found["ratio"] == pytest.approx(5 / 6)
    assert found["peaks"] == PEAKS
    kinds = {row["kind"]: row["n_steps"] for row in found["kinds"]}
    assert kinds == {"matmul": 3, "embed": 1, "attention": 1}
    assert sum(row["share_of_time"] for row in found["kinds"]) == pytest.approx(1)


def test_a_profiles_text(run: Run, model: FakeModel, gguf: str) -> None:
    lines = run("plan", gguf, "--profile").out.splitlines()
    rows = [line.split() for line in lines]
    assert ["5", "steps", "682", "B", "788", "5.0", "100.0%"] in rows
    (matmul,) = (row for row in rows if row[:1] == ["matmul"])
    assert matmul[:7] == ["matmul", "3", "648", "B", "784", "3.0", "60.0%"]
    assert matmul[-2:] == ["22%", "bandwidth"]  # 648 bytes at 1 GB/s, in 3 us
    assert lines[-2] == "sum of the steps 5.0 µs, one whole run 6.0 µs, ratio 0.833"
    assert lines[-1].startswith("the other 1.0 µs are spent in Python")


@pytest.mark.parametrize(
    ("whole_s", "said"),
    [(5.1e-6, "ratio 0.980"), (4.95e-6, "ratio 1.010"), (4e-6, "other programs interfered")],
)
def test_what_is_said_of_the_sum(
    capsys: pytest.CaptureFixture[str], whole_s: float, said: str
) -> None:
    plan.print_kinds([], Profile({"a": 2e-6, "b": 3e-6}, whole_s))
    assert said in capsys.readouterr().out.splitlines()[-1]


def test_what_a_profile_runs(model: FakeModel) -> None:
    found = profile_of(model, 3, 10, ProgressBar())
    assert model.calls[0] == ("feed", 10, 10)
    runs = [call[1] for call in model.calls if call[0] == "run"]
    assert runs == [[(3, 13)]] * 2 * (profile.RUNS + 1)  # always behind the same ten
    assert [call for call in model.calls if call[0] == "truncate"] == [("truncate", 10)] * len(runs)
    assert found.seconds["L5.ffn.gate"] == pytest.approx(3e-6)


def test_a_profile_is_the_mean_of_the_quicker_half() -> None:
    """Of whole runs: the sum of the steps is the mean of those runs' sums."""
    runs = [
        {"a": a, "b": b} for a, b in ((1.0, 9.0), (1.0, 2.0), (3.0, 2.0), (2.0, 2.0), (8.0, 1.0))
    ]
    found = summary_of(runs, [7.0, 4.0, 99.0, 5.0, 6.0])
    assert found.seconds == {"a": 2.0, "b": 2.0}
    assert (found.sum_s, found.whole_s, found.ratio) == (4.0, 5.0, 0.8)


def test_the_first_runs_do_not_count(model: FakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([99.0] + [1.0] * profile.RUNS)

    def run_timed(self: FakeEngine, parts: Any) -> list[tuple[str, float]]:
        return [("L0.attn", next(seconds))]

    monkeypatch.setattr(FakeEngine, "run_timed", run_timed)
    assert profile_of(model, 1, 0, ProgressBar()).seconds == {"L0.attn": 1.0}


def test_kinds_add_up_what_their_steps_did() -> None:
    steps = [
        FakeStep("L0.a", "gemm_Q8_0_q8_k8", (), 1000, 500),
        FakeStep("L0.n", "norm_q8_k8", (), 0, 0),
        FakeStep("L1.a", "gemv_F32_f32_k8", (), 3000, 10**6),
        FakeStep("L1.m", "merge_n_groups2", (), 0, 0),
        FakeStep("L1.t", "attention_bf16_n_head2", (), 0, 0, key_bytes=100, key_flops=1000),
    ]
    seconds = {"L0.a": 2e-5, "L0.n": 1e-5, "L1.a": 4e-5, "L1.m": 1e-5, "L1.t": 2e-5}
    rows = kinds_of(steps, Profile(seconds, 1e-4), [(9, 1)], PEAKS)
    assert [row["kind"] for row in rows] == ["matmul", "attention", "norm"]  # the longest first
    matmul, attention, norm = rows
    assert (matmul["n_steps"], matmul["n_bytes"], matmul["n_flops"]) == (2, 4000, 1_000_500)
    assert matmul["share_of_time"] == pytest.approx(0.6)
    # 1000 bytes at 1 GB/s; a million operations in f32, at 1e11, which beat their 3000 bytes.
    assert matmul["share_of_peak"] == pytest.approx((1e-6 + 1e-5) / 6e-5)
    assert matmul["peak"] == "f32"
    assert (attention["n_bytes"], attention["n_flops"]) == (1000, 10_000)
    assert attention["share_of_peak"] == pytest.approx(1e-6 / 3e-5)
    assert attention["peak"] == "bandwidth"
    assert (norm["share_of_peak"], norm["peak"]) == (0, None)


@pytest.mark.parametrize(
    ("kernel", "kind", "part"),
    [
        ("gemv_Q8_0_q8_k8", "int8", "matmul"),
        ("gemm_BF16_bf16_mr2", "bf16", "matmul"),
        ("gemv_F32_f32", "f32", "matmul"),
        ("norm_q8_k8", "f32", "norm"),
        ("attention_q8_0_n_head2", "f32", "attention"),
        ("merge_n_groups2", "f32", "attention"),
        ("rope_norm_bf16", "f32", "rope"),
        ("simt_gemv_Q8_0_bf16_k8", "bf16", "matmul"),
        ("simt_tile_attention_f16", "f32", "attention"),
    ],
)
def test_what_is_in_a_kernels_name(kernel: str, kind: str, part: str) -> None:
    assert kind_of(kernel, PEAKS) == kind
    assert part_of(kernel) == part


def test_a_machine_without_dots_of_bf16_widens_to_f32() -> None:
    assert kind_of("gemm_BF16_bf16", {"bandwidth": 1.0, "int8": 1.0, "f32": 1.0}) == "f32"


def test_shares_name_each_peak_in_use() -> None:
    steps = [FakeStep("a", "gemm_Q8_0_q8", (), 1000, 10**7), FakeStep("b", "norm", (), 0, 0)]
    work = PassCost.of(steps, [([(0, 1)], 1), ([(1, 1)], 1)], PEAKS)
    assert work.shares(1e-4) == pytest.approx({"bandwidth": 0.02, "int8": 0.2})
    assert work.bound == "int8"  # 10 us of dots, 1 us of reading, twice
    assert work.share_of_peak(1e-4) == pytest.approx(0.2)


def test_values_that_are_several_bf16_cost_as_many_products() -> None:
    peaks = {**PEAKS, "bf16": 1e12}
    steps = [FakeStep("a", f"gemm_{of}_k64_matrix", (), 0, 10**7) for of in SEVERAL]
    work = PassCost.of(steps, [([(0, 1)], 1)], peaks)
    assert work.ops == 3 * 10**7
    assert work.share_of_peak(1e-3) == pytest.approx((1 + 3 + 6) * 1e-5 / 1e-3)
    assert work.shares(1e-3) == pytest.approx({"bf16": 10 * 1e7 / 1e-3 / 1e12})


SEVERAL = ("BF16_bf16", "F16_bf16x2", "F32_bf16x3")


def test_the_packaged_model(run: Run) -> None:
    """The real engine: every step has a time, and attention at depth reads keys and values."""
    from treadle.api.options import packaged_model

    found = json.loads(run("plan", str(packaged_model()), "--profile", "-d", "70", "--json").out)
    assert all(row["seconds"] > 0 for row in found["steps"])
    assert {row["kind"] for row in found["kinds"]} == {
        "matmul",
        "attention",
        "norm",
        "rope",
        "pack",
        "embed",
        "top",
    }
    assert found["sum_s"] == pytest.approx(sum(row["seconds"] for row in found["steps"]))
    assert found["ratio"] == pytest.approx(found["sum_s"] / found["whole_s"])
    attention = [row for row in found["steps"] if row["kernel"].startswith("attention_f16")]
    # f16 keys and values of 2 heads of 64 dims, of 71 tokens; two operations for each and head.
    assert {row["n_bytes"] for row in attention} == {71 * 2 * 2 * 64 * 2}
    assert {row["n_flops"] for row in attention} == {71 * 2 * 4 * 64 * 2}


def test_more_tokens_than_one_run_takes_are_wrong_usage(
    run: Run, model: FakeModel, gguf: str
) -> None:
    most = model.engine.max_tokens
    ran = run("plan", gguf, "-p", str(most + 1))
    assert (ran.code, ran.out) == (2, "")
    assert f"-p {most + 1}" in ran.err
    assert str(most) in ran.err
    assert run("plan", gguf, "-p", str(most)).code == 0
