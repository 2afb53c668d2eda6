"""Reads a Whisper file's keys and tensors as the configurations of its plans."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import replace
from math import prod

from treadle.base.fast_classes import dataclass
from treadle.convert.whisper.file import (
    ALIGNMENT_HEADS,
    BEGIN_SUPPRESS,
    SUPPRESS,
    TOKENS,
    non_speech,
)
from treadle.convert.whisper.languages import LANGUAGES, N_TEXT_ENGLISH
from treadle.convert.whisper.names import ARCH, CONVOLUTIONS, DEC, EMBEDDINGS, ENC
from treadle.errors import FileError
from treadle.files.gguf import GGUF
from treadle.files.metadata import GGUFArray
from treadle.models.arch import POSITIONS, Arch
from treadle.models.config import Config, Layer
from treadle.models.graphs import GRAPHS
from treadle.models.keys import N_LAYER_MAX, ArchMetadata
from treadle.models.structure import check_tensors
from treadle.models.towers.config import TowerConfig
from treadle.models.towers.stages import NormStage
from treadle.models.towers.whisper import GELU, TAPS, whisper_stems, whisper_tower
from treadle.speech.alignment_heads import usual_heads
from treadle.speech.config import SpecialIds, SpeechConfig
from treadle.tokenizer.bpe import BYTE_OF_LETTER

ROUNDED = "bf16"  # activations of BF16 products; rounding costs 1e-3 here, so f32
ABSENT = -1  # id of a token that the vocabulary lacks
_OUTPUT = re.compile(r"(?<=attn_)o(?=\.(?:weight|bias)$)")  # graphs name it attn_output
_LANGUAGE = re.compile(rb"<\|([a-z]{2,3})\|>")


@dataclass(frozen=True)
class SideSizes:
    """Sizes of the encoder or of the decoder. ``n_ctx``: number of rows of its position table."""

    n_ctx: int
    n_embd: int
    n_layer: int
    n_head: int
    n_ff: int


@dataclass(frozen=True, eq=False)
class WhisperParts:
    """The parts of a Whisper file: views of its tensors under the graphs' names, and
    configurations.

    encoder, decoder: the tensors of each side.
    stems, tower: the encoder's convolutions and its layers.
    text: the decoder's layers.
    keys: the graph that computes the cross attention's keys and values from the encoder's states.
    """

    config: SpeechConfig
    encoder: GGUF
    stems: tuple[TowerConfig, ...]
    tower: TowerConfig
    decoder: GGUF
    text: Config
    keys: Config


def read_parts(gguf: GGUF) -> WhisperParts:
    """Read and check a file's keys and tensors. Raises FileError, which names the key or tensor."""
    keys = ArchMetadata(gguf, ARCH)
    encoder, decoder = _side(keys, "encoder"), _side(keys, "decoder")
    if encoder.n_embd != decoder.n_embd:
        what = f"is {decoder.n_embd}"
        keys.fail("decoder.embedding_length", what, f"{encoder.n_embd}, as the encoder's")
    eps = keys.number("attention.layer_norm_epsilon", 1e-5, lo=0.0, hi=1.0)
    n_mels = keys.integer("encoder.mels_count", hi=1024)
    n_vocab = keys.n_rows(f"{EMBEDDINGS}.weight")
    if not n_vocab:
        raise FileError("the tensor is missing", path=gguf.path, where=f"{EMBEDDINGS}.weight")
    text_view = _view(gguf, DEC, also=EMBEDDINGS)
    text = _decoder_config(encoder, decoder, n_vocab, eps)
    optional, ignored = check_tensors(text_view, GRAPHS[text.arch.graph], text)
    text = replace(text, optional=optional, ignored=ignored)
    return WhisperParts(
        config=_speech_config(gguf, keys, encoder, decoder, n_mels, n_vocab),
        encoder=_view(gguf, ENC),
        stems=whisper_stems(ARCH, n_mels, encoder.n_embd),
        tower=_tower_config(encoder, eps),
        decoder=text_view,
        text=text,
        keys=replace(text, arch=replace(text.arch, graph="cross_keys")),
    )


def _side(keys: ArchMetadata, side: str) -> SideSizes:
    n_embd = keys.integer(f"{side}.embedding_length")
    n_head = keys.integer(f"{side}.attention.head_count")
    if n_embd % n_head:
        what = f"{n_head} does not divide {side}.embedding_length {n_embd}"
        keys.fail(f"{side}.attention.head_count", what)
    return SideSizes(
        keys.integer(f"{side}.context_length", hi=1 << 20),
        n_embd,
        keys.integer(f"{side}.block_count", hi=N_LAYER_MAX),
        n_head,
        keys.integer(f"{side}.feed_forward_length"),
    )


def _view(gguf: GGUF, prefix: str, also: str = "") -> GGUF:
    """Return a view of the file with only the tensors whose names begin with ``prefix``, which is
    removed, and those of the stem ``also``; kernels of convolutions become matrices.
    """
    made = copy.copy(gguf)
    made.tensors = {}
    for name, tensor in gguf.tensors.items():
        if not (name.startswith(prefix) or (also and name.startswith(f"{also}."))):
            continue
        if name.removesuffix(".weight") in CONVOLUTIONS and len(tensor.shape) == TAPS:
            tensor = replace(tensor, shape=(tensor.shape[0], prod(tensor.shape[1:])))
        if name.endswith(".bias") and len(tensor.shape) > 1:  # [n, 1] in files of whisper.cpp
            tensor = replace(tensor, shape=(prod(tensor.shape),))
        if tensor.format is not None and tensor.format.act == ROUNDED:
            tensor = replace(tensor, format=replace(tensor.format, act="f32"))
        made.tensors[_OUTPUT.sub("output", name.removeprefix(prefix))] = tensor
    return made


def _tower_config(sizes: SideSizes, eps: float) -> TowerConfig:
    return whisper_tower(
        f"{ARCH} encoder",
        n_embd=sizes.n_embd,
        n_layer=sizes.n_layer,
        n_head=sizes.n_head,
        n_ff=sizes.n_ff,
        norm_eps=eps,
        tail=(NormStage("output_norm"),),
    )


def _decoder_config(encoder: SideSizes, decoder: SideSizes, n_vocab: int, eps: float) -> Config:
    dims = decoder.n_embd // decoder.n_head
    layers = (
        Layer(
            n_head=decoder.n_head,
            n_head_kv=decoder.n_head,
            head_dim=dims,
            head_dim_v=dims,
            n_ff=decoder.n_ff,
            kv_from=i,
            rope=None,
            ffn="plain",
            n_cross=encoder.n_ctx,
        )
        for i in range(decoder.n_layer)
    )
    return Config(
        arch=Arch(
            f"{ARCH} decoder",
            graph="cross_decoder",
            rope="none",
            activation=GELU,
            gated=False,
            norm="layer",
            needs=POSITIONS,
        ),
        n_embd=decoder.n_embd,
        n_vocab=n_vocab,
        n_ctx_train=decoder.n_ctx,
        norm_eps=eps,
        embd_scale=1.0,
        attn_scale=dims**-0.5,
        attn_softcap=0.0,
        logit_scale=1.0,
        logit_softcap=0.0,
        pooling="none",
        ropes=(),
        layers=tuple(layers),
        n_positions=decoder.n_ctx,
    )


# -- the vocabulary and lists of ids ---------------------------------------------------------------


def _speech_config(
    gguf: GGUF,
    keys: ArchMetadata,
    encoder: SideSizes,
    decoder: SideSizes,
    n_mels: int,
    n_vocab: int,
) -> SpeechConfig:
    tokens = gguf.metadata.get(TOKENS)
    if not isinstance(tokens, GGUFArray):
        raise FileError("is missing", path=gguf.path, where=TOKENS, expected="a vocabulary")
    raws = tokens.raws()[:n_vocab]
    special = _special_ids(gguf, raws)
    never = _ids(keys, SUPPRESS, n_vocab)
    first = _ids(keys, BEGIN_SUPPRESS, n_vocab)
    if not never:
        text = [_bytes(raw) for raw in raws[: special.eot]]
        tasks = special.sot, special.translate, special.transcribe, special.sot_lm
        more = (*tasks, special.sot_prev, special.no_speech)
        never = (*non_speech(text, special.eot), *sorted(i for i in more if i != ABSENT))
        first = first or (*_blank(text), special.eot)
    return SpeechConfig(
        n_mels=n_mels,
        n_vocab=n_vocab,
        n_embd=decoder.n_embd,
        n_audio_ctx=encoder.n_ctx,
        n_text_ctx=decoder.n_ctx,
        n_audio_layer=encoder.n_layer,
        n_text_layer=decoder.n_layer,
        special=special,
        suppress=never,
        begin_suppress=first,
        alignment_heads=_heads(keys, decoder, n_vocab),
    )


def _special_ids(gguf: GGUF, raws: Sequence[bytes]) -> SpecialIds:
    """Return the ids of the special tokens, found by their names among ``raws``, the bytes of all
    tokens. Raises FileError if the end-of-text or start-of-transcript token is missing.
    """
    ids = {raw: i for i, raw in enumerate(raws) if raw.startswith(b"<|")}

    def find(*names: str) -> int:
        return next((ids[n] for each in names if (n := f"<|{each}|>".encode()) in ids), ABSENT)

    eot, sot = find("endoftext"), find("startoftranscript")
    if ABSENT in (eot, sot):
        name = "<|endoftext|>" if eot == ABSENT else "<|startoftranscript|>"
        raise FileError("is missing", path=gguf.path, where=TOKENS, expected=f"the token {name}")
    no_timestamps = find("notimestamps")
    languages = {}
    if eot != N_TEXT_ENGLISH:
        known = set(LANGUAGES)
        for raw, i in ids.items():
            code = _LANGUAGE.fullmatch(raw)
            if code and code[1].decode() in known and i > sot:
                languages[code[1].decode()] = i
    return SpecialIds(
        eot=eot,
        sot=sot,
        translate=find("translate"),
        transcribe=find("transcribe"),
        sot_lm=find("startoflm"),
        sot_prev=find("startofprev"),
        no_speech=find("nospeech", "nocaptions"),
        no_timestamps=no_timestamps,
        timestamp_begin=ABSENT if no_timestamps == ABSENT else no_timestamps + 1,
        languages=languages,
    )


def _bytes(raw: bytes) -> bytes:
    """Return the bytes of a token that is spelt in GPT-2's letters for bytes; b"" for any other."""
    try:
        return bytes(BYTE_OF_LETTER[letter] for letter in raw.decode())
    except (KeyError, UnicodeDecodeError):
        return b""


def _blank(text: Sequence[bytes]) -> tuple[int, ...]:
    return (text.index(b" "),) if b" " in text else ()


def _ids(keys: ArchMetadata, full: str, n_vocab: int) -> tuple[int, ...]:
    """Return the list of ids under the key ``full``, given with the architecture's prefix; () if it
    is missing. Raises FileError for an id outside the vocabulary.
    """
    key = full.removeprefix(f"{ARCH}.")
    found = keys.get(key)
    if found is None:
        return ()
    if not isinstance(found, Sequence) or isinstance(found, (str, bytes)):
        keys.fail(key, f"is {found!r:.60}", "a list of ids")
    ids = tuple(int(each) for each in found)
    if wrong := [i for i in ids if not 0 <= i < n_vocab]:
        keys.fail(key, f"has {wrong[0]}", f"ids below {n_vocab}")
    return ids


def _heads(keys: ArchMetadata, decoder: SideSizes, n_vocab: int) -> tuple[tuple[int, int], ...]:
    """Return (layer, head) of the alignment heads that the file lists, or ``usual_heads`` for the
    decoder's sizes if it has no list. Raises FileError for a layer or head that it does not have.
    """
    key = ALIGNMENT_HEADS.removeprefix(f"{ARCH}.")
    found = keys.get(key)
    if found is None:
        return usual_heads(decoder.n_layer, decoder.n_head, n_vocab)
    if not isinstance(found, Sequence) or isinstance(found, (str, bytes)) or len(found) % 2:
        keys.fail(key, f"is {found!r:.60}", "pairs of a layer and a head")
    numbers = [int(each) for each in found]
    heads = tuple(zip(numbers[::2], numbers[1::2], strict=True))
    for layer, head in heads:
        if not (0 <= layer < decoder.n_layer and 0 <= head < decoder.n_head):
            keys.fail(key, f"has head {head} of layer {layer}", "heads of the decoder")
    return heads
