"""The house rules that a program can check, over all of ``src/treadle``.

``KNOWN`` lists what breaks one today, each with its cure. The tests hold that the list is exact:
what is new fails, and so does what is cured and still listed. Imports for the type checker
(``if TYPE_CHECKING``) load nothing, so they do not count.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from treadle.formats import FORMATS, GGML_TYPES, type_of
from treadle.isa import ROWS
from treadle.models.archs import ARCHS

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "treadle"
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_MODEL_FILE = 250  # lines of a graph or a sublayer
MAX_ARCH = 30  # lines of an architecture's row

# of a folder's modules; VENDORS has one module for each vendor of checkpoints
MAX_FOLDER = 40
VENDORS = "convert/hf/families"

# The folders where a format, an instruction set or an architecture may be told by its name.
TABLES = {"format": "formats/", "isa": "isa/", "arch": "models/archs/"}
NAMES = {
    "format": {f.name for f in FORMATS.values()} | {t.name for t in GGML_TYPES.values()},
    "isa": set(ROWS),
    "arch": set(ARCHS),
}

KNOWN: dict[str, str] = {}  # what breaks a rule today: how to cure it


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def where(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def part(path: Path) -> str:
    """``jit`` of ``jit/values.py``; ``plan`` of ``plan/plan.py``."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


# -- imports ----------------------------------------------------------------------------------


class Import(NamedTuple):
    path: Path
    line: int
    module: str  # absolute

    def __str__(self) -> str:
        return f"{where(self.path)} imports {self.module}"


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def running(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below, without what only the type checker reads."""
    waiting = [node]
    while waiting:
        children = [
            child for child in ast.iter_child_nodes(waiting.pop()) if not is_for_types(child)
        ]
        yield from children
        waiting += children


def imports(path: Path, *, for_types: bool = False) -> Iterator[Import]:
    package = ("treadle", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(tree(path)) if for_types else running(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            for alias in node.names:
                whole = f"{module}.{alias.name}"
                yield Import(path, node.lineno, whole if is_module(whole) else module)


@cache
def is_module(name: str) -> bool:
    path = PACKAGE.joinpath(*name.split(".")[1:])
    return name.startswith("treadle.") and (path.with_suffix(".py").exists() or path.is_dir())


@cache
def every_import() -> list[Import]:
    return [i for path in FILES for i in imports(path)]


def test_only_jit_imports_llvmlite() -> None:
    found = {
        str(i)
        for i in every_import()
        if i.module.split(".")[0] == "llvmlite" and part(i.path) != "jit"
    }
    check(found, "imports llvmlite")


def test_no_circle_among_modules() -> None:
    """Imports within functions included; those for types alone load nothing."""
    edges = {
        name_of(path): {
            name_of(i.module) for i in imports(path) if i.module.split(".")[0] == "treadle"
        }
        for path in FILES
    }
    reached = {name: reachable(name, edges) for name in edges}
    found = {
        " ".join(sorted(m for m in reached[name] if name in reached[m]))
        for name in edges
        if name in reached[name]
    }
    assert not found, f"modules that import each other: {sorted(found)}"


def name_of(module: Path | str) -> str:
    """``files.gguf`` of the file, or of ``treadle.files.gguf``; ``__init__`` of treadle itself."""
    if isinstance(module, Path):
        module = ".".join(module.relative_to(PACKAGE).with_suffix("").parts)
    name = module.removeprefix("treadle.").removesuffix(".__init__")
    return "__init__" if name == "treadle" else name


def reachable(name: str, edges: dict[str, set[str]]) -> set[str]:
    """The modules that importing ``name`` may lead to; itself among them only by a circle."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        new = edges[waiting.pop()] - found
        found |= new
        waiting += new
    return found


# Modules that some system lacks.
NOT_EVERYWHERE = {"fcntl", "grp", "msvcrt", "pwd", "resource", "termios", "tty", "winreg"}


def test_only_system_tells_systems_apart() -> None:
    """A bundle's first lines are read by Pythons that have no treadle yet."""
    found = set()
    for path in FILES:
        if part(path) != "system" and where(path) != "bundle/front.py":
            found |= {str(i) for i in imports(path) if i.module.split(".")[0] in NOT_EVERYWHERE}
            asked = {"sys.platform", "os.name", "platform.machine"}
            attributes = [n for n in ast.walk(tree(path)) if isinstance(n, ast.Attribute)]
            names = {f"{n.value.id}.{n.attr}" for n in attributes if isinstance(n.value, ast.Name)}
            found |= {f"{where(path)}: {name}" for name in names & asked}
    assert not found, "ask treadle.system.SYSTEM"


def test_dataclasses_are_the_fast_ones() -> None:
    """``treadle.base.fast_classes.dataclass``; the standard library's own only where it has more
    options.
    """
    used = {
        where(path)
        for path in FILES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ImportFrom) and node.module == "dataclasses"
        if any(alias.name == "dataclass" for alias in node.names)
    }
    assert used == {"base/fast_classes.py"}, "use treadle.base.fast_classes"


def check(found: set[str], rule: str) -> None:
    """What was found, and what ``KNOWN`` has under this rule, are the same."""
    known = {what for what in KNOWN if rule_of(what) == rule}
    assert not found - known, f"breaks a house rule: {sorted(found - known)}"
    assert not known - found, f"cured, take it out of KNOWN: {sorted(known - found)}"


def rule_of(what: str) -> str:
    return "imports llvmlite" if "imports llvmlite" in what else "compares with"


WITHOUT_LLVM = """
import sys
sys.modules["llvmlite"] = None
from treadle.devices.cpu.device import Cpu
from treadle.files.gguf import open_gguf
from treadle.isa import ROWS
from treadle.kvcache.cache import KVCache
from treadle.models.load import load_config
from treadle.plan.lowering.ops import build_plan
from treadle.models.graphs import GRAPHS
from treadle.plan.weights import Weights
gguf = open_gguf(sys.argv[1])
config = load_config(gguf)
device = Cpu(ROWS["portable"], 2)
pools, weights = GRAPHS[config.arch.graph].pools(config), Weights(gguf, device)
cache = KVCache(pools, device, 256)
for n_tokens in (1, 64):
    plan = build_plan(config, weights, cache, device.isa, n_tokens, 1, n_threads=2)
    plan.check()
    assert all(step.kernel for step in plan)
"""
WITHOUT_TEXT = """
import sys
import treadle.api.session
above = {"treadle.chat", "treadle.grammar", "treadle.sampling", "treadle.api.model"}
above |= {"treadle.tokenizer", "jinja2", "tokenizers"}
assert not above & set(sys.modules), above & set(sys.modules)
"""


@pytest.mark.parametrize(
    "program", [WITHOUT_LLVM, WITHOUT_TEXT], ids=["plan-without-llvm", "session-without-text"]
)
def test_what_is_loaded(program: str) -> None:
    """A plan is made without LLVM, and an engine without text."""
    command = [sys.executable, "-c", program, str(PACKAGE / "data" / "demo.gguf")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


# -- rows, not switches -----------------------------------------------------------------------


def test_names_are_told_apart_in_their_table_only() -> None:
    """Elsewhere one asks for a trait.

    ``tokenizer/`` has a table of its own: a tokenizer's model may be called "llama" too.
    """
    found = set()
    for path in FILES:
        for kind, table in TABLES.items():
            if not where(path).startswith((table, "tokenizer/")):
                names = {n for node in ast.walk(tree(path)) for n in compared(node)} & NAMES[kind]
                found |= {f"{where(path)} compares with {name!r}" for name in names}
    check(found, "compares with")


def compared(node: ast.AST) -> set[str]:
    """The words in a comparison, or in a case of a match; for a ggml type's number, its name."""
    if isinstance(node, ast.Compare):
        sides: list[ast.expr] = [node.left, *node.comparators]
    elif isinstance(node, ast.MatchValue):
        sides = [node.value]
    else:
        return set()
    literals = [
        e for s in sides for e in (s.elts if isinstance(s, (ast.Tuple, ast.List, ast.Set)) else [s])
    ]
    values = [e.value for e in literals if isinstance(e, ast.Constant)]
    if any(isinstance(s, ast.Attribute) and s.attr in ("ggml_type", "ggml_id") for s in sides):
        return {kind.name for v in values if isinstance(v, int) and (kind := type_of(v))}
    return {v for v in values if isinstance(v, str)}


def test_kernels_name_no_instruction_set() -> None:
    """Nor an intrinsic of one."""
    for path in FILES:
        if part(path) in ("kernels", "models", "devices", "jit", "formats"):
            text = path.read_text("utf-8")
            assert "llvm.x86" not in text, where(path)
            assert "llvm.aarch64" not in text, where(path)
        if part(path) == "kernels":
            literals = {n.value for n in ast.walk(tree(path)) if isinstance(n, ast.Constant)}
            assert not literals & NAMES["isa"], where(path)


# -- sizes and names --------------------------------------------------------------------------


def test_what_an_architecture_is_made_of_is_short() -> None:
    """A row of traits fits a screen; so that rows do, graphs and sublayers do not grow in turn."""
    folders = ("models/graphs/", "models/mixers/", "models/ffns/")
    files = [path for path in FILES if where(path).startswith(folders)]
    n_lines = {where(path): len(path.read_text("utf-8").splitlines()) for path in files}
    assert n_lines
    assert not {name: n for name, n in n_lines.items() if n > MAX_MODEL_FILE}
    tables = (tree(path) for path in FILES if where(path).startswith(TABLES["arch"]))
    calls = [n for table in tables for n in ast.walk(table) if isinstance(n, ast.Call)]
    rows = [call for call in calls if ast.unparse(call.func) == "Arch"]
    assert len(rows) == len(ARCHS)
    long = {
        ast.unparse(row.args[0]) for row in rows if (row.end_lineno or 0) - row.lineno >= MAX_ARCH
    }
    assert not long, f"rows over {MAX_ARCH} lines: {long}"


# Participles and everyday words that say nothing of what a class is.
BANNED = """
    Activated Added Asked Bell Beside Found Given Got Heard Held Here Kept Known Late Left
    Lines Look Looked Made Making Manner Mapped Measured Mixed Named Normed Offered Own
    Packed Part Piece Places Planned Ready Rendered Roped Said Seen Shown Spread Stored
    Taken Talks Text Told Turns Unpacked Wanted Wrapped Written
"""


def test_class_names_are_unique_and_say_what_they_are() -> None:
    where_named: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                where_named.setdefault(node.name, []).append(where(path))
    assert {name: files for name, files in where_named.items() if len(files) > 1} == {}
    assert {name.lstrip("_") for name in where_named} & set(BANNED.split()) == set()


def test_no_tuple_packs_three_assignments() -> None:
    """Three statements say it, except where a value needs the old value of a target."""
    found = []
    for path in FILES:
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
                continue
            targets = node.targets[0]
            if not isinstance(targets, ast.Tuple) or len(targets.elts) < 3:
                continue
            names = {ast.unparse(each) for each in targets.elts}
            parts = {
                ast.unparse(each) for each in ast.walk(node.value) if isinstance(each, ast.expr)
            }
            if not names & parts and len(targets.elts) == len(node.value.elts):
                found.append(f"{where(path)}:{node.lineno}")
    assert not found


def test_folders_are_no_longer_than_a_screen() -> None:
    n_files: dict[Path, int] = {}
    for path in FILES:
        n_files[path.parent] = n_files.get(path.parent, 0) + 1
    long = {where(folder) for folder, n in n_files.items() if n > MAX_FOLDER}
    assert long == {VENDORS}
    assert n_files[PACKAGE] <= 6


def test_no_file_is_called_utils() -> None:
    stems = {"util", "utils", "helper", "helpers", "common", "misc"}
    assert not [where(p) for p in FILES if stems & set(p.with_suffix("").parts[-2:])]


def test_assert_is_not_for_bad_files() -> None:
    """``files/`` reads what strangers wrote: a bad file is a FileError."""
    for path in FILES:
        if part(path) == "files":
            found = [n.lineno for n in ast.walk(tree(path)) if isinstance(n, ast.Assert)]
            assert not found, f"{where(path)}: lines {found}"
