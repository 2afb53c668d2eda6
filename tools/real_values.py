"""The values that tests/real compares with: tests/real/values.json.

::

    python tools/real_values.py --rival PYTHON    # of an environment with llama-cpp-python

``kl``: for each real model and each text of tests/real/texts.txt, how far llama.cpp's logits are
from float32's, which is transformers on the dequantised weights: KL in nats, and the share of
positions with the same likeliest token. ``tokens``: the same where llama.cpp reads one token at a
time. ``greedy``: texts that float32 writes where its first choice is clear at each token.
``vectors``: of MiniLM, as sentence-transformers makes them: transformers, the mean of all
tokens, norm 1. Without ``--rival`` what is llama.cpp's stays as it is in the file. Minutes, 4 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch spins where cores are few

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from rival import Rival  # noqa: E402

from tests.real.truth import (  # noqa: E402
    N_WINDOW,
    compare,
    float32_logits,
    float32_model,
    texts,
)
from tools.fetch_models import fetch  # noqa: E402

VALUES = ROOT / "tests/real/values.json"
MODELS = ("smollm2", "gemma3")
CLEAR = 0.5  # between the two largest logits; rounding to 8 bits moves them by a fifth of it
N_GREEDY = 32  # tokens of a greedy text, at most
LEAST = 8  # tokens of a greedy text, at least
PROMPTS = (
    "Monday, Tuesday, Wednesday,",
    "1, 2, 3, 4, 5,",
    "The capital of France is",
    "The quick brown fox jumps over the",
    "A B C D E F G",
    "January, February, March,",
    "def add(a, b):\n    return",
    "for i in range(10):\n    print(",
    "import numpy as np\nimport matplotlib.pyplot as",
    '<!DOCTYPE html>\n<html>\n<head>\n<meta charset="',
    "We hold these truths to be self-evident, that all men are",
    "To be, or not to be, that is the",
    "In the beginning God created the",
    'Licensed under the Apache License, Version 2.0 (the "License");\nyou may not',
    "one two three four one two three four one two three four one two three",
    '{"name": "Anna", "age": 31}\n{"name": "Ben", "age": 42}\n{"name": "Carl", "age":',
    "Once upon a time, there was a little",
    "H2O is the chemical formula of",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n",
)
SENTENCES = (
    "A cat sits on the mat.",
    "A kitten is lying on a rug.",
    "The stock market fell sharply on Monday.",
    "How do I bake bread without yeast?",
    "Wie backe ich Brot ohne Hefe?",
    "def add(a, b): return a + b",
    "오늘은 날씨가 좋습니다.",
    "x",
    "The lighthouse stood at the end of a long spit of sand. " * 12,
)
# Run by the interpreter that has llama-cpp-python: ids in, the path of their logits out.
LLAMA_CPP = """
import json, sys
import numpy as np, llama_cpp
path, out = sys.argv[1:]
model = llama_cpp.Llama(path, n_ctx=512, n_batch=512, n_ubatch=512, logits_all=True, n_threads=1,
                        n_threads_batch=1, verbose=False)
print(json.dumps(llama_cpp.__version__), flush=True)
for line in sys.stdin:
    ids, one_by_one = json.loads(line)
    model.reset()
    for part in [[token] for token in ids] if one_by_one else [ids]:
        model.eval(part)
    np.save(out, model.scores[:len(ids)])
    print(json.dumps(out), flush=True)
"""


def kl_values(path: Path, truth: Any, python: str, folder: str) -> dict[str, Any]:
    """Of llama.cpp, for each text: as a prompt and one by one, KL and the share of agreement."""
    import treadle

    with treadle.load(path, threads=1) as model:
        windows = {name: model.tokenize(text)[:N_WINDOW] for name, text in texts().items()}
    rival = Rival(python, LLAMA_CPP, path, Path(folder) / "logits.npy")
    found: dict[str, Any] = {"version": rival.ready, "kl": {}, "tokens": {}}
    for name, ids in windows.items():
        expected = float32_logits(truth, ids)
        for kind, one_by_one in (("kl", False), ("tokens", True)):
            logits = np.load(rival.ask(ids, one_by_one))
            found[kind][name] = [round(float(value), 6) for value in compare(expected, logits)]
            print(path.name, name, kind, found[kind][name], file=sys.stderr)
    return found


def greedy_values(path: Path, truth: Any) -> list[dict[str, Any]]:
    """Prompts, and the ids that float32 writes as long as its choice is clear."""
    import treadle

    found = []
    with treadle.load(path, threads=1) as model:
        for prompt in PROMPTS:
            ids = model.tokenize(prompt)
            if prompt.startswith("<|im") and len(ids) > 40:
                continue  # not tokens of this model
            text: list[int] = []
            while len(text) < N_GREEDY and not (text and text[-1] in model.tokenizer.eog):
                last = float32_logits(truth, ids + text, [-1])[0]
                second, first = np.argsort(last)[-2:]
                if last[first] - last[second] < CLEAR:
                    break
                text.append(int(first))
            if len(text) >= LEAST:
                found.append({"prompt": prompt, "ids": text})
                print(path.name, repr(prompt), repr(model.detokenize(text)), file=sys.stderr)
    return found


def vectors(folder: Path) -> list[dict[str, Any]]:
    """Sentences and their vectors, 5 digits."""
    import torch
    import transformers

    tokens = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for sentence in SENTENCES:
        read = tokens(sentence, return_tensors="pt", truncation=True, max_length=256)
        with torch.no_grad():
            mean = model(**read).last_hidden_state[0].mean(0)
        vector = (mean / mean.norm()).tolist()
        found.append({"text": sentence, "vector": [round(value, 5) for value in vector]})
    return found


def main() -> None:
    """Write the file anew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rival", help="an interpreter that has llama-cpp-python")
    parser.add_argument("--only", choices=(*MODELS, "minilm"), help="of one model")
    options = parser.parse_args()
    values: dict[str, Any] = json.loads(VALUES.read_text("utf-8")) if VALUES.exists() else {}
    for name in MODELS:
        if options.only not in (None, name):
            continue
        path = fetch(name)
        truth = float32_model(path)
        values.setdefault("greedy", {})[name] = greedy_values(path, truth)
        if options.rival:
            with tempfile.TemporaryDirectory() as folder:
                values.setdefault("llama_cpp", {})[name] = kl_values(
                    path, truth, options.rival, folder
                )
        del truth
    if options.only in (None, "minilm"):
        values["vectors"] = vectors(fetch("minilm"))
    lines = json.dumps(values, ensure_ascii=False, indent=1)
    lines = re.sub(r"\[[-\d\s.,e]+\]", lambda row: " ".join(row[0].split()), lines)
    VALUES.write_text(lines + "\n", "utf-8")


if __name__ == "__main__":
    main()
