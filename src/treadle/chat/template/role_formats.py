"""Built-in chat templates for older and rarer families, used only if the user names them, under
llama.cpp's names. A format is the text around a message's content, by role.
"""

from __future__ import annotations

from typing import NamedTuple

from treadle.chat.template.builtin_templates import BUILT_INS, BuiltIn, system_first

_HERE = "{}"  # stands for the message's content


class RoleFormat(NamedTuple):
    """Texts around the contents of a family's prompts; ``{}`` stands for the content.

    ``system``: None if the family has no system role; the system text is then written before the
    first user message, followed by an empty line. ``asks``: text that begins an answer. ``begins``:
    text at the prompt's beginning, after the BOS token. ``stop``: strings that end an answer, for
    families without an end token.
    """

    name: str
    system: str | None
    user: str
    assistant: str
    asks: str
    begins: str = ""
    stop: tuple[str, ...] = ()

    def built_in(self) -> BuiltIn:
        """Return the format as a jinja2 template."""
        roles = {"system": self.system, "user": self.user, "assistant": self.assistant}
        lines = [f"{{{{- bos_token + {self.begins!r} }}}}", "{%- for message in turns %}"]
        for role, text in roles.items():
            if text is None:
                continue
            before, _, after = text.partition(_HERE)
            content = "message['content'] | trim"
            if self.system is None and role == "user":
                content = f"(system if loop.first else '') + {content}"
            lines.append(f"    {{%- if message['role'] == {role!r} %}}")
            lines.append(f"        {{{{- {before!r} + {content} + {after!r} }}}}")
            lines.append("    {%- endif %}")
        lines += ["{%- endfor %}", "{%- if add_generation_prompt %}"]
        lines += [f"    {{{{- {self.asks!r} }}}}", "{%- endif %}"]
        source = "\n".join(lines)
        if self.system is None:
            source = system_first(source, "messages[0]['content'] | trim + '\\n\\n'")
        else:
            source = source.replace("in turns", "in messages")
        return BuiltIn(self.name, (), source, stop=self.stop)


def _marked(name: str, mark: str, end: str, asks: str, begins: str = "") -> RoleFormat:
    """Return a format whose roles all have the same texts around them: ``mark``, in which ``%``
    stands for the role, and ``end``. ``asks`` and ``begins``: as of ``RoleFormat``.
    """
    system, user, assistant = (
        f"{mark.replace('%', role)}{_HERE}{end}" for role in ("system", "user", "assistant")
    )
    return RoleFormat(name, system, user, assistant, asks, begins)


def _mistral(name: str, user: str, assistant: str, system: str | None = None) -> RoleFormat:
    return RoleFormat(name, system, user, assistant, "")


_GRANITE = ("<|start_of_role|>%<|end_of_role|>", "<|end_of_text|>\n")
_TURN = "<|START_OF_TURN_TOKEN|>"
_OVER = "<|END_OF_TURN_TOKEN|>"

# Formats as in llama.cpp's table of named templates (src/llama-chat.cpp), but for alpaca, which is
# that of Stanford's instructions without their introduction.
ROLE_FORMATS = (
    RoleFormat(
        "alpaca",
        "{}\n\n",
        "### Instruction:\n{}\n\n",
        "### Response:\n{}\n\n",
        "### Response:\n",
        stop=("\n### Instruction:",),
    ),
    RoleFormat(
        "bailing",
        "<role>SYSTEM</role>{}",
        "<role>HUMAN</role>{}",
        "<role>ASSISTANT</role>{}",
        "<role>ASSISTANT</role>",
    ),
    _marked("chatglm3", "<|%|>\n ", "", "<|assistant|>", "[gMASK]sop"),
    _marked("chatglm4", "<|%|>\n", "", "<|assistant|>\n", "[gMASK]<sop>"),
    RoleFormat(
        "command-r",
        f"{_TURN}<|SYSTEM_TOKEN|>{{}}{_OVER}",
        f"{_TURN}<|USER_TOKEN|>{{}}{_OVER}",
        f"{_TURN}<|CHATBOT_TOKEN|>{{}}{_OVER}",
        f"{_TURN}<|CHATBOT_TOKEN|>",
    ),
    RoleFormat(
        "deepseek",
        "{}",
        "### Instruction:\n{}\n",
        "### Response:\n{}\n<|EOT|>\n",
        "### Response:\n",
    ),
    RoleFormat(
        "deepseek2",
        "{}\n\n",
        "User: {}\n\n",
        "Assistant: {}<｜end▁of▁sentence｜>",
        "Assistant:",
    ),
    RoleFormat(
        "deepseek3",
        "{}\n\n",
        "<｜User｜>{}",
        "<｜Assistant｜>{}<｜end▁of▁sentence｜>",
        "<｜Assistant｜>",
    ),
    RoleFormat(
        "exaone3",
        "[|system|]{}[|endofturn|]\n",
        "[|user|]{}\n",
        "[|assistant|]{}[|endofturn|]\n",
        "[|assistant|]",
    ),
    RoleFormat(
        "exaone4",
        "[|system|]{}[|endofturn|]\n",
        "[|user|]{}\n",
        "[|assistant|]{}[|endofturn|]\n",
        "[|assistant|]",
    ),
    _marked("exaone-moe", "<|%|>\n", "<|endofturn|>\n", "<|assistant|>\n"),
    _marked("falcon3", "<|%|>\n", "\n", "<|assistant|>\n"),
    _marked("glmedge", "<|%|>\n", "", "<|assistant|>"),
    _marked("granite", *_GRANITE, "<|start_of_role|>assistant<|end_of_role|>"),
    _marked("granite-4.0", *_GRANITE, "<|start_of_role|>assistant<|end_of_role|>"),
    RoleFormat(
        "grok-2",
        "System: {}<|separator|>\n\n",
        "Human: {}<|separator|>\n\n",
        "Assistant: {}<|separator|>\n\n",
        "Assistant:",
    ),
    RoleFormat(
        "kimi-k2",
        "<|im_system|>system<|im_middle|>{}<|im_end|>",
        "<|im_user|>user<|im_middle|>{}<|im_end|>",
        "<|im_assistant|>assistant<|im_middle|>{}<|im_end|>",
        "<|im_assistant|>assistant<|im_middle|>",
    ),
    _marked(
        "megrez",
        "<|role_start|>%<|role_end|>",
        "<|turn_end|>",
        "<|role_start|>assistant<|role_end|>",
    ),
    RoleFormat("minicpm", "{}", "<用户>{}<AI>", "{}", ""),
    _mistral("mistral-v1", " [INST] {} [/INST]", " {}</s>"),
    _mistral("mistral-v3", "[INST] {}[/INST]", " {}</s>"),
    _mistral("mistral-v3-tekken", "[INST]{}[/INST]", "{}</s>"),
    _mistral("mistral-v7", "[INST] {}[/INST]", " {}</s>", "[SYSTEM_PROMPT] {}[/SYSTEM_PROMPT]"),
    _mistral("mistral-v7-tekken", "[INST]{}[/INST]", "{}</s>", "[SYSTEM_PROMPT]{}[/SYSTEM_PROMPT]"),
    RoleFormat(
        "openchat",
        "{}<|end_of_turn|>",
        "GPT4 Correct User: {}<|end_of_turn|>",
        "GPT4 Correct Assistant: {}<|end_of_turn|>",
        "GPT4 Correct Assistant:",
    ),
    RoleFormat("orion", None, "Human: {}\n\nAssistant: </s>", "{}</s>", ""),
    _marked("phi3", "<|%|>\n", "<|end|>\n", "<|assistant|>\n"),
    _marked("phi4", "<|im_start|>%<|im_sep|>", "<|im_end|>", "<|im_start|>assistant<|im_sep|>"),
    _marked("seed_oss", "<seed:bos>%\n", "<seed:eos>", "<seed:bos>assistant\n"),
    RoleFormat(
        "smolvlm",
        "{}\n\n",
        "User: {}<end_of_utterance>\n",
        "Assistant: {}<end_of_utterance>\n",
        "Assistant:",
        begins="<|im_start|>",
    ),
    RoleFormat("vicuna", "{}\n\n", "USER: {}\n", "ASSISTANT: {}</s>\n", "ASSISTANT:"),
    RoleFormat("vicuna-orca", "SYSTEM: {}\n", "USER: {}\n", "ASSISTANT: {}</s>\n", "ASSISTANT:"),
    _marked("zephyr", "<|%|>\n", "<|endoftext|>\n", "<|assistant|>\n"),
)
NAMES = tuple(dict.fromkeys(each.name for each in (*BUILT_INS, *ROLE_FORMATS)))
"""Names of all built-in templates."""


def find_named(name: object) -> BuiltIn | None:
    """Return the built-in template of this name, or None."""
    found = next((each for each in BUILT_INS if each.name == name), None)
    other = next((each for each in ROLE_FORMATS if each.name == name), None)
    return found if found is not None or other is None else other.built_in()
