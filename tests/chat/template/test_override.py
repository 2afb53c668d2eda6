"""A template that is chosen in place of the file's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from treadle.chat.template.override import check_plain, choose_template
from treadle.chat.template.role_formats import NAMES, find_named
from treadle.chat.template.template import ChatTemplate
from treadle.errors import TemplateError

SOURCE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"


def test_a_name_a_file_or_a_text(tmp_path: Path) -> None:
    for name in NAMES:
        chosen = choose_template(name)
        assert (chosen.builtin, chosen.origin) == (name, f"built-in {name}")
        built_in = find_named(name)
        assert built_in is not None
        assert (chosen.source, chosen.stop) == (built_in.source, built_in.stop)
    path = tmp_path / "mine.jinja"
    for data in (SOURCE.encode(), b"\xef\xbb\xbf" + SOURCE.encode(), SOURCE.encode() + b"\n"):
        path.write_bytes(data)
        for given in (path, str(path)):
            chosen = choose_template(given)
            assert (chosen.source.rstrip("\n"), chosen.builtin) == (SOURCE.rstrip("\n"), None)
            assert chosen.origin == "file mine.jinja"  # and no folder of this machine
    assert choose_template(SOURCE).source == SOURCE


def test_a_name_that_is_none() -> None:
    with pytest.raises(
        TemplateError, match=r"did you mean 'chatml'\?.*llama3, llama4, kimi-k3, chatml"
    ):
        choose_template("chatm")
    for wrong in ("", None, 3):
        with pytest.raises(TemplateError, match="expected a file or a name: last-question, llama3"):
            choose_template(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a\n{% if x %}\n{{ y %}", "line 3: unexpected '}'"),
        (b"a\n\n{{ x | nothing }}", "line 3: No filter named 'nothing'"),
        (b"{% for %}", "line 1"),
        (b" \n ", "it is empty"),
        (b"a\xff", "byte 1 is not UTF-8"),
        (b"x" * ((1 << 20) + 1), "characters"),
    ],
)
def test_a_file_that_is_no_template(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "bad.jinja"
    path.write_bytes(data)
    with pytest.raises(TemplateError) as caught:
        choose_template(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


def test_a_name_that_the_models_file_may_have(tmp_path: Path) -> None:
    """Looked for when that is known. A file of this name comes first."""
    for name in ("tool_use", "rag", "my-own"):
        chosen = choose_template(name)
        assert (chosen.named, chosen.origin) == (name, f"{name} of the model's file")
    for name in ("tool_use.jinja", "templates/rag", "./rag", "two words"):
        with pytest.raises(TemplateError, match="neither a file nor a built-in"):
            choose_template(name)
    with pytest.raises(TemplateError, match="neither a file"):
        choose_template(tmp_path / "rag")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (SOURCE, None),
        ("{{ raise_exception('no user') }}", "line 1: no user (from my own"),
        ("a\n{{ messages[5].content }}", "line 2: "),
        ("a\n{{ messages[0].content + 1 }}", "line 2: "),
        ("{% if messages[0].role != 'system' %}{{ raise_exception('first') }}{% endif %}", "first"),
        ("{{ bos_token }}hello", "its prompt leaves out what the user says"),
    ],
)
def test_a_plain_message_is_written(source: str, message: str | None) -> None:
    template = ChatTemplate(source, origin="my own")
    if message is None:
        return check_plain(template)
    with pytest.raises(TemplateError) as caught:
        check_plain(template)
    assert message in str(caught.value)


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match="cannot be read"):
        choose_template(tmp_path)
    with pytest.raises(TemplateError, match="cannot be read"):
        choose_template("a\0b")
