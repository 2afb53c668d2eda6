"""A model that the router may load, as the command line and presets describe it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from treadle.base.fast_classes import dataclass

KV_BYTES = {  # size of a KV cache relative to f16
    "f16": 1.0,
    "bf16": 1.0,
    "f32": 2.0,
    "q8_0": 0.54,
    "q5_1": 0.44,
    "q5_0": 0.38,
    "iq4_nl": 0.29,
    "q4_0": 0.29,
}


def kv_share(kv: str | None) -> float:
    """Return the size of a KV cache of type ``kv``, or of two types KEYS-VALUES, relative to f16;
    None means f16.
    """
    keys, _, values = (kv or "f16").partition("-")
    return (KV_BYTES.get(keys, 1.0) + KV_BYTES.get(values or keys, 1.0)) / 2


@dataclass(frozen=True)
class MemoryRequest:
    """The memory that a model's options ask for. Its KV cache has a bound in bytes (``n_bytes``),
    or ``n_sequences`` of ``context`` tokens, or ``n_tokens`` of all sequences together; ``kv`` is
    the type of keys and values. ``files``: of a draft model, adapters and control vectors.
    """

    kv: str | None = None
    context: int | None = None
    n_sequences: int = 4
    n_bytes: int | None = None
    n_tokens: int | None = None
    files: tuple[str, ...] = ()

    @classmethod
    def of(cls, loading: dict[str, Any]) -> MemoryRequest:
        """Return the request in ``loading``, keyword arguments of ``treadle.load``. Where
        ``kv_tokens`` is given, the default bound in bytes is dropped: the router has its own.
        """
        n_tokens = loading.get("kv_tokens")
        named = *(loading.get("lora") or ()), *(loading.get("control_vectors") or ())
        adapters = (path for path, _ in named)
        return cls(
            kv=loading.get("kv"),
            context=loading.get("context"),
            n_sequences=loading.get("n_sequences") or 1,
            n_bytes=None if n_tokens else loading.get("kv_bytes"),
            n_tokens=n_tokens,
            files=tuple(filter(None, (loading.get("draft"), *adapters))),
        )


@dataclass(frozen=True)
class ServedModel:
    """A model that the router may load.

    name, aliases: by which clients call it. ref: MODEL as ``treadle serve`` takes it: a path,
    ``hf:`` or a short name. args: options of ``treadle serve`` for its engine, without those about
    clients (addresses, keys). pinned: it stays loaded. idle_s: seconds without a call after which
    it is unloaded; None for the router's own, infinity for never. cache: the memory that its
    options ask for. source: where it was named, for messages; from_library: clients may remove it.
    stamp: time (ns) and size of a file that was found in a folder, so that another one of its name
    is noticed.
    """

    name: str
    ref: str
    args: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    pinned: bool = False
    idle_s: float | None = None
    cache: MemoryRequest = MemoryRequest()
    source: str = ""
    from_library: bool = False
    stamp: tuple[int, int] | None = None

    def path(self) -> Path | None:
        """Return the model's file or folder; None if it is not on this machine, or if several
        fit.
        """
        from treadle.catalog.names import find_named
        from treadle.errors import TreadleError
        from treadle.files.splits import first_shard, is_hf, model_inside

        try:
            if self.ref.startswith("hf:"):
                return hub_path(self.ref)
            path = Path(self.ref)
            if path.is_dir():
                return path if is_hf(path) else model_inside(path)
            if path.exists():
                return path
            if (first := first_shard(path)) is not None:
                return first
            named = find_named(self.ref)
            return named.model.path if named else None
        except (TreadleError, OSError):
            return None


def hub_path(ref: str) -> Path | None:
    """Return the path of the downloaded model that ``ref`` (``hf:...``) names; None if there is
    none, or if several fit.
    """
    from treadle.catalog.stored import find_stored
    from treadle.hub import parse

    name = parse(ref)
    whole = [model for model in find_stored() if model.repo == name.repo and model.is_whole]
    if name.path:
        whole = [m for m in whole if m.inside == name.path or m.inside.startswith(f"{name.path}/")]
    if name.tag:
        whole = [model for model in whole if model.tag == name.tag.upper()]
    return whole[0].path if len(whole) == 1 else None
