"""Llama 4's marks of turns, its ends of answers, and its calls of tools."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chat.template.test_template import CHAT, load
from tests.tokenizer.vocabularies import CONTROL
from treadle.chat.template.template import ChatTemplate
from treadle.chat.tools import find_dialect
from treadle.tokenizer.vocab import END_OF_GENERATION, END_OF_TURN

# The parts of the published template that speak of calls; ``MARK`` stands before them or does not.
CALLS = """\
{{- bos_token }}
{%- if tools %}
    {{- '<|header_start|>system<|header_end|>\\n\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) }}{%- endfor %}
    {{- '<|eot|>' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|header_start|>' + message['role'] + '<|header_end|>\\n\\n' }}
    {%- if message.tool_calls %}
        {{- 'MARK' }}
        {%- for call in message.tool_calls %}
            {{- '{"name": "' + call.function.name + '", "parameters": ' }}
            {{- call.function.arguments | tojson + '}' }}
        {%- endfor %}
    {%- else %}
        {{- message['content'] }}
    {%- endif %}
    {{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header_start|>assistant<|header_end|>\\n\\n' }}{%- endif %}"""


def test_built_in(tmp_path: Path) -> None:
    pieces = ["<|header_start|>", "<|header_end|>", "<|eot|>"]
    template = load(tmp_path / "v.gguf", [(piece, CONTROL) for piece in pieces], "")
    assert template.builtin == "llama4"
    assert template.render(CHAT) == (
        "<s><|header_start|>system<|header_end|>\n\nBe brief.<|eot|>"
        "<|header_start|>user<|header_end|>\n\nhello<|eot|>"
        "<|header_start|>assistant<|header_end|>\n\nHi.<|eot|>"
        "<|header_start|>user<|header_end|>\n\nbye<|eot|>"
        "<|header_start|>assistant<|header_end|>\n\n"
    )


def test_ends() -> None:
    """Before that of a text, which its vocabulary has too."""
    assert END_OF_TURN.index(b"<|eot|>") < END_OF_TURN.index(b"<|end_of_text|>")
    assert b"<|eom|>" in END_OF_GENERATION


@pytest.mark.parametrize("mark", ["", "<|python_start|><|python_end|>"])
def test_calls_are_found(mark: str) -> None:
    dialect = find_dialect(ChatTemplate(CALLS.replace("MARK", mark), bos="<|begin_of_text|>"))
    assert dialect.row.name == "json"
    assert dialect.shows_tools
    assert dialect.writes_calls
