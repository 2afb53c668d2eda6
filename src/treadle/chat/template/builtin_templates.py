"""Built-in chat templates for model files that carry none, one per model family. ``role_formats``
has further ones, which are used only by name.
"""

from __future__ import annotations

from treadle.base.fast_classes import dataclass


@dataclass(frozen=True)
class BuiltIn:
    """A built-in template and the model files it fits.

    A file fits if its vocabulary has all of ``pieces`` as special tokens, its architecture is in
    ``archs`` (unless that is empty), and its lower-cased ``general.name`` matches the regular
    expression ``named``. ``stop``: strings that end an answer, for templates whose turns end
    without a token of their own.
    """

    name: str
    pieces: tuple[str, ...]
    source: str
    named: str = ""
    archs: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()


_LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

_LLAMA4 = (
    _LLAMA3.replace("start_header_id", "header_start")
    .replace("end_header_id", "header_end")
    .replace("eot_id", "eot")
)

_CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

# These four have no system role: the system message goes before the first user message.
_SYSTEM_FIRST = """\
{%- set system = '' %}
{%- set turns = messages %}
{%- if messages and messages[0]['role'] == 'system' %}
    {%- set system = SYSTEM %}
    {%- set turns = messages[1:] %}
{%- endif %}
"""

_GEMMA = """\
{{- bos_token }}
{%- for message in turns %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + (system if loop.first else '') }}
    {{- message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\\n' }}
{%- endif %}"""

_LLAMA2 = """\
{%- for message in turns %}
    {%- if message['role'] == 'assistant' %}
        {{- ' ' + message['content'] | trim + ' ' + eos_token }}
    {%- else %}
        {{- bos_token + '[INST] ' + (system if loop.first else '') }}
        {{- message['content'] | trim + ' [/INST]' }}
    {%- endif %}
{%- endfor %}"""

_MISTRAL = """\
{{- bos_token }}
{%- for message in turns %}
    {%- if message['role'] == 'assistant' %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- else %}
        {{- '[INST] ' + (system if loop.first else '') + message['content'] + ' [/INST]' }}
    {%- endif %}
{%- endfor %}"""

_NANOCHAT = """\
{{- bos_token }}
{%- for message in turns %}
    {%- set role = 'assistant' if message['role'] == 'assistant' else 'user' %}
    {{- '<|' + role + '_start|>' + (system if loop.first else '') }}
    {{- message['content'] + '<|' + role + '_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant_start|>' }}
{%- endif %}"""

_PLAIN = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}
        {{- message['content'] + '\\n\\n' }}
    {%- else %}
        {{- message['role'] | capitalize + ': ' + message['content'] + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'Assistant:' }}
{%- endif %}"""


# Kimi K3's elements. The makers' folder writes prompts with code, and has no template.
_KIMI_K3 = """\
{%- macro said(value) %}{{ value | string | replace('&', '&amp;') | replace('"', '&quot;') }}
{%- endmacro %}
{%- macro element(tag, text) %}
    {{- '<|open|>' + tag + '<|sep|>' + text + '<|close|>' + tag.split(' ')[0] + '<|sep|>' }}
{%- endmacro %}
{%- macro turn(attributes, text) %}
    {{- element('message ' + attributes, text) + '<|end_of_msg|>' }}
{%- endmacro %}
{%- macro argument(key, value) %}
    {%- set kind = 'string' if value is string else 'boolean' if value is boolean
        else 'null' if value is none else 'number' if value is number
        else 'object' if value is mapping else 'array' %}
    {%- set text = value if value is string else value | tojson(ensure_ascii=false) %}
    {{- element('argument key="' + said(key) + '" type="' + kind + '"', text) }}
{%- endmacro %}
{%- macro arguments(given) %}
    {%- if given is mapping %}
        {%- for key, value in given.items() %}{{ argument(key, value) }}{% endfor %}
    {%- elif given %}{{ element('json type="object"', given) }}{% endif %}
{%- endmacro %}
{%- macro calls(listed) %}
    {%- for each in listed %}
        {%- set name = said(each.function.name) %}
        {%- set tag = 'call tool="' + name + '" index="' + loop.index | string + '"' %}
        {{- element(tag, arguments(each.function.arguments)) }}
    {%- endfor %}
{%- endmacro %}
{%- macro answer(message) %}
    {%- if reasons %}{{ element('think', message.reasoning_content or '') }}{% endif %}
    {{- element('response', message.content or '') }}
    {%- if message.tool_calls %}{{ element('tools', calls(message.tool_calls)) }}{% endif %}
{%- endmacro %}
{%- set reasons = thinking if thinking is defined else true %}
{%- set effort = thinking_effort if thinking_effort is defined else 'max' %}
{%- if tools %}
    {%- set listed = tools | tojson(ensure_ascii=false, separators=(',', ':'), sort_keys=true) %}
    {%- set head = '# Tools\\nHere are the available tools, described in JSONSchema.' %}
    {%- set text = head + '\\n\\n```json\\n' + listed + '\\n```' %}
    {{- turn('role="system" type="tool-declare"', text) }}
{%- endif %}
{%- if reasons and effort %}
    {%- set text = '`thinking_effort` guides on how much to think in your thinking channel '
        + '(not including the response channel), supported values include `low`, `medium`, '
        + '`high`, and `max`.\\nNow the system is invoked with `thinking_effort=' + effort + '`.' %}
    {{- turn('role="system" type="thinking-effort"', text) }}
{%- endif %}
{%- set state = namespace(calls=[], n=0) %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set state.calls = message.tool_calls or [] %}
        {%- set state.n = 0 %}
        {{- turn('role="assistant"', answer(message)) }}
    {%- elif message.role == 'tool' %}
        {%- set state.n = state.n + 1 %}
        {%- set at = namespace(name=message.name or '', n=state.n) %}
        {%- for each in state.calls %}
            {%- if each.id and each.id == message.tool_call_id %}
                {%- set at.name = each.function.name %}
                {%- set at.n = loop.index %}
            {%- elif not at.name and loop.index == state.n %}
                {%- set at.name = each.function.name %}
            {%- endif %}
        {%- endfor %}
        {%- set attributes = 'tool="' + said(at.name) + '" index="' + at.n | string + '"' %}
        {{- turn('role="tool" ' + attributes, message.content) }}
    {%- else %}
        {{- turn('role="' + message.role + '"', message.content) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {%- set first = 'think' if reasons else 'response' %}
    {{- '<|open|>message role="assistant"<|sep|><|open|>' + first + '<|sep|>' }}
{%- endif %}"""

# The token of two newlines ends a turn.
_RWKV_WORLD = """\
{{- bos_token }}
{%- for message in messages %}
    {{- message['role'] | capitalize + ': ' + message['content'] | trim + '\\n\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'Assistant:' }}
{%- endif %}"""


def system_first(source: str, system: str) -> str:
    """Return the source of a complete template from ``source``, which loops over ``turns`` (the
    messages without the system message). ``system``: a jinja2 expression for the system text;
    ``source`` writes it before the first user message.
    """
    return _SYSTEM_FIRST.replace("SYSTEM", system) + source


_PLAIN_SYSTEM = "messages[0]['content'] + '\\n\\n'"
_LLAMA2_SYSTEM = "'<<SYS>>\\n' + messages[0]['content'] | trim + '\\n<</SYS>>\\n\\n'"

# Of models that read one text and know no turns: the last question alone, after the system message.
_LAST_QUESTION = """\
{%- set questions = messages | selectattr('role', 'equalto', 'user') | list %}
{%- if messages and messages[0]['role'] == 'system' %}
    {{- messages[0]['content'] | trim + ' ' }}
{%- endif %}
{%- if questions %}
    {{- questions[-1]['content'] | trim }}
{%- endif %}"""

# The first one that fits is used; the last fits every file.
BUILT_INS = (
    BuiltIn("last-question", (), _LAST_QUESTION, archs=("t5",)),
    BuiltIn("llama3", ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), _LLAMA3),
    BuiltIn("llama4", ("<|header_start|>", "<|header_end|>", "<|eot|>"), _LLAMA4),
    BuiltIn("kimi-k3", ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"), _KIMI_K3),
    BuiltIn("chatml", ("<|im_start|>", "<|im_end|>"), _CHATML),
    BuiltIn("gemma", ("<start_of_turn>", "<end_of_turn>"), system_first(_GEMMA, _PLAIN_SYSTEM)),
    BuiltIn("mistral", ("[INST]", "[/INST]"), system_first(_MISTRAL, _PLAIN_SYSTEM)),
    BuiltIn(
        "nanochat",
        ("<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>"),
        system_first(_NANOCHAT, _PLAIN_SYSTEM),
        archs=("nanochat",),
    ),
    # Their control tokens do not identify the format, so ``general.name`` must match.
    BuiltIn(
        "mistral",
        (),
        system_first(_MISTRAL, _PLAIN_SYSTEM),
        named="mi[sx]tral.*instruct",
        archs=("llama", "mistral"),
    ),
    BuiltIn(
        "llama2",
        (),
        system_first(_LLAMA2, _LLAMA2_SYSTEM),
        named="llama.?v?2.*chat|codellama.*instruct",
        archs=("llama",),
    ),
    BuiltIn("rwkv-world", (), _RWKV_WORLD, archs=("rwkv7",), stop=("\n\nUser:", "\n\nSystem:")),
    BuiltIn("plain", (), _PLAIN, stop=("\nUser:", "\nSystem:")),
)
