"""Move modules, and rewrite every import, dotted name and path that names them.

    python tools/rewrite_imports.py tools/moves.tsv

The table has two columns, the old and the new dotted name of a module (or of a package, for its
``__init__``). A branch that began before the moves is brought over by running this on it.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE = ("src", "tests", "bench", "tools", "examples")
TEXTS = ("*.md", "*.toml", "Makefile", ".ci/*", "*.yml", "*.tsv")
DOTTED = re.compile(r"\b(?:treadle|tests)(?:\.[A-Za-z_]\w*)+")
PATHS = re.compile(r"(?<![\w./-])(?:src/treadle/|treadle/)?(?:\w+/)*\w+\.py\b")


def place(module: str) -> Path:
    """Without suffix."""
    base = ROOT / "src" if module.split(".")[0] == "treadle" else ROOT
    return base.joinpath(*module.split("."))


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "src" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class Moves:
    def __init__(self, table: Path) -> None:
        files = [path for folder in CODE for path in (ROOT / folder).rglob("*.py")]
        self.modules = {name_of(path): path for path in files}
        lines = table.read_text("utf-8").splitlines()
        rows = dict(line.split("\t") for line in lines if line)
        self.moved = {old: new for old, new in rows.items() if old in self.modules and old != new}

    def new(self, module: str) -> str:
        return self.moved.get(module, module)

    def dotted(self, name: str) -> str:
        """A dotted name whose beginning may be a module."""
        parts = name.split(".")
        for n in range(len(parts), 0, -1):
            head = ".".join(parts[:n])
            if head in self.modules:
                return ".".join([self.new(head), *parts[n:]])
        return name

    def path(self, text: str, beside: str) -> str:
        """A path in a text; ``beside`` is the module that it stands in, by its old name."""
        for prefix in ("src/treadle/", "treadle/", ""):
            if text.startswith(prefix):
                break
        tail = text.removeprefix(prefix).removesuffix(".py").replace("/", ".")
        package = self.home(beside)
        for old in (f"{package}.{tail}", f"treadle.{tail}") if not prefix else (f"treadle.{tail}",):
            if old not in self.modules or not {old, beside} & self.moved.keys():
                continue
            new = self.new(old)
            if not new.startswith("treadle."):
                return new.replace(".", "/") + ".py"
            near = not prefix and old.rpartition(".")[0] == package
            if near and new.rpartition(".")[0] == self.home(beside, self.new(beside)):
                return new.rpartition(".")[2] + ".py"
            return prefix + new.removeprefix("treadle.").replace(".", "/") + ".py"
        return text

    def home(self, module: str, new: str = "") -> str:
        """The package that a module stands in, itself if it is one; of its ``new`` name."""
        return new or module if self.is_package(module) else (new or module).rpartition(".")[0]

    def is_package(self, module: str) -> bool:
        return module in self.modules and self.modules[module].name == "__init__.py"


def edit(text: str, edits: list[tuple[int, int, str]]) -> str:
    data = text.encode()
    for start, end, new in sorted(edits, reverse=True):
        data = data[:start] + new.encode() + data[end:]
    return data.decode()


def rewrite_code(text: str, module: str, moves: Moves) -> str:
    tree = ast.parse(text)
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    edits: list[tuple[int, int, str]] = []
    renamed: dict[str, str] = {}

    def span(node: ast.AST) -> tuple[int, int]:
        return (
            starts[node.lineno - 1] + node.col_offset,
            starts[node.end_lineno - 1] + node.end_col_offset,
        )

    bound = {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
    bound |= {
        n.id
        for n in ast.walk(tree)
        if isinstance(n, ast.Name) and isinstance(n.ctx, (ast.Store, ast.Del))
    }
    bound |= {
        n.name
        for n in ast.walk(tree)
        if isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef))
    }
    names = bound | {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                names.add(alias.asname or alias.name)

    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            if node.module.split(".")[0] not in ("treadle", "tests"):
                continue
            groups: dict[str, list[str]] = {}
            changed = False
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full in moves.modules:
                    new = moves.new(full)
                    home, _, leaf = new.rpartition(".")
                    here = alias.asname or alias.name
                    if leaf != alias.name and not alias.asname:
                        if alias.name in bound or leaf in names:
                            entry = f"{leaf} as {alias.name}"
                        else:
                            renamed[alias.name] = leaf
                            entry = leaf
                    else:
                        entry = leaf if here == leaf else f"{leaf} as {here}"
                    changed |= new != full
                else:
                    home = moves.new(node.module)
                    entry = alias.name + (f" as {alias.asname}" if alias.asname else "")
                    changed |= home != node.module
                groups.setdefault(home, []).append(entry)
            if changed:
                indent = " " * node.col_offset
                lines = [f"from {home} import {', '.join(g)}" for home, g in groups.items()]
                edits.append((*span(node), f"\n{indent}".join(lines)))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                new = moves.dotted(alias.name)
                if new != alias.name:
                    more = f" as {alias.asname}" if alias.asname else ""
                    edits.append((*span(alias), new + more))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in renamed:
            edits.append((*span(node), renamed[node.id]))
    # chains of attributes: treadle.a.b.c
    done: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in done:
            chain = ast.unparse(node) if is_chain(node) else ""
            inner: ast.AST = node
            while isinstance(inner, ast.Attribute):
                done.add(id(inner))
                inner = inner.value
            if chain.split(".")[0] in ("treadle", "tests"):
                new = moves.dotted(chain)
                if new != chain:
                    edits.append((*span(node), new))
    text = edit(text, edits)
    return rewrite_strings(text, module, moves)


def is_chain(node: ast.AST) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def rewrite_strings(text: str, module: str, moves: Moves) -> str:
    """Strings and comments: dotted names and paths."""
    import io
    import tokenize

    kinds = {tokenize.STRING, tokenize.COMMENT}
    kinds |= {getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    out = text
    for token in reversed(list(tokenize.generate_tokens(io.StringIO(text).readline))):
        if token.type in kinds:
            a = starts[token.start[0] - 1] + token.start[1]
            b = starts[token.end[0] - 1] + token.end[1]
            out = out[:a] + rewrite_text(out[a:b], module, moves) + out[b:]
    return out


def rewrite_text(text: str, module: str, moves: Moves) -> str:
    text = DOTTED.sub(lambda m: moves.dotted(m[0]), text)
    return PATHS.sub(lambda m: moves.path(m[0], module), text)


def main() -> None:
    moves = Moves(Path(sys.argv[1]))
    for module, path in moves.modules.items():
        old = path.read_text("utf-8")
        new = rewrite_code(old, module, moves)
        if new != old:
            path.write_text(new, "utf-8")
    tracked = subprocess.run(
        ["git", "ls-files", *TEXTS], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    for name in tracked:
        path = ROOT / name
        if name.endswith(Path(sys.argv[1]).name):
            continue
        old = path.read_text("utf-8")
        new = rewrite_text(old, "treadle.x", moves)
        if new != old:
            path.write_text(new, "utf-8")
    # Leaves first: a module may become the package of another.
    temporary = []
    for old, new in moves.moved.items():
        source = moves.modules[old]
        target = place(new)
        is_package = source.name == "__init__.py"
        target = target / "__init__.py" if is_package else target.with_suffix(".py")
        aside = source.with_name(source.name + ".moving")
        source.rename(aside)
        temporary.append((aside, target))
    for aside, target in temporary:
        target.parent.mkdir(parents=True, exist_ok=True)
        assert not target.exists(), target
        aside.rename(target)
    for _, target in temporary:
        folder = target.parent
        while (ROOT / "src/treadle") in folder.parents:
            own = folder / "__init__.py"
            if not own.exists():
                own.write_text("")
            folder = folder.parent
    subprocess.run(["git", "add", "-A", "src", "tests", "bench"], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
