"""Pages: who holds which. A random walk over every operation, then each promise by itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.conftest import WriteTiny
from treadle.errors import ContextFullError, TreadleError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.kernels.kv import KV_FORMATS, PAGE
from treadle.kvcache import GONE, KVCache, Sequence
from treadle.models.archs import ARCHS
from treadle.models.config import Config, load_config

N_CTX = 7 * PAGE


def config(window: int = 0) -> Config:
    """Two layers, the second with a window if there is one."""
    fields: dict[str, Any] = dict.fromkeys(Config.__dataclass_fields__, 0)
    fields |= {
        "arch": ARCHS["llama"],
        "n_layer": 2,
        "n_head": 2,
        "n_head_kv": 1,
        "head_dim": 32,
        "head_dim_v": 32,
        "sliding_window": window,
        "local_layers": (False, bool(window)),
    }
    return Config(**fields)


def lists(seq: Sequence) -> list[list[int]]:
    """A copy of a sequence's pages, which does not change with it."""
    return [list(pages) for pages in seq.pages]


def check_pages(cache: KVCache, live: list[Sequence]) -> None:
    """Every page's holders are counted, and a page is free exactly when it has none."""
    nodes, waiting = [], [cache._root]
    while waiting:
        children = list(waiting.pop().next.values())
        nodes += children
        waiting += children
    for which, pool in enumerate(cache.pools):
        counted = Counter(p for seq in live for p in seq.pages[which] if p != GONE)
        counted.update(node.pages[which] for node in nodes if node.pages[which] != GONE)
        assert [counted[p] for p in range(pool.n_pages)] == pool.holders
        assert sorted(pool.free) == [p for p in range(pool.n_pages) if not counted[p]]
    for seq in live:
        for pool, pages in zip(cache.pools, seq.pages, strict=True):
            assert len(pages) == -(-len(seq) // PAGE)
            last_seen = max(0, len(seq) - pool.window) // PAGE if pool.window else 0
            assert GONE not in pages[last_seen:]
        assert len(seq.nodes) <= len(seq) // PAGE
        for p, node in enumerate(seq.nodes):
            assert node.ids == tuple(seq.ids[p * PAGE : (p + 1) * PAGE])
            assert node.pages[0] == seq.pages[0][p]
            assert node.parent is (seq.nodes[p - 1] if p else cache._root)
    assert set(cache._leaves) == {node for node in nodes if not node.next}
    if cache.window:
        assert set(cache._windowed) == {node for node in nodes if node.pages[1] != GONE}


class Walk(RuleBasedStateMachine):
    """Few tokens and few pages: texts share beginnings, and room runs out."""

    window = 0

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(config(self.window), N_CTX, n_sequences=2)
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
                assert page != GONE
                tokens = self.contents.setdefault((which, page), [-1] * PAGE)
                tokens[at % PAGE] = seq.ids[at]

    @rule(seed=st.integers(0, 3), n=st.integers(1, N_CTX + 3))
    def begin(self, seed: int, n: int) -> None:
        ids = self.text(seed, n)
        seq = self.cache.sequence(ids)
        assert len(seq) < n
        assert len(seq) % PAGE == 0
        self.live.append(seq)
        self.extend_to(seq, ids)

    def extend_to(self, seq: Sequence, ids: list[int]) -> None:
        start, before = len(seq), lists(seq)
        own = before if start % PAGE == 0 else None  # a shared last page may have been copied
        copied = {id(pool): pool.copy for pool in self.cache.pools}

        def follow(which: int, page: int, to: int) -> None:
            self.contents[which, to] = list(self.contents.get((which, page), [-1] * PAGE))

        for which, pool in enumerate(self.cache.pools):
            pool.copy = lambda page, to, which=which: follow(which, page, to)  # type: ignore[method-assign,misc]
        try:
            self.cache.extend(seq, ids[start:])
        except ContextFullError:
            assert len(seq) == start
            assert own is None or lists(seq) == own
            return
        finally:
            for pool in self.cache.pools:
                pool.copy = copied[id(pool)]  # type: ignore[method-assign]
        self.write(seq, start)
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
        self.cache.truncate(seq, self.cache.visible(seq, min(n, len(seq))))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9))
    def fork(self, which: int) -> None:
        self.live.append(self.cache.fork(self.live[which % len(self.live)]))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 9))
    def close(self, which: int) -> None:
        self.live.pop(which % len(self.live)).close()

    @rule()
    def forget(self) -> None:
        self.cache.forget()

    @invariant()
    def pages_are_counted(self) -> None:
        check_pages(self.cache, self.live)

    @invariant()
    def everybody_reads_their_own_tokens(self) -> None:
        for seq in self.live:
            for which in range(len(self.cache.pools)):
                for p, page in enumerate(seq.pages[which]):
                    ids = seq.ids[p * PAGE : (p + 1) * PAGE]
                    if page != GONE:
                        assert self.contents[which, page][: len(ids)] == ids

    def teardown(self) -> None:
        for seq in self.live:
            seq.close()
        self.cache.forget()
        for pool in self.cache.pools:
            assert len(pool.free) == pool.n_pages, "pages have leaked"


class WindowWalk(Walk):
    window = 40


Walk.TestCase.settings = WindowWalk.TestCase.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None
)
TestPages = Walk.TestCase
TestPagesWithAWindow = WindowWalk.TestCase


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
    cache = KVCache(config(), N_CTX)
    first = filled(cache, range(100))
    second = cache.sequence([*range(70), 5, 6])
    assert len(second) == 64  # whole pages
    assert second.pages[0] == first.pages[0][:2]
    assert cache.pools[0].holders[first.pages[0][0]] == 3  # two sequences and the tree
    # the last token is always left to be computed
    assert known(cache, range(64)) == 32
    assert known(cache, range(65)) == 64


def test_pages_outlive_their_sequence_until_they_are_needed() -> None:
    cache = KVCache(config(), N_CTX)
    filled(cache, range(100)).close()
    assert known(cache, range(100)) == 96
    filled(cache, range(1000, 1000 + N_CTX)).close()  # needs nearly every page there is
    assert known(cache, range(100)) < 96
    check_pages(cache, [])


def test_the_least_recently_used_text_goes_first_and_from_its_end() -> None:
    cache = KVCache(config(), N_CTX)  # 8 pages
    for start in (0, 1000, 0):  # 0 is used again
        filled(cache, range(start, start + 3 * PAGE + 1)).close()
    filled(cache, range(2000, 2000 + 3 * PAGE + 1)).close()
    assert known(cache, range(4 * PAGE)) == 3 * PAGE
    assert known(cache, range(1000, 1000 + 4 * PAGE)) == 1 * PAGE


def test_a_fork_shares_all_and_copies_what_it_writes() -> None:
    cache = KVCache(config(), N_CTX)
    seq = filled(cache, range(50))
    pool = cache.pools[0]
    page = seq.pages[0][1]
    start, size = page * pool.page_bytes, pool.page_bytes
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
    cache = KVCache(config(), N_CTX, n_sequences=2)
    a, b = cache.sequence(), cache.sequence()
    for seq in (a, b):
        cache.extend(seq, range(2 * PAGE))
    assert a.pages != b.pages
    cache.commit(a)
    cache.commit(b)
    assert a.pages == b.pages
    check_pages(cache, [a, b])


def test_a_full_context_is_refused_before_anything_changes() -> None:
    cache = KVCache(config(), 40)
    seq = filled(cache, range(30))
    pages = lists(seq)
    with pytest.raises(ContextFullError, match="41 tokens do not fit the context of 40"):
        cache.extend(seq, range(11))
    assert (len(seq), lists(seq)) == (30, pages)
    cache.extend(seq, range(10))


def test_no_page_left_is_said_before_anything_changes() -> None:
    cache = KVCache(config(), N_CTX)  # 8 pages
    first, second = filled(cache, range(5 * PAGE)), cache.sequence()
    for refuse in (cache.extend, lambda seq, ids: cache.check_room(seq, len(ids))):
        with pytest.raises(ContextFullError, match="no page of keys and values left"):
            refuse(second, range(1000, 1000 + 4 * PAGE))
        assert (len(second), lists(second)) == (0, [[]])
        check_pages(cache, [first, second])
    cache.extend(second, range(1000, 1000 + 3 * PAGE))


def test_a_window_keeps_what_it_needs_and_no_more() -> None:
    window, n_ctx = 100, 100 * PAGE
    cache = KVCache(config(window), n_ctx)
    seen, local = cache.pools
    assert seen.n_pages == 101
    assert local.n_pages < 30  # of 100: (2 * 100 + 512) / 32, and two
    seq = cache.sequence()
    for start in range(0, n_ctx, 500):
        cache.extend(seq, range(start, min(start + 500, n_ctx)))
        cache.commit(seq)
        check_pages(cache, [seq])
    kept = [page for page in seq.pages[1] if page != GONE]
    assert len(kept) == 4  # 100 tokens lie in at most 5 pages, and 3200 is where a page ends
    assert GONE not in seq.pages[0]


def test_a_window_can_go_back_only_as_far_as_its_pages() -> None:
    cache = KVCache(config(64), N_CTX)
    seq = filled(cache, range(200))  # pages 0..3 are gone: the next token sees 137 and later
    assert lists(seq)[1][:5] == [GONE] * 4 + [seq.pages[1][4]]
    assert cache.visible(seq, 195) == 195
    assert cache.visible(seq, 192) == 192
    assert cache.visible(seq, 190) == 0
    assert cache.visible(seq, 0) == 0
    # but the tree still has the window of an earlier place
    kept = cache.match(seq, [*range(190), -1])
    assert kept == 160
    assert GONE in seq.pages[1][:3]
    assert GONE not in seq.pages[1][3:]
    check_pages(cache, [seq])


def test_a_chain_whose_window_was_evicted_is_not_used() -> None:
    cache = KVCache(config(64), N_CTX)
    filled(cache, range(200)).close()
    while cache._evict(cache.pools[1]):
        pass
    assert known(cache, range(200)) == 0
    seq = filled(cache, range(200))  # and is mended by whoever computes it again
    assert known(cache, range(200)) == 192
    check_pages(cache, [seq])


def test_long_texts_cost_memory_in_proportion() -> None:
    """Keys of the tree are a page's own tokens: with whole beginnings this would be gigabytes."""
    cache = KVCache(replace(config(), n_head_kv=1), 1 << 17)
    seq = filled(cache, range(1 << 17))
    assert sum(len(node.ids) for node in seq.nodes) == 1 << 17
    assert known(cache, range(1 << 17)) == (1 << 17) - PAGE


@pytest.mark.parametrize("kv", KV_FORMATS)
def test_memory_reserved(kv: str) -> None:
    cache = KVCache(config(), N_CTX, kv, n_sequences=3)
    per_value = {"f32": 4, "f16": 2, "bf16": 2, "q8_0": 1 + 4 / 32}[kv]
    assert cache.n_bytes == 8 * PAGE * 3 * 2 * 2 * 32 * per_value
    assert cache.pools[0].const.address % 64 == 0


@pytest.mark.parametrize("n_ctx", [1 << 44, 1 << 62])
def test_more_than_any_memory(n_ctx: int) -> None:
    with pytest.raises(TreadleError, match="MiB of keys and values"):
        KVCache(config(), n_ctx)


def test_formats_that_do_not_fit_are_refused(tiny: WriteTiny) -> None:
    with pytest.raises(UnsupportedError, match="no KV format 'q3'"):
        KVCache(config(), N_CTX, "q3")
    small = load_config(open_gguf(tiny(head_dim=16)))
    with pytest.raises(UnsupportedError, match="heads of a multiple of 32"):
        KVCache(small, N_CTX, "q8_0")


def test_a_page_is_copied_whole() -> None:
    cache = KVCache(config(), N_CTX)
    pool = cache.pools[0]
    pool.const.array[:] = np.arange(pool.const.array.size, dtype=np.uint32).astype(np.uint8)
    pages = pool.const.array.reshape(pool.n_pages, -1)
    pages[3] = 9
    before = pages.copy()
    pool.copy(3, 5)
    before[5] = 9
    assert (pages == before).all()
