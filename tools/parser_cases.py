"""Read llama.cpp's own cases of chat answers with treadle's scanner.

    python tools/parser_cases.py CASES.jsonl --templates DIR [--out cases.json]

CASES has a JSON object a line: ``template`` (a path that ends with the template's file name),
``input`` (what the model wrote), ``messages``, ``tools``, ``tool_choice`` (0 auto, 1 required,
2 none), ``enable_thinking``, ``parallel_tool_calls``, ``json_schema``, ``reasoning_format``
(0 none), ``continue_final_message`` (2 reasoning, 3 content), and ``expect`` with ``content``,
``reasoning_content`` and ``tool_calls``. ``docs/compatibility.md`` says how they come out of
llama.cpp's ``tests/test-chat.cpp``. DIR is llama.cpp's folder ``models/templates``.

Each case is planned as the server plans an answer, and read whole and one character at a time: both
must give what is expected. ``parser_cases.toml`` beside this file has the reason for each case that
differs. The exit code is 1 where a case differs and has none, and where a reason is for a case that
agrees.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomllib

import treadle
from treadle.chat.messages import read_messages
from treadle.chat.prompt import render_messages
from treadle.chat.template.template import ChatTemplate
from treadle.chat.tools import ParsedOutput, find_dialect
from treadle.chat.tools.answer_plan import AnswerOptions, plan_answer
from treadle.chat.tools.detect import TemplateDialect
from treadle.chat.tools.messages import continued_dialect, messages_for_template
from treadle.chat.tools.stream_parser import AnswerMarks
from treadle.grammar.compiled_cache import Grammars

Case = dict[str, Any]
HERE = Path(__file__).resolve().parent
MODEL = Path(treadle.__file__).parent / "data" / "demo.gguf"
USER = {"role": "user", "content": "Hey"}
NO_TOOLS = 2
REQUIRED = 1
NO_REASONING = 0
REASONING = 2  # of ``continue_final_message``
# A GGUF file has what is written so as a control token: an answer's text lacks it.
CONTROL = re.compile(r"<\|[A-Za-z_]+\|>")
WORDS = {"agree": "agree", "design": "differ by design", "absent": "not there"}


def planned(
    template: ChatTemplate, dialect: TemplateDialect, case: Case, grammars: Grammars
) -> AnswerMarks:
    """Return the marks of calls and thoughts in the answer, as the server plans them."""
    schemas = {t["name"]: json.loads(t["parameters"] or "{}") for t in case["tools"]}
    tools = [
        {
            "type": "function",
            "function": {
                "name": t["name"],
                "description": t["description"],
                "parameters": schemas[t["name"]],
            },
        }
        for t in case["tools"]
    ]
    messages = read_messages(case["messages"] or [USER])
    within = case["continue_final_message"] == REASONING
    said, shown = messages_for_template(messages[:-1] if within else messages, tools, dialect)
    variables = {"enable_thinking": case["enable_thinking"]}
    rendered = [*said, messages[-1]] if within else said
    prompt = render_messages(template, rendered, shown, variables, within=within)
    called = schemas if case["tool_choice"] != NO_TOOLS else {}
    wanted = AnswerOptions(
        tools=called,
        forced=tuple(called) if case["tool_choice"] == REQUIRED else (),
        parallel=case["parallel_tool_calls"],
        schema=json.loads(case["json_schema"]) if case["json_schema"] else None,
    )
    return plan_answer(
        wanted, continued_dialect(messages, dialect, within=within), prompt, grammars
    ).marks


def visible(text: str, template: ChatTemplate, marks: AnswerMarks) -> str:
    """Return a model's text without the control tokens that the scanner does not read."""
    kept = "".join(
        (
            *((marks.thought.open, marks.thought.close) if marks.thought else ()),
            *(marks.row.marks if marks.row else ()),
            *(marks.channels.marks if marks.channels else ()),
        )
    )
    found = set(CONTROL.findall(text))
    for mark in found:
        if mark in template.source and mark not in kept:
            text = text.replace(mark, "")
    return text


def read(marks: AnswerMarks, text: str, *, by_character: bool) -> ParsedOutput:
    """The answer's parts."""
    scanner = marks.scanner()
    parts = []
    if by_character:
        for character in text:
            parts += scanner.feed(character)
        parts += scanner.feed("", last=True)
    else:
        parts += scanner.feed(text, last=True)
    return ParsedOutput.of(parts)


def comparable(arguments: str) -> Any:
    """Arguments as a value; a text that is no JSON yet without blanks at its end."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments.rstrip()


def differs(told: ParsedOutput, case: Case) -> str:
    """How an answer differs from what is expected; nothing if it does not. llama.cpp repeats what a
    message that is gone on with has said.
    """
    expect = case["expect"]
    before = {"content": "", "reasoning_content": ""}
    if case["continue_final_message"]:
        before |= {key: case["messages"][-1].get(key) or "" for key in before}
    if case["reasoning_format"] == NO_REASONING:
        before["reasoning_content"] = ""
    content = before["content"] + told.content
    reasoning = before["reasoning_content"]
    reasoning += told.reasoning
    if content.strip() != expect["content"].strip():
        return f"content {content!r}, not {expect['content']!r}"
    if reasoning.strip() != expect["reasoning_content"].strip():
        return f"reasoning {reasoning!r}, not {expect['reasoning_content']!r}"
    calls = [(c.name, comparable(c.arguments)) for c in told.calls]
    wanted = [(c["name"], comparable(c["arguments"])) for c in expect["tool_calls"]]
    return f"calls {calls}, not {wanted}" if calls != wanted else ""


def difference(
    case: Case, template: ChatTemplate, dialect: TemplateDialect, grammars: Grammars
) -> str:
    """How treadle's reading of a case differs; nothing if it does not."""
    try:
        marks = planned(template, dialect, case, grammars)
        text = visible(case["input"], template, marks)
        if case["reasoning_format"] == NO_REASONING:  # as the server has it
            marks = replace(marks, thought=None, opened=False)
        for by_character in (False, True):
            found = differs(read(marks, text, by_character=by_character), case)
            if found:
                return f"{'by character: ' if by_character else ''}{found}"
    except treadle.TreadleError as e:
        return f"{type(e).__name__}: {e}"
    return ""


def reason_of(name: str, number: int, rows: list[dict[str, Any]]) -> tuple[str, str]:
    """A word of ``WORDS`` and the reason; nothing where there is none."""
    for row in rows:
        if row["template"] == name and number in row.get("numbers", [number]):
            row["used"] = True
            return row["verdict"], row["reason"]
    return "", ""


def table(report: dict[str, list[dict[str, Any]]]) -> str:
    """The report by template, in Markdown."""
    lines = ["| template | cases | " + " | ".join(WORDS.values()) + " | |", "|---" * 6 + "|"]
    whole: Counter[str] = Counter()
    for name, cases in sorted(report.items(), key=lambda each: each[0].lower()):
        counts = Counter(c["verdict"] for c in cases)
        whole += counts
        reasons = "; ".join(dict.fromkeys(c["reason"] for c in cases if c["reason"]))
        numbers = " | ".join(str(counts[word] or "") for word in WORDS)
        lines.append(f"| `{name.removesuffix('.jinja')}` | {len(cases)} | {numbers} | {reasons} |")
    numbers = " | ".join(str(whole[word]) for word in WORDS)
    return "\n".join([*lines, f"| all | {sum(map(len, report.values()))} | {numbers} | |"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", type=Path)
    parser.add_argument("--templates", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="a JSON file of every case")
    parser.add_argument("--match", default="", help="only templates whose name has this")
    given = parser.parse_args()
    rows = tomllib.loads((HERE / "parser_cases.toml").read_text("utf-8"))["case"]
    templates: dict[str, tuple[ChatTemplate, TemplateDialect]] = {}
    report: dict[str, list[dict[str, Any]]] = defaultdict(list)
    grammars = treadle.load(MODEL).grammars
    for number, line in enumerate(given.cases.read_text("utf-8").splitlines()):
        case = json.loads(line)
        name = Path(case["template"]).name
        if given.match not in name:
            continue
        if name not in templates:
            source = (given.templates / name).read_text("utf-8")
            template = ChatTemplate(source, bos="", eos="")
            templates[name] = template, find_dialect(template)
        found = difference(case, *templates[name], grammars)
        verdict, reason = reason_of(name, number, rows) if found else ("agree", "")
        kept = {"number": number, "row": templates[name][1].row.name, "input": case["input"]}
        report[name].append({**kept, "differs": found, "verdict": verdict, "reason": reason})
    if given.out:
        given.out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", "utf-8")
    cases = [(name, case) for name, made in report.items() for case in made]
    print(table(report))
    unexplained = [(name, case) for name, case in cases if not case["verdict"]]
    for name, case in unexplained:
        print(f"no reason: {name} {case['number']}: {case['differs']}", file=sys.stderr)
    unused = [row for row in rows if not row.get("used") and given.match in row["template"]]
    for row in unused:
        print(f"no such difference: {row['template']}: {row['reason']}", file=sys.stderr)
    return 1 if unexplained or unused else 0


if __name__ == "__main__":
    sys.exit(main())
