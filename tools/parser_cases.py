"""Read llama.cpp's own cases of chat answers with treadle's scanner.

    python tools/parser_cases.py CASES.jsonl --templates DIR --out cases.json

CASES has a JSON object a line: ``template`` (a path that ends with the template's file name),
``input`` (what the model wrote), ``messages``, ``tools``, ``tool_choice`` (0 auto, 1 required,
2 none), ``enable_thinking``, ``parallel_tool_calls``, ``json_schema``, ``is_partial``,
``reasoning_format`` (0 none), ``add_generation_prompt``, and ``expect`` with ``content``,
``reasoning_content`` and ``tool_calls``. They are what the builder in llama.cpp's
``tests/test-chat.cpp`` is given; a line at the end of its ``run()`` writes them. DIR is llama.cpp's
folder ``models/templates``.

Each case is read whole and one character at a time: both must give what is expected. The report
says how many agree, by template, and why the others differ; ``compatibility.toml`` has the reasons.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from treadle.speech import Told, find_manner
from treadle.speech.manner import Manner
from treadle.speech.planned import Wanted, plan_answer
from treadle.speech.scanner import Speech
from treadle.text.template import ChatTemplate

Case = dict[str, Any]
USER = {"role": "user", "content": "Hey"}


def rendered(template: ChatTemplate, case: Case) -> str:
    """The prompt; an empty one where the template raises."""
    tools = [
        {
            "type": "function",
            "function": {
                "name": t["name"],
                "description": t["description"],
                "parameters": json.loads(t["parameters"] or "{}"),
            },
        }
        for t in case["tools"]
    ]
    try:
        return template.render(
            case["messages"] or [USER],
            tools=tools or None,
            add_generation_prompt=case["add_generation_prompt"],
            enable_thinking=case["enable_thinking"],
        )
    except Exception:
        return ""


def speech_of(manner: Manner, prompt: str, case: Case) -> Speech:
    """What may be found in the answer, as the server plans it."""
    tools = {t["name"]: json.loads(t["parameters"] or "{}") for t in case["tools"]}
    if case["tool_choice"] == 2:
        tools = {}
    return manner.speech(
        prompt,
        tools=tools,
        parallel=case["parallel_tool_calls"],
        streams=True,
        sure=bool(tools),
        forced=bool(tools) and case["tool_choice"] == 1,
    )


def read(speech: Speech, text: str, *, by_character: bool) -> Told:
    """The answer's parts."""
    scanner = speech.scanner()
    parts = []
    if by_character:
        for character in text:
            parts += scanner.feed(character)
        parts += scanner.feed("", last=True)
    else:
        parts += scanner.feed(text, last=True)
    return Told.of(parts)


def comparable(arguments: str) -> Any:
    """Arguments as a value; a text that is no JSON yet as it is."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def differs(told: Told, expect: dict[str, Any]) -> str:
    """How an answer differs from what is expected; nothing if it does not."""
    if told.content.strip() != expect["content"].strip():
        return f"content {told.content!r}, not {expect['content']!r}"
    if told.reasoning.strip() != expect["reasoning_content"].strip():
        return f"reasoning {told.reasoning!r}, not {expect['reasoning_content']!r}"
    calls = [(c.name, comparable(c.arguments)) for c in told.calls]
    wanted = [(c["name"], comparable(c["arguments"])) for c in expect["tool_calls"]]
    if calls != wanted:
        return f"calls {calls}, not {wanted}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", type=Path)
    parser.add_argument("--templates", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--match", default="", help="only templates whose name has this")
    given = parser.parse_args()
    lines = given.cases.read_text("utf-8").splitlines()
    templates: dict[str, tuple[ChatTemplate, Manner]] = {}
    report: dict[str, list[dict[str, Any]]] = defaultdict(list)
    n_agree = 0
    for number, line in enumerate(lines):
        case = json.loads(line)
        name = Path(case["template"]).name
        if given.match not in name:
            continue
        if name not in templates:
            source = (given.templates / name).read_text("utf-8")
            template = ChatTemplate(source, bos="", eos="")
            templates[name] = template, find_manner(template)
        template, manner = templates[name]
        speech = speech_of(manner, rendered(template, case), case)
        found = ""
        for by_character in (False, True):
            try:
                found = differs(read(speech, case["input"], by_character=by_character), case["expect"])
            except Exception as e:
                found = f"{type(e).__name__}: {e}"
            if found:
                found = f"{'by character: ' if by_character else ''}{found}"
                break
        n_agree += not found
        report[name].append({"number": number, "row": manner.row.name, "input": case["input"], "differs": found})
    given.out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", "utf-8")
    for name, cases in sorted(report.items()):
        same = sum(not c["differs"] for c in cases)
        print(f"{name:60} {same:3} of {len(cases)}")
    print(f"{n_agree} of {sum(map(len, report.values()))} agree")
    return 0


if __name__ == "__main__":
    sys.exit(main())
