"""The tiny Whisper model of shared/data/media, and writers of other programs' files of it."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from treadle.convert.whisper.ggml import GgmlWhisper
from treadle.convert.whisper.names import CT2
from treadle.convert.whisper.open import open_whisper
from treadle.files.gguf import GGUF
from treadle.formats import by_name
from treadle.speech.model import SpeechModel, open_speech_model

F32, I8, F16 = 0, 1, 4  # types of CTranslate2's files


def folder_of(data: Path) -> Path:
    return data / "media" / "whisper"


def truth_of(data: Path) -> dict[str, np.ndarray]:
    return dict(np.load(folder_of(data) / "truth.npz"))


def opened(path: Path, **settings: Any) -> SpeechModel:
    given: dict[str, Any] = {"threads": 1, "exact": True, "max_windows": 4, "max_rows": 8}
    return open_speech_model(path, **given | settings)


def off(found: np.ndarray, truth: np.ndarray) -> float:
    """The largest error by the largest value."""
    assert found.shape == truth.shape
    return float(np.abs(found - truth).max() / np.abs(truth).max())


def logits_off(model: SpeechModel, truth: Mapping[str, np.ndarray]) -> float:
    """The largest error of logits by the largest, behind each of the truth's ids from the sixth
    on.
    """
    (window,) = model.encode(truth["input_features"])
    with window, model.decoder([window]) as batch:
        ids = truth["decoder_input_ids"][0].tolist()
        prompt = batch.step([ids[:6]])
        found = np.concatenate([prompt, *(batch.step([[i]]) for i in ids[6:])])
    return off(found, truth["logits"][5:])


def weights_off(model: GGUF, truth: GGUF) -> float:
    """The largest error of a matrix' weight by the largest of its matrix."""
    assert model.tensors.keys() == truth.tensors.keys()
    pairs = ((model.tensors[name], tensor) for name, tensor in truth.tensors.items())
    return max(off(found.dequantize(), tensor.dequantize()) for found, tensor in pairs)


# -- whisper.cpp ----------------------------------------------------------------------------------


def quantised_ggml(source: Path, target: Path, name: str) -> None:
    """Write a file of whisper.cpp again, with matrices in another format where it fits."""
    fmt = by_name(name)
    raw = source.read_bytes()
    file = GgmlWhisper(source)
    # Tensors are in the file's order: what lies before the first one's header is copied.
    at = 4 * (12 + 2) + 4 * 80 * 201
    (n,) = struct.unpack_from("<I", raw, at)
    at += 4
    for _ in range(n):
        at += 4 + struct.unpack_from("<I", raw, at)[0]
    made = raw[:at]
    for tensor in file.tensors.values():
        n_dims, n_name, kind = struct.unpack_from("<3I", raw, at)
        head = raw[at : at + 12 + 4 * n_dims + n_name]
        data = tensor.data.tobytes()
        at += len(head) + len(data)
        if len(tensor.shape) == 2 and kind == 1 and tensor.shape[-1] % fmt.block == 0:
            rows = tensor.dequantize().reshape(-1, tensor.shape[-1])
            data = fmt.quantize_rows(rows).tobytes()
            head = head[:8] + struct.pack("<I", fmt.ggml_id) + head[12:]
        made += head + data
    target.write_bytes(made)
    file.close()


# -- CTranslate2 ----------------------------------------------------------------------------------


def write_ct2(folder: Path, model: GGUF, kind: int, *, tokenizer: bool = True) -> Path:
    """Write a model as CTranslate2's converter does: matrices of one type, fused ones as one."""
    names: list[tuple[str, int, bytes, tuple[int, ...]]] = []

    def put(name: str, values: np.ndarray) -> None:
        if kind == I8 and values.ndim > 1 and not name.endswith("encodings"):
            flat = values.reshape(len(values), -1)
            by = (127 / np.abs(flat).max(1)).astype(np.float32)
            codes = np.rint(flat * by[:, None]).astype(np.int8)
            names.append((name, I8, codes.tobytes(), values.shape))
            names.append((f"{name}_scale", F32, by.tobytes(), by.shape))
            return
        dtype = np.float16 if kind == F16 else np.float32
        names.append(
            (name, F16 if kind == F16 else F32, values.astype(dtype).tobytes(), values.shape)
        )

    def get(name: str, like: str = "") -> np.ndarray:
        if name in model.tensors:
            return model.tensors[name].dequantize()
        return np.zeros(model.tensors[like].shape[0], np.float32)

    spelt = {"decoder": "dec.", "encoder": "enc."}
    for side, prefix in spelt.items():
        put(f"{side}/position_encodings/encodings", get(f"{prefix}position_embd.weight"))
        outside = {"conv1": "conv1d.1", "conv2": "conv1d.2", "layer_norm": "output_norm"}
        for theirs, ours in outside.items():
            _put_pair(put, get, f"{side}/{theirs}", [f"{prefix}{ours}"], model)
        for i in range(2):
            for theirs, ours in CT2.inside.items():
                stems = [f"{prefix}blk.{i}.{name}" for name in ours.split()]
                name = f"{side}/layer_{i}/{theirs.replace('.', '/')}"
                _put_pair(put, get, name, stems, model)
        n_head = int(model.metadata[f"whisper.{side}.attention.head_count"])  # type: ignore[arg-type]
        names.append((f"{side}/num_heads", 2, struct.pack("<h", n_head), ()))
    put("decoder/embeddings/weight", get("token_embd.weight"))
    folder.mkdir(exist_ok=True)
    (folder / "model.bin").write_bytes(_ct2_bytes(names))
    tokens = [raw.decode() for raw in model.metadata["tokenizer.ggml.tokens"].raws()]  # type: ignore[union-attr]
    (folder / "vocabulary.json").write_text(json.dumps(tokens))
    lists = {"alignment_heads": [[1, 0], [1, 3]], "suppress_ids": [3], "suppress_ids_begin": [4]}
    (folder / "config.json").write_text(json.dumps(lists))
    if tokenizer:
        (folder / "tokenizer.json").write_bytes((model.path / "tokenizer.json").read_bytes())
    return folder


def _put_pair(put: Any, get: Any, name: str, stems: list[str], model: GGUF) -> None:
    """Put a weight and a bias; fused ones behind each other, zeros for a missing bias."""
    if f"{stems[0]}.weight" not in model.tensors:
        return
    norm = "norm" in name
    put(
        f"{name}/{'gamma' if norm else 'weight'}",
        np.concatenate([get(f"{s}.weight") for s in stems]),
    )
    biases = [get(f"{stem}.bias", f"{stem}.weight") for stem in stems]
    put(f"{name}/{'beta' if norm else 'bias'}", np.concatenate(biases))


def _ct2_bytes(names: Iterable[tuple[str, int, bytes, tuple[int, ...]]]) -> bytes:
    def string(text: str) -> bytes:
        return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"

    listed = list(names)
    made = struct.pack("<I", 6) + string("WhisperSpec") + struct.pack("<II", 3, len(listed))
    for name, kind, data, shape in listed:
        made += string(name) + struct.pack(f"<B{len(shape)}I", len(shape), *shape)
        made += struct.pack("<BI", kind, len(data)) + data
    aliases = {"decoder/projection/weight": "decoder/embeddings/weight"}
    made += struct.pack("<I", len(aliases))
    return made + b"".join(string(alias) + string(of) for alias, of in aliases.items())


def folder_model(data: Path) -> GGUF:
    return open_whisper(folder_of(data))
