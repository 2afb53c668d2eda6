"""Prefill and decode of one text, by treadle's engine and by llama-cpp-python, of the same ids."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

from rival import Rival

import treadle
from treadle.engine.batch import BatchItem

CONTEXT = 4096
# Run by the rival's interpreter.
LLAMA_CPP = f"""
import json, sys, time
import llama_cpp
path, threads = sys.argv[1], int(sys.argv[2])
model = llama_cpp.Llama(path, n_ctx={CONTEXT}, n_batch=2048, n_ubatch=512, n_threads=threads,
                        n_threads_batch=threads, verbose=False)
print("{{}}", flush=True)
for line in sys.stdin:
    ids, n = json.loads(line)
    model.reset()
    begin = time.perf_counter()
    model.eval(ids)
    middle = time.perf_counter()
    for i in range(n):
        model.eval([ids[i]])
    end = time.perf_counter()
    print(json.dumps([middle - begin, (end - middle) / n]), flush=True)
"""


class Mine:
    """treadle, by the engine alone."""

    def __init__(self, path: Path, threads: int) -> None:
        self.model = treadle.load(path, threads=threads, context=CONTEXT)

    def run(self, ids: list[int], n: int) -> list[float]:
        """Seconds of the prompt, and of each of ``n`` further tokens."""
        engine = self.model.engine
        engine.cache.forget()
        with closing(engine.cache.sequence()) as seq:
            begin = time.perf_counter()
            for at in range(0, len(ids), engine.max_tokens):
                engine.run([BatchItem(seq, ids[at : at + engine.max_tokens], 1)])
            middle = time.perf_counter()
            for i in range(n):
                engine.run([BatchItem(seq, [ids[i]], 1)])
            return [middle - begin, (time.perf_counter() - middle) / n]


class Theirs:
    """llama-cpp-python, by the interpreter that has it."""

    def __init__(self, python: str, path: Path, threads: int) -> None:
        self.program = Rival(python, LLAMA_CPP, path, threads)

    def run(self, ids: list[int], n: int) -> list[float]:
        """As ``Mine.run``."""
        found: list[float] = self.program.ask(ids, n)
        return found
