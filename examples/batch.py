"""One question about each line of a file, by `treadle batch`; a second run goes on where the first
was stopped:

    python examples/batch.py LINES.txt ANSWERS.jsonl [MODEL]
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def requests(lines: list[str]) -> str:
    """OpenAI's batch file: a request a line."""
    bodies = [
        {"messages": [{"role": "user", "content": f"What is this about? {line}"}], "max_tokens": 32}
        for line in lines
    ]
    made = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": body}
        for i, body in enumerate(bodies)
    ]
    return "".join(json.dumps(each) + "\n" for each in made)


if __name__ == "__main__":
    source = Path(sys.argv[1])
    target = Path(sys.argv[2])
    asked = target.with_suffix(".requests.jsonl")
    asked.write_text(requests(source.read_text("utf-8").splitlines()), "utf-8")
    model = ["--model", *sys.argv[3:4]] if sys.argv[3:] else []
    command = [sys.executable, "-m", "treadle", "batch", str(asked), str(target), *model]
    sys.exit(subprocess.run(command).returncode)
