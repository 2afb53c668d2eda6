"""Notes which statements of treadle run, in each process that the tests start: ``make coverage``.

``coverage`` asks Python to trace every line, which before Python 3.12 slows all Python code down,
other packages' too: the tests take twice as long. Here modules of treadle alone are compiled in
another way: before each statement stands a store into a byte of a file that all processes map. It
makes them an eighth slower, and what a process ran before it was killed counts as well.

This folder is in ``PYTHONPATH``, so that every Python imports ``sitecustomize``, and
``TREADLE_COUNT_LINES`` names a folder that ``prepare`` has made.
"""

from __future__ import annotations

import marshal
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from mmap import mmap
from types import CodeType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ast
    from collections.abc import Iterator, Sequence
    from pathlib import Path

VARIABLE = "TREADLE_COUNT_LINES"
SOURCES = os.path.join(os.path.dirname(__file__), "..", "..", "src", "treadle")
SOURCES = os.path.realpath(SOURCES) + os.sep
BYTES, OFFSETS = "lines", "offsets"  # files of the folder
LINES = "__lines__"  # the map, as modules that are counted call it

lines: mmap  # a byte for each line of each file; 1: it ran


def prepare(folder: Path, sources: Path) -> None:
    """Make the folder of a run: no line has run yet."""
    folder.mkdir(parents=True)
    offsets = {}
    at = 0
    for path in sorted(sources.rglob("*.py")):
        offsets[path.relative_to(sources).as_posix()] = at
        at += path.read_bytes().count(b"\n") + 2
    (folder / BYTES).write_bytes(bytes(at))
    (folder / OFFSETS).write_bytes(marshal.dumps(offsets))


def start(folder: str, sources: str = SOURCES) -> None:
    """Count the lines of every module of treadle that this process imports from now on."""
    global lines
    with open(os.path.join(folder, BYTES), "r+b") as file:
        lines = mmap(file.fileno(), 0)
    with open(os.path.join(folder, OFFSETS), "rb") as file:
        sys.meta_path.insert(0, Finder(folder, sources, marshal.load(file)))


class Finder:
    """Finds modules as ever; those below ``sources`` get a loader that counts.

    Attributes:
        offsets: for each file, relative to ``sources``, where its bytes begin in the map.
    """

    def __init__(self, folder: str, sources: str, offsets: dict[str, int]) -> None:
        self.folder = folder
        self.sources = sources
        self.offsets = offsets

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] != "treadle":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            file = os.path.realpath(spec.loader.path)
            at = self.offsets.get(file.removeprefix(self.sources).replace(os.sep, "/"))
            if file.startswith(self.sources) and at is not None:
                compiled = os.path.join(self.folder, f"{name}.code")
                spec.loader = CountingLoader(name, file, at, compiled)
        return spec


class CountingLoader(SourceFileLoader):
    """Loads a module whose statements note that they run. What it compiles serves the other
    processes of the run.
    """

    def __init__(self, name: str, path: str, at: int, compiled: str) -> None:
        super().__init__(name, path)
        self.at = at
        self.compiled = compiled

    def get_code(self, fullname: str) -> CodeType:
        try:
            with open(self.compiled, "rb") as file:
                return marshal.load(file)  # type: ignore[no-any-return]
        except FileNotFoundError:
            pass
        code = counting(self.get_data(self.path), self.path, self.at)
        own = f"{self.compiled}.{os.getpid()}"
        with open(own, "wb") as file:
            marshal.dump(code, file)
        os.replace(own, self.compiled)
        return code


def counting(source: bytes, path: str, at: int) -> CodeType:
    """Compile a module whose line ``i`` sets byte ``at + i`` when a statement on it begins."""
    import ast

    tree = ast.parse(source, path)
    for block in blocks(tree):
        block[:] = [part for statement in block for part in (*noting(statement, at), statement)]
    # Docstring and future statements stay first.
    first = next((i for i, each in enumerate(tree.body) if is_counted(each)), len(tree.body))
    tree.body[first:first] = ast.parse(f"{LINES} = __import__({__name__!r}).lines").body
    return compile(tree, path, "exec", dont_inherit=True)


def noting(statement: ast.stmt, at: int) -> Iterator[ast.stmt]:
    """The store before a statement that is counted."""
    import ast

    if not is_counted(statement):
        return
    of = ast.Name(LINES, ast.Load())
    byte = ast.Subscript(of, ast.Constant(at + statement.lineno), ast.Store())
    store = ast.Assign([byte], ast.Constant(1))
    ast.copy_location(store, statement)
    store.end_lineno = store.lineno
    store.end_col_offset = store.col_offset
    yield ast.fix_missing_locations(store)


def blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """The lists of statements below a node that tests can be asked to run: no overloads, and
    nothing that only type checkers read.
    """
    for field in ("body", "handlers", "cases", "orelse", "finalbody"):
        block = getattr(node, field, None)
        if not isinstance(block, list) or (field == "body" and is_for_checkers(node)):
            continue
        for child in list(block):
            yield from blocks(child)
        if field not in ("handlers", "cases"):
            yield block


def is_for_checkers(node: ast.AST) -> bool:
    """Whether a node is ``if TYPE_CHECKING`` or an overload."""
    import ast

    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    decorators = getattr(node, "decorator_list", [])
    return any(isinstance(each, ast.Name) and each.id == "overload" for each in decorators)


def is_counted(statement: ast.stmt) -> bool:
    """Whether a statement does anything when it runs: docstrings and ``...`` do not."""
    import ast

    if isinstance(statement, ast.Expr):
        return not isinstance(statement.value, ast.Constant)
    if isinstance(statement, ast.ImportFrom):
        return statement.module != "__future__"
    return not (isinstance(statement, ast.Global | ast.Nonlocal) or is_for_checkers(statement))


def statements(source: bytes) -> set[int]:
    """The lines of a file on which a statement begins that is counted."""
    import ast

    every = (each for block in blocks(ast.parse(source)) for each in block)
    return {statement.lineno for statement in every if is_counted(statement)}


def ran(folder: Path, sources: Path) -> Iterator[tuple[str, set[int], set[int]]]:
    """For each file, by name: the lines that are counted, and those of them that ran."""
    found = (folder / BYTES).read_bytes()
    for name, at in marshal.loads((folder / OFFSETS).read_bytes()).items():
        counted = statements((sources / name).read_bytes())
        yield name, counted, {line for line in counted if found[at + line]}
