"""Kernels of blocks, but for the products, as a card's machine code: nothing spilled, and the
memory of the block within what every launch may ask for.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.devices.cuda.machine import EVERYTHING, some
from tests.devices.cuda.ptxas import assemble
from treadle.devices.cuda.kernels.attention import SimtAttention
from treadle.devices.cuda.kernels.attention_tile import TileAttention
from treadle.devices.cuda.kernels.block import convert_spec
from treadle.devices.cuda.kernels.merge import SimtMerge
from treadle.devices.cuda.kernels.norm import SimtNorm, SimtPack
from treadle.devices.cuda.kernels.rope import SimtRopeStore
from treadle.devices.cuda.kernels.route import SimtRoute, SimtSort
from treadle.devices.cuda.kernels.spread import SPREAD, SimtDelta, SimtMamba2
from treadle.devices.cuda.kernels.top import SimtJoinTop, SimtTop
from treadle.devices.cuda.launch_args import dynamic_shared_bytes, threads_of
from treadle.isa import nvptx
from treadle.isa.isa import Isa
from treadle.kernels.elementwise.column_norm import ColumnNorm
from treadle.kernels.elementwise.control_vectors import AddDirections
from treadle.kernels.elementwise.elementwise import Embed
from treadle.kernels.matmul.lora import LoraDown, LoraUp
from treadle.kernels.moe.dispatch import Combine
from treadle.kernels.recurrent.convolution import Convolution
from treadle.kernels.spec import Spec

pytestmark = pytest.mark.slow  # ptxas comes with the extra dev

ROWS = [nvptx.SM_80, nvptx.SM_90]
FEWEST_SHARED = 99 << 10  # bytes that a launch may ask for on every card from 8.0 on
SPECS: list[Spec] = [
    TileAttention("f16", 32, 8, 128, 16),
    TileAttention("bf16", 8, 4, 256, 32),
    SimtAttention("f16", 16, 1, 576, 1, head_dim_v=512, latent=True),
    SimtRoute(128, 8, "softmax", norm=True),
    SimtSort(128, 8, 16, 128),
    SimtDelta(32, 128, 128, 16),
    SimtNorm("bf16", 4096, 1, 1e-5),
    SimtAttention("f16", 32, 8, 128, 1),
    SimtRopeStore("neox", "q8_0", 32, 8, 128, 128, 0.0884, eps=1e-6),
    SimtMerge(8, 4, 1, 128),
    SimtTop(),
    SimtJoinTop(),
    SimtPack("silu", "bf16", 14336, 1),
    convert_spec(SPREAD["embed"], Embed("Q4_K", 4096)),
    convert_spec(SPREAD["combine"], Combine(2048, 8, places=True, residual=True)),
    convert_spec(SPREAD["column_norm"], ColumnNorm(128, 1e-6, 32)),
    convert_spec(SPREAD["convolution"], Convolution(8192, 4)),
    convert_spec(SPREAD["lora_down"], LoraDown("F16", 4096)),
    convert_spec(SPREAD["lora_up"], LoraUp("F16", 3, 64)),
    convert_spec(SPREAD["add_directions"], AddDirections(4096)),
    SimtMamba2(128, 64, 128, 8),
    SimtRoute(16, 2, "softmax", jitter=0.01),
    SimtRoute(512, 10, "sigmoid", norm=True, bias=True),
    SimtRoute(256, 8, "sigmoid", norm=True, bias=True, n_groups=8, n_groups_used=4),
    SimtAttention("q8_0", 128, 1, 576, 1, head_dim_v=512, latent=True),
    SimtAttention("f16", 12, 12, 64, 4, causal=False, alibi=8.0),
    SimtNorm("f32", 4096, 1, 1e-5, add=True),
    SimtNorm("f32", 768, 1, 1e-5, centred=True, bias=True),
    SimtAttention("q8_0", 32, 8, 128, 4),
    SimtAttention("bf16", 64, 8, 64, 4, 1024, sinks=True),
    SimtAttention("f16", 8, 1, 512, 2, softcap=50.0),
    SimtAttention("f16", 16, 4, 80, 4, causal=False),
    TileAttention("bf16", 32, 8, 64, 16, 1024),
    TileAttention("q8_0", 8, 1, 256, 8, 512, softcap=50.0),
    TileAttention("f16", 16, 16, 192, 64, head_dim_v=128),
    TileAttention("q8_0", 32, 8, 128, 16, sinks=True),
    TileAttention("bf16", 32, 32, 96, 64, causal=False, softcap=30.0),
    SimtRopeStore("norm", "f16", 32, 8, 128, 64, 0.0884),
    SimtRopeStore("neox", "bf16", 8, 1, 512, 512, 1.0, eps=1e-6, v_eps=1e-6, norm_last=True),
]


FIRST = 12  # of every kernel one
# Rows differ in how ptxas shares out registers. Without the whole grid kernels take turns, and
# those on tensor cores meet both.
CASES = [
    (spec, isa)
    for i, spec in enumerate(some(SPECS, FIRST))
    for j, isa in enumerate(ROWS)
    if EVERYTHING or isinstance(spec, TileAttention) or i % len(ROWS) == j
]


@pytest.mark.parametrize(("spec", "isa"), CASES, ids=lambda made: made.name)
def test_kernels_of_blocks_assemble(spec: Spec, isa: Isa, tmp_path: Path) -> None:
    made = assemble(spec, isa, tmp_path)
    assert (made.spills, made.stack) == (0, 0)
    assert made.registers * threads_of(spec) <= 65536  # of a card's unit: one block at least runs
    assert dynamic_shared_bytes(spec) <= FEWEST_SHARED
    if isinstance(spec, TileAttention):
        found = made.opcodes()
        assert found["HMMA"] >= spec.head_dim // 16 * 4
        assert found["LDSM"] >= spec.head_dim // 16 * 2
        assert ("LDGSTS" in found) != spec.page.keys.fmt.scaled  # codes pass through registers
