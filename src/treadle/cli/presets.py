"""Files of presets: models and their options, in TOML.

::

    [defaults]                      # for every model
    context = 8192

    [models.coder]                  # coder is the model's name
    model = "qwen2.5-coder.gguf"    # beside this file; or hf:OWNER/REPO, or a short name
    aliases = ["gpt-4o"]
    temperature = 0.2               # any option of a model of `treadle serve`, without dashes

Keys are the long options of ``serve``; each value is checked as if it were typed. Relative paths
are relative to the folder of the presets file.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from treadle.base.fast_classes import dataclass
from treadle.base.humanize import listed
from treadle.cli.engine_options import OptionCheck, is_engines, written
from treadle.cli.load import is_model, read_text
from treadle.errors import FileError, TreadleError
from treadle.server.router.model_list import EngineOptions
from treadle.server.router.served_model import MemoryRequest, ServedModel

TABLES = ("defaults", "models")
OWN = ("model", "aliases", "pinned", "idle")  # keys that are no options of ``serve``
# Parameters that may name a file, those that can only name one, and the sign before a number that
# may follow the file.
FILES = ("mmproj", "draft", "lora", "control_vectors", "chat_template", "mcp")
MUST_BE_THERE = ("mmproj", "lora", "control_vectors", "mcp")
SCALED = {"lora": "=", "control_vectors": ":"}
FOLDERS = ("cache_dir", "slot_save_path")
# Keys of other programs, spelled too differently from treadle's for a guess.
OTHERS = {"path": "model", "file": "model", "name": "aliases", "alias": "aliases"}
OTHERS |= {"ctx": "context", "num_ctx": "context", "ctx_size": "context", "n_ctx": "context"}
OTHERS |= {"keep_alive": "idle", "ttl": "idle", "idle_unload": "idle", "lora_adapters": "lora"}
OTHERS |= {
    "template": "chat-template",
    "cache_type_k": "kv-k",
    "cache_type_v": "kv-v",
    "kv_type": "kv",
    "temp": "temperature",
}
MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Presets:
    """The contents of a presets file. ``models``: one for each table; a table without the key
    ``model`` has an empty ``ref``, and sets options of a model that a folder or the library
    provides. ``default_args``: options for every model.
    """

    models: tuple[ServedModel, ...] = ()
    default_args: tuple[str, ...] = ()

    def options(
        self, command: click.Command, args: Sequence[str], loading: dict[str, Any]
    ) -> EngineOptions:
        """Return the options of all engines. ``command``: ``serve``; ``args``: options of the
        command line, which override those of the file; ``loading``: the keyword arguments of
        ``treadle.load`` that ``args`` mean.
        """
        whole = joined(command, self.default_args, args)
        if self.default_args:
            loading = check_args(command, whole)
        lone = {model.name: model for model in self.models if not model.ref}
        return EngineOptions(whole, MemoryRequest.of(loading), lone)


NO_PRESETS = Presets()


def read_presets(path: Path, command: click.Command, args: Sequence[str]) -> Presets:
    """Read a presets file. ``command``: ``serve``; ``args``: options of the command line, which
    override those of the file. Raises FileError that names the key.
    """
    if sys.version_info < (3, 11):
        raise TreadleError("--presets needs Python 3.11 or newer, which reads TOML")
    text = read_text(str(path), MOST_BYTES)
    try:
        value: dict[str, Any] = import_module("tomllib").loads(text)
    except ValueError as error:
        raise FileError(f"is not TOML: {error}", path=str(path)) from None
    check_keys(path, "", value, TABLES)
    reader = PresetReader(path, command, tuple(args))
    defaults = reader.args_of("defaults", table(path, "defaults", value.get("defaults", {})))
    models = table(path, "models", value.get("models", {}))
    made = [
        reader.model(name, table(path, f"models.{name}", own), defaults)
        for name, own in models.items()
    ]
    return Presets(tuple(made), defaults)


class PresetReader:
    """Reads the tables of one presets file. ``where`` in its methods: the place of a table or key
    in that file, such as ``models.coder.context``, for errors.
    """

    def __init__(self, path: Path, command: click.Command, args: tuple[str, ...]) -> None:
        self.path = path
        self.command = command
        self.args = args
        self.params: dict[str, click.Parameter] = {}
        for param in command.params:
            if is_engines(param):
                for name in (*param.opts, *param.secondary_opts):
                    if name.startswith("--"):
                        self.params[plain(name)] = param

    def model(self, name: str, own: Mapping[str, Any], defaults: tuple[str, ...]) -> ServedModel:
        """Return the model of the table ``models.NAME``. ``own``: the table; ``defaults``:
        arguments of ``[defaults]``. Raises FileError for an invalid table.
        """
        where = f"models.{name}"
        if not name.strip() or not name.isprintable():
            raise self.error("models", f"the name {name!r}", "a printable name")
        ref = self.ref(where, own.get("model"))
        aliases = own.get("aliases", [])
        if not isinstance(aliases, list) or not all(a and isinstance(a, str) for a in aliases):
            raise self.error(f"{where}.aliases", f"found {aliases!r:.60}", "a list of names")
        pinned = own.get("pinned", False)
        if not isinstance(pinned, bool):
            raise self.error(f"{where}.pinned", f"found {pinned!r:.60}", "true or false")
        args = joined(self.command, defaults, self.args_of(where, own))
        args = joined(self.command, args, self.args)
        return ServedModel(
            name=name,
            ref=ref,
            args=args,
            aliases=tuple(aliases),
            pinned=pinned,
            idle_s=self.idle(where, own.get("idle")),
            cache=MemoryRequest.of(self.checked(where, args)),
            source=f"{self.path}: {where}",
        )

    def ref(self, where: str, value: Any) -> str:
        """Return the path or ``hf:`` name that is the value of the key ``model`` in the table
        ``where``; "" without the key (``value`` None). Raises FileError for a model that is not
        there.
        """
        if value is None:
            return ""
        if not isinstance(value, str) or not value:
            raise self.error(f"{where}.model", f"found {value!r:.60}", "a file, folder or hf: name")
        if value.startswith("hf:"):
            return value
        beside = self.path.parent / Path(value).expanduser()
        if beside.exists():
            return str(beside.absolute())
        from treadle.cli.load import find_model

        try:
            return str(find_model(value))
        except TreadleError as error:
            raise self.error(f"{where}.model", str(error), "") from None

    def idle(self, where: str, value: Any) -> float | None:
        """Return the seconds of the key ``idle`` in the table ``where``: infinity for negative ones
        (never unload), None without the key (``value`` None).
        """
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
            raise self.error(f"{where}.idle", f"found {value!r:.60}", "seconds, -1 for never")
        return math.inf if value < 0 else float(value)

    def args_of(self, where: str, own: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the options of the table ``own``, named ``where`` in errors, as command-line
        arguments. Raises FileError for an unknown key and an invalid value.
        """
        known = [*OWN, *self.params] if where != "defaults" else [*self.params]
        check_keys(self.path, where, own, known)
        result: list[str] = []
        for key, value in own.items():
            if key in OWN:
                continue
            args = [*self.written(f"{where}.{key}", self.params[plain(key)], plain(key), value)]
            self.checked(f"{where}.{key}", tuple(args), alone=True)
            result += args
        return tuple(result)

    def written(self, where: str, param: click.Parameter, key: str, value: Any) -> Iterable[str]:
        """Return the command-line arguments of the option ``param`` for the ``value`` of ``key``;
        ``where``: place of the key, for errors. Raises FileError for a value of a wrong type.
        """
        if getattr(param, "is_flag", False):
            if not isinstance(value, bool):
                raise self.error(where, f"found {value!r:.60}", "true or false")
            off = {plain(name) for name in param.secondary_opts}
            wanted = value != (key in off)
            return written(param, wanted) if wanted or off else ()
        values = value if isinstance(value, list) else [value]
        if isinstance(value, list) and not is_repeatable(param):
            raise self.error(where, "found a list", "one value")
        return written(param, [self.text(where, param, each) for each in values])

    def text(self, where: str, param: click.Parameter, value: Any) -> str:
        """Return a value as text, as it would be typed; a relative path becomes an absolute one,
        from the folder of the presets file. Raises FileError, with the place ``where``, for a value
        of a wrong type and for a file that must exist and does not.
        """
        if isinstance(value, dict):
            return json.dumps(value)
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            if isinstance(value, bool) and param.name in ("reasoning",):
                return "on" if value else "off"
            raise self.error(where, f"found {value!r:.60}", "a text or a number")
        text = str(value)
        if param.name in FOLDERS:
            return str((self.path.parent / Path(text).expanduser()).absolute())
        if param.name in FILES and not text.startswith("hf:"):
            mark = SCALED.get(str(param.name), "")
            file, _, scale = text.rpartition(mark) if mark else (text, "", "")
            file = file or text
            beside = self.path.parent / Path(file).expanduser()
            if beside.exists():
                return str(beside.absolute()) + (f"{mark}{scale}" if file != text else "")
            if param.name in MUST_BE_THERE or (param.name == "draft" and not is_model(text)):
                raise self.error(where, f"no such file: {beside}", "")
        return text

    def checked(self, where: str, args: tuple[str, ...], alone: bool = False) -> dict[str, Any]:
        """Check arguments of ``serve``; return the keyword arguments of ``treadle.load`` that they
        mean. ``alone``: check one option without others that it needs, and return {}. Raises
        FileError, with the place ``where``, for invalid ones.
        """
        try:
            return check_args(self.command, args, parse_only=alone)
        except click.ClickException as error:
            raise self.error(where, error.format_message().rstrip("."), "") from None
        except TreadleError as error:
            raise self.error(where, str(error), "") from None

    def error(self, where: str, found: str, expected: str) -> FileError:
        """Return a FileError about the key ``where``: what was ``found``, and what is ``expected``
        ("" if that is clear).
        """
        return FileError(found, path=str(self.path), where=where, expected=expected or None)


def joined(
    command: click.Command, weaker: Sequence[str], stronger: Sequence[str]
) -> tuple[str, ...]:
    """Return the arguments of two sources, ``weaker`` and ``stronger``, together. An option that
    may be repeated, if ``stronger`` has it, loses all of its values in ``weaker``; of other options
    click uses the last value anyway.
    """
    repeated = {name for each in command.params if is_repeatable(each) for name in each.opts}
    given = {arg.partition("=")[0] for arg in stronger} & repeated
    return (*(arg for arg in weaker if arg.partition("=")[0] not in given), *stronger)


def is_repeatable(param: click.Parameter) -> bool:
    """Return whether each occurrence of an option adds a value."""
    return bool(getattr(param, "multiple", False))


def check_args(
    command: click.Command, args: Sequence[str], parse_only: bool = False
) -> dict[str, Any]:
    """Check arguments of ``serve``; return the keyword arguments of ``treadle.load`` that they
    mean, {} with ``parse_only``. Raises click.ClickException and TreadleError as the command does.
    """
    check = OptionCheck()
    with command.make_context("treadle serve", [*args], obj=check) as context:
        if not parse_only:
            command.invoke(context)
    return check.loading


def plain(key: str) -> str:
    """Return a key in the spelling of an option, without leading dashes: ``top_k`` as ``top-k``."""
    return key.lstrip("-").lower().replace("_", "-")


def check_keys(path: Path, where: str, own: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise FileError for a key of the table ``own`` that is not in ``known``; it suggests similar
    keys. ``path``, ``where``: the presets file and the table's name, for the error.
    """
    known = list(known)
    for key in own:
        if key in known or plain(key) in known:
            continue
        other = OTHERS.get(key.lower().replace("-", "_"))
        near = [other] if other in known else get_close_matches(plain(key), known, n=2)
        hint = f"; did you mean {' or '.join(filter(None, near))}?" if near else ""
        some = "" if near else f"; known: {listed(known, 12)}"
        raise FileError(
            f"unknown key {key!r}{hint}{some}", path=str(path), where=where or "the top level"
        )


def table(path: Path, where: str, value: Any) -> dict[str, Any]:
    """Return ``value`` if it is a TOML table. Raises FileError, with the file ``path`` and the
    place ``where``, for anything else.
    """
    if not isinstance(value, dict):
        raise FileError(f"found {value!r:.60}", path=str(path), where=where, expected="a table")
    return value
