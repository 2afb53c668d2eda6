"""``bench/gate.py``: verdicts on pairs of values, sides that cannot do a figure, wrong arguments,
and the worktree, which never stays behind.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import gate
from bench.gate import FIGURES, Absence, Comparison, NotThere, Side, Work

SPEED = FIGURES["prompt"]
SECONDS = FIGURES["warm"]
MARGIN = 0.03


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """git in a repository of two commits, each with a package ``treadle``, in place of this one."""
    root = tmp_path / "repository"
    package = root / "src" / "treadle"
    package.mkdir(parents=True)
    monkeypatch.setattr(gate, "ROOT", root)
    for variable in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    gate.git("init", "--quiet")
    for text in ("first", "second"):
        (package / "__init__.py").write_text(f"TEXT = {text!r}\n", "utf-8")
        gate.git("add", ".")
        who = ("-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "commit.gpgsign=false")
        gate.git(*who, "commit", "--quiet", "-m", text)
    return gate.git


def side(name: str, source: Path = Path("src")) -> Side:
    return Side(name, name, source, Path("kernels"), Path("bytecode"))


SIDES = (side("this"), side("other"))


def work(tmp_path: Path) -> Work:
    return Work(tmp_path / "model.gguf", 1, 1, tmp_path)


# -- verdicts -------------------------------------------------------------------------------------


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("figure", "this", "other", "verdict"),
    [
        (SPEED, [90, 92, 94], [100, 100, 100], "worse"),
        (SPEED, [110, 108, 106], [100, 100, 100], "better"),
        (SECONDS, [110, 108, 106], [100, 100, 100], "worse"),
        (SECONDS, [90, 92, 94], [100, 100, 100], "better"),
        (SPEED, [90, 92, 101], [100, 100, 100], "unclear"),  # one round says otherwise
        (SPEED, [90, 92, 100], [100, 100, 100], "unclear"),  # the spread touches 1
        (SECONDS, [99, 110, 112], [100, 100, 100], "unclear"),
        (SPEED, [98, 97.5, 99], [100, 100, 100], "same"),  # all below, within the margin
        (SECONDS, [103, 103, 103], [100, 100, 100], "same"),  # the margin itself
        (SECONDS, [103.1, 103.1, 103.1], [100, 100, 100], "worse"),
        (SPEED, [100, 100, 100], [103, 103, 103], "same"),  # 1 / 1.03: the same factor
        (SPEED, [100, 100, 100], [103.1, 103.1, 103.1], "worse"),
        # A machine that slows down: the sides' medians differ by a fifth, the pairs do not.
        (SPEED, [100, 80, 60, 40], [100, 80, 60, 40], "same"),
    ],
)
def test_verdicts(figure: gate.Figure, this: list[float], other: list[float], verdict: str) -> None:
    assert Comparison(figure, this, other).verdict(MARGIN) == verdict


def test_ratios_are_of_pairs_and_the_spread_is_theirs() -> None:
    found = Comparison(SPEED, [10.0, 30.0, 90.0], [10.0, 20.0, 100.0])
    assert found.ratios == [1.0, 1.5, 0.9]
    assert found.ratio == 1.0  # of the medians it would be 1.5
    assert found.spread == (0.9, 1.5)


def test_a_wider_margin_lets_more_pass() -> None:
    found = Comparison(SPEED, [90.0, 90.0], [100.0, 100.0])
    closed = (1, "the gate is closed: worse, or no longer there: prompt of 512")
    assert gate.decision([found], 0.03) == closed
    assert gate.decision([found], 0.15) == (0, "no figure is worse; 1 of 1 could be compared")


def test_only_a_figure_that_this_tree_alone_lacks_closes_the_gate() -> None:
    same = Comparison(SECONDS, [1.0, 1.0], [1.0, 1.0])

    def code(**reasons: str) -> int:
        return gate.decision([Absence(SPEED, reasons), same], MARGIN)[0]

    assert code(this="broken") == 1
    assert code(other="no such option") == 0
    assert code(this="there is no valgrind", other="there is no valgrind") == 0
    assert gate.decision([Absence(SPEED, {"other": "no such option"})], MARGIN)[0] == 2


# -- turns ----------------------------------------------------------------------------------------


def test_the_first_side_alternates_and_the_first_turn_does_not_count(tmp_path: Path) -> None:
    order: list[str] = []

    def way(side: Side, work: Work, names: Sequence[str]) -> Mapping[str, float | str]:
        order.append(side.name)
        return dict.fromkeys(names, float(len(order)))

    (row,) = gate.compare(way, SIDES, work(tmp_path), ["warm"], rounds=4)
    assert order[2:] == ["this", "other", "other", "this", "this", "other", "other", "this"]
    assert isinstance(row, Comparison)
    assert list(row.this) == [3, 6, 7, 10]
    assert list(row.other) == [4, 5, 8, 9]


def test_a_missing_figure_is_told_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, ...]] = []

    def speeds(side: Side, work: Work, names: Sequence[str]) -> Mapping[str, float | str]:
        asked.append(tuple(names))
        missing = {"eight": "AttributeError: generate_many"} if side.name == "other" else {}
        return {name: missing.get(name, 1.0) for name in names}

    def served(side: Side, work: Work, names: Sequence[str]) -> Mapping[str, float | str]:
        raise NotThere("no such command")

    ways: Mapping[tuple[str, ...], gate.Measurement] = {
        ("prompt", "text", "eight"): speeds,
        ("served",): served,
    }
    rows = gate.run_gate(SIDES, work(tmp_path), ["prompt", "eight", "served"], 2, ways)
    assert asked == [("prompt", "eight")] * 2 + [("prompt",)] * 4
    assert [row.figure for row in rows] == [FIGURES[n] for n in ("prompt", "eight", "served")]
    gate.print_table(rows, MARGIN)
    printed = capsys.readouterr().out
    assert "not there on other: AttributeError: generate_many" in printed
    assert "not there on both sides: no such command" in printed
    assert "1.000 to 1.000   same (tokens/s)" in printed
    line = gate.markdown_row(rows, MARGIN, "2026-11-28", "a, b", "model")
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[3:7] == ["1.000: 1.00 (1.00 to 1.00)", "", "not there", "not there"]
    assert len(cells) == gate.markdown_head().splitlines()[0].count("|") - 1


def test_a_side_that_fails_in_a_later_round_is_missing(tmp_path: Path) -> None:
    n_calls = 0

    def way(side: Side, work: Work, names: Sequence[str]) -> Mapping[str, float | str]:
        nonlocal n_calls
        n_calls += 1
        if n_calls == 5:
            raise NotThere("killed")
        return dict.fromkeys(names, 1.0)

    (row,) = gate.compare(way, SIDES, work(tmp_path), ["warm"], rounds=8)
    assert isinstance(row, Absence)
    assert list(row.reasons.values()) == ["killed"]
    assert n_calls == 5


def test_exact_counts_take_a_quarter_of_the_rounds(tmp_path: Path) -> None:
    n_calls = dict.fromkeys(("warm", "instructions"), 0)

    def way(side: Side, work: Work, names: Sequence[str]) -> Mapping[str, float | str]:
        for name in names:
            n_calls[name] += 1
        return dict.fromkeys(names, 1.0)

    ways: Mapping[tuple[str, ...], gate.Measurement] = {("warm",): way, ("instructions",): way}
    gate.run_gate(SIDES, work(tmp_path), list(n_calls), 8, ways)
    assert n_calls == {"warm": 18, "instructions": 6}


# -- sides ----------------------------------------------------------------------------------------


def test_a_side_imports_its_own_sources_or_is_refused(tmp_path: Path) -> None:
    package = tmp_path / "own" / "treadle"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("", "utf-8")
    side("this", tmp_path / "own").check()
    (tmp_path / "none").mkdir()
    with pytest.raises(NotThere, match=r"was imported, expected a file in|No module named"):
        side("this", tmp_path / "none").check()
    (package / "__init__.py").write_text("raise ImportError('no numpy')", "utf-8")
    with pytest.raises(NotThere, match="ImportError: no numpy"):
        side("this", tmp_path / "own").check()


def test_the_worktree_has_the_commit_and_is_removed_on_ctrl_c(
    repository: Callable[..., str],
) -> None:
    def stopped() -> Path:
        with gate.checked_out(repository("rev-parse", "HEAD~1")) as found:
            assert "first" in (found / "src" / "treadle" / "__init__.py").read_text("utf-8")
            assert len(repository("worktree", "list").splitlines()) == 2
            raise KeyboardInterrupt
        raise AssertionError

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert len(repository("worktree", "list").splitlines()) == 1
    with gate.checked_out(repository("rev-parse", "HEAD")) as tree:
        folder = tree.parent
    assert not folder.exists()


def test_the_commit_to_compare_with(repository: Callable[..., str]) -> None:
    with pytest.raises(ValueError, match=r"no tag to compare with .*name a commit"):
        gate.commit_to_compare(None)
    first, second = (repository("rev-parse", name) for name in ("HEAD~1", "HEAD"))
    repository("tag", "v1", first)
    assert gate.commit_to_compare(None) == first
    assert gate.commit_to_compare("HEAD") == second
    with pytest.raises(ValueError, match="--against v2: there is no such commit"):
        gate.commit_to_compare("v2")


def test_memory_of_a_process() -> None:
    assert (gate.anonymous_kib(os.getpid()) > 0) == Path("/proc/self/status").exists()
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert gate.anonymous_kib(child.pid) == 0


def test_what_a_process_complains_of() -> None:
    assert gate.complaint("treadle: error: no command 'serve'\nSee 'treadle --help'.\n") == (
        "treadle: error: no command 'serve'"
    )
    assert gate.complaint("Traceback\n  x = y\nKilled\n\n") == "Killed"


def test_callgrinds_count() -> None:
    said = "==7== Events    : Ir\n==7== Collected : 1116299027\n==7==\n"
    assert gate.collected(said) == 1116299027
    with pytest.raises(NotThere, match="no count: valgrind: failed"):
        gate.collected("valgrind: failed\n")


# -- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--figures", "prompt,speed"], "'speed' is no figure: they are prompt, text,"),
        (["--rounds", "1"], "expected a whole number, 2 or more"),
        (["--margin", "-1"], "expected a number of per cent"),
    ],
)
def test_wrong_options(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(words, message, capsys)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no tag to compare with"),
        (["--against", "HEAD", "--model", "nowhere.gguf"], "--model nowhere.gguf: there is no"),
    ],
)
def test_wrong_commits_and_files(
    repository: Callable[..., str],
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert_refused(words, message, capsys)


def assert_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gate.main(words)
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_warm_start_is_timed_and_counted() -> None:
    assert gate.figures_of("warm,prompt") == ["warm", "instructions", "prompt"]
    assert gate.figures_of("instructions") == ["instructions"]
    assert set(FIGURES) == {name for names in gate.MEASUREMENTS for name in names}


@pytest.mark.parametrize(("this", "code"), [(1.0, 0), (2.0, 1)])
def test_the_exit_code_and_what_is_printed(
    repository: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    this: float,
    code: int,
) -> None:
    def run(sides: Sequence[Side], *rest: Any) -> list[gate.Row]:
        assert [each.name for each in sides] == ["this", "other"]
        texts = [(each.source / "treadle" / "__init__.py").read_text("utf-8") for each in sides]
        assert ["second" in texts[0], "first" in texts[1]] == [True, True]
        return [Comparison(SECONDS, [this, this], [1.0, 1.0])]

    monkeypatch.setattr(gate, "run_gate", run)
    assert gate.main(["--against", "HEAD~1", "--quick", "--markdown"]) == code
    printed = capsys.readouterr().out
    assert f"this: {repository('rev-parse', '--short', 'HEAD')}, other: " in printed
    assert "2 rounds decide little: equal commits have all on one side in 50%" in printed
    assert ("the gate is closed: worse, or no longer there: warm start" in printed) == bool(code)
    assert ("| **2.000: 2.00 (2.00 to 2.00)** |" in printed) == bool(code)
    assert len(repository("worktree", "list").splitlines()) == 1


def test_the_row_fits_the_table_of_the_document() -> None:
    page = Path(gate.__file__).parents[1] / "docs" / "performance.md"
    assert f"\n{gate.markdown_head()}\n" in page.read_text("utf-8")


def test_other_programs_are_told() -> None:
    assert gate.load_warning(0.2, 2.5, threads=2) is None
    assert gate.load_warning(None, None, threads=2) is None
    for before, after in ((1.2, 2.0), (0.1, 4.0)):
        warning = gate.load_warning(before, after, threads=2)
        assert warning is not None
        assert "other programs run" in warning
    assert gate.chance_note(8) is None
