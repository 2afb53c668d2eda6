from __future__ import annotations

from typing import Any

from treadle.distributed.cluster.affinity import BLOCK, KNOWN, SLACK, Affinity, beginning


def talk(*contents: str) -> list[str]:
    return beginning({"messages": [{"role": "user", "content": c} for c in contents]})


def test_bodies_that_begin_alike_have_names_alike() -> None:
    system = "You are kind. " * 40
    a = talk(system, "one")
    b = talk(system, "two")
    shared = len(system) // BLOCK
    assert a[:shared] == b[:shared]
    assert a[-1] != b[-1]
    assert not set(talk("other " * 100)) & set(a)
    assert len(beginning({"prompt": "x" * (BLOCK * 3)})) == 4  # a line for the instructions
    assert beginning({"prompt": "a", "seed": 1}) == beginning({"prompt": "a", "seed": 2})
    without: list[Any] = [{}, [], "a", None, {"messages": None, "model": "m"}]
    for body in without:
        assert beginning(body) == []
    assert beginning({"prompt": "\ud800"})  # whatever a client may send


def test_a_talk_stays_where_it_began() -> None:
    affinity = Affinity()
    loads = {"a": 0, "b": 0, "c": 0}
    turns = ["first question " * 30]
    chosen = affinity.choose(talk(*turns), loads)
    for i in range(5):
        turns += [f"answer {i} " * 30, f"question {i} " * 30]
        assert affinity.choose(talk(*turns), {**loads, chosen: SLACK}) == chosen


def test_a_busy_replica_is_left_and_its_beginning_then_known_twice() -> None:
    affinity = Affinity()
    names = talk("the same " * 100)
    first = affinity.choose(names, {"a": 0, "b": 0})
    other = {"a": "b", "b": "a"}[first]
    assert affinity.choose(names, {first: SLACK + 1, other: 0}) == other
    assert affinity.choose(names, {first: 0, other: 1}) == other


def test_a_replica_that_is_gone_is_not_chosen() -> None:
    affinity = Affinity()
    names = talk("the same " * 100)
    first = affinity.choose(names, {"a": 0, "b": 0})
    left = {"a": "b", "b": "a"}[first]
    assert affinity.choose(names, {left: 7}) == left


def test_what_nobody_has_read_goes_to_the_idlest_and_is_spread() -> None:
    loads = {name: 0 for name in "abcd"}
    assert Affinity().choose(talk("x"), {**loads, "c": 1, "a": 3, "b": 2, "d": 4}) == "c"
    counts = {name: 0 for name in loads}
    for i in range(400):
        names = talk(f"question {i} " * 30)
        chosen = Affinity().choose(names, loads)
        assert chosen == Affinity().choose(names, dict(reversed(loads.items())))
        counts[chosen] += 1
    assert min(counts.values()) > 60


def test_what_is_remembered_is_bounded() -> None:
    affinity = Affinity()
    for i in range(KNOWN // 200 + 50):
        affinity.choose([f"{i}.{j}" for j in range(200)], {"a": 0})
    assert len(affinity._readers) == KNOWN
