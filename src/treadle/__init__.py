"""treadle: language models on the machine you have.

::

    import treadle

    model = treadle.load("model.gguf")
    for piece in model.generate("Once upon a time", max_tokens=64):
        print(piece, end="", flush=True)

``treadle.errors`` draws the tree of exceptions; all of them are ``TreadleError``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treadle.errors import (
    CacheError,
    CompileError,
    ContextFullError,
    FileError,
    GrammarError,
    SamplingError,
    TemplateError,
    TreadleError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from treadle.model import Model, load
    from treadle.sampling import Sampling

__version__ = "0.1.0"
__all__ = [
    "CacheError",
    "CompileError",
    "ContextFullError",
    "FileError",
    "GrammarError",
    "Model",
    "Sampling",
    "SamplingError",
    "TemplateError",
    "TreadleError",
    "UnsupportedError",
    "load",
]

_LAZY = {"Model": "treadle.model", "load": "treadle.model", "Sampling": "treadle.sampling"}


def __getattr__(name: str) -> Any:
    # ``treadle --help`` needs neither numpy nor LLVM, so what does is imported when it is first
    # asked for.
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'treadle' has no attribute {name!r}")
