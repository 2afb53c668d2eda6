"""What every WGSL kernel shares: how its text is put together, and how a step calls it.

A shader is a pure function of its constants; what differs from step to step (where buffers are in
the arena, strides, columns) comes as the members of ``a``, u32, in words of 4 bytes. Bindings: 0
``a``, 1 the arena, 2 the run's block, and from 3 on weights and pages by name. The arena is one
binding, for WebGPU does not let a buffer be read and written through two.

WGSL has no 64-bit integers: of the run's records, i64, it reads the low words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from treadle.base.fast_dataclass import dataclass
from treadle.kernels.spec import numbered, run_offset

if TYPE_CHECKING:
    from treadle.plan.plan import Step

WORD = 4  # bytes
THREADS = 64  # of a workgroup, where a kernel says nothing else
FOLD = 32768  # workgroups in x; more go on in y: 65535 is the most of either

Groups: TypeAlias = tuple[int, int, int]
Count: TypeAlias = Callable[[str], int]  # a count of RUN_STATE, of this run

# ``sum_of`` and ``max_of`` give what all threads of a workgroup have together, to each of them.
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
    """One kernel's text. ``body`` has ``fn main`` and what it uses; ``constants`` are those of
    WGSL; ``reads`` are bindings of weights and pages, ``writes`` those of pages that are written,
    as atomic words.
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
    """A constant in WGSL: integers are u32, floats f32 with all their digits."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value}u" if value >= 0 else f"{value}i"
    digits = str(np.float32(value))
    return digits + ("f" if "." in digits or "e" in digits else ".0f")


@dataclass(frozen=True)
class Dispatch:
    """A dispatch of a step. ``args``: buffers of the plan, or words; ``consts``: what is bound by
    name, None where the shader does not look at it; ``part``: of weights that lie in several
    buffers, which; ``groups``: how many workgroups a run's counts make, none where one is 0.
    """

    shader: Shader
    args: Mapping[str, Any]
    groups: Callable[[Count], Groups]
    consts: Mapping[str, Any]


Printer: TypeAlias = "Callable[[Step], list[Dispatch]]"


def fold(n: int) -> Groups:
    """``n`` workgroups, of which ``folded`` tells the number."""
    return min(n, FOLD), -(-n // FOLD), 1


def field(name: str, index: int = 0) -> int:
    """The word where a field of RUN_STATE is, of the index-th pool or rope table."""
    return run_offset(numbered(name, index)) // WORD
