"""Chat templates: jinja2's own renderings, built-in ones, errors."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.tokenizer.vocabularies import CONTROL, NORMAL, Piece, load_bpe, spm_pieces, write_vocab
from treadle.chat.template import template as template_module
from treadle.chat.template.builtin_templates import BUILT_INS
from treadle.chat.template.template import ChatTemplate, load_template
from treadle.errors import TemplateError
from treadle.files.gguf import open_gguf

HELLO = [{"role": "user", "content": "hello"}]
CHAT = [
    {"role": "system", "content": "Be brief."},
    *HELLO,
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "bye"},
]


class FixedDay(datetime):
    """The day of the golden renderings."""

    @classmethod
    def now(cls, tz: Any = None) -> FixedDay:
        return cls(2024, 7, 26)


@pytest.fixture
def golden(data: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(template_module, "datetime", FixedDay)
    text = (data / "templates/jinja2_golden.json").read_text("utf-8")
    golden: dict[str, Any] = json.loads(text)
    return golden


def test_as_jinja2_renders(data: Path, golden: dict[str, Any]) -> None:
    assert len(golden["cases"]) == 102
    n_errors = n_given = 0
    for case in golden["cases"]:
        variables = dict(golden["contexts"][case["context"]])
        source = (data / "templates" / case["template"]).read_bytes().decode()
        template = ChatTemplate(
            source, bos=variables.pop("bos_token"), eos=variables.pop("eos_token")
        )
        messages = variables.pop("messages")
        where = f"{case['template']}: {case['context']}"
        if "'functions' is undefined" in case.get("error", ""):
            n_given += 1  # Firefunction's: treadle gives them to it
            if case["context"] == "tool_use_obj_args":  # it wants them as text
                continue
            assert "Jul 26 2024" in template.render(messages, **variables), where
        elif "error" in case:
            n_errors += 1
            with pytest.raises(TemplateError, match="line ") as caught:
                template.render(messages, **variables)
            assert case["error"].split(": ", 1)[1] in str(caught.value), where
        else:
            assert template.render(messages, **variables) == case["output"], where
    assert (n_errors, n_given) == (10, 6)


def test_a_template_whose_tools_are_functions(data: Path) -> None:
    """Firefunction's has them as text, and raises without them. What a caller says counts."""
    source = (data / "templates/fireworks-ai-llama-3-firefunction-v2.jinja").read_text("utf-8")
    template = ChatTemplate(source)
    talk = [{"role": "user", "content": "hi"}]
    tool = {"type": "function", "function": {"name": "é", "parameters": {}}}
    text = template.render(talk, tools=[tool])
    assert '[\n    {\n        "name": "é",\n        "parameters": {}\n    }\n]' in text
    assert f"Today is {datetime.now():%b %d %Y}" in text
    assert "as JSON spec:\n[]\nToday" in template.render(talk)
    said = template.render(talk, tools=[tool], functions="mine", datetime="now")
    assert "spec:\nmine\nToday is now." in said
    other = ChatTemplate("{{ functions is defined }} {{ datetime is defined }} {{ 'functions' }}")
    assert other.render(talk).startswith("True")  # it reads both names
    assert ChatTemplate("{{ functions is defined }}").render(talk) == "False"


def test_a_template_whose_tools_have_another_name() -> None:
    """SmolLM3's. What a caller says counts."""
    template = ChatTemplate(
        "{{ xml_tools is defined }}{% if xml_tools %} {{ xml_tools[:] }}{% endif %}"
    )
    talk = [{"role": "user", "content": "hi"}]
    tool = {"name": "f", "parameters": {}}
    assert template.render(talk) == "False"
    assert template.render(talk, tools=[]) == "False"
    for given in (tool, {"type": "function", "function": tool}):
        assert template.render(talk, tools=[given]) == f"True {[tool]}"
    assert template.render(talk, tools=[tool], xml_tools=None) == "True"


def test_llamacpp_pairs_as_jinja2_renders_them(data: Path, golden: dict[str, Any]) -> None:
    text = (data / "templates/llamacpp_chat_template_pairs.json").read_text("utf-8")
    messages = golden["contexts"]["llamacpp_conversation"]["messages"]
    pairs = json.loads(text)
    assert len(pairs) == 15
    for pair in pairs:
        template = ChatTemplate(pair["template"], bos=pair["bos_token"], eos=pair["eos_token"])
        same = pair["jinja2"] == "same as expected_jinja"
        expected = pair["expected_jinja"] if same else pair["jinja2"]
        assert template.render(messages) == expected, pair["name"]


def test_as_transformers_renders(data: Path) -> None:
    transformers = pytest.importorskip("transformers.utils.chat_template_utils")
    for path in sorted((data / "templates").glob("*.jinja")):
        source = path.read_bytes().decode()
        for messages in (HELLO, [*HELLO, {"role": "assistant", "content": "Hi."}, *HELLO]):
            # transformers gives no date, which Llama 3.1's would then make up.
            variables = {"bos_token": "<s>", "eos_token": "</s>", "date_string": "26 Jul 2024"}
            try:
                [expected], _ = transformers.render_jinja_template(
                    [messages], chat_template=source, add_generation_prompt=True, **variables
                )
            except Exception:  # it loops over no tools, or wants variables of its own
                continue
            template = ChatTemplate(source, bos="<s>", eos="</s>")
            rendered = template.render(messages, date_string="26 Jul 2024")
            assert rendered == expected, path.name


def test_what_templates_are_given() -> None:
    def render(source: str, **variables: Any) -> str:
        return ChatTemplate(source, bos="<s>", eos="</s>").render(HELLO, **variables)

    assert render("{{ bos_token }}{{ eos_token }}{{ messages[0].content }}") == "<s></s>hello"
    assert render("{{ add_generation_prompt }}", add_generation_prompt=False) == "False"
    assert render("{{ tools is none }}{{ enable_thinking }}", enable_thinking=1) == "True1"
    assert render("{{ {'a': 'é<'} | tojson }}") == '{"a": "é<"}'
    assert render("{% generation %}x{% endgeneration %}") == "x"
    stop = "{% if i == 2 %}{% break %}{% endif %}"
    assert render(f"{{% for i in range(9) %}}{stop}{{{{ i }}}}{{% endfor %}}") == "01"
    assert render("  {% if true %}\n  x\n  {% endif %}\ny") == "  x\ny"
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().year)
    assert render("{{ messages[0].thinking }}") == ""
    thought = [{"role": "assistant", "content": "", "reasoning": "hm"}]
    assert ChatTemplate("{{ messages[0].reasoning_content }}").render(thought) == "hm"
    loop = "{% for i in [1, 2, 3] %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% endfor %}"
    assert render(loop) == "1/3False 2/3False 3/3True "


@pytest.mark.parametrize("name", ["3.1-8B", "3.2-3B", "3.3-70B"])
def test_llama_is_told_the_day(data: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    class Day(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Day:
            return cls(2027, 5, 3)

    monkeypatch.setattr(template_module, "datetime", Day)
    source = (data / "templates" / f"meta-llama-Llama-{name}-Instruct.jinja").read_text("utf-8")
    assert "Today Date: 03 May 2027\n" in ChatTemplate(source).render(HELLO)
    assert "Date: today\n" in ChatTemplate(source).render(HELLO, date_string="today")
    own = ChatTemplate(source, defaults={"date_string": "this day"})
    assert "Date: this day\n" in own.render(HELLO)


def test_days_and_tokens_that_templates_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "datetime", FixedDay)
    made = ChatTemplate("{{ datetime }} {{ current_date }} {{ date_string }}").render(HELLO)
    assert made == "Jul 26 2024 2024-07-26 26 Jul 2024"
    template = ChatTemplate(
        "{{ unk_token }}{{ pad_token is defined }}", specials={"unk_token": "?"}
    )
    assert template.render(HELLO) == "?False"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% generation %}{% set y=3 %}{% endgeneration %}{{ y }}", ""),
        ("{% set y=1 %}{% generation %}{% set y=3 %}{{ y }}{% endgeneration %}{{ y }}", "31"),
        (
            "{% for m in messages %}{% generation %}{{ loop.index }}{{ m.role }}"
            "{% endgeneration %}{% endfor %}",
            "1user",
        ),
    ],
)
def test_what_a_generation_sets_ends_with_it(source: str, text: str) -> None:
    """As in transformers, whose tag is a call of a macro."""
    assert ChatTemplate(source).render(HELLO) == text


def test_templates_for_tools() -> None:
    template = ChatTemplate("plain", tool_source="{% for t in tools %}{{ t.name }}{% endfor %}")
    assert template.render(HELLO) == "plain"
    assert template.render(HELLO, tools=[{"name": "f"}]) == "f"
    # Such a template in the main place sees no tools at all, rather than fail.
    assert ChatTemplate("x{% for t in tools %}{{ t }}{% endfor %}").render(HELLO) == "x"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{% if %}", "line 2"),
        ("a\n\n{{ raise_exception('no such role') }}", "line 3: no such role"),
        ("{{ nothing.at.all }}", "line 1: .*undefined"),
        ("{{ 1 / 0 }}", "line 1: division"),
        ("{{ messages[0].content + 1 }}", "line 1: can only concatenate"),
        ("{{ messages | nofilter }}", "line 1: .*nofilter"),
        ("{{ {1: 2} | tojson }}{{ [1][9].x }}", "line 1"),
        ("x" * (1 << 21), "characters"),
    ],
)
def test_errors_say_where(source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        ChatTemplate(source).render(HELLO)


@pytest.mark.parametrize(
    "messages", [["hello"], [{"content": "no role"}], [{"role": "user", "content": object()}]]
)
def test_messages_of_other_shapes(messages: Any) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate("{{ messages }}").render(messages)


# -- built-in templates -------------------------------------------------------------------


def load(path: Path, pieces: list[Piece], name: str = "", **keys: Any) -> ChatTemplate:
    keys = {"general.name": name or None, "bos_token_id": 1, "eos_token_id": 2} | keys
    pieces = spm_pieces(pieces)
    scores = [0.0] * len(pieces)
    return load_template(open_gguf(write_vocab(path, "llama", pieces, scores=scores, **keys)))


def test_a_files_own_template(tmp_path: Path) -> None:
    own = {"tokenizer.chat_template": "own {{ bos_token }}"}
    template = load(tmp_path / "v.gguf", [], **own)
    assert template.builtin is None
    assert template.render(HELLO) == "own <s>"
    tools = {"tokenizer.chat_template.tool_use": "tools", **own}
    assert load(tmp_path / "w.gguf", [], **tools).render(HELLO, tools=[{}]) == "tools"


@pytest.mark.parametrize(
    ("builtin", "pieces", "name", "expected"),
    [
        (
            "llama3",
            ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
            "",
            "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nhello<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nHi.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nbye<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            "chatml",
            ["<|im_start|>", "<|im_end|>"],
            "",
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
            "<|im_start|>assistant\nHi.<|im_end|>\n<|im_start|>user\nbye<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (
            "gemma",
            ["<start_of_turn>", "<end_of_turn>"],
            "",
            "<s><start_of_turn>user\nBe brief.\n\nhello<end_of_turn>\n"
            "<start_of_turn>model\nHi.<end_of_turn>\n<start_of_turn>user\nbye<end_of_turn>\n"
            "<start_of_turn>model\n",
        ),
        (
            "mistral",
            ["[INST]", "[/INST]"],
            "",
            "<s>[INST] Be brief.\n\nhello [/INST] Hi.</s>[INST] bye [/INST]",
        ),
        (
            "mistral",
            [],
            "Mistral-7B-Instruct-v0.2",
            "<s>[INST] Be brief.\n\nhello [/INST] Hi.</s>[INST] bye [/INST]",
        ),
        (
            "llama2",
            [],
            "Llama-2-7b-chat-hf",
            "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nhello [/INST] Hi. </s><s>[INST] bye [/INST]",
        ),
        (
            "plain",
            [],
            "LLaMA v2",
            "<s>Be brief.\n\nUser: hello\nAssistant: Hi.\nUser: bye\nAssistant:",
        ),
    ],
)
def test_built_in(
    tmp_path: Path, builtin: str, pieces: list[str], name: str, expected: str
) -> None:
    template = load(tmp_path / "v.gguf", [(piece, CONTROL) for piece in pieces], name)
    assert template.builtin == builtin
    assert template.render(CHAT) == expected
    assert template.render(CHAT[1:], add_generation_prompt=False)
    assert bool(template.stop) == (builtin == "plain")
    assert builtin in repr(template)


def test_plain_text_that_looks_like_a_token_chooses_nothing(tmp_path: Path) -> None:
    pieces: list[Piece] = [("[INST]", NORMAL), ("[/INST]", NORMAL)]
    assert load(tmp_path / "v.gguf", pieces).builtin == "plain"


def test_every_built_in_agrees_with_its_origin(data: Path) -> None:
    """Where the shared data has a family's own template, a plain conversation is the same."""
    sources = {built_in.name: built_in.source for built_in in BUILT_INS}
    gemma = (data / "templates/google-gemma-2-2b-it.jinja").read_text("utf-8")
    for source, built_in in ((gemma, "gemma"),):
        ours = ChatTemplate(sources[built_in], bos="<bos>").render(CHAT[1:])
        assert ours == ChatTemplate(source, bos="<bos>").render(CHAT[1:])


def test_byte_level_files_have_built_ins_too(tmp_path: Path) -> None:
    more: list[Piece] = [("<|im_start|>", CONTROL), ("<|im_end|>", CONTROL)]
    load_bpe(tmp_path / "v.gguf", more=more)
    template = load_template(open_gguf(tmp_path / "v.gguf"), "qwen3")
    assert (template.builtin, template.bos) == ("chatml", "")
