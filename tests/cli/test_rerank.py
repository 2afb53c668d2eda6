from __future__ import annotations

import json
from pathlib import Path

import treadle
from tests.api.test_rerank import DOCUMENTS, QUERY, save
from tests.cli.conftest import Run


def test_the_best_come_first(run: Run, tmp_path: Path) -> None:
    save("bert", tmp_path / "hf")
    model = str(tmp_path / "hf")
    with treadle.load(model, threads=2) as loaded:
        scores = loaded.rerank(QUERY, DOCUMENTS).tolist()
    best = sorted(range(len(scores)), key=lambda i: -scores[i])
    ran = run("rerank", model, QUERY, *DOCUMENTS, "--json", "-t", "2")
    assert ran.code == 0, ran.err
    assert [row["index"] for row in json.loads(ran.out)] == best
    given = "\n".join([*DOCUMENTS, "", ""])
    lines = run("rerank", model, QUERY, "-n", "2", "-t", "2", stdin=given).out.splitlines()
    assert [line.split(maxsplit=1)[1].strip() for line in lines[-2:]] == [
        DOCUMENTS[i] for i in best[:2]
    ]
    ran = run("rerank", model, QUERY, stdin="\n")
    assert ran.code == 2
    assert "no documents" in ran.err
    ran = run("rerank", model, QUERY, stdin="\none\n")
    assert ran.code == 1
    assert "standard input: line 1: is blank" in ran.err
    ran = run("rerank", model, QUERY, stdin=f"one\n{'word ' * 600}\n")
    assert ran.code == 1
    assert "line 2: " in ran.err
    ran = run("rerank", model, QUERY, "one", "-c", "3")
    assert ran.code == 1
    assert "do not fit the context of 3: raise it with -c" in ran.err
