"""The two tiers of the tests: ``make test`` runs the quick one, ``make test-all`` the rest.

Quick are all tests but

- those that need what ``make test`` does not install (``HEAVY``), themselves or by what they import
- folders of other machines, real models and whole programs (``OUTSIDE``)
- tests that are marked ``slow``
- of a test with more than ``MOST`` cases, all but ``MOST`` of them, spread evenly, unless it is
  marked ``every_case``

``TREADLE_TESTS`` says which tier runs: ``quick``, ``rest``, or both where it is not set.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

MOST = 4
ROOT = Path(__file__).resolve().parent
HEAVY = {
    "torch",
    "transformers",
    "mlx",
    "ray",
    "playwright",
    "openai",
    "anthropic",
    "ollama",
    "mcp",
}
OUTSIDE = ("devices/wgpu", "emulated", "notebooks", "page", "real", "release")
NAMED = re.compile(rf"\b(?:{'|'.join(sorted(HEAVY))})\b")
TAKEN = re.compile(r"^ *from tests\.([\w.]+) import", re.MULTILINE)
MAY_IMPORT = (ast.Import, ast.ImportFrom, ast.Tuple, ast.Call)  # see _imports_heavy
T = TypeVar("T")


def tier() -> str:
    return os.environ.get("TREADLE_TESTS", "")


_heavy: dict[Path, frozenset[str] | None] = {}


def heavy_names(path: Path) -> frozenset[str] | None:
    """The functions and fixtures of a file that need a heavy package, and what it imports of such;
    None where the file itself needs one.
    """
    if path not in _heavy:
        _heavy[path] = frozenset()  # for files that import each other
        text = path.read_text("utf-8")
        if may_be_heavy(text, path):
            _heavy[path] = _heavy_names(ast.parse(text), path)
    return _heavy[path]


def may_be_heavy(text: str, path: Path) -> bool:
    """Whether a file names a heavy package, or takes something of a file that needs one. Most do
    neither, and are not parsed: each process of a run asks this of every file.
    """
    if NAMED.search(text):
        return True
    taken = (module_path(each) for each in set(TAKEN.findall(text)))
    theirs = [path.with_name("conftest.py"), *taken]
    return any(each.is_file() and heavy_names(each) != frozenset() for each in theirs)


def module_path(name: str) -> Path:
    """The file of a module of the tests: ``kernels.rows`` is ``tests/kernels/rows.py``."""
    return ROOT.joinpath(*name.split(".")).with_suffix(".py")


def _heavy_names(tree: ast.Module, path: Path) -> frozenset[str] | None:
    found: set[str] = set()
    shared = path.with_name("conftest.py")
    if path != shared and shared.is_file():
        found |= heavy_names(shared) or set()
    functions: dict[str, set[str]] = {}  # and all names in each
    for node in tree.body:
        nodes = list(ast.walk(node))
        imports = any(_imports_heavy(each, found) for each in nodes if isinstance(each, MAY_IMPORT))
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            if imports:
                found.add(node.name)
            args = {each.arg for each in nodes if isinstance(each, ast.arg)}
            functions[node.name] = args | {each.id for each in nodes if isinstance(each, ast.Name)}
        elif imports:
            return None
    while more := {name for name, used in functions.items() if used & found} - found:
        found |= more
    # A fixture that every test of the file has.
    everywhere = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any("autouse=True" in ast.unparse(each) for each in node.decorator_list)
    }
    return None if everywhere & found else frozenset(found)


def _imports_heavy(node: ast.AST, found: set[str]) -> bool:
    """Whether a node imports a heavy package. Adds heavy names that it takes of other tests."""
    if isinstance(node, ast.Import):
        return any(alias.name.split(".")[0] in HEAVY for alias in node.names)
    if isinstance(node, ast.ImportFrom) and node.module:
        parts = node.module.split(".")
        path = module_path(".".join(parts[1:]))
        if parts[0] == "tests" and path.is_file():
            theirs = heavy_names(path)
            taken = {a.asname or a.name for a in node.names if theirs is None or a.name in theirs}
            found |= taken
            return theirs is None
        return parts[0] in HEAVY
    if isinstance(node, ast.Tuple) and node.elts:  # names of packages that a function asks for
        return all(getattr(each, "value", None) in HEAVY for each in node.elts)
    if isinstance(node, ast.Call) and node.args:
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if called in ("importorskip", "import_module", "find_spec"):
            return str(getattr(node.args[0], "value", "")).split(".")[0] in HEAVY
    return False


@cache
def is_outside(path: Path) -> bool:
    """Whether a file or folder of tests has no test of the quick tier."""
    if any(path.is_relative_to(ROOT / folder) for folder in OUTSIDE):
        return True
    return path.suffix == ".py" and path.is_file() and heavy_names(path) is None


def quick(cases: Sequence[T]) -> list[T]:
    """At most ``MOST`` cases of one test, spread evenly: the first and the last are among them."""
    n = len(cases)
    if n <= MOST:
        return list(cases)
    return [cases[i * (n - 1) // (MOST - 1)] for i in range(MOST)]


def split(
    items: Sequence[T], ids: Sequence[str], slow: Sequence[bool], every: Sequence[bool]
) -> tuple[list[T], list[T]]:
    """Return the items of the quick tier, and the rest, each in the order given. ``ids``: their
    node ids; ``slow``: whether they are marked so, or lie outside; ``every``: whether all cases of
    the test are quick. The choice does not depend on the order, which differs between runs.
    """
    cases: dict[str, list[int]] = {}
    for i in sorted(range(len(items)), key=ids.__getitem__):
        if not slow[i]:
            cases.setdefault(ids[i] if every[i] else ids[i].partition("[")[0], []).append(i)
    chosen = {i for each in cases.values() for i in quick(each)}
    rest = [item for i, item in enumerate(items) if i not in chosen]
    return [items[i] for i in sorted(chosen)], rest
