"""A run's inputs, written by ``RunInputs`` and read back from the block alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from treadle.devices.cpu.device import Cpu
from treadle.engine.batch import BatchItem, Inputs, RopeTable, RunInputs
from treadle.isa.portable import PORTABLE
from treadle.kernels.run_state import (
    EACH,
    FIELDS,
    PAGE,
    SPLIT,
    LogitsQuery,
    most_partials,
    numbered,
    run_offset,
    run_state,
)
from treadle.kvcache.cache import KVCache
from treadle.models.config import PoolSpec, StateSpec
from treadle.plan.lowering.inputs import inputs_of, sampled_inputs
from treadle.plan.plan import Plan

WINDOWS = (0, 40, 700)
SPECS = [PoolSpec(f"kv{i}", (i,), 1, 32, 32, window) for i, window in enumerate(WINDOWS)]
DIMS = (4, 8, 16)  # of the rope tables
N_CTX = 2000


def inverse(table: int) -> np.ndarray:
    return 10.0 ** -np.arange(DIMS[table] // 2)


def laid_out(
    plan: Plan, lengths: Sequence[tuple[int, int]], specs: Sequence[Any] = SPECS
) -> tuple[list[BatchItem], list[int], Inputs]:
    """Sequences that hold so many tokens get so many more; what is read of it elsewhere."""
    device = Cpu(PORTABLE, 1)
    cache = KVCache(specs, device, N_CTX, n_sequences=len(lengths))
    plan.inputs = inputs_of(plan, cache, DIMS)
    ropes = [RopeTable(inverse(i), 1.0, N_CTX) for i in range(len(DIMS))]
    run = RunInputs(plan, cache, ropes, device)
    parts = []
    starts = []
    for which, (held, n) in enumerate(lengths):
        seq = cache.sequence()
        ids = [100_000 * which + at for at in range(held + n)]
        for at in range(0, held, 500):
            cache.extend(seq, ids[at : min(at + 500, held)])
            cache.commit(seq)
        starts.append(held)
        cache.extend(seq, ids[held:])
        parts.append(BatchItem(seq, ids[held:], min(n, which)))
    for _ in range(2):  # nothing is left of the run before
        run.lay_out(parts[::-1], starts[::-1])
        run.lay_out(parts, starts)
    return parts, starts, Inputs(run.block.copy())


def test_the_place_of_each_field() -> None:
    state = run_state(3)
    assert state.names is not None
    assert len(state.names) == len(FIELDS) + 3 * len(EACH)
    for name, field in (state.fields or {}).items():
        assert run_offset(name) == field[1]


def test_tokens_outputs_and_positions() -> None:
    lengths = [(0, 3), (70, 1), (5, 2), (33, 9)]
    parts, starts, found = laid_out(Plan(20, 10), lengths)
    assert (found["n_tokens"], found["n_outputs"], found["n_parts"]) == (15, 6, 4)
    assert found.tokens.tolist() == [token for part in parts for token in part.ids]
    assert found.output_rows.tolist() == [3, 4, 5, 12, 13, 14]
    rows = [(0, 3, 0), (3, 1, 70), (4, 2, 5), (6, 9, 33)]
    assert [tuple(part)[:3] for part in found.parts.tolist()] == rows
    positions = np.array(
        [start + i for part, start in zip(parts, starts, strict=True) for i in range(len(part.ids))]
    )
    for table, dims in enumerate(DIMS):
        angles = positions[:, None] * inverse(table)
        expected = np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
        assert (found.rope(table, dims) == expected).all()


MANY_DEEP = [(1500, 1)] * 60  # split, all of them would need more partial results than there are


@pytest.mark.parametrize(
    ("tile", "few", "lengths"),
    [
        (8, 4, [(0, 1), (1500, 1), (512, 1), (511, 1), (60, 2)]),
        (4, 0, [(0, 9), (1500, 5), (31, 1), (639, 33)]),
        (64, 4, [(0, 200), (1000, 100)]),
        (8, 4, [(0, 9), (1500, 1), (639, 33), (1023, 4), (512, 5)]),
        (8, 4, MANY_DEEP),
    ],
    ids=["few", "deterministic", "many", "mixed", "deep"],
)
def test_every_query_meets_its_keys_once(
    tile: int, few: int, lengths: list[tuple[int, int]]
) -> None:
    """In all pools: the keys that a window leaves, in the pages where the sequence has them. Those
    of parts of few tokens in short items, whatever else is in the batch.
    """
    n = sum(n for _, n in lengths)
    plan = Plan(n + 5, n, query_tile=tile, few_tokens=few)
    parts, starts, found = laid_out(plan, lengths)
    rows = [
        (part, start + i)
        for part, start in zip(parts, starts, strict=True)
        for i in range(len(part.ids))
    ]
    for pool, window in enumerate(WINDOWS):
        slots = [part.seq.pages[pool][at // PAGE] * PAGE + at % PAGE for part, at in rows]
        assert found.kv_indices(pool).tolist() == slots
        seen: dict[int, list[int]] = {}
        partials: dict[int, int] = {}
        whole = []
        both = [(f, *at) for f in (False, True) for at in found.attn_items(pool, few=f)]
        for is_few, item, pages in both:
            first = int(item["key_begin"])
            last = int(item["key_end"])
            assert 0 <= first < last
            part, position = rows[item["token"]]
            assert is_few == (len(part.ids) <= few)
            assert item["n_tokens"] <= (1 if is_few else tile)
            assert position == item["position"]
            held = list(part.seq.pages[pool][: len(pages)])
            assert pages.tolist() == held
            assert min(held[first // PAGE :]) >= 0  # given back: nobody may read there
            for row in range(item["token"], item["token"] + item["n_tokens"]):
                assert rows[row][0] is part
                seen.setdefault(row, []).extend(range(first, last))
            if item["partial"] >= 0:
                assert is_few
                partials[int(item["partial"])] = int(item["token"])
            elif is_few and first // SPLIT != (last - 1) // SPLIT:
                whole.append(int(item["token"]))
            assert item["partial"] < 0 or first // SPLIT == (last - 1) // SPLIT
        for row, (_, at) in enumerate(rows):
            begin = max(0, at - window + 1) if window else 0
            assert [key for key in seen[row] if begin <= key <= at] == list(range(begin, at + 1))
        assert list(partials) == list(range(len(partials)))
        merges = found.attn_merges(pool)
        merged = [
            (int(merge["partial"]) + i, int(merge["token"]))
            for merge in merges
            for i in range(merge["n_partials"])
        ]
        assert merged == list(partials.items())
        assert all(merge["n_tokens"] == 1 for merge in merges)
        assert bool(whole) == (lengths is MANY_DEEP and window != 40), (window, whole)
        most = most_partials(n, min(N_CTX, window or N_CTX))
        assert bool(whole) <= (most - 3 < len(partials) <= most)


def test_a_layer_with_a_state_reads_one_slot_and_writes_another() -> None:
    specs = [*SPECS, StateSpec("ssm", (3,), 10)]
    parts, _, found = laid_out(Plan(8, 8), [(3, 1), (0, 2)], specs)
    slots = [(part["state"], part["next"]) for part in found.parts]
    assert slots == [tuple(part.seq.slots) for part in parts]
    assert len({slot for both in slots for slot in both}) == 4


def test_a_pool_without_layers_has_no_work() -> None:
    """Pages that only count a text: of a model whose layers have states alone."""
    parts, _, found = laid_out(Plan(4, 4), [(0, 2)], [StateSpec("ssm", (0,), 10)])
    assert len(parts[0].seq.pages) == 1
    assert found[numbered("n_attn_items", 0)] == 0
    assert found.tokens.tolist() == parts[0].ids


def test_rows_that_samplers_look_at() -> None:
    """Each output in order, as often as it is looked at; with its own mask, cut or filled up."""
    masks = [bytes([1, 0, 0, 0, 0, 0x80, 0xFF]), bytes([0xFF]), bytes(range(40))]
    looks = [
        (LogitsQuery(), LogitsQuery(masks[0], total=True)),
        (),
        (LogitsQuery(masks[1], first=True),),
        (LogitsQuery(masks[2]),),
    ]
    device = Cpu(PORTABLE, 1)
    plan = Plan(20, 10)
    cache = KVCache(SPECS, device, N_CTX, n_sequences=4)
    plan.inputs = inputs_of(plan, cache, ()) | sampled_inputs(10, 70)
    run = RunInputs(plan, cache, [], device)
    parts = []
    for which, look in enumerate(looks):
        seq = cache.sequence()
        ids = [5] * (which + 1)
        cache.extend(seq, ids)
        parts.append(BatchItem(seq, ids, 1, look))
    for order in (parts[::-1], parts):
        run.lay_out(order, [0] * 4)
    found = Inputs(run.block.copy())
    assert found.tokens.tolist() == [5] * 10
    assert found.output_rows.tolist() == [0, 2, 5, 9]
    seen = [(row, first, total) for row, _, first, total in found.sampled(70)]
    expected = [(0, False, False), (0, False, True), (2, True, False), (3, False, False)]
    assert seen == expected
    plain, *masked = [allowed for _, allowed, _, _ in found.sampled(70)]
    assert plain is True
    for allowed, mask in zip(masked, masks, strict=True):
        assert isinstance(allowed, np.ndarray)
        bits = np.frombuffer(mask[:9].ljust(9, b"\0"), np.uint8)
        assert allowed.tolist() == np.unpackbits(bits, count=70, bitorder="little").tolist()
    run.lay_out([part._replace(queries=()) for part in parts], [0] * 4)
    assert list(run.sampled(70)) == []
