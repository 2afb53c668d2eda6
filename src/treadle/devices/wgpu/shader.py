"""Common parts of WGSL kernels: a shader's text, and its dispatch for a step.

A shader is a pure function of its constants. Values that differ from step to step (buffer offsets
in the arena, strides, columns) are the members of ``a``: u32, in words of 4 bytes. Bindings: 0
``a``, 1 the arena, 2 the run's input block, and from 3 on weights and pages by name. The arena is
one binding, as WebGPU does not allow a buffer to be read and written through two.

WGSL has no 64-bit integers: of i64 fields in the run's records, it reads the low words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.kernels.run_state import numbered, run_offset

if TYPE_CHECKING:
    from treadle.plan.plan import Step

WORD = 4  # bytes
THREADS = 64  # of a workgroup, unless a kernel overrides it
FOLD = 32768  # workgroups in x, the rest in y: each is limited to 65535

Groups: TypeAlias = tuple[int, int, int]
Count: TypeAlias = Callable[[str], int]  # returns a count of this run's RUN_STATE

# ``sum_of`` and ``max_of`` reduce over a workgroup; each thread gets the result.
COMMON = """
fn word_f32(i: u32) -> f32 { return bitcast<f32>(arena[i]); }
fn quad_f32(i: u32) -> vec4<f32> {
  return bitcast<vec4<f32>>(vec4<u32>(arena[i], arena[i + 1u], arena[i + 2u], arena[i + 3u]));
}
fn put_f32(i: u32, v: f32) { arena[i] = bitcast<u32>(v); }
fn folded(wg: vec3<u32>) -> u32 { return wg.y * FOLD + wg.x; }
var<workgroup> joined: array<f32, THREADS>;
fn sum_of(t: u32, v: f32) -> f32 {
  joined[t] = v;
  workgroupBarrier();
  for (var n = THREADS / 2u; n > 0u; n >>= 1u) {
    if (t < n) { joined[t] += joined[t + n]; }
    workgroupBarrier();
  }
  let made = joined[0];
  workgroupBarrier();
  return made;
}
fn max_of(t: u32, v: f32) -> f32 {
  joined[t] = v;
  workgroupBarrier();
  for (var n = THREADS / 2u; n > 0u; n >>= 1u) {
    if (t < n) { joined[t] = max(joined[t], joined[t + n]); }
    workgroupBarrier();
  }
  let made = joined[0];
  workgroupBarrier();
  return made;
}
"""


@dataclass(frozen=True)
class Shader:
    """One kernel's WGSL text.

    ``body`` has ``fn main`` and its helper functions; ``constants`` become WGSL constants; ``args``
    name the members of ``a``. ``reads`` are bindings of weights and pages; ``writes`` those of
    written pages, as atomic words.
    """

    name: str
    body: str
    constants: tuple[tuple[str, Any], ...]
    args: tuple[str, ...]
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        constants = {"THREADS": THREADS, "FOLD": FOLD, **dict(self.constants)}
        lines = [f"const {name} = {literal(value)};" for name, value in constants.items()]
        lines += ["struct Args {", *(f"  {name}: u32," for name in self.args or ("none",)), "}"]
        lines += ["@group(0) @binding(0) var<uniform> a: Args;"]
        lines += ["@group(0) @binding(1) var<storage, read_write> arena: array<u32>;"]
        lines += ["@group(0) @binding(2) var<storage, read> run: array<u32>;"]
        for i, name in enumerate((*self.reads, *self.writes), 3):
            kind = "read_write" if name in self.writes else "read"
            word = "atomic<u32>" if name in self.writes else "u32"
            lines += [f"@group(0) @binding({i}) var<storage, {kind}> {name}: array<{word}>;"]
        main = (
            f"@compute @workgroup_size({constants['THREADS']})\n"
            "fn main(@builtin(workgroup_id) wg: vec3<u32>, "
            "@builtin(local_invocation_index) t: u32)"
        )
        return "\n".join(lines) + COMMON + self.body.replace("fn main()", main)


def literal(value: Any) -> str:
    """Return a WGSL literal: integers are u32 (negative ones i32), floats f32 with all their
    digits.
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value}u" if value >= 0 else f"{value}i"
    digits = str(np.float32(value))
    return digits + ("f" if "." in digits or "e" in digits else ".0f")


@dataclass(frozen=True)
class Dispatch:
    """One dispatch of a step: a shader with its arguments and size.

    ``args``: values of the shader's arguments by name: buffers of the plan, or integers. ``groups``
    returns the numbers of workgroups for a run's counts; if one is 0, nothing is dispatched.
    ``consts``: weights and pages by binding name, None for one that the shader does not read; for
    weights split over several buffers, one of them.
    """

    shader: Shader
    args: Mapping[str, Any]
    groups: Callable[[Count], Groups]
    consts: Mapping[str, Any]


Printer: TypeAlias = "Callable[[Step], list[Dispatch]]"


def fold(n: int) -> Groups:
    """Return ``n`` workgroups folded into two dimensions, as WebGPU limits each; the function
    ``folded`` in WGSL computes the index.
    """
    return min(n, FOLD), -(-n // FOLD), 1


def field(name: str, index: int = 0) -> int:
    """Return the offset in words of the RUN_STATE field ``name``; ``index``: the number of the pool
    or rope table, for fields that there are several of.
    """
    return run_offset(numbered(name, index)) // WORD
