"""Fixtures that every test directory shares."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import tiers

ROOT = Path(__file__).resolve().parent.parent

# numpy's and torch's helpers spin while they wait, and matrices of tests are small: without them a
# third of the processor time of whole models is saved. Both read this as they are imported, which
# nothing has done yet.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

# A clock decides nothing: a busy machine may take any time for an example. The same examples each
# time, so that a run fails for what was changed; --hypothesis-profile=explore looks for new ones.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("explore"), derandomize=True)
settings.load_profile("same")

# Tests replace parts of the lowering, of which a stored plan knows nothing.
os.environ.setdefault("TREADLE_PLANS", "0")

# A shell lets what it starts in the background ignore Ctrl-C, and children would inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Of pytest-xdist's processes, which share the kernels that they compile.
WORKER = "PYTEST_XDIST_WORKER" in os.environ


def pytest_configure(config: pytest.Config) -> None:
    if getattr(config.option, "numprocesses", None) and "TREADLE_TEST_CACHE" not in os.environ:
        folder = TemporaryDirectory(prefix="treadle-tests-")
        config.add_cleanup(folder.cleanup)
        os.environ["TREADLE_TEST_CACHE"] = folder.name


def pytest_collection(session: pytest.Session) -> None:
    """Collecting makes a million objects that stay: nothing is gained by searching them for
    garbage, neither now nor in each of the tests.
    """
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Each of pytest-xdist's processes begins with another part of the folders. In a fresh clone
    every file of tests is compiled, which takes 20 s of processor time: the processes find what the
    others have compiled, where all would compile the same file at the same time.
    """
    report = yield
    if WORKER and collector.path == ROOT / "tests":
        n_workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        worker = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
        first = len(report.result) * worker // n_workers
        report.result = [*report.result[first:], *report.result[:first]]
    return report


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if tiers.tier() == "quick" and tiers.is_outside(collection_path) else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None]:
    """The same order in all processes, before others shuffle it; after them the tier's tests."""
    items.sort(key=lambda item: item.nodeid.partition("::")[0].split("/")[:2])
    yield
    if tiers.tier():
        select_tier(config, items)


def select_tier(config: pytest.Config, items: list[pytest.Item]) -> None:
    ids = [item.nodeid for item in items]
    slow = [
        item.get_closest_marker("slow") is not None
        or tiers.is_outside(item.path)
        or getattr(item, "originalname", "") in (tiers.heavy_names(item.path) or ())
        for item in items
    ]
    every = [item.get_closest_marker("every_case") is not None for item in items]
    first, rest = tiers.split(items, ids, slow, every)
    kept, dropped = (first, rest) if tiers.tier() == "quick" else (rest, first)
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept


def stored_plans() -> dict[str, str]:
    """The environment of a process that replaces no part of the lowering: it takes the plans that
    an earlier one has stored, as a user's does.
    """
    return {**os.environ, "TREADLE_PLANS": "1"}


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of real models and golden files beside the checkout; not part of the project."""
    folder = Path(os.environ.get("TREADLE_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        if os.environ.get("CI") == "true":
            pytest.fail(f"{folder} is absent under CI")
        pytest.skip(f"{folder} is absent: this test needs the shared models")
    return folder


@pytest.fixture(scope="session", autouse=True)
def one_kernel_cache(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """One for the whole run: no kernel is compiled twice, and the user's own stays untouched.

    TREADLE_TEST_CACHE names one to keep, for a quicker edit-and-test loop.
    """
    from tests.kernels.ahead import compiling

    own = os.environ.get("TREADLE_TEST_CACHE")
    folder = Path(own) if own else tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TREADLE_CACHE", str(folder))
        patch.setenv("TREADLE_TEST_CACHE", str(folder))
        patch.setenv("TREADLE_TUNE", "0")
        # Polls of a thread that waits for the next run: it would take a millisecond from the tests
        # of another process each time.
        patch.setattr("treadle.devices.cpu.thread_team.SPINS", 200)
        patch.setenv("HF_HUB_CACHE", str(folder / "hub"))  # a short name means none of the user's
        patch.delenv("TREADLE_MODELS", raising=False)
        patch.delenv("TREADLE_ISA", raising=False)
        patch.delenv("TREADLE_NO_COMPILE", raising=False)
        with nullcontext() if WORKER else compiling(request.session.items):
            yield folder


TABLES = {"treadle.formats": "FORMATS", "treadle.isa": "ROWS", "treadle.models.archs": "ARCHS"}
VARIABLES = ("TREADLE_", "XDG_", "HOME", "PATH", "PYTHONPATH", "TERM", "COLUMNS", "NO_COLOR")
SIGNALS = [signal.Signals[f"SIG{name}"] for name in ("INT", "TERM", "ALRM", "USR1", "USR2")]


def common_state() -> dict[str, object]:
    """What all tests of this process have in common, and a test may change for a while."""
    modules = {name: sys.modules.get(module) for module, name in TABLES.items()}
    return {
        "folder": os.getcwd(),
        "variables": {k: v for k, v in os.environ.items() if k.startswith(VARIABLES)},
        "handlers": [signal.getsignal(number) for number in SIGNALS],
        "timer": signal.getitimer(signal.ITIMER_REAL),
        **{name: set(getattr(module, name)) for name, module in modules.items() if module},
    }


@pytest.fixture(autouse=True)
def nothing_is_left(one_kernel_cache: Path) -> Iterator[None]:
    """A test leaves what others share as it was: they come in any order."""
    before = common_state()
    yield
    after = common_state()
    assert {name: after[name] for name in before} == before


@pytest.fixture(autouse=True)
def the_same_seeds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What draws without a seed draws the same in every run of a test: it never fails by chance."""
    drawn = random.Random(request.node.nodeid)
    monkeypatch.setattr("treadle.sampling.selection.any_seed", lambda: drawn.getrandbits(32))


@pytest.fixture
def own_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty kernel cache for one test: no kernel is linked, and no process that an earlier test
    has forked compiles one.
    """
    from treadle.jit import kernel

    kernel.end_compile_processes()
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "kernels"))
    monkeypatch.delenv("TREADLE_NO_COMPILE", raising=False)
    monkeypatch.setattr(kernel, "_linked", {})
    monkeypatch.setattr(kernel, "_compiled_elsewhere", {})
    kernel._warn.cache_clear()
    yield tmp_path / "kernels"
    kernel.end_compile_processes()


WriteTiny = Callable[..., Path]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> WriteTiny:
    """``tiny(arch, fmt, **sizes)``: the path of a small random model; see ``tests/tiny.py``."""
    from tests.tiny import write_model

    made: dict[object, Path] = {}
    folder = tmp_path_factory.mktemp("tiny")

    def write(arch: str = "llama", fmt: str = "F32", **sizes: Any) -> Path:
        key = repr((arch, fmt, sorted(sizes.items())))
        if key not in made:
            made[key] = folder / f"{arch}-{fmt}-{len(made)}.gguf"
            write_model(made[key], arch, fmt, **sizes)
        return made[key]

    return write


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The speed of caches will do: memory's is read in gigabytes."""
    monkeypatch.setattr("treadle.profiling.peaks.BUFFER_BYTES", (8 << 20, 8 << 20))
