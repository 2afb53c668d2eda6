"""Pictures and sounds of prompts: token ids, contents fetched from addresses, and errors turned
into those of the client.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from treadle.chat.media_parts import MARKER, MediaPart, read_images, read_multimodal_prompt
from treadle.errors import ContextFullError, FileError, TreadleError, UnsupportedError
from treadle.scheduler.request import MediaPrompt
from treadle.server.http.api_errors import ApiError, too_long

if TYPE_CHECKING:
    from treadle.api.media import ModelMedia
    from treadle.api.model import Model
    from treadle.chat.prompt import ChatPrompt
    from treadle.media.address_policy import AddressPolicy

# The beginning of an error: a place in a body, such as messages[2].content[1].image_url.url
_PLACE = re.compile(r"((?:messages|input|prompt|images|content)\b[\w.\[\]]*): ")
CONTENTS: ContextVar[Mapping[str, bytes] | None] = ContextVar("CONTENTS", default=None)
"""Contents of the addresses of the task's request, once fetched."""


class AddressesNeeded(Exception):
    """A prompt names http(s) addresses whose contents were not fetched yet. ``places``: by address,
    the field in the request that has it. ``Service.prepare`` fetches them and begins again.
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        super().__init__(", ".join(places))
        self.places = places


def chat_ids(
    prompt: ChatPrompt, model: Model, addresses: AddressPolicy, *, bounded: bool = True
) -> list[int]:
    """Return the token ids of the rendered conversation ``prompt``; its pictures and sounds are
    decoded and resized, but not encoded. ``addresses``: which http(s) addresses may be fetched.
    ``bounded``: raise ApiError if the rows of pictures and sounds alone exceed the context. Also
    raises TreadleError and AddressesNeeded.
    """
    media = model.media
    if prompt.media is None or media is None:
        return model.prompt_ids(prompt)
    with media_errors(model):
        media.limits.check_count(len(prompt.media.parts), "messages")
    parts = with_contents(prompt.media.parts, addresses)
    prompt = replace(prompt, media=replace(prompt.media, parts=parts))
    with media_errors(model, [part.place for part in parts]):
        return model.prompt_ids(prompt, bounded=bounded)


def multimodal_ids(prompt: Mapping[str, Any], model: Model, name: str) -> list[int]:
    """Return the token ids of llama.cpp's prompt, an object of ``prompt_string`` and
    ``multimodal_data``. ``name``: its field in the body. Raises ApiError and TreadleError.
    """
    media = _media_of(model, f"{name}.multimodal_data")
    with media_errors(model):
        pieces = read_multimodal_prompt(prompt, name, limits=media.limits)
    return _raw_ids(pieces, media, model)


def images_ids(prompt: str, images: Any, model: Model) -> list[int]:
    """Return the token ids of Ollama's ``images``, followed by the raw ``prompt``. Raises ApiError
    and TreadleError.
    """
    media = _media_of(model, "images")
    with media_errors(model):
        parts = read_images(images, "images", limits=media.limits)
    return _raw_ids([*parts, prompt], media, model)


def _raw_ids(pieces: Sequence[str | MediaPart], media: ModelMedia, model: Model) -> list[int]:
    places = [piece.place for piece in pieces if isinstance(piece, MediaPart)]
    with media_errors(model, places):
        return media.raw_ids(pieces)


def _media_of(model: Model, name: str) -> ModelMedia:
    if model.media is None:
        raise ApiError(
            400,
            f"{name}: not supported: this model reads text only",
            param=name,
            code="unsupported_parameter",
        )
    return model.media


def with_contents(parts: Sequence[MediaPart], addresses: AddressPolicy) -> tuple[MediaPart, ...]:
    """Return ``parts``, pictures and sounds, with addresses replaced by the contents fetched from
    them. Raises ApiError if the server fetches no addresses, AddressesNeeded if these were not
    fetched yet.
    """
    places = {part.source: part.place for part in reversed(parts) if isinstance(part.source, str)}
    if not places:
        return tuple(parts)
    if not addresses.enabled:
        place = next(part.place for part in parts if isinstance(part.source, str))
        raise ApiError(
            400,
            f"{place}: addresses are not fetched: send the file itself as a data: URL of base64, "
            "or start treadle with --media-urls",
            param=place,
            code="unsupported_content",
        )
    found = CONTENTS.get()
    if found is None:
        raise AddressesNeeded(places)
    return tuple(
        replace(part, source=found[part.source]) if isinstance(part.source, str) else part
        for part in parts
    )


@contextmanager
def media_errors(model: Model, places: Collection[str] | None = None) -> Iterator[None]:
    """Turn errors about a client's pictures and sounds in the block into ApiError (400), with their
    place in the body as ``param``. ``places``: of those that the block reads; a FileError about
    another path is raised unchanged. None: every FileError is the client's.
    """
    try:
        yield
    except FileError as error:
        if places is not None and error.path not in places:
            raise
        raise ApiError(400, str(error), param=error.path, code="invalid_media") from error
    except ContextFullError as error:
        n_ctx = model.n_ctx
        raise too_long(n_ctx + 1, n_ctx, at_least=True) from error
    except TreadleError as error:
        place = _PLACE.match(str(error))
        error.setting = error.setting or (place and place[1])
        if not isinstance(error, UnsupportedError):
            raise
        code = "unsupported_content"
        raise ApiError(400, str(error), param=error.setting, code=code) from error


# -- token ids -------------------------------------------------------------------------------------


def check_vocabulary(ids: Sequence[int], model: Model) -> None:
    """Raise TreadleError if an id that a client sent is not in the vocabulary: larger ids stand for
    rows of pictures, perhaps another client's.
    """
    n_vocab = model.config.n_vocab
    if ids and not (min(ids) >= 0 and max(ids) < n_vocab):
        raise TreadleError(f"a token id outside 0..{n_vocab - 1}")


def n_text(ids: Sequence[int], model: Model) -> int:
    """Return how many of a prompt's ids are text, not rows of pictures and sounds."""
    if not isinstance(ids, MediaPrompt):
        return len(ids)
    return sum(id < model.config.n_vocab for id in ids)


def prompt_text(ids: Sequence[int], model: Model) -> str:
    """Return a prompt's text, with llama.cpp's marker in place of each picture and sound."""
    media = model.engine.media
    if not media.any_in(ids):
        return model.detokenize(ids)
    made: list[str] = []
    for entry, run in groupby(ids, lambda id: media.entry_of(id) if id >= media.first_id else None):
        if entry is None:
            text = model.tokenizer.decode(run, start=not made)
            made.append(text)
        elif entry.ids[0] == next(run):  # rows of a picture may have marks between them
            made.append(MARKER)
    return "".join(made)
