from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.cli.conftest import Run
from treadle.chat.template import template
from treadle.chat.template.template import ChatTemplate
from treadle.cli.commands import doctor
from treadle.cli.ui import table
from treadle.cli.ui.progress import ProgressBar

REPORT = {
    "cpu": {"name": "A Processor\x1b", "features": ["avx2", "fma"], "missing": {}, "hybrid": False},
    "threads": 2,
    "kernel_cache": {"n_bytes": 2048, "kernels": 3},
    "peaks": {"read_bytes_s": 45e9, "q8_ops_s": 2.05e12, "processor_time_share": 0.5},
    "fallbacks": [],
    "notes": ["the cgroup allows 2 of the 8 processors"],
    "governor": None,
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The models that were asked about, on a machine that gives REPORT."""
    asked: list[str | None] = []

    def examine(
        model: str | None, progress: object, *, reload: bool, chat_template: str | None
    ) -> object:
        asked.append(f"reload {model}" if reload else model)
        return REPORT

    monkeypatch.setattr(doctor, "examine", examine)
    return asked


def test_the_report(run: Run, machine: list[str | None]) -> None:
    ran = run("doctor")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.splitlines() == [
        "cpu",
        "  name      A Processor\\x1b",
        "  features  avx2, fma",
        "  missing   none",
        "  hybrid    no",
        "threads       2",
        "kernel cache",
        "  n        2.0 KiB",
        "  kernels  3",
        "peaks",
        "  read            45.0 GB/s",
        "  q8              2.0 Top/s",
        "  processor time  50%",
        "fallbacks     none",
        "notes",
        "  the cgroup allows 2 of the 8 processors",
        "governor      none",
    ]


def test_the_report_fits_a_terminal(
    run: Run, machine: list[str | None], terminal: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = {"cpu": {"used": ["avx512vnni"] * 12, "name": "x"}, "warnings": ["word " * 40]}
    monkeypatch.setattr(doctor, "examine", lambda *args, **named: long)
    lines = run("doctor").out.splitlines()
    assert max(map(len, lines)) <= terminal
    assert lines[1].startswith("  used  avx512vnni, ")
    assert lines[2].startswith("        avx512vnni")
    begin = lines.index("warnings") + 1
    assert lines[begin].startswith("  word word")
    assert lines[begin + 1].startswith("    word word")


def test_json(run: Run, machine: list[str | None]) -> None:
    assert json.loads(run("doctor", "--json").out) == REPORT
    run("doctor", "model.gguf")
    run("doctor", "--reload", "model.gguf")
    assert machine == [None, "model.gguf", "reload model.gguf"]
    ran = run("doctor", "--reload")
    assert (ran.code, ran.out) == (2, "")
    assert "--reload needs a MODEL" in ran.err


@pytest.mark.slow
@pytest.mark.usefixtures("small_buffers")
def test_a_real_machine_and_model(run: Run, data: Path) -> None:
    ran = run("doctor", str(data / "models" / "stories260K.gguf"), "--json")
    assert (ran.code, ran.err) == (0, "")
    report = json.loads(ran.out)
    assert report["threads"]["chosen"] >= 1
    assert report["peaks"]["f32_ops_s"] > 1e8
    assert report["peaks"]["read_bytes_s"] > 1e7
    assert report["model"]["size_bytes"] == 1185376
    assert 0 <= report["model"]["in_memory_bytes"] <= 1185376
    assert report["model"]["formats"] == ["F32"]
    assert (report["model"]["without_kernel"], report["model"]["problem"]) == ([], None)


@pytest.mark.slow
def test_reload(run: Run, tmp_path: Path, small_buffers: None) -> None:
    model = write_model(tmp_path / "m.gguf", "llama", 1, (4, 8), 64)
    before = Path(model).read_bytes()
    report = json.loads(run("doctor", "--reload", model, "--json").out)
    assert report["model"]["in_memory_bytes"] == len(before)
    assert Path(model).read_bytes() == before


def write_model(path: Path, arch: str, ggml_type: int, shape: tuple[int, ...], size: int) -> str:
    """A model with one tensor and next to no settings."""
    from treadle.files.gguf_writer import GGUFWriter
    from treadle.formats import FORMATS

    writer = GGUFWriter(path)
    writer.add("general.architecture", arch)
    writer.add_tensor("token_embd.weight", shape, FORMATS[ggml_type], np.zeros(size, np.uint8))
    writer.write()
    return str(path)


@pytest.mark.slow
def test_what_treadle_cannot_run(run: Run, tmp_path: Path, small_buffers: None) -> None:
    model = write_model(tmp_path / "m.gguf", "mamba9", 1, (4, 8), 64)
    report = json.loads(run("doctor", model, "--json").out)
    assert report["model"]["formats"] == ["F16"]
    assert "mamba9" in report["model"]["problem"]
    assert "treadle cannot run this model:" in report["warnings"][0]


def test_a_format_without_a_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from treadle.convert import open as opening
    from treadle.files.gguf import open_gguf

    def without_formats(path: Path) -> object:
        opened = open_gguf(path)
        for name, tensor in opened.tensors.items():
            opened.tensors[name] = replace(tensor, format=None)
        return opened

    monkeypatch.setattr(opening, "open_model", without_formats)
    model = write_model(tmp_path / "m.gguf", "llama", 0, (4, 8), 128)
    about = doctor.read_model_file(model, ProgressBar())
    assert (list(about.formats), list(about.without_kernel)) == (["F32"], ["F32"])
    assert about.acts == set()
    assert "Q8_0" in about.instead


@pytest.mark.usefixtures("own_kernels")
def test_kernels_that_cannot_be_had(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_NO_COMPILE", "1")
    ran = run("doctor", "--json")
    assert ran.code == 0
    report = json.loads(ran.out)
    assert "peaks" not in report
    assert "TREADLE_NO_COMPILE=1 forbids compiling" in report["warnings"][-1]


def test_a_model_that_is_not_there(run: Run, tmp_path: Path) -> None:
    ran = run("doctor", str(tmp_path / "absent.gguf"))
    assert (ran.code, ran.out) == (1, "")
    assert "no such file" in ran.err


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen-Qwen2.5-7B-Instruct", (None, "by the template", "hermes: <tool_call>", False)),
        (
            "llama-cpp-deepseek-r1",
            (
                "<think> ... </think>",
                "by a sentence in the prompt",
                "deepseek-r1: <｜tool▁calls▁begin｜>",
                False,
            ),
        ),
        (
            "CohereForAI-c4ai-command-r-plus-tool_use",
            (
                None,
                "by the template",
                "actions: Action: ```json [",
                False,
            ),
        ),
        (
            "google-gemma-2-2b-it",
            (
                None,
                "by a sentence in the prompt",
                "hermes: <tool_call>",
                False,
            ),
        ),
    ],
)
def test_what_a_chat_template_says(
    name: str, expected: tuple[Any, ...], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its answers are read for."""
    source = (data / "templates" / f"{name}.jinja").read_text("utf-8")
    given = ChatTemplate(source, bos="<s>", eos="</s>")
    monkeypatch.setattr(template, "load_template", lambda gguf: given)
    told = doctor.chat_of(cast(Any, None))
    assert told is not None
    assert (told["reasoning"], told["tools"], told["calls"], bool(told["problem"])) == expected


def test_a_chat_template_whose_calls_are_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ChatTemplate("{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}")
    monkeypatch.setattr(template, "load_template", lambda gguf: given)
    told = doctor.chat_of(cast(Any, None))
    assert told is not None
    assert told["problem"]
    assert "parsed in the format hermes" in told["problem"]


def test_a_chat_template_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    for source in ("{{ raise_exception('no') }}", "{% if %}"):
        given = ChatTemplate(source, bos="", eos="")
        monkeypatch.setattr(template, "load_template", lambda gguf, given=given: given)
        told = doctor.chat_of(cast(Any, None))
        assert told is not None
        assert (told["problem"] or "").startswith("the chat template cannot be used: ")


def test_no_chat_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the file's own: those that are built in say nothing of the model."""
    model = write_model(tmp_path / "m.gguf", "llama", 1, (4, 8), 64)
    assert doctor.read_model_file(model, ProgressBar()).chat is None
    plain = ChatTemplate("{{ messages }}", bos="", eos="", builtin="plain")
    monkeypatch.setattr(template, "load_template", lambda gguf: plain)
    assert doctor.chat_of(cast(Any, None)) is None


def test_a_narrow_terminal_has_values_behind_long_keys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A column of values that begins beyond the terminal's edge is none."""
    for where in (doctor, table):
        monkeypatch.setattr(where, "terminal_width", lambda: 40)
    bounds = {"physical cores (a core's second thread adds nothing here)": 2, "cores": 4}
    doctor.print_report({"bounds": bounds, "cpu": {"name": "EPYC", "architecture": "x86"}})
    assert capsys.readouterr().out.splitlines() == [
        "bounds",
        "  physical cores (a core's second thread",
        "      adds nothing here)  2",
        "  cores  4",
        "cpu",
        "  name          EPYC",
        "  architecture  x86",
    ]
