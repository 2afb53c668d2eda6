"""Models of the router, as OpenAI's, Anthropic's, llama.cpp's and Ollama's lists show them."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import PurePath
from typing import Any

from treadle.base.fast_classes import dataclass
from treadle.base.humanize import n_weights
from treadle.catalog.facts import PROGRAM_BYTES, SPEECH_TEXT, TEXT, ModelFacts, facts_of
from treadle.catalog.stored import StoredModel, stored_at
from treadle.models.config import USUAL_CONTEXT
from treadle.server.http.http_io import utc
from treadle.server.protocols import ollama
from treadle.server.protocols.models import anthropic_model
from treadle.server.router.pool import EnginePool, loading_event
from treadle.server.router.served_model import ServedModel


@dataclass(frozen=True)
class ModelCard:
    """A model's entry in lists: its file (``stored``, None if it is not on this machine yet) and
    the facts from its header.
    """

    model: ServedModel
    stored: StoredModel | None
    facts: ModelFacts

    @property
    def n_bytes(self) -> int | None:
        """Bytes of the weights and the projector; None if the model is not on this machine."""
        return None if self.stored is None else self.facts.stored_bytes(self.stored)

    @property
    def writes(self) -> bool:
        """Whether the model generates text."""
        return self.facts.kind == TEXT

    @property
    def input_modalities(self) -> list[str]:
        """Kinds of input: "text", "image", "audio"."""
        others = sorted(self.facts.modalities)
        return others if self.facts.kind == SPEECH_TEXT else ["text", *others]

    @property
    def output_modalities(self) -> list[str]:
        """Kinds of output: "text" or "embeddings"."""
        return ["text"] if self.facts.kind in (TEXT, SPEECH_TEXT) else ["embeddings"]

    @property
    def context(self) -> int | None:
        """Most tokens of a sequence, known before the model is loaded; None if unknown."""
        known = (self.model.cache.context or self.facts.n_context, self.model.cache.n_tokens)
        return min(filter(None, known), default=None)


def read_card(model: ServedModel) -> ModelCard:
    """Return the card of a model. Its header is read only once; the facts are kept in a file."""
    path = model.path()
    if path is None:
        return ModelCard(model, None, ModelFacts())
    stored = stored_at(path)
    return ModelCard(model, stored, facts_of(stored))


def status_of(pool: EnginePool, model: ServedModel) -> dict[str, Any]:
    """Return llama.cpp's ``status`` object of a model: its state in ``pool`` as ``value``, with
    ``progress`` of a running load, or the ``error`` of a failed one.
    """
    state = pool.state(model)
    slot = pool.slots.get(model.name)
    if slot is None:
        return {"value": state}
    args = ["treadle", "serve", *map(without_folder, model.args)]
    result: dict[str, Any] = {"value": state, "args": args}
    if slot.load is not None:
        if slot.load.stage:
            result["progress"] = loading_event(slot.load)["progress"]
    elif slot.error and slot.engine is None:
        result |= {"failed": True, "exit_code": slot.exit_code, "error": slot.error}
    return result


def without_folder(arg: str) -> str:
    """Return a command-line argument in which an absolute path is shortened to its name: folders
    stay private.
    """
    name, equals, value = arg.partition("=")
    return f"{name}{equals}{PurePath(value).name}" if os.path.isabs(value) else arg


def describe(card: ModelCard, pool: EnginePool, created: int) -> dict[str, Any]:
    """Return OpenAI's object of the model of ``card``, with llama.cpp's ``meta`` and ``status``
    (from ``pool``). ``created``: Unix time.
    """
    model = card.model
    engine = pool.engine(model)
    slot = pool.slots.get(model.name)
    facts = card.facts
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "treadle",
        "aliases": list(model.aliases),
        "status": status_of(pool, model),
        "architecture": {
            "input_modalities": card.input_modalities,
            "output_modalities": card.output_modalities,
        },
        "meta": {
            "n_ctx": engine.facts.get("n_ctx") if engine else card.context,
            "n_ctx_train": facts.n_context or None,
            "n_params": facts.n_parameters or None,
            "size": card.n_bytes,
            "format": facts.format or None,
            "kind": facts.kind,
        },
        "treadle": {
            "pinned": model.pinned,
            "n_requests": engine.n_running if engine else 0,
            "memory": slot.reserved if slot else 0,
            "idle_seconds": finite(engine.idle_s if engine else model.idle_s),
            "expires_at": None if engine is None or engine.expires is None else engine.expires,
            "problem": facts.problem or None,
        },
    }


def finite(seconds: float | None) -> float | None:
    """Return seconds for JSON: None for infinity, which JSON lacks."""
    return None if seconds is None or math.isinf(seconds) else seconds


def describe_for_anthropic(card: ModelCard, created: int) -> dict[str, Any]:
    """Return Anthropic's object of a model. ``created``: Unix time."""
    return anthropic_model(card.model.name, created, card.context)


def describe_for_ollama(card: ModelCard, name: str = "") -> dict[str, Any]:
    """Return a model's entry in ``/api/tags``. ``name``: an alias to show in place of the model's
    name.
    """
    stored = card.stored
    changed = time.time()
    if stored is not None:
        with suppress(OSError):
            changed = stored.weights.stat().st_mtime
    place = stored.path if stored else card.model.ref
    return ollama.entry_of(name or card.model.name, place, card.n_bytes, changed, details(card))


def details(card: ModelCard) -> dict[str, Any]:
    """Return Ollama's ``details`` of a model: family, number of weights, quantization."""
    facts = card.facts
    return ollama.details_of(facts.architecture, n_weights(facts.n_parameters), facts.format)


def running_for_ollama(card: ModelCard, pool: EnginePool) -> dict[str, Any]:
    """Return a loaded model's entry in ``/api/ps``."""
    engine = pool.engine(card.model)
    expires = None if engine is None else engine.expires
    slot = pool.slots.get(card.model.name)
    size = slot.reserved if slot and slot.reserved else (card.n_bytes or 0) + PROGRAM_BYTES
    return {
        **describe_for_ollama(card),
        "size": size,
        "expires_at": ollama.NEVER if expires is None else utc(expires),
        "size_vram": 0,
        "context_length": card.context or 0,
    }


def show_for_ollama(card: ModelCard) -> dict[str, Any]:
    """Return the response of ``/api/show`` for a model, from its file's header."""
    arch = card.facts.architecture
    metadata = header_of(card)
    context = min(card.context or USUAL_CONTEXT, card.facts.n_context or USUAL_CONTEXT)
    template = str(metadata.get("tokenizer.chat_template") or "")
    width = metadata.get(f"{arch}.embedding_length")
    return {
        "modelfile": "",
        "parameters": f"{'num_ctx':30} {context}",
        "template": template,
        "license": card.facts.license,
        "details": details(card),
        "model_info": {
            "general.architecture": arch,
            "general.parameter_count": card.facts.n_parameters,
            f"{arch}.context_length": context,
            **({f"{arch}.embedding_length": width} if isinstance(width, int) else {}),
        },
        "capabilities": capabilities(card, template),
    }


def header_of(card: ModelCard) -> Mapping[str, Any]:
    """Return the metadata in the model's file, GGUF keys to values; {} if it cannot be read."""
    from treadle.convert.open import open_model
    from treadle.errors import TreadleError

    if card.stored is None:
        return {}
    try:
        with open_model(card.stored.path) as gguf:
            return dict(gguf.metadata)
    except (TreadleError, OSError):
        return {}


def capabilities(card: ModelCard, template: str) -> list[str]:
    """Return Ollama's ``capabilities``, features that clients may offer with a model. ``template``:
    its chat template.
    """
    from treadle.chat.template.template import ChatTemplate
    from treadle.chat.tools import dialect_of
    from treadle.errors import TreadleError

    if card.facts.kind == SPEECH_TEXT:
        return ["transcription"]
    if not card.writes:
        return ["embedding"]
    thinks = False
    with suppress(TreadleError):  # a template that cannot be rendered
        thinks = bool(template) and dialect_of(ChatTemplate(template)).thought is not None
    return ollama.capabilities_of(thinks, card.facts.modalities)
