"""llama.cpp's slots: list them; save, restore and erase a slot's last sequence.

treadle shares cached prefixes between all requests, whatever their slots. So a slot only labels a
request: none waits for a slot, and one without a free slot has the number -1.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HttpRequest

from treadle.api.session import Session
from treadle.errors import FileError
from treadle.kvcache.disk.session_file import save_session
from treadle.server.http.api_errors import ApiError, busy
from treadle.server.http.body_fields import Table, read_fields, text
from treadle.server.http.http_io import Json, Response, read_json
from treadle.server.http.redaction import without_folders
from treadle.server.requests.client_slots import NONE, ClientSlot
from treadle.server.requests.generation_request import room
from treadle.server.requests.service import Service, service_of

if TYPE_CHECKING:
    from treadle.api.model import Model

Act = Callable[["Model", ClientSlot, Path], dict[str, Any]]
FILE: Table = {"filename": text}
MOST_BYTES = 240  # of a file name; its temporary file has a longer one


async def slots(request: HttpRequest) -> Response:
    """``GET /slots``: state and progress of each slot, without any text; then running requests
    without a slot.
    """
    service = service_of(request)
    made = [
        {
            "id": slot.id,
            "n_ctx": room(service.model),
            "is_processing": slot.output is not None,
            "n_tokens": len(slot.ids),
            **({} if slot.output is None else _progress(slot.output)),
        }
        for slot in service.engine.slots
    ]
    made += [
        {"id": NONE, "n_ctx": room(service.model), "is_processing": True, **_progress(each)}
        for each in list(service.engine.outputs.values())
        if each.slot == NONE
    ]
    return Json(made)


def _progress(each: Any) -> dict[str, int]:
    return {
        "n_prompt_tokens": each.answer.timings.n_prompt,
        "n_prompt_tokens_processed": each.request.n_read,
        "n_decoded": len(each.answer.ids),
    }


async def act(request: HttpRequest) -> Response:
    """``POST /slots/{id}?action=save|restore|erase``; the body has the ``filename`` to save or
    restore.
    """
    service = service_of(request)
    action = request.query_params.get("action")
    acts: dict[str | None, Act] = {"save": _save, "restore": _restore, "erase": _erase}
    if action not in acts:
        raise ApiError(400, "action: expected save, restore or erase", param="action")
    service.check_ready()
    slot = _slot(service, request.path_params["id"])
    path = Path() if action == "erase" else _path(service, await read_json(request))
    job = partial(_act, acts[action], service.model, slot, path)
    try:
        return Json(await asyncio.wrap_future(service.engine.submit(job)))
    except FileError as error:
        said = without_folders(str(error).replace(str(path), path.name), error.path)
        raise ApiError(400, f"filename: {said}", param="filename") from None


def _slot(service: Service, word: str) -> ClientSlot:
    found = service.engine.slots
    number = word.isascii() and word.isdecimal() and len(word) <= 9
    if not number or int(word) >= len(found):
        raise ApiError(400, f"id: expected a slot from 0 to {len(found) - 1}", param="id")
    return found[int(word)]


def _path(service: Service, body: dict[str, Any]) -> Path:
    """Return the path of the body's ``filename`` in ``slot_save_path``, the operator's folder.
    Raises ApiError for a missing or invalid name, and if the server has no such folder.
    """
    folder = service.settings.slot_save_path
    if folder is None:
        raise ApiError(
            501,
            "/slots/{id}: saving slots is off: start the server with --slot-save-path DIR",
            code="not_implemented",
        )
    name: str = read_fields(body, FILE).get("filename", "")
    plain = all(c.isalnum() or c in "._- " for c in name) and len(name.encode()) <= MOST_BYTES
    if not plain or name[:1] in ("", ".", " ") or name[-1] in ". ":
        raise ApiError(
            400,
            "filename: expected a name of letters, digits, dots, dashes and spaces",
            param="filename",
        )
    path = folder / name
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise ApiError(400, "filename: not a regular file", param="filename")
    return path


# -- in the engine thread -----------------------------------------------------------------------


def _act(act: Act, model: Model, slot: ClientSlot, path: Path) -> dict[str, Any]:
    if slot.output is not None:
        raise busy(f"slot {slot.id} is in use")
    return act(model, slot, path)


def _save(model: Model, slot: ClientSlot, path: Path) -> dict[str, Any]:
    """Save the slot's sequence, with keys and values, to the file ``path``; evicted pages are
    recomputed. Return llama.cpp's result: tokens, bytes and milliseconds. Raises ApiError for an
    empty slot.
    """
    began = time.perf_counter()
    ids = slot.ids[: model.n_ctx]  # the last one may not be in the cache
    if not ids:
        raise ApiError(400, f"slot {slot.id} is empty", param="id")
    with model.engine.lock:
        model.make_room(len(ids))
        session = Session(model.engine, slot.lora)
        try:
            _check_media(model, slot, session)
            session.prefill(ids)
            save_session(path, model.engine, session.seq, mode=0o600)  # it contains prompts
        finally:
            session.close()
    return {
        "id_slot": slot.id,
        "filename": path.name,
        "n_saved": len(ids),
        "n_written": path.stat().st_size,
        "timings": {"save_ms": 1000 * (time.perf_counter() - began)},
    }


def _check_media(model: Model, slot: ClientSlot, session: Session) -> None:
    """Raise ApiError if pages that have to be recomputed for the slot belong to a picture or sound
    whose rows are no longer in memory.
    """
    media = model.engine.media
    left = slot.ids[model.engine.cache.n_cached_tokens(slot.ids, slot.lora) :]
    if any(entry.rows is None for entry in media.entries_in(left)):
        raise ApiError(
            400,
            f"slot {slot.id}: its pictures are no longer in memory: send them again",
            param="id",
        )


def _restore(model: Model, slot: ClientSlot, path: Path) -> dict[str, Any]:
    """Load the sequence in the file ``path`` into the prefix cache, as the slot's last one. Return
    llama.cpp's result: tokens, bytes and milliseconds.
    """
    began = time.perf_counter()
    session = model.load_session(path)
    slot.ids = session.ids
    slot.lora = session.seq.lora
    session.retire()
    return {
        "id_slot": slot.id,
        "filename": path.name,
        "n_restored": len(slot.ids),
        "n_read": path.stat().st_size,
        "timings": {"restore_ms": 1000 * (time.perf_counter() - began)},
    }


def _erase(model: Model, slot: ClientSlot, path: Path) -> dict[str, Any]:
    """Drop the cached pages of the slot's sequence, except those that other sequences share. Return
    the slot's number and the number of tokens erased; ``path`` is not used.
    """
    ids = slot.ids
    slot.ids = []
    with model.engine.lock:
        model.engine.cache.revive().close()
        model.engine.cache.tree.erase(ids, slot.lora)
    return {"id_slot": slot.id, "n_erased": len(ids)}
