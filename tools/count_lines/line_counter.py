"""Notes which statements of treadle run, in each process that the tests start: ``make coverage``.

``coverage`` asks Python to trace every line, which before Python 3.12 slows all Python code down,
other packages' too: the tests take twice as long. Here modules of treadle alone are compiled in
another way: before each statement stands a store into a byte of a file that all processes map.
Simple statements that follow each other share one, before the last of them, as the others have run
by then; where an exception leaves such a row each time, none of it counts. It makes modules at most
an eighth slower, and what a process ran before it was killed counts as well.

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

lines: mmap  # a byte for each line of each file; 1: it ran, and the row that it ends


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
    """Compile a module whose line ``i`` sets byte ``at + i`` when the end of a row on it begins."""
    import ast

    tree = ast.parse(source, path)
    for block in blocks(tree):
        last = {id(row[-1]) for row in rows(block)}
        for i in reversed(range(len(block))):
            if id(block[i]) in last:
                block.insert(i, store(block[i], at))
    # Docstring and future statements stay first.
    first = next((i for i, each in enumerate(tree.body) if is_counted(each)), len(tree.body))
    tree.body[first:first] = ast.parse(f"{LINES} = __import__({__name__!r}).lines").body
    return compile(tree, path, "exec", dont_inherit=True)


def rows(block: Sequence[ast.stmt]) -> Iterator[list[ast.stmt]]:
    """The statements of a block that are counted, in rows: as the last of one is reached, all
    before it have run.
    """
    row: list[ast.stmt] = []
    for i, statement in enumerate(block):
        if is_counted(statement):
            row.append(statement)
            goes_on = is_simple(statement) and any(map(is_counted, block[i + 1 : i + 2]))
            if not goes_on:
                yield row
                row = []


def store(statement: ast.stmt, at: int) -> ast.stmt:
    """The store before a statement, which ends a row."""
    import ast

    of = ast.Name(LINES, ast.Load())
    byte = ast.Subscript(of, ast.Constant(at + statement.lineno), ast.Store())
    made = ast.Assign([byte], ast.Constant(1))
    ast.copy_location(made, statement)
    made.end_lineno = made.lineno
    made.end_col_offset = made.col_offset
    return ast.fix_missing_locations(made)


def is_simple(statement: ast.stmt) -> bool:
    """Whether a statement has no others in it, and the next one follows unless it raises."""
    import ast

    if isinstance(statement, ast.Expr | ast.Assign | ast.AnnAssign | ast.AugAssign):
        return not isinstance(statement.value, ast.Yield | ast.YieldFrom | ast.Await)
    return isinstance(statement, ast.Import | ast.ImportFrom)


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
    return {line for row in lines_of_rows(source) for line in row}


def lines_of_rows(source: bytes) -> list[list[int]]:
    """Where the statements of a file begin that are counted, by rows."""
    import ast

    every = (row for block in blocks(ast.parse(source)) for row in rows(block))
    return [[statement.lineno for statement in row] for row in every]


def ran(folder: Path, sources: Path) -> Iterator[tuple[str, set[int], set[int]]]:
    """For each file, by name: the lines that are counted, and those of them that ran."""
    found = (folder / BYTES).read_bytes()
    for name, at in marshal.loads((folder / OFFSETS).read_bytes()).items():
        each = lines_of_rows((sources / name).read_bytes())
        done = {line for row in each if found[at + row[-1]] for line in row}
        yield name, {line for row in each for line in row}, done
