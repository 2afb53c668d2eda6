"""Fields of all classes: a model, settings of its load and of its answers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

import treadle
from treadle.api.chat_completions import chat_fields

# Parameters that LangChain gives to every model, without a meaning in one process.
REMOTE = frozenset(("api_key", "base_url", "max_retries", "timeout"))
LOADING = frozenset(treadle.load.__kwdefaults__ or ())


class LoadedModel(BaseModel):
    """Base of classes that use a model: ``model`` is a path, a name as ``treadle.load`` takes it,
    None for the small model inside treadle, or a ``treadle.Model``. A path is opened at the first
    use, once for all objects with the same ``load_options``.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, ignored_types=(cached_property,))

    model: Any = Field(default=None, validate_default=False)
    load_options: dict[str, Any] = Field(default_factory=dict)
    """Settings of ``treadle.load``, such as ``context``."""

    @cached_property
    def loaded(self) -> treadle.Model:
        """The model. Raises the errors of ``treadle.load``."""
        return treadle.load_shared(self.model, **self.load_options)

    @property
    def model_name(self) -> str:
        """The model's name, for traces and answers."""
        if isinstance(self.model, treadle.Model):
            return self.model.path.name.removesuffix(".gguf")
        return "treadle" if self.model is None else os.fspath(self.model)


class AnswerSettings(LoadedModel):
    """Settings of answers. Any name that is no field of the class is a setting of ``Model.chat``
    (``repeat_penalty``), of OpenAI's chat API, or of ``treadle.load`` (``context``).
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: list[str] | None = Field(default=None, alias="stop_sequences")
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further settings of answers."""

    model_config = ConfigDict(populate_by_name=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _sorted(cls, given: Any) -> Any:
        """Sort names that are no fields into ``load_options`` and ``model_kwargs``."""
        if not isinstance(given, Mapping):
            return given
        fields = {name for name in cls.model_fields}
        fields |= {field.alias for field in cls.model_fields.values() if field.alias}
        kept = {name: value for name, value in given.items() if name in fields}
        answering = dict(kept.get("model_kwargs") or {})
        loading = dict(kept.get("load_options") or {})
        for name, value in given.items():
            if name in fields or name in REMOTE:
                continue
            if name in chat_fields():
                answering[name] = value
            elif name in LOADING:
                loading[name] = value
            else:
                near = get_close_matches(name, [*fields, *chat_fields(), *LOADING], n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"{cls.__name__} has no setting {name!r}{hint}")
        return {**kept, "model_kwargs": answering, "load_options": loading}

    def answer_settings(self, stop: list[str] | None = None, **settings: Any) -> dict[str, Any]:
        """Return the settings of one call: those of this object, under the call's own."""
        own = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "max_tokens": self.max_tokens,
            "stop": self.stop if stop is None else stop,
        }
        return {**own, **self.model_kwargs, **settings}
