"""Pages: who holds which. A random walk over every operation, then each promise by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from treadle.devices.cpu.device import Cpu
from treadle.devices.cpu.thread_team import HostMemory
from treadle.errors import ContextFullError, NoRoomError, TreadleError, UnsupportedError
from treadle.isa.portable import PORTABLE
from treadle.kernels.attention.page_layout import KV_FORMATS
from treadle.kernels.run_state import PAGE
from treadle.kvcache.cache import KVCache, Sequence
from treadle.kvcache.page_pool import FREED, MIN_SAVING, NO_CHECKPOINT, StateSlots, pages_within
from treadle.models.config import PoolSpec, StateSpec

N_CTX = 7 * PAGE


def specs(*windows: int) -> tuple[PoolSpec, ...]:
    """A pool of one layer for each window; 0 sees everything."""
    return tuple(PoolSpec(f"kv{i}", (i,), 1, 32, 32, w) for i, w in enumerate(windows))


CPU = Cpu(PORTABLE, 1)
SEEN = (PoolSpec("kv_global", (0, 1), 1, 32, 32, 0),)


def lists(seq: Sequence) -> list[list[int]]:
    """A copy of a sequence's pages, which does not change with it."""
    return [list(pages) for pages in seq.pages]


def check_pages(cache: KVCache, live: list[Sequence]) -> None:
    """Every page's holders are counted, and a page is free exactly when it has none."""
    live = [*live, *([cache._retired] if cache._retired is not None else [])]
    nodes = []
    waiting = list(cache.tree.roots.values())
    assert all(root.next for root in waiting if root is not cache.tree.root)
    while waiting:
        children = list(waiting.pop().next.values())
        nodes += children
        waiting += children
    for which, pool in enumerate(cache.pools):
        counted = Counter(p for seq in live for p in seq.pages[which] if p != FREED)
        counted.update(node.pages[which] for node in nodes if node.pages[which] != FREED)
        assert [counted[p] for p in range(pool.n_pages)] == pool.holders
        assert sorted(pool.free) == [p for p in range(pool.n_pages) if not counted[p]]
        in_tree = {node.pages[which] for node in nodes}
        assert pool.idle == sum(counted[p] == 1 for p in in_tree if p != FREED)
        assert pool.reserved == sum(seq.reserved[which] for seq in live)
        assert pool.n_available >= 0
    for seq in live:
        for pool, pages in zip(cache.pools, seq.pages, strict=True):
            assert len(pages) == -(-len(seq) // PAGE)
            last_seen = pool.first_seen(len(seq))
            assert FREED not in pages[last_seen:]
        assert len(seq.nodes) <= len(seq) // PAGE
        for p, node in enumerate(seq.nodes):
            assert node.ids == tuple(seq.ids[p * PAGE : (p + 1) * PAGE])
            which = cache._whole.index
            assert node.pages[which] == seq.pages[which][p]
            assert node.parent is (seq.nodes[p - 1] if p else cache.tree.root_of(seq.lora))
    assert set(cache.tree.leaves) == {node for node in nodes if not node.next}
    for pool in cache.windows:
        kept = {node for node in nodes if node.pages[pool.index] != FREED}
        assert set(cache.tree.kept[pool]) == kept
    if cache.states:
        held = Counter(slot for seq in live for slot in seq.slots)
        held.update(node.state for node in nodes if node.state != NO_CHECKPOINT)
        slots = cache.slots
        assert slots._holders == [held[slot] for slot in range(slots.n_slots)]
        assert sorted([*held, *slots._free]) == list(range(slots.n_slots))
        assert Counter(slots.saved) == Counter(
            node for node in nodes if node.state != NO_CHECKPOINT
        )
        assert len(slots._used) <= slots._max_used
        assert slots.room == cache.n_sequences - sum(bool(seq.slots) for seq in live)
    tails = [node for node in nodes if len(node.ids) < PAGE]
    assert Counter(tail for each in cache.tree._tails.values() for tail in each) == Counter(tails)
    assert not any(tail.next for tail in tails)


class Walk(RuleBasedStateMachine):
    """Few tokens and few pages: texts share beginnings, and room runs out."""

    windows: tuple[int, ...] = (0,)
    kv_bytes: int | None = None
    has_tails = False

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(
            specs(*self.windows), CPU, N_CTX, n_sequences=2, kv_bytes=self.kv_bytes
        )
        self.live: list[Sequence] = []
        self.contents: dict[tuple[int, int], list[int]] = {}  # page of pool -> the tokens in it

    def text(self, seed: int, n: int) -> list[int]:
        """Two texts only, the same for the first 2.5 pages."""
        return [i if i < 80 else i + 1000 * (seed % 2) for i in range(n)]

    def write(self, seq: Sequence, start: int) -> None:
        """What kernels do: fill the slots; nobody else may see another token there."""
        for which in range(len(self.cache.pools)):
            for at in range(start, len(seq)):
                page = seq.pages[which][at // PAGE]
                assert page != FREED
                tokens = self.contents.setdefault((which, page), [-1] * PAGE)
                tokens[at % PAGE] = seq.ids[at]

    @rule(seed=st.integers(0, 3), n=st.integers(1, N_CTX + 3))
    def begin(self, seed: int, n: int) -> None:
        ids = self.text(seed, n)
        seq = self.cache.sequence(ids)
        assert len(seq) < n
        assert len(seq) % PAGE == 0 or self.has_tails
        self.live.append(seq)
        self.extend_to(seq, ids)

    @contextmanager
    def copies_followed(self) -> Iterator[None]:
        """A page that is copied has the same tokens in it."""
        copied = {id(pool): pool.copy for pool in self.cache.pools}

        def follow(which: int, page: int, to: int) -> None:
            self.contents[which, to] = list(self.contents.get((which, page), [-1] * PAGE))

        for which, pool in enumerate(self.cache.pools):
            pool.copy = lambda page, to, which=which: follow(which, page, to)  # type: ignore[method-assign,misc]
        try:
            yield
        finally:
            for pool in self.cache.pools:
                pool.copy = copied[id(pool)]  # type: ignore[method-assign]

    def extend_to(self, seq: Sequence, ids: list[int]) -> None:
        start = len(seq)
        before = lists(seq)
        own = before if start % PAGE == 0 else None  # a shared last page may have been copied
        try:
            with self.copies_followed():
                self.cache.extend(seq, ids[start:])
        except ContextFullError:
            assert len(seq) == start
            assert own is None or lists(seq) == own
            return
        self.write(seq, start)
        with self.copies_followed():
            self.cache.commit(seq)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9), seed=st.integers(0, 3), n=st.integers(1, N_CTX))
    def go_on_with(self, which: int, seed: int, n: int) -> None:
        seq = self.live[which % len(self.live)]
        ids = self.text(seed, n)
        kept = self.cache.match(seq, ids)
        assert kept == len(seq) < n
        assert seq.ids == ids[:kept]
        self.extend_to(seq, ids)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9), n=st.integers(0, N_CTX))
    def truncate(self, which: int, n: int) -> None:
        seq = self.live[which % len(self.live)]
        self.cache.truncate(seq, self.cache.truncation_length(seq, min(n, len(seq))))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9), n=st.integers(0, N_CTX), seed=st.integers(0, 3))
    def reserve(self, which: int, n: int, seed: int) -> None:
        """What is reserved is there, whatever another one takes meanwhile."""
        seq = self.live[which % len(self.live)]
        n = min(n, N_CTX - len(seq))
        before = lists(seq)
        promised = list(seq.reserved)
        try:
            self.cache.reserve(seq, n)
        except NoRoomError:
            assert (lists(seq), seq.reserved) == (before, promised)
            with pytest.raises(NoRoomError):
                self.cache.check_room(seq, n)
            return
        self.begin(seed, N_CTX)
        assert lists(seq) == before
        if n:
            length = len(seq)
            seed = int(len(seq) > 80 and seq.ids[80] > 1000)
            self.extend_to(seq, self.text(seed, length + n))
            assert len(seq) == length + n

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9))
    def fork(self, which: int) -> None:
        self.live.append(self.cache.fork(self.live[which % len(self.live)]))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9))
    def close(self, which: int) -> None:
        self.live.pop(which % len(self.live)).close()

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9))
    def retire(self, which: int) -> None:
        self.cache.retire(self.live.pop(which % len(self.live)))

    @rule()
    def revive(self) -> None:
        self.live.append(self.cache.revive())

    @rule()
    def forget(self) -> None:
        self.cache.forget()

    @invariant()
    def pages_are_counted(self) -> None:
        check_pages(self.cache, self.live)

    @invariant()
    def everybody_reads_their_own_tokens(self) -> None:
        for seq in (*self.live, *filter(None, [self.cache._retired])):
            for which in range(len(self.cache.pools)):
                for p, page in enumerate(seq.pages[which]):
                    ids = seq.ids[p * PAGE : (p + 1) * PAGE]
                    if page != FREED:
                        assert self.contents[which, page][: len(ids)] == ids

    def teardown(self) -> None:
        for seq in self.live:
            seq.close()
        self.cache.forget()
        for pool in self.cache.pools:
            assert len(pool.free) == pool.n_pages, "pages have leaked"


class WindowWalk(Walk):
    windows = (0, 40)


class ManyPoolsWalk(Walk):
    windows = (70, 0, 40, 0)


class WindowsAloneWalk(Walk):
    windows = (40, 100)


class FewBytesWalk(Walk):
    windows = (0, 40)
    kv_bytes = 10 * 2 * 4096  # ten pages of each, where two full sequences want 16


class StatesWalk(Walk):
    """What a sequence's state has seen is its text, whoever else reads that state."""

    has_tails = True

    def __init__(self) -> None:
        super().__init__()
        state = StateSpec("ssm", (9,), 5)
        self.cache = KVCache(
            (*specs(*self.windows), state), CPU, N_CTX, n_sequences=3, kv_bytes=self.kv_bytes
        )
        self.cache.slots = self.cache.tree.slots = StateSlots(3, 2)  # checkpoints give way soon
        self.seen: dict[int, list[int]] = {}  # by slot

    def write(self, seq: Sequence, start: int) -> None:
        super().write(seq, start)
        assert start == 0 or self.seen[seq.slots[0]] == seq.ids[:start]
        self.seen[seq.slots[1]] = list(seq.ids)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9))
    def fork(self, which: int) -> None:
        seq = self.live[which % len(self.live)]
        retired = self.cache._retired
        if not seq.slots or self.cache.slots.room or (retired is not None and retired.slots):
            self.live.append(self.cache.fork(seq))
        else:
            with pytest.raises(NoRoomError):
                self.cache.fork(seq)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9), pages=st.integers(1, 3))
    def read_whole_pages(self, which: int, pages: int) -> None:
        """So that there are checkpoints."""
        seq = self.live[which % len(self.live)]
        n = min((len(seq) // PAGE + pages) * PAGE, N_CTX)
        seed = int(len(seq) > 80 and seq.ids[80] > 1000)
        if n > len(seq):
            self.extend_to(seq, self.text(seed, n))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9), n=st.integers(1, 70), more=st.integers(0, 40))
    def read_to_the_end_of_a_system_prompt(self, which: int, n: int, more: int) -> None:
        """So that there are checkpoints within pages."""
        seq = self.live[which % len(self.live)]
        seed = int(len(seq) > 80 and seq.ids[80] > 1000)
        seq.system_end = len(seq) + n
        for end in (seq.system_end, seq.system_end + more):
            if len(seq) < end <= N_CTX:
                self.extend_to(seq, self.text(seed, end))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9), n=st.integers(1, N_CTX))
    def fail(self, which: int, n: int) -> None:
        """A run that is undone has written beside the state."""
        seq = self.live[which % len(self.live)]
        start = len(seq)
        ids = seq.ids[:]
        try:
            with self.copies_followed():
                self.cache.extend(seq, range(n))
        except ContextFullError:
            return
        super().write(seq, start)
        self.seen[seq.slots[1]] = [-1]
        self.cache.truncate(seq, start)
        assert seq.ids == ids

    @invariant()
    def states_have_seen_their_texts(self) -> None:
        for seq in (*self.live, *filter(None, [self.cache._retired])):
            if seq.ids:
                assert self.seen[seq.slots[0]] == seq.ids
                assert seq.n_state == len(seq.ids)


class StatesAloneWalk(StatesWalk):
    windows = ()


class StatesAndWindowWalk(StatesWalk):
    windows = (0, 40)


class StatesOfFewBytesWalk(StatesWalk):
    kv_bytes = 10 * 4096


WALKS = (Walk, WindowWalk, ManyPoolsWalk, WindowsAloneWalk, FewBytesWalk)
STATES_WALKS = (StatesWalk, StatesAloneWalk, StatesAndWindowWalk, StatesOfFewBytesWalk)
for walk in (*WALKS, *STATES_WALKS):
    walk.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestPages = Walk.TestCase
TestPagesWithAWindow = WindowWalk.TestCase
TestPagesOfManyPools = ManyPoolsWalk.TestCase
TestPagesOfWindowsAlone = WindowsAloneWalk.TestCase
TestPagesOfFewBytes = FewBytesWalk.TestCase
TestStates = StatesWalk.TestCase
TestStatesAlone = StatesAloneWalk.TestCase
TestStatesOfFewBytes = StatesOfFewBytesWalk.TestCase
TestStatesAndAWindow = StatesAndWindowWalk.TestCase


def filled(cache: KVCache, ids: range | list[int]) -> Sequence:
    seq = cache.sequence(ids)
    cache.extend(seq, ids[len(seq) :])
    cache.commit(seq)
    return seq


def known(cache: KVCache, ids: range | list[int]) -> int:
    """How much of a text the cache would save a new sequence."""
    seq = cache.sequence(ids)
    n = len(seq)
    seq.close()
    return n


def test_a_common_beginning_is_held_once() -> None:
    cache = KVCache(SEEN, CPU, N_CTX)
    first = filled(cache, range(100))
    second = cache.sequence([*range(70), 5, 6])
    assert len(second) == 64  # whole pages
    assert second.pages[0] == first.pages[0][:2]
    assert cache.pools[0].holders[first.pages[0][0]] == 3  # two sequences and the tree
    # the last token is always left to be computed
    assert known(cache, range(64)) == 32
    assert known(cache, range(65)) == 64


def test_pages_outlive_their_sequence_until_they_are_needed() -> None:
    cache = KVCache(SEEN, CPU, N_CTX)
    filled(cache, range(100)).close()
    assert known(cache, range(100)) == 96
    filled(cache, range(1000, 1000 + N_CTX)).close()  # needs nearly every page there is
    assert known(cache, range(100)) < 96
    check_pages(cache, [])


def test_the_least_recently_used_text_goes_first_and_from_its_end() -> None:
    cache = KVCache(SEEN, CPU, N_CTX)  # 8 pages
    for start in (0, 1000, 0):  # 0 is used again
        filled(cache, range(start, start + 3 * PAGE + 1)).close()
    filled(cache, range(2000, 2000 + 3 * PAGE + 1)).close()
    assert known(cache, range(4 * PAGE)) == 3 * PAGE
    assert known(cache, range(1000, 1000 + 4 * PAGE)) == 1 * PAGE


def test_beginnings_with_adapters_go_with_their_pages() -> None:
    """A client may ask for any scale: each is a beginning of its own."""
    cache = KVCache(SEEN, CPU, N_CTX)
    cache.tree.marks = (b"an adapter",)
    roots = cache.tree.roots
    for n, most in ((3, 0), (PAGE + 1, len(cache.pools[0].holders))):
        for i in range(20):
            seq = cache.sequence((), ((0, i + 1.0),))
            cache.extend(seq, range(n))
            cache.commit(seq)
            check_pages(cache, [seq])
            seq.close()
            assert len(cache.tree.roots) <= 1 + most
    assert len(cache.tree.roots) > 1
    cache.forget()
    assert cache.tree.roots == {(): roots[()]}


def test_a_fork_shares_all_and_copies_what_it_writes() -> None:
    cache = KVCache(SEEN, CPU, N_CTX)
    seq = filled(cache, range(50))
    pool = cache.pools[0]
    page = seq.pages[0][1]
    start = page * pool.cell_bytes
    size = pool.cell_bytes
    pool.const.array[start : start + size] = 7
    fork = cache.fork(seq)
    assert fork.pages == seq.pages
    cache.extend(fork, [1])
    assert fork.pages[0][0] == seq.pages[0][0]
    assert fork.pages[0][1] != seq.pages[0][1] == page
    copy = fork.pages[0][1] * size
    assert (pool.const.array[copy : copy + size] == 7).all()
    cache.extend(seq, [2])  # alone with its page now
    assert seq.pages[0][1] == page


def test_sequences_that_computed_the_same_text_end_with_one_copy() -> None:
    cache = KVCache(SEEN, CPU, N_CTX, n_sequences=2)
    a = cache.sequence()
    b = cache.sequence()
    for seq in (a, b):
        cache.extend(seq, range(2 * PAGE))
    assert a.pages != b.pages
    cache.commit(a)
    cache.commit(b)
    assert a.pages == b.pages
    check_pages(cache, [a, b])


def test_a_full_context_is_refused_before_anything_changes() -> None:
    cache = KVCache(SEEN, CPU, 40)
    seq = filled(cache, range(30))
    pages = lists(seq)
    with pytest.raises(ContextFullError, match="41 tokens do not fit the context of 40"):
        cache.extend(seq, range(11))
    assert (len(seq), lists(seq)) == (30, pages)
    cache.extend(seq, range(10))


def test_no_page_left_is_said_before_anything_changes() -> None:
    cache = KVCache(SEEN, CPU, N_CTX)  # 8 pages
    first = filled(cache, range(5 * PAGE))
    second = cache.sequence()
    for refuse in (cache.extend, lambda seq, ids: cache.check_room(seq, len(ids))):
        with pytest.raises(NoRoomError, match="the KV cache is full"):
            refuse(second, range(1000, 1000 + 4 * PAGE))
        assert (len(second), lists(second)) == (0, [[]])
        check_pages(cache, [first, second])
    cache.extend(second, range(1000, 1000 + 3 * PAGE))


def test_a_window_keeps_what_it_needs_and_no_more() -> None:
    window = 100
    n_ctx = 100 * PAGE
    cache = KVCache(specs(0, window), CPU, n_ctx)
    seen, local = cache.pools
    assert seen.n_pages == 101
    assert local.n_pages < 30  # of 100: (2 * 100 + 512) / 32, and two
    seq = cache.sequence()
    for start in range(0, n_ctx, 500):
        cache.extend(seq, range(start, min(start + 500, n_ctx)))
        cache.commit(seq)
        check_pages(cache, [seq])
    kept = [page for page in seq.pages[1] if page != FREED]
    assert len(kept) == 4  # 100 tokens lie in at most 5 pages, and 3200 is where a page ends
    assert FREED not in seq.pages[0]


def test_a_window_can_go_back_only_as_far_as_its_pages() -> None:
    cache = KVCache(specs(0, 64), CPU, N_CTX)
    seq = filled(cache, range(200))  # pages 0..3 are gone: the next token sees 137 and later
    assert lists(seq)[1][:5] == [FREED] * 4 + [seq.pages[1][4]]
    assert cache.truncation_length(seq, 195) == 195
    assert cache.truncation_length(seq, 192) == 192
    assert cache.truncation_length(seq, 190) == 0
    assert cache.truncation_length(seq, 0) == 0
    # but the tree still has the window of an earlier place
    kept = cache.match(seq, [*range(190), -1])
    assert kept == 160
    assert FREED in seq.pages[1][:3]
    assert FREED not in seq.pages[1][3:]
    check_pages(cache, [seq])


def test_a_chain_whose_window_was_evicted_is_not_used() -> None:
    cache = KVCache(specs(0, 64), CPU, N_CTX)
    filled(cache, range(200)).close()
    while cache.tree.evict(cache.pools[1]):
        pass
    assert known(cache, range(200)) == 0
    seq = filled(cache, range(200))  # and is mended by whoever computes it again
    assert known(cache, range(200)) == 192
    check_pages(cache, [seq])


def test_long_texts_cost_memory_in_proportion() -> None:
    """Keys of the tree are a page's own tokens: with whole beginnings this would be gigabytes."""
    cache = KVCache(specs(0), CPU, 1 << 17)
    seq = filled(cache, range(1 << 17))
    assert sum(len(node.ids) for node in seq.nodes) == 1 << 17
    assert known(cache, range(1 << 17)) == (1 << 17) - PAGE


@pytest.mark.parametrize("kv", KV_FORMATS)
def test_memory_reserved(kv: str) -> None:
    cache = KVCache(SEEN, CPU, N_CTX, kv, n_sequences=3)
    floats = {"f32": 4, "f16": 2, "bf16": 2}
    codes = {"q8_0": 8, "q5_0": 5, "q5_1": 6, "q4_0": 4, "iq4_nl": 4}  # q5_1: with a minimum
    per_value = floats[kv] if kv in floats else codes[kv] / 8 + 4 / 32
    assert cache.n_bytes == 8 * PAGE * 3 * 2 * 2 * 32 * per_value
    memory = cache.pools[0].const.memory
    assert isinstance(memory, HostMemory)
    assert memory.address % 64 == 0


def test_keys_and_values_of_different_types() -> None:
    """A page has the bytes of both, and two of one type are that type."""
    same, one, two = (KVCache(SEEN, CPU, N_CTX, kv) for kv in ("q8_0-q8_0", "q8_0", "q5_1"))
    assert (same.kv, same.n_bytes) == ("q8_0", one.n_bytes)
    both = KVCache(SEEN, CPU, N_CTX, "q8_0-q5_1")
    assert both.kv == "q8_0-q5_1"
    assert 2 * both.n_bytes == one.n_bytes + two.n_bytes


@pytest.mark.parametrize("n_ctx", [1 << 44, 1 << 62])
def test_more_than_any_memory(n_ctx: int) -> None:
    with pytest.raises(TreadleError, match="MiB of keys and values"):
        KVCache(SEEN, CPU, n_ctx)


@given(
    pools=st.lists(st.tuples(st.integers(1, 500), st.integers(0, 5000)), min_size=1, max_size=4),
    share=st.floats(0, 1.5),
)
def test_as_many_pages_as_bytes_hold(pools: list[tuple[int, int]], share: float) -> None:
    full = [n for n, _ in pools]
    sizes = [size for _, size in pools]

    def n_bytes(pages: list[int]) -> int:
        return sum(n * size for n, size in zip(pages, sizes, strict=True))

    most = int(share * n_bytes(full))
    if most < sum(sizes):
        with pytest.raises(TreadleError, match=f"kv_bytes={most}: expected at least {sum(sizes)} "):
            pages_within(most, full, sizes)
        return
    pages = pages_within(most, full, sizes)
    assert n_bytes(pages) <= most
    assert pages == [min(max(pages), n) for n in full]
    more = [min(max(pages) + 1, n) for n in full]
    assert pages == full or n_bytes(more) > most


def test_few_bytes_are_for_all_sequences() -> None:
    """The context of one stays what it is; what is full is said in tokens."""
    both = specs(0, 40)
    page = 4096  # 32 tokens, 32 dims, keys and values in f16
    full = KVCache(both, CPU, N_CTX, n_sequences=3)
    assert full.n_tokens == 3 * N_CTX
    assert KVCache(both, CPU, N_CTX, n_sequences=3, kv_bytes=full.n_bytes).n_bytes == full.n_bytes
    assert KVCache(both, CPU, N_CTX, n_sequences=3, kv_bytes=1 << 40).n_bytes == full.n_bytes
    cache = KVCache(both, CPU, N_CTX, n_sequences=3, kv_bytes=2 * 5 * page + page)
    assert (cache.n_bytes, cache.n_tokens, cache.n_ctx) == (10 * page, 5 * PAGE, N_CTX)
    long = cache.sequence()
    short = cache.sequence()
    cache.extend(long, range(4 * PAGE))
    cache.extend(short, range(PAGE))
    with pytest.raises(
        NoRoomError, match=r"capacity 160 tokens\): close a session, or raise kv_byt"
    ):
        cache.extend(short, [1])
    with pytest.raises(ContextFullError, match=f"do not fit the context of {N_CTX}"):
        cache.check_context(N_CTX + 1)
    with pytest.raises(
        TreadleError, match=r"at least 8192 \(1 MiB\), a page of 32 tokens in every"
    ):
        KVCache(both, CPU, N_CTX, kv_bytes=2 * page - 1)
    cache = KVCache(both, CPU, N_CTX, n_sequences=3, kv_tokens=4 * PAGE)
    assert (cache.n_bytes, cache.n_tokens) == (2 * 7 * page, 4 * PAGE)
    long = cache.sequence()
    short = cache.sequence()
    cache.extend(long, range(5 * PAGE))  # pages that are not full of others are there
    cache.extend(short, range(2 * PAGE))
    with pytest.raises(
        NoRoomError, match=r"capacity 128 tokens\): close a session, or raise kv_tok"
    ):
        cache.extend(short, [1])


def test_formats_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="unknown KV format 'q3'"):
        KVCache(SEEN, CPU, N_CTX, "q3")
    with pytest.raises(UnsupportedError, match="head dims that are a multiple of 32"):
        KVCache([PoolSpec("kv", (0,), 1, 16, 16, 0)], CPU, N_CTX, "q8_0")


# -- states ---------------------------------------------------------------------------------------


def with_state(n_sequences: int = 2) -> KVCache:
    states = (StateSpec("conv", (1, 2), 10), StateSpec("ssm", (3,), 5))
    return KVCache((*specs(0), *states), CPU, N_CTX, n_sequences=n_sequences)


def test_a_state_is_written_beside_the_one_that_is_read() -> None:
    """So a run that failed, and is undone or done again, has spoilt nothing."""
    cache = with_state()
    seq = cache.sequence()
    assert not seq.slots  # nothing is held before the first token
    cache.extend(seq, range(5))
    first, second = seq.slots
    cache.commit(seq)
    assert seq.slots == [second, first]
    cache.extend(seq, range(5, 8))
    cache.truncate(seq, 5)  # the run failed
    assert seq.slots == [second, first]
    check_pages(cache, [seq])
    seq.close()
    check_pages(cache, [])


def test_a_checkpoint_is_the_state_itself() -> None:
    """At the end of a run that read whole pages; the sequence then goes on beside it."""
    cache = with_state()
    seq = filled(cache, range(64))
    (node,) = seq.nodes[1:]
    assert node.state == seq.slots[0]
    cache.extend(seq, range(64, 70))
    cache.commit(seq)
    assert node.state not in seq.slots
    assert (cache.truncation_length(seq, 69), cache.truncation_length(seq, 63)) == (64, 0)
    assert known(cache, range(100)) == 64
    other = cache.sequence(range(100))
    assert (other.ids, other.slots[0]) == (list(range(64)), node.state)
    check_pages(cache, [seq, other])
    assert cache.match(seq, [*range(66), 5]) == 64
    assert seq.slots[0] == node.state
    check_pages(cache, [seq, other])


def test_tokens_that_are_written_leave_few_checkpoints() -> None:
    cache = with_state()
    seq = filled(cache, range(1))
    for token in range(1, 2 * PAGE):
        cache.extend(seq, [token])
        cache.commit(seq)
    assert [node.state for node in seq.nodes] == [NO_CHECKPOINT, NO_CHECKPOINT]


def test_a_long_prompt_is_cut_at_its_last_page() -> None:
    cache = KVCache(SEEN, CPU, 4 * MIN_SAVING)
    seq = cache.sequence()
    assert cache.run_length(seq, range(MIN_SAVING + 5)) == MIN_SAVING + 5  # there is no state
    cache = KVCache((*SEEN, StateSpec("ssm", (9,), 5)), CPU, 4 * MIN_SAVING)
    seq = cache.sequence()
    lengths = [cache.run_length(seq, range(n)) for n in (5, MIN_SAVING - 1, MIN_SAVING + 5)]
    assert lengths == [5, MIN_SAVING - 1, MIN_SAVING]
    cache.extend(seq, range(MIN_SAVING))
    cache.commit(seq)
    # What is saved already is worth no run.
    lengths = [cache.run_length(seq, range(n)) for n in (5, PAGE + 3, MIN_SAVING + 3)]
    assert lengths == [5, PAGE + 3, MIN_SAVING]


def test_a_prompt_that_begins_like_another_is_cut_where_they_part() -> None:
    """Their beginning is short, but it comes again: the third finds it."""
    cache = KVCache((*SEEN, StateSpec("ssm", (9,), 5)), CPU, 4 * MIN_SAVING)

    def read(ids: list[int]) -> list[int]:
        """How many tokens are found, and those of each run."""
        seq = cache.sequence()
        sizes = []
        sizes.append(cache.match(seq, ids))
        while len(seq.ids) < len(ids):
            left = ids[len(seq.ids) :]
            sizes.append(cache.run_length(seq, left))
            cache.extend(seq, left[: sizes[-1]])
            cache.commit(seq)
        seq.close()
        return sizes

    shared = list(range(2 * PAGE))
    n = 2 * PAGE + 20
    assert read([*shared, *[7] * 20]) == [0, n]
    assert read([*shared, *[8] * 20]) == [0, 2 * PAGE, 20]
    assert read([*shared, *[9] * 20]) == [2 * PAGE, 20]
    assert read([*range(PAGE), *[3] * (PAGE + 20)]) == [0, n]  # a page alone is worth no run


def test_a_state_does_not_go_back() -> None:
    cache = with_state()
    seq = filled(cache, range(100))
    assert (
        cache.truncation_length(seq, 100),
        cache.truncation_length(seq, 99),
        cache.truncation_length(seq, 64),
    ) == (100, 0, 0)
    assert known(cache, range(100)) == 0  # the tree has pages, and no state to go with them
    assert cache.match(seq, [*range(100), 5]) == 100
    assert cache.match(seq, [*range(90), 5]) == 0
    assert (len(seq), seq.slots) == (0, [])


@pytest.mark.parametrize("window", [0, 40])
def test_what_reads_alone_shares_once_it_retires(window: int) -> None:
    cache = KVCache(specs(0, window), CPU, 400, n_sequences=3) if window else with_state()
    first = filled(cache, range(100))
    seq = cache.sequence()
    seq.is_unshared = True
    assert cache.match(seq, range(200, 300)) == cache.match(seq, range(100)) == 0
    cache.extend(seq, range(100))
    cache.commit(seq)
    for mine, others in zip(seq.pages, first.pages, strict=True):
        assert not ({*mine} & {*others}) - {FREED}
    assert cache.match(seq, [*range(100), 5]) == 100  # its own
    check_pages(cache, [first, seq])
    cache.retire(seq)
    assert seq.pages[cache._whole.index][:3] == first.pages[cache._whole.index][:3]
    check_pages(cache, [first])


def test_a_fork_reads_the_same_state_and_writes_its_own() -> None:
    cache = with_state()
    seq = filled(cache, range(40))
    fork = cache.fork(seq)
    assert fork.slots[0] == seq.slots[0]  # which nobody writes to
    assert fork.slots[1] != seq.slots[1]
    check_pages(cache, [seq, fork])
    with pytest.raises(ContextFullError, match=r"the KV cache is full \(conv: no free state"):
        cache.fork(seq)
    third = cache.sequence()
    for refuse in (cache.extend, lambda seq, ids: cache.check_room(seq, len(ids))):
        with pytest.raises(ContextFullError, match=r"the KV cache is full \(conv: no free state"):
            refuse(third, [1])
    check_pages(cache, [seq, fork, third])


def test_states_lie_layer_behind_layer() -> None:
    conv, ssm = with_state().states
    assert (conv.cell_bytes, conv.layer_off(1), conv.layer_off(2)) == (128, 0, 64)  # 40 bytes each
    assert (ssm.cell_bytes, ssm.layer_off(3)) == (64, 0)


def test_a_model_of_states_alone() -> None:
    cache = KVCache([StateSpec("ssm", (0,), 5)], CPU, N_CTX)
    assert cache.states_of(0) is cache.states[0]
    seq = filled(cache, range(100))
    with pytest.raises(ContextFullError, match="do not fit the context"):
        cache.check_room(seq, N_CTX)
    assert cache.n_bytes == cache.slots.n_slots * 64  # pages count tokens, and hold nothing


def test_a_page_is_copied_whole() -> None:
    cache = KVCache(SEEN, CPU, N_CTX)
    pool = cache.pools[0]
    pool.const.array[:] = np.arange(pool.const.array.size, dtype=np.uint32).astype(np.uint8)
    pages = pool.const.array.reshape(pool.n_pages, -1)
    pages[3] = 9
    before = pages.copy()
    pool.copy(3, 5)
    before[5] = 9
    assert (pages == before).all()
