"""Options that several commands share: how a model is loaded, how the next token is chosen."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import click

from treadle.errors import SamplingError
from treadle.sampling.settings import DEFAULT_ORDER, NAMES, Sampling

Function = Callable[..., Any]


class SamplingOption(click.Option):
    """One knob of the sampler chain: listed under a heading of its own."""


class ModelCommand(click.Command):
    """A command with sampling options: its help lists them after the others."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under two headings."""
        for heading, wanted in (("Options", False), ("Sampling", True)):
            records = [
                record
                for param in self.get_params(ctx)
                if isinstance(param, click.Option)
                and isinstance(param, SamplingOption) == wanted
                and (record := param.get_help_record(ctx)) is not None
            ]
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)


class Bias(click.ParamType[tuple[int, float]]):
    """``ID+BIAS`` or ``ID-BIAS``, as llama.cpp writes it; ``ID-inf`` forbids the token."""

    name = "bias"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, float]:
        """Split at the first sign."""
        text = str(value)
        at = min((i for i in (text.find("+"), text.find("-")) if i > 0), default=0)
        try:
            return int(text[:at]), float(text[at:])
        except ValueError:
            self.fail(f"'{value}' is not ID+BIAS or ID-BIAS", param, ctx)


@dataclasses.dataclass(frozen=True)
class Knob:
    """How one field of `Sampling` is typed; its type and its default are the field's own."""

    field: str
    flags: str
    help: str
    kind: click.ParamType[Any] | type | None = None
    multiple: bool = False


KNOBS = (
    Knob("temperature", "--temp --temperature", "Above 1 bolder, below 1 safer; 0 is greedy."),
    Knob("top_k", "--top-k", "Keep the k likeliest tokens; 0 keeps all."),
    Knob("top_p", "--top-p", "Keep the likeliest until they reach p; 1 keeps all."),
    Knob("min_p", "--min-p", "Keep tokens this fraction as likely as the likeliest; 0 keeps all."),
    Knob("seed", "-s --seed", "Makes a run repeatable; -1 is a new seed every time.", int),
    Knob("typical_p", "--typical --typical-p", "Locally typical sampling; 1 is off."),
    Knob("top_n_sigma", "--top-nsigma --top-n-sigma", "Keep logits n deviations from the best."),
    Knob("min_keep", "--min-keep", "Truncation leaves at least this many tokens."),
    Knob("xtc_probability", "--xtc-probability", "How often XTC drops the likeliest; 0 is off."),
    Knob("xtc_threshold", "--xtc-threshold", "What is likely, to XTC."),
    Knob("repeat_last_n", "--repeat-last-n", "How far back the penalties look; -1 is everything."),
    Knob("repeat_penalty", "--repeat-penalty", "Divides the logits of repeated tokens; 1 is off."),
    Knob("presence_penalty", "--presence-penalty", "Taken from every repeated token."),
    Knob("frequency_penalty", "--frequency-penalty", "Taken for every time it was repeated."),
    Knob("dry_multiplier", "--dry-multiplier", "Penalty on repeated sequences; 0 is off."),
    Knob("dry_base", "--dry-base", "How fast that penalty grows with the sequence."),
    Knob("dry_allowed_length", "--dry-allowed-length", "Longest sequence that costs nothing."),
    Knob("dry_penalty_last_n", "--dry-penalty-last-n", "How far back DRY looks; -1 is everything."),
    Knob(
        "dry_sequence_breakers", "--dry-sequence-breaker",
        "Text that no repetition reaches across; may be repeated, 'none' for no such text.",
        str, multiple=True,
    ),
    Knob("dynatemp_range", "--dynatemp-range", "Temperature plus or minus this, by entropy."),
    Knob("dynatemp_exponent", "--dynatemp-exp", "How the entropy is mapped to it."),
    Knob("mirostat", "--mirostat", "1 or 2: hold the surprise of the text; 0 is off."),
    Knob("mirostat_eta", "--mirostat-lr", "How fast mirostat learns."),
    Knob("mirostat_tau", "--mirostat-ent", "The surprise that mirostat holds."),
    Knob("adaptive_target", "--adaptive-target", "Prefer tokens this likely; below 0 is off."),
    Knob("adaptive_decay", "--adaptive-decay", "How slowly adaptive-p forgets."),
    Knob("logit_bias", "-l --logit-bias", "ID+BIAS or ID-BIAS; may be repeated.", Bias(), True),
    Knob("ignore_eos", "--ignore-eos", "Never end before the tokens are used up."),
    Knob(
        "samplers", "--samplers", f"The stages in order, of {', '.join(NAMES[:-1])}.", str
    ),
)  # fmt: skip


class TokenLimit(click.ParamType["int | None"]):
    """A number of tokens, 1 or more; -1 for as many as the text has, which is None."""

    name = "integer"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | None:
        """Tell -1 from a number."""
        limit = int(click.INT.convert(value, param, ctx))
        if limit < 1 and limit != -1:
            self.fail(f"{limit} tokens: expected 1 or more, or -1 for no limit", param, ctx)
        return None if limit == -1 else limit


def sampling_option(knob: Knob) -> Callable[[Function], Function]:
    """Make the click option for one knob; not given, it leaves the field's default alone."""
    field = next(f for f in dataclasses.fields(Sampling) if f.name == knob.field)
    settings: dict[str, Any] = {"help": knob.help, "default": None, "cls": SamplingOption}
    if isinstance(field.default, bool):
        settings |= {"is_flag": True, "flag_value": True}
    else:
        settings["type"] = knob.kind or type(field.default)
        settings["multiple"] = knob.multiple
        if isinstance(field.default, (int, float)):
            settings["help"] += f"  [default: {field.default:g}]"
        elif field.default is DEFAULT_ORDER:
            settings["help"] += f"  [default: {';'.join(DEFAULT_ORDER)}]"
    return click.option(*knob.flags.split(), knob.field, **settings)


def packed(
    name: str, fields: Sequence[str], options: Sequence[Callable[[Function], Function]]
) -> Callable[[Function], Function]:
    """Make a decorator that adds ``options`` and hands their values over as one dict, ``name``."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def gather(**values: Any) -> Any:
            values[name] = {field: values.pop(field) for field in fields}
            return function(**values)

        decorated: Function = gather
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return decorate


sampling_options = packed(
    "sampling", [knob.field for knob in KNOBS], [sampling_option(knob) for knob in KNOBS]
)

load_options = packed(
    "load",
    ["threads", "context", "kv"],
    [
        click.option(
            "-t", "--threads", type=click.IntRange(1, 1024), metavar="N",
            help="Threads; by default what `treadle doctor` says.",
        ),
        click.option(
            "-c", "--context", type=click.IntRange(1), metavar="N",
            help="Tokens that the context can hold.",
        ),
        click.option(
            "--kv", metavar="TYPE",
            help="Type of the cached keys and values: f16, the default, bf16, f32 or q8_0.",
        ),
    ],
)  # fmt: skip


def build_sampling(values: dict[str, Any]) -> Sampling:
    """Make the `Sampling` that the options ask for; a value out of range is wrong usage."""
    given = {name: value for name, value in values.items() if value not in (None, ())}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    if given.get("dry_sequence_breakers") == ("none",):
        given["dry_sequence_breakers"] = ()
    try:
        return Sampling(**given)
    except SamplingError as error:
        raise click.UsageError(str(error)) from error
