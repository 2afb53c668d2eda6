"""The documents are true: their Python runs, their links lead somewhere, what they name exists.

A fence that says ``python`` is run, in the order of the page and in one namespace per page; one
that says ``python no-run`` is not. A fence that says ``output`` is what the one before it prints.
README's example needs a model that can chat, and is run by ``tests/test_readme.py``; the recipes,
whose commands are run too, by ``tests/docs/test_pages.py``; pages of ``docs/integrations`` by the
tests of their packages. These name other packages' objects and options, which are not looked up.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import click
import pytest

from treadle.cli.app import COMMANDS
from treadle.cli.environment import WITH_ARGUMENTS, commands_of, prefix_of, variables_of
from treadle.cli.foreign_options import ADVICE

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), *(ROOT / n for n in ("README.md", "CONTRIBUTING.md"))])
MODEL = ROOT / "src" / "treadle" / "data" / "demo.gguf"
# Files that programs of a page find beside them, besides model.gguf; of shared/data.
BESIDE = {
    "pictures.md": {
        "model.gguf": "media/gemma3/text.gguf",
        "mmproj-F16.gguf": "media/gemma3/mmproj.gguf",
        "cat.png": "media/media/plain.png",
    },
    "sounds.md": {
        "model.gguf": "media/qwen3asr/text.gguf",
        "mmproj-F16.gguf": "media/qwen3asr/mmproj.gguf",
        "talk.wav": "media/media/s16.wav",
    },
}
ONLY_ON = {"add-an-isa.md": ("x86_64", "AMD64")}  # its row is one of x86
FENCE = re.compile(r"^```(?P<kind>[^\n`]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
END = "-- end of block --"
KINDS = {"", "python", "python no-run", "bash", "bash no-run", "output", "json", "text", "toml"}


class Block(NamedTuple):
    kind: str
    text: str
    line: int  # of its first line in the page, from 1


def blocks(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    return [
        Block(m["kind"].strip(), m["text"], text.count("\n", 0, m.start("text")) + 1)
        for m in FENCE.finditer(text)
    ]


def prose(page: Path) -> str:
    """The page without its fences."""
    return FENCE.sub("", page.read_text("utf-8"))


def name(page: Path) -> str:
    """The path from ``docs/`` on, or the name of a page beside it."""
    docs = ROOT / "docs"
    return page.relative_to(docs).as_posix() if page.is_relative_to(docs) else page.name


def is_recipe(page: Path) -> bool:
    """Whether the page's commands are run too, by ``tests/docs/test_pages.py``."""
    return name(page).split("/")[0] in RECIPES


RECIPES = ("start", "how-to", "coming-from", "home.md", "which-model.md")
PROGRAMS = [
    page
    for page in PAGES
    if page.parent.name == "docs"
    and not is_recipe(page)
    and any(block.kind == "python" for block in blocks(page))
]
EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=name)
OWN_PAGES = [page for page in PAGES if page.parent.name != "integrations"]


# -- programs -----------------------------------------------------------------------------


@pytest.mark.parametrize("page", PROGRAMS, ids=name)
def test_python_runs(
    page: Path, tmp_path: Path, one_kernel_cache: Path, request: pytest.FixtureRequest
) -> None:
    if platform.machine() not in ONLY_ON.get(page.name, (platform.machine(),)):
        pytest.skip(f"needs {' or '.join(ONLY_ON[page.name])}")
    program = tmp_path / f"{page.stem.replace('-', '_')}.py"
    program.write_text(source(page), "utf-8")
    beside = {"model.gguf": MODEL}
    if page.name in BESIDE:
        data: Path = request.getfixturevalue("data")
        beside |= {name: data / path for name, path in BESIDE[page.name].items()}
    for file_name, target in beside.items():
        (tmp_path / file_name).symlink_to(target)
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    ran = subprocess.run(
        [sys.executable, "-W", "error", str(program)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path, "TREADLE_CACHE": str(one_kernel_cache)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, f"{page} (the line numbers are the page's):\n{ran.stderr}"
    printed = ran.stdout.split(f"{END}\n")
    expected = [text for _, text in with_output(page)]
    for got, want in zip(printed, expected, strict=False):
        if want is not None:
            assert got.rstrip() == want.rstrip(), page


def source(page: Path) -> str:
    """The page's programs as one, on their own lines, so that a traceback points into the page."""
    lines: list[str] = []
    for block, _ in with_output(page):
        lines += [""] * (block.line - 1 - len(lines))
        lines += [*block.text.splitlines(), f"print({END!r})"]
    return "\n".join(lines) + "\n"


def with_output(page: Path) -> Iterator[tuple[Block, str | None]]:
    """Each program and what it prints, where the page says so."""
    every = blocks(page)
    for block, after in zip(every, [*every[1:], Block("", "", 0)], strict=True):
        if block.kind == "python":
            yield block, after.text if after.kind == "output" else None


@EVERY_PAGE
def test_fences_are_of_a_known_kind(page: Path) -> None:
    for block in blocks(page):
        assert block.kind in KINDS, f"{page}:{block.line}: {block.kind!r}"
        if block.kind == "python no-run":
            compile(block.text, f"{page}:{block.line}", "exec")


# -- links and names ----------------------------------------------------------------------


@EVERY_PAGE
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(there), f"{page.name}: {target}: no such heading"


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def test_every_page_is_in_the_index() -> None:
    """In ``index.md`` of its folder, or in the page that is called as the folder, or in the first
    index; each of these is in the first one.
    """
    docs = ROOT / "docs"
    for page in docs.rglob("*.md"):
        folder = page.parent
        own = (folder / "index.md", folder.with_suffix(".md"), docs / "index.md")
        indexes = {each for each in own if each.is_file() and each != page}
        assert page == docs / "index.md" or any(
            f"({os.path.relpath(page, index.parent)})" in index.read_text("utf-8")
            for index in indexes
        ), name(page)


@EVERY_PAGE
def test_files_that_are_named_exist(page: Path) -> None:
    """In backquotes: ``kernels/spec.py`` from the package or the project on, ``jit/`` a folder."""
    roots = (ROOT, ROOT / "src", ROOT / "src" / "treadle", ROOT / "docs")
    for word in re.findall(r"`([\w.\-/]+(?:\.(?:py|md|toml|gguf)|/))`", prose(page)):
        if is_placeholder(word) or word.startswith(("../", "model.gguf")):
            continue
        assert any((root / word).exists() for root in roots), f"{page.name}: {word}"


def is_placeholder(word: str) -> bool:
    """``formats/NAME.py``, and the files that a recipe makes."""
    return bool(re.search(r"[A-Z]{4}", word)) or Path(word).stem in MADE


MADE = {"toy4", "sse4", "softcap", "test_softcap"}


@EVERY_PAGE
def test_modules_and_variables_that_are_named_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    for word in set(re.findall(r"`(treadle(?:\.\w+)+)(?:\(.*?\))?`", text)):
        assert resolve(word), f"{page.name}: {word}"
    known = variables_used() | of_options()
    for variable in set(VARIABLE.findall(text)) - {"TREADLE_"}:
        assert variable in known, f"{page.name}: {variable}"


VARIABLE = re.compile(r"\bTREADLE_[A-Z_]+")


@cache
def sources() -> dict[Path, str]:
    """The texts of all modules."""
    return {path: path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py")}


@cache
def variables_used() -> set[str]:
    """The environment variables that modules and tests name."""
    shared = [*ROOT.glob("tests/**/conftest.py"), ROOT / "tests" / "tiers.py"]
    texts = [*sources().values(), *(path.read_text("utf-8") for path in shared)]
    return {name for text in texts for name in VARIABLE.findall(text)}


@pytest.mark.parametrize("page", OWN_PAGES, ids=name)
def test_names_in_modules_that_are_named_exist(page: Path) -> None:
    """In backquotes: ``select.matmul`` is a name in a module of the package that is called so."""
    modules: dict[str, list[str]] = {}
    for path, source in sources().items():
        modules.setdefault(path.stem, []).append(source)
    for first, second in re.findall(r"`([a-z_]\w*)\.([a-z_]\w*)(?:\([^`]*\))?`", prose(page)):
        if first in NO_MODULES or second in EXTENSIONS:
            continue
        named = modules.get(first, [])
        defined = re.compile(rf"^(?:def |class )?{second}\b", re.MULTILINE)
        assert any(map(defined.search, named)), f"{page.name}: {first}.{second}"


EXTENSIONS = {"h", "json", "jsonl", "py", "toml", "yml"}
NO_MODULES = {
    "asyncio",
    "dataclasses",
    "faulthandler",
    "multiprocessing",
    "sys",
    "torch",
    "treadle",
}
NO_MODULES |= {
    "codes",
    "device",
    "isa",
    "k",
    "llm",
    "model",
    "plan",
    "session",
    "timings",
    "v",
}  # objects
NO_MODULES |= {"made", "pipe", "tokenizer"}  # objects of other programs' examples
NO_MODULES |= {
    "cls",
    "dense_2",
    "dense_3",
    "general",
    "limits",
    "vqdot",
}  # tensors, keys of GGUF, of Ray, instructions
NO_MODULES |= {"lora", "output", "token_embd"}  # labels of steps
NO_MODULES |= {"output_config", "reasoning", "response", "text", "thinking"}  # fields of protocols


def resolve(word: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    parts = word.split(".")
    for n in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:n]))
        except ImportError:
            continue
        for part in parts[n:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


# -- the command line ---------------------------------------------------------------------


def module_of(command: str) -> ModuleType:
    """The module of a command."""
    return importlib.import_module(f"treadle.cli.commands.{command.replace('-', '_')}")


def commands() -> dict[str, set[str]]:
    """Every command and its options, short and long."""
    found = {}
    for command in COMMANDS:
        made: click.Command = module_of(command).command
        inner = list(made.commands.values()) if isinstance(made, click.Group) else []
        params = [param for one in (made, *inner) for param in one.params]
        options = [o for p in params for o in (*p.opts, *p.secondary_opts) if o.startswith("-")]
        found[command] = {*options, "--help", "-h"}
    return found


@cache
def of_options() -> frozenset[str]:
    """The variables of all options."""
    found: set[str] = set()
    for name in COMMANDS:
        made: click.Command = module_of(name).command
        for words, each in commands_of(made, name):
            argument = WITH_ARGUMENTS.get(words)
            for param in each.params:
                found.update(variables_of(param, prefix_of(words), argument))
    return frozenset(found)


def of_scripts() -> set[str]:
    """The options of the scripts in tools/ and bench/, as their sources name them."""
    sources = [
        path.read_text("utf-8") for f in ("tools", "bench") for path in (ROOT / f).rglob("*.py")
    ]
    return {option for text in sources for option in re.findall(r'"(--[a-z-]+)"', text)}


@EVERY_PAGE
def test_commands_and_options_that_are_named_exist(page: Path) -> None:
    known = commands()
    every = {option for options in known.values() for option in options} | {"--version"}
    text = page.read_text("utf-8")
    for line in re.findall(r"(?:^|`|\| ?)treadle ([^`\n|]*)", text, re.MULTILINE):
        words = line.partition("#")[0].partition(" -- ")[0].split()  # then an agent's own
        if not words or not re.fullmatch(r"[a-z]+", words[0]):
            continue
        assert words[0] in known, f"{page.name}: treadle {line}"
        for word in options_of(words):
            assert word in known[words[0]], f"{page.name}: treadle {line}: {word}"
    own = prose(page) if page in OWN_PAGES or page not in PAGES else ""
    for span in re.findall(r"`((?:--[a-z]|-[a-z]\b)[^`]*)`", own):
        for word in options_of(span.split()):
            assert word in every | FOREIGN | of_scripts(), f"{page.name}: {span}"


FOREIGN = {"-p", "--randomly-seed", "--strict"}  # pytest's and mypy's
FOREIGN |= ADVICE.keys()
FOREIGN |= {"--chat", "--cli", "--server"}  # llamafile's
FOREIGN |= {  # vLLM's
    *("--api-key", "--enable-auto-tool-choice", "--enable-lora", "--kv-cache-dtype"),
    *("--limit-mm-per-prompt", "--lora-modules", "--max-model-len", "--max-num-seqs"),
    *("--reasoning-parser", "--served-model-name", "--speculative-config"),
    *("--tensor-parallel-size", "--tool-call-parser"),
}
FOREIGN |= {  # llama-server's
    *("--context-shift", "--media-path", "--no-slots", "--spec-synth-rates", "--tags", "--tools"),
    "--ui-mcp-proxy",
}


def options_of(words: list[str]) -> list[str]:
    found = (re.match(r"--[a-z][a-z0-9-]*|-[a-z](?![a-z])", w.strip("[]'\"")) for w in words)
    return [match[0] for match in found if match]
