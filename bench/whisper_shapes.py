"""Write Whisper models of random weights in the shapes of published ones, to measure speed with.

::

    python bench/whisper_shapes.py large-v3-turbo FOLDER --tokenizer WHISPER-BASE [--tokens 80]

FOLDER gets the same weights in F16 three times: ``hf`` (Hugging Face), ``ct2`` (CTranslate2, for
faster-whisper) and ``ggml.bin`` (whisper.cpp). WHISPER-BASE is a folder with the ``tokenizer.json``
of any multilingual Whisper.

The table of positions is such that every program writes the same text, whatever it hears: row ``p``
is close to the embedding of the token that follows there, and the layers add little to it. The text
has ``--tokens`` tokens, lasts for the whole window, and is good enough for every program's tests of
doubtful texts, so all decode it once. It is right in a sound's first window: in later ones the text
before moves the positions.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

from treadle.convert.whisper.file import TOKENS, WhisperFile, non_speech
from treadle.convert.whisper.languages import LANGUAGES, N_TEXT, special_names
from treadle.convert.whisper.names import CT2, DEC, EMBEDDINGS, ENC, GGML, HF, Spelling
from treadle.convert.whisper.open import open_whisper
from treadle.files.gguf import GGUF
from treadle.media.mel import mel_filters
from treadle.tokenizer.bpe import BYTE_OF_LETTER

N_AUDIO_CTX = 1500
N_TEXT_CTX = 448
N_HEAD_DIM = 64
NORM = 8.0  # of a row of positions; an embedding's is 1
ADDED = 0.2  # norm of what an attention or FFN adds to a row
SIDES = {"encoder": ENC, "decoder": DEC}
I8_CT2, I16_CT2, F16_CT2 = 1, 2, 4  # CTranslate2's types of numbers
SETTINGS = (
    ("activation", I8_CT2, 3),  # GELU
    ("alibi", I8_CT2, 0),
    ("alibi_use_positive_positions", I8_CT2, 0),
    ("alignment_heads", I16_CT2, 1),
    ("alignment_layer", I16_CT2, -1),
    ("pre_norm", I8_CT2, 1),
    ("scale_alibi", I8_CT2, 0),
    ("scale_embeddings", I8_CT2, 0),
    ("start_from_zero_embedding", I8_CT2, 0),
)
WORDS = (
    " The harbour lay quiet before the morning, and a few boats came back from the sea with nets"
    " full of small silver fish. An old man counted the baskets, wrote each number into his book,"
    " and asked the youngest of the crew what the weather had been like beyond the lighthouse."
    " Nobody answered at first, because everyone was tired and thought of breakfast instead of"
    " clouds, but the boy said that rain would follow in the afternoon, after the wind had turned."
)


@dataclass(frozen=True)
class WhisperShape:
    """A published model's sizes."""

    n_embd: int
    n_encoder: int
    n_decoder: int
    n_mels: int = 80
    n_vocab: int = 51865

    @property
    def n_head(self) -> int:
        """Heads of each layer."""
        return self.n_embd // N_HEAD_DIM


SHAPES = {
    "tiny": WhisperShape(384, 4, 4),
    "base": WhisperShape(512, 6, 6),
    "small": WhisperShape(768, 12, 12),
    "medium": WhisperShape(1024, 24, 24),
    "large-v3": WhisperShape(1280, 32, 32, 128, 51866),
    "large-v3-turbo": WhisperShape(1280, 32, 4, 128, 51866),
}


# -- the tokenizer and the text --------------------------------------------------------------------


def tokenizer_of(source: Path, n_vocab: int) -> dict[str, Any]:
    """Return a ``tokenizer.json`` with the special tokens of a vocabulary of ``n_vocab``."""
    made: dict[str, Any] = json.loads((source / "tokenizer.json").read_text("utf-8"))
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    names = special_names(n_vocab)
    made["added_tokens"] = [
        {"id": N_TEXT + i, "content": name, **usual, "special": name.rstrip("|>")[-1].isalpha()}
        for i, name in enumerate(names)
    ]
    for name in ("post_processor", "truncation", "padding"):
        made[name] = None
    return made


def planned_ids(tokenizer: Path, n_tokens: int, n_vocab: int) -> list[int]:
    """Return the ids of a prompt, a text of ``n_tokens`` tokens with its times, and the end."""
    from tokenizers import Tokenizer

    words = Tokenizer.from_file(str(tokenizer)).encode(WORDS, add_special_tokens=False).ids
    names = special_names(n_vocab)
    prompt = "<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|0.00|>"
    end = "<|30.00|>", "<|endoftext|>"
    before, behind = ([N_TEXT + names.index(name) for name in each] for each in (prompt, end))
    return [*before, *islice(cycle(words), n_tokens - 2), *behind]


# -- weights ---------------------------------------------------------------------------------------


def tensors_of(shape: WhisperShape, ids: list[int]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name, as treadle's files have it, and the weights of each tensor, f16."""
    rng = np.random.default_rng(0)
    d, n_ff = shape.n_embd, 4 * shape.n_embd

    def normal(*sizes: int, norm: float = 1.0) -> np.ndarray:
        """Return rows of about this norm."""
        made = rng.standard_normal(sizes, np.float32)
        made *= norm / math.sqrt(math.prod(sizes[1:]))
        return made.astype(np.float16)

    embeddings = normal(shape.n_vocab, d)
    yield f"{EMBEDDINGS}.weight", embeddings
    following = [*ids[1:], *[ids[-1]] * N_TEXT_CTX][:N_TEXT_CTX]
    yield f"{DEC}position_embd.weight", (NORM * embeddings[following]).astype(np.float16)
    yield f"{ENC}position_embd.weight", normal(N_AUDIO_CTX, d, norm=1.0)
    for i, width in ((1, shape.n_mels), (2, d)):
        yield f"{ENC}conv1d.{i}.weight", normal(d, width, 3)
        yield f"{ENC}conv1d.{i}.bias", np.zeros(d, np.float16)
    for side, n_layer in ((ENC, shape.n_encoder), (DEC, shape.n_decoder)):
        for name in ("output_norm", *(f"blk.{i}.{n}" for i in range(n_layer) for n in norms(side))):
            yield f"{side}{name}.weight", np.ones(d, np.float16)
            yield f"{side}{name}.bias", np.zeros(d, np.float16)
        for i in range(n_layer):
            for name in attentions(side):
                for part in "qkvo":
                    norm = ADDED / math.sqrt(d) if part == "o" else 1.0
                    yield f"{side}blk.{i}.{name}_{part}.weight", normal(d, d, norm=norm)
                    if part != "k":
                        yield f"{side}blk.{i}.{name}_{part}.bias", np.zeros(d, np.float16)
            for part, n, width, norm in (
                ("up", n_ff, d, 1.0),
                ("down", d, n_ff, ADDED / math.sqrt(d)),
            ):
                yield f"{side}blk.{i}.ffn_{part}.weight", normal(n, width, norm=norm)
                yield f"{side}blk.{i}.ffn_{part}.bias", np.zeros(n, np.float16)


def norms(side: str) -> tuple[str, ...]:
    """Return the names of a layer's norms."""
    cross = ("cross_attn_norm",) if side == DEC else ()
    return ("attn_norm", *cross, "ffn_norm")


def attentions(side: str) -> tuple[str, ...]:
    """Return the names of a layer's attentions."""
    return ("attn", "cross_attn") if side == DEC else ("attn",)


def spelt(spelling: Spelling, ours: str) -> str:
    """Return a program's name of a tensor's stem."""
    if ours == EMBEDDINGS:
        prefix, ours = DEC, ours
    else:
        prefix, ours = ours[:4], ours[4:]
    side = "encoder" if prefix == ENC else "decoder"
    if ours.startswith("blk."):
        _, i, rest = ours.split(".", 2)
        theirs = next(t for t, o in spelling.inside.items() if o == rest)
        return f"{spelling.root}{side}.{spelling.layers}.{i}.{theirs}"
    # The last norm has another name on either side of whisper.cpp's.
    found = [t for t, o in spelling.outside.items() if o == ours]
    return f"{spelling.root}{side}.{found[-1 if side == 'decoder' else 0]}"


# -- a folder of Hugging Face ----------------------------------------------------------------------


def write_hf(folder: Path, shape: WhisperShape, tokenizer: Path, n_tokens: int) -> None:
    """Write the folder of a shape."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(tokenizer_of(tokenizer, shape.n_vocab)), "utf-8")
    ids = planned_ids(path, n_tokens, shape.n_vocab)
    config = {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "d_model": shape.n_embd,
        "encoder_layers": shape.n_encoder,
        "decoder_layers": shape.n_decoder,
        "encoder_attention_heads": shape.n_head,
        "decoder_attention_heads": shape.n_head,
        "encoder_ffn_dim": 4 * shape.n_embd,
        "decoder_ffn_dim": 4 * shape.n_embd,
        "num_mel_bins": shape.n_mels,
        "vocab_size": shape.n_vocab,
        "max_source_positions": N_AUDIO_CTX,
        "max_target_positions": N_TEXT_CTX,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps({"feature_size": shape.n_mels}))
    header: dict[str, Any] = {}
    at = 0
    with (folder / "body").open("wb") as body:
        for name, values in tensors_of(shape, ids):
            stem, _, suffix = name.rpartition(".")
            header[f"{spelt(HF, stem)}.{suffix}"] = {
                "dtype": "F16",
                "shape": values.shape,
                "data_offsets": [at, at + values.nbytes],
            }
            at += values.nbytes
            body.write(values.tobytes())
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with (folder / "model.safetensors").open("wb") as file, (folder / "body").open("rb") as body:
        file.write(struct.pack("<Q", len(raw)) + raw)
        while block := body.read(1 << 24):
            file.write(block)
    (folder / "body").unlink()


# -- a folder of CTranslate2 -----------------------------------------------------------------------


def write_ct2(folder: Path, model: GGUF, source: Path) -> None:
    """Write an open model as a folder of faster-whisper."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "preprocessor_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    tokens = texts_of(model)
    (folder / "vocabulary.json").write_text(json.dumps(tokens), "utf-8")
    names = special_names(len(tokens))
    codes = [f"<|{code}|>" for code in LANGUAGES]
    text = [bytes_of(token) for token in tokens[:N_TEXT]]
    settings = {
        "alignment_heads": [[0, 0]],
        "lang_ids": [N_TEXT + names.index(code) for code in codes if code in names],
        "suppress_ids": non_speech(text, N_TEXT),
        "suppress_ids_begin": [text.index(b" "), N_TEXT],
    }
    (folder / "config.json").write_text(json.dumps(settings))
    arrays = [*ct2_arrays(model)]
    with (folder / "model.bin").open("wb") as file:
        file.write(struct.pack("<I", 6) + ct2_string("WhisperSpec"))
        file.write(struct.pack("<II", 3, len(arrays)))
        for name, kind, shape, stems in arrays:
            data = b"".join(stems) if isinstance(stems, list) else joined(model, stems, shape)
            file.write(ct2_string(name) + struct.pack(f"<B{len(shape)}I", len(shape), *shape))
            file.write(struct.pack("<BI", kind, len(data)) + data)
        file.write(struct.pack("<I", 1))
        file.write(
            ct2_string("decoder/projection/weight") + ct2_string("decoder/embeddings/weight")
        )


def ct2_string(text: str) -> bytes:
    """Return a string as CTranslate2's files have it."""
    return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"


Ct2Array = tuple[str, int, tuple[int, ...], "tuple[str, ...] | list[bytes]"]


def ct2_arrays(model: GGUF) -> Iterator[Ct2Array]:
    """Yield name, type and shape of each array, and the names of the tensors that it joins, or its
    bytes.
    """
    for name, kind, value in SETTINGS:
        data = value.to_bytes(kind, "little", signed=True)  # types 1 and 2 have as many bytes
        yield f"decoder/{name}", kind, (), [data]
    for side, prefix in SIDES.items():
        n_head = int(model.metadata[f"whisper.{side}.attention.head_count"])  # type: ignore[call-overload]
        yield f"{side}/num_heads", I16_CT2, (), [struct.pack("<h", n_head)]
        n_layer = int(model.metadata[f"whisper.{side}.block_count"])  # type: ignore[call-overload]
        rows = [(theirs, [f"{prefix}{ours}"]) for theirs, ours in CT2.outside.items()]
        if side == "decoder":
            rows = [row for row in rows if not row[0].startswith("conv")]
        else:
            rows = [row for row in rows if row[0] != "embeddings"]
        rows = [
            (theirs, [EMBEDDINGS] if theirs == "embeddings" else stems) for theirs, stems in rows
        ]
        for i in range(n_layer):
            for theirs, ours in CT2.inside.items():
                if side == "encoder" and theirs.startswith("attention"):
                    continue
                stems = [f"{prefix}blk.{i}.{each}" for each in ours.split()]
                rows.append((f"layer_{i}/{theirs.replace('.', '/')}", stems))
        for theirs, stems in rows:
            yield from ct2_layer(model, f"{side}/{theirs}", stems)


def ct2_layer(model: GGUF, name: str, stems: list[str]) -> Iterator[Ct2Array]:
    """Yield the weight and the bias of a layer."""
    is_norm = "norm" in name
    weights = tuple(f"{stem}.weight" for stem in stems)
    n, *columns = model.tensors[weights[0]].shape
    suffix = "encodings" if "position" in name else "gamma" if is_norm else "weight"
    yield f"{name}/{suffix}", F16_CT2, (n * len(stems), *columns), weights
    if f"{stems[0]}.bias" in model.tensors or len(stems) > 1:
        biases = tuple(f"{stem}.bias" for stem in stems)
        yield f"{name}/{'beta' if is_norm else 'bias'}", F16_CT2, (n * len(stems),), biases


def joined(model: GGUF, names: tuple[str, ...], shape: tuple[int, ...]) -> bytes:
    """Return the bytes of tensors one behind the other; zeros for those that are missing."""
    size = 2 * math.prod(shape) // len(names)
    return b"".join(
        model.tensors[name].data.tobytes() if name in model.tensors else bytes(size)
        for name in names
    )


def texts_of(model: GGUF) -> list[str]:
    """Return the vocabulary in GPT-2's letters."""
    return [raw.decode() for raw in model.metadata[TOKENS].raws()]  # type: ignore[union-attr]


def bytes_of(token: str) -> bytes:
    """Return the bytes of a token in GPT-2's letters."""
    return bytes(BYTE_OF_LETTER[letter] for letter in token)


# -- a file of whisper.cpp -------------------------------------------------------------------------


def write_ggml(path: Path, model: GGUF, shape: WhisperShape) -> None:
    """Write an open model as a file of whisper.cpp."""
    sides = ((N_AUDIO_CTX, shape.n_encoder), (N_TEXT_CTX, shape.n_decoder))
    head = [shape.n_vocab]
    for n_ctx, n_layer in sides:
        head += [n_ctx, shape.n_embd, shape.n_head, n_layer]
    filters = mel_filters(shape.n_mels).astype(np.float32)
    with path.open("wb") as file:
        file.write(b"lmgg" + struct.pack("<11I", *head, shape.n_mels, 1))
        file.write(struct.pack("<2I", *filters.shape) + filters.tobytes())
        tokens = [bytes_of(token) for token in texts_of(model)[:N_TEXT]]
        file.write(struct.pack("<I", len(tokens)))
        for token in tokens:
            file.write(struct.pack("<I", len(token)) + token)
        for name, tensor in model.tensors.items():
            stem, _, suffix = name.rpartition(".")
            theirs = spelt(GGML, stem)
            if not theirs.endswith("positional_embedding"):
                theirs += f".{suffix}"
            values = tensor.dequantize()
            dims = tensor.shape
            if "conv" in name and suffix == "bias":
                dims = (*dims, 1)
            # whisper.cpp wants vectors and positions in F32.
            is_f16 = len(dims) > 1 and suffix != "bias" and "position" not in name
            data = values.astype(np.float16 if is_f16 else np.float32).tobytes()
            file.write(struct.pack("<3I", len(dims), len(theirs), int(is_f16)))
            file.write(struct.pack(f"<{len(dims)}I", *dims[::-1]) + theirs.encode() + data)


def main() -> None:
    """Write a shape's three models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="WHISPER-BASE")
    parser.add_argument("--tokens", type=int, default=80)
    given = parser.parse_args()
    shape = SHAPES[given.shape]
    write_hf(given.folder / "hf", shape, given.tokenizer, given.tokens)
    with open_whisper(given.folder / "hf") as model:
        assert isinstance(model, WhisperFile)
        write_ct2(given.folder / "ct2", model, given.folder / "hf")
        write_ggml(given.folder / "ggml.bin", model, shape)


if __name__ == "__main__":
    main()
