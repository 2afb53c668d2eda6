"""The gate before a release: this working tree beside another commit, in turns.

::

    python bench/gate.py                                    # beside the last tag
    python bench/gate.py --against HEAD~5 --model FILE.gguf --markdown
    python bench/gate.py --against HEAD~1 --quick --figures prompt,text

Figures, by the names of ``--figures``:

    prompt   tokens per second of a prompt of 512 tokens, up to its first token
    text     tokens per second while one text is written
    eight    tokens per second of eight texts at once
    served   tokens per second of a server that writes four streams at once, prompts included
    warm     seconds of ``treadle run MODEL hello -n 1``, and its instructions, counted by
             valgrind's callgrind with one thread (``instructions`` alone: only the count)
    cold     seconds of the same command with an empty kernel cache
    picture  seconds of a vision tower of random weights (``bench/pictures.py``), for one picture
    memory   the most private memory of a process that does the first three, sampled every 2 ms

The other commit is checked out into a temporary git worktree, which is removed at the end. Every
measurement is a child process of this interpreter with the sources of its side, so both sides use
the same packages, model file and number of threads. Each side has a kernel cache of its own, kept
from run to run in ``treadle-gate`` in the user's cache folder. One measurement of each side is not
counted; then rounds follow, whose first side alternates.

The ratio is this tree's figure over the other's, the median of the rounds' ratios; the spread is
their least and most. A figure is worse if its ratio is beyond the margin on the bad side, and no
round says otherwise (the spread excludes 1). A figure that a side cannot do is "not there", with
the reason.

The exit code is 1 if a figure is worse, or if only the other commit can do it; 2 if nothing could
be compared; 130 if the gate was stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from itertools import count
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serve import Server  # type: ignore[import-not-found]

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "src" / "treadle" / "data" / "demo.gguf"
TEXT = ROOT / "LICENSE"  # prompts for servers are pieces of it

MARGIN = 0.03
CHANCE = 0.05  # of a spread that excludes 1 though the commits are equal
IDLE_LOAD = 0.5  # load average of a machine that does nothing else
PATIENCE_S = 1800  # for one measurement
SAMPLING_S = 0.002  # between two looks at a process's memory

N_STREAMS = 4
N_SERVED = 64  # tokens of one answer
SERVED_CHARS = 300  # of a prompt
SERVED_STRIDE = 97  # characters between the beginnings of two prompts
SERVED_CONTEXT = 1024

TOWER = "siglip-384"  # of bench/pictures.py, with fewer layers
TOWER_LAYERS = 4


# -- figures and verdicts -----------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """One line of the table. Of speeds more is better; of seconds, counts and bytes less is."""

    title: str
    unit: str
    more_is_better: bool = False

    def cell(self, value: float) -> str:
        """The value with four digits, or all before the point."""
        digits = max(0, 3 - max(0, len(str(int(value))) - 1)) if value >= 1 else 3
        return f"{value:.{digits}f}"


FIGURES = {
    "prompt": Figure("prompt of 512", "tokens/s", more_is_better=True),
    "text": Figure("text", "tokens/s", more_is_better=True),
    "eight": Figure("eight texts at once", "tokens/s", more_is_better=True),
    "served": Figure("served, 4 streams", "tokens/s", more_is_better=True),
    "warm": Figure("warm start", "s"),
    "instructions": Figure("warm start, counted", "million instructions"),
    "cold": Figure("cold start", "s"),
    "picture": Figure("picture", "s"),
    "memory": Figure("peak private memory", "MB"),
}
ALSO = {"warm": ("instructions",)}  # measured too when the first is named


@dataclass(frozen=True)
class Comparison:
    """A figure of both sides, one value a round: pairs of the same round were measured in the same
    minute.
    """

    figure: Figure
    this: Sequence[float]
    other: Sequence[float]

    @property
    def ratios(self) -> list[float]:
        """This tree's value over the other commit's, of each round."""
        return [a / b for a, b in zip(self.this, self.other, strict=True)]

    @property
    def ratio(self) -> float:
        """The median of ``ratios``."""
        return median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        """The least and the most of ``ratios``."""
        return min(self.ratios), max(self.ratios)

    def verdict(self, margin: float) -> str:
        """``worse`` or ``better`` if the ratio is beyond ``margin`` and all rounds lie on that side
        of 1; ``unclear`` if it is beyond and they do not; else ``same``. The margin is the same
        factor in both directions: 0.03 means 1.03 and 1 / 1.03.
        """
        low, high = self.spread
        if 1 / (1 + margin) <= self.ratio <= 1 + margin:
            return "same"
        if low <= 1 <= high:
            return "unclear"
        return "better" if (self.ratio > 1) == self.figure.more_is_better else "worse"


@dataclass(frozen=True)
class Absence:
    """A figure that could not be compared: the reason by the name of each side that lacks it."""

    figure: Figure
    reasons: Mapping[str, str]

    @property
    def is_loss(self) -> bool:
        """Whether only this tree lacks the figure: the other commit has it."""
        return list(self.reasons) == ["this"]

    def __str__(self) -> str:
        if len(set(self.reasons.values())) == 1 and len(self.reasons) > 1:
            return f"not there on both sides: {next(iter(self.reasons.values()))}"
        return "; ".join(f"not there on {side}: {why}" for side, why in self.reasons.items())


Row = Comparison | Absence


def decision(rows: Sequence[Row], margin: float) -> tuple[int, str]:
    """The exit code, and the reason in words."""
    bad = [
        row.figure.title
        for row in rows
        if (row.is_loss if isinstance(row, Absence) else row.verdict(margin) == "worse")
    ]
    n_compared = sum(isinstance(row, Comparison) for row in rows)
    if bad:
        return 1, f"the gate is closed: worse, or no longer there: {', '.join(bad)}"
    if not n_compared:
        return 2, "nothing could be compared"
    return 0, f"no figure is worse; {n_compared} of {len(rows)} could be compared"


def print_table(rows: Sequence[Row], margin: float) -> None:
    """Print a line for each figure."""
    print(f"{'':20} {'this':>9} {'other':>9}  {'ratio':>6}  {'spread':16} verdict")
    for row in rows:
        title = f"{row.figure.title:20}"
        if isinstance(row, Absence):
            print(f"{title} {row}")
            continue
        low, high = row.spread
        values = [row.figure.cell(median(side)) for side in (row.this, row.other)]
        cells = f"{values[0]:>9} {values[1]:>9}  {row.ratio:6.3f}  {f'{low:.3f} to {high:.3f}':16}"
        print(f"{title} {cells} {row.verdict(margin)} ({row.figure.unit})")


def markdown_head() -> str:
    """The first two lines of the table in docs/performance.md."""
    titles = [f"{each.title} ({each.unit})" for each in FIGURES.values()]
    columns = ["date", "commit, against", "model, machine", *titles]
    return f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"


def markdown_row(rows: Sequence[Row], margin: float, day: str, sides: str, machine: str) -> str:
    """This run's line of that table. A figure that was not asked for has an empty cell, a worse one
    is bold.
    """
    found = {row.figure: row for row in rows}
    cells = [day, sides, machine]
    for figure in FIGURES.values():
        row = found.get(figure)
        if row is None:
            cells.append("")
        elif isinstance(row, Absence):
            cells.append("not there")
        else:
            low, high = row.spread
            text = f"{figure.cell(median(row.this))}: {row.ratio:.2f} ({low:.2f} to {high:.2f})"
            cells.append(f"**{text}**" if row.verdict(margin) == "worse" else text)
    return f"| {' | '.join(cells)} |"


# -- sides ----------------------------------------------------------------------------------------


class NotThere(Exception):
    """A side cannot do a figure; the text says why."""


@dataclass(frozen=True)
class Side:
    """One commit's sources, and its caches."""

    name: str  # "this" or "other"
    commit: str  # for people
    source: Path
    kernels: Path
    bytecode: Path

    def variables(self) -> dict[str, str]:
        """Environment variables of its processes, in place of this one's."""
        return {
            "PYTHONPATH": str(self.source),
            "PYTHONPYCACHEPREFIX": str(self.bytecode),
            "PYTHONDONTWRITEBYTECODE": "",  # as if not set
            "PYTHONHASHSEED": "0",  # counts of instructions depend on it
            "TREADLE_CACHE": str(self.kernels),
        }

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command; raise NotThere with its complaint if it fails."""
        try:
            done = subprocess.run(
                command,
                env=os.environ | self.variables(),
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
            )
        except subprocess.TimeoutExpired as error:
            raise NotThere(f"not ended after {PATIENCE_S} s") from error
        if done.returncode:
            raise NotThere(complaint(done.stderr) or f"exit code {done.returncode}")
        return done

    def treadle(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command of treadle."""
        return self.run(sys.executable, "-m", "treadle", *words)

    def check(self) -> None:
        """Raise NotThere unless this side's processes import its sources."""
        found = self.run(sys.executable, "-c", "import treadle; print(treadle.__file__)")
        path = Path(last_line(found.stdout)).resolve()
        if not path.is_relative_to(self.source.resolve()):
            raise NotThere(f"{path} was imported, expected a file in {self.source}")


def last_line(text: str) -> str:
    """The last line that is not empty."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def complaint(text: str) -> str:
    """The last line that names an error, or else the last line."""
    errors = [line.strip() for line in text.splitlines() if "error" in line.lower()]
    return errors[-1] if errors else last_line(text)


def git(*words: str) -> str:
    """What git says in this repository; raises CalledProcessError."""
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit_to_compare(named: str | None) -> str:
    """The hash of the commit that was named, or of the last tag. Raises ValueError, in plain words,
    if there is no such commit, or nothing is named and there is no tag.
    """
    if named is None:
        try:
            named = git("describe", "--tags", "--abbrev=0")
        except subprocess.CalledProcessError as error:
            why = last_line(error.stderr)
            what = f"no tag to compare with ({why}): name a commit, such as --against HEAD~1"
            raise ValueError(what) from error
    try:
        return git("rev-parse", "--verify", "--quiet", f"{named}^{{commit}}")
    except subprocess.CalledProcessError as error:
        raise ValueError(f"--against {named}: there is no such commit") from error


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A worktree with ``commit`` in a temporary folder; it is removed however the block ends.
    Raises NotThere if git cannot make one.
    """
    with tempfile.TemporaryDirectory(prefix="treadle-gate-") as folder:
        tree = Path(folder) / "tree"
        try:
            try:
                git("worktree", "add", "--quiet", "--detach", str(tree), commit)
            except subprocess.CalledProcessError as error:
                raise NotThere(f"git checked out no {commit}: {error.stderr.strip()}") from error
            yield tree
        finally:
            command = ["git", "-C", str(ROOT), "worktree", "remove", "--force", str(tree)]
            subprocess.run(command, check=False, capture_output=True)


# -- measurements ---------------------------------------------------------------------------------


@dataclass
class Work:
    """The work that both sides are given."""

    model: Path
    threads: int
    repeats: int  # in one process; the median counts
    folder: Path  # for files of this run
    n_asked: Iterator[int] = field(default_factory=count)  # prompts for servers so far

    def start(self, *more: str) -> list[str]:
        """The arguments of a start that writes one token."""
        return ["run", str(self.model), "hello", "-n", "1", *more]


# What one process of a side measures: a value or what prevented it, by figure.
Measurement = Callable[[Side, Work, Sequence[str]], Mapping[str, float | str]]


def speeds_command(work: Work, figures: Sequence[str], repeats: int) -> list[str]:
    """The command of ``bench/gate_speeds.py``."""
    program = [sys.executable, str(Path(__file__).with_name("gate_speeds.py")), str(work.model)]
    options = ["--threads", str(work.threads), "--repeats", str(repeats)]
    return [*program, *options, "--figures", ",".join(figures)]


def speeds(side: Side, work: Work, figures: Sequence[str]) -> Mapping[str, float | str]:
    """One process that reads prompts and writes texts."""
    done = side.run(*speeds_command(work, figures, work.repeats))
    found: dict[str, float | str] = json.loads(last_line(done.stdout))
    return found


def served(side: Side, work: Work, figures: Sequence[str]) -> Mapping[str, float | str]:
    """A server, started for this measurement."""
    from serve import started

    command = [sys.executable, "-m", "treadle", "serve", str(work.model), "--no-log"]
    command += ["-t", str(work.threads), "-c", str(SERVED_CONTEXT), "--sequences", str(N_STREAMS)]
    name = f"gate-{side.name}"
    try:
        with started(name, command, side.variables()) as server:
            return dict.fromkeys(figures, asyncio.run(served_rate(server, work)))
    except SystemExit as error:  # it did not start
        said = Path(f"/tmp/bench-serve-{name}.log").read_text("utf-8", "replace")
        raise NotThere(complaint(said) or str(error)) from error
    except (OSError, ValueError, KeyError) as error:  # it did not answer as one does
        raise NotThere(f"a call failed: {error!r}") from error


async def served_rate(server: Server, work: Work) -> float:
    """Tokens per second of streams that ask again as soon as they have their answer."""
    from serve import Stream, ask

    text = TEXT.read_text("utf-8")

    async def answer(n_tokens: int) -> int:
        """The tokens of an answer. No two prompts begin alike."""
        start = next(work.n_asked) * SERVED_STRIDE % (len(text) - SERVED_CHARS)
        prompt = text[start : start + SERVED_CHARS]
        stream = await ask(server, prompt, n_tokens, Stream(0), logit_bias={})
        n_written = int(stream.timings()["predicted_n"])
        if n_written != n_tokens:
            raise ValueError(f"{n_written} tokens, expected {n_tokens}")
        return n_written

    async def stream() -> int:
        return sum([await answer(N_SERVED) for _ in range(work.repeats)])

    await asyncio.gather(*(answer(4) for _ in range(N_STREAMS)))
    began = time.perf_counter()
    n_written = sum(await asyncio.gather(*(stream() for _ in range(N_STREAMS))))
    return n_written / (time.perf_counter() - began)


def start_s(side: Side, work: Work, kernels: str, repeats: int) -> float:
    """Median seconds of whole processes that write one token."""
    from startup import process_s  # type: ignore[import-not-found]

    options = ("-t", str(work.threads))
    args = (str(work.model), str(side.bytecode), "hello", kernels)
    wall_s: list[float] = []
    try:
        for _ in range(repeats):
            wall_s.append(process_s(*args, options=options, variables=side.variables())[0])
    except subprocess.CalledProcessError as error:
        raise NotThere(complaint(error.stderr) or str(error)) from error
    return median(wall_s)


def warm(side: Side, work: Work, figures: Sequence[str]) -> Mapping[str, float | str]:
    """Starts with kernels and bytecode in their caches."""
    return dict.fromkeys(figures, start_s(side, work, str(side.kernels), work.repeats))


def cold(side: Side, work: Work, figures: Sequence[str]) -> Mapping[str, float | str]:
    """One start with an empty kernel cache."""
    with tempfile.TemporaryDirectory(dir=work.folder) as kernels:
        return dict.fromkeys(figures, start_s(side, work, kernels, 1))


def instructions(side: Side, work: Work, figures: Sequence[str]) -> Mapping[str, float | str]:
    """The instructions of a warm start in one thread. Valgrind's processor may have fewer
    instructions than the machine's, so its facts and kernels have a cache of their own, which the
    turn that is not counted fills.
    """
    if shutil.which("valgrind") is None:
        raise NotThere("there is no valgrind")
    start = [sys.executable, "-m", "treadle", *work.start("-t", "1")]
    side = replace(side, kernels=side.kernels.with_name(f"{side.kernels.name}-counted"))
    done = side.run("valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", *start)
    return dict.fromkeys(figures, collected(done.stderr) / 1e6)


def collected(said: str) -> int:
    """The count of instructions in what callgrind says."""
    for line in said.splitlines():
        before, found, number = line.partition("Collected :")
        if found and before.startswith("=="):
            return int(number)
    raise NotThere(f"callgrind said no count: {last_line(said)}")


def picture(side: Side, work: Work, figures: Sequence[str]) -> Mapping[str, float | str]:
    """A picture through a tower, by ``treadle bench --image``."""
    tower = work.folder / "tower.gguf"
    text = work.folder / "text.gguf"
    side_px = write_picture_models(tower, text)
    words = ["bench", str(text), "--mmproj", str(tower), "--image", f"{side_px}x{side_px}"]
    words += ["-p", "0", "-n", "0", "-r", str(work.repeats), "-t", str(work.threads), "--json"]
    (result,) = json.loads(side.treadle(*words).stdout)
    return dict.fromkeys(figures, result["picture"]["seconds"])


def write_picture_models(tower: Path, text: Path) -> int:
    """Write a tower of random weights, and a model of text that reads its rows, unless they are
    there. Return the pixels of a side of the tower's picture.
    """
    from pictures import N_OUT, SHAPES, write_tower  # type: ignore[import-not-found]
    from random_model import Shape, write  # type: ignore[import-not-found]

    from treadle.formats import by_name

    shape = replace(SHAPES[TOWER], n_layer=TOWER_LAYERS)
    if not text.exists():
        write_tower(shape, by_name("F16"), tower)
        window = (("attention.sliding_window", 512),)
        reader = Shape("gemma3", 1, N_OUT, 256, 8, 8, 256, 1024, 1024, True, window)
        write(reader, by_name("Q8_0"), str(text))
    n_pixels: int = shape.picture
    return n_pixels


def memory(side: Side, work: Work, figures: Sequence[str]) -> Mapping[str, float | str]:
    """The most anonymous memory of the process of ``speeds``, in MB."""
    if not Path("/proc/self/status").exists():
        raise NotThere("private memory is read from Linux's /proc")
    child = subprocess.Popen(
        speeds_command(work, ("prompt", "text", "eight"), 1),
        env=os.environ | side.variables(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    most = 0
    try:
        while child.poll() is None:
            most = max(most, anonymous_kib(child.pid))
            time.sleep(SAMPLING_S)
        said, _ = child.communicate()
    finally:
        child.kill()
        child.wait()
    if child.returncode:
        raise NotThere(f"the process ended with code {child.returncode}")
    failed = [value for value in json.loads(last_line(said)).values() if isinstance(value, str)]
    if failed:
        raise NotThere(failed[0])
    return dict.fromkeys(figures, most * 1024 / 1e6)


def anonymous_kib(pid: int) -> int:
    """KiB of a process that belong to no file; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text("utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0)


# Figures that one process gives, and how it is measured.
MEASUREMENTS: Mapping[tuple[str, ...], Measurement] = {
    ("prompt", "text", "eight"): speeds,
    ("served",): served,
    ("warm",): warm,
    ("instructions",): instructions,
    ("cold",): cold,
    ("picture",): picture,
    ("memory",): memory,
}
COUNTED = {"instructions"}  # nearly exact and slow: a few rounds are enough


# -- turns ----------------------------------------------------------------------------------------


def attempt(
    way: Measurement, side: Side, work: Work, names: Sequence[str]
) -> Mapping[str, float | str]:
    """The values of one process, or the reason why there are none, by figure."""
    try:
        return way(side, work, names)
    except NotThere as error:
        return dict.fromkeys(names, str(error))


def compare(
    way: Measurement, sides: Sequence[Side], work: Work, names: Sequence[str], rounds: int
) -> list[Row]:
    """Measure ``names`` in turns, A B B A and so on; a row for each. What a side cannot do, be it
    in a later round, is left out of the rounds that follow.
    """
    values: dict[str, dict[str, list[float]]] = {
        name: {side.name: [] for side in sides} for name in names
    }
    reasons: dict[str, dict[str, str]] = {name: {} for name in names}
    for turn in range(rounds + 1):  # the first one fills caches
        for side in sides if turn % 2 else sides[::-1]:
            able = [name for name in names if turn == 0 or not reasons[name]]
            found = attempt(way, side, work, able) if able else {}
            for name, value in found.items():
                if isinstance(value, str):
                    reasons[name][side.name] = value
                elif turn:
                    values[name][side.name].append(value)
        told = {name: [each[-1] for each in values[name].values() if each] for name in names}
        print(f"round {turn} of {rounds}: {told}", file=sys.stderr)
    return [
        Absence(FIGURES[name], reasons[name])
        if reasons[name]
        else Comparison(FIGURES[name], values[name]["this"], values[name]["other"])
        for name in names
    ]


def run_gate(
    sides: Sequence[Side],
    work: Work,
    wanted: Sequence[str],
    rounds: int,
    measurements: Mapping[tuple[str, ...], Measurement] = MEASUREMENTS,
) -> list[Row]:
    """The rows of all wanted figures, in the order of ``measurements``."""
    rows: list[Row] = []
    for names, way in measurements.items():
        chosen = [name for name in names if name in wanted]
        if chosen:
            few = COUNTED.issuperset(chosen)
            rows += compare(way, sides, work, chosen, max(1, rounds // 4) if few else rounds)
    return rows


# -- the machine ----------------------------------------------------------------------------------


def load_warning(before: float | None, after: float | None, threads: int) -> str | None:
    """A warning if other programs ran: before the start anything above an idle machine's load, at
    the end more than the gate's own threads and its clients.
    """
    said = []
    if before is not None and before > IDLE_LOAD:
        said.append(f"{before:.2f} at the start, an idle machine has less than {IDLE_LOAD}")
    if after is not None and after > threads + 1 + IDLE_LOAD:
        said.append(f"{after:.2f} at the end, the gate makes {threads + 1} at most")
    if not said:
        return None
    return f"other programs run (load average {'; '.join(said)}): these figures tell little"


def chance_note(rounds: int) -> str | None:
    """A note if the rounds are so few that equal commits often have all of them on one side."""
    chance = 2.0 ** (1 - rounds)
    if chance <= CHANCE:
        return None
    return f"{rounds} rounds decide little: equal commits have all on one side in {chance:.0%}"


# -- the command ----------------------------------------------------------------------------------


def figures_of(text: str) -> list[str]:
    """Parse ``prompt,text``: names of FIGURES, and those that are measured with them."""
    names: list[str] = []
    for name in text.split(","):
        if name not in FIGURES:
            what = f"'{name}' is no figure: they are {', '.join(FIGURES)}"
            raise argparse.ArgumentTypeError(what)
        names += [name, *ALSO.get(name, ())]
    return list(dict.fromkeys(names))


def at_least(least: int) -> Callable[[str], int]:
    """Return a parser of whole numbers."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"'{text}': expected a whole number, {least} or more")
        return int(text)

    return number


def percentage(text: str) -> float:
    """Parse ``3`` as 0.03."""
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value < 100:
        what = f"'{text}': expected a number of per cent, 0 or more and below 100"
        raise argparse.ArgumentTypeError(what)
    return value / 100


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--against", metavar="COMMIT", help="default: the last tag")
    made.add_argument("--model", type=Path, default=DEMO, metavar="FILE", help="default: packaged")
    made.add_argument("--figures", type=figures_of, default=list(FIGURES), metavar="NAMES")
    made.add_argument("--threads", type=at_least(1), help="default: as many as treadle would take")
    made.add_argument("--rounds", type=at_least(2), help="default 8, or 2 with --quick")
    made.add_argument(
        "--margin", type=percentage, default=MARGIN, metavar="PERCENT", help="default 3"
    )
    made.add_argument("--quick", action="store_true", help="few rounds: shows that the gate works")
    made.add_argument("--markdown", action="store_true", help="the row for docs/performance.md")
    return made


def own_commit() -> str:
    """The checked out commit's short name, with a + if files differ from it."""
    changed = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def main(words: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    options = parser()
    given: Any = options.parse_args(words)
    try:
        commit = commit_to_compare(given.against)
    except ValueError as error:
        options.error(str(error))
    if not given.model.is_file():
        options.error(f"--model {given.model}: there is no such file")
    # This tree's treadle and scripts write models and read the machine's facts.
    sys.path[:0] = [str(ROOT / "src"), str(Path(__file__).parent)]
    from treadle.machine.topology import cpu_name, load_average, usable_threads
    from treadle.system import SYSTEM

    rounds = given.rounds or (2 if given.quick else 8)
    threads = given.threads or usable_threads()[0]
    before = load_average()
    n_cores = os.cpu_count() or 1
    machine = f"{cpu_name()}, {n_cores} processors, {platform.system()}"
    names = [own_commit(), git("rev-parse", "--short", commit)]
    print(f"this: {names[0]}, other: {names[1]}, {given.model.name}, {threads} threads")
    print(f"{machine}, Python {platform.python_version()}, load average {before} at the start")
    caches = SYSTEM.cache_folder() / "treadle-gate"
    try:
        with checked_out(commit) as tree:
            folder = tree.parent
            sides = [
                Side(name, label, root / "src", caches / name, folder / f"bytecode-{name}")
                for name, label, root in zip(("this", "other"), names, (ROOT, tree), strict=True)
            ]
            for side in sides:
                side.kernels.mkdir(mode=0o700, parents=True, exist_ok=True)
                side.check()
            work = Work(given.model.resolve(), threads, 1 if given.quick else 3, folder)
            rows = run_gate(sides, work, given.figures, rounds)
    except NotThere as error:
        options.error(f"nothing was measured: {error}")
    after = load_average()
    print()
    print_table(rows, given.margin)
    print(f"\nload average {after} at the end, {rounds} rounds, margin {given.margin:.1%}")
    for warning in (load_warning(before, after, threads), chance_note(rounds)):
        if warning:
            print(f"warning: {warning}")
    if given.markdown:
        kind = f"{given.model.name}, {cpu_name()}, {threads} threads"
        day = date.today().isoformat()
        row = markdown_row(rows, given.margin, day, f"{names[0]}, {names[1]}", kind)
        print(f"\n{markdown_head()}\n{row}")
    code, text = decision(rows, given.margin)
    print(f"\n{text}")
    return code


def end(signal_number: int, frame: object) -> None:
    """End as by Ctrl-C, so that the worktree is removed."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, end)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nstopped; the other commit's worktree is removed", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
