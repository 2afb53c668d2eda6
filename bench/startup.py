"""What one short use costs: a whole process that loads a model and writes one token, warm and with
an empty kernel cache; its own memory; and how much two processes on one model share.

    python bench/startup.py MODEL [--repeats 7]

Memory is read from Linux's /proc: private (the process's own), and proportional (shared pages
counted by their sharers).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHILD = """
import sys, treadle
model = treadle.load(sys.argv[1])
greedy = treadle.Sampling(temperature=0)
model.generate("Once upon a time", max_tokens=1, sampling=greedy).finish()
print("ready", flush=True)
sys.stdin.read()
"""


def process_s(model: str, cache: str | None = None) -> float:
    """Wall seconds of ``treadle run MODEL PROMPT -n 1``."""
    env = dict(os.environ, **({"TREADLE_CACHE": cache} if cache else {}))
    began = time.perf_counter()
    command = [sys.executable, "-m", "treadle", "run", model, "Once upon a time", "-n", "1"]
    subprocess.run(
        command, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    return time.perf_counter() - began


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
    given = parser.parse_args()
    process_s(given.model)  # pages and kernels into their caches
    warm = [process_s(given.model) for _ in range(given.repeats)]
    cold = []
    for _ in range(3):
        with tempfile.TemporaryDirectory() as folder:
            cold.append(process_s(given.model, folder))
    print(
        json.dumps(
            {
                "warm_s": {"median": statistics.median(warm), "min": min(warm), "max": max(warm)},
                "cold_kernels_s": {
                    "median": statistics.median(cold),
                    "min": min(cold),
                    "max": max(cold),
                },
                "two_processes_mb": sharing(given.model),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
