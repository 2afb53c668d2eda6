"""Short names of the models on this machine, and the model that a short name means.

Names are compared in lower case. A *whole name* is one that ``names_of`` gives a model. A name
*fits* a model if the name's parts occur in the model's name in their order: ``qwen3-0.6b`` and
``qwen-0.6b:q8_0`` fit ``Qwen3-0.6B-Instruct-Q8_0``. A model whose whole name it is wins over models
that it only fits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

from treadle.base.fast_classes import dataclass
from treadle.base.humanize import listed
from treadle.catalog.stored import COMMIT_SHOWN, StoredModel, find_stored
from treadle.errors import FileError

MAX_NAME = 200  # characters of a short name
SHOWN = 6  # names in a message
SEPARATORS = re.compile(r"[-_/:@\s]+")
WORDS = re.compile(r"\d+(?:\.\d+)*|[^\W\d_]+|[^\w\s]", re.UNICODE)  # a number, letters, or a sign
PATHS = ("/", ".", "~", "hf:")  # a text that begins with one is no short name
LATEST = ":latest"  # Ollama's type


@dataclass(frozen=True)
class NamedModel:
    """A model with the short name that means it and no other one."""

    name: str
    model: StoredModel


def name_models(models: Sequence[StoredModel]) -> list[NamedModel]:
    """Return each model with its short name; its path if no name means it alone."""
    return [NamedModel(shortest(model, models), model) for model in models]


def shortest(model: StoredModel, models: Sequence[StoredModel]) -> str:
    """Return the first of the model's whole names that means only this model, else its path."""
    for name in names_of(model):
        if fitting(name, models) == [model]:
            return name
    return str(model.path)


def names_of(model: StoredModel) -> list[str]:
    """Return the whole names of a model in order of preference: without type and owner first, its
    hub name or path in TREADLE_MODELS last.
    """
    tag = f":{model.tag.lower()}" if model.tag else ""
    names = [model.label, model.label + tag]
    if model.repo:
        owner, _, repo = model.repo.lower().partition("/")
        bare = re.sub(r"[-_.]gguf$", "", repo)
        names += [f"{owner}/{model.label}", f"{owner}/{model.label}{tag}"]
        names += [bare, bare + tag, f"{owner}/{bare}", f"{owner}/{bare}{tag}"]
        names += [f"{owner}/{repo}", f"{owner}/{repo}{tag}"]
        names.append(model.hub_name)
    else:
        names.append(model.inside.removesuffix(".gguf").lower())
    if not model.current:
        revision = model.commit[:COMMIT_SHOWN]
        names = [f"{name}@{revision}" for name in names if "@" not in name] + names[-1:]
    return list(dict.fromkeys(name for name in names if name))


def fitting(name: str, models: Iterable[StoredModel]) -> list[StoredModel]:
    """Return the models whose whole name ``name`` is; if there are none, those that it fits, with
    its parts in their names (``fits``). A name that ends in ``.gguf`` must be whole. Older
    revisions are found only by a name with their commit (``@``).
    """
    text = name.lower().removesuffix(LATEST)
    revision = "@" in text
    models = [model for model in models if model.current or revision]
    whole = [model for model in models if text in whole_names(model)]
    if whole or text.endswith(".gguf"):
        return whole
    return [model for model in models if fits(text, model)]


def whole_names(model: StoredModel) -> set[str]:
    """Return all spellings of a model's whole names in lower case: with and without ``.gguf``, with
    ``-`` for ``:``.
    """
    names = {name.lower() for name in names_of(model)}
    names |= {name.removesuffix(".gguf") for name in names}
    file = PurePosixPath(model.inside).name.lower()
    names |= {file, file.removesuffix(".gguf")} - {""}
    return names | {name.replace(":", "-") for name in names if not name.startswith("hf:")}


def fits(text: str, model: StoredModel) -> bool:
    """Return whether the parts of ``text`` occur in a model's name in their order. An owner is
    compared only if ``text`` has one: ``owner/name``.
    """
    owner, slash, rest = text.partition("/")
    if slash and not has_parts(owner, model.repo.lower().partition("/")[0] or model.inside.lower()):
        return False
    end = "" if model.current else f" {model.commit}"
    repo = PurePosixPath(model.repo).name.lower()
    wanted = rest if slash else text
    names = filter(None, (model.label, repo))
    return any(has_parts(wanted, f"{name} {model.tag.lower()}{end}") for name in names)


def has_parts(text: str, name: str) -> bool:
    """Return whether the parts of ``text`` occur in ``name`` in their order.

    A part is text between separators. Its words (letters, numbers) must follow each other in the
    name: ``3b`` does not occur in ``qwen-3-8b``. Letters at its end may begin a longer word,
    numbers must be equal: ``qwen2`` does not occur in ``qwen2.5``.
    """
    words = [word for part in SEPARATORS.split(name) for word in WORDS.findall(part)]
    parts = [WORDS.findall(part) for part in SEPARATORS.split(text) if part]
    at = 0
    for part in filter(None, parts):
        while at + len(part) <= len(words) and not begins(words[at : at + len(part)], part):
            at += 1
        if at + len(part) > len(words):
            return False
        at += len(part)
    return any(parts)


def begins(words: Sequence[str], part: Sequence[str]) -> bool:
    """Return whether the lists are equal, except that letters at the end of ``part`` may be only
    the beginning of the last of ``words``.
    """
    last = words[-1].startswith(part[-1]) if part[-1].isalpha() else words[-1] == part[-1]
    return list(words[:-1]) == list(part[:-1]) and last


def is_short(text: str) -> bool:
    """Return whether ``text`` has the form of a short name: neither a path nor an ``hf:`` name."""
    if not text or len(text) > MAX_NAME or not text.isprintable():
        return False
    return text.count("/") <= 1 and "\\" not in text and not text.startswith(PATHS)


def find_named(text: str) -> NamedModel | None:
    """Return the model that a short name means; None if it fits none.

    Raises FileError, with the candidates, if it fits several, and if only an unfinished download
    fits.
    """
    if not is_short(text):
        return None
    models = find_stored()
    found = fitting(text, [model for model in models if model.is_whole])
    if not found:
        for model in fitting(text, [model for model in models if not model.is_whole]):
            raise FileError(
                f"its download is not finished: go on with `treadle pull {resume_name(model)}`",
                path=text,
            )
        return None
    if len(found) > 1:
        names = [shortest(model, models) for model in found]
        raise FileError(
            f"fits {len(found)} downloaded models: {listed(names, SHOWN)}: name one of them",
            path=text,
        )
    return NamedModel(shortest(found[0], models), found[0])


def is_whole_name(text: str) -> bool:
    """Return whether ``text`` is the whole name of a model on this machine, not a part of it."""
    if not is_short(text):
        return False
    models = [model for model in find_stored() if model.is_whole]
    return any(text.lower().removesuffix(LATEST) in whole_names(model) for model in models)


def similar_names(text: str) -> list[str]:
    """Return at most three short names of models that are most like ``text``."""
    if not is_short(text):
        return []
    from difflib import get_close_matches

    named = name_models(find_stored())
    names = {each.name.lower(): each.name for each in named}
    near = get_close_matches(text.lower(), names, n=3, cutoff=0.5)
    return [names[name] for name in near]


def similar_models(text: str) -> str:
    """Return a part of an error message: downloaded models with names like ``text``, or ""."""
    names = similar_names(text)
    return f"downloaded models with similar names: {', '.join(names)}" if names else ""


def resume_name(model: StoredModel) -> str:
    """Return the name with which ``treadle pull`` completes a model's download."""
    return model.unfinished.ref if model.unfinished else model.hub_name
