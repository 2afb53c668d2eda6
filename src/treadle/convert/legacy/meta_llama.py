"""Meta's releases of Llama: ``params.json``, ``consolidated.NN.pth`` and ``tokenizer.model``.

Each .pth holds one rank of a model-parallel run: column-parallel layers keep some rows of the
weight, row-parallel ones some columns, norms are replicated. RoPE pairs are adjacent within a head,
as in GGUF's llama.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.convert.hf.families.registry import FAMILIES
from treadle.convert.hf.rope import read_rope
from treadle.convert.hf.tokenizer.spm_keys import fit_vocabulary, read_spm_keys
from treadle.convert.hf.tokenizer.tiktoken import LLAMA3, LLAMA31, is_tiktoken, read_tiktoken
from treadle.convert.sources.llama_names import ROWS, check_llama, join, llama_keys, named_pieces
from treadle.convert.sources.source import ROPE_FREQS, Source, SourceTensor, f32_tensor
from treadle.errors import FileError
from treadle.files.checkpoint import Checkpoint, CheckpointTensor
from treadle.files.metadata import POSITION_MAX, MetadataReader
from treadle.files.reader import read_head
from treadle.files.safetensors import read_json
from treadle.models.keys import N_LAYER_MAX

PARAMS = "params.json"
SHARD = re.compile(r"consolidated\.(\d+)\.pth")
FLOATS = ("Float", "Half", "BFloat16", "Double")  # accepted element types of weights


def open_meta(path: Path, tokenizer: Path | None = None) -> Source:
    """Open a folder of Meta's, or one of its .pth files, as a source. ``tokenizer``: its tokenizer
    file, by default the one in the folder. Raises FileError, UnsupportedError.
    """
    folder = path if path.is_dir() else path.parent
    params = MetadataReader(read_json(folder / PARAMS), folder / PARAMS)
    shards = [Checkpoint(shard) for shard in find_shards(folder)]
    model = _Model(folder, params, shards)
    keys = model.keys()
    vocabulary = tokenizer or folder / "tokenizer.model"
    keys |= read_vocabulary(vocabulary, scaled=params.flag("use_scaled_rope", False))
    fit_vocabulary(keys, model.n["n_vocab"], vocabulary)
    return Source(folder, keys, model.tensors, shards, model.notes)


def find_shards(folder: Path) -> list[Path]:
    """Return the paths of ``consolidated.00.pth`` and so on, in order. Raises FileError if there
    are none, or one is missing.
    """
    found = {int(m[1]): p for p in folder.iterdir() if (m := SHARD.fullmatch(p.name))}
    if not found:
        raise FileError("no checkpoint", path=folder, expected="consolidated.00.pth")
    for i in range(len(found)):
        if i not in found:
            expected = f"{len(found)} shards, counted from 00"
            raise FileError(f"consolidated.{i:02d}.pth is missing", path=folder, expected=expected)
    return [found[i] for i in range(len(found))]


def read_vocabulary(path: Path, *, scaled: bool) -> dict[str, Any]:
    """Return the ``tokenizer.ggml.*`` keys of a sentencepiece model or of Llama 3's list of ranks;
    ``scaled``: the special tokens are those of Llama 3.1 and later.
    """
    if is_tiktoken(read_head(path, 256, "a tokenizer")):
        return read_tiktoken(path, LLAMA31 if scaled else LLAMA3)
    return read_spm_keys(path)


class _Model:
    """The tensors joined from all ranks, and the settings of ``params.json``."""

    def __init__(self, folder: Path, params: MetadataReader, shards: list[Checkpoint]) -> None:
        self.folder = folder
        self.params = params
        self.shards = shards
        self.notes: list[str] = []
        n_embd = params.integer("dim")
        n_head = params.integer("n_heads")
        self.n = {
            "n_embd": n_embd,
            "n_head": n_head,
            "n_head_kv": params.integer("n_kv_heads", n_head),
            "n_layer": params.integer("n_layers", hi=N_LAYER_MAX),
            "head_dim": params.integer("head_dim", max(1, n_embd // n_head)),
        }
        odd = "is missing, but another shard has it"
        self.tensors = {
            name: self._join(name, pieces, axis) for name, axis, pieces in named_pieces(shards, odd)
        }
        for key, name in (("n_vocab", "token_embd.weight"), ("n_ff", "blk.0.ffn_gate.weight")):
            if name not in self.tensors:
                raise FileError(
                    "is missing", path=folder, where=name, expected="this tensor in the shards"
                )
            self.n[key] = self.tensors[name].shape[0]
        said = params.get("vocab_size")
        if said not in (None, -1, self.n["n_vocab"]):
            rows = f"{self.n['n_vocab']}, the rows of the embeddings"
            params.fail("vocab_size", f"is {said!r:.60}", rows)
        self.factors = self._rope()
        if self.factors is not None:
            made = f32_tensor(ROPE_FREQS, self.factors, f"{params.path}: use_scaled_rope")
            self.tensors[ROPE_FREQS] = made
        check_llama(folder, self.tensors, self.n)

    def keys(self) -> dict[str, Any]:
        eps = self.params.number("norm_eps", lo=0.0, hi=1.0)
        theta = self._theta()
        return llama_keys(
            self.folder, **self.n, n_ctx=self._context(eps, theta), eps=eps, rope_base=theta
        )

    def _theta(self) -> float:
        return self.params.number("rope_theta", 10000.0, lo=1.001, hi=1e12)

    def _context(self, eps: float, theta: float) -> int:
        """Return the trained context length in tokens. Unless ``max_seq_len`` gives it, it is
        deduced from settings that identify the release (norm epsilon ``eps``, RoPE base ``theta``
        ..), with a note for the user.
        """
        if self.params.get("max_seq_len") is not None:
            return self.params.integer("max_seq_len", hi=POSITION_MAX)
        if self.params.flag("use_scaled_rope", False):
            n_ctx = 131072  # Llama 3.1 and later
        elif theta == 500000.0:
            n_ctx = 8192  # Llama 3
        elif theta == 1000000.0:
            n_ctx = 16384  # Code Llama
        else:
            n_ctx = 4096 if eps > 5e-6 else 2048  # Llama 2, Llama 1
        self.notes.append(
            f"{PARAMS} has no context length: using {n_ctx}, that of the release with these "
            "settings (--set llama.context_length=N changes it)"
        )
        return n_ctx

    def _rope(self) -> npt.NDArray[np.float32] | None:
        if not self.params.flag("use_scaled_rope", False):
            return None
        scaling = {
            "rope_type": "llama3",
            "factor": self.params.number("rope_scaling_factor", 8.0, lo=1e-3, hi=1e6),
            "low_freq_factor": self.params.number("low_freq_factor", 1.0, lo=1e-3, hi=1e6),
            "high_freq_factor": self.params.number("high_freq_factor", 4.0, lo=1e-3, hi=1e6),
            "original_max_position_embeddings": 8192,
        }
        keys = MetadataReader(
            {"rope_theta": self._theta(), "rope_scaling": scaling}, self.params.path
        )
        return read_rope(keys, FAMILIES["llama"], self.n["head_dim"])[1][ROPE_FREQS]

    # -- joining ----------------------------------------------------------------------------------

    def _join(self, name: str, pieces: list[CheckpointTensor], axis: int | None) -> SourceTensor:
        first = pieces[0]
        n_dims = 1 if axis is None else 2
        for piece in pieces:
            if (piece.shape, piece.kind) != (first.shape, first.kind):
                what = f"shape {list(piece.shape)} of {piece.kind}"
                expected = f"{list(first.shape)} of {first.kind}, as in {first.path.name}"
                raise piece.error(what, expected)
            if len(piece.shape) != n_dims or piece.kind not in FLOATS:
                what = f"shape {list(piece.shape)} of {piece.kind}"
                expected = f"{n_dims} dimensions of floats"
                raise piece.error(what, expected)
        if name == "token_embd.weight" and first.shape[1] == self.n["n_embd"]:
            axis = ROWS
        kept, copies = self._without_copies(name, pieces) if axis == ROWS else (pieces, [])
        tensor = join(name, kept, axis, first.ggml_type, copies)
        return tensor.as_f32() if axis is None or first.kind == "Double" else tensor

    def _without_copies(
        self, name: str, pieces: list[CheckpointTensor]
    ) -> tuple[list[CheckpointTensor], list[tuple[CheckpointTensor, CheckpointTensor]]]:
        """Return the pieces of tensor ``name`` to join, one from each rank, and pairs of pieces
        that must be equal. If there are more ranks than key heads, consecutive ranks hold copies of
        one head: only the first of them is joined.
        """
        heads = self.n["n_head_kv"] * self.n["head_dim"]
        n_rows = pieces[0].shape[0] * len(pieces)
        if not name.endswith(("attn_k.weight", "attn_v.weight")) or n_rows <= heads:
            return pieces, []
        every = n_rows // heads
        if n_rows % heads or len(pieces) % every:
            return pieces, []  # the shape check reports it
        copies = [(pieces[i - i % every], piece) for i, piece in enumerate(pieces) if i % every]
        return pieces[::every], copies
