"""Environment variables of options."""

from __future__ import annotations

import click
import pytest

from tests.cli.conftest import Run
from tests.cli.fake import FakeModel
from treadle.cli.environment import commands_of, name_variables, variables_of


@pytest.mark.parametrize("variable", ["TREADLE_RUN_TEMP", "TREADLE_RUN_TEMPERATURE"])
def test_a_variable_for_each_spelling(
    variable: str, run: Run, model: FakeModel, gguf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "0.5")
    for words, temperature in (((), 0.5), (("--temp", "0.25"), 0.25)):
        assert run("run", gguf, "Once", *words).code == 0
        assert model.calls[-1][2]["sampling"].temperature == temperature


def test_variables_of_flags_and_of_several_values(
    run: Run, model: FakeModel, gguf: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TREADLE_RUN_IGNORE_EOS", "yes")
    monkeypatch.setenv("TREADLE_RUN_LOGIT_BIAS", "5+1 6-2")
    assert run("run", gguf, "Once").code == 0
    sampling = model.calls[-1][2]["sampling"]
    assert (sampling.ignore_eos, sampling.logit_bias) == (True, {5: 1.0, 6: -2.0})


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("words", "variable", "value", "said"),
    [
        (
            "serve",
            "TREADLE_SERVE_PORT",
            "x",
            "the variable TREADLE_SERVE_PORT: 'x': expected a whole",
        ),
        ("serve", "TREADLE_SERVE_LOG_TEXT", "maybe", "the variable TREADLE_SERVE_LOG_TEXT: "),
        ("run", "TREADLE_RUN_MIN_P", "7", "(variables that are set: TREADLE_RUN_MIN_P)"),
        ("cluster serve", "TREADLE_CLUSTER_SERVE_PORT", "x", "TREADLE_CLUSTER_SERVE_PORT: "),
        ("serve --port y", "TREADLE_SERVE_PORT", "x", "'--port': 'y': expected a whole"),
        ("serve --host=", "TREADLE_SERVE_PROT", "1", "did you mean TREADLE_SERVE_PORT?"),
    ],
)
def test_a_wrong_value_names_its_variable(
    words: str, variable: str, value: str, said: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    ran = run(*words.split())
    assert ran.code == 2
    assert said in ran.err


def test_a_servers_model_has_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_SERVE_MODEL", "no-such-model.gguf")
    assert "no-such-model.gguf" in run("serve").err


def test_variables_that_options_had_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    @click.option("--api-key", "-k", envvar="TREADLE_API_KEY", multiple=True)
    @click.option("--page/--no-page", default=True)
    @click.option("--hidden", hidden=True)
    @click.argument("text")
    def command(**_: object) -> None: ...

    name_variables(command, "x")
    name_variables(command, "x")  # as a process with two calls does
    key, page, hidden, argument = command.params
    assert key.envvar == ["TREADLE_X_API_KEY", "TREADLE_API_KEY"]
    assert page.envvar == ["TREADLE_X_PAGE"]
    assert (hidden.envvar, argument.envvar) == (None, None)
    assert "--api-key by TREADLE_X_API_KEY" in str(command.epilog)


def test_every_option_has_a_name_of_its_own() -> None:
    """No two options of a command have the same variable, and none has that of another setting."""
    from importlib import import_module

    from treadle.cli.app import COMMANDS

    others = {"TREADLE_TUNE", "TREADLE_BUNDLE", "TREADLE_BUNDLES", "TREADLE_MODELS"}
    found: list[str] = []
    for name in COMMANDS:
        module = import_module(f"treadle.cli.commands.{name.replace('-', '_')}")
        command: click.Command = module.command
        for words, each in commands_of(command, name):
            prefix = f"TREADLE_{words.upper().replace(' ', '_').replace('-', '_')}_"
            found += [v for param in each.params for v in variables_of(param, prefix)]
    assert len(found) == len(set(found)) > 300
    assert not others.intersection(found)
