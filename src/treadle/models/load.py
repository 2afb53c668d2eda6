"""load_config: a ``Config`` from a file's header, with every number and tensor checked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.errors import FileError, UnsupportedError
from treadle.models.arch import ROPE_SECTIONED, ROPES, Arch
from treadle.models.archs import ARCHS, row_of
from treadle.models.config import Config, MediaTraits
from treadle.models.graphs import GRAPHS
from treadle.models.graphs.nextn import is_nextn_alone
from treadle.models.ignored_tensors import IS_SPEECH, LEFT_OUT, SPEECH
from treadle.models.keys import ENC, N_DECODER_LAYER, NEXTN, ArchMetadata
from treadle.models.pooling_head import DENSE
from treadle.models.structure import check_tensors, find_factors, layer_of
from treadle.models.unread_tensors import warn_of_unread

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF

# Tensors of the head that scores pairs (api/rerank.py), and of matrices after pooling.
READ_ELSEWHERE = ("cls.", *DENSE)
SECTIONS = "rope.dimension_sections"  # M-RoPE: pairs of a head per component of a position
DEEPSTACK = "n_deepstack_layers"  # layers after which rows of pictures are added
ROPE_KEY = "treadle.rope"  # overrides the architecture's, for weights without reordered rows


def load_config(gguf: GGUF, *, warn: bool = True) -> Config:
    """Return the config of a language model, after a check of its hyper-parameters and tensor
    table. Tensors in ``gguf`` are renamed to the graph's names.

    Missing keys get llama.cpp's defaults. Raises FileError, naming the key or tensor, for a number
    out of range, sizes that do not divide, a missing tensor, a wrong shape, or a tensor that
    belongs to another kind of layer; UnsupportedError for an unsupported architecture or rope
    scaling. ``warn``: log the tensors that are not used.
    """
    arch = find_arch(gguf)
    keys = ArchMetadata(gguf, arch.name, arch.keys)
    graph = GRAPHS[arch.graph]
    if not gguf.tensors:
        raise FileError("no tensors: the file holds a vocabulary only", path=gguf.path)
    rename(gguf, arch)
    if arch.nextn and is_nextn_alone(gguf, arch):
        what = (
            "has only MTP layers, which draft for their model: load that one, and pass this file "
            "with --draft"
        )
        raise UnsupportedError(f"{gguf.path}: {what} (draft=...)")
    config = graph.read(keys, arch)
    optional, ignored = check_tensors(gguf, graph, config)
    factors, ignored = find_factors(gguf, config, ignored)
    if config.encoder is not None:
        own = [name for name in ignored if not name.startswith(ENC)]
        _refuse_surplus_layers(keys, own, config.n_layer, N_DECODER_LAYER)
    _refuse_surplus_layers(keys, ignored, keys.integer("block_count", lo=1))
    _refuse_too_few_layers(keys, ignored, config.n_layer)
    config = replace(
        config,
        optional=optional,
        factors=factors,
        ignored=ignored,
        media=_read_media(keys, arch, config),
    )
    if warn:
        warn_of_unread(gguf, config)
    return config


def _read_media(keys: ArchMetadata, arch: Arch, config: Config) -> MediaTraits:
    """Return how the decoder reads rows of pictures and sound. An invalid list of M-RoPE sections
    counts as none, since it does not matter for text.
    """
    given = keys.get(SECTIONS)
    sections: tuple[int, ...] = ()
    if isinstance(given, Sequence) and not isinstance(given, str | bytes):
        found = tuple(each for each in given[:3] if isinstance(each, int) and each >= 0)
        sections = found if len(found) == len(given[:3]) == 3 and any(found[1:]) else ()
    spans = "" if config.n_embd in arch.causal_widths else arch.spans
    n_deepstack = keys.integer(DEEPSTACK, 0, lo=0, hi=config.n_layer)
    return MediaTraits(sections, arch.interleaved, spans, n_deepstack)


def unread_tensors(config: Config) -> tuple[str, ...]:
    """Return the names of the file's tensors that nothing reads and that valid files do not usually
    have.
    """
    graph = GRAPHS[config.arch.graph]
    return tuple(
        name
        for name in config.ignored
        if not (name.startswith(READ_ELSEWHERE) or graph.unread(config, name))
    )


def rename(gguf: GGUF, arch: Arch) -> None:
    """Rename the tensors of ``gguf``, in place, to the names of the architecture's graph."""
    for theirs, name in arch.names:
        gguf.tensors = {renamed(key, theirs, name): at for key, at in gguf.tensors.items()}


def renamed(key: str, theirs: str, name: str) -> str:
    """Return the tensor name ``key`` with ``theirs`` replaced by ``name``: if ``theirs`` ends with
    a dot, at the beginning of ``key``; else if ``key`` is ``theirs``, perhaps after "blk.N.". Any
    other ``key`` is returned unchanged.
    """
    if theirs.endswith("."):
        return name + key.removeprefix(theirs) if key.startswith(theirs) else key
    is_it = key == theirs or key.endswith(f".{theirs}")
    return key.removesuffix(theirs) + name if is_it else key


def _refuse_surplus_layers(
    keys: ArchMetadata, ignored: Sequence[str], n_layer: int, key: str = "block_count"
) -> None:
    """Raise FileError if an ignored tensor belongs to a layer of number ``n_layer`` or more: the
    model would lose that layer. ``key``: the key that states ``n_layer``, for the message.
    """
    for name in ignored:
        if (layer := layer_of(name)[0]) >= n_layer:
            raise FileError(
                f"belongs to layer {layer}, but {keys.arch}.{key} is {n_layer}",
                path=keys.gguf.path,
                where=name,
                expected=f"tensors of only {n_layer} layers",
            )


def _refuse_too_few_layers(keys: ArchMetadata, ignored: Sequence[str], n_layer: int) -> None:
    """Raise FileError if a layer from ``n_layer`` on, which counts as an MTP layer, has ignored
    tensors but none for MTP ("nextn").
    """
    said = {layer_of(name)[0] for name in ignored if ".nextn." in name}
    for i in sorted({layer_of(name)[0] for name in ignored} - said):
        if i >= n_layer:
            keys.fail(
                NEXTN,
                f"counts layer {i} as an MTP layer, but it has no nextn tensors",
                "the number of MTP layers at the end",
            )


def find_arch(gguf: GGUF) -> Arch:
    """Return the file's architecture. Raises UnsupportedError for one that is not supported and for
    files of another kind (adapters, control vectors, speech), FileError if the file names none.
    """
    if gguf.metadata.get("general.type") == "adapter":
        what = (
            "a LoRA adapter, not a model: load its model and pass this file with --lora (lora=...)"
        )
        raise UnsupportedError(f"{gguf.path}: {what}")
    name = gguf.metadata.get("general.architecture")
    if name == "controlvector":
        what = (
            "a control vector, not a model: load its model and pass this file with "
            "--control-vector (control_vectors=...)"
        )
        raise UnsupportedError(f"{gguf.path}: {what}")
    if not isinstance(name, str):
        raise FileError(
            "is missing" if name is None else f"is {name!r}",
            path=gguf.path,
            where="general.architecture",
            expected="the name of an architecture",
        )
    if name in SPEECH:
        raise UnsupportedError(f"{gguf.path}: {IS_SPEECH}")
    if name in LEFT_OUT:
        what = f"architecture {name!r}: not supported: {LEFT_OUT[name]}"
        raise UnsupportedError(f"{gguf.path}: {what}")
    if name not in ARCHS:
        meant = next((arch for arch in ARCHS if _is_misspelling(name, arch)), None)
        hint = f"; did you mean {meant}?" if meant else ""
        raise UnsupportedError(
            f"{gguf.path}: architecture {name!r:.80}: treadle supports {', '.join(ARCHS)}{hint}"
        )
    arch = row_of(name, gguf.metadata)
    asked = gguf.metadata.get(ROPE_KEY)
    if asked is None:
        return replace(arch, rope="neox") if _has_sections(gguf, name) else arch
    for rope in ROPES:
        if rope == asked:
            return replace(arch, rope=rope)
    expected = " or ".join(ROPES)
    raise FileError(f"is {asked!r}", path=gguf.path, where=ROPE_KEY, expected=expected)


def _has_sections(gguf: GGUF, name: str) -> bool:
    """Return whether a file of the architecture ``name`` has M-RoPE sections, and therefore rotates
    the pairs (i, i + dims/2), where other files of the architecture rotate neighbours: llama.cpp's
    converter orders their rows so. As in llama.cpp, the first two sections must be positive.
    """
    given = gguf.metadata.get(f"{name}.{SECTIONS}")
    shares = given if isinstance(given, Sequence) and not isinstance(given, str) else ()
    two = len(shares) > 1 and all(isinstance(each, int) and each > 0 for each in shares[:2])
    return two and bool(dict(ARCHS[name].keys).get(ROPE_SECTIONED))


def _is_misspelling(name: str, arch: str) -> bool:
    """Return whether ``name`` is ``arch`` misspelt: case, punctuation, a lost letter, two swapped
    ones.

    A different digit or an additional letter means another architecture: gemma, gemma3n and mllama
    all exist.
    """
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    if re.sub(r"\D", "", plain) != re.sub(r"\D", "", arch):
        return False
    cut = range(len(arch))
    lost = {arch[:i] + arch[i + 1 :] for i in cut}
    swapped = {arch[:i] + arch[i : i + 2][::-1] + arch[i + 2 :] for i in cut}
    return plain == arch or plain in lost | swapped
