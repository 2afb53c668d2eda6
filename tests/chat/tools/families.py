"""A template and a call for each row: as models of the family write it.

Templates of families that ``../shared/data`` lacks are ours; they write calls as their own do.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from treadle.chat.template.template import ChatTemplate
from treadle.chat.tools.detect import TemplateDialect, find_dialect
from treadle.chat.tools.formats import HARMONY, ROWS, SOLAR, Channels, ToolCallFormat

TOOLS: dict[str, dict[str, Any]] = {
    "f": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "n": {"type": "integer"},
            "list": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["text"],
        "additionalProperties": False,
    },
    "g": {"type": "object", "properties": {}, "additionalProperties": False},
}


def tool(name: str) -> dict[str, Any]:
    function = {"name": name, "description": f"{name.upper()}.", "parameters": TOOLS[name]}
    return {"type": "function", "function": function}


F: Any = tool("f")
G: Any = tool("g")
ARGUMENTS = {"text": 'é}\n"<', "n": -3, "list": ["a", "b"]}
JSON = '{"text": "é}\\n\\"<", "n": -3, "list": ["a", "b"]}'


def row(name: str) -> ToolCallFormat:
    return next(row for row in ROWS if row.name == name)


def channels_of(own: ToolCallFormat) -> Channels:
    assert own.channels is not None
    return own.channels


GPT_OSS = channels_of(HARMONY)
OPEN = channels_of(SOLAR)
# Words before a call, for rows that have them in a dialect of their own.
BEFORE = {
    "recipient": "all\nso ",
    "harmony": f"{GPT_OSS.final}so {GPT_OSS.end}{GPT_OSS.start}",
    "solar": f"{OPEN.final}so {OPEN.end}{OPEN.start}",
}


class Family(NamedTuple):
    """A call of f with ARGUMENTS; one of g without any; ``several``: both in one answer."""

    f: str
    g: str
    several: str = ""  # nothing: one call an answer


def twice(f: str, g: str, between: str = "") -> Family:
    return Family(f, g, f"{f}{between}{g}")


_R1 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
_V3 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
_BEGIN = "<｜tool▁calls▁begin｜>"
_END = "<｜tool▁calls▁end｜>"
_OBJECT = '{{"name": "{}", "arguments": {}}}'
_ROLE = "<|message_sep|>\n\nfunction call<|role_sep|>\n"
_HERMES = "<tool_call>\n{}\n</tool_call>"
_HARMONY = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}"


def wrapped(begin: str, call: str, between: str, end: str) -> Family:
    f = call.format("f", JSON)
    g = call.format("g", "{}")
    return Family(f"{begin}{f}{end}", f"{begin}{g}{end}", f"{begin}{f}{between}{g}{end}")


_SOLAR = "<|tool_call:begin|>{}<|tool_call:name|>{}<|tool_call:args|>{}<|tool_call:end|>"
_KIMI = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
_KIMI_F = _KIMI.format("f", 0, JSON)
_KIMI_G = _KIMI.format("g", 1, "{}")
_SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def tagged(begin: str, then: str, close: str, behind: str = "\n") -> str:
    """ARGUMENTS between such tags."""
    said = {"text": 'é}\n"<', "n": "-3", "list": '["a", "b"]'}
    return "".join(f"{begin}{key}{then}{value}{close}{behind}" for key, value in said.items())


def enclosed(begin: str, f: str, between: str, g: str, end: str) -> Family:
    return Family(f"{begin}{f}{end}", f"{begin}{g}{end}", f"{begin}{f}{between}{g}{end}")


_ARG = tagged("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>")
_TIGHT = tagged("<arg_key>", "</arg_key><arg_value>", "</arg_value>", "")
_HY = tagged(
    "<arg_key:opensource>",
    "</arg_key:opensource>\n<arg_value:opensource>",
    "</arg_value:opensource>",
)
_SEED = tagged("<parameter=", ">", "</parameter>")
_INVOKE = tagged('<parameter name="', '">', "</parameter>")
_DSML = (
    '<｜DSML｜parameter name="text" string="true">é}\n"<</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="n" string="false">-3</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="list" string="false">["a", "b"]</｜DSML｜parameter>\n'
)


def dsml(wrap: str) -> Family:
    return enclosed(
        f"<｜DSML｜{wrap}>",
        f'\n<｜DSML｜invoke name="f">\n{_DSML}</｜DSML｜invoke>',
        "",
        '\n<｜DSML｜invoke name="g">\n</｜DSML｜invoke>',
        f"\n</｜DSML｜{wrap}>",
    )


def dsml_template(wrap: str) -> str:
    """As DeepSeek V3.2's and V4's have it."""
    return template(
        f'<｜DSML｜invoke name="{{{{ f.name }}}}">\n{_EACH}'
        "<｜DSML｜parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">"
        f"{_VALUE}</｜DSML｜parameter>\n{{% endfor %}}</｜DSML｜invoke>\n",
        before=f"\n\n<｜DSML｜{wrap}>\n",
        behind=f"</｜DSML｜{wrap}>",
    )


_ELEMENTS = "".join(
    f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'
    for key, kind, value in (
        ("text", "string", 'é}\n"<'),
        ("n", "number", "-3"),
        ("list", "array", '["a", "b"]'),
    )
)
_K3_CALL = '<|open|>call tool="{}" index="{}"<|sep|>{}<|close|>call<|sep|>'

_PYTHON = """f(text='é}\\n"<', n=-3, list=["a", "b"])"""

FAMILIES = {
    "kimi": enclosed(_SECTION[0], _KIMI_F, "", _KIMI_G, _SECTION[1]),
    "elements": enclosed(
        "<|open|>tools<|sep|>",
        _K3_CALL.format("f", 1, _ELEMENTS),
        "",
        _K3_CALL.format("g", 2, ""),
        "<|close|>tools<|sep|><|close|>message<|sep|>",
    ),
    "seed": twice(
        f"<seed:tool_call>\n<function=f>\n{_SEED}</function>\n</seed:tool_call>",
        "<seed:tool_call>\n<function=g>\n</function>\n</seed:tool_call>",
        "\n",
    ),
    "invoke": enclosed(
        "<minimax:tool_call>",
        f'\n<invoke name="f">\n{_INVOKE}</invoke>',
        "",
        '\n<invoke name="g">\n</invoke>',
        "\n</minimax:tool_call>",
    ),
    "dsml-functions": dsml("function_calls"),
    "dsml-tools": dsml("tool_calls"),
    "param": twice(
        '<function name="f"><param name="text"><![CDATA[é}\n"<]]></param>'
        '<param name="n">-3</param><param name="list">["a", "b"]</param></function>',
        '<function name="g"></function>',
        "\n",
    ),
    "arg": twice(f"<tool_call>f\n{_ARG}</tool_call>", "<tool_call>g\n</tool_call>", "\n"),
    "arg-tight": twice(f"<tool_call>f{_TIGHT}</tool_call>", "<tool_call>g</tool_call>"),
    "arg-hy": enclosed(
        "<tool_calls:opensource>",
        f"\n<tool_call:opensource>f<tool_sep:opensource>\n{_HY}</tool_call:opensource>",
        "",
        "\n<tool_call:opensource>g<tool_sep:opensource>\n</tool_call:opensource>",
        "\n</tool_calls:opensource>",
    ),
    "python": enclosed("<|tool_call_start|>[", _PYTHON, ", ", "g()", "]<|tool_call_end|>"),
    "python-lines": enclosed("<function_calls>", _PYTHON, "\n", "g()", "</function_calls>"),
    "toolcall": wrapped("<TOOLCALL>[", _OBJECT, ", ", "]</TOOLCALL>"),
    "tool-calls": wrapped("<tool_calls>[", _OBJECT, ", ", "]</tool_calls>"),
    "tool-lines": wrapped("<tool_calls>\n", _OBJECT, "\n", "\n</tool_calls>"),
    "granite": wrapped("<|tool_call|>[", _OBJECT, ", ", "]"),
    "phi": twice(
        f"<|tool_call|>{_OBJECT.format('f', JSON)}<|/tool_call|>",
        f"<|tool_call|>{_OBJECT.format('g', '{}')}<|/tool_call|>",
    ),
    "by-name": wrapped("<|tools_prefix|>[", '{{"{}": {}}}', ", ", "]<|tools_suffix|>"),
    "function-call": twice(
        "<|function_call|>" + _OBJECT.format("f", JSON),
        "<|function_call|>" + _OBJECT.format("g", "{}"),
    ),
    "function-role": Family(
        f"{_ROLE}{_OBJECT.format('f', JSON)}<|message_sep|>",
        f"{_ROLE}{_OBJECT.format('g', '{}')}<|message_sep|>",
    ),
    "hermes": twice(
        _HERMES.format(_OBJECT.format("f", JSON)), _HERMES.format(_OBJECT.format("g", "{}")), "\n"
    ),
    "json": Family(f'{{"name": "f", "parameters": {JSON}}}', '{"name": "g", "parameters": {}}'),
    "tags": twice(
        '<tool_call>\n<function=f>\n<parameter=text>\né}\n"<\n</parameter>\n<parameter=n>\n-3\n'
        '</parameter>\n<parameter=list>\n["a", "b"]\n</parameter>\n</function>\n</tool_call>',
        "<tool_call>\n<function=g>\n</function>\n</tool_call>",
        "\n",
    ),
    "mistral-list": wrapped("[TOOL_CALLS][", _OBJECT, ", ", "]"),
    "functools": wrapped(" functools[", _OBJECT, ", ", "]"),
    "mistral-id": twice(
        f"[TOOL_CALLS]f[CALL_ID]abcdefgh1[ARGS]{JSON}", "[TOOL_CALLS]g[CALL_ID]abcdefgh2[ARGS]{}"
    ),
    "mistral-args": twice(f"[TOOL_CALLS]f[ARGS]{JSON}", "[TOOL_CALLS]g[ARGS]{}"),
    "function": twice(f"<function=f>{JSON}</function>", "<function=g>{}</function>"),
    "recipient": twice(f">>>f\n{JSON}", ">>>g\n{}"),
    "deepseek-r1": wrapped(_BEGIN, _R1, "\n", _END),
    "deepseek": wrapped(_BEGIN, _V3, "", _END),
    "harmony": Family(_HARMONY.format("f", JSON), _HARMONY.format("g", "{}")),
    "solar": enclosed(
        "<|tool_calls|>",
        _SOLAR.format("a1b2c3d4e5", "f", JSON),
        "",
        _SOLAR.format("a1b2c3d4e6", "g", "{}"),
        "<|calls|>",
    ),
    "gemma": twice(
        '<|tool_call>call:f{list:[<|"|>a<|"|>,<|"|>b<|"|>],n:-3,text:<|"|>é}\n"<<|"|>}<tool_call|>',
        "<|tool_call>call:g{}<tool_call|>",
    ),
    "actions": wrapped(
        "Action:\n```json\n[",
        '\n    {{\n        "tool_name": "{}",\n        "parameters": {}\n    }}',
        ",",
        "\n]```",
    ),
    "action": wrapped(
        "<|START_ACTION|>[",
        '\n    {{"tool_name": "{}", "parameters": {}}}',
        ",",
        "\n]<|END_ACTION|>",
    ),
}

HERMES_TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
BARE_TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}{{ '<|h|>' + message.role + '<|e|>\\n\\n' }}
{%- if message.tool_calls %}{% set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}{{ '}' }}
{%- else %}{{ message.content }}{% endif %}{{ '<|eot|>' }}{% endfor %}"""
_TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
_TURN = "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content or '' }}"
_CALLS = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
_LAST = (
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def template(call: str, *, before: str = "", between: str = "", behind: str = "") -> str:
    """A template whose calls are written so."""
    between = f"{{% if not loop.first %}}{between}{{% endif %}}" if between else ""
    calls = f"{{% if m.tool_calls %}}{before}{{% endif %}}{_CALLS}{between}{call}"
    behind = f"{{% if m.tool_calls %}}{behind}{{% endif %}}" if behind else ""
    return f"{_TOOLS}{_TURN}{calls}{_LAST}".replace("<|end|>", behind + "<|end|>")


_VALUE = "{{ v if v is string else v | tojson }}"
_OWN = (
    '{% macro own(v) %}{% if v is string %}<|"|>{{ v }}<|"|>{% elif v is boolean %}'
    "{{ 'true' if v else 'false' }}{% elif v is mapping %}{% raw %}{{% endraw %}"
    "{% for k, w in v | dictsort %}{{ k }}:{{ own(w) }}"
    "{% if not loop.last %},{% endif %}{% endfor %}"
    "{% raw %}}{% endraw %}{% elif v is sequence %}[{% for w in v %}{{ own(w) }}"
    "{% if not loop.last %},{% endif %}{% endfor %}]{% else %}{{ v }}{% endif %}{% endmacro %}"
)
_OBJECTS = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
_EACH = "{% for k, v in f.arguments | items %}"


def tag_template(head: str, begin: str, then: str, close: str, end: str, **around: str) -> str:
    """One whose arguments stand between such tags."""
    each = f"{begin}{{{{ k }}}}{then}{_VALUE}{close}"
    return template(f"{head}{_EACH}{each}{{% endfor %}}{end}", **around)


_K3_TYPE = (
    "{{ 'string' if v is string else 'boolean' if v is boolean else 'number' if v is number else "
    "'object' if v is mapping else 'array' if v is iterable else 'null' }}"
)
TEMPLATES = {
    "elements": template(
        '<|open|>call tool="{{ f.name }}" index="{{ loop.index }}"<|sep|>'
        f'{_EACH}<|open|>argument key="{{{{ k }}}}" type="{_K3_TYPE}"<|sep|>{_VALUE}'
        "<|close|>argument<|sep|>{% endfor %}<|close|>call<|sep|>",
        before="<|open|>tools<|sep|>",
        behind="<|close|>tools<|sep|><|close|>message<|sep|>",
    ),
    "kimi": template(
        "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}"
        "<|tool_call_end|>",
        before=_SECTION[0],
        behind=_SECTION[1],
    ),
    "seed": tag_template(
        "<seed:tool_call>\n<function={{ f.name }}>\n",
        "<parameter=",
        ">",
        "</parameter>\n",
        "</function>\n</seed:tool_call>",
    ),
    "invoke": tag_template(
        '<invoke name="{{ f.name }}">\n',
        '<parameter name="',
        '">',
        "</parameter>\n",
        "</invoke>\n",
        before="<minimax:tool_call>\n",
        behind="</minimax:tool_call>",
    ),
    "dsml-functions": dsml_template("function_calls"),
    "dsml-tools": dsml_template("tool_calls"),
    "param": template(
        f'<function name="{{{{ f.name }}}}">{_EACH}<param name="{{{{ k }}}}">'
        "{% if v is string %}<![CDATA[{{ v }}]]>{% else %}{{ v | tojson }}{% endif %}</param>"
        "{% endfor %}</function>",
        between="\n",
    ),
    "arg": tag_template(
        "<tool_call>{{ f.name }}\n",
        "<arg_key>",
        "</arg_key>\n<arg_value>",
        "</arg_value>\n",
        "</tool_call>",
    ),
    "arg-tight": tag_template(
        "<tool_call>{{ f.name }}",
        "<arg_key>",
        "</arg_key><arg_value>",
        "</arg_value>",
        "</tool_call>",
    ),
    "arg-hy": tag_template(
        "<tool_call:opensource>{{ f.name }}<tool_sep:opensource>\n",
        "<arg_key:opensource>",
        "</arg_key:opensource>\n<arg_value:opensource>",
        "</arg_value:opensource>\n",
        "</tool_call:opensource>\n",
        before="<tool_calls:opensource>\n",
        behind="</tool_calls:opensource>",
    ),
    "python": template(
        f"{{{{ f.name }}}}({_EACH}{{% if not loop.first %}}, {{% endif %}}{{{{ k }}}}="
        "{% if v is string %}'{{ v }}'{% else %}{{ v }}{% endif %}{% endfor %})",
        before="<|tool_call_start|>[",
        between=", ",
        behind="]<|tool_call_end|>",
    ),
    "python-lines": template(
        f"{{{{ f.name }}}}({_EACH}{{% if not loop.first %}}, {{% endif %}}{{{{ k }}}}="
        "{{ v | tojson }}{% endfor %})",
        before="<function_calls>",
        between="\n",
        behind="</function_calls>",
    ),
    "toolcall": template(_OBJECTS, before="<TOOLCALL>[", between=", ", behind="]</TOOLCALL>"),
    "tool-calls": template(
        _OBJECTS[:-1] + ', "id": "{{ c.id }}"}',
        before="<tool_calls>[",
        between=", ",
        behind="]</tool_calls>",
    ),
    "tool-lines": template(_OBJECTS + "\n", before="<tool_calls>\n", behind="</tool_calls>"),
    "phi": template(f"<|tool_call|>{_OBJECTS}<|/tool_call|>"),
    "by-name": template(
        '{"{{ f.name }}": {{ f.arguments | tojson }}}',
        before="<|tools_prefix|>[",
        between=", ",
        behind="]<|tools_suffix|>",
    ),
    "function-call": template(f"<|function_call|>{_OBJECTS}"),
    "function-role": (
        f"{_TOOLS}{_TURN}{{% if m.tool_calls %}}{{% set f = m.tool_calls[0].function %}}"
        f"{_ROLE}{_OBJECTS}{{% endif %}}<|message_sep|>{{% endfor %}}"
    ),
    "tags": template(
        "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments | items %}"
        f"<parameter={{{{ k }}}}>\n{_VALUE}\n</parameter>\n{{% endfor %}}"
        "</function>\n</tool_call>\n"
    ),
    "mistral-id": template(
        "[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]{{ f.arguments | tojson }}"
    ),
    "mistral-args": template("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"),
    "deepseek": template(
        "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments + '' }}<｜tool▁call▁end｜>",
        before=_BEGIN,
        behind=_END,
    ),
    "harmony": (
        f"{_TOOLS}{{% for m in messages %}}"
        "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
        "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
        "{{ f.arguments | tojson }}<|call|>{% elif m.role == 'assistant' %}"
        "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% else %}"
        "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    ),
    "solar": (  # no text is written of a message that calls
        "{% if tools %}<|begin|>system<|content|>" + _TOOLS + "<|end|>{% endif %}"
        "{% for m in messages %}<|begin|>{{ m.role }}{% if m.tool_calls %}"
        "{% if m.reasoning %}<|think|>{{ m.reasoning }}<|end|><|begin|>assistant{% endif %}"
        "<|tool_calls|>" + _CALLS + "<|tool_call:begin|>{{ c.id + '' }}<|tool_call:name|>"
        "{{ f.name }}<|tool_call:args|>{{ f.arguments | tojson }}<|tool_call:end|>{% endfor %}"
        "<|calls|>{% elif m.role == 'tool' %}<|tool_response:begin|>{{ m.tool_call_id + '' }}"
        "<|tool_response:result|>{{ m.content + '' }}<|end|>"
        "{% else %}<|content|>{{ m.content + '' }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|begin|>assistant{% endif %}"
    ),
    "gemma": _OWN + template("<|tool_call>call:{{ f.name }}{{ own(f.arguments) }}<tool_call|>"),
}

# They tell of tools, and leave it to contents to have calls: LFM2's, Granite 3's and SmolLM3's.
TOLD = {
    "hermes": (
        "<|turn|>system\n{% if xml_tools %}<tools>{% for tool in xml_tools[:] %}{{ tool | string }}"
        "{% endfor %}</tools> Answer with name and arguments within <tool_call></tool_call> "
        "XML tags{% endif %}"
        f"<|end|>{_TURN}{_LAST.removeprefix('{% endfor %}')}"
    ),
    "python": (
        "{% if tools %}<|turn|>system\nList of tools: <|tool_list_start|>{{ tools | tojson }}"
        f"<|tool_list_end|><|end|>{{% endif %}}{_TURN}{_LAST.removeprefix('{% endfor %}')}"
    ),
    "granite": (
        "{% if tools %}<|turn|>system\nRespond only with <|tool_call|> followed by a JSON list."
        "<|turn|>available_tools\n{{ tools | tojson }}<|end|>{% endif %}"
        f"{_TURN}{_LAST.removeprefix('{% endfor %}')}"
    ),
}

FIELDS = ("eos", "tool_source", "builtin", "specials", "defaults", "reasoning", "preserve")


def found_dialect(template: ChatTemplate) -> TemplateDialect:
    """What ``find_dialect`` finds, once for each template: it renders thirty conversations."""
    plain = ChatTemplate(template.source, bos=template.bos)
    assert all(getattr(template, name) == getattr(plain, name) for name in FIELDS)
    return _found(template.source, template.bos)


@cache
def _found(source: str, bos: str) -> TemplateDialect:
    return find_dialect(ChatTemplate(source, bos=bos))
