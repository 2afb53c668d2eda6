"""Start-up: the libraries behind the text are imported when a file needs them, not before."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("sentencepiece", "tokenizers", "jinja2", "llguidance", "huggingface_hub", "torch")
MODULES = (
    "treadle",
    "treadle.tokenizer.tokenizer",
    "treadle.chat.template.template",
    "treadle.grammar.grammar",
)


def test_imports() -> None:
    script = (
        f"import sys; import {', '.join(MODULES)}\n"
        "from treadle.tokenizer import bpe, spm, wordpiece; from treadle.grammar import gbnf\n"
        "from treadle.chat.template.template import ChatTemplate; ChatTemplate('x')\n"
        f"print(*[name for name in {HEAVY!r} if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []
