"""Built-in templates that are used only by name: prompts equal to llama.cpp's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from treadle.chat.template.builtin_templates import BUILT_INS
from treadle.chat.template.override import check_plain, choose_template
from treadle.chat.template.role_formats import NAMES, ROLE_FORMATS, find_named
from treadle.chat.template.template import ChatTemplate, load_template
from treadle.files.gguf import GGUFWriter, open_gguf

TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Three?"},
]
# Of llama_chat_apply_template (llama-cpp-python 0.3.36), with a prompt for an answer.
GOLDEN = Path(__file__).parents[2] / "golden" / "named_templates.json"
LLAMA_CPP: dict[str, str] = json.loads(GOLDEN.read_text("utf-8"))


def template_of(name: str) -> ChatTemplate:
    built_in = find_named(name)
    assert built_in is not None
    return ChatTemplate(built_in.source, bos="<s>", builtin=name, stop=built_in.stop)


@pytest.mark.parametrize("name", LLAMA_CPP)
def test_prompts_are_llama_cpps(name: str) -> None:
    """Which leaves the BOS token to the tokenizer."""
    assert template_of(name).render(TALK) == f"<s>{LLAMA_CPP[name]}"


def test_all_are_compared() -> None:
    assert {each.name for each in ROLE_FORMATS} - LLAMA_CPP.keys() == {"alpaca"}
    assert len(NAMES) == len(set(NAMES))
    assert not {each.name for each in BUILT_INS} & {each.name for each in ROLE_FORMATS}


@pytest.mark.parametrize("name", NAMES)
def test_every_name_makes_a_prompt(name: str) -> None:
    template = template_of(name)
    check_plain(template)
    whole = template.render(TALK, add_generation_prompt=False)
    assert template.render(TALK).startswith(whole)
    said = TALK if name != "last-question" else [TALK[0], TALK[-1]]
    places = [template.render(said).find(message["content"]) for message in said]
    assert places == sorted(places)
    assert -1 not in places


def test_a_space_around_a_content_is_left_out() -> None:
    said = [{"role": "user", "content": "  One? \n"}]
    assert template_of("zephyr").render(said) == "<s><|user|>\nOne?<|endoftext|>\n<|assistant|>\n"


def test_alpaca_ends_by_a_text() -> None:
    template = template_of("alpaca")
    assert template.render(TALK).endswith("### Instruction:\nThree?\n\n### Response:\n")
    assert template.stop == ("\n### Instruction:",)


def test_a_file_may_name_one(tmp_path: Path) -> None:
    """As llama.cpp reads it."""
    path = tmp_path / "named.gguf"
    writer = GGUFWriter(path)
    writer.add("general.architecture", "llama")
    writer.add("tokenizer.ggml.model", "llama")
    writer.add("tokenizer.ggml.tokens", ["<unk>", "<s>", "</s>", "a"])
    writer.add("tokenizer.ggml.scores", [0.0, 0.0, 0.0, 0.0])
    writer.add("tokenizer.ggml.token_type", [2, 3, 3, 1])
    writer.add("tokenizer.ggml.bos_token_id", 1)
    writer.add("tokenizer.chat_template", "zephyr")
    writer.add("tokenizer.chat_template.tool_use", "{{ messages[0].content }} with tools")
    writer.write()
    with open_gguf(path) as gguf:
        template = load_template(gguf)
        assert (template.builtin, template.origin) == (
            "zephyr",
            "built-in zephyr, named by the file",
        )
        assert template.render(TALK[1:2]).startswith("<s><|user|>\nOne?")
        chosen = load_template(gguf, "", choose_template("tool_use"))
        assert chosen.render(TALK[1:2]) == "One? with tools"
        assert (chosen.builtin, chosen.origin) == (None, "tool_use of the model's file, by option")
        with pytest.raises(Exception, match=r"'rag' is not a file.*default, tool_use.*zephyr"):
            load_template(gguf, "", choose_template("rag"))
        default = load_template(gguf, "", choose_template("default"))
        assert default.source == "zephyr"
