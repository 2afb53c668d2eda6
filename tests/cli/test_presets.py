"""Files of presets, and the models of ``treadle serve`` with several, before anything is loaded."""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from treadle.cli import main
from treadle.cli.commands import serve
from treadle.cli.engine_options import engine_args
from treadle.cli.router import model_list
from treadle.errors import TreadleError
from treadle.server.router.model_list import ModelList
from treadle.server.router.served_model import MemoryRequest

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is of Python 3.11")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two models, as far as their names go: none is opened."""
    (tmp_path / "chat-Q8_0.gguf").write_bytes(b"GGUF")
    (tmp_path / "coder.gguf").write_bytes(b"GGUF")
    return tmp_path


def listed(*args: str) -> ModelList:
    """The models of a command line, as the router gets them."""
    found: list[ModelList] = []

    def take(models: Any, context: Any, router: Any, loading: Any, *rest: Any) -> None:
        found.append(model_list(models, context.command, engine_args(context), loading, router))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve, "serve_models", take)
        serve.command.main([*args], standalone_mode=False)
    return found[0]


def preset(folder: Path, text: str) -> Path:
    path = folder / "presets.toml"
    path.write_text(text)
    return path


def test_every_key_of_a_preset(folder: Path) -> None:
    path = preset(
        folder,
        """
        [defaults]
        context = 64
        temperature = 0.5

        [models.main]
        model = "chat-Q8_0.gguf"
        aliases = ["gpt-4o", "m"]
        pinned = true
        idle = -1
        kv = "q8_0"
        kv-mib = 3
        draft = "coder.gguf"
        chat-template = "chatml"
        chat-template-kwargs = {enable_thinking = false}
        reasoning = "off"
        reasoning-budget = 0
        deterministic = true
        speculate = true
        logit-bias = ["1+2", "3-inf"]
        cache-dir = "pages"

        [models.second]
        model = "coder.gguf"
        idle = 60
        context = 32
        no_mmproj = true
        speculate = false
        strict = false
        """,
    )
    models = listed("--presets", str(path), "--top-k", "5", "--context", "48", "--log-text")
    main, second = models.models
    assert (main.name, main.aliases, main.pinned) == ("main", ("gpt-4o", "m"), True)
    assert (main.idle_s, second.idle_s) == (math.inf, 60.0)
    assert main.ref == str(folder / "chat-Q8_0.gguf")
    assert main.cache == MemoryRequest(
        "q8_0", 48, 128, 3 << 20, files=(str(folder / "coder.gguf"),)
    )
    assert main.source == f"{path}: models.main"
    # The command line comes last, and so wins.
    assert main.args == (
        "--context=64",
        "--temperature=0.5",
        "--kv=q8_0",
        "--kv-mib=3",
        f"--draft={folder / 'coder.gguf'}",
        "--chat-template-file=chatml",
        '--chat-template-kwargs={"enable_thinking": false}',
        "--reasoning=off",
        "--reasoning-budget=0",
        "--deterministic",
        "--speculate",
        "--logit-bias=1+2",
        "--logit-bias=3-inf",
        f"--cache-dir={folder / 'pages'}",
        "--top-k=5",
        "--context=48",
        "--log-text",
    )
    assert second.args[2:5] == ("--context=32", "--no-mmproj", "--no-speculate")
    assert "strict" not in " ".join(second.args)


def test_values_of_a_repeated_option_are_those_of_one_source(folder: Path) -> None:
    """Of the strongest one that has any: the command line, the model's table, the defaults."""
    path = preset(
        folder,
        """
        [defaults]
        logit-bias = ["1+2", "2+2"]
        [models.own]
        model = "coder.gguf"
        logit-bias = ["3+1", "4+1"]
        [models.plain]
        model = "coder.gguf"
        """,
    )

    def biases(*args: str) -> list[list[str]]:
        models = listed(str(folder / "chat-Q8_0.gguf"), "--presets", str(path), *args).models
        return [[arg for arg in model.args if "logit" in arg] for model in models]

    default = ["--logit-bias=1+2", "--logit-bias=2+2"]
    assert biases() == [default, ["--logit-bias=3+1", "--logit-bias=4+1"], default]
    assert biases("-l", "5+1") == [["--logit-bias=5+1"]] * 3


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "[models.a]\nmodel = 'coder.gguf'\ncontex = 3",
            "models.a: unknown key 'contex'; did you mean context",
        ),
        ("[models.a]\npath = 'coder.gguf'", "unknown key 'path'; did you mean model?"),
        (
            "[model.a]\nmodel = 'coder.gguf'",
            "the top level: unknown key 'model'; did you mean models?",
        ),
        ("[defaults]\npinned = true", "defaults: unknown key 'pinned'"),
        ("[models.a]\nmodel = 'codr.gguf'", "models.a.model: codr.gguf: no such file"),
        ("[models.a]\nmodel = 3", "models.a.model: found 3 (expected a file, folder or hf: name"),
        ("[models.a]\nmodel = 'coder.gguf'\ncontext = 0", "models.a.context: Invalid value for"),
        ("[models.a]\nmodel = 'coder.gguf'\ncontext = 'x'", "models.a.context: Invalid value for"),
        ("[models.a]\nmodel = 'coder.gguf'\ncontext = [1]", "models.a.context: found a list"),
        ("[models.a]\nmodel = 'coder.gguf'\nstrict = 1", "models.a.strict: found 1 (expected true"),
        ("[models.a]\nmodel = 'coder.gguf'\nkv = 'q5'", "models.a.kv: Invalid value for '--kv'"),
        ("[models.a]\nmodel = 'coder.gguf'\ntop-p = 3.0", "models.a: top_p"),
        (
            "[models.a]\nmodel = 'coder.gguf'\ncache-mib = 3",
            "models.a: --cache-mib needs --cache-dir",
        ),
        ("[models.a]\nmodel = 'coder.gguf'\nlora = 'x.gguf=2'", "models.a.lora: no such file"),
        (
            "[models.a]\nmodel = 'coder.gguf'\ncontrol-vector = 'x.gguf:2'",
            "models.a.control-vector: no such file",
        ),
        ("[models.a]\nmodel = 'coder.gguf'\nmmproj = 'x.gguf'", "models.a.mmproj: no such file"),
        ("[models.a]\nmodel = 'coder.gguf'\nidle = 'x'", "models.a.idle: found 'x' (expected sec"),
        (
            "[models.a]\nmodel = 'coder.gguf'\naliases = 'x'",
            "models.a.aliases: found 'x' (expected",
        ),
        ("[models.a]\nmodel = 'coder.gguf'\nport = 1", "models.a: unknown key 'port'"),
        ("[models.a]\ncontext = 3", "models.a: names no model: expected the key model"),
        ("models = 3", "models: found 3 (expected a table"),
        ("[models.a", "is not TOML"),
        (
            "[models.a]\nmodel='coder.gguf'\n[models.b]\nmodel='coder.gguf'\naliases=['A']",
            "two models have the name A: ",
        ),
    ],
)
def test_what_is_wrong_with_a_preset(folder: Path, text: str, told: str) -> None:
    path = preset(folder, text)
    with pytest.raises(TreadleError) as found:
        listed("--presets", str(path))
    assert told in str(found.value)
    assert str(path) in str(found.value)


def test_models_of_a_folder_are_followed(folder: Path) -> None:
    """Shards are one model, a projector none; a preset of the same name has its options."""
    (folder / "mmproj-chat.gguf").write_bytes(b"GGUF")
    (folder / "sub").mkdir()
    shutil.copy(folder / "coder.gguf", folder / "sub" / "coder.gguf")
    path = preset(folder, "[models.chat-Q8_0]\naliases = ['gpt']\ntemperature = 0.0")
    models = listed("--models-dir", str(folder), "--presets", str(path), "-c", "40")
    assert sorted(model.name for model in models.models) == ["chat-Q8_0", "coder", "sub/coder"]
    chat = models.find("GPT")
    assert chat.name == "chat-Q8_0"
    assert chat.args == ("--temperature=0.0", "--context=40")
    assert models.find("sub/coder").args == ("--context=40",)
    shutil.rmtree(folder / "sub")
    shutil.copy(folder / "coder.gguf", folder / "new.gguf")
    assert models.refresh() == ["sub/coder"]
    (folder / "coder.gguf").write_bytes(b"GGUF of another size")
    assert models.refresh() == ["coder"]
    assert sorted(model.name for model in models.models) == ["chat-Q8_0", "coder", "new"]


def test_a_table_that_fits_no_model_is_told(folder: Path) -> None:
    path = preset(folder, "[models.codr]\ntop-k = 3\n[models.coder]\ntop-k = 4")
    with pytest.warns(UserWarning, match=r"models.codr: no .* yet; did you mean coder\?") as told:
        listed("--models-dir", str(folder), "--presets", str(path))
    assert len(told) == 1


def test_a_name_that_is_taken_is_left_out_of_a_folder(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = folder / "other"
    other.mkdir()
    shutil.move(folder / "chat-Q8_0.gguf", other / "coder.gguf")
    models = listed(str(other / "coder.gguf"), "--models-dir", str(folder))
    assert [model.ref for model in models.models] == [str(other / "coder.gguf")]
    assert "the name coder is taken" in capsys.readouterr().err
    with pytest.raises(TreadleError, match="two models have the name coder"):
        listed(str(other / "coder.gguf"), str(folder / "coder.gguf"))


def test_options_of_the_command_line_reach_each_engine(folder: Path) -> None:
    files = [str(folder / "coder.gguf"), str(folder / "chat-Q8_0.gguf")]
    given = ["-t", "2", "--lora", "x=y.gguf=0.5", "--no-speculate", "-l", "1+2", "--port", "1"]
    given += ["--api-key", "k", "--kv", "F32", "-n", "7", "--no-log"]
    models = listed(*files, *given)
    assert [model.name for model in models.models] == ["coder", "chat-Q8_0"]
    assert models.models[0].args == models.models[1].args
    assert models.models[0].args == (
        *("--threads=2", "--lora=x=y.gguf=0.5", "--no-speculate", "--logit-bias=1+2"),
        *("--kv=F32", "--max-tokens=7", "--no-log"),
    )
    assert models.models[0].cache.kv == "f32"
    assert models.models[0].cache.n_tokens == 32768
    assert models.default().name == "coder"


def test_control_vectors_reach_each_engine(folder: Path) -> None:
    given = ["--control-vector", "x:y.gguf:0.5", "--control-vector-layer-range", "2:4"]
    models = listed(str(folder / "coder.gguf"), str(folder / "chat-Q8_0.gguf"), *given)
    for model in models.models:
        assert model.args == (
            "--control-vector=x:y.gguf:0.5",
            "--control-vector-layer-range=2:4",
        )
        assert model.cache.files == ("x:y.gguf",)


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--memory", "100"], "--memory is for several models"),
        (["x.gguf", "--no-models-autoload"], "--no-models-autoload is for several models"),
        (["--idle-unload", "nan"], "not a finite number"),
        (["--models-dir", "nowhere"], "nowhere: no such folder"),
        (["a.gguf", "b.gguf"], "a.gguf: no such file"),
        (["--library", "--alias", "x"], "--alias names one model"),
        (["--presets", "nowhere.toml"], "nowhere.toml"),
    ],
)
def test_wrong_command_lines(
    args: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *args]) in (1, 2)
    assert told in capsys.readouterr().err
