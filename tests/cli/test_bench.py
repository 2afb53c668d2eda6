from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.cli.conftest import Run
from tests.cli.fake import FakeEngine, FakeModel, FakeTensor
from treadle.cli.bench_engines import BATCH, LlamaCpp, Treadle, streams
from treadle.cli.bench_results import Result, share_of
from treadle.cli.commands import bench

CONTRACT = [
    "test",
    "depth",
    "threads",
    "sequences",
    "tok_s",
    "tok_s_min",
    "tok_s_max",
    "bytes_s",
    "ops_s",
    "share_of_peak",
    "engine",
]
MORE = ["model", "format", "peak", "shares", "peaks", "processor_time_share", "device", "picture"]
PEAKS = {"bandwidth": 1e9, "int8": 1e9, "bf16": 1e9, "f32": 1e9}


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of PEAKS, on which every timing takes 1, 2, 3 ... ms."""
    ticks = (0.001 * n for i in range(1000) for n in (0, i))
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    monkeypatch.setattr(bench, "measured_peaks", lambda model, progress: PEAKS)
    monkeypatch.setattr(bench, "MIN_CPU_S", 1e9)  # that clock says nothing of processor time


def test_json_has_the_contracts_fields(run: Run, model: FakeModel, gguf: str) -> None:
    ran = run("bench", gguf, "-p", "6", "-n", "4", "-d", "8,0", "-r", "3", "--json")
    assert (ran.code, ran.err) == (0, "")
    results = json.loads(ran.out)
    assert [list(result) for result in results] == [CONTRACT + MORE] * 4
    assert [(r["test"], r["depth"]) for r in results] == [
        ("pp6", 0),
        ("tg4", 0),
        ("pp6", 8),
        ("tg4", 8),
    ]
    first = results[0]  # its repetitions took 1, 2 and 3 ms; the one before is not counted
    assert first["tok_s"] == pytest.approx(6 / 0.002)
    assert first["tok_s_min"] == pytest.approx(6 / 0.003)
    assert first["tok_s_max"] == pytest.approx(6 / 0.001)
    weights = 32 + 216 + 144 + 288
    assert first["bytes_s"] == pytest.approx((weights + 6 * 2) / 0.002)
    assert first["ops_s"] == pytest.approx((6 * 640 + 144 + 6 * 4) / 0.002)
    least = (32 + 384 * 6 + 256 * 6 + 288 + 6 * 4) / 1e9
    assert first["share_of_peak"] == pytest.approx(least / 0.002)
    assert first["peak"] == "int8"
    assert first["shares"] == pytest.approx(
        {
            "bandwidth": (weights + 12) / 2e6,
            "int8": 6 * 640 / 2e6,
            "f32": (144 + 24) / 2e6,
        }
    )
    assert first["peaks"] == PEAKS
    # The next test's took 5, 6 and 7 ms; each of its 4 tokens is a pass over the weights.
    assert results[1]["bytes_s"] == pytest.approx((4 * weights + 2 * (1 + 2 + 3 + 4)) / 0.006)
    assert results[1]["ops_s"] == pytest.approx((4 * (640 + 144) + 4 * (1 + 2 + 3 + 4)) / 0.006)
    assert (first["threads"], first["sequences"], first["engine"]) == (2, 1, "treadle")
    assert (first["model"], first["format"]) == ("story.gguf", "Q8_0")


def test_keys_and_values_at_depth_are_bytes_that_were_read(
    run: Run, model: FakeModel, gguf: str
) -> None:
    ran = run("bench", gguf, "-p", "0", "-n", "4", "-d", "1000", "-r", "3", "--json")
    (result,) = json.loads(ran.out)
    seen = 1001 + 1002 + 1003 + 1004
    assert result["bytes_s"] == pytest.approx((4 * 680 + 2 * seen) / 0.002)
    assert result["ops_s"] == pytest.approx((4 * 784 + 4 * seen) / 0.002)


def test_sequences_write_together(run: Run, model: FakeModel, gguf: str) -> None:
    args = ["-p", "6", "-n", "3", "-s", "1,2", "-r", "1", "--json"]
    results = json.loads(run("bench", gguf, *args).out)
    assert [(r["test"], r["sequences"]) for r in results] == [("pp6", 1), ("tg3", 1), ("tg3", 2)]
    load = next(call[2] for call in model.calls if call[0] == "load")
    assert load == {"context": 6, "n_sequences": 2}
    both = [call[1] for call in model.calls if call[0] == "run" and len(call[1]) == 2]
    assert both == [[(1, 1), (1, 1)], [(1, 2), (1, 2)], [(1, 3), (1, 3)]] * 2
    last = results[2]  # took 5 ms
    assert last["tok_s"] == pytest.approx(6 / 0.005)
    # The weights are read once for both; each has its own keys, and its own logits.
    assert last["bytes_s"] == pytest.approx((3 * 680 + 2 * 2 * (1 + 2 + 3)) / 0.005)
    assert last["ops_s"] == pytest.approx((3 * 2 * 784 + 2 * 4 * (1 + 2 + 3)) / 0.005)


def test_a_model_is_loaded_for_each_number_of_threads(
    run: Run, model: FakeModel, gguf: str
) -> None:
    run("bench", gguf, "-p", "6", "-n", "0", "-d", "8", "-t", "1,2", "-r", "1")
    settings = [call[2] for call in model.calls if call[0] == "load"]
    assert settings == [{"threads": 1, "context": 14}, {"threads": 2, "context": 14}]
    assert model.calls[-1] == ("close",)


def test_several_models(run: Run, model: FakeModel, tmp_path: Path) -> None:
    paths = [tmp_path / folder / "a.gguf" for folder in ("one", "two")] + [tmp_path / "b.gguf"]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"GGUF")
    names = [str(path) for path in paths]
    model.gguf = SimpleNamespace(n_bytes=9, tensors={"w": FakeTensor("Q4_0", 9)})
    ran = run("bench", *names, "-p", "6", "-n", "0", "-r", "1", "--json")
    assert [call[1] for call in model.calls if call[0] == "load"] == names
    assert [r["model"] for r in json.loads(ran.out)] == names  # two files of one name
    assert json.loads(ran.out)[0]["format"] == "Q4_0"
    ran = run("bench", *names[1:], "-p", "6", "-n", "0", "-r", "1")
    titles = [line for line in ran.out.splitlines() if ".gguf" in line]
    assert titles == ["a.gguf, Q4_0, 2 threads", "b.gguf, Q4_0, 2 threads"]


def test_what_is_fed(run: Run, model: FakeModel, gguf: str) -> None:
    """What one repetition leaves, the next goes back from: 600 tokens are read once."""
    run("bench", gguf, "-p", "4", "-n", "2", "-d", "0,600", "-r", "1")
    done = [call for call in model.calls if call[0] in ("feed", "run", "truncate")]
    read = ("feed", 4, 4)
    write = [("run", [(1, 1)]), ("run", [(1, 2)])]
    deep = [("feed", 4, 604), ("truncate", 600)]
    deep_write = [("run", [(1, 601)]), ("run", [(1, 602)])]
    assert done == [
        *(read, ("truncate", 0)) * 2,
        *(*write, ("truncate", 0)),
        *write,
        ("feed", 598, 600),
        *deep * 2,
        *(*deep_write, ("truncate", 600)),
        *deep_write,
    ]


def test_streams_are_the_same_in_every_call_and_of_each_sequence_its_own() -> None:
    one, two = streams(2, 50, 100)
    assert streams(3, 60, 100)[1][:50] == two
    assert one != two
    assert set(one) | set(two) <= set(range(100))


def test_a_repetition_is_a_share_of_the_peaks_of_its_own_moment(
    run: Run, model: FakeModel, gguf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that has fallen to half of its speed by the third repetition, which took 3 ms."""
    moments = iter([PEAKS, PEAKS, {name: rate / 2 for name, rate in PEAKS.items()}])
    monkeypatch.setattr(bench, "measured_peaks", lambda model, progress: next(moments))
    (first,) = json.loads(run("bench", gguf, "-p", "6", "-n", "0", "-r", "3", "--json").out)
    least = (32 + 384 * 6 + 256 * 6 + 288 + 6 * 4) / 1e9
    shares = [least / 0.001, least / 0.002, 2 * least / 0.003]
    assert first["share_of_peak"] == pytest.approx(sorted(shares)[1])
    assert first["peaks"] == PEAKS
    assert next(moments, None) is None


def test_the_table(run: Run, model: FakeModel, gguf: str) -> None:
    ran = run("bench", gguf, "-p", "6", "-n", "0", "-r", "3")
    title, header, line, empty, peaks = ran.out.splitlines()
    assert title == "story.gguf, Q8_0, 2 threads"
    assert header.split() == ["test", "tokens/s", "bytes/s", "op/s", "of", "peak"]
    # 1, 2 and 3 ms: from 2000 to 6000 tokens a second
    assert line.split()[:4] == ["pp6", "3000", "±", "67%"]
    assert line.split()[-2:] == ["0%", "int8"]
    assert empty == ""
    assert peaks == (
        "peaks of this machine, measured meanwhile: "
        "bandwidth 1.0 GB/s, int8 1.0 Gop/s, bf16 1.0 Gop/s, f32 1.0 Gop/s"
    )


def test_text_has_a_share_of_the_stream_too() -> None:
    result = Result(
        "tg4",
        0,
        2,
        1,
        1.0,
        1.0,
        1.0,
        1e9,
        1e9,
        0.86,
        "treadle",
        "a",
        "Q8_0",
        "bandwidth",
        {"bandwidth": 0.86, "stream": 0.954, "int8": 0.1},
        {},
    )
    assert share_of(result) == "86% bandwidth, 95% stream"
    assert share_of(replace(result, peak="int8")) == "86% int8"


def test_the_table_has_columns_for_what_differs(run: Run, model: FakeModel, gguf: str) -> None:
    out = run("bench", gguf, "-p", "6", "-n", "4", "-d", "0,9", "-t", "1", "-r", "1").out
    assert out.splitlines()[1].split()[:3] == ["test", "depth", "tokens/s"]
    out = run("bench", gguf, "-p", "6", "-n", "4", "-d", "9", "-s", "1,2", "-r", "1").out
    assert out.splitlines()[0] == "story.gguf, Q8_0, 2 threads, at depth 9"
    assert out.splitlines()[1].split()[:3] == ["test", "seqs", "tokens/s"]


def test_everything_that_differs_fits_a_terminal(
    run: Run, model: FakeModel, gguf: str, llama: FakeLlama, terminal: int
) -> None:
    options = ["-p", "6", "-n", "4", "-d", "0,65536", "-t", "1,16", "-s", "1", "-r", "2"]
    ran = run("bench", gguf, *options, "--against", "llama-cpp-python")
    assert ran.code == 0
    assert max(map(len, ran.out.splitlines())) <= terminal
    assert "(op/s" in ran.out  # what was left out is named
    assert "tokens/s" in ran.out


def test_a_busy_machine_is_told_of(
    run: Run, model: FakeModel, gguf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads that got 0.6 of the time of two processors, then all of it."""
    monkeypatch.setattr(bench, "MIN_CPU_S", 0.001)
    for share, warned in ((0.6, True), (1.0, False)):
        ticks = (2 * share * 0.001 * n for i in range(1000) for n in (0, i))
        monkeypatch.setattr("time.process_time", lambda ticks=ticks: next(ticks))
        wall = (0.001 * n for i in range(1000) for n in (0, i))
        monkeypatch.setattr("time.perf_counter", lambda wall=wall: next(wall))
        ran = run("bench", gguf, "-p", "6", "-n", "0", "-r", "3", "--json")
        (result,) = json.loads(ran.out)
        assert result["processor_time_share"] == pytest.approx(share)
        assert ("the threads got 60% of the processor time they asked for" in ran.err) == warned
    monkeypatch.setattr(bench, "MIN_CPU_S", 1.0)
    (result,) = json.loads(run("bench", gguf, "-p", "6", "-n", "0", "-r", "1", "--json").out)
    assert result["processor_time_share"] is None  # too short to tell


def test_a_device_is_named_and_threads_that_wait_for_it_are_not(
    run: Run, model: FakeModel, gguf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "MIN_CPU_S", 0.0)
    gpu = FakeEngine(model.calls, device=SimpleNamespace(name="A GPU\x1b"))
    monkeypatch.setattr(FakeModel, "engine", gpu)
    args = ["bench", gguf, "-p", "6", "-n", "0", "-r", "1"]
    assert run(*args).out.startswith("story.gguf, Q8_0, on A GPU\\x1b\n")
    (result,) = json.loads(run(*args, "--json").out)
    assert (result["device"], result["processor_time_share"]) == ("A GPU\x1b", None)


def test_a_bandwidth_of_caches_is_called_so(
    run: Run, model: FakeModel, gguf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one of three moments no buffer beyond the caches was to be had."""
    in_caches = {"caches": 4e9, "int8": 1e9, "bf16": 1e9, "f32": 1e9}

    def measure() -> None:
        moments = iter([PEAKS, in_caches, PEAKS])
        monkeypatch.setattr(bench, "measured_peaks", lambda model, progress: next(moments))

    measure()
    (first,) = json.loads(run("bench", gguf, "-p", "0", "-n", "4", "-r", "3", "--json").out)
    assert first["peaks"] == {"caches": 1e9, "int8": 1e9, "bf16": 1e9, "f32": 1e9}
    assert set(first["shares"]) == {"caches", "int8", "f32"}
    measure()
    lines = run("bench", gguf, "-p", "0", "-n", "4", "-r", "3").out.splitlines()
    assert "caches 1.0 GB/s" in lines[-2]
    assert lines[-1].startswith("caches: too little free memory")


def test_a_picture(run: Run, model: FakeModel, gguf: str, tmp_path: Path) -> None:
    target = tmp_path / "out.svg"
    ran = run("bench", gguf, "-p", "6", "-n", "4", "-d", "0,8", "-r", "1", "--plot", str(target))
    assert ran.code == 0
    assert ElementTree.fromstring(target.read_bytes()).tag == "{http://www.w3.org/2000/svg}svg"
    model.calls.clear()
    ran = run("bench", gguf, "-p", "6", "--plot", str(tmp_path / "no" / "out.svg"))
    assert (ran.code, model.calls) == (1, [])  # before the work, not after it


def test_a_picture_leaves_other_files_alone(
    run: Run, model: FakeModel, gguf: str, tmp_path: Path
) -> None:
    target = tmp_path / "out.svg"
    ran = run("bench", str(tmp_path / "absent.gguf"), "-p", "6", "--plot", str(target))
    assert (ran.code, target.exists()) == (1, False)
    ran = run("bench", gguf, "-p", "6", "--plot", gguf)
    assert (ran.code, model.calls, Path(gguf).read_bytes()) == (1, [], b"GGUF")
    assert f"{gguf}: is also the input" in ran.err
    target.write_text("notes")
    ran = run("bench", gguf, "-p", "6", "--plot", str(target))
    assert (ran.code, model.calls, target.read_text()) == (1, [], "notes")
    assert f"{target}: already exists, and is not a chart by treadle" in ran.err
    target.write_text("")
    for _ in range(2):  # an earlier picture is drawn anew
        assert run("bench", gguf, "-p", "6", "-n", "0", "-r", "1", "--plot", str(target)).code == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a file that is always full")
def test_a_full_disk_costs_the_picture_alone(run: Run, model: FakeModel, gguf: str) -> None:
    ran = run("bench", gguf, "-p", "6", "-n", "4", "-r", "1", "--json", "--plot", "/dev/full")
    assert ran.code == 1
    assert len(json.loads(ran.out)) == 2
    assert ran.err == "treadle: error: /dev/full: cannot be written: the disk is full\n"


@pytest.mark.parametrize(
    "args",
    [["-p", "x"], ["-t", "0"], ["-p", "0", "-n", "0"], ["-d", "-1"], ["-s", "0"], ["-s", "1,,2"]],
)
def test_wrong_numbers(run: Run, model: FakeModel, gguf: str, args: list[str]) -> None:
    assert run("bench", gguf, *args).code == 2


def test_no_model(run: Run) -> None:
    assert run("bench").code == 2


def test_prompts_longer_than_a_batch_are_runs_of_their_own() -> None:
    test = bench.Test("pp", 1100, 50)
    assert list(test.runs(512)) == [([(50, 512)], 0), ([(562, 512)], 0), ([(1074, 76)], 1)]


def test_a_prompt_longer_than_a_batch(run: Run, model: FakeModel, gguf: str) -> None:
    ran = run("bench", gguf, "-p", "1100", "-n", "0", "-r", "3", "--json")
    (result,) = json.loads(ran.out)
    n_seen = 512 * 1 + 512 * 513 + 76 * 1025  # the fake's count
    assert result["bytes_s"] == pytest.approx((3 * (32 + 216 + 144) + 288 + 2 * n_seen) / 0.002)


def test_more_sequences_than_a_run_has_outputs(run: Run, model: FakeModel, gguf: str) -> None:
    ran = run("bench", gguf, "-p", "0", "-n", "4", "-s", "1,129")
    assert (ran.code, ran.out) == (2, "")
    assert "-s 129: at most 128 sequences in one batch" in ran.err
    assert not [call for call in model.calls if call[0] == "run"]


# -- the other program ----------------------------------------------------------------------------


class FakeLlama(ModuleType):
    """llama.cpp's C interface, which notes what it is asked to do."""

    def __init__(self, *, can_cut: bool = True) -> None:
        super().__init__("llama_cpp")
        self.calls: list[Any] = []
        self.can_cut = can_cut
        self.code = 0
        self.path: bytes | None = None
        self.settings = SimpleNamespace()

    def llama_backend_init(self) -> None:
        pass

    def llama_model_default_params(self) -> Any:
        return SimpleNamespace()

    def llama_context_default_params(self) -> Any:
        return self.settings

    def llama_model_load_from_file(self, path: bytes, params: Any) -> object:
        self.path = path
        return b"bad" not in path

    def llama_init_from_model(self, model: object, settings: Any) -> object:
        return settings.n_ctx < 10**6

    def llama_get_memory(self, ctx: object) -> str:
        return "memory"

    def llama_batch_init(self, n: int, embd: int, n_seqs: int) -> Any:
        rows: dict[str, Any] = {name: [None] * n for name in ("token", "pos", "n_seq_id", "logits")}
        return SimpleNamespace(n_tokens=0, seq_id=[[None] for _ in range(n)], **rows)

    def llama_memory_seq_rm(self, memory: str, which: int, first: int, last: int) -> bool:
        self.calls.append(("cut", which, first))
        return self.can_cut or first < 0

    def llama_decode(self, ctx: object, batch: Any) -> int:
        n = batch.n_tokens
        rows = zip(batch.seq_id[:n], batch.pos[:n], batch.token[:n], batch.logits[:n], strict=True)
        self.calls.append(("decode", [(s[0], p, t, out) for s, p, t, out in rows]))
        assert set(batch.n_seq_id[:n]) == {1}
        return self.code

    def llama_synchronize(self, ctx: object) -> None:
        self.calls.append(("wait",))

    def llama_batch_free(self, batch: object) -> None:
        self.calls.append(("free batch",))

    def llama_free(self, ctx: object) -> None:
        self.calls.append(("free",))

    def llama_model_free(self, model: object) -> None:
        self.calls.append(("free model",))


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> FakeLlama:
    fake = FakeLlama()
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    return fake


def test_another_program_is_timed_in_turns(
    run: Run, model: FakeModel, gguf: str, llama: FakeLlama
) -> None:
    llama.calls = model.calls  # one record of both
    against = ["--against", "llama-cpp-python"]
    args = ["-p", "6", "-n", "0", "-d", "3", "-t", "2", "--kv", "q8_0", "-r", "2", "--json"]
    ran = run("bench", gguf, *args, *against)
    turns = [call[0] for call in model.calls if call[0] in ("feed", "decode")]
    assert turns == ["feed"] * 2 + ["decode"] * 2 + ["feed", "decode"] * 2
    ours, theirs = json.loads(ran.out)
    assert (ours["engine"], theirs["engine"]) == ("treadle", "llama-cpp-python")
    assert theirs["tok_s"] > 0
    for field in ("bytes_s", "ops_s", "share_of_peak", "peak", "shares"):
        assert theirs[field] is None
    assert llama.path == gguf.encode()
    wanted = {"n_threads": 2, "n_threads_batch": 2, "n_seq_max": 1, "type_k": 8, "type_v": 8}
    assert vars(llama.settings).items() >= {**wanted, "n_ctx": 256, "n_ubatch": BATCH}.items()
    assert model.calls[-4:] == [("free batch",), ("free",), ("free model",), ("close",)]
    lines = run("bench", gguf, *args[:-1], *against).out.splitlines()
    assert lines[0] == "story.gguf, Q8_0, 2 threads, at depth 3"
    assert lines[1].split()[-4:] == ["peak", "×", "the", "other"]
    assert lines[2].split()[-1] == "1.11"  # ours took 8 and 10 ms this time, theirs 9 and 11


def test_batches_of_the_other_program(llama: FakeLlama) -> None:
    ids = streams(2, 2000, 100)
    engine = LlamaCpp(Path("a.gguf"), ids, threads=1, context=700, kv=None)
    assert llama.settings.n_ctx == 2 * 768  # each sequence's room, rounded up
    engine.set_depth(600, 2)
    sizes = [len(call[1]) for call in llama.calls if call[0] == "decode"]
    assert sizes == [512, 88] * 2
    first = llama.calls[0][1]
    assert first[:2] == [(0, 0, ids[0][0], 0), (0, 1, ids[0][1], 0)]
    assert [row[3] for row in first] == [0] * 511 + [1]  # the last one's logits alone
    llama.calls.clear()
    engine.decode(2, 2)
    assert llama.calls == [
        ("decode", [(0, 600, ids[0][600], 1), (1, 600, ids[1][600], 1)]),
        ("wait",),
        ("decode", [(0, 601, ids[0][601], 1), (1, 601, ids[1][601], 1)]),
        ("wait",),
    ]
    llama.calls.clear()
    engine.set_depth(600, 1)
    engine.prefill(1)
    assert llama.calls == [("cut", 0, 600), ("decode", [(0, 600, ids[0][600], 1)]), ("wait",)]


def test_what_the_other_program_cannot_cut_it_reads_again(llama: FakeLlama) -> None:
    engine = LlamaCpp(Path("a.gguf"), streams(1, 99, 100), threads=1, context=99, kv=None)
    engine.set_depth(9, 1)
    llama.can_cut = False
    llama.calls.clear()
    engine.set_depth(5, 1)
    assert llama.calls[:2] == [("cut", 0, 5), ("cut", 0, -1)]
    assert [row[1] for row in llama.calls[2][1]] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("path", "context", "kv", "message"),
    [
        ("bad.gguf", 9, None, "llama.cpp cannot load bad.gguf"),
        ("a.gguf", 10**7, None, "cannot make a context of 10000000 tokens"),
        ("a.gguf", 9, "f8", "does not support a KV cache of type f8"),
    ],
)
def test_what_the_other_program_cannot_do(
    run: Run, llama: FakeLlama, path: str, context: int, kv: str | None, message: str
) -> None:
    from treadle.errors import TreadleError

    with pytest.raises(TreadleError, match=message):
        LlamaCpp(Path(path), streams(1, 9, 9), threads=1, context=context, kv=kv)


def test_a_batch_that_the_other_program_refuses(llama: FakeLlama) -> None:
    from treadle.errors import TreadleError

    engine = LlamaCpp(Path("a.gguf"), streams(1, 99, 100), threads=1, context=99, kv=None)
    llama.code = 1
    with pytest.raises(TreadleError, match=r"failed to run a batch of 3 tokens \(1\)"):
        engine.prefill(3)


def test_another_program_that_is_not_there(
    run: Run, model: FakeModel, gguf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    ran = run("bench", gguf, "--against", "llama-cpp-python")
    assert ran.code == 1
    assert "pip install 'treadle[bench]'" in ran.err
    assert model.calls[-1] == ("close",)


@pytest.mark.slow
def test_the_real_engine_holds_what_it_is_told() -> None:
    """Going back and on again gives what reading once gives, for several sequences together."""
    import treadle

    with treadle.load(context=80, n_sequences=2, threads=1) as real:
        ids = streams(2, 80, real.config.n_vocab)
        engine = Treadle(real, ids)
        engine.set_depth(40, 2)
        engine.decode(3, 2)
        assert [session.ids for session in engine.sessions] == [row[:43] for row in ids]
        engine.set_depth(10, 2)
        engine.prefill(20)
        engine.set_depth(35, 2)
        assert [session.ids for session in engine.sessions] == [row[:35] for row in ids]
        engine.close()


def test_more_sequences_than_their_context_has_tokens() -> None:
    """All of them write in one run, however short their texts are."""
    import treadle

    with treadle.load(context=8, n_sequences=12, threads=1) as real:
        engine = Treadle(real, streams(12, 8, real.config.n_vocab))
        engine.set_depth(0, 12)
        engine.decode(2, 12)
        assert {session.n_past for session in engine.sessions} == {2}
        engine.close()
