"""Parameters that several commands share: MODEL, how it is loaded, how the next token is sampled.
Errors of wrong usage.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treadle.base.fast_classes import dataclass
from treadle.errors import SamplingError, TreadleError, UnsupportedError
from treadle.sampling.settings import DEFAULT_ORDER, NAMES, Sampling

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from treadle.cli.media_files import MediaFile


Function = Callable[..., Any]
PARSER_NAMES = "_match_long_opt", "_long_opt", "_opt_prefixes"  # private names in click's parser
SWITCH = {"on": True, "yes": True, "true": True, "off": False, "no": False, "false": False}
HELP_SHOWN = 60  # characters of a model's origin in shell completion


@contextmanager
def as_usage(*kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of the classes ``kinds`` in the block into click.UsageError."""
    try:
        yield
    except kinds as error:
        raise click.UsageError(str(error)) from error


def refuse_options(ctx: click.Context, names: Sequence[str], why: str) -> None:
    """Raise click.UsageError with the reason ``why`` if one of the options ``names`` was typed."""
    from click.core import ParameterSource

    for param in ctx.command.params:
        given = ctx.get_parameter_source(str(param.name)) is ParameterSource.COMMANDLINE
        if param.name in names and given:
            name = param.opts[-1] if isinstance(param, click.Option) else str(param.name).upper()
            raise click.UsageError(f"{name} {why}")


class ModelType(click.Path):
    """Parameter type of MODEL: a path, ``hf:OWNER/REPO`` or a short name; ``cli.load.find_model``
    resolves it. ``stored_only``: completion offers no files.
    """

    def __init__(self, *, stored_only: bool = False) -> None:
        super().__init__(readable=False)
        self.stored_only = stored_only

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the short names that begin with ``incomplete``, then matching files."""
        from click.shell_completion import CompletionItem

        items = [
            CompletionItem(name, help=help[:HELP_SHOWN])
            for name, help in short_names()
            if name.lower().startswith(incomplete.lower())
        ]
        return (
            items if self.stored_only else [*items, *super().shell_complete(ctx, param, incomplete)]
        )


def short_names() -> list[tuple[str, str]]:
    """Return (short name, origin) of the models on this machine; [] if they cannot be listed,
    because completion shows no errors.
    """
    from treadle.catalog.names import name_models
    from treadle.catalog.stored import find_stored

    try:
        named = name_models(find_stored())
    except Exception:
        return []
    # A colon ends a word in bash, and a name with a dash in its place means the same.
    return [
        (each.name if "/" in each.name else each.name.replace(":", "-"), each.model.origin)
        for each in named
    ]


class SamplingOption(click.Option):
    """An option of sampling; the help lists such options under a heading of their own."""


class Picture(click.Path):
    """Parameter type of an image file to write. An empty name is refused: ``Path("")`` is the
    current folder.
    """

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return ``value`` as a path; fail for an empty one."""
        if not str(value):
            self.fail("an empty name", param, ctx)
        return super().convert(value, param, ctx)


class Number(click.FloatRange):
    """Parameter type of a float that is not NaN. click's ranges accept NaN, because every
    comparison with it is false.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return ``value`` as a float; fail for NaN. Infinity is accepted only if the minimum is
        open: it means no limit.
        """
        number = super().convert(value, param, ctx)
        if math.isnan(number) or (math.isinf(number) and not self.min_open):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


class MediaPath(click.ParamType[Any]):
    """Parameter type of a picture or a sound, given as a path or an address."""

    name = "file"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> MediaFile:
        """Return the file that ``value`` names. Raises FileError for a missing one, before a model
        is loaded.
        """
        from treadle.cli.media_files import MediaFile, open_media_file  # few prompts have some

        if isinstance(value, MediaFile):
            return value
        return open_media_file(value)


class ModelCommand(click.Command):
    """A command with sampling options, which its help lists last. For an option of another program
    its error message names treadle's own.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse ``args``; return those left over. Raises click.UsageError for invalid ones."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            from treadle.cli.foreign_options import advice

            known = {name for param in self.get_params(ctx) for name in param.opts}
            if (said := advice(given, known)) is None:
                raise
            raise click.UsageError(said, ctx) from error

    def make_parser(self, ctx: click.Context) -> Any:
        """Make click's parser, without a slow step: click's own compares each short option, such as
        ``-n``, with the names of all long ones, for a suggestion that it then drops. A click whose
        parser has other private names keeps that step.
        """
        parser = super().make_parser(ctx)
        if not all(hasattr(parser, name) for name in PARSER_NAMES):
            return parser
        match_long = parser._match_long_opt

        def match(name: str, *values: Any) -> None:
            if name not in parser._long_opt and name[:2] not in parser._opt_prefixes:
                raise click.NoSuchOption(name, "", ctx=ctx)  # so click tries short options
            match_long(name, *values)

        parser._match_long_opt = match  # type: ignore[method-assign,assignment]
        return parser

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options under the headings "Options" and "Sampling"."""
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


def bias(text: str) -> tuple[int, float]:
    """Parse a logit bias as llama.cpp does: ``ID+BIAS`` or ``ID-BIAS``, where ID is a token's;
    ``ID-inf`` forbids the token. Raises click.BadParameter for anything else.
    """
    at = min((i for i in (text.find("+"), text.find("-")) if i > 0), default=0)
    try:
        return int(text[:at]), float(text[at:])
    except ValueError:
        raise click.BadParameter(f"'{text}' is not ID+BIAS or ID-BIAS") from None


@dataclass(frozen=True)
class AnswerOption:
    """One setting of an answer: an option of the command line, and a name for ``/set`` in chat."""

    name: str
    flags: str  # the option's spellings, separated by spaces
    help: str
    reader: Any = None  # click type of one value, if the default's type is not enough
    multiple: bool = False  # may be repeated; the value is a tuple
    metavar: str | None = None  # None: click's
    otherwise: Any = None  # the default of settings that are not fields of `Sampling`

    @property
    def default(self) -> Any:
        """The default of the `Sampling` field, else ``otherwise``."""
        return getattr(DEFAULT, self.name, self.otherwise)

    @property
    def kind(self) -> Any:
        """The click type of one value."""
        return self.reader or type(self.default)

    @property
    def names(self) -> list[str]:
        """Names that ``/set`` accepts: the setting's, and its options' without dashes."""
        return [self.name, *map(plain, self.flags.split())]

    def parse(self, text: str) -> Any:
        """Parse a value typed in a chat. Raises click.UsageError or ValueError if it is invalid."""
        if self.is_default(text):
            return self.default
        if self.kind is bool:
            if text.lower() not in SWITCH:
                raise ValueError(f"'{text}' is not on or off")
            return SWITCH[text.lower()]
        kind = click.types.convert_type(self.kind)
        if self.multiple:
            import shlex  # only in a chat

            words = (word.replace("\\n", "\n").replace("\\t", "\t") for word in shlex.split(text))
            return tuple(kind.convert(word, None, None) for word in words)
        return kind.convert(text, None, None)

    def is_default(self, text: str) -> bool:
        """Return whether ``text`` means the default: "default", or "none" for a default that is
        empty.
        """
        return text.lower() == "default" or (text.lower() == "none" and not self.default)

    def written(self, value: Any) -> str:
        """Format a value as ``/set`` would accept it."""
        if value is None or value in ((), {}):
            return "none"
        if isinstance(value, bool):
            return "on" if value else "off"
        if isinstance(value, dict):
            return " ".join(f"{token}{bias:+g}" for token, bias in value.items())
        if isinstance(value, tuple) and self.multiple:
            return " ".join(map(quoted, value))
        if isinstance(value, tuple):
            return "; ".join(value)
        return f"{value:g}" if isinstance(value, float) else str(value)


def quoted(text: str) -> str:
    """Quote one of several strings, so that ``AnswerOption.parse`` reads it back."""
    if not text.isprintable() or text in ("none", "default"):
        return repr(text)
    import shlex

    return shlex.quote(text)


def plain(name: str) -> str:
    """Convert an option to a setting's name: ``--top-k`` to ``top_k``."""
    return name.lstrip("-").lower().replace("-", "_")


DEFAULT = Sampling()
SAMPLING_OPTIONS = (
    AnswerOption("temperature", "--temp --temperature", "Higher is more random; 0 is greedy."),
    AnswerOption("top_k", "--top-k", "Keep the k most likely tokens; 0 disables."),
    AnswerOption("top_p", "--top-p", "Keep the most likely up to a total of p; 1 disables."),
    AnswerOption(
        "min_p", "--min-p", "Keep tokens this fraction as likely as the best; 0 disables."
    ),
    AnswerOption("seed", "-s --seed", "Random seed; -1 draws a new one every time.", int),
    AnswerOption("typical_p", "--typical --typical-p", "Locally typical sampling; 1 disables."),
    AnswerOption(
        "top_n_sigma", "--top-nsigma --top-n-sigma", "Keep logits n deviations from the top."
    ),
    AnswerOption("min_keep", "--min-keep", "Truncation keeps at least this many tokens."),
    AnswerOption(
        "xtc_probability", "--xtc-probability", "Chance that XTC removes top tokens; 0 disables."
    ),
    AnswerOption(
        "xtc_threshold", "--xtc-threshold", "Least probability of a token that XTC may remove."
    ),
    AnswerOption(
        "repeat_last_n", "--repeat-last-n", "Tokens that the penalties consider; -1 is all."
    ),
    AnswerOption(
        "repeat_penalty", "--repeat-penalty", "Divides logits of repeated tokens; 1 disables."
    ),
    AnswerOption(
        "presence_penalty", "--presence-penalty", "Subtracted once if a token has occurred."
    ),
    AnswerOption(
        "frequency_penalty", "--frequency-penalty", "Subtracted for each occurrence of a token."
    ),
    AnswerOption(
        "dry_multiplier", "--dry-multiplier", "Penalty on repeated sequences; 0 disables."
    ),
    AnswerOption("dry_base", "--dry-base", "How fast the penalty grows with the length."),
    AnswerOption(
        "dry_allowed_length", "--dry-allowed-length", "Longest sequence without a penalty."
    ),
    AnswerOption(
        "dry_penalty_last_n", "--dry-penalty-last-n", "Tokens that DRY considers; -1 is all."
    ),
    AnswerOption(
        "dry_sequence_breakers",
        "--dry-sequence-breaker",
        "Repetitions are not counted across this text; may be repeated, 'none' clears the list.",
        str,
        multiple=True,
    ),
    AnswerOption(
        "dynatemp_range", "--dynatemp-range", "Vary the temperature by this, with the entropy."
    ),
    AnswerOption("dynatemp_exponent", "--dynatemp-exp", "Maps entropy to temperature."),
    AnswerOption(
        "mirostat", "--mirostat", "1 or 2 keeps the perplexity near a target; 0 disables."
    ),
    AnswerOption("mirostat_eta", "--mirostat-lr", "Learning rate of mirostat."),
    AnswerOption("mirostat_tau", "--mirostat-ent", "Target entropy of mirostat."),
    AnswerOption("adaptive_target", "--adaptive-target", "Target probability; below 0 disables."),
    AnswerOption(
        "adaptive_decay", "--adaptive-decay", "Weight of earlier tokens in adaptive-p, 0 to 1."
    ),
    AnswerOption(
        "logit_bias", "-l --logit-bias", "ID+BIAS or ID-BIAS; may be repeated.", bias, True
    ),
    AnswerOption(
        "ignore_eos", "--ignore-eos", "Ignore end-of-text tokens; generate up to the limit."
    ),
    AnswerOption(
        "samplers", "--samplers", f"The sampling stages in order, of {', '.join(NAMES[:-1])}.", str
    ),
)
SAMPLING_NAMES = frozenset(each.name for each in SAMPLING_OPTIONS)


def token_limit(text: Any) -> int | None:
    """Parse a token limit of 1 or more; -1 (no limit) becomes None. Raises click.BadParameter for
    others.
    """
    limit = int(click.INT.convert(text, None, None))
    if limit < 1 and limit != -1:
        raise click.BadParameter(f"{limit} tokens: expected 1 or more, or -1 for no limit")
    return None if limit == -1 else limit


def option(setting: AnswerOption) -> Callable[[Function], Function]:
    """Make the click option of a setting. If it is not given, its value is None: the default
    applies.
    """
    given: dict[str, Any] = {"type": setting.kind, "multiple": setting.multiple}
    shown = ""
    if setting.kind is bool:
        given = {"is_flag": True, "flag_value": True}
    elif isinstance(setting.default, (int, float)):
        shown = f"  [default: {setting.default:g}]"
    elif setting.default == DEFAULT_ORDER:
        shown = f"  [default: {';'.join(DEFAULT_ORDER)}]"
    given |= {"metavar": setting.metavar, "help": setting.help + shown, "default": None}
    kind = SamplingOption if setting.name in SAMPLING_NAMES else click.Option
    return click.option(*setting.flags.split(), setting.name, cls=kind, **given)


def packed(
    name: str,
    fields: Sequence[str],
    options: Sequence[Callable[[Function], Function]],
    build: Callable[[dict[str, Any]], Any] = dict,
) -> Callable[[Function], Function]:
    """Return a decorator for a click command: it adds ``options``, and replaces their values, named
    ``fields``, by one argument ``name``, the result of ``build`` on a dict of them.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def gather(**values: Any) -> Any:
            values[name] = build({field: values.pop(field) for field in fields})
            return function(**values)

        decorated: Function = gather
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return decorate


def _mib(context: click.Context, option: click.Parameter, n: int | None) -> int | None:
    """Convert an option's ``n`` MiB to bytes; None, an option not given, stays None."""
    return n and n << 20


def adapter(text: str) -> tuple[str, float]:
    """Parse ``FILE=SCALE``, or FILE alone for a scale of 1. A file name may contain ``=``. Raises
    click.BadParameter for a scale out of range.
    """
    path, _, word = text.rpartition("=")
    try:
        scale = float(word)
    except ValueError:
        return text, 1.0
    if not path:
        return text, 1.0
    from treadle.models.lora import lora_scale

    try:
        lora_scale(f"'{path}'", scale)
    except TreadleError as error:
        raise click.BadParameter(str(error)) from None
    return path, scale


def control_vector(text: str) -> tuple[str, float]:
    """Parse ``FILE:STRENGTH``, or FILE alone for a strength of 1. A file name may contain ``:``.
    Raises click.BadParameter for a strength out of range.
    """
    path, _, word = text.rpartition(":")
    try:
        strength = float(word)
    except ValueError:
        return text, 1.0
    if not path:
        return text, 1.0
    from treadle.models.control_vector import checked_strength

    try:
        checked_strength(path, strength)
    except TreadleError as error:
        raise click.BadParameter(str(error)) from None
    return path, strength


def layer_range(text: str) -> tuple[int, int]:
    """Parse ``A:B``, two whole numbers. Raises click.BadParameter for anything else."""
    first, _, last = text.partition(":")
    try:
        return int(first), int(last)
    except ValueError:
        raise click.BadParameter(f"{text!r:.40}: expected A:B, as in 10:20") from None


LORA = click.option(
    "--lora",
    metavar="FILE[=SCALE]",
    type=adapter,
    multiple=True,
    help="Add an adapter (LoRA), a GGUF file or a folder of PEFT's; may be repeated.",
)


CONTROL_VECTORS = (
    click.option(
        "--control-vector",
        "control_vectors",
        metavar="FILE[:STRENGTH]",
        type=control_vector,
        multiple=True,
        help="Add a control vector, a GGUF file, to the hidden states; may be repeated.",
    ),
    click.option(
        "--control-vector-layer-range",
        "control_vector_layers",
        metavar="A:B",
        type=layer_range,
        help="Layers that control vectors change, both included; by default all that they have.",
    ),
)


def device(name: str) -> str:
    """Return a device's name after checking it. Raises click.BadParameter for an unknown one."""
    from treadle.devices import check_name

    try:
        check_name(name)
    except UnsupportedError as error:
        raise click.BadParameter(str(error).removeprefix("device=")) from None
    return name


# The same as in kernels.kv; a test compares.
KV_TYPES = ("f16", "bf16", "f32", "q8_0", "q5_1", "q5_0", "iq4_nl", "q4_0")
KV_SIDES = "treadle.kv"  # key in click's ``meta``: the types of keys and of values


def _kv_side(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Keep the value of ``--kv-k`` or ``--kv-v`` in ``ctx.meta``, for ``_kv``."""
    ctx.meta[f"{KV_SIDES}.{param.name}"] = value


def _kv(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Return the type of the KV cache, KEYS-VALUES if the two differ; None if not given."""
    sides = [ctx.meta.get(f"{KV_SIDES}.{name}") for name in ("kv_k", "kv_v")]
    if sides == [None, None]:
        return value
    keys, values = (side or value or KV_TYPES[0] for side in sides)
    return keys if keys == values else f"{keys}-{values}"


def kv_options(command: Function) -> Function:
    """Add ``--kv``, ``--kv-k`` and ``--kv-v``, which arrive as one parameter ``kv``."""
    kinds = click.Choice(KV_TYPES, case_sensitive=False)
    for name, what in (("--kv-v", "values"), ("--kv-k", "keys")):
        command = click.option(
            name,
            metavar="TYPE",
            type=kinds,
            callback=_kv_side,
            expose_value=False,
            is_eager=True,
            help=f"Type of the {what} alone.",
        )(command)
    return click.option(
        "--kv",
        metavar="TYPE",
        type=kinds,
        callback=_kv,
        help="Type of the KV cache: f16 (the default), bf16, f32, q8_0, q5_1, q5_0, iq4_nl, q4_0.",
    )(command)


DEVICE = click.option(
    "--device",
    metavar="NAME",
    type=device,
    help="Device: cpu (the default); experimental: cuda (NVIDIA), wgpu.",
)
THREADS = click.option(
    "-t",
    "--threads",
    type=click.IntRange(1, 1024),
    metavar="N",
    help="Number of threads; `treadle doctor` shows the default.",
)
LOAD = (
    THREADS,
    click.option(
        "-c",
        "--context",
        type=click.IntRange(1),
        metavar="N",
        help="Context size in tokens.",
    ),
    kv_options,
    click.option(
        "--kv-mib",
        "kv_bytes",
        type=click.IntRange(1),
        metavar="N",
        callback=_mib,
        help="KV cache size in MiB; the context may be longer.",
    ),
    LORA,
    *CONTROL_VECTORS,
    DEVICE,
)
MMPROJ = click.option(
    "--mmproj",
    metavar="FILE",
    help="Projector file, or hf:OWNER/REPO, with which the model reads pictures and sounds; by "
    "default the file with mmproj in its name beside the model or in its repository.",
)
NO_MMPROJ = click.option(
    "--no-mmproj",
    is_flag=True,
    help="Use no projector file, and download none: the model reads text only.",
)
IMAGE_MAX_TOKENS = click.option(
    "--image-max-tokens",
    type=click.IntRange(1),
    metavar="N",
    help="Most tokens of a picture; larger ones are scaled down. The default suits a CPU.",
)
MEDIA = (MMPROJ, NO_MMPROJ, IMAGE_MAX_TOKENS)


def media_host(text: str) -> str:
    """Return a host's name in lower case. Raises click.BadParameter for anything else, such as an
    address.
    """
    if not re.fullmatch(r"\.?[\w-]+(\.[\w-]+)*", text):
        raise click.BadParameter(f"{text!r}: expected a host's name, without a scheme or port")
    return text.lower()


# Options of commands that answer other users' requests.
MEDIA_URLS = click.option(
    "--media-urls",
    is_flag=True,
    help="Fetch pictures and sounds that requests name by http(s) addresses, from public hosts. By "
    "default they must be sent along.",
)
MEDIA_HOSTS = click.option(
    "--media-host",
    "media_hosts",
    multiple=True,
    metavar="NAME",
    type=media_host,
    help="Host from which --media-urls may fetch, .example.org for all below it; may be repeated. "
    "By default any public host.",
)


def check_media_hosts(media_urls: bool, media_hosts: Sequence[str]) -> None:
    """Raise click.UsageError for ``--media-host`` without ``--media-urls``."""
    if media_hosts and not media_urls:
        raise click.UsageError("--media-host needs --media-urls")


KEEP = (
    click.option(
        "--cache-dir",
        metavar="DIR",
        help="Store the prefix cache in DIR: prompts that were processed once are reused, by later "
        "processes too.",
    ),
    click.option(
        "--cache-mib",
        "cache_bytes",
        type=click.IntRange(1),
        metavar="N",
        callback=_mib,
        help="Size of the files in --cache-dir; by default 4096 MiB.",
    ),
)
SPECULATE = click.option(
    "--speculate/--no-speculate",
    default=None,
    help="Speculative decoding by prompt lookup: faster where a text repeats much of its prompt. "
    "Off by default, except for models with multi-token prediction (MTP) layers, which draft too.",
)
DRAFT = click.option(
    "--draft",
    metavar="MODEL",
    help="Drafter for speculative decoding: a smaller model with the same vocabulary, or one that "
    "was trained for this model (EAGLE 3, DFlash, Gemma 4's assistant).",
)
OF_LOAD = (
    *("threads", "context", "kv", "kv_bytes", "lora", "device"),
    *("control_vectors", "control_vector_layers"),
)
OF_MEDIA = ("mmproj", "no_mmproj", "image_max_tokens")
OF_PLANS = (*OF_LOAD, *OF_MEDIA, "speculate", "draft")
OF_WRITING = (*OF_LOAD, *OF_MEDIA, "cache_dir", "cache_bytes", "speculate", "draft")


def projector(mmproj: str | None, no_mmproj: bool) -> str | bool | None:
    """Return ``mmproj`` of ``treadle.load``: a file, False for none, None for the model's own.
    Raises click.UsageError if both options are given, or an empty name.
    """
    if mmproj is not None and no_mmproj:
        raise click.UsageError("--mmproj and --no-mmproj exclude each other")
    if mmproj == "":
        raise click.UsageError("--mmproj: an empty name")
    return False if no_mmproj else mmproj


def _media(values: dict[str, Any]) -> dict[str, Any]:
    """Return ``values`` as keyword arguments of ``treadle.load``: ``no_mmproj`` becomes a part of
    ``mmproj``.
    """
    no_mmproj = values.pop("no_mmproj")
    return {**values, "mmproj": projector(values["mmproj"], no_mmproj)}


def _writing(values: dict[str, Any]) -> dict[str, Any]:
    """Return ``values`` as keyword arguments of ``treadle.load``. Raises click.UsageError for
    options that exclude or need each other.
    """
    if values["cache_bytes"] is not None and values["cache_dir"] is None:
        raise click.UsageError("--cache-mib needs --cache-dir")
    return _drafting(values)


def _drafting(values: dict[str, Any]) -> dict[str, Any]:
    """Return ``values`` as keyword arguments of ``treadle.load``, for commands without
    ``--cache-dir``. Raises click.UsageError for ``--draft`` with ``--no-speculate``.
    """
    if values["draft"] is not None and values["speculate"] is False:
        raise click.UsageError("--no-speculate and --draft exclude each other")
    return _media(values)


# Decorators that add the options and pass the settings of ``treadle.load`` as ``load``: for a model
# that reads text only, for one that reads pictures and sounds too, for one that writes answers, and
# for one whose plans are compiled and not run.
load_options = packed("load", OF_LOAD, LOAD)
media_load_options = packed("load", (*OF_LOAD, *OF_MEDIA), (*LOAD, *MEDIA), _media)
plan_load_options = packed("load", OF_PLANS, (*LOAD, *MEDIA, SPECULATE, DRAFT), _drafting)
writing_load_options = packed(
    "load", OF_WRITING, (*LOAD, *MEDIA, *KEEP, SPECULATE, DRAFT), _writing
)


def build_sampling(values: dict[str, Any]) -> Sampling:
    """Build the `Sampling` of the options. Raises click.UsageError for a value out of range."""
    given = {name: value for name, value in values.items() if value not in (None, ())}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    if given.get("dry_sequence_breakers") == ("none",):
        given["dry_sequence_breakers"] = ()
    with as_usage(SamplingError):
        return Sampling(**given)


MEDIA_FILES = click.option(
    "--image",
    "--audio",
    "files",
    type=MediaPath(),
    multiple=True,
    metavar="FILE",
    help="A picture or a sound, before the prompt's text or where it has <__media__>; may be "
    "repeated.",
)
