"""vLLM's ``/version`` and ``/tokenizer_info``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treadle import __version__
from treadle.server.http.http_io import Json, Response
from treadle.server.requests.service import Service, service_of

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

SPECIAL = ("bos", "eos", "unk", "sep", "pad")


async def version(request: HttpRequest) -> Response:
    """``GET /version``: treadle's version."""
    return Json({"version": __version__})


async def tokenizer_info(request: HttpRequest) -> Response:
    """``GET /tokenizer_info``: facts about the tokenizer, in the form of a
    ``tokenizer_config.json``.
    """
    service = service_of(request)
    return Json(await service.prepare(_tokenizer_facts, service))


def _tokenizer_facts(service: Service) -> dict[str, Any]:
    model = service.model
    tokenizer = model.tokenizer
    named = {name: getattr(tokenizer, name) for name in SPECIAL}
    controls = [id for id in range(tokenizer.n_vocab) if tokenizer.is_control(id)]
    return {
        "tokenizer_class": f"{tokenizer.model}/{tokenizer.pre}".rstrip("/"),  # as GGUF names it
        "vocab_size": tokenizer.n_vocab,
        "model_max_length": model.config.n_ctx_train,
        "add_bos_token": tokenizer.add_bos,
        "add_eos_token": tokenizer.add_eos,
        **{
            f"{name}_token": None if id is None else tokenizer.piece(id)
            for name, id in named.items()
        },
        "eog_token_ids": sorted(tokenizer.eog),  # each of them ends an answer
        "added_tokens_decoder": {
            str(id): {"content": tokenizer.piece(id), "special": True} for id in controls
        },
        "chat_template": model.template.source,
    }
