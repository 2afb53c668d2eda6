"""``treadle tune``: real sweeps of a small shape; the table and the picture of made-up ones."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest

from tests.cli.conftest import Run
from tests.kernels import rows as kernel_rows
from treadle.cli import tune_results
from treadle.cli.commands import tune as cli
from treadle.cli.commands.tune import FormatName
from treadle.cli.tune_plot import draw
from treadle.cli.tune_results import TuneResult
from treadle.devices.cpu import tuned_rows
from treadle.devices.cpu.tuned_rows import tuned_row
from treadle.formats import by_name
from treadle.jit import cache
from treadle.kernels.matmul import select
from treadle.kernels.matmul.gemm import Gemm
from treadle.kernels.matmul.gemv import Gemv
from treadle.kernels.matmul.matmul import Matmul
from treadle.kernels.matmul.matrix import EDGE
from treadle.kernels.matmul.matrix_bytes import BytesGemm
from treadle.kernels.matmul.select import SHIPPED, TunedTable, matmul
from treadle.kernels.matmul.select_activation import prefers_q16
from treadle.kernels.matmul.strips import StripGemm
from treadle.kernels.run_state import GEMV_TOKENS
from treadle.machine import topology
from treadle.profiling import peaks, trial, tune
from treadle.profiling.report import row_in_use
from treadle.profiling.tune import Crossover, Sweep, Variant

PEAKS = {"bytes_s": 1e9, "q8": 4e9, "f32": 2e9}
SMALL = ("--k", "64", "--m", "64", "--n", "8", "-r", "2", "-t", "1")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel cache of the test's own."""
    made = tmp_path / "kernels"
    monkeypatch.setenv("TREADLE_CACHE", str(made))
    monkeypatch.delenv("TREADLE_TUNE", raising=False)
    return made


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few variants, short measurements, caches of a few kilobytes."""
    swept = {
        "gemm": ({"mr": (1, 2), "nr": (4, 99)},),
        "matrix": ({"mr": (2, 3, 4)},),
        "gemv": ({"mr": (2, 4)},),
    }
    for module in (select, tune, tuned_rows):
        monkeypatch.setattr(module, "TUNING_CANDIDATES", swept)
    monkeypatch.setattr(peaks, "BUFFER_BYTES", (peaks.PIECE, peaks.PIECE))
    monkeypatch.setattr(trial, "buffer_bytes", lambda: 1 << 16)
    monkeypatch.setattr(trial, "LEAST_OPS", 0)
    for module, name in ((topology, "ENOUGH"), (tune_results, "KEPT")):
        monkeypatch.setattr(module, name, 0.0)  # runs so short say nothing of a busy machine
    monkeypatch.setattr(trial, "cache_bytes", lambda: 0)
    measure = peaks.measure_peaks
    monkeypatch.setattr(
        peaks, "measure_peaks", lambda isa, n, **more: measure(isa, n, 0.001, **more)
    )


# -- real sweeps ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sweep_of_everything(run: Run, small: None) -> None:
    ran = run("tune", "--format", "q8_0", *SMALL, "--json")
    assert (ran.code, ran.err) == (0, "")
    said = json.loads(ran.out)
    isa = row_in_use()
    assert (said["isa"], said["threads"], said["k"], said["m"]) == (isa.name, 1, 64, 64)
    assert [(s["kernel"], s["tokens"]) for s in said["sweeps"]] == [
        ("gemm", 8),
        *([("matrix", 8)] if isa.matrix else []),
        *(("gemv", n) for n in GEMV_TOKENS),
    ]
    for sweep in said["sweeps"]:
        assert [c["best"] for c in sweep["configurations"]].count(True) == 1
        assert [c["shipped"] for c in sweep["configurations"]].count(True) == 1
        for c in sweep["configurations"]:
            assert c["problem"] is None
            n_ops = 2 * 64 * 64 * sweep["tokens"]
            assert c["hot_ops_s"] == pytest.approx(n_ops / c["hot_s"])
            assert c["cold_ops_s"] == pytest.approx(n_ops / c["cold_s"])
            assert c["cold_bytes_s"] == pytest.approx(64 * 68 / c["cold_s"])
            words = sweep["kernel"] != "matrix" and prefers_q16(by_name("Q8_0"), isa)
            act = "bf16" if sweep["kernel"] == "matrix" else "q16" if words else "q8"
            peak = said["peaks"][act]
            assert c["share_of_peak"] == pytest.approx(c["hot_ops_s"] / peak)
    assert said["sweeps"][0]["left_out"] == 2  # 99 tokens
    assert said["crossovers"][0]["format"] == "Q8_0"
    row = tuned_row(isa)
    assert said["saved"] == row.path
    assert row.formats == ["Q8_0"]
    winners = {
        sweep["kernel"]: next(c["fields"] for c in sweep["configurations"] if c["best"])
        for sweep in said["sweeps"]
    }
    assert row.table.gemm == {"Q8_0": winners["gemm"]}
    assert row.table.matrix == ({"Q8_0": winners["matrix"]} if isa.matrix else {})
    assert set(row.table.gemv) == {("Q8_0", n) for n in GEMV_TOKENS}
    few = matmul(by_name("Q8_0"), isa, 64, 9, row.table)
    # Products of bytes are not swept; matrix registers may win at nine tokens.
    kind = select.family(few)
    shape = {"mr": few.mr} | ({"nr": few.nr} if kind == "gemm" else {})
    assert isinstance(few, StripGemm) or shape.items() <= winners[kind].items()
    assert not isinstance(few, BytesGemm) or isa.matrix is not None
    many = matmul(by_name("Q8_0"), isa, 64, 512, row.table)
    assert many.mr == winners["matrix" if isa.matrix else "gemm"]["mr"]


@pytest.mark.slow
def test_matrix_registers_alone(run: Run, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a row that has some: real ones, or such as are made of memory."""
    isa = kernel_rows.MATRICES[-1]
    assert isa.matrix
    isa = replace(isa, matrix=replace(isa.matrix, parts=2))
    monkeypatch.setattr("treadle.profiling.report.row_in_use", lambda: isa)
    ran = run("tune", "matrix", "--format", "Q8_0", "--format", "F32", *SMALL, "--json")
    assert (ran.code, ran.err) == (0, "")
    said = json.loads(ran.out)
    (sweep,) = said["sweeps"]  # an F32 has three parts
    assert (sweep["kernel"], sweep["format"], sweep["tokens"]) == ("matrix", "Q8_0", 8)
    assert not [c for c in sweep["configurations"] if c["problem"]]
    no_panels = [mr for mr in (2, 3, 4) if mr * isa.lanes % EDGE]  # rows of vectors that fill none
    assert sweep["left_out"] == len(no_panels)
    table = tuned_row(isa).table
    assert table == TunedTable(matrix={"Q8_0": table.matrix["Q8_0"]})


def test_matrix_registers_that_are_not_there(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.profiling.report.row_in_use", lambda: kernel_rows.VECTORS[-1])
    ran = run("tune", "matrix")
    assert (ran.code, ran.out) == (2, "")
    assert f"{kernel_rows.VECTORS[-1].name} has no matrix registers to tune for" in ran.err


def test_one_kernel_of_one_format_leaves_the_rest_of_the_row(run: Run, small: None) -> None:
    isa = row_in_use()
    tuned_rows.save(isa, TunedTable({"F16": {"mr": 1, "nr": 4}}, gemv_tokens={"F32": 2}))
    ran = run("tune", "gemm", "--format", "F32", *SMALL)
    assert (ran.code, ran.err) == (0, "")
    table = tuned_row(isa).table
    assert set(table.gemm) == {"F16", "F32"}
    assert (table.gemv, table.gemv_tokens) == ({}, {"F32": 2})
    lines = ran.out.splitlines()
    assert lines[-1] == f"saved in {tuned_row(isa).path}: later runs use it"
    assert lines[3] == "gemm F32, K 64, M 64, 8 tokens"
    assert "2 left out" in ran.out


def test_a_dry_run_keeps_nothing(run: Run, small: None, folder: Path) -> None:
    ran = run("tune", "gemv", "--format", "F32", *SMALL, "--dry-run", "--json")
    assert (ran.code, ran.err) == (0, "")
    assert json.loads(ran.out)["saved"] is None
    assert tuned_row(row_in_use()).table == SHIPPED
    assert not list(folder.glob("**/*.json"))


def test_a_sweeps_kernels_stay_out_of_the_cache(run: Run, small: None) -> None:
    run("tune", "gemm", "--format", "F32", *SMALL, "--dry-run")
    assert not [entry for entry in cache.entries() if entry.name.startswith("gem")]


def test_a_picture(run: Run, small: None, tmp_path: Path) -> None:
    out = tmp_path / "out.svg"
    ran = run("tune", "--format", "F32", *SMALL, "--plot", str(out), "--dry-run")
    assert (ran.code, ran.err) == (0, "")
    assert ET.parse(out).getroot().tag == f"{SVG}svg"
    assert run("tune", "--plot", str(tmp_path)).code == 2


def test_a_picture_that_cannot_be_written(
    run: Run, measured: list[TuneResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs no measurement, and what was measured none of its words."""
    (tmp_path / "full.svg").symlink_to("/dev/full")
    ran = run("tune", "--dry-run", "--plot", str(tmp_path / "full.svg"))
    assert (ran.code, "best: " in ran.out) == (1, True)
    monkeypatch.setattr(cli, "measure", lambda *args: pytest.fail("measured"))
    ran = run("tune", "--plot", str(tmp_path / "none" / "out.svg"))
    assert (ran.code, ran.out) == (1, "")
    assert "its folder does not exist" in ran.err
    (tmp_path / "notes").write_text("notes")
    ran = run("tune", "--plot", str(tmp_path / "notes"))
    assert (ran.code, (tmp_path / "notes").read_text()) == (1, "notes")
    assert "is not a chart by treadle" in ran.err


def test_a_folder_that_takes_no_files_costs_no_measurement(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "measure", lambda *args: pytest.fail("measured"))
    monkeypatch.setattr(os, "access", lambda path, mode: path != folder / "tuned")
    ran = run("tune", "gemm", "--format", "F32", *SMALL)
    assert (ran.code, ran.out) == (1, "")
    assert "its folder is not writable" in ran.err
    folder.rename(folder.with_name("elsewhere"))
    folder.touch()
    ran = run("tune", "gemm", "--format", "F32", *SMALL)
    assert (ran.code, ran.out) == (1, "")
    assert "set TREADLE_CACHE to a writable folder" in ran.err


def test_a_wrong_kernel_is_named_and_left_alone(
    run: Run, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = trial.KernelTrial.check

    def strict(self: trial.KernelTrial, spec: Matmul, n: int) -> str | None:
        return "9 of 9 results are wrong" if spec.mr == 1 else check(self, spec, n)

    monkeypatch.setattr(trial.KernelTrial, "check", strict)
    ran = run("tune", "gemm", "--format", "F32", *SMALL)
    assert ran.code == 0
    assert "gemm_F32_f32_k64_mr1_nr4 is skipped: 9 of 9 results are wrong" in ran.err
    assert "WRONG" in next(line for line in ran.out.splitlines() if line.startswith("mr 1"))
    assert tuned_row(row_in_use()).table.gemm["F32"]["mr"] == 2


def test_compiling_forbidden(run: Run, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_NO_COMPILE", "1")
    ran = run("tune", "gemm", "--format", "F32", *SMALL)
    assert (ran.code, ran.out) == (1, "")
    assert "TREADLE_NO_COMPILE=1" in ran.err


@pytest.mark.parametrize(
    "args",
    [["norm"], ["--format", "Q9"], ["--k", "0"], ["-r", "0"], ["-t", "0"], ["gemm", "gemv"]],
    ids=" ".join,
)
def test_wrong_usage(run: Run, args: Sequence[str]) -> None:
    assert run("tune", *args).code == 2


def test_rows_that_no_block_fits(run: Run) -> None:
    """Told at once, not after the formats before it were swept."""
    ran = run("tune", "--k", "100")
    assert (ran.code, ran.out) == (1, "")
    assert "needs rows that are multiples of" in ran.err


def test_reset(run: Run) -> None:
    assert run("tune", "--reset").out == "nothing was tuned here: nothing to remove\n"
    path = tuned_rows.save(row_in_use(), TunedTable(gemv_tokens={"F32": 2}))
    assert run("tune", "--reset", "--dry-run").out == f"would remove {path}\n"
    assert path.exists()
    assert run("tune", "--reset").out == f"removed {path}: later runs use the shipped tiles\n"
    assert tuned_row(row_in_use()).table == SHIPPED
    path.write_text("{")
    told = json.loads(run("tune", "--reset", "--dry-run", "--json").out)
    assert told == {"removed": None, "would_remove": str(path)}
    told = json.loads(run("tune", "--reset", "--json").out)
    assert told == {"removed": str(path), "would_remove": None}
    path.write_text("{")  # a damaged one goes as well
    assert run("tune", "--reset").code == 0
    assert not path.exists()


# -- what is shown --------------------------------------------------------------------------------


def variant(spec: Matmul, hot_s: float, cold_s: float, **more: Any) -> Variant:
    return Variant(spec, tune.swept_fields(spec), hot_s=hot_s, cold_s=cold_s, **more)


def tiles() -> Sweep:
    """Sixteen tokens of 64 x 64: 131,072 operations."""
    shapes = {(1, 4): 0.004, (1, 8): 0.002, (2, 4): 0.003, (2, 8): 0.0022}
    made = Sweep("gemm", "Q8_0", 16, left_out=3)
    for (mr, nr), cold_s in shapes.items():
        spec = Gemm("Q8_0", "q8", 64, mr, nr)
        made.variants.append(
            variant(spec, cold_s / 2, cold_s, best=nr == 8 and mr == 1, shipped=(mr, nr) == (2, 8))
        )
    return made


def rows() -> Sweep:
    made = Sweep("gemv", "Q8_0", 1)
    spec = Gemv("Q8_0", "q8", 64, 4, 1)
    made.variants.append(variant(spec, 0.001, 0.002, best=True, shipped=True))
    return made


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[TuneResult]:
    """What a run finds out, in place of measuring it."""
    crossing = Crossover("Q8_0", 2, {2: 1e-6, 4: 5e-6}, {2: 2e-6, 4: 4e-6})
    table = TunedTable(gemv_tokens={"Q8_0": 2})
    results = [TuneResult("Q8_0", [tiles(), rows()], crossing, 4352, 8192, table)]
    monkeypatch.setattr(cli, "measure", lambda *args: (PEAKS, results))
    return results


def test_the_table(run: Run, measured: list[TuneResult]) -> None:
    ran = run("tune", "--k", "64", "--m", "64", "-t", "2", "--dry-run")
    lines = ran.out.splitlines()
    assert lines[0].endswith(f", {row_in_use().name}, 2 threads")
    assert lines[1] == "peaks: q8 4.0 Gop/s, f32 2.0 Gop/s, memory 1.0 GB/s"
    assert lines[3] == "gemm Q8_0, K 64, M 64, 16 tokens"
    header = "configuration  hot us  hot GOP/s  of peak  cold us  cold GOP/s  cold GB/s  of limit"
    assert lines[4].split() == header.split()
    # 131,072 operations in 1 ms, hot, of 4 GOP/s; least 32.8 us of arithmetic, of 2 ms cold
    assert lines[6].startswith("mr 1 nr 8")
    assert lines[6].split()[-8:] == ["1000.0", "0.1", "3%", "2000.0", "0.1", "0.0", "2%", "best"]
    assert lines[8].endswith("shipped")
    best, left_out = lines[9].split("; ")
    assert best == f"best: {tiles().best.name}, 10% faster than shipped"
    assert left_out == "3 left out: too large for the registers, or not whole panels"
    assert "gemv Q8_0, K 64, M 64, 1 token" in lines
    assert "best: ahead 0 mr 4, as shipped" in lines
    assert lines[-2].split() == ["Q8_0", "gemv", "1.0", "5.0", "2"]
    assert lines[-1].split() == ["gemm", "2.0", "4.0"]
    assert "kept" not in ran.out


def test_the_table_of_crossovers_with_matrix_registers(capsys: pytest.CaptureFixture[str]) -> None:
    gemv_s = {2: 1e-6, 4: 5e-6}
    gemm_s = {2: 2e-6, 4: 4e-6}
    with_matrix = Crossover("Q8_0", 2, gemv_s, gemm_s, 3, {2: 3e-6, 4: 3.5e-6})
    never = replace(with_matrix, vector_tokens=2)  # gemv serves two tokens, the registers more
    tune_results.print_crossovers([with_matrix, never, Crossover("F32", 4, gemv_s, gemm_s)])
    head, *lines = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head == ["format", "kernel", "2", "4", "up", "to"]
    assert lines == [
        ["Q8_0", "gemv", "1.0", "5.0", "2"],
        ["gemm", "2.0", "4.0", "3"],
        ["matrix", "3.0", "3.5"],
        ["Q8_0", "gemv", "1.0", "5.0", "2"],
        ["gemm", "2.0", "4.0", "never"],
        ["matrix", "3.0", "3.5"],
        ["F32", "gemv", "1.0", "5.0", "4"],
        ["gemm", "2.0", "4.0"],
    ]


def test_the_tables_fit_a_terminal(run: Run, measured: list[TuneResult], terminal: int) -> None:
    lines = run("tune", "--dry-run").out.splitlines()
    assert max(map(len, lines)) <= terminal
    assert any(line.startswith("(hot us, cold us, cold GB/s: ") for line in lines)


def test_a_busy_machine_is_told_of(run: Run, measured: list[TuneResult]) -> None:
    assert run("tune", "--dry-run").err == ""
    measured[0] = replace(measured[0], cpu_share=0.6)
    assert "got 60% of the processor time" in run("tune", "--dry-run").err


def test_what_a_busy_machine_measured_is_not_kept(run: Run, measured: list[TuneResult]) -> None:
    isa = row_in_use()
    measured[0] = replace(measured[0], cpu_share=0.79)
    ran = run("tune")
    assert ran.code == 1
    assert "treadle: error: Q8_0: not saved: the threads got less than 80% of" in ran.err
    assert ran.err.count("the threads got") == 1  # said once
    assert "with --force" in ran.err
    assert "best: " in ran.out  # what was found is shown
    assert "saved in" not in ran.out
    assert tuned_row(isa).measured is None
    said = json.loads(run("tune", "--json").out)
    assert (said["saved"], list(said["not_kept"])) == (None, ["Q8_0"])
    assert said["processor_time_share"] == {"Q8_0": 0.79}
    ran = run("tune", "--force")
    assert (ran.code, tuned_row(isa).table.gemv_tokens) == (0, {"Q8_0": 2})
    assert "saved in" in ran.out


def test_what_was_measured_in_peace_is_kept(run: Run, measured: list[TuneResult]) -> None:
    calm = TunedTable(gemv_tokens={"F32": 4})
    measured.append(replace(measured[0], format="F32", table=calm, cpu_share=0.8))
    measured[0] = replace(measured[0], cpu_share=0.24)
    ran = run("tune")
    assert ran.code == 1
    assert "error: Q8_0: not saved" in ran.err
    assert tuned_row(row_in_use()).table.gemv_tokens == {"F32": 4}


def test_cold_times_of_caches_are_not_kept(run: Run, measured: list[TuneResult]) -> None:
    measured[0] = replace(measured[0], from_memory=False)
    ran = run("tune")
    assert ran.code == 1
    assert "no larger than the caches" in ran.err
    assert tuned_row(row_in_use()).measured is None


def test_a_trial_knows_whether_its_copies_fit_caches(
    small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trial.KernelTrial(by_name("F32"), row_in_use(), 64, 64, 8, 1)
    assert made.from_memory
    monkeypatch.setattr(trial, "cache_bytes", lambda: 1 << 30)
    assert not made.from_memory
    made.close()


def test_peaks_of_caches_are_called_so(
    run: Run, measured: list[TuneResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"cache_bytes_s": 1e9, "q8": 4e9, "f32": 2e9}
    monkeypatch.setattr(cli, "measure", lambda *args: (found, measured))
    out = run("tune", "--dry-run").out
    assert "peaks: q8 4.0 Gop/s, f32 2.0 Gop/s, caches 1.0 GB/s" in out.splitlines()


def test_if_no_kernel_is_right_the_table_says_so(run: Run, measured: list[TuneResult]) -> None:
    for v in measured[0].sweeps[1].variants:
        v.problem = "wrong"
    assert "no configuration computes correct results" in run("tune", "--dry-run").out


def shares_of(sweep: Sweep) -> list[dict[str, Any]]:
    result = TuneResult("Q8_0", [], None, 4352, 8192, TunedTable())
    return list(tune_results.rows_of(sweep, result, PEAKS))


def test_shares_of_what_binds() -> None:
    """Decoding is bound by memory: 4352 bytes take 4.35 us, 8192 operations 2.05 us."""
    (row,) = shares_of(rows())
    assert row["share_of_peak"] == pytest.approx(8192 / 4e9 / 0.001)
    assert row["share_of_limit"] == pytest.approx(4352 / 1e9 / 0.002)
    many = shares_of(tiles())[1]
    assert many["share_of_limit"] == pytest.approx(16 * 8192 / 4e9 / 0.002)


ORIGIN = "a <CPU> & more · 2026-01-02 · treadle 9"


def picture(*sweeps: list[dict[str, Any]]) -> ET.Element:
    return ET.fromstring(draw(list(sweeps), "K 64, M 64, 2 threads", ORIGIN))


def words(root: ET.Element) -> set[str]:
    return {node.text or "" for node in root.iter(f"{SVG}text")}


def test_the_picture_is_a_map_of_tiles_and_bars_of_rows() -> None:
    root = picture(shares_of(tiles()), shares_of(rows()))
    assert {"treadle tune", "K 64, M 64, 2 threads", ORIGIN} <= words(root)
    assert {"mr, vectors of rows", "nr, tokens of a tile", "1", "2", "4", "8"} <= words(root)
    assert {"gemm Q8_0, 16 tokens: GOP/s, caches cold", "gemv Q8_0, 1 token"} <= words(root)
    said = {"ahead 0 mr 4", "GOP/s", "best, shipped", "caches hot", "caches cold: what counts"}
    assert said <= words(root)
    by_class: dict[str, list[ET.Element]] = {}
    for box in root.iter(f"{SVG}rect"):
        by_class.setdefault(box.attrib["class"], []).append(box)
    cells = [box for box in by_class["heat"] if box.findtext(f"{SVG}title")]
    assert len(cells) == 4
    # The fastest is as strong as the colour gets, the slowest as faint.
    strength = [float(box.get("fill-opacity", 1)) for box in cells]
    assert sorted(strength)[:: len(strength) - 1] == pytest.approx([0.08, 1.0])
    assert (len(by_class["ring"]), len(by_class["ring dashed"])) == (2, 2)  # with the legend's
    hot, cold = (by_class[f"bar s{i}"][-1] for i in (0, 1))
    assert float(hot.attrib["width"]) == pytest.approx(2 * float(cold.attrib["width"]), rel=0.01)
    frame = [float(n) for n in str(root.get("viewBox")).split()]
    for box in root.iter(f"{SVG}rect"):
        right, low = (
            float(box.get(a) or 0) + float(box.get(b) or 0)
            for a, b in (("x", "width"), ("y", "height"))
        )
        assert right <= frame[2]
        assert low <= frame[3]


def test_the_legend_has_only_what_is_drawn() -> None:
    assert "caches hot" not in words(picture(shares_of(tiles())))
    assert "slow to fast, caches cold" not in words(picture(shares_of(rows())))


def test_a_cell_shows_the_best_of_what_varies_beside_it() -> None:
    slow, fast = ({**shares_of(tiles())[0]} for _ in range(2))
    slow["fields"], fast["fields"] = ({"mr": 1, "nr": 4, "kc": kc} for kc in (0, 512))
    slow["cold_ops_s"] = 5e9
    fast["cold_ops_s"] = 7e9
    other = {**shares_of(tiles())[2], "cold_ops_s": 6e9}
    other["fields"] = {"mr": 2, "nr": 8, "kc": 0}
    found = words(picture([fast, slow, other]))
    assert {"7.0", "6.0"} <= found
    assert "5.0" not in found


def test_a_format_of_mlx_by_its_name() -> None:
    """They are too many to list; others are still named in the error."""
    option = FormatName(["Q8_0"], case_sensitive=False)
    assert option.convert("mlx4_g64_bf16", None, None) == "MLX4_G64_BF16"
    assert option.convert("q8_0", None, None) == "Q8_0"
    with pytest.raises(click.BadParameter, match=r"MLX7_G64.*(?i:q8_0)"):
        option.convert("MLX7_G64", None, None)
