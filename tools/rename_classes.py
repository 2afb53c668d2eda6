"""Rename classes wherever their names are used.

    python tools/rename_classes.py tools/class_names.tsv

The table has three columns: a module of treadle, and the old and the new name of a class in it.
Uses are found by following imports, so a name that two modules have is told apart.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent)]
from rewrite_imports import CODE, ROOT, edit, name_of  # noqa: E402

Ident = tuple[str, str]  # a module, a name in it


class Project:
    def __init__(self) -> None:
        files = [path for folder in CODE for path in (ROOT / folder).rglob("*.py")]
        self.paths = {name_of(path): path for path in files}
        self.texts = {module: path.read_text("utf-8") for module, path in self.paths.items()}
        self.trees = {module: ast.parse(text) for module, text in self.texts.items()}
        self.imports: dict[str, dict[str, Ident]] = {}
        for module, tree in self.trees.items():
            found = self.imports[module] = {}
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    for alias in node.names:
                        found[alias.asname or alias.name] = node.module, alias.name

    def resolve(self, module: str, name: str, depth: int = 9) -> Ident:
        """Where a name of a module is defined."""
        known = self.imports.get(module, {}).get(name)
        if known is None or not depth:
            return module, name
        return self.resolve(*known, depth - 1)


def rename(project: Project, table: dict[Ident, str]) -> None:
    for module, tree in project.trees.items():
        text = project.texts[module]
        starts = [0]
        for line in text.encode().splitlines(keepends=True):
            starts.append(starts[-1] + len(line))

        def at(node: ast.AST, starts: list[int] = starts) -> int:
            return starts[node.lineno - 1] + node.col_offset

        local: dict[str, str] = {}  # names here -> new ones
        edits: list[tuple[int, int, str]] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and (module, node.name) in table:
                local[node.name] = table[module, node.name]
                start = text.encode().index(node.name.encode(), at(node) + 5)
                edits.append((start, start + len(node.name), local[node.name]))
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    new = table.get(project.resolve(node.module, alias.name))
                    if new:
                        edits.append((at(alias), at(alias) + len(alias.name), new))
                        if not alias.asname:
                            local[alias.name] = new
        taken = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        taken |= {n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}
        taken |= project.imports[module].keys()
        for old, new in local.items():
            if new in taken and new not in local:
                print(f"{module}: {old} -> {new}: the name is taken")
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id in local:
                edits.append((at(node), at(node) + len(node.id), local[node.id]))
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                origin = project.imports[module].get(node.value.id)
                if origin and ".".join(origin) in project.trees:
                    new = table.get(project.resolve(".".join(origin), node.attr))
                    if new:
                        end = starts[node.end_lineno - 1] + node.end_col_offset
                        edits.append((end - len(node.attr), end, new))
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                whole = node.value in local and node.end_lineno == node.lineno
                if whole and text.encode()[at(node) + 1 :].startswith(node.value.encode()):
                    edits.append((at(node) + 1, at(node) + 1 + len(node.value), local[node.value]))
        new_text = edit(text, sorted(set(edits)))
        for old, new in local.items():
            new_text = re.sub(rf"(?<=``){old}(?=``|\.|\()", new, new_text)
        new_text = dotted(new_text, table)
        if new_text != text:
            project.paths[module].write_text(new_text, "utf-8")
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "pyproject.toml"]:
        text = path.read_text("utf-8")
        if (new_text := dotted(text, table)) != text:
            path.write_text(new_text, "utf-8")


def dotted(text: str, table: dict[Ident, str]) -> str:
    """Names with their module before them, as in ``treadle.jit.ir.BasicBlock``."""
    for (module, old), new in table.items():
        if module in text:
            text = re.sub(rf"({re.escape(module)}[.:]){old}\b", rf"\g<1>{new}", text)
    return text


def main() -> None:
    table: dict[Ident, str] = {}
    for line in Path(sys.argv[1]).read_text("utf-8").splitlines():
        module, old, new = line.split("\t")
        table[f"treadle.{module}".removesuffix(".__init__"), old] = new
    project = Project()
    for module, old in table:
        names = {n.name for n in project.trees[module].body if isinstance(n, ast.ClassDef)}
        if old not in names:
            print(f"{module}: no class {old}")
    rename(project, table)


if __name__ == "__main__":
    main()
