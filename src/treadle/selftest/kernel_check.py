"""Compares every kernel of a plan with its numpy twin.

A run of the plan is stopped before a step, the step's inputs are copied, the step runs, and its
twin computes from the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.kernels.attention.indexer import IndexStore
from treadle.kernels.attention.latent_steps import LatentStore
from treadle.kernels.attention.rope import RopeStore
from treadle.kernels.attention.row_pages import RowStore
from treadle.kernels.moe.page_in_experts import Fetch
from treadle.kernels.spec import f32_values
from treadle.plan.plan import Buffer, Const
from treadle.selftest.twin_results import WRITTEN_CONSTANTS, Compared, Cut, Evidence, compare

if TYPE_CHECKING:
    from treadle.devices.protocol import Device, DeviceProgram
    from treadle.plan.plan import DeviceMemory, Plan, Step

Note = Callable[[str], object]
NO_RESULT = (Fetch,)  # kernels that advise the system, and compute nothing
STORES = (RopeStore, LatentStore, IndexStore, RowStore)  # kernels that write to pages


@dataclass(frozen=True)
class WrongValue:
    """One wrong value of a kernel: its place in words, the value found, and the value expected,
    which is the twin's; they may differ by ``allowed``.
    """

    where: str
    found: float
    expected: float
    allowed: float


@dataclass(frozen=True)
class KernelCheck:
    """The comparison of one step's kernel with its numpy twin.

    kernel: the spec's name, which has its shape. label: the step of the plan. where: the batch.
    n_values: values compared; n_cut: values that the twin did not compute, to save time.
    error: the largest ratio of an error to its derived tolerance; at most 1 if all are right.
    off, allowed: the error of that largest ratio, and its tolerance.
    seconds: the step's time in the run that was compared.
    """

    kernel: str
    label: str
    where: str
    n_values: int
    n_cut: int
    error: float
    off: float
    allowed: float
    n_wrong: int
    first_wrong: WrongValue | None
    seconds: float

    @property
    def passed(self) -> bool:
        return self.n_wrong == 0


@dataclass(frozen=True)
class PlanRun:
    """A plan with a batch laid out, and the objects that run it step by step on its device.

    ``run``: the run's inputs. ``name``: the batch, in words. ``before``: a function that is called
    once before the first step, such as to write rows of pictures.
    """

    device: Device
    plan: Plan
    program: DeviceProgram
    arena: DeviceMemory
    run: Any
    name: str
    before: Callable[[], object] | None = None


def signature(step: Step) -> tuple[Any, ...]:
    """Return a key of a step's kernel and the sizes among its arguments. Steps with equal keys do
    the same work on other data, so one of them is checked.
    """
    sizes = []
    for name, arg in sorted(step.args.items()):
        if isinstance(arg, list):
            sizes += [(name, *(a for a in arg if isinstance(a, int)))]
        elif isinstance(arg, int) and name not in ("layer_off", "state_off", "first"):
            sizes += [(name, arg)]
    return step.spec.name, tuple(sizes)


def check_steps(
    of: PlanRun,
    wanted: Callable[[Step], bool],
    cut: Cut | None = None,
    note: Note | None = None,
) -> Iterator[KernelCheck]:
    """Run a plan up to the last step for which ``wanted`` is true, and yield each such step's
    comparison with its twin. The caller holds what the run needs (an engine's lock, pages).
    ``cut``: limits of the twins' work. ``note`` is called before each such step runs, with its
    kernel's name and place.
    """
    cut = cut or Cut()
    lives = of.plan.lifetimes()
    if of.before is not None:
        of.before()
    done = 0
    for i, step in enumerate(of.plan.steps):
        if isinstance(step.spec, NO_RESULT) or not wanted(step):
            continue
        if done < i:
            of.device.run(of.program, range(done, i))
        done = i + 1
        for buffer in set(step.writes) - set(step.reads):
            if lives[buffer][0] == i:  # no earlier step has written a part of it
                poison = np.full(buffer.n_bytes, 0xFF, np.uint8)
                of.arena.write(of.plan.offsets[buffer], poison)
        evidence = Evidence(step, of.run, of.device.isa, _buffers(of, step), _changing(step))
        times: list[float] = []
        if note is not None:
            note(f"{step.kernel} ({step.label}, {of.name})")
        of.device.run(of.program, range(i, i + 1), times=times)
        evidence.finish(_buffers(of, step, written=True), _changing(step))
        with np.errstate(all="ignore"):  # what an earlier fault has left
            result = summary(step, compare(evidence, cut), of.name, sum(times))
        if result.n_values:  # a batch may have nothing for a step, such as no parts to merge
            yield result


def _buffers(of: PlanRun, step: Step, *, written: bool = False) -> dict[Buffer, np.ndarray]:
    """Return copies of the bytes of the buffers that a step reads, or with ``written`` of those
    that it writes.
    """
    buffers = set(step.writes) if written else {*step.reads}
    read = of.arena.read
    return {b: read(of.plan.offsets[b], b.n_bytes).copy() for b in buffers}


def _changing(step: Step) -> dict[str, np.ndarray]:
    """Return copies of the bytes of the constants that a step changes, by argument name: states,
    and the pages of steps that store keys and values.
    """
    found = {}
    for name in WRITTEN_CONSTANTS:
        arg = step.args.get(name)
        if isinstance(arg, Const) and (name != "pool" or isinstance(step.spec, STORES)):
            found[name] = arg.memory.read(0, arg.memory.n_bytes).copy()
    return found


def summary(step: Step, compared: Iterator[Compared], where: str, seconds: float) -> KernelCheck:
    """Return a step's result from the comparisons of its arrays: counts, the largest error, the
    first wrong value. ``where``: the batch; ``seconds``: the step's time.
    """
    n_values = n_cut = n_wrong = 0
    worst = (0.0, 0.0, 0.0)
    first: WrongValue | None = None
    for each in compared:
        n_cut += each.n_cut
        n_compared = int(each.compared.sum())
        if not n_compared:
            continue
        excess = each.excess()
        at = np.unravel_index(int(excess.argmax()), excess.shape)
        share = float(excess[at])
        n_values += n_compared
        if n_values == n_compared or share > worst[0]:
            off = abs(float(each.actual[at]) - float(each.expected[at]))
            worst = share, off, float(each.tolerance[at])
        wrong = excess > 1
        n_wrong += int(wrong.sum())
        if first is None and wrong.any():
            place = tuple(int(i) for i in np.argwhere(wrong)[0])
            values = (each.actual[place], each.expected[place], each.tolerance[place])
            first = WrongValue(each.place(place), *map(float, values))
    return KernelCheck(
        step.kernel, step.label, where, n_values, n_cut, *worst, n_wrong, first, seconds
    )


class Selection:
    """Chooses the steps to check: the first step of each ``signature`` in each batch. The caller
    sets ``batch``, the key of the current one.
    """

    def __init__(self) -> None:
        self._seen: set[tuple[Any, ...]] = set()
        self.batch: object = None

    def __call__(self, step: Step) -> bool:
        """Return whether no step with the signature of ``step`` was chosen in this batch before,
        and remember it.
        """
        key = self.batch, *signature(step)
        if key in self._seen:
            return False
        self._seen.add(key)
        return True


def run_twins(
    plan: Plan,
    run: Any,
    arena: np.ndarray,
    constants: Mapping[str, np.ndarray],
    progress: Callable[[int], object] | None = None,
) -> None:
    """Run the numpy twins of all steps of a plan on ``arena``, uint8 memory of the plan's buffers;
    ``run``: the run's inputs. Matrix products are made in parts, so that no large matrix is
    unpacked at once. ``constants``: arrays of KV pools and states by the constant's name, which the
    twins change. ``progress`` is called with the number of each step that is done.
    """
    from treadle.kernels.matmul.gated import Gated
    from treadle.kernels.matmul.matmul import Matmul
    from treadle.selftest.twin_results import products

    most = 1 << 23  # weights unpacked at once
    for i, step in enumerate(plan):
        spec = step.spec
        args = plan.arrays(step, arena, lambda c: constants.get(c.name, c.array))
        if isinstance(spec, Matmul) and not isinstance(spec, Gated):
            y = args.y.reshape(-1, args.stride)
            residual = f32_values(args.residual).reshape(y.shape) if spec.residual else None
            size = max(1, most // spec.k)
            for first in range(0, max(args.rows), size):

                def choose(m: int, first: int = first, size: int = size) -> np.ndarray:
                    return np.arange(first, min(first + size, m))

                for part in products(spec, args, run, choose, residual, bounded=False):
                    column = args.column[part.segment]
                    column += part.head * args.y_pitch if spec.heads else 0
                    y[np.ix_(part.to, column + part.chosen)] = part.values
        else:
            with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
                spec.run_ref(args, run)
        if progress is not None:
            progress(i)
