from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import click
import pytest

import treadle
from tests.cli.conftest import Run
from tests.cli.fake import FakeModel
from tests.conftest import WriteTiny
from treadle.cli.commands import run as run_module
from treadle.cli.commands.serve import SHARED_BYTES, SHARED_TOKENS, shared_room
from treadle.cli.options import KV_TYPES, SAMPLING_OPTIONS, build_sampling, kv_options
from treadle.kernels.attention.page_layout import KV_FORMATS
from treadle.machine.memory import MemoryBound
from treadle.sampling.settings import Sampling

# What only a program can give.
NOT_TYPED = {"custom"}


def test_every_setting_has_an_option() -> None:
    fields = {field.name for field in dataclasses.fields(Sampling)}
    assert {setting.name for setting in SAMPLING_OPTIONS} == fields - NOT_TYPED


@pytest.mark.parametrize(
    ("args", "field", "value"),
    [
        (["--temp", "0.5"], "temperature", 0.5),
        (["--temperature", "0.5"], "temperature", 0.5),
        (["--top-k", "7"], "top_k", 7),
        (["--top-nsigma", "-1"], "top_n_sigma", -1.0),
        (["--seed", "3"], "seed", 3),
        (["--seed", "-1"], "seed", None),
        (["--samplers", "top_k;temperature"], "samplers", ("top_k", "temperature")),
        (["--logit-bias", "15043+1", "-l", "3-inf"], "logit_bias", {15043: 1.0, 3: -float("inf")}),
        (
            ["--dry-sequence-breaker", "a", "--dry-sequence-breaker", "b"],
            "dry_sequence_breakers",
            ("a", "b"),
        ),
        (["--dry-sequence-breaker", "none"], "dry_sequence_breakers", ()),
        (["--ignore-eos"], "ignore_eos", True),
        (["--mirostat", "2"], "mirostat", 2),
    ],
)
def test_options_reach_sampling(
    run: Run, model: FakeModel, gguf: str, args: list[str], field: str, value: Any
) -> None:
    assert run("run", gguf, "Once", *args).code == 0
    sampling = model.calls[-1][2]["sampling"]
    assert getattr(sampling, field) == value
    changed = dataclasses.replace(sampling, **{field: getattr(Sampling(), field)})
    assert changed == Sampling()  # and nothing else was touched


# Arguments of ``run`` with the values that they give, or a part of the message of an error.
ARGUMENTS: list[tuple[list[str], dict[str, Any] | str]] = [
    (["-n", "1"], {"max_tokens": 1}),
    (["-n1"], {"max_tokens": 1}),
    (["--max-tokens", "1"], {"max_tokens": 1}),
    (["--max-tokens=1"], {"max_tokens": 1}),
    (["--temp", "0.5", "-n", "2"], {"temperature": 0.5, "max_tokens": 2}),
    (["-l", "3-inf"], {"logit_bias": ((3, -float("inf")),)}),
    (["--no-speculate"], {"speculate": False}),
    (["text", "--", "-n"], {"max_tokens": None}),
    (["--max-token", "1"], "Did you mean"),  # the beginning of a name is no option
    (["--ignore-eos=1"], "does not take a value"),
    (["-y"], "-y"),
    (["-n"], "requires an argument"),
]


def parsed(args: list[str]) -> dict[str, Any] | str:
    """Values of options that click's parser and types make of ``args``, or an error's message."""
    try:
        return run_module.command.make_context("run", ["model.gguf", *args]).params
    except click.UsageError as error:
        return error.format_message()


@pytest.mark.parametrize("own", [True, False])
def test_a_parser_without_private_names_parses_the_same(
    own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not own:  # a click whose parser has other private names, besides one of click's own uses

        def make_parser(self: click.Command, ctx: click.Context) -> Any:
            parser = theirs(self, ctx)
            return SimpleNamespace(parse_args=parser.parse_args, _opt_prefixes=parser._opt_prefixes)

        theirs = click.Command.make_parser
        monkeypatch.setattr(click.Command, "make_parser", make_parser)
    for args, expected in ARGUMENTS:
        found = parsed(args)
        if isinstance(expected, str):
            assert expected in found
        else:
            assert isinstance(found, dict)
            assert {name: found[name] for name in expected} == expected


def test_short_options_are_compared_with_no_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "difflib", None)  # its import is an error
    assert isinstance(parsed(["-n", "1", "-l", "3-inf", "--temp", "0"]), dict)
    with pytest.raises(ImportError):
        parsed(["--max-token", "1"])  # only this error needs it


@pytest.mark.parametrize("command", ["run", "chat"])
def test_a_limit_or_none(run: Run, model: FakeModel, gguf: str, command: str) -> None:
    for words, limit in (([], None), (["-n", "-1"], None), (["--max-tokens", "7"], 7)):
        assert run(command, gguf, *words, stdin="hello\n").code == 0
        assert model.calls[-1][2]["max_tokens"] == limit
    for wrong in ("0", "-2", "x"):
        ran = run(command, gguf, "-n", wrong)
        assert ran.code == 2
        assert wrong in ran.err


@pytest.mark.parametrize("bias", ["5", "x+1", "5+y", "+1"])
def test_a_bias_that_is_none(run: Run, model: FakeModel, gguf: str, bias: str) -> None:
    ran = run("run", gguf, "Once", "--logit-bias", bias)
    assert ran.code == 2
    assert "ID+BIAS" in ran.err


def test_out_of_range_is_wrong_usage() -> None:
    with pytest.raises(click.UsageError, match="min_p"):
        build_sampling({"min_p": 2.0})


def test_the_types_of_keys_and_values() -> None:
    assert tuple(KV_FORMATS) == KV_TYPES


@pytest.mark.parametrize(
    ("words", "kv"),
    [
        ([], None),
        (["--kv", "q8_0"], "q8_0"),
        (["--kv-k", "q8_0"], "q8_0-f16"),
        (["--kv-v", "Q4_0"], "f16-q4_0"),
        (["--kv-v", "q5_1", "--kv", "q8_0"], "q8_0-q5_1"),
        (["--kv-k", "iq4_nl", "--kv-v", "iq4_nl"], "iq4_nl"),
    ],
)
def test_keys_and_values_of_different_types(words: list[str], kv: str | None) -> None:
    found: list[str | None] = []

    @click.command()
    @kv_options
    def command(kv: str | None) -> None:
        found.append(kv)

    command.main(words, standalone_mode=False)
    assert found == [kv]


@pytest.mark.parametrize("option", ["--kv", "--device"])
@pytest.mark.parametrize(
    "words",
    [
        ["run", "{}", "x"],
        ["chat", "{}"],
        ["serve", "{}"],
        ["batch", "IN", "OUT"],
        ["cluster", "serve", "{}"],
        ["bench", "{}"],
        ["perplexity", "{}", "FILE"],
    ],
    ids=lambda words: words[0],
)
def test_a_value_that_cannot_be_is_wrong_usage(
    run: Run, gguf: str, words: list[str], option: str
) -> None:
    ran = run(*(word.format(gguf) for word in words), option, "q9")
    assert (ran.code, ran.out) == (2, "")
    assert f"'{option}': 'q9'" in ran.err
    assert ran.err.count("\n") == 2  # and where help is


@pytest.mark.parametrize("command", ["plan", "embed", "rerank", "imatrix"])
def test_a_device_that_cannot_be_is_wrong_usage(run: Run, gguf: str, command: str) -> None:
    assert run(command, gguf, "x", "--device", "q9").code == 2


def test_types_of_keys_and_values_in_capitals(run: Run, model: FakeModel, gguf: str) -> None:
    assert run("run", gguf, "Once", "--kv", "Q8_0").code == 0


@pytest.mark.parametrize("words", [["bench", "{}"], ["tune", "gemv"]], ids=lambda words: words[0])
def test_an_empty_name_of_a_picture(run: Run, gguf: str, words: list[str]) -> None:
    ran = run(*(word.format(gguf) for word in words), "--plot", "")
    assert (ran.code, ran.out) == (2, "")
    assert "'--plot': an empty name" in ran.err


@pytest.mark.parametrize("origin", ["foo", "https://a.example/", "https://a.example/page", ""])
def test_an_origin_that_no_page_has(run: Run, gguf: str, origin: str) -> None:
    ran = run("serve", gguf, "--allow-origin", origin)
    assert (ran.code, ran.out) == (2, "")
    assert f"{origin!r}: expected https://NAME" in ran.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("run a --cache-mib 5", "--cache-mib needs --cache-dir"),
        ("chat a --cache-mib 5", "--cache-mib needs --cache-dir"),
        ("serve a --cache-mib 5", "--cache-mib needs --cache-dir"),
        ("run a --draft b --no-speculate", "--no-speculate and --draft exclude each other"),
        ("serve a --log-text --no-log", "--log-text and --no-log: choose one"),
        ("serve a -c 5 --n-ctx 6", "-c 5 and --n-ctx 6: they are the same option"),
        ("batch a b --replicas 2", "--replicas needs --cluster"),
        ("cluster serve x --stages 2 --mmproj y", "--mmproj: a model in --stages reads text only"),
        ("cluster serve x --media-host a.example", "--media-host needs --media-urls"),
        ("perplexity a b --force", "--force needs --save-logits"),
        ("bench a -n 0 -s 1,2", "-s needs generation, but -n is 0"),
        ("tune gemv --reset", "KERNEL cannot be used with --reset, which measures nothing"),
        ("tune --reset --plot a.svg", "--plot cannot be used with --reset, which measures nothing"),
    ],
)
def test_an_option_that_would_do_nothing_is_wrong_usage(run: Run, args: str, message: str) -> None:
    ran = run(*args.split())
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"treadle: error: {message}\n")


@pytest.mark.parametrize("scale", ["nan", "inf", "-1e7"])
@pytest.mark.parametrize("args", ["run a b", "quantize a b F16", "perplexity a b", "plan a"])
def test_a_scale_that_no_adapter_has(run: Run, args: str, scale: str) -> None:
    ran = run(*args.split(), "--lora", f"lo=ra={scale}")
    assert (ran.code, ran.out) == (2, "")
    assert f"'--lora': 'lo=ra': the scale {float(scale)!r}: expected a number" in ran.err


@pytest.mark.parametrize(
    "args",
    ["run a b", "quantize a b F16", "imatrix a b", "perplexity a b", "embed a b", "rerank a b c"],
)
def test_more_threads_than_there_may_be(run: Run, args: str) -> None:
    ran = run(*args.split(), "-t", "1025")
    assert (ran.code, ran.out) == (2, "")
    assert "1025 is not in the range 1<=x<=1024" in ran.err


@pytest.mark.parametrize(
    "args",
    [
        "serve a --grace nan",
        "serve a --max-queue nan",
    ],
)
def test_what_is_no_number_for_a_range(run: Run, args: str) -> None:
    ran = run(*args.split())
    assert (ran.code, ran.out) == (2, "")
    assert f"{args.split()[-1]!r} is not a finite number" in ran.err


@pytest.mark.parametrize("command", ["serve a", "batch a b", "run a b", "chat a"])
@pytest.mark.parametrize("number", ["nan", "inf", "-1e400"])
def test_a_temperature_that_is_no_number(run: Run, command: str, number: str) -> None:
    ran = run(*command.split(), "--temp", number)
    assert (ran.code, ran.out) == (2, "")
    assert "temperature = " in ran.err
    assert "is out of range (expected a finite number)" in ran.err


@pytest.mark.parametrize(
    ("options", "n_ctx", "n_tokens", "n_sequences"),
    [
        ("", SHARED_TOKENS, SHARED_TOKENS, 4),
        ("-c 1000", 1000, 4000, 4),
        ("--sequences 2", 4096, 8192, 2),
        ("--kv-mib 1", 4096, 42 * 32, 128),  # pages of 24 KiB
    ],
)
def test_a_text_may_have_all_the_room_that_a_server_has(
    options: str,
    n_ctx: int,
    n_tokens: int,
    n_sequences: int,
    run: Run,
    tiny: WriteTiny,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unless somebody says how much there is."""
    found = []

    def serve(model: treadle.Model, *settings: object) -> None:
        cache = model.engine.cache
        found.append((model.n_ctx, cache.n_tokens, cache.n_sequences))

    monkeypatch.setattr("treadle.server.serve.serve", serve)
    path = tiny(n_ctx=1 << 20, n_head_kv=2)
    assert run("serve", str(path), "-t", "1", *options.split()).code == 0
    assert found == [(n_ctx, n_tokens, n_sequences)]


def test_a_servers_room_takes_a_quarter_of_the_memory_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for free, most in ((40 << 30, 10 << 30), (1 << 20, SHARED_BYTES)):
        bound = MemoryBound(free, free, "memory", "")
        monkeypatch.setattr("treadle.machine.memory.usable_memory", lambda bound=bound: bound)
        assert shared_room() == {"kv_tokens": SHARED_TOKENS, "kv_bytes": most}
    monkeypatch.setattr("treadle.machine.memory.usable_memory", lambda: None)
    assert shared_room() == {"kv_tokens": SHARED_TOKENS}
