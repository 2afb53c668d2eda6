"""The device protocol: memory, weights, copy, plan, ready and run.

The engine, batches and the KV cache use a device only through it. They know no addresses: memory is
an object, and a place in it an offset. ``memory``, ``weights`` and ``copy`` belong to ``Storage``
(``plan/plan.py``). ``plan`` is the device's own lowering of a graph; ``ready`` and ``run`` take its
plans.

``Device`` checks the arguments once for all devices; a subclass implements ``_plan``, ``_run`` and
``_copy`` for arguments that are valid.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from treadle.base.fast_classes import dataclass
from treadle.plan.plan import DeviceMemory, Plan, Storage

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.jit.kernel import CompileStats
    from treadle.kernels.matmul.select import TunedTable
    from treadle.kvcache.cache import KVCache
    from treadle.models.config import Config
    from treadle.plan.lowering.ops import PlanOps
    from treadle.plan.lowering.steps import Steps
    from treadle.plan.weights import Weights


@dataclass(frozen=True, eq=False)
class PlanRequest:
    """The arguments of ``Device.plan``: a model, its cache, and the limits of a batch; see
    there.
    """

    config: Config
    weights: Weights
    cache: KVCache
    n_tokens: int
    n_outputs: int
    deterministic: bool
    output: str
    int16: bool = False
    lowering: Callable[[Steps], PlanOps] | None = None

    def build(
        self, isa: Isa, n_threads: int, table: TunedTable | None = None, *, scarce: bool = False
    ) -> Plan:
        """Lower the graph for the instruction set ``isa``, splitting steps into items for
        ``n_threads``; see ``build_plan``. ``table``: tuned kernel parameters, None for the shipped
        ones. ``scarce``: memory is too small for the model's files.
        """
        from treadle.kernels.matmul.select import SHIPPED  # a stored plan needs no kernel's module
        from treadle.plan.lowering.ops import build_plan

        return build_plan(
            self.config,
            self.weights,
            self.cache,
            isa,
            self.n_tokens,
            self.n_outputs,
            n_threads=n_threads,
            deterministic=self.deterministic,
            table=table or SHIPPED,
            output=self.output,
            scarce=scarce,
            int16=self.int16,
            lowering=self.lowering,
        )


class DeviceProgram(Protocol):
    """The result of ``Device.ready``: a plan's steps, with kernels and memory bound to them."""

    @property
    def n_steps(self) -> int:
        """The number of the plan's steps."""


class Device(Storage):
    """A kind of hardware that plans run on; ``devices/cpu/device.py`` is the default.

    isa: the instruction set that its kernels are compiled for. n_threads: host threads; on the CPU,
    also the threads that steps are split into items for. kernels: statistics of the kernels that
    ``ready`` has compiled. takes_media: whether it runs the encoders of pictures and sound, and
    batches with their rows.
    """

    isa: Isa
    n_threads: int
    kernels: CompileStats
    takes_media: ClassVar[bool] = False

    @property
    @abstractmethod
    def variant(self) -> str:
        """A string that names everything besides the plan and its inputs that affects the bits of
        results: the device, its instruction set, sources and tuned parameters.
        """

    def batch_sizes(self, *, floats: bool) -> tuple[int, ...]:
        """Return the batch sizes, in tokens, that have plans of their own besides the plan for many
        tokens. ``floats``: most of the model's weights are floats.
        """
        from treadle.kernels.matmul.sizes import batch_sizes  # the CPU may know them without it

        return batch_sizes(self.isa, floats)

    def copy(self, memory: DeviceMemory, to: int, start: int, n_bytes: int) -> None:
        """Copy ``n_bytes`` from offset ``start`` to offset ``to`` within one memory of this device;
        see ``Storage.copy``.
        """
        memory.check(start, n_bytes)
        memory.check(to, n_bytes)
        self._copy(memory, to, start, n_bytes)

    def plan(
        self,
        config: Config,
        weights: Weights,
        cache: KVCache,
        n_tokens: int,
        n_outputs: int,
        *,
        deterministic: bool = False,
        output: str = "logits",
        int16: bool = False,
        lowering: Callable[[Steps], PlanOps] | None = None,
    ) -> Plan:
        """Lower the model's graph for batches of up to ``n_tokens`` tokens, of which up to
        ``n_outputs`` need the graph's output called ``output``.

        ``deterministic``: results are bit-identical whatever else is in a batch. ``int16``: for
        large batches, F16 matrices and attention (over pages of f32 too) may be multiplied as
        16-bit whole numbers with a scale for each 256 values or each head, if that is faster.
        ``lowering``: another lowering than the usual one, for plans with hooks; a device does not
        store these. ``Plan.inputs`` lists the inputs of a run. Raises UnsupportedError, with the
        step's label, for an op that the device does not support.
        """
        assert min(n_tokens, n_outputs) > 0, (n_tokens, n_outputs)
        limits = n_tokens, n_outputs
        return self._plan(
            PlanRequest(config, weights, cache, *limits, deterministic, output, int16, lowering)
        )

    def compile_ahead(self, plan: Plan, *, later: bool = False) -> bool:
        """Begin to compile a plan's kernels in other processes, for ``ready`` to use; if ``later``,
        after the kernels of all other calls. Return whether it has begun: False if no kernel is
        missing, or the device cannot compile ahead.
        """
        return False

    @abstractmethod
    def ready(self, plan: Plan, arena: DeviceMemory, inputs: DeviceMemory) -> DeviceProgram:
        """Compile a plan's kernels and bind their arguments to memory; return the program for
        ``run``.

        ``arena``: memory of ``plan.arena_bytes``, with buffers at the plan's offsets; ``inputs``:
        memory of the run's inputs. Raises CompileError and CacheError.
        """

    def run(
        self,
        program: DeviceProgram,
        steps: range | None = None,
        *,
        times: list[float] | None = None,
        stoppable: bool = False,
    ) -> bool:
        """Run a plan's steps, all or a range, and wait until they are done. Return True, or False
        if a signal stopped the run (only if ``stoppable``); its results are then invalid.

        ``times``: a list to which each step's seconds are appended; None: they are not measured.
        """
        n = program.n_steps
        if steps is None:
            steps = range(n)
        assert 0 <= steps.start <= steps.stop <= n, (steps, n)
        return self._run(program, steps, times, stoppable)

    def n_items(self, program: DeviceProgram, step: int) -> int:
        """Return the number of items of a step in the next run; 1 if ``run_items`` cannot divide
        the step.
        """
        return 1

    def kernel_of(self, program: DeviceProgram, step: int) -> int:
        """Return a number that is equal for two steps of the program if they have the same kernel.
        The default is the step's index: no steps are known to be alike.
        """
        return step

    def run_items(self, program: DeviceProgram, step: int, items: range) -> int:
        """Run some items of one step; return the number of the item that follows them: more than
        ``items.stop`` if the step's items run in groups.

        The results are those of ``run``. All items of a step must be run before the next step.
        """
        n_items = self.n_items(program, step)
        assert 0 <= items.start < items.stop <= n_items, (items, n_items)
        return self._run_items(program, step, items)

    def _run_items(self, program: Any, step: int, items: range) -> int:
        self._run(program, range(step, step + 1), None, False)
        return 1

    @abstractmethod
    def close(self) -> None:
        """Stop the device; it must not be used afterwards."""

    @abstractmethod
    def _copy(self, memory: Any, to: int, start: int, n_bytes: int) -> None: ...

    @abstractmethod
    def _plan(self, request: PlanRequest) -> Plan: ...

    @abstractmethod
    def _run(
        self, program: Any, steps: range, times: list[float] | None, stoppable: bool
    ) -> bool: ...
