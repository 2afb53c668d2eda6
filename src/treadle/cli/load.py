"""From a MODEL argument to a path and a loaded model: names, downloads, suggestions, warnings."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import treadle
from treadle.base.gc_pause import garbage_kept, imports_kept
from treadle.base.validate import file_name
from treadle.cli.ui.progress import ProgressBar
from treadle.cli.ui.table import remark
from treadle.errors import FileError, TemplateError, TreadleError

if TYPE_CHECKING:
    from treadle.api.model import Model

MAX_TEXT = 1 << 30  # most bytes of a text file
WORTH_ASKING = 1 << 28  # least bytes of a model for which free memory is checked
HUB_NAME = r"[\w.-]+/[\w.-]+(?<!\.gguf)"  # OWNER/REPO


def is_model(word: str) -> bool:
    """Return whether a lone word of ``treadle run`` is MODEL, not PROMPT: an ``hf:`` name, a file,
    a folder with a model or written with a slash, a name in .gguf, or a downloaded model's whole
    short name (a part of one may be the beginning of a prompt).
    """
    path = os.path.expanduser(word)
    if word.startswith("hf:") or os.path.isfile(path):
        return True
    if os.path.isdir(path):
        from treadle.files.splits import is_hf

        return os.sep in word or is_hf(path) or has_weights(path)
    if any(c.isspace() for c in word):
        return False
    return word.endswith(".gguf") or is_downloaded(word)


def has_weights(folder: str) -> bool:
    """Return whether a folder has GGUF or safetensors files; False for one that cannot be read."""
    try:
        return any(name.endswith((".gguf", ".safetensors")) for name in os.listdir(folder))
    except OSError:
        return False


def is_downloaded(word: str) -> bool:
    """Return whether ``word`` is the whole short name of a downloaded model."""
    from treadle.catalog.names import is_whole_name

    return is_whole_name(word)


def find_model(
    ref: str,
    progress: ProgressBar | None = None,
    *,
    to_run: bool = True,
    projector: bool | None = False,
) -> Path:
    """Return the path of MODEL: a file, a Hugging Face folder, the first shard of a split file, the
    only model in another folder, an ``hf:`` name, which is downloaded, or a downloaded model's
    short name. ``to_run``: refuse to download safetensors that exceed free memory. ``projector``:
    whether a download includes the model's projector; None: only if the model is new on this
    machine.

    Raises FileError, with similar names in the folder and among downloaded models, if there is no
    such model.
    """
    if ref.startswith("hf:"):
        from treadle.hub import download

        return download(ref, progress=progress, say=remark, to_run=to_run, projector=projector)
    if not ref:
        raise FileError("an empty name", path="''", expected="a model's file or folder")
    path = Path(os.path.expanduser(ref))
    if path.is_file():
        return path
    from treadle.files.splits import first_shard, is_hf, missing, model_inside

    if path.is_dir():
        if is_hf(path):
            return path
        return model_inside(path)
    if not os.path.exists(path):
        if (first := first_shard(path)) is not None:
            return first
        why = missing(path)
        if os.path.lexists(path):
            raise FileError(why, path=ref)
        if (named := find_downloaded(ref)) is not None:
            return named
        from treadle.hub.name import check_no_address

        check_no_address(ref)
        raise FileError(why + near_names(path) + near_downloads(ref), path=ref)
    return path


def find_downloaded(ref: str) -> Path | None:
    """Return the path of the downloaded model that a short name means, None if it fits none. Prints
    which model that is if ``ref`` is only a part of its name. Raises FileError if it fits several.
    """
    from treadle.catalog.names import find_named, whole_names

    found = find_named(ref)
    if found is None:
        return None
    if ref.lower() not in whole_names(found.model):
        remark(f"{ref}: {found.name}, {found.model.origin}")
    return found.model.path


def near_downloads(ref: str) -> str:
    """Return the end of an error message, the downloaded models with names like ``ref``; "" if
    there are none.
    """
    from treadle.catalog.names import similar_models

    similar = similar_models(ref)
    return f"; {similar}" if similar else ""


def find_projector(ref: str, progress: ProgressBar | None = None) -> Path:
    """Return the projector file of ``--mmproj``; ``hf:`` names are downloaded. Raises FileError,
    with the nearest names in the folder, if there is no such file.
    """
    if ref.startswith("hf:"):
        from treadle.hub import download_projector

        return download_projector(ref, progress=progress, say=remark)
    path = Path(ref)
    if not os.path.exists(path):
        from treadle.files.splits import missing

        raise FileError(missing(path) + near_names(path), path=ref)
    return path


def read_text(file: str, most: int | None = None) -> str:
    """Return the UTF-8 text of FILE; "-" is standard input. Raises FileError for other encodings
    and for more than ``most`` bytes, by default MAX_TEXT: ``/dev/zero`` has no end.
    """
    octets = read_bytes(file, most)
    try:
        return octets.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError("is not UTF-8", path=file, offset=error.start, expected="a text") from error


def read_bytes(file: str, most: int | None = None) -> bytes:
    """Return the bytes of FILE; "-" is standard input. Raises FileError for more than ``most``
    bytes, by default MAX_TEXT.
    """
    most = MAX_TEXT if most is None else most
    parts = []
    left = most
    with nullcontext(sys.stdin.buffer) if file == "-" else open(file_name(file), "rb") as source:
        while part := source.read(min(1 << 20, left + 1)):
            parts.append(part)
            left -= len(part)
            if left < 0:
                name = "standard input" if file == "-" else file
                raise FileError(f"has more than {most} bytes", path=name, expected="a text")
    return b"".join(parts)


def read_lines() -> list[str]:
    """Return the lines of standard input, without blank lines at its end. Raises FileError for a
    blank line elsewhere.
    """
    lines = [line.removesuffix("\r") for line in read_text("-").split("\n")]
    while lines and not lines[-1].strip():
        lines.pop()
    for i, line in enumerate(lines):
        if not line.strip():
            where = counted("line")(i)
            raise FileError("is blank", path="standard input", where=where, expected="a text")
    return lines


def counted(what: str) -> Callable[[int], str]:
    """Return a function that names an index, from 0 on: ``counted("line")(0)`` is "line 1"."""
    return lambda i: f"{what} {i + 1}"


def near_names(path: Path) -> str:
    """Return the end of an error message: the files in the folder of ``path`` with the most similar
    names, else some of its models, else "".
    """
    from difflib import get_close_matches

    folder = path.parent
    if not folder.is_dir():
        if re.fullmatch(HUB_NAME, str(path), re.ASCII) and not os.path.lexists(folder):
            return f" (nor the folder {folder}); for a model on the hub, use hf:{path}"
        return f" (nor the folder {folder})"
    # Wrong case is the most common error in a file name, so case is ignored; so is the suffix,
    # which all have.
    try:
        entries = [entry for entry in folder.iterdir() if entry.is_file()]
    except OSError:  # a folder that may not be read
        return ""
    names = {entry.name.lower().removesuffix(".gguf"): entry for entry in entries}
    near = get_close_matches(path.name.lower().removesuffix(".gguf"), names, n=3, cutoff=0.6)
    if near:
        return "; did you mean " + " or ".join(str(names[name]) for name in near) + "?"
    return listing(folder)


def listing(folder: Path) -> str:
    """Return the end of an error message, at most five models in ``folder``; "" if it has none."""
    from treadle.base.humanize import listed

    models = sorted(folder.glob("*.gguf"))
    return "; the folder has " + listed([*map(str, models)], 5) if models else ""


def keeps_states(path: Path) -> bool:
    """Return whether layers of a model keep a state of each sequence (``StateSpec``), beside or in
    place of keys and values. Raises FileError for a damaged file, UnsupportedError for a model that
    treadle does not run.
    """
    from treadle.convert.open import open_model
    from treadle.models.config import StateSpec
    from treadle.models.graphs import GRAPHS
    from treadle.models.load import load_config

    with open_model(path) as gguf:
        config = load_config(gguf)
    return any(isinstance(spec, StateSpec) for spec in GRAPHS[config.arch.graph].pools(config))


def load_model(
    ref: str | None,
    progress: ProgressBar,
    *,
    context: int | None = None,
    room: int = 0,
    reads_media: bool = False,
    **settings: Any,
) -> Model:
    """Load MODEL, None for the model inside the package, print warnings about its settings, and
    record its use.

    ``settings``: keyword arguments of ``treadle.load``; None means the default. ``context``: the
    user's choice of tokens, with a warning if the model was trained for fewer; ``room``: tokens
    that a measurement needs, without a warning. ``reads_media``: the projector is downloaded even
    if the model was downloaded before without it.
    """
    # A command without options for pictures needs no projector, and neither does one that names it.
    wanted = settings.get("mmproj", False) is None and (reads_media or None)
    path = None if ref is None else find_model(ref, progress, projector=wanted)
    settings["context"] = context or room or None
    if settings.get("draft") is not None:
        settings["draft"] = find_model(settings["draft"], progress)
    if isinstance(settings.get("mmproj"), str):
        settings["mmproj"] = find_projector(settings["mmproj"], progress)
    given = {name: value for name, value in settings.items() if value not in (None, ())}
    with imports_kept():
        load = treadle.load  # imports the library
    with garbage_kept(), _warnings_said(progress):
        try:
            model = load(path, progress=progress, **given)
        except TreadleError:
            if context or not room or path is None or not 0 < (most := _positions(path)) < room:
                raise
            model = load(path, progress=progress, **{**given, "context": most})
    if path is not None:
        from treadle.files.stored_entries import note_use

        note_use(path)
    if variables := given.get("chat_template_kwargs"):
        _warn_of_unread(model, variables, progress)
    if given.get("reasoning", "auto") != "auto":
        _warn_of_no_reasoning(model, given["reasoning"], progress)
    if given.get("reasoning_budget", 0) > 0 or given.get("reasoning_budget_message"):
        _warn_of_no_marks(model, progress)
    if given.get("reasoning_preserve"):
        _warn_of_no_history(model, progress)
    trained = model.config.n_ctx_train
    if context is not None and context > trained:
        progress.close()
        remark(
            f"warning: a context of {context} tokens: {model.path.name} was trained for "
            f"{trained}; output beyond that is unreliable"
        )
    if model.gguf.n_bytes >= WORTH_ASKING and (text := from_disk(model)):
        progress.close()
        remark(text)
    return model


@contextmanager
def _warnings_said(progress: ProgressBar) -> Iterator[None]:
    """Print the library's warnings after the block, one a line, without their source location."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for one in caught:
        progress.close()
        remark(f"warning: {one.message}")


def _warn_of_unread(model: Model, variables: Iterable[str], progress: ProgressBar) -> None:
    """Warn about variables that the chat template does not use, probably misspelt."""
    from treadle.base.humanize import listed
    from treadle.chat.template.variables import PRESERVE, unread

    try:
        names = [name for name in unread(model.template, variables) if name != PRESERVE]
    except TreadleError:  # rendering will report it
        return
    if names:
        progress.close()
        some = listed(names, 5)
        remark(f"warning: --chat-template-kwargs: the chat template does not use {some}")


def _warn_of_no_reasoning(model: Model, wanted: str, progress: ProgressBar) -> None:
    """Warn if ``--reasoning`` with the mode ``wanted`` has no effect: the chat template has no
    variable for it and, for "off", no reasoning marks either.
    """
    from treadle.chat.template.variables import switched
    from treadle.chat.tools import dialect_of

    template = model.template
    if switched(template, wanted) or (wanted == "off" and dialect_of(template).thought):
        return
    progress.close()
    remark(f"warning: --reasoning {wanted}: the chat template has no reasoning to switch {wanted}")


def _warn_of_no_marks(model: Model, progress: ProgressBar) -> None:
    """Warn that a reasoning budget has no effect: the chat template has no reasoning marks."""
    from treadle.chat.tools import dialect_of

    if dialect_of(model.template).thought is None:
        progress.close()
        remark("warning: --reasoning-budget: the chat template has no reasoning to limit")


def _warn_of_no_history(model: Model, progress: ProgressBar) -> None:
    """Warn that ``--reasoning-preserve`` has no effect: the template has no variable for it."""
    from treadle.chat.tools import keeps_reasoning

    if not keeps_reasoning(model.template):
        progress.close()
        remark(
            "warning: --reasoning-preserve: the chat template leaves out reasoning of earlier "
            "answers, and has no variable to keep it"
        )


def warn_of_template(model: Model, progress: ProgressBar) -> None:
    """Warn that a file's own chat template refuses plain messages, so that no conversation is
    possible. (For ``--chat-template`` that is an error.)
    """
    from treadle.chat.template.override import check_plain

    try:
        if model.defaults.template is None and "tokenizer.chat_template" in model.gguf.metadata:
            check_plain(model.template)
    except TemplateError as error:
        progress.close()
        remark(f"warning: {error}; --chat-template replaces it")


def _positions(path: Path) -> int:
    """Return the number of learned position embeddings; 0 if the model has none."""
    from treadle.convert.open import open_model
    from treadle.models.load import load_config

    with open_model(path) as gguf:
        return load_config(gguf).n_positions


def device_name(model: Model) -> str | None:
    """Return the name of the model's device; None for the CPU."""
    name: str | None = getattr(model.engine.device, "name", None)
    return name


def from_disk(model: Model) -> str:
    """Return a warning that tokens will read weights from disk; "" if the model fits in memory."""
    from treadle.base.humanize import n_bytes
    from treadle.devices.cpu.residence import shortage

    short = shortage(model.gguf.paths)
    if short is None:
        return ""
    has = n_bytes(short.n_bytes)
    room = f"{n_bytes(short.free_bytes)} ({short.bound.what})"
    text = f"warning: {model.path.name} needs {has}, but memory has {room}: "
    chosen = 0.0  # bytes of a token's experts
    for i, layer in enumerate(model.config.layers):
        if layer.experts:
            share = layer.experts.n_used / layer.experts.n
            stems = tuple(f"blk.{i}.ffn_{name}_exps." for name in ("gate", "up", "gate_up", "down"))
            tensors = model.gguf.tensors.items()
            chosen += share * sum(at.n_bytes for name, at in tensors if name.startswith(stems))
    if chosen:
        cost = f"at most {n_bytes(chosen)} per token"
        return f"{text}experts are read from disk when tokens use them, {cost}"
    return f"{text}every token reads from disk; {short.bound.cure}, or use a smaller format"
