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
- ``Reply``: what ``chat`` returns with tools or a reasoning budget: content, reasoning and calls
- ``Session``: tokens and their keys and values; ``save`` writes them to a file
- ``load_session(path, model)`` reads a file of ``Session.save``
- ``load_shared(path)``: as ``load``, one model for all callers of the process with equal arguments
- ``Trace``: the values that a model's steps write, as ``StepValues``; ``Model.attention`` gives
  ``AttentionWeights``, ``Model.lens`` ``LensLogits``
- ``ChatCompletions(model)``: chats in the form of OpenAI's API, as dicts
- ``run_tools(model, messages, functions)``: a chat whose model calls functions
- ``ControlVector``: directions added to the hidden states, which change a model's style;
  ``make_control_vector`` makes one from pairs of texts
- ``load_speech(path)`` opens a speech model (Whisper), a ``SpeechRecognizer``; its ``transcribe``
  returns a ``Transcription``, an iterator of ``TranscriptSegment`` that ends in a ``Transcript``
- ``cluster``: models on several machines, on Ray
- ``openai``: OpenAI's client for a model of this process
- ``errors``: the exceptions, drawn as a tree; each is a ``TreadleError``, and is also a name of
  this module: ``treadle.FileError``
"""

from __future__ import annotations

from time import time_ns as _time_ns

__version__ = "0.1.0.dev0"  # X.Y.Z of a release, else X.Y.Z.dev0 of the next one
IMPORTED_NS = _time_ns()  # before any other module of the package is imported

# The packages (``help(treadle)`` prints the docstring, so this map is a comment):
#
#   users' side
#     api          library: Model, Session, Generation, chats, embeddings, hooks
#     cli          command line: one file per command
#     server       HTTP server, router of several models, batch files
#     openai       OpenAI's client for a model of this process
#     agents       coding agents started on a local server (``treadle launch``)
#     mcp          tools of MCP servers
#     bundle       program and model in one executable file
#     catalog      the models on this machine: found, named, described, removed
#     hub          models by name: downloads from the Hugging Face hub
#
#   text in and out
#     tokenizer    text to token ids and back
#     chat         chat templates, and parsers of model output
#     grammar      grammars and schemas that constrain output
#     sampling     logits to a token id
#     media        pictures and sounds to rows that a decoder reads
#     speech       sound to text (Whisper)
#
#   files to a plan
#     files        readers and writers of model files, memory-mapped
#     formats      weight formats
#     convert      other checkpoints to GGUF
#     quantize     model files in smaller formats
#     models       configuration, architectures, graphs of operations
#     plan         graphs lowered to steps of kernels
#
#   a plan to results
#     scheduler    queue of requests, batches, output
#     engine       runs batches of plans on a device
#     kvcache      pages of keys and values, shared by prefix
#     spec_decode  drafts of tokens: n-grams, draft models, multi-token prediction
#     devices      CPU, CUDA, WebGPU: memory and running of plans
#     distributed  one model on several engines or machines
#     kernels      specs, emitting functions, numpy twins
#     jit          kernels' Python functions to LLVM IR to machine code, and their cache
#     isa          instruction sets
#
#   this machine and measurements
#     machine      cores, caches, memory
#     system       operating systems: a file each
#     profiling    peak rates, tuning of kernels, ``treadle doctor``
#     evaluate     perplexity, divergence
#     selftest     ``treadle check``
#     base         helpers without dependencies
#     data         the packaged model

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
_OPENS = ": treadle.load(path) opens a model"
_OF_OTHERS = {  # of llama-cpp-python, vLLM and transformers
    "Llama": _OPENS,
    "LLM": _OPENS,
    "AutoModel": _OPENS,
    "AutoModelForCausalLM": _OPENS,
    "pipeline": _OPENS,
    "AutoTokenizer": ": a loaded model has tokenize() and detokenize()",
    "SamplingParams": ": use treadle.Sampling, or settings of generate()",
    "GenerationConfig": ": use treadle.Sampling, or settings of generate()",
    "WhisperModel": ": treadle.load_speech(path) opens a speech model",
}


def __getattr__(name: str) -> Any:
    # ``treadle --help`` needs neither numpy nor LLVM, so modules that do are imported on first use.
    from importlib import import_module

    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    if name in __all__:
        return getattr(import_module("treadle.errors"), name)
    if name in _MODULES:
        return import_module(_MODULES[name])
    import sys

    # With ``obj``, Python's traceback suggests the most similar name of ``__dir__``.
    raise AttributeError(
        f"module 'treadle' has no attribute {name!r}{_OF_OTHERS.get(name, '')}",
        name=name,
        obj=sys.modules[__name__],
    )


def __dir__() -> list[str]:
    # The names that users need. ``help`` and ``dir`` sort by name: the exceptions would fill the
    # first screens, so ``errors`` lists them; the packages are in the comment at the top.
    return [*_LAZY, "errors", "__version__"]
