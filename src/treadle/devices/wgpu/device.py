"""The wgpu device: a GPU through WebGPU (Metal, Vulkan or DX12, as the ``wgpu`` package finds).

A plan is the CPU's lowering for the row of ``devices/wgpu/isa_row.py``; each step is one or more
shaders (``devices/wgpu/dispatch.py``). Pipelines and bindings are made once per plan. Commands are
encoded for each run, as WebGPU accepts a command buffer only once; so the number of workgroups can
follow the run's counts. A run is one submission.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.base.humanize import n_bytes as in_words
from treadle.devices.protocol import Device, PlanRequest
from treadle.devices.wgpu.dispatch import calls_of
from treadle.devices.wgpu.isa_row import WGSL
from treadle.devices.wgpu.memory import STORAGE, GpuMemory, GpuWeights
from treadle.devices.wgpu.shader import WORD, Dispatch, Groups
from treadle.errors import DeviceError, NoMemoryError
from treadle.jit.cache import hash_of_sources
from treadle.jit.kernel import CompileStats
from treadle.kernels.run_state import round_up, run_offset
from treadle.plan.plan import Buffer, Const, Plan

if TYPE_CHECKING:
    from treadle.jit.kernel import Progress

ARGS_BYTES = 256  # of a dispatch: WebGPU's alignment of a binding
N_QUERIES = 4096  # WebGPU's limit for a query set


class WgpuProgram:
    """A plan's dispatches: for each step its pipelines, bindings, and functions that return the
    numbers of workgroups.
    """

    def __init__(self, device: Wgpu, plan: Plan, arena: GpuMemory, inputs: GpuMemory) -> None:
        assert inputs.bytes is not None
        self.inputs, self._words = inputs, inputs.bytes.view(np.int64)
        self._offsets = plan.offsets
        steps = [(step, calls_of(step)) for step in plan.steps]
        n_calls = sum(len(calls) for _, calls in steps)
        table = np.zeros((max(1, n_calls), ARGS_BYTES // WORD), np.uint32)
        self._args = device.create(table.nbytes, "UNIFORM|COPY_DST")
        self.steps: list[list[tuple[Any, Any, Any]]] = []
        at = 0
        for done, (_, calls) in enumerate(steps):
            made = []
            for call in calls:
                values = [self._value(call.args[name]) for name in call.shader.args]
                table[at, : len(values)] = values
                pipeline, layout = device.pipeline(call)
                group = self._bind(device, layout, call, at, arena)
                made.append((pipeline, group, call.groups))
                at += 1
            self.steps.append(made)
            device.report_progress("compile", done, len(steps))
        self.n_steps = len(steps)
        device.report_progress("compile", len(steps), len(steps))
        device.gpu.queue.write_buffer(self._args, 0, table)

    def _value(self, arg: Any) -> int:
        """Return an argument of a dispatch as a word: a buffer's offset in the arena, in words, or
        an integer; for a pair of these, the sum.
        """
        if isinstance(arg, tuple):
            return self._value(arg[0]) + int(arg[1])
        return self._offsets[arg] // WORD if isinstance(arg, Buffer) else int(arg)

    def _bind(self, device: Wgpu, layout: Any, call: Dispatch, at: int, arena: GpuMemory) -> Any:
        shader = call.shader
        given = call.consts
        bound = [arena.buffer, self.inputs.buffer]
        for name in (*shader.reads, *shader.writes):
            const = given.get(name)
            if const is None:
                bound.append(device.unused[name in shader.writes])
            else:
                home: Any = const.memory if isinstance(const, Const) else const
                bound.append(home.buffer)
        args = {"buffer": self._args, "offset": ARGS_BYTES * at, "size": ARGS_BYTES}
        whole = [{"buffer": buffer, "offset": 0, "size": buffer.size} for buffer in bound]
        entries = [{"binding": i, "resource": given} for i, given in enumerate([args, *whole])]
        return device.gpu.create_bind_group(layout=layout, entries=entries)

    def count(self, name: str) -> int:
        """Return the count of RUN_STATE called ``name``, from the host's copy of the run's
        inputs.
        """
        return int(self._words[run_offset(name) // 8])


class Wgpu(Device):
    """The adapter that WebGPU chooses, as a device. ``progress``: called while shaders are
    compiled.

    Raises DeviceError if the package or an adapter is missing.
    """

    isa = WGSL
    n_threads = 1

    def __init__(self, progress: Progress | None = None) -> None:
        self._wgpu = _package()
        adapter = find_adapter(self._wgpu)
        limits = adapter.limits
        self.most = int(limits["max-storage-buffer-binding-size"]) // WORD * WORD
        self.most = min(self.most, int(limits["max-buffer-size"]) // WORD * WORD - WORD)
        self.name, self._kind = str(adapter.info["device"]), str(adapter.info["description"])
        wanted = "max-storage-buffer-binding-size", "max-buffer-size"
        self.stamps = "timestamp-query" in adapter.features
        self.gpu = adapter.request_device_sync(
            required_limits={name: limits[name] for name in wanted},
            required_features=["timestamp-query"] if self.stamps else [],
        )
        self.kernels = CompileStats()
        self._progress = progress
        self._pipelines: dict[str, tuple[Any, Any]] = {}
        self.unused = self.create(ARGS_BYTES), self.create(ARGS_BYTES)

    @property
    def variant(self) -> str:
        return f"{_source_hash()}\0{self.name}\0{self._kind}"

    def report_progress(self, what: str, done: int, total: int) -> None:
        """Report progress to the caller's function: ``done`` of ``total`` parts of ``what``."""
        if self._progress:
            self._progress(what, done, total)

    # -- memory -----------------------------------------------------------------------------------

    def create(self, n_bytes: int, usage: str = STORAGE) -> Any:
        """Create a zeroed buffer of at least ``n_bytes``, in whole words; ``usage``: WebGPU's
        flags. Raises NoMemoryError.
        """
        size = max(round_up(n_bytes, WORD), WORD)
        if usage == STORAGE and size > self.most + WORD:
            raise NoMemoryError(
                f"{self.name}: a buffer of {in_words(n_bytes)} exceeds the adapter's binding limit "
                f"of {in_words(self.most)}"
            )
        try:
            return self.gpu.create_buffer(size=size, usage=usage)
        except self._wgpu.GPUError as error:
            raise NoMemoryError(f"{self.name}: no memory for {in_words(n_bytes)}") from error

    def memory(self, n_bytes: int, *, host: bool = False) -> GpuMemory:
        return GpuMemory(self, n_bytes, host=host)

    def weights(self, name: str, array: np.ndarray) -> Const:
        return Const(name, GpuWeights(self, name, array), array)

    def _copy(self, memory: Any, to: int, start: int, n_bytes: int) -> None:
        """Copy within a buffer through another one, as WebGPU cannot copy within one."""
        if not n_bytes:
            return
        between = self.create(n_bytes)
        encoder = self.gpu.create_command_encoder()
        encoder.copy_buffer_to_buffer(memory.buffer, start, between, 0, n_bytes)
        encoder.copy_buffer_to_buffer(between, 0, memory.buffer, to, n_bytes)
        self.gpu.queue.submit([encoder.finish()])

    # -- plans ------------------------------------------------------------------------------------

    def _plan(self, request: PlanRequest) -> Plan:
        plan = request.build(self.isa, self.n_threads)
        for step in plan.steps:
            calls_of(step)  # raises for an op without a shader
        return plan

    def pipeline(self, call: Dispatch) -> tuple[Any, Any]:
        """Return the pipeline of a dispatch's shader, and the layout of its bindings; compiled on
        first use. Raises DeviceError.
        """
        text = call.shader.text
        shader = call.shader
        if text not in self._pipelines:
            began = time.perf_counter()
            kinds = ["uniform", "storage", "read-only-storage"]
            kinds += ["read-only-storage"] * len(shader.reads) + ["storage"] * len(shader.writes)
            entries = [
                {"binding": i, "visibility": "COMPUTE", "buffer": {"type": kind}}
                for i, kind in enumerate(kinds)
            ]
            layout = self.gpu.create_bind_group_layout(entries=entries)
            try:
                module = self.gpu.create_shader_module(label=shader.name, code=text)
                pipeline = self.gpu.create_compute_pipeline(
                    layout=self.gpu.create_pipeline_layout(bind_group_layouts=[layout]),
                    compute={"module": module, "entry_point": "main"},
                )
            except self._wgpu.GPUError as error:
                raise DeviceError(f"{self.name}: {shader.name}: {error}") from error
            self._pipelines[text] = pipeline, layout
            self.kernels.n_compiled += 1
            self.kernels.seconds += time.perf_counter() - began
        return self._pipelines[text]

    def ready(self, plan: Plan, arena: Any, inputs: Any) -> WgpuProgram:
        return WgpuProgram(self, plan, arena, inputs)

    def _run(self, program: Any, steps: range, times: list[float] | None, stoppable: bool) -> bool:
        """Implement ``Device.run``. A run that was submitted cannot be stopped: the result is
        always True.
        """
        inputs = program.inputs
        self.gpu.queue.write_buffer(inputs.buffer, 0, inputs.bytes)
        chosen = program.steps[steps.start : steps.stop]
        if times is not None:
            times += self._timed(program, chosen)
            return True
        encoder = self.gpu.create_command_encoder()
        compute = encoder.begin_compute_pass()
        for calls in chosen:
            _encode(compute, calls, program)
        compute.end()
        self._submit(encoder)
        return True

    def _submit(self, encoder: Any) -> None:
        """Submit commands and wait: a read queued after them returns when they are done. Raises
        DeviceError.
        """
        try:
            self.gpu.queue.submit([encoder.finish()])
            self.gpu.queue.read_buffer(self.unused[0], 0, WORD)
        except self._wgpu.GPUError as error:
            raise DeviceError(f"{self.name}: {error}") from error

    def _timed(self, ready: WgpuProgram, steps: list[Any]) -> list[float]:
        """Run steps, each the list of its dispatches, and return the seconds of each.

        They are measured by the adapter's clock if it has one, else by the host's, with each step
        submitted separately.
        """
        result: list[float] = []
        for at in range(0, len(steps), N_QUERIES // 2):
            part = steps[at : at + N_QUERIES // 2]
            result += self._stamped(ready, part) if self.stamps else self._clocked(ready, part)
        return result

    def _clocked(self, ready: WgpuProgram, steps: list[Any]) -> list[float]:
        result = []
        for calls in steps:
            began = time.perf_counter()
            encoder = self.gpu.create_command_encoder()
            compute = encoder.begin_compute_pass()
            _encode(compute, calls, ready)
            compute.end()
            self._submit(encoder)
            result.append(time.perf_counter() - began)
        return result

    def _stamped(self, ready: WgpuProgram, steps: list[Any]) -> list[float]:
        n = 2 * len(steps)
        queries = self.gpu.create_query_set(type="timestamp", count=n)
        stamps = self.gpu.create_buffer(size=8 * n, usage="QUERY_RESOLVE|COPY_SRC")
        encoder = self.gpu.create_command_encoder()
        for i, calls in enumerate(steps):
            writes = {
                "query_set": queries,
                "beginning_of_pass_write_index": 2 * i,
                "end_of_pass_write_index": 2 * i + 1,
            }
            compute = encoder.begin_compute_pass(timestamp_writes=writes)
            _encode(compute, calls, ready)
            compute.end()
        encoder.resolve_query_set(queries, 0, n, stamps, 0)
        self._submit(encoder)
        pairs = np.frombuffer(self.gpu.queue.read_buffer(stamps), np.uint64).reshape(-1, 2)
        return [float(end - begin) * 1e-9 for begin, end in pairs.astype(np.int64)]

    def close(self) -> None:
        self._pipelines.clear()


def _encode(compute: Any, calls: list[tuple[Any, Any, Any]], ready: WgpuProgram) -> None:
    """Encode a step's dispatches ``calls`` (pipeline, bindings, numbers of workgroups) in the pass
    ``compute``, except empty ones.
    """
    for pipeline, group, groups_of in calls:
        groups: Groups = groups_of(ready.count)
        if 0 not in groups:
            compute.set_pipeline(pipeline)
            compute.set_bind_group(0, group)
            compute.dispatch_workgroups(*groups)


def _package() -> Any:
    try:
        import wgpu
    except ImportError as error:
        raise DeviceError(
            "device wgpu: the package is not installed: pip install 'treadle[wgpu]'"
        ) from error
    return wgpu


@contextmanager
def _a_folder_for_displays() -> Iterator[None]:
    """Set XDG_RUNTIME_DIR, in which Vulkan's drivers look for a display, for the ``with`` block if
    it is missing: they print an error without it.
    """
    name = "XDG_RUNTIME_DIR"
    if name in os.environ:
        yield
        return
    os.environ[name] = gettempdir()
    try:
        yield
    finally:
        os.environ.pop(name, None)


def find_adapter(wgpu: Any) -> Any:
    """Return the fastest adapter, as WebGPU chooses. Raises DeviceError if there is none."""
    try:
        with _a_folder_for_displays():
            return wgpu.gpu.request_adapter_sync(power_preference="high-performance")
    except (RuntimeError, wgpu.GPUError) as error:
        raise DeviceError(
            "device wgpu: no adapter found for Metal, Vulkan or DX12 (on Linux, install the GPU's "
            "Vulkan driver, or Mesa's lavapipe for tests)"
        ) from error


def device_properties() -> dict[str, Any]:
    """Return the properties of the adapter, by name, for ``treadle doctor``; {"wgpu": reason} if
    there is none.
    """
    try:
        adapter = find_adapter(_package())
    except DeviceError as error:
        return {"wgpu": str(error)}
    return {
        "wgpu": adapter.info["device"],
        "wgpu_through": adapter.info["backend_type"],
        "wgpu_binding_bytes": int(adapter.limits["max-storage-buffer-binding-size"]),
    }


@cache
def _source_hash() -> str:
    """Return a hash of all sources of the folder ``devices/wgpu``: any of them can change a
    result.
    """
    return hash_of_sources("devices.wgpu")
