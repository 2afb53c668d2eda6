"""Vectors of texts beside others, in turns: sentence-transformers, fastembed, llama-cpp-python.

    nice python bench/embed.py [--shape minilm] [--texts 256] [--tokens 128] [--threads 2]
        [--sentence-transformers PYTHON] [--fastembed PYTHON] [--llama-cpp PYTHON] [--onnx PYTHON]

Each is run by an interpreter that has it; without any treadle is alone. A model of random weights
in a published one's shape is written to a temporary folder, for treadle and llama.cpp as GGUF, for
fastembed as ONNX (which --onnx makes: an interpreter with torch, transformers and onnx). All read
the same texts, tokenize them themselves, and give vectors of length 1. Told: texts per second, one
query of 16 tokens, and how all vectors agree with those of the first rival. The machine must be
quiet.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rival import Rival

import treadle

SHAPES = {"minilm": (6, "mean"), "bge-small": (12, "cls")}  # layers, pooling
N_EMBD = 384
N_FF = 1536
N_HEAD = 12
N_VOCAB = 30522
N_POSITIONS = 512
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
QUERY = 16  # tokens

# What each rival's interpreter runs: it prints a line when it is ready; then texts come, and it
# prints how long it took and the vectors of the first four.
LOOP = """
print("{}", flush=True)
for line in sys.stdin:
    (texts,) = json.loads(line)
    begin = time.perf_counter()
    rows = vectors(texts)
    seconds = time.perf_counter() - begin
    print(json.dumps([seconds, [[float(x) for x in row] for row in rows[:4]]]), flush=True)
"""
SENTENCE_TRANSFORMERS = """
import json, sys, time
folder, threads = sys.argv[1], int(sys.argv[2])
import torch
torch.set_num_threads(threads)
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(folder, device="cpu")
def vectors(texts):
    return model.encode(texts, batch_size=32, normalize_embeddings=True, show_progress_bar=False)
"""
FASTEMBED = """
import json, sys, time
folder, threads = sys.argv[1], int(sys.argv[2])
from fastembed import TextEmbedding
model = TextEmbedding(sys.argv[3], specific_model_path=folder, threads=threads)
def vectors(texts):
    return list(model.embed(texts, batch_size=32))
"""
LLAMA_CPP = """
import json, sys, time
import numpy as np
import llama_cpp
path, threads = sys.argv[1], int(sys.argv[2])
model = llama_cpp.Llama(path, embedding=True, n_ctx=512, n_batch=512, n_ubatch=512,
                        n_threads=threads, n_threads_batch=threads, verbose=False)
def vectors(texts):
    return model.embed(texts, normalize=True)
"""
TO_ONNX = """
import sys
import torch, transformers
folder = sys.argv[1]
model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
class States(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model
    def forward(self, input_ids, attention_mask, token_type_ids):
        return self.model(input_ids=input_ids, attention_mask=attention_mask,
                          token_type_ids=token_type_ids).last_hidden_state
names = ["input_ids", "attention_mask", "token_type_ids"]
given = tuple(torch.ones(2, 8, dtype=torch.long) for _ in names)
axes = {name: {0: "batch", 1: "tokens"} for name in (*names, "last_hidden_state")}
torch.onnx.export(States(), given, sys.argv[2], input_names=names, opset_version=17,
                  output_names=["last_hidden_state"], dynamic_axes=axes, dynamo=False)
"""
FASTEMBED_NAMES = {
    "minilm": ("sentence-transformers/all-MiniLM-L6-v2", "model.onnx"),
    "bge-small": ("BAAI/bge-small-en-v1.5", "model_optimized.onnx"),
}


def write_folder(folder: Path, shape: str) -> None:
    """A Hugging Face folder of sentence-transformers'; safetensors in float32."""
    from safetensors.numpy import save_file

    n_layer, pooling = SHAPES[shape]
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (N_VOCAB, N_EMBD),
        "embeddings.position_embeddings.weight": (N_POSITIONS, N_EMBD),
        "embeddings.token_type_embeddings.weight": (2, N_EMBD),
    }
    norms = ["embeddings.LayerNorm"]
    for i in range(n_layer):
        at = f"encoder.layer.{i}."
        for name in ("attention.self.query", "attention.self.key", "attention.self.value"):
            shapes[f"{at}{name}.weight"] = (N_EMBD, N_EMBD)
        shapes[f"{at}attention.output.dense.weight"] = (N_EMBD, N_EMBD)
        shapes[f"{at}intermediate.dense.weight"] = (N_FF, N_EMBD)
        shapes[f"{at}output.dense.weight"] = (N_EMBD, N_FF)
        norms += [f"{at}attention.output.LayerNorm", f"{at}output.LayerNorm"]
    made = {}
    for name, dims in shapes.items():
        made[name] = (rng.standard_normal(dims) / math.sqrt(dims[-1])).astype(np.float32)
        if "embeddings" not in name:
            bias = name.replace(".weight", ".bias")
            made[bias] = (0.1 * rng.standard_normal(dims[:1])).astype(np.float32)
    for name in norms:
        made[f"{name}.weight"] = np.ones(N_EMBD, np.float32)
        made[f"{name}.bias"] = (0.1 * rng.standard_normal(N_EMBD)).astype(np.float32)
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    words = SPECIAL + [f"w{i}" for i in range(N_VOCAB - len(SPECIAL))]
    mark = {"id": None, "special": True, "single_word": False, "lstrip": False, "rstrip": False}
    ends = [{"SpecialToken": {"id": name, "type_id": 0}} for name in ("[CLS]", "[SEP]")]
    pooled = {
        "pooling_mode_mean_tokens": pooling == "mean",
        "pooling_mode_cls_token": pooling == "cls",
    }
    files: dict[str, Any] = {
        "config.json": {
            "model_type": "bert",
            "architectures": ["BertModel"],
            "vocab_size": N_VOCAB,
            "hidden_size": N_EMBD,
            "intermediate_size": N_FF,
            "num_hidden_layers": n_layer,
            "num_attention_heads": N_HEAD,
            "max_position_embeddings": N_POSITIONS,
            "layer_norm_eps": 1e-12,
            "hidden_act": "gelu",
            "type_vocab_size": 2,
            "pad_token_id": 0,
        },
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {**mark, "id": i, "content": name, "normalized": False}
                for i, name in enumerate(SPECIAL)
            ],
            "normalizer": {
                "type": "BertNormalizer",
                "clean_text": True,
                "handle_chinese_chars": True,
                "strip_accents": None,
                "lowercase": True,
            },
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [ends[0], {"Sequence": {"id": "A", "type_id": 0}}, ends[1]],
                "pair": [
                    ends[0],
                    {"Sequence": {"id": "A", "type_id": 0}},
                    ends[1],
                    {"Sequence": {"id": "B", "type_id": 1}},
                    {"SpecialToken": {"id": "[SEP]", "type_id": 1}},
                ],
                "special_tokens": {
                    name: {"id": name, "ids": [SPECIAL.index(name)], "tokens": [name]}
                    for name in ("[CLS]", "[SEP]")
                },
            },
            "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
            "model": {
                "type": "WordPiece",
                "unk_token": "[UNK]",
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100,
                "vocab": {word: i for i, word in enumerate(words)},
            },
        },
        "tokenizer_config.json": {
            "tokenizer_class": "BertTokenizer",
            "model_max_length": N_POSITIONS,
            "do_lower_case": True,
            **{f"{key}_token": f"[{key.upper()}]" for key in ("pad", "unk", "cls", "sep", "mask")},
        },
        "special_tokens_map.json": {
            f"{key}_token": f"[{key.upper()}]" for key in ("pad", "unk", "cls", "sep", "mask")
        },
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {
                "idx": 1,
                "name": "1",
                "path": "1_Pooling",
                "type": "sentence_transformers.models.Pooling",
            },
        ],
        "sentence_bert_config.json": {"max_seq_length": N_POSITIONS, "do_lower_case": False},
        "1_Pooling/config.json": {"word_embedding_dimension": N_EMBD, **pooled},
    }
    (folder / "1_Pooling").mkdir()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


class Mine:
    """treadle."""

    def __init__(self, path: Path, threads: int) -> None:
        self.model = treadle.load(path, threads=threads)

    def ask(self, texts: list[str]) -> Any:
        begin = time.perf_counter()
        rows = self.model.embed(texts)
        return time.perf_counter() - begin, np.asarray(rows[:4]).tolist()


def programs_of(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All that are compared, by name."""
    made: dict[str, Any] = {}
    files = {fmt: folder.parent / f"{given.shape}-{fmt}.gguf" for fmt in ("F32", "Q8_0")}
    for fmt, path in files.items():
        convert = [sys.executable, "-m", "treadle", "convert", folder, path, "--type", fmt]
        subprocess.run([*map(str, convert)], check=True, capture_output=True)
        made[f"treadle {fmt}"] = Mine(path, given.threads)
    if given.sentence_transformers:
        python = given.sentence_transformers
        made["sentence-transformers F32"] = Rival(
            python, SENTENCE_TRANSFORMERS + LOOP, folder, given.threads
        )
    if given.fastembed:
        name, file = FASTEMBED_NAMES[given.shape]
        subprocess.run([given.onnx, "-c", TO_ONNX, str(folder), str(folder / file)], check=True)
        made["fastembed F32"] = Rival(
            given.fastembed, FASTEMBED + LOOP, folder, given.threads, name
        )
    if given.llama_cpp:
        for fmt, path in files.items():
            made[f"llama.cpp {fmt}"] = Rival(given.llama_cpp, LLAMA_CPP + LOOP, path, given.threads)
    return made


def main() -> None:
    """Write, run in turns, tell."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="minilm")
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    for name in ("sentence-transformers", "fastembed", "llama-cpp"):
        parser.add_argument(f"--{name}", metavar="PYTHON")
    parser.add_argument("--onnx", metavar="PYTHON", default=sys.executable)
    given = parser.parse_args()
    rng = np.random.default_rng(1)

    def text(n: int) -> str:
        return " ".join(f"w{i}" for i in rng.integers(0, N_VOCAB - 5, n - 2))

    outputs = [text(given.tokens) for _ in range(given.texts)]
    queries = [text(QUERY) for _ in range(10)]
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        folder.mkdir()
        write_folder(folder, given.shape)
        programs = programs_of(given, folder)
        many: dict[str, list[float]] = {name: [] for name in programs}
        one: dict[str, list[float]] = {name: [] for name in programs}
        vectors: dict[str, Any] = {}
        for at in range(-1, given.rounds):
            for name, program in programs.items():
                seconds, rows = program.ask(outputs)
                each = [program.ask([query])[0] for query in queries]
                if at >= 0:  # the first compiles, and fills caches
                    many[name].append(seconds)
                    one[name] += each
                vectors[name] = np.array(rows)
        told = f"{given.shape}, {given.texts} texts of {given.tokens} tokens"
        print(f"{told}, {given.threads} threads: medians of {given.rounds}, in turns")
        rival = next((name for name in programs if not name.startswith("treadle")), "treadle F32")
        for name in programs:
            a = vectors[name]
            b = vectors[rival]
            cosine = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
            print(
                f"{name:26} {given.texts / median(many[name]):8.1f} texts/s"
                f"   one query {1000 * median(one[name]):7.2f} ms"
                f"   cosine with {rival} {cosine.min():.7f}"
            )


if __name__ == "__main__":
    main()
