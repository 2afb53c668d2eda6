"""Cost of one short use: a whole process that loads a model and writes one token, warm and with
an empty kernel cache; its own memory; and how much two processes on one model share.

    python bench/startup.py MODEL [--repeats 7]

Modules are compiled, as ``pip install`` leaves them, whatever PYTHONDONTWRITEBYTECODE says: Python
takes a quarter longer where it compiles them again each time. ``warm_cpu_s`` is processor time,
which tells more than the clock where others use the machine.

Memory is read from Linux's /proc: private (the process's own), and proportional (shared pages
counted by their sharers).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

CHILD = """
import sys, treadle
model = treadle.load(sys.argv[1])
greedy = treadle.Sampling(temperature=0)
model.generate("Once upon a time", max_tokens=1, sampling=greedy).finish()
print("ready", flush=True)
sys.stdin.read()
"""


def process_s(
    model: str,
    bytecode: str,
    prompt: str,
    cache: str | None = None,
    *,
    options: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> tuple[float, float]:
    """Wall and processor seconds of ``treadle run MODEL PROMPT -n 1``, with more ``options`` and
    environment ``variables``. Raises CalledProcessError, with what the process said.
    """
    env = {**os.environ, **(variables or {}), "PYTHONPYCACHEPREFIX": bytecode}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    env |= {"TREADLE_CACHE": cache} if cache else {}
    began = time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "treadle", "run", model, prompt, "-n", "1", *options]
    subprocess.run(
        command, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, cpu


def spread(seconds: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}


def memory_mb(pid: int, model: str) -> dict[str, float]:
    """Megabytes: ``own`` is private memory outside the model's file; ``model_pss`` the file's
    proportional share.
    """
    own = file_rss = file_pss = 0
    mapped = False
    name = str(Path(model).resolve())
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            mapped = words[-1] == name
        elif words[0] in ("Private_Clean:", "Private_Dirty:") and not mapped:
            own += int(words[1])
        elif words[0] == "Rss:" and mapped:
            file_rss += int(words[1])
        elif words[0] == "Pss:" and mapped:
            file_pss += int(words[1])
    return {"own": own / 1024, "model_rss": file_rss / 1024, "model_pss": file_pss / 1024}


def sharing(model: str) -> list[dict[str, float]]:
    """Memory of two processes that hold the same model at the same time."""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for child in children:
        assert child.stdout is not None
        child.stdout.readline()
    found = [memory_mb(child.pid, model) for child in children]
    for child in children:
        child.communicate("")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--prompt", default="Once upon a time")
    given = parser.parse_args()
    cold = []
    with tempfile.TemporaryDirectory() as code:
        # pages, kernels and modules into their caches
        process_s(given.model, code, given.prompt)
        warm = [process_s(given.model, code, given.prompt) for _ in range(given.repeats)]
        for _ in range(3):
            with tempfile.TemporaryDirectory() as folder:
                cold.append(process_s(given.model, code, given.prompt, folder))
    told = {
        "warm_s": spread([wall for wall, _ in warm]),
        "warm_cpu_s": spread([cpu for _, cpu in warm]),
        "cold_kernels_s": spread([wall for wall, _ in cold]),
        "two_processes_mb": sharing(given.model),
    }
    print(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()
