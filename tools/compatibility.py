"""Run llama.cpp's own server tests against ``treadle serve`` and write down what came of each.

    python tools/compatibility.py run SUITE --python PY --out results.json
    python tools/compatibility.py page results.json cases.json > docs/compatibility.md

SUITE is the folder ``tools/server/tests`` of llama.cpp's sources (the sdist of llama-cpp-python has
them in ``vendor/llama.cpp``); PY is a Python with pytest and the suite's ``requirements.txt``.
``llama_server.py`` beside this file stands in for ``llama-server``. ``compatibility.toml`` gives
the reason for every test that does not pass; a failure without one ends ``page`` with exit code 1.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import tomllib

HERE = Path(__file__).resolve().parent
DATA = HERE.parent.parent / "shared" / "data"
# The suite starts a server for each model first, to download it; nothing is downloaded here: small
# files stand in for a draft model, and for the pictures of a hub.
PLUGIN = """
import pathlib, shutil, sys
sys.path.insert(0, {suite!r})
import requests, utils, wget
utils.ServerPreset.load_all = staticmethod(lambda: None)
get = requests.get
PICTURES = {{"91_cat.png": {plain!r}, "11_truck.png": {other!r}}}

def near(url, *given, **more):
    picture = PICTURES.get(url.rpartition("/")[2])
    if picture is None:
        return get(url, *given, **more)
    answer = requests.Response()
    answer.status_code = 200
    answer._content = pathlib.Path(picture).read_bytes()
    return answer

def download(url, out):
    pathlib.Path(out).parent.mkdir(exist_ok=True)
    return shutil.copy({draft!r}, out)

requests.get = near
wget.download = download
"""
WORDS = {
    "passed": "passes",
    "design": "differs by design",
    "absent": "not there",
    "model": "needs a model that no package registry has",
    "skipped": "skipped by the suite itself",
    "defect": "defect",
}


def run(suite: Path, python: str, out: Path, select: list[str], encoder: Path | None) -> None:
    """Run the suite and write ``{test: {"outcome", "message", "missing"}}`` to ``out``."""
    stand_ins = {
        "stories": str(DATA / "models" / "stories260K.gguf"),
        "stories-split": str(
            DATA / "models" / "stories260K_split" / "stories260K-00001-of-00003.gguf"
        ),
    }
    stand_ins["pictures"] = str(DATA / "media" / "gemma3" / "text.gguf")
    if encoder:
        stand_ins["encoder"] = str(encoder.resolve())
    pictures = DATA / "media" / "media"
    plugin = {
        "plain": str(pictures / "plain.png"),
        "other": str(pictures / "palette.png"),
        "draft": stand_ins["stories"],
    }
    with tempfile.TemporaryDirectory() as name:
        away = Path(name)
        # The tests name chat templates by a path from their own folder.
        root = suite.resolve().parents[2]
        tests = away / "tools" / "server" / "tests"
        shutil.copytree(suite, tests)
        (tests / "tmp").mkdir(exist_ok=True)  # made by the downloads that do not happen here
        (away / "models").symlink_to(root / "models")
        (away / "offline.py").write_text(PLUGIN.format(suite=str(tests), **plugin), "utf-8")
        server = away / "llama-server"
        server.write_text(f'#!/bin/sh\nexec {sys.executable} {HERE}/llama_server.py "$@"\n')
        server.chmod(0o755)
        env = {
            **os.environ,
            "LLAMA_SERVER_BIN_PATH": str(server),
            "TREADLE_SUITE_MODELS": json.dumps(stand_ins),
            "PYTHONPATH": os.pathsep.join([str(away), os.environ.get("PYTHONPATH", "")]),
        }
        report = away / "report.xml"
        command = [python, "-m", "pytest", "-q", "-p", "offline", "-p", "no:cacheprovider"]
        command += ["-o", "junit_logging=all", f"--junitxml={report}", *(select or ["unit"])]
        subprocess.run(command, cwd=tests, env=env, check=False)
        results = read_report(report)
    out.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", "utf-8")
    print(Counter(r["outcome"] for r in results.values()))


def read_report(path: Path) -> dict[str, dict[str, str]]:
    """Outcomes by test from pytest's JUnit file."""
    results = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        outcome = "passed"
        message = ""
        for tag in ("failure", "error", "skipped"):
            found = case.find(tag)
            if found is not None:
                outcome = "skipped" if tag == "skipped" else "failed"
                message = found.get("message", "")[:300]
        text = " ".join(e.text or "" for e in case.iter() if e.tag in ("system-out", "failure"))
        missing = re.search(r"treadle has no ([^\n]+)", text)
        results[name] = {
            "outcome": outcome,
            "message": message,
            "missing": missing[1] if missing else "",
        }
    return results


def verdict(name: str, result: dict[str, str], rows: list[dict[str, str]]) -> tuple[str, str]:
    """A word of ``WORDS`` and the reason."""
    if result["outcome"] == "passed":
        return "passed", ""
    for row in rows:
        if fnmatch.fnmatchcase(name, row["test"].replace("[", "[[]")):
            return row["verdict"], row["reason"]
    missing = result["missing"]
    if missing.startswith("model "):
        return "model", missing.removeprefix("model ")
    if missing:
        return "absent", f"`{missing}`"
    if result["outcome"] == "skipped":
        return "skipped", result["message"].removeprefix("Skipped: ")
    return "defect", result["message"].splitlines()[0] if result["message"] else ""


def page(results_path: Path, out: Path | None) -> int:
    """Write the suite's tables in Markdown: one by file, and one for each verdict but "passed"."""
    results = json.loads(results_path.read_text("utf-8"))
    rows = tomllib.loads((HERE / "compatibility.toml").read_text("utf-8"))["row"]
    verdicts = {name: verdict(name, result, rows) for name, result in results.items()}
    lines = ["| file | " + " | ".join(WORDS.values()) + " |", "|---" * (len(WORDS) + 1) + "|"]
    files = sorted({name.partition("::")[0] for name in results})
    for file in files:
        counts = Counter(v for n, (v, _) in verdicts.items() if n.startswith(f"{file}::"))
        lines.append(f"| `{file}` | " + " | ".join(str(counts[w] or "") for w in WORDS) + " |")
    totals = Counter(v for v, _ in verdicts.values())
    lines.append("| all | " + " | ".join(str(totals[w] or 0) for w in WORDS) + " |")
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for name, (word, reason) in sorted(verdicts.items()):
        if word != "passed":
            file, _, test = name.partition("::")
            key = (f"{file}::{test.partition('[')[0]}", word, reason)
            grouped.setdefault(key, []).append(test)
    tables: dict[str, list[str]] = {word: [] for word in WORDS}
    for (test, word, reason), cases in by_file(grouped).items():
        count = f" ({len(cases)})" if len(cases) > 1 else ""
        tables[word].append(f"| `{test}`{count} | {reason.replace('|', chr(92) + '|')} |")
    for word, made in tables.items():
        if made:
            title = WORDS[word][:1].upper() + WORDS[word][1:]
            lines += ["", f"### {title}", "", "| test | reason |", "|---|---|", *made]
    text = "\n".join(lines) + "\n"
    if out:
        out.write_text(text, "utf-8")
    else:
        sys.stdout.write(text)
    return 1 if totals["defect"] else 0


Grouped = dict[tuple[str, str, str], list[str]]


def by_file(grouped: Grouped) -> Grouped:
    """The same with one row for a file, where more than three of its tests share a reason."""
    n_tests = Counter((test.partition("::")[0], *rest) for test, *rest in grouped)
    made: Grouped = {}
    for (test, word, reason), cases in grouped.items():
        file = test.partition("::")[0]
        shown = file if n_tests[file, word, reason] > 3 else test
        made.setdefault((shown, word, reason), []).extend(cases)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run")
    one.add_argument("suite", type=Path)
    one.add_argument("--python", default=sys.executable)
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--encoder", type=Path, help="a GGUF of an embedding model, for its tests")
    one.add_argument("--select", nargs="*", default=[], help="tests, as pytest names them")
    two = commands.add_parser("page")
    two.add_argument("results", type=Path)
    two.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.command == "page":
        return page(given.results, given.out)
    run(given.suite, given.python, given.out, given.select, given.encoder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
