"""What a thread of a GPU may do, by a thread that a CPU's core plays (``Isa.simt``).

Such a thread is a coroutine of LLVM: at a barrier, and wherever a warp exchanges values, it notes
what it waits for and suspends. ``emulator.py`` here resumes a block's threads in shuffled orders.
All that a thread knows of itself is in its THREAD record, the last argument of its
function. What suspends cannot be outlined (``Builder.outlined``).

A copy is done when it is waited for, or at once: the seed says which, for a kernel must be right
with both.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from tests.devices.cuda.records import (
    BARRIER,
    COPY,
    ENDED,
    FAULT,
    LANE,
    LATE_COPIES,
    MANY_COPIES,
    MOST_COPIES,
    THREAD,
    THREAD_FIELDS,
    UNALIGNED,
    WARP,
)
from treadle.isa.isa import Isa, Simt
from treadle.jit.builder import Builder
from treadle.jit.coroutine import Coroutine
from treadle.jit.types import Ty, bf16, f16, f32, i32, i64, ptr, u16, u32
from treadle.jit.values import Operand, Val


class Record:
    """A record of i64 at an address, field by field."""

    def __init__(self, k: Builder, p: Val, fields: Any) -> None:
        self.k = k
        self.p = p
        self._names = fields.names

    def __getitem__(self, name: str) -> Val:
        return self.get(name, i64)

    def get(self, name: str, ty: Ty = ptr) -> Val:
        """A field, as an address."""
        return self.k.load(self.p, ty, align=8, offset=8 * self._names.index(name))

    def __setitem__(self, name: str, value: Operand) -> None:
        value = self.k.val(value, i64)
        self.k.store(self.p, value, align=8, offset=8 * self._names.index(name))


class Thread(Coroutine):
    """Emits the code of one thread."""

    def __init__(self, function: Any, isa: Isa) -> None:
        super().__init__(function, isa)
        self.places: list[str] = []  # lines of the kernel where it waits

    def begin_thread(self, frame: Val) -> None:
        """It waits for nothing yet, but may be the last to begin."""
        mine = thread(self)
        at = mine.p + 8 * THREAD_FIELDS.split().index("frame")
        self.begin(frame, mine["room"], at)

    def wait(self, kind: int) -> None:
        """Suspend, and say where."""
        self.places.append(_where())
        thread(self)["waits"] = 4 * len(self.places) + kind
        self.suspend()

    def ret(self) -> None:
        mine = thread(self)
        with self.if_(mine["n_done"] < mine["n_copies"]):
            note(self, mine, LATE_COPIES)
        mine["waits"] = ENDED
        super().ret()


def coroutine(k: Builder) -> Thread:
    """The builder of the thread's own function."""
    assert isinstance(k, Thread), "a thread's code was outlined"
    return k


def thread(k: Builder) -> Record:
    """The record of the thread whose function is being built."""
    return Record(k, Val(k, coroutine(k).function.args[-1], ptr), THREAD)


def note(k: Builder, mine: Record, kind: int, place: Operand = 0) -> None:
    """Note a fault, where there is none yet."""
    fault = Record(k, mine.get("fault"), FAULT)
    with k.if_(fault["kind"].eq(0)):
        fault["kind"] = kind
        fault["place"] = place
        fault["cta"], fault["tid"] = mine["cta"], mine["tid"]


def _where() -> str:
    """The line of the kernel that is being built."""
    frame: Any = sys._getframe(1)
    while frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


# -- the operations -------------------------------------------------------------------------------


def _tid(k: Builder) -> Val:
    return thread(k)["tid"]


def _cta(k: Builder) -> Val:
    return thread(k)["cta"]


def _n_ctas(k: Builder) -> Val:
    return thread(k)["n_ctas"]


def _shared(k: Builder) -> Val:
    return thread(k).get("shared")


def _barrier(k: Builder) -> None:
    coroutine(k).wait(BARRIER)


def _warp_barrier(k: Builder) -> None:
    coroutine(k).wait(WARP)


def _aligned(k: Builder, p: Val, n_bytes: int) -> None:
    """Note an address that is not a multiple of ``n_bytes``."""
    address = k.address(p)
    places = coroutine(k).places
    places.append(_where())
    here = len(places)
    with k.if_(address % n_bytes > 0):
        note(k, thread(k), UNALIGNED, 4 * here)


def _copy_async(k: Builder, to: Val, frm: Val, n_bytes: int = 16) -> None:
    assert n_bytes in (4, 8, 16), n_bytes
    for p in (to, frm):
        _aligned(k, p, n_bytes)
    k.outlined("copy", (thread(k).p, to, frm, k.i64(n_bytes)), _ask)


def _ask(k: Builder, mine_at: Val, to: Val, frm: Val, n_bytes: Val) -> None:
    mine = Record(k, mine_at, THREAD)
    n = mine["n_copies"]
    with k.if_(n - mine["n_done"] >= MOST_COPIES):
        note(k, mine, MANY_COPIES)
        mine["n_done"] = n
    copy = Record(k, mine.get("copies") + n % MOST_COPIES * COPY.itemsize, COPY)
    for name, p in (("to", to), ("frm", frm)):
        copy[name] = k.address(p)
    copy["n_bytes"], copy["group"] = n_bytes, mine["n_groups"]
    mine["n_copies"] = n + 1
    with k.if_((mine["seed"] + n) * 0x1E3779B97F4A7C15 < 0):
        _do(k, copy)


def _do(k: Builder, copy: Record) -> None:
    to = copy.get("to")
    frm = copy.get("frm")
    with k.loop(copy["n_bytes"], step=4) as i:
        k.store(to + i, k.load(frm + i, i32))


def _commit(k: Builder) -> None:
    mine = thread(k)
    mine["n_groups"] = mine["n_groups"] + 1


def _wait(k: Builder, n: int) -> None:
    k.outlined("wait", (thread(k).p, k.i64(n)), _finish)


def _finish(k: Builder, mine_at: Val, n: Val) -> None:
    mine = Record(k, mine_at, THREAD)
    head, look, do, over = (k.label(name) for name in ("head", "look", "do", "over"))
    k.goto(head)
    k.at(head)
    done = mine["n_done"]
    k.branch(done < mine["n_copies"], look, over)
    k.at(look)
    copy = Record(k, mine.get("copies") + done % MOST_COPIES * COPY.itemsize, COPY)
    k.branch(copy["group"] + n < mine["n_groups"], do, over)
    k.at(do)
    _do(k, copy)
    mine["n_done"] = done + 1
    k.goto(head)
    k.at(over)


def _exchange(k: Builder, values: Sequence[Val]) -> tuple[Val, Val]:
    """Show values to the warp: where all its lanes' lie, and which lane this is."""
    mine = thread(k)
    turn = mine["turn"]
    lane = mine["tid"] % 32
    mine["turn"] = turn + 1
    area = mine.get("exchange") + turn % 2 * (32 * LANE)
    at = area + lane * LANE
    for value in values:
        k.store(at, value)
        at = at + value.ty.n_bytes
    coroutine(k).wait(WARP)
    return area, lane


def _shuffle(k: Builder, v: Val, lanes: int) -> Val:
    area, lane = _exchange(k, [v])
    return k.load(area + (lane ^ lanes) * LANE, v.ty)


def _load_matrix(k: Builder, p: Val) -> list[Val]:
    _aligned(k, p, 16)
    area, lane = _exchange(k, [p])
    rows = [k.load(area + (lane // 4 + 8 * i) * LANE, ptr) for i in range(4)]
    return [k.load(row + lane % 4 * 4, u32) for row in rows]


def _load_matrix_t(k: Builder, p: Val) -> list[Val]:
    _aligned(k, p, 16)
    area, lane = _exchange(k, [p])
    made = []
    for i in range(4):
        rows = [k.load(area + (lane % 4 * 2 + (8 * i + j)) * LANE, ptr) for j in range(2)]
        low, high = (k.load(row + lane // 4 * 2, u16).to(u32) for row in rows)
        made.append(low | high << 16)
    return made


def _mma(ty: Ty) -> Any:
    def mma(k: Builder, c: Sequence[Val], a: Sequence[Val], b: Sequence[Val]) -> list[Val]:
        area, lane = _exchange(k, [*a, *b])
        sums = k.room(16, "mma")
        for i, v in enumerate(c):
            k.store(sums, v, offset=4 * i)
        k.outlined(f"mma_{ty}", (area, lane, sums), multiply)
        return [k.load(sums, f32, offset=4 * i) for i in range(4)]

    def multiply(k: Builder, area: Val, lane: Val, sums: Val) -> None:
        g = lane // 4
        t = lane % 4
        for r in range(4):
            total = k.var(k.load(sums, f32, offset=4 * r))
            a_row = area + g * (4 * LANE) + 4 * (r // 2)
            b_row = area + (t * 2 + r % 2) * (4 * LANE) + 16
            for half in range(2):
                for pair in range(4):
                    at = pair * LANE
                    x = _widen(k, k.load(a_row, ty * 2, offset=at + 8 * half))
                    w = _widen(k, k.load(b_row, ty * 2, offset=at + 4 * half))
                    for i in range(2):
                        total.v = k.fma(k.extract(x, i), k.extract(w, i), total.v)
            k.store(sums, total.v, offset=4 * r)

    return mma


def _widen(k: Builder, v: Val) -> Val:
    if v.ty.scalar == f16:
        return k.isa.widen_f16(k, v)
    wide = v.bits(u16 * v.ty.lanes).to(u32)
    return (wide << 16).bits(f32 * v.ty.lanes)


EMULATED = Simt(
    tid=_tid,
    cta=_cta,
    n_ctas=_n_ctas,
    shared=_shared,
    barrier=_barrier,
    copy_async=_copy_async,
    commit=_commit,
    wait=_wait,
    warp_barrier=_warp_barrier,
    shuffle=_shuffle,
    load_matrix=_load_matrix,
    load_matrix_t=_load_matrix_t,
    mma_f16=_mma(f16),
    mma_bf16=_mma(bf16),
)
