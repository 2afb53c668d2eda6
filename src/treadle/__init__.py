"""treadle: language models on the machine you have.

::

    import treadle

    model = treadle.load("model.gguf")
    for piece in model.generate("Once upon a time", max_tokens=64, temperature=0.7):
        print(piece, end="", flush=True)

- ``load(path)`` opens a model; without a path, the small one inside the package
- ``Model``: ``generate``, ``chat``, ``tokenize``, ``logits``, ``embed``, ``session``
- ``Sampling``: how the next token is chosen
- ``Generation``: what ``generate`` and ``chat`` return, an iterator of pieces of text
- ``Reply``: what ``chat`` returns where the model may call functions
- ``Session``: tokens and their keys and values; ``save`` writes them to a file
- ``Trace``: what a model's steps write, as ``StepValues``; ``Model.attention`` gives
  ``AttentionWeights``, ``Model.lens`` ``LensLogits``
- ``load_session(path, model)`` reads such a file
- ``load_shared(path)``: the same, once for all that use the model in this process
- ``ChatCompletions(model)``: chats in the form of OpenAI's API, as dicts
- ``run_tools(model, messages, functions)``: a chat whose model calls functions
- ``ControlVector``: directions that change a model's style; ``make_control_vector`` makes one from
  pairs of texts
- ``load_speech(path)`` opens a speech model (Whisper), whose ``transcribe`` turns sound into text:
  a ``Transcription``, an iterator of ``TranscriptSegment``, and at its end a ``Transcript``
- ``openai``: OpenAI's client for a model of this process
- ``errors``: the exceptions, drawn as a tree; all of them are ``TreadleError``, and all of them are
  here too: ``treadle.FileError``
"""

from __future__ import annotations

from treadle.version import __version__ as __version__

# Not typing's, which takes 15 ms to import: until then Ctrl-C shows Python's traceback.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from treadle import openai as openai
    from treadle.api.chat_completions import ChatCompletions
    from treadle.api.control_vector import make_control_vector
    from treadle.api.generation import Generation
    from treadle.api.hooks import AttentionWeights, LensLogits, StepValues, Trace
    from treadle.api.model import Model, load, load_session
    from treadle.api.session import Session
    from treadle.api.shared_models import load_shared
    from treadle.api.speech import SpeechRecognizer, load_speech
    from treadle.api.tool_chat import Reply, run_tools
    from treadle.distributed import cluster as cluster
    from treadle.errors import (
        CacheError,
        CompileError,
        ContextFullError,
        DeviceError,
        FileError,
        ForkedError,
        GrammarError,
        NoMemoryError,
        NoRoomError,
        NotFiniteError,
        SamplingError,
        TemplateError,
        TreadleError,
        UnsupportedError,
    )
    from treadle.models.control_vector import ControlVector
    from treadle.sampling import Sampling
    from treadle.speech.transcript import Transcript, TranscriptSegment, TranscriptWord
    from treadle.speech.transcription import Transcription

__all__ = [  # noqa: RUF022 - in the order that a reader wants
    "load",
    "Model",
    "Sampling",
    "Generation",
    "Session",
    "load_session",
    "Reply",
    "ChatCompletions",
    "load_shared",
    "run_tools",
    "ControlVector",
    "make_control_vector",
    "Trace",
    "StepValues",
    "AttentionWeights",
    "LensLogits",
    "load_speech",
    "SpeechRecognizer",
    "Transcription",
    "Transcript",
    "TranscriptSegment",
    "TranscriptWord",
    "TreadleError",
    "CacheError",
    "CompileError",
    "ContextFullError",
    "DeviceError",
    "FileError",
    "ForkedError",
    "GrammarError",
    "NoMemoryError",
    "NoRoomError",
    "NotFiniteError",
    "SamplingError",
    "TemplateError",
    "UnsupportedError",
]

_LAZY = {
    "load": "treadle.api.model",
    "Model": "treadle.api.model",
    "Sampling": "treadle.sampling",
    "Generation": "treadle.api.generation",
    "Session": "treadle.api.session",
    "load_session": "treadle.api.model",
    "Reply": "treadle.api.tool_chat",
    "ChatCompletions": "treadle.api.chat_completions",
    "load_shared": "treadle.api.shared_models",
    "run_tools": "treadle.api.tool_chat",
    "ControlVector": "treadle.models.control_vector",
    "make_control_vector": "treadle.api.control_vector",
    "Trace": "treadle.api.hooks",
    "StepValues": "treadle.api.hooks",
    "AttentionWeights": "treadle.api.hooks",
    "LensLogits": "treadle.api.hooks",
    "load_speech": "treadle.api.speech",
    "SpeechRecognizer": "treadle.api.speech",
    "Transcription": "treadle.speech.transcription",
    "Transcript": "treadle.speech.transcript",
    "TranscriptSegment": "treadle.speech.transcript",
    "TranscriptWord": "treadle.speech.transcript",
}
_MODULES = {
    "errors": "treadle.errors",
    "cluster": "treadle.distributed.cluster",
    "openai": "treadle.openai",
}


def __getattr__(name: str) -> Any:
    # ``treadle --help`` needs neither numpy nor LLVM, so what does is imported when it is first
    # asked for.
    from importlib import import_module

    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    if name in __all__:
        return getattr(import_module("treadle.errors"), name)
    if name in _MODULES:
        return import_module(_MODULES[name])
    raise AttributeError(f"module 'treadle' has no attribute {name!r}")


def __dir__() -> list[str]:
    # What one comes for. ``help`` and ``dir`` sort by name: the exceptions would fill the first
    # screens, so they are listed in ``errors``, as the modules behind are in the documents.
    return [*_LAZY, "errors", "__version__"]
