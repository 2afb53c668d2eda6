"""Marks of pictures in rendered prompts: where they stand, what replaces them, what users write."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.chat.tools.families import HERMES_TEMPLATE
from treadle.chat.messages import MediaPolicy, read_conversation
from treadle.chat.prompt import ChatPrompt, PromptMedia, conversation_prompt, render_messages
from treadle.chat.template.template import ChatTemplate
from treadle.chat.tools import dialect_of
from treadle.chat.tools.messages import messages_for_template
from treadle.errors import TemplateError
from treadle.files.gguf import open_gguf
from treadle.media.marks import HiddenMarks, MediaMarks, MediaRows, Piece, TextPiece, encode_pieces
from treadle.tokenizer.tokenizer import load_tokenizer

PAD = "<|image_pad|>"
BEGIN = "<|vision_start|>"
END = "<|vision_end|>"
QWEN = MediaMarks("image", (f"{BEGIN}{PAD}{END}", PAD), (BEGIN, END))
SOUND = MediaMarks("audio", ("<|AUDIO|>",))
SEES = MediaPolicy(frozenset({"image"}))
HEARS = MediaPolicy(frozenset({"image", "audio"}))

# Content of user messages as families' templates write it.
LOOP = "{% for m in messages %}<{{ m.role }}>CONTENT\n{% endfor %}"
STRING = "{% if m.content is string %}{{ m.content }}{% else %}PARTS{% endif %}"
EACH = (
    "{% for p in m.content %}{% if p.type == 'image' %}MARK"
    "{% elif p.type == 'audio' %}<|AUDIO|>"
    "{% elif p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
)


def written(mark: str, *, strings: bool = True) -> str:
    """A template that writes ``mark`` for a picture; ``strings``: it reads strings, too."""
    parts = EACH.replace("MARK", mark)
    return LOOP.replace("CONTENT", STRING.replace("PARTS", parts) if strings else parts)


WRITES = {
    "Qwen": (written(f"{BEGIN}{PAD}{END}"), QWEN),
    "Qwen alone": (written(PAD), QWEN),
    "Pixtral": (written("[IMG]"), MediaMarks("image", ("[IMG]",), ("[IMG_BREAK]", "[IMG_END]"))),
    "Gemma 3": (written("<start_of_image>"), MediaMarks("image", ("<start_of_image>",))),
    "SmolVLM": (written("<image>", strings=False), MediaMarks("image", ("<image>",))),
    "LLaVA, pictures first": (
        LOOP.replace(
            "CONTENT",
            "{% for p in m.content if p.type == 'image' %}<image>\n{% endfor %}"
            "{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}",
        ),
        MediaMarks("image", ("<image>",)),
    ),
}
NAMES = ["one.png", "two.png"]


def picture(name: str) -> dict[str, Any]:
    return {"type": "image", "image": f"/{name}"}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def talk(mark: str) -> list[dict[str, Any]]:
    """Two pictures, and a mark that the user wrote."""
    return [
        {"role": "user", "content": [picture("one.png"), text(f"ONE {mark} SAID")]},
        {"role": "assistant", "content": "ANSWER"},
        {"role": "user", "content": [text("BEFORE"), picture("two.png"), text("BEHIND")]},
    ]


def layouts(n: int) -> list[tuple[str | range, ...]]:
    return [("<begin>", range(i + 2), "<end>") for i in range(n)]


def prompt_of(source: str, messages: Any, marks: MediaMarks, **more: Any) -> ChatPrompt:
    template = ChatTemplate(source, bos="<s>", eos="</s>", **more)
    conversation = read_conversation(messages, SEES)
    assert [part.kind for part in conversation.media] == ["image"] * len(conversation.media)
    return conversation_prompt(template, conversation, None, None, {}, [], marks=[marks])


def check(prompt: ChatPrompt, marks: MediaMarks, mark: str, n_said: int = 1) -> str:
    """Check the pieces of a prompt of two pictures, and return them as one text, with numbers for
    pictures.
    """
    pieces = prompt.split(layouts(2))
    rows = [piece for piece in pieces if isinstance(piece, MediaRows)]
    assert rows == [MediaRows(0, range(2)), MediaRows(1, range(3))]
    said = [each for each in pieces if isinstance(each, TextPiece) and not each.special]
    assert said == [TextPiece(mark, special=False)] * n_said
    whole = "".join(
        each.text if isinstance(each, TextPiece) else f"({each.index})" for each in pieces
    )
    assert whole.count("<begin>(0)<end>") == whole.count("<begin>(1)<end>") == 1
    special = "".join(each.text for each in pieces if isinstance(each, TextPiece) and each.special)
    assert not any(spelt in special for spelt in (*marks.placeholders, *marks.reserved))
    for first, second in pairwise(pieces):
        both = [isinstance(each, TextPiece) and each.special for each in (first, second)]
        assert not all(both)  # adjacent text is one piece, as the tokenizer must see it
    return whole


@pytest.mark.parametrize("name", WRITES)
def test_marks_that_a_template_writes(name: str) -> None:
    source, marks = WRITES[name]
    mark = marks.placeholders[-1]
    prompt = prompt_of(source, talk(mark), marks)
    whole = check(prompt, marks, mark)
    assert f"ONE {mark} SAID" in whole
    assert f"ONE {mark} SAID" in prompt.shown
    if "first" in name:
        assert "<user><begin>(1)<end>\nBEFOREBEHIND" in whole
    else:
        assert "BEFORE<begin>(1)<end>BEHIND" in whole


def test_marks_in_real_templates_without_pictures(data: Path) -> None:
    """The mark stands where the part stood, in the text."""
    tried = 0
    for path in sorted((data / "templates").glob("*.jinja")):
        source = path.read_text("utf-8")
        try:
            plain = ChatTemplate(source, bos="<s>", eos="</s>").render(
                [{**m, "content": "x"} for m in talk(PAD)]
            )
        except TemplateError:
            continue  # needs tools
        assert plain, path.name
        whole = check(prompt_of(source, talk(PAD), QWEN), QWEN, PAD)
        places = [whole.find(each) for each in ("(0)", "ONE", "BEFORE", "(1)", "BEHIND")]
        assert -1 not in places, path.name
        assert places == sorted(places), path.name
        tried += 1
    assert tried >= 15


@pytest.mark.parametrize("name", ["Qwen", "SmolVLM"])
@pytest.mark.parametrize("role", ["system", "tool"])
def test_pictures_outside_of_user_messages(name: str, role: str) -> None:
    source, marks = WRITES[name]
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    other = {"role": role, "content": [text("RESULT"), picture("one.png")], "tool_call_id": "a"}
    user = {"role": "user", "content": [picture("two.png"), text("ASKED")]}
    messages = [other, user] if role == "system" else [user, calling, other]
    pieces = prompt_of(source, messages, marks).split(layouts(2))
    rows = [piece.index for piece in pieces if isinstance(piece, MediaRows)]
    assert rows == [0, 1]


def test_pictures_in_messages_that_are_joined() -> None:
    """By the forms that templates want: adjacent messages of a role, system text to the user."""
    gemma = (
        "{% for m in messages %}{% if m.role == 'system' or (not loop.first and "
        "messages[loop.index0 - 1].role == m.role) %}{{ raise_exception('no') }}{% endif %}"
        "{% endfor %}" + written("<start_of_image>")
    )
    marks = WRITES["Gemma 3"][1]
    messages = [
        {"role": "system", "content": "BE BRIEF"},
        {"role": "user", "content": [picture("one.png"), text("ONE")]},
        {"role": "user", "content": [text("TWO"), picture("two.png")]},
        {"role": "system", "content": "LATE"},
    ]
    whole = "".join(
        piece.text if isinstance(piece, TextPiece) else f"({piece.index})"
        for piece in prompt_of(gemma, messages, marks).split([(range(1),), (range(1),)])
    )
    assert whole == "<user>BE BRIEF\n\n(0)ONE\nTWO(1)\n\nLATE"


def test_marks_in_calls_tools_and_variables() -> None:
    """Whatever a user, a tool or a client writes is text."""
    source = HERMES_TEMPLATE + "{{ note }}"
    template = ChatTemplate(source)
    arguments = json.dumps({"text": f"A{PAD}"})
    function = {"name": "f", "arguments": arguments}
    call = {"id": "a", "type": "function", "function": function}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [picture("one.png"), text(f"U{PAD}")]},
        {"role": "assistant", "content": f"C{PAD}", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": [text(f"R{PAD}"), picture("two.png")]},
    ]
    tool = {"name": "f", "description": f"D{PAD}", "parameters": {"type": "object"}}
    conversation = read_conversation(messages, SEES)
    said, tools = messages_for_template(
        conversation.messages, [{"type": "function", "function": tool}], dialect_of(template)
    )
    media = PromptMedia.of(conversation, [QWEN])
    rendered = render_messages(template, said, tools, {"note": f"N{PAD}"}, media=media)
    prompt = ChatPrompt(rendered, media)
    whole = check(prompt, QWEN, PAD, n_said=6)
    for letter in "AUCRDN":
        assert f"{letter}{PAD}" in whole
    assert prompt.shown.count(PAD) == 6 + 2


def test_counts_are_checked() -> None:
    twice = written(PAD + PAD)
    with pytest.raises(TemplateError, match="wrote 4 picture marks for 2 pictures"):
        prompt_of(twice, talk("x"), QWEN).split(layouts(2))
    last = written(PAD).replace("in messages", "in messages[-1:]")
    with pytest.raises(TemplateError, match="wrote 1 picture marks for 2 pictures"):
        prompt_of(last, talk("x"), QWEN).split(layouts(2))


def test_pictures_and_sounds() -> None:
    """Each kind is in order; between them a template may choose another one."""
    sound = {"type": "audio", "audio": "/a.wav"}
    messages = [{"role": "user", "content": [picture("one.png"), sound, picture("two.png")]}]
    conversation = read_conversation(messages, HEARS)
    assert [part.kind for part in conversation.media] == ["image", "audio", "image"]
    first = LOOP.replace(
        "CONTENT",
        "{% for p in m.content if p.type == 'audio' %}<|AUDIO|>{% endfor %}"
        f"{{% for p in m.content if p.type == 'image' %}}{PAD}{{% endfor %}}"
        "{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}",
    )
    for source, expected in ((written(PAD), [0, 1, 2]), (first, [1, 0, 2])):
        prompt = conversation_prompt(
            ChatTemplate(source), conversation, None, None, {}, [], marks=[QWEN, SOUND]
        )
        rows = [each for each in prompt.split([(range(i + 1),) for i in range(3)])]
        found = [each for each in rows if isinstance(each, MediaRows)]
        assert found == [MediaRows(i, range(i + 1)) for i in expected]


def test_words_for_hidden_marks() -> None:
    hidden = HiddenMarks([QWEN, SOUND])
    said = {f"a{PAD}": [f"{BEGIN}{PAD}{END}", f"x{BEGIN}y", 3, None, True]}
    made = hidden.hide(said)
    assert "<|" not in str(made)
    assert hidden.hide("no mark") == "no mark"
    assert HiddenMarks([QWEN]).hide(PAD) != hidden.hide(PAD)  # of each request its own
    (key,) = made
    assert hidden.show(key) == f"a{PAD}"
    assert [hidden.show(each) for each in made[key][:2]] == said[f"a{PAD}"][:2]
    assert hidden.show(made[key][0].upper().strip()) == f"{BEGIN}{PAD}{END}"
    assert HiddenMarks([]).hide(PAD) == PAD


@pytest.mark.parametrize("case", ["qwen3vl", "gemma3", "mistral3", "llava"])
def test_ids_are_those_of_the_whole_text(case: str, data: Path) -> None:
    """As if the mark of a row stood there as often as the picture has rows."""
    with open_gguf(data / "media" / case / "text.gguf") as gguf:
        tokenizer = load_tokenizer(gguf)
    ids = np.load(data / "media" / case / "truth.npz")["input_ids"].reshape(-1).tolist()
    row = max(set(ids), key=ids.count)
    pad = tokenizer.piece(row)
    assert tokenizer.is_control(row)
    whole = f"one two\n{pad * 3} three{pad * 2}\n\nfour"
    expected = tokenizer.encode_prompt(whole)
    assert expected.count(row) == 5
    pieces: list[Piece] = [
        TextPiece("one two\n"),
        MediaRows(0, range(3)),
        TextPiece(" three"),
        MediaRows(1, range(2)),
        TextPiece("\n\nfour"),
    ]
    made: list[Any] = []
    for each in encode_pieces(pieces, tokenizer):
        made += [each] if isinstance(each, int) else [row] * len(each.rows)
    assert made == expected
    # What a user wrote is text, tokenized with its neighbours, and says the same.
    pieces = [TextPiece("one "), TextPiece(pad, special=False), TextPiece(" two")]
    plain = encode_pieces(pieces, tokenizer)
    assert row not in plain
    assert plain == tokenizer.encode(f"one {pad} two", special=False)
    assert tokenizer.decode([id for id in plain if isinstance(id, int)]) == f"one {pad} two"
