from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.evaluate.test_perplexity import GOLDEN
from treadle.api.options import packaged_model
from treadle.cli.ui import progress
from treadle.cli.ui.progress import ProgressBar

KNOWN = GOLDEN["measured"]["64/Q4_0"]


@pytest.fixture
def story(tmp_path: Path) -> str:
    path = tmp_path / "story.txt"
    path.write_text(GOLDEN["text"])
    return str(path)


def model(data: Path, fmt: str) -> str:
    return str(data / "models" / "babyllama105" / f"babyllama105-{fmt}.gguf")


@pytest.mark.slow
def test_perplexity_alone(run: Run, data: Path, story: str) -> None:
    ran = run("perplexity", model(data, "Q4_0"), story, "-c", "64", "--json")
    assert (ran.code, ran.err) == (0, "")
    report = json.loads(ran.out)
    assert report["perplexity"]["value"] == pytest.approx(KNOWN["ppl"], rel=0.02)
    assert (report["n"], report["n_windows"], report["n_ctx"]) == (775, 25, 64)
    assert report["n_run"] == 25 * 63
    assert report["kl"] is None
    short = run("perplexity", model(data, "Q4_0"), story, "-c", "64", "--json", "--chunks", "3")
    assert json.loads(short.out)["n"] == 3 * 31
    near = run("perplexity", model(data, "Q4_0"), story, "-c", "64", "--json", "--stride", "16")
    assert json.loads(near.out)["n"] == 16 * ((len(GOLDEN["text"]) - 64) // 16 + 1)
    assert json.loads(near.out)["perplexity"]["value"] < report["perplexity"]["value"]


def test_beside_another_model_and_its_saved_predictions(
    run: Run, data: Path, story: str, tmp_path: Path
) -> None:
    kept = str(tmp_path / "base.kld")
    ran = run("perplexity", model(data, "F32"), story, "-c", "64", "--save-logits", kept)
    assert (ran.code, ran.err) == (0, "")
    ran = run("perplexity", model(data, "Q4_0"), story, "-c", "64", "--kl-from", model(data, "F32"))
    assert (ran.code, ran.err) == (0, "")
    shown = {line.split("  ")[0]: line.split("  ")[-1].strip() for line in ran.out.splitlines()}
    assert float(shown["KL divergence, mean"].split()[0]) == pytest.approx(KNOWN["kl"], rel=0.1)
    assert shown["same top token"].endswith("%")
    again = run("perplexity", model(data, "Q4_0"), "--kl-from", kept, "--json")
    report = json.loads(again.out)
    assert report["kl"]["value"] == pytest.approx(KNOWN["kl"], rel=0.1)
    assert f"{report['perplexity']['value']:.4f}" == shown["perplexity"].split()[0]


@pytest.mark.slow
def test_as_written(run: Run, data: Path, story: str) -> None:
    """The scored tokens go one by one: a little other, and it is said."""
    args = "perplexity", model(data, "Q8_0"), story, "-c", "64", "--chunks", "2", "--as-written"
    report = json.loads(run(*args, "--json").out)
    read = json.loads(run(*args[:-1], "--json").out)
    assert (report["as_written"], read["as_written"]) == (True, False)
    assert report["n"] == read["n"] == 2 * 31
    assert report["perplexity"]["value"] == pytest.approx(read["perplexity"]["value"], rel=0.01)
    shown = run(*args)
    assert (shown.code, shown.err) == (0, "")
    assert "token by token" in shown.out


def test_a_text_from_standard_input(run: Run, data: Path) -> None:
    ran = run("perplexity", model(data, "F32"), "-", "-c", "64", "--json", stdin=GOLDEN["text"])
    assert json.loads(ran.out)["n"] == KNOWN["n"]


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ([], 2, "FILE"),
        (["STORY", "--stride", "8", "--save-logits", "x"], 2, "excludes --stride"),
        (["STORY", "-c", "4096"], 1, "less than one context of 4096"),
        (["--kl-from", "none"], 2, "'FILE': none has no saved predictions"),
        (["STORY", "-c", "64", "--stride", "64"], 1, "stride of 64"),
        (["absent.txt"], 1, "absent.txt: No such file"),
        (["STORY", "-c", "64", "--save-logits", "STORIES"], 1, "exists already"),
        (["STORY", "-c", "64", "--kl-from", "STORIES"], 1, "tokenize the text differently"),
    ],
)
def test_what_cannot_be(
    run: Run, data: Path, story: str, args: list[str], code: int, message: str
) -> None:
    named = {"STORY": story, "STORIES": str(data / "models" / "stories260K.gguf")}
    ran = run("perplexity", model(data, "F32"), *(named.get(arg, arg) for arg in args))
    assert (ran.code, ran.out) == (code, "")
    assert message in ran.err


def test_a_file_that_is_no_text(run: Run, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(b"good\xff")
    ran = run("perplexity", model(data, "F32"), str(path))
    assert ran.code == 1
    assert f"{path} at byte 4: is not UTF-8" in ran.err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_meter_shows_rate_and_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    with ProgressBar("perplexity", "tok") as meter:
        meter("compile", 1, 9)
        assert "compiling kernels" in terminal.getvalue()
        meter.note = "perplexity 7.1234"
        meter("perplexity", 0, 1000)
        meter("perplexity", 500, 1000)
    assert "tok/s" in terminal.getvalue()  # drawn ten times a second, and once more at the end
    assert "perplexity 7.1234" in terminal.getvalue()


@pytest.mark.slow
def test_what_a_type_of_keys_and_values_costs(run: Run, story: str) -> None:
    """Of the packaged model, beside itself: fewer bits, more divergence; rotated, not much."""
    cost = {}
    for kv in ("f32", "q8_0", "q4_0"):
        own = str(packaged_model())
        asked = ("-c", "64", "--chunks", "2", "--kv", kv, "--kl-from", own, "--json")
        ran = run("perplexity", own, story, *asked)
        assert (ran.code, ran.err) == (0, "")
        cost[kv] = json.loads(ran.out)["kl"]["value"]
    assert cost["f32"] < 2 * cost["q8_0"] < cost["q4_0"] < 0.1
