"""Checkpoints of states: within a page, where prompts part, which ones give way."""

from __future__ import annotations

import pytest

from tests.kvcache.test_cache import CPU, SEEN, check_pages, known, specs
from treadle.kernels.run_state import PAGE
from treadle.kvcache.cache import KVCache, Sequence
from treadle.kvcache.page_pool import (
    MIN_SAVING,
    MIN_SAVING_AT_BRANCH,
    NO_CHECKPOINT,
    PARTING,
    RUN,
    SYSTEM,
    StateSlots,
)
from treadle.models.config import StateSpec

SSM = StateSpec("ssm", (9,), 5)
SYSTEM_END = 2 * PAGE + 9
HEAD = list(range(SYSTEM_END))


def with_states(*windows: int, n_sequences: int = 3, kv_bytes: int | None = None) -> KVCache:
    pools = specs(*windows) if windows else SEEN
    n_ctx = 32 * MIN_SAVING
    return KVCache((*pools, SSM), CPU, n_ctx, n_sequences=n_sequences, kv_bytes=kv_bytes)


def read(cache: KVCache, ids: list[int], system_end: int = 0) -> tuple[Sequence, list[int]]:
    """A sequence of ``ids``; how many tokens are found, and those of each run."""
    seq = cache.sequence()
    seq.system_end = system_end
    sizes = [cache.match(seq, ids)]
    while len(seq.ids) < len(ids):
        left = ids[len(seq.ids) :]
        sizes.append(cache.run_length(seq, left))
        cache.extend(seq, left[: sizes[-1]])
        cache.commit(seq)
    return seq, sizes


def question(i: int, n: int = 20) -> list[int]:
    return [1000 * (i + 1) + at for at in range(n)]


@pytest.mark.parametrize("windows", [(), (0, 40), (40,)])
def test_a_system_prompt_that_ends_within_a_page_is_read_once(windows: tuple[int, ...]) -> None:
    cache = with_states(*windows)
    first, sizes = read(cache, [*HEAD, *question(0)], SYSTEM_END)
    assert sizes == [0, SYSTEM_END, 20]
    second, sizes = read(cache, [*HEAD, *question(1)], SYSTEM_END)
    assert sizes == [SYSTEM_END, 20]
    assert (first.state_from, second.state_from) == ("none", SYSTEM)
    for mine, others in zip(second.pages, first.pages, strict=True):
        assert mine[2] != others[2]  # each writes to its own page
    check_pages(cache, [first, second])
    assert known(cache, [*HEAD, 5]) == SYSTEM_END
    assert known(cache, HEAD) == 0  # the last token is always read
    assert known(cache, [*HEAD[:-1], 5, 5]) == 0  # found as a whole, or not: no one can guess it
    cache.forget()
    for seq in (first, second):
        seq.close()
    cache.forget()
    check_pages(cache, [])
    assert all(len(pool.free) == pool.n_pages for pool in cache.pools)


def test_a_system_prompt_at_a_page_edge_needs_no_page() -> None:
    cache = with_states()
    head = list(range(2 * PAGE))
    seq, sizes = read(cache, [*head, *question(0)], len(head))
    assert (sizes, cache.slots.place_of(seq.nodes[-1])) == ([0, 64, 20], SYSTEM)
    assert read(cache, [*head, *question(1)], len(head))[1] == [64, 20]


def test_a_short_system_prompt_is_worth_no_run() -> None:
    n = MIN_SAVING_AT_BRANCH - 1
    assert read(with_states(), [*HEAD[:n], *question(0)], n)[1] == [0, n + 20]


def test_a_question_is_not_cut_because_of_what_is_saved_within_a_page() -> None:
    """A checkpoint within a page saves what one at an earlier edge would."""
    cache = with_states()
    head = list(range(MIN_SAVING + 40))
    for i in range(2):
        seq, sizes = read(cache, [*head, *question(i, 50)], len(head))
        seq.close()
    assert sizes == [len(head), 50]


def test_two_system_prompts_that_begin_alike_part_at_a_page() -> None:
    cache = with_states()
    seqs = []
    for i in range(2):
        head = [*range(3 * PAGE + 5), *question(i, 3 * PAGE)]
        seq, sizes = read(cache, [*head, *question(7)], len(head))
        seqs.append(seq)
    assert sizes == [0, 3 * PAGE, 3 * PAGE + 5, 20]
    assert cache.slots.place_of(seqs[1].nodes[2]) == PARTING
    third, sizes = read(cache, [*range(3 * PAGE + 5), 7, 7])
    assert sizes == [3 * PAGE, 7]
    check_pages(cache, [*seqs, third])


def test_a_text_that_fills_the_cache_takes_the_page_within_which_its_state_was_kept() -> None:
    n_pages = 5
    cache = with_states(n_sequences=2, kv_bytes=n_pages * 2 * 4096)
    seq, _ = read(cache, [*HEAD, *question(0)], SYSTEM_END)
    seq.close()
    seq = cache.sequence([*HEAD, 5])
    assert len(seq) == SYSTEM_END
    cache.reserve(seq, n_pages * PAGE - SYSTEM_END)  # all there is: nothing is left for a copy
    check_pages(cache, [seq])
    cache.extend(seq, range(n_pages * PAGE - SYSTEM_END))
    cache.commit(seq)
    check_pages(cache, [seq])


def test_a_state_within_a_page_that_gave_way_comes_back_without_another_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its page is still there: taking one could evict somebody's."""
    cache = with_states()
    seq, _ = read(cache, [*HEAD, *question(0)], SYSTEM_END)
    seq.close()
    (tail,) = (node for node in cache.slots.saved if len(node.ids) < PAGE)
    cache.slots.forget(tail)
    assert known(cache, [*HEAD, 5]) < SYSTEM_END
    save = cache._save_tail

    def save_without_pages(seq: Sequence) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(cache, "_take", None)
            save(seq)

    monkeypatch.setattr(cache, "_save_tail", save_without_pages)
    seq, _ = read(cache, [*HEAD, *question(1)], SYSTEM_END)
    assert known(cache, [*HEAD, 5]) == SYSTEM_END
    check_pages(cache, [seq])


def test_no_page_no_checkpoint_within_one() -> None:
    cache = with_states(n_sequences=2, kv_bytes=3 * 2 * 4096)
    seq, sizes = read(cache, [*HEAD, 5], SYSTEM_END)
    assert (sizes, cache.slots.saved) == ([0, SYSTEM_END, 1], [])
    check_pages(cache, [seq])


def test_erasing_a_text_erases_its_system_prompt_where_no_one_else_has_it() -> None:
    cache = with_states()
    ids = [*HEAD, *question(0)]
    seq, _ = read(cache, ids, SYSTEM_END)
    other = cache.sequence([*HEAD, 5])
    seq.close()
    cache.tree.erase(ids)
    assert known(cache, [*HEAD, 5]) == SYSTEM_END
    other.close()
    cache.tree.erase(ids)
    assert not cache.tree.root.next
    check_pages(cache, [])


def test_states_that_prompts_use_give_way_last() -> None:
    """A long text, or many of them, do not evict the state that all others begin with."""
    cache = with_states(n_sequences=2)
    cache.slots = cache.tree.slots = StateSlots(2, 4)
    seq, _ = read(cache, [*HEAD, *question(0)], SYSTEM_END)
    seq.close()
    for i in range(1, 9):
        seq, _ = read(cache, question(i, 3 * MIN_SAVING))
        seq.close()
    assert known(cache, [*HEAD, 5]) == SYSTEM_END
    used = [question(i, MIN_SAVING) for i in range(20, 30)]
    for ids in used:  # each is found once more
        for _ in range(2):
            seq, _ = read(cache, [*ids, 5, 5])
            seq.close()
    assert known(cache, [*HEAD, 5]) == 0  # the least recently used of them
    assert known(cache, [*used[-1], 5]) == MIN_SAVING
    check_pages(cache, [])


def test_a_long_text_keeps_few_checkpoints() -> None:
    """Where any beginning of it goes on in another way, less than half of it is read again, or less
    than two runs.
    """
    n = 256 * MIN_SAVING
    cache = KVCache((*SEEN, SSM), CPU, n)
    cache.slots = cache.tree.slots = StateSlots(1, 60)
    seq = cache.sequence()
    for _ in range(n // MIN_SAVING):
        cache.extend(seq, range(MIN_SAVING))
        cache.commit(seq)
    kept = [p * PAGE for p, node in enumerate(seq.nodes, 1) if node.state != NO_CHECKPOINT]
    assert len(kept) <= 4 * 8
    assert kept[-1] == n
    for before, after in zip([0, *kept], kept, strict=False):
        assert after - before <= max(2 * MIN_SAVING, min(before, n - after) // 2)
    assert {cache.slots.place_of(node) for node in cache.slots.saved} == {RUN}
