"""What stands around products, by blocks of threads: the CPU's kernels whose loops are shared out,
recurrences by columns, experts' routing and sorting; by the CPU's tests.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.devices.cuda.machine import ISA, some
from tests.kernels import (
    registry,
    test_block_convolution,
    test_channels,
    test_clamp,
    test_column_norm,
    test_control,
    test_elementwise,
    test_experts,
    test_lora,
    test_lora_experts,
    test_pooling,
    test_states,
    test_sums,
    test_top,
)
from tests.kernels import (
    test_selective as test_selective_scan,
)
from tests.kernels.harness import Memory
from tests.kernels.registry import (
    BLOCK_CONVOLUTIONS,
    CLAMPS,
    COLUMN_NORMS,
    COMBINES,
    DIRECTIONS,
    EMBEDS,
    GATHERS,
    LORAS,
    ROUTES,
    SELECTIVES,
    SORTS,
    SUMS,
)
from treadle.devices.cuda.kernel_table import find_swap
from treadle.devices.cuda.kernels import spread
from treadle.devices.cuda.kernels.block import convert_spec
from treadle.devices.cuda.kernels.route import SimtRoute, SimtSort
from treadle.devices.cuda.kernels.spread import SCANS, SPREAD, SimtSelective
from treadle.kernels.activation_layout import DWORD
from treadle.kernels.elementwise.add import Add, AddRows
from treadle.kernels.elementwise.softcap import Softcap
from treadle.kernels.matmul.lora import LoraDown, LoraUp
from treadle.kernels.matmul.lora_experts import ExpertDown, ExpertUp
from treadle.kernels.recurrent.convolution import Convolution
from treadle.kernels.recurrent.gates import OutputGate, Rates, UnitHeads
from treadle.kernels.recurrent.kda import ChannelDelta, ChannelRates
from treadle.kernels.recurrent.mamba1 import Selective
from treadle.kernels.recurrent.scan import Scan
from treadle.kernels.spec import Spec

TESTS: dict[str, Any] = {  # by op: the CPU's test
    "add": test_sums.test_add,
    "add_directions": test_control.test_add_directions,
    "add_rows": test_sums.test_add_rows,
    "block_convolution": test_block_convolution.test_block_convolution,
    "channel_rates": test_channels.test_channel_rates,
    "clamp": test_clamp.test_clamp,
    "column_norm": test_column_norm.test_column_norm,
    "combine": test_experts.test_combine,
    "convolution": test_states.test_states_are_read_and_written,
    "embed": test_elementwise.test_embed,
    "expert_lora_down": test_lora_experts.test_down,
    "expert_lora_up": test_lora_experts.test_up,
    "gate": test_states.test_lengths_and_gates,
    "gather": test_experts.test_gather,
    "lora_down": test_lora.test_down,
    "lora_up": test_lora.test_up,
    "pooling": test_pooling.test_pooling,
    "rates": test_states.test_rates,
    "softcap": test_top.test_softcap,
    "unit_heads": test_states.test_lengths_and_gates,
}
SHARED_OUT: list[Any] = [
    *some([s for s in SUMS if isinstance(s, Add)], 1),
    *some(DIRECTIONS, 2),
    *some([s for s in SUMS if isinstance(s, AddRows)], 3),
    *some(BLOCK_CONVOLUTIONS, 2),
    *some(test_states.of(ChannelRates), 2),
    *some(CLAMPS, 1),
    *some(COLUMN_NORMS, 2),
    *some(COMBINES, 4),
    *some(test_states.of(Convolution), 3),
    *some(EMBEDS, 4),
    *some(test_states.of(OutputGate), 3),
    *some([spec for spec in GATHERS if spec.unit == DWORD], 2),
    *test_lora_experts.of(ExpertDown)[:2],
    *test_lora_experts.of(ExpertUp)[:1],
    *some([spec for spec in LORAS if isinstance(spec, LoraDown)], 2),
    *some([spec for spec in LORAS if isinstance(spec, LoraUp)], 1),
    *some(test_pooling.SPECS, 3),
    *some(test_states.of(Rates), 2),
    Softcap(2561, 5.0),
    *some(test_states.of(UnitHeads), 2),
]


@pytest.mark.parametrize("spec", SHARED_OUT, ids=registry.name)
def test_loops_that_are_shared_out(spec: Spec, blocks: Memory, rng: np.random.Generator) -> None:
    made: Any = convert_spec(SPREAD[spec.op], spec)
    TESTS[spec.op](made, ISA, blocks, rng)


def test_all_of_them_are_tested() -> None:
    assert set(SPREAD) == set(TESTS) == {spec.op for spec in SHARED_OUT}


def test_plans_use_all_of_them() -> None:
    for kernels, found in ((SPREAD, spread.swap), (SCANS, spread.swap_scan)):
        assert {op for op in kernels if find_swap(op) is not found} == set()


SOME_SCANS = [*some(test_states.of(Scan), 3), *some(test_states.of(ChannelDelta), 2)]


@pytest.mark.parametrize("spec", dict.fromkeys(SOME_SCANS), ids=registry.name)
def test_scan(spec: Scan, memory: Memory, rng: np.random.Generator) -> None:
    """A thread for each column: plain code."""
    made: Any = convert_spec(SCANS[spec.op], spec)
    assert made.items == spec.n_head * spec.head_dim
    test_states.test_states_are_read_and_written(made, ISA, memory, rng)


@pytest.mark.parametrize("spec", some(SELECTIVES, 2), ids=registry.name)
def test_selective(spec: Selective, memory: Memory, rng: np.random.Generator) -> None:
    """A thread for each channel: plain code."""
    made = convert_spec(SimtSelective, spec)
    assert made.items == spec.k
    test_selective_scan.test_states_are_read_and_written(made, ISA, memory, rng)


@pytest.mark.parametrize("spec", [s for s in ROUTES if not s.n_shared], ids=registry.name)
def test_route(spec: Any, blocks: Memory, rng: np.random.Generator) -> None:
    """But for routes with sinks, which keep the CPU's kernel (``swap_route``)."""
    test_experts.test_route(convert_spec(SimtRoute, spec), ISA, blocks, rng)


@pytest.mark.parametrize("spec", SORTS, ids=registry.name)
def test_sort(spec: Any, blocks: Memory, rng: np.random.Generator) -> None:
    test_experts.test_sort(convert_spec(SimtSort, spec), ISA, blocks, rng)
