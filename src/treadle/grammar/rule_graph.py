"""Graph of a grammar's rules: references between rules, and recursion."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

from treadle.grammar.gbnf import EMPTY, Alternatives, Concatenation, Node, Repeat, RuleRef

T = TypeVar("T", bound=Hashable)


def nodes(body: Node) -> Iterator[Node]:
    """Yield every node of a rule's tree, parents first."""
    waiting = [body]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, Concatenation | Alternatives):
            waiting += reversed(node.items)
        elif isinstance(node, Repeat):
            waiting.append(node.item)


def refs(body: Node) -> list[str]:
    """Return the names of the rules that a tree refers to, each once, in the order of their first
    reference.
    """
    return list(dict.fromkeys(node.name for node in nodes(body) if isinstance(node, RuleRef)))


def components(edges: Mapping[T, Sequence[T]]) -> list[list[T]]:
    """Return the strongly connected components of a graph, each after all components that it leads
    to (Tarjan).
    """
    index: dict[T, int] = {}
    low: dict[T, int] = {}
    stack: list[T] = []
    on_stack: set[T] = set()
    found: list[list[T]] = []
    for root in edges:
        if root in index:
            continue
        path = [(root, iter(edges[root]))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while path:
            node, rest = path[-1]
            for other in rest:
                if other not in index:
                    index[other] = low[other] = len(index)
                    stack.append(other)
                    on_stack.add(other)
                    path.append((other, iter(edges[other])))
                    break
                if other in on_stack:
                    low[node] = min(low[node], index[other])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[node])
                if low[node] == index[node]:
                    part: list[T] = []
                    while not part or part[-1] != node:
                        part.append(stack.pop())
                    on_stack.difference_update(part)
                    found.append(part)
    return found


def expanded(bodies: Mapping[str, Node]) -> int:
    """Return the number of nodes of ``root`` with every reference replaced by the rule's body; no
    rule may be recursive.
    """
    sizes: dict[str, int] = {}
    for (name,) in components({name: refs(body) for name, body in bodies.items()}):
        parts = nodes(bodies[name])
        sizes[name] = sum(sizes[part.name] if isinstance(part, RuleRef) else 1 for part in parts)
    return sizes["root"]


def recursive(bodies: dict[str, Node]) -> set[str]:
    """Return the names of the recursive rules."""
    edges = {name: refs(bodies[name]) for name in bodies}
    loops = {name for name in bodies if name in edges[name]}
    parts = [part for part in components(edges) if len(part) > 1]
    return loops | {name for part in parts for name in part}


def reachable(bodies: dict[str, Node]) -> dict[str, Node]:
    """Return the rules that ``root`` refers to, directly or not, and ``root``."""
    found: dict[str, Node] = {}
    waiting = ["root"]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = bodies[name]
            waiting += reversed(refs(bodies[name]))
    return found


def unrolled(bodies: dict[str, Node]) -> dict[str, Node]:
    """Replace each unbounded repetition of a recursive rule (``node*``) by a rule of its own that
    repeats the alternatives of ``node``.

    In ``node ::= "<" node* ">" | [^<>]+`` two texts may be adjacent, so every letter could end one
    of them. As one repetition of all alternatives they are one text.
    """
    inner = recursive(bodies)
    stars: dict[Node, str] = {}
    done: dict[str, Node] = {}

    def units(node: Node, seen: set[str]) -> list[Node]:
        if isinstance(node, Alternatives):
            return [unit for item in node.items for unit in units(item, seen)]
        if isinstance(node, RuleRef) and node.name in inner:
            if node.name in seen:
                return []  # already included
            seen.add(node.name)
            return units(bodies[node.name], seen)
        return [node]

    def rewrite(node: Node) -> Node:
        if isinstance(node, Concatenation | Alternatives):
            return type(node)(tuple(map(rewrite, node.items)))
        if not isinstance(node, Repeat):
            return node
        items = node.item.items if isinstance(node.item, Alternatives) else (node.item,)
        names = [item.name for item in items if isinstance(item, RuleRef)]
        if node.most is not None or not inner.intersection(names):
            return Repeat(rewrite(node.item), node.least, node.most)
        name = stars.setdefault(node.item, f"{names[0]} * {len(stars)}")
        return Concatenation((Repeat(rewrite(node.item), node.least, node.least), RuleRef(name)))

    waiting: list[tuple[str, Node]] = list(bodies.items())
    for name, body in waiting:
        known = len(stars)
        done[name] = rewrite(body)
        for item, star in list(stars.items())[known:]:
            whole = Alternatives(tuple(units(item, set())))
            waiting.append((star, Alternatives((Concatenation((whole, RuleRef(star))), EMPTY))))
    return done
