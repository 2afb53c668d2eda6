"""The pages of the site do what they say: their commands and programs run, in the page's order.

Models have the pages' names in a hub cache of the test's own, so that ``hf:`` names need no
network; their files are small ones. A fence ``bash`` or ``python`` is run; one that says ``no-run``
is parsed: its commands and options exist. ``treadle serve`` alone in a block is started in the
background. The files of the skill for coding agents are pages too.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tests.docs import test_docs
from tests.docs.test_docs import MODEL, ROOT, Block, blocks, name
from treadle.cli.app import COMMANDS

DOCS = ROOT / "docs"
SKILL = ROOT / "skills" / "treadle"
PAGES = [page for page in test_docs.PAGES if test_docs.is_recipe(page)]
PAGES += sorted(SKILL.glob("*.md"))
RUN = [page for page in PAGES if any(b.kind in ("bash", "python") for b in blocks(page))]
SERVE = re.compile(r"treadle serve [^|&\n]*\n")
RUNNER = Path(__file__).with_name("page_runner.py")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
# Names on the hub, and the files of shared/data that stand for theirs; None is the packaged model.
HUB: dict[str, dict[str, str | None]] = {
    "Qwen/Qwen3-0.6B-GGUF": {"Qwen3-0.6B-Q8_0.gguf": None},
    "ggml-org/embeddinggemma-300M-GGUF": {"embeddinggemma-300M-Q8_0.gguf": None},
    "ggml-org/gemma-3-4b-it-GGUF": {
        "gemma-3-4b-it-Q4_K_M.gguf": "media/gemma3/text.gguf",
        "mmproj-model-f16.gguf": "media/gemma3/mmproj.gguf",
    },
}
RERANKER = "cross-encoder/ms-marco-MiniLM-L6-v2"
NEEDS = {"coming-from/ollama.md": "ollama", "start/server.md": "openai"}


@pytest.fixture(scope="module")
def hub(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of huggingface_hub's layout."""
    folder = tmp_path_factory.mktemp("hub")
    for repo, files in HUB.items():
        snapshot = revision(folder, repo)
        for file, source in files.items():
            (snapshot / file).symlink_to(MODEL if source is None else data / source)
    return folder


@pytest.fixture(scope="module")
def reranker(hub: Path) -> None:
    """A tiny cross-encoder, as transformers saves one."""
    from tests.api.test_rerank import save

    save("bert", revision(hub, RERANKER))


def revision(folder: Path, repo: str) -> Path:
    """The snapshot of a repository in the cache, made if it is not there."""
    place = folder / f"models--{repo.replace('/', '--')}"
    snapshot = place / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(COMMIT)
    return snapshot


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PATH: ``treadle`` and ``python`` are those of the test, ``pip`` does nothing."""
    folder = tmp_path_factory.mktemp("bin")
    for program, line in {
        "treadle": f'exec {shlex.quote(sys.executable)} -m treadle "$@"',
        "python": f'exec {shlex.quote(sys.executable)} "$@"',
        "pip": "exit 0",
    }.items():
        (folder / program).write_text(f"#!/bin/sh\n{line}\n")
        (folder / program).chmod(0o755)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=name)
def test_blocks_run(
    page: Path,
    hub: Path,
    programs: Path,
    tmp_path: Path,
    one_kernel_cache: Path,
    request: pytest.FixtureRequest,
) -> None:
    if name(page) in NEEDS:
        pytest.importorskip(NEEDS[name(page)])
    if name(page) == "how-to/rerank.md":
        pytest.importorskip("transformers")
        request.getfixturevalue("reranker")
    shown = [block for block in blocks(page) if block.kind in ("bash", "python", "output")]
    listed = [block for block in shown if block.kind != "output"]
    file = tmp_path / "blocks.json"
    file.write_text(json.dumps([described(page, block) for block in listed]), "utf-8")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "model.gguf").symlink_to(MODEL)
    ran = subprocess.run(
        [sys.executable, str(RUNNER), str(file)],
        cwd=tmp_path / "work",
        env=environment(hub, programs, one_kernel_cache, tmp_path),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, f"{name(page)}:\n{ran.stderr}"
    for number, expected in outputs(shown):
        got = (tmp_path / f"blocks.json.out.{number}").read_text("utf-8")
        assert got.rstrip() == expected.rstrip(), f"{name(page)}: block {number}"


def described(page: Path, block: Block) -> dict[str, object]:
    text = block.text
    if "treadle-env" in text:  # an environment is made for the reader, not for the test
        text = "\n".join(line for line in text.splitlines() if "treadle-env" not in line)
    return {
        "kind": block.kind,
        "text": text,
        "name": f"{name(page)}:{block.line}",
        "serve": block.kind == "bash" and bool(SERVE.fullmatch(block.text)),
    }


def outputs(shown: list[Block]) -> Iterator[tuple[int, str]]:
    """The numbers of blocks that are followed by what they print, and that text."""
    number = -1
    for block in shown:
        if block.kind == "output":
            yield number, block.text
        else:
            number += 1


def environment(hub: Path, programs: Path, kernels: Path, folder: Path) -> dict[str, str]:
    path = os.pathsep.join([str(programs), os.environ.get("PATH", "")])
    return os.environ | {
        "PATH": path,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
        "TREADLE_CACHE": str(kernels),
        "TREADLE_PLANS": "1",  # as for readers: nothing of the lowering is replaced there
        "HF_HUB_CACHE": str(hub),
        "HF_HUB_OFFLINE": "1",
        "HOME": str(folder),
        "XDG_STATE_HOME": str(folder / "state"),
    }


# -- commands are parsed, also those that are not run -------------------------------------------


def command_lines(page: Path) -> Iterator[str]:
    """Every ``treadle`` command of a page's blocks of bash, with continued lines joined."""
    for block in blocks(page):
        if not block.kind.startswith("bash"):
            continue
        text = re.sub(r"<<'END'\n.*?\nEND\n", "\n", block.text, flags=re.DOTALL)
        for line in text.replace("\\\n", " ").splitlines():
            for part in re.split(r" \| |&& ", line):
                found = re.match(r"\s*(?:[A-Z_]+=\S+ )*(treadle .*)", part)
                if found:
                    yield re.split(r" <<< | > ", found[1])[0]


@pytest.mark.every_case
@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=name)
def test_commands_parse(page: Path) -> None:
    """click takes the arguments: the options are there, and their values are of the right kind."""
    for line in command_lines(page):
        parse(shlex.split(line, comments=True)[1:], line)


def test_commands_are_found() -> None:
    """Pages have commands for the test above to parse."""
    assert sum(len(list(command_lines(page))) for page in PAGES) > 50


def parse(words: list[str], line: str) -> None:
    """Parse the arguments of a command as click would, without running it."""
    if words == ["--version"]:
        return
    assert words[0] in COMMANDS, line
    command: click.Command = importlib.import_module(f"treadle.cli.commands.{words[0]}").command
    rest = words[1:]
    if isinstance(command, click.Group):
        command = command.commands[rest[0]]
        rest = rest[1:]
    known = {each for param in command.params for each in (*param.opts, *param.secondary_opts)}
    for word in rest:
        if word == "--":
            break
        option = word.partition("=")[0]
        if option.startswith("-") and len(option) > 1:
            assert option in known, f"{line}: {option}"
    context = click.Context(command, info_name=words[0], resilient_parsing=True)
    command.parse_args(context, rest)


def test_the_skill_is_as_agents_read_it() -> None:
    """A name, a description of at most 1024 characters, and links to files beside it."""
    text = (SKILL / "SKILL.md").read_text("utf-8")
    front = re.match(r"---\nname: (\S+)\ndescription: ([^\n]+)\n---\n", text)
    assert front is not None
    assert front[1] == SKILL.name
    assert len(front[2]) <= 1024
    linked = set(re.findall(r"\]\((\w+\.md)\)", text))
    assert linked == {page.name for page in SKILL.glob("*.md")} - {"SKILL.md"}
    assert len(text.splitlines()) < 200


def test_messages_that_the_skill_quotes_are_those_of_treadle() -> None:
    table = (SKILL / "errors.md").read_text("utf-8")
    first = [row.split("|")[1] for row in table.splitlines() if row.startswith("| ")]
    quoted = [text for cell in first for text in re.findall("`([^`]+)`", cell)]
    assert len(quoted) > 10
    # Literals in pieces over several lines are one; names in an f-string are as they are written.
    sources = [re.sub(r'"\s+f?"', "", text) for text in test_docs.sources().values()]
    for text in quoted:
        words = text.removeprefix("architecture 'x': ")
        assert any(words in source for source in sources), text


@pytest.mark.parametrize("page", sorted(SKILL.glob("*.md")), ids=name)
def test_what_the_skill_names_exists(page: Path) -> None:
    test_docs.test_commands_and_options_that_are_named_exist(page)
    test_docs.test_modules_and_variables_that_are_named_exist(page)
    test_docs.test_fences_are_of_a_known_kind(page)


def test_the_runner_needs_what_is_here() -> None:
    assert shutil.which("bash")
    assert shutil.which("curl")
