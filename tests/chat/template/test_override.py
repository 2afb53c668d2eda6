"""A template that is chosen in place of the file's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from treadle.chat.template.builtin_templates import BUILT_INS
from treadle.chat.template.override import NAMES, choose_template
from treadle.errors import TemplateError

SOURCE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"


def test_a_name_a_file_or_a_text(tmp_path: Path) -> None:
    for name in NAMES:
        chosen = choose_template(name)
        assert (chosen.builtin, chosen.origin) == (name, f"built-in {name}")
        assert (chosen.source, chosen.stop) in [(each.source, each.stop) for each in BUILT_INS]
    path = tmp_path / "mine.jinja"
    for data in (SOURCE.encode(), b"\xef\xbb\xbf" + SOURCE.encode(), SOURCE.encode() + b"\n"):
        path.write_bytes(data)
        for given in (path, str(path)):
            chosen = choose_template(given)
            assert (chosen.source.rstrip("\n"), chosen.builtin) == (SOURCE.rstrip("\n"), None)
            assert chosen.origin == "file mine.jinja"  # and no folder of this machine
    assert choose_template(SOURCE).source == SOURCE


def test_a_name_that_is_none() -> None:
    with pytest.raises(TemplateError, match=r"did you mean 'chatml'\?.*llama3, llama4, chatml"):
        choose_template("chatm")
    for wrong in ("", None, 3):
        with pytest.raises(TemplateError, match="expected a file or a name: llama3"):
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


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match="cannot be read"):
        choose_template(tmp_path)
    with pytest.raises(TemplateError, match="cannot be read"):
        choose_template("a\0b")
