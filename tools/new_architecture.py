"""A tiny random model of any architecture that transformers has, and where treadle departs from it.

    python tools/new_architecture.py qwen3_moe --llama-cpp vendor/llama.cpp

NAME is transformers' ``model_type``, or GGUF's name of the architecture. The tool

1. scales transformers' own configuration down: layers (one of each kind at least), widths, heads,
   experts, vocabulary; ``--set KEY=JSON`` changes what it did not guess;
2. fills the model with random weights that keep states near 1 and attention uneven, and saves it as
   a Hugging Face folder, with a tokenizer of bytes;
3. converts it with treadle, and with llama.cpp's own converter where that knows the architecture
   (``--llama-cpp``: a folder with ``conversion/`` and ``gguf-py/``, or the sdist of
   llama-cpp-python, which has both; TREADLE_LLAMA_CPP names it too);
4. runs each, compares every labelled step with transformers, and prints the first label that
   differs. Where treadle cannot read the model, it prints why, and GGUF's keys and tensors.

It needs torch and transformers. The exit code is 0 if nothing differs, 1 if something does.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

N_VOCAB = 320
N_TOKENS = 40
MOST_LAYERS = 8
WIDTH = 64

# What a key of a configuration becomes; a key that the configuration lacks, or has as None, stays.
SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim"), WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim"), 96),
    **dict.fromkeys(("shared_intermediate_size", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 32),
    "moe_shared_expert_intermediate_size": 32,
    "intermediate_size_mlp": 96,
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    "head_dim": 32,
    "global_head_dim": 32,
    "swa_head_dim": 32,
    "v_head_dim": 32,
    "swa_v_head_dim": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "index_head_dim": 32,
    "index_n_heads": 4,
    "index_topk": 16,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"), 2),
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "sliding_window": 16,
    "attention_chunk_size": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "mamba_d_state": 16,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "mamba_d_ssm": 128,
    "ssm_state_size": 16,
    "n_groups": 1,
    "state_size": 16,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": N_VOCAB,
    "vocab_size": N_VOCAB,
    "max_position_embeddings": 256,
    "n_positions": 256,
}
KV_HEADS = ("num_key_value_heads", "swa_num_key_value_heads", "num_global_key_value_heads")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
KINDS = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types")  # one for each layer
PATTERN = "hybrid_override_pattern"  # a letter for each layer
TOKENS = re.compile(
    r"(.*_)?(pad|bos|eos|decoder_start|sep|unk|image|video|audio|boi|eoi)_token_(id|index)"
)


class NewArchitectureError(Exception):
    """The tool cannot go on; the message says why."""


# -- configuration ---------------------------------------------------------------------------------


def find_type(name: str) -> str:
    """Return transformers' ``model_type`` of a causal model for a name: its own, GGUF's, or one
    that differs in signs alone.
    """
    from difflib import get_close_matches

    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as known

    plain = {re.sub(r"[-_.]", "", each).lower(): each for each in known}
    for given in (name, *types_of_arch(name)):
        if given in known:
            return given
        if (same := plain.get(re.sub(r"[-_.]", "", given).lower())) is not None:
            return same
    near = get_close_matches(name, known, 5, 0.5)
    hint = f"; near: {', '.join(near)}" if near else ""
    raise NewArchitectureError(f"transformers has no causal model of the type {name!r}{hint}")


def types_of_arch(arch: str) -> list[str]:
    """Return the model types whose folders treadle reads as this architecture."""
    from treadle.convert.hf.families.registry import FAMILIES

    return [kind for kind in FAMILIES if FAMILIES[kind].arch == arch]


def scaled_config(kind: str, changes: Mapping[str, Any]) -> Any:
    """Return transformers' default configuration of a type, scaled down."""
    from transformers import CONFIG_MAPPING

    whole = CONFIG_MAPPING[kind]()
    given = whole.to_dict()
    n_layer, lists = layers_of(given)
    made: dict[str, Any] = {}
    for key, value in given.items():
        if key in LAYERS:
            made[key] = n_layer
        elif key in lists:
            made[key] = lists[key]
        elif key in SIZES and isinstance(value, int) and not isinstance(value, bool):
            made[key] = min(value, SIZES[key]) if key in ("topk_group", "n_group") else SIZES[key]
            if key == "head_dim" and "qk_rope_head_dim" in given:  # latent attention calls it so
                made[key] = SIZES["qk_rope_head_dim"]
        elif key in KV_HEADS and isinstance(value, int):
            heads = given.get("num_attention_heads", value)
            made[key] = 4 if value == heads else 2 if value > 1 else 1
        elif TOKENS.fullmatch(key) and isinstance(value, int):
            made[key] = min(value, 2)
    made |= {whole.attribute_map.get(key, key): value for key, value in changes.items()}
    made.setdefault("attn_implementation", "eager")
    try:
        return CONFIG_MAPPING[kind](**{**without_derived(given), **made})
    except Exception as error:  # a class checks its own keys
        raise NewArchitectureError(
            f"{kind}: its configuration does not take the small sizes: {error}\n"
            f"change them with --set: {json.dumps(made, default=str)}"
        ) from error


def without_derived(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a configuration without those that follow from others."""
    return {
        key: value
        for key, value in given.items()
        if key not in ("model_type", "transformers_version", "architectures", "dtype")
        and value is not None
    }


def layers_of(given: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return the number of layers that has one of each kind, and the shortened lists of kinds."""
    n = next((given[key] for key in LAYERS if isinstance(given.get(key), int)), 4)
    lists = {key: given[key] for key in (*KINDS, PATTERN) if isinstance(given.get(key), list | str)}
    least = 3
    for values in lists.values():
        firsts = [values.index(each) for each in dict.fromkeys(values)]
        least = max(least, max(firsts) + 1 if firsts else 0)
    for key in ("full_attention_interval", "interleave_moe_layer_step", "attn_layer_period"):
        if isinstance(given.get(key), int):
            least = max(least, given[key])
    few = min(n, max(least, 3))
    if few > MOST_LAYERS:
        lists = {key: one_of_each(values) for key, values in lists.items()}
        few = max([len(values) for values in lists.values()], default=MOST_LAYERS)
    return few, {key: fitted(values, few) for key, values in lists.items()}


def one_of_each(values: Sequence[Any]) -> Any:
    """Return the kinds that a list has, each once; of a text, a text."""
    kinds = list(dict.fromkeys(values))
    return "".join(kinds) if isinstance(values, str) else kinds


def fitted(values: Any, n: int) -> Any:
    """Return the first n values, the last one repeated if there are fewer."""
    short = values[:n]
    last = values[len(short) - 1 : len(short)] or values[:1]
    return short + last * (n - len(short))


# -- model -----------------------------------------------------------------------------------------


def build(kind: str, config: Any) -> Any:
    """Return the model of random weights, in float32."""
    import torch
    import transformers

    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.float32
            ).eval()
    except Exception as error:  # a class checks its own sizes
        raise NewArchitectureError(
            f"{kind}: its class does not take the small sizes: {error}; change them with --set"
        ) from error
    generator = torch.Generator().manual_seed(7)
    tied = bool(getattr(config, "tie_word_embeddings", False))
    buffers = [each for each in model.named_buffers() if each[0].endswith("bias")]
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *buffers]:
            draw(name, parameter, tied, generator)
    return model


def draw(name: str, parameter: Any, tied: bool, generator: Any) -> None:
    """Fill a parameter with values that keep states near 1, attention uneven, and logits of some
    units: norms and other vectors vary about what the class begins with.
    """
    import torch

    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
    if parameter.ndim < 2:
        parameter.add_((0.25 if "norm" in name else 0.2) * noise)
    elif "embed" in name or "wte" in name or "wpe" in name:
        parameter.copy_(noise * (0.35 if tied else 1.0))
    else:
        n = math.prod(parameter.shape[1:]) if "conv" in name else parameter.shape[-1]
        head = name.startswith(("lm_head", "embed_out"))
        parameter.copy_(noise * ((3.0 if head else 1.4) / math.sqrt(n)))


def save(model: Any, folder: Path) -> None:
    """Save a Hugging Face folder: weights, configuration and a tokenizer of bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<pad>", "<s>", "</s>"]
    n = len(specials) + len(letters)
    fill = [f"<fill{i}>" for i in range(getattr(model.config, "vocab_size", N_VOCAB) - n)]
    pieces = [*specials, *letters, *fill]
    tokenizer = Tokenizer(BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    added = [*specials, *fill]
    tokenizer.add_tokens([AddedToken(piece, special=True, normalized=False) for piece in added])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


# -- conversion ------------------------------------------------------------------------------------

UNKNOWN = 3  # exit code of the converter's process: it has no such architecture
CONVERTER = """
import sys
from pathlib import Path
root, folder, out = map(Path, sys.argv[1:])
sys.path[:0] = [str(root / "gguf-py"), str(root)]
import gguf, torch
from conversion import ModelBase, ModelType, get_model_architecture, get_model_class
arch = get_model_architecture(ModelBase.load_hparams(folder, False), ModelType.TEXT)
try:
    kind = get_model_class(arch)
except NotImplementedError:
    print(arch)
    raise SystemExit(3)
kind.set_vocab = lambda self: self._set_vocab_none()  # it knows tokenizers by their hash
with torch.inference_mode():
    kind(folder, gguf.LlamaFileType.ALL_F32, out).write()
"""


def llamacpp_folder(given: str | None, at: Path) -> Path | None:
    """Return the folder with llama.cpp's converter; an sdist of llama-cpp-python is unpacked."""
    if not given:
        return None
    path = Path(given)
    if path.is_file():
        with tarfile.open(path) as archive:
            members = [
                member
                for member in archive.getmembers()
                if re.search(r"/llama\.cpp/(conversion|gguf-py)/", member.name)
            ]
            archive.extractall(at, members, filter="data")
        path = next(at.glob("*/vendor/llama.cpp"), at)
    if not (path / "conversion").is_dir() or not (path / "gguf-py").is_dir():
        raise NewArchitectureError(f"{given}: has no folders conversion and gguf-py of llama.cpp")
    return path


def convert_by_llamacpp(root: Path, folder: Path, out: Path) -> str:
    """Convert a folder with llama.cpp's converter; return "" or why there is no file."""
    command = [sys.executable, "-c", CONVERTER, str(root), str(folder), str(out)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode == UNKNOWN:
        return f"llama.cpp's converter has no {ran.stdout.strip()}"
    if ran.returncode:
        last = (ran.stderr.strip() or "no message").splitlines()[-3:]
        return "\n".join(["llama.cpp's converter failed:", *last])
    return ""


def convert_by_treadle(folder: Path, out: Path) -> str:
    """Convert a folder with treadle; return "" or why there is no file."""
    from treadle.errors import TreadleError

    command = [sys.executable, "-m", "treadle", "convert", str(folder), str(out)]
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    except OSError as error:
        raise TreadleError(str(error)) from error
    return "" if ran.returncode == 0 else (ran.stderr.strip() or "no message").splitlines()[-1]


# -- comparison ------------------------------------------------------------------------------------


def compare(path: Path, network: Any, folder: Path, tolerance: float | None) -> dict[str, Any]:
    """Compare what treadle computes of a file or folder with transformers."""
    import numpy as np

    import treadle
    from treadle.api.transformers_reference import compare_with
    from treadle.cli.commands.diff import describe
    from treadle.errors import TreadleError

    try:
        with treadle.load(path, threads=1, kv="f32", context=128) as model:
            n = min(model.config.n_vocab, 300)
            ids = np.random.default_rng(7).integers(3, n, N_TOKENS).tolist()
            found = compare_with(model, network, folder, ids, tolerance=tolerance)
            ignored = list(model.config.ignored)
    except TreadleError as error:
        return {"error": str(error)}
    report = describe(found, str(path), str(folder), "transformers")
    return {**report, "ignored": ignored}


def contents(path: Path) -> Iterator[str]:
    """Yield lines for a GGUF file: its keys, and the tensors outside layers and of each kind of
    layer.
    """
    from treadle.files.gguf import open_gguf

    with open_gguf(path) as gguf:
        for key, value in gguf.metadata.items():
            if not key.startswith(("tokenizer.", "general.")) or key == "general.architecture":
                yield f"{key} = {value!s:.100}"
        seen: set[str] = set()
        for name, tensor in gguf.tensors.items():
            stem = re.sub(r"^blk\.\d+\.", "blk.N.", name)
            if stem not in seen:
                seen.add(stem)
                yield f"{stem}  {list(tensor.shape)}"


def run(arguments: argparse.Namespace) -> int:
    """Do the work; return the exit code."""
    from treadle.cli.commands.diff import print_report

    kind = find_type(arguments.name)
    changes = dict(parsed(each) for each in arguments.set)
    network = build(kind, scaled_config(kind, changes))
    n_parameters = sum(each.numel() for each in network.parameters())
    with tempfile.TemporaryDirectory(prefix="new_architecture_") as scratch:
        at = Path(arguments.keep or scratch)
        folder = at / "hf"
        save(network, folder)
        name = type(network).__name__
        print(f"{name}: {network.config.num_hidden_layers} layers, {n_parameters} parameters")
        made = {"the folder": (folder, ""), "converted by treadle": (at / "treadle.gguf", "")}
        made["converted by treadle"] = (
            at / "treadle.gguf",
            convert_by_treadle(folder, at / "treadle.gguf"),
        )
        root = llamacpp_folder(arguments.llama_cpp, Path(scratch) / "llama.cpp")
        if root is None:
            print("llama.cpp's converter was not given (--llama-cpp)")
        else:
            theirs = at / "llamacpp.gguf"
            made["converted by llama.cpp"] = theirs, convert_by_llamacpp(root, folder, theirs)
        differs = False
        for what, (path, problem) in made.items():
            report = (
                {"error": problem}
                if problem
                else compare(path, network, folder, arguments.tolerance)
            )
            differs |= "error" in report or report["first"] is not None
            print(f"\n== {what}")
            if "error" in report:
                print(report["error"])
                if path.suffix == ".gguf" and path.is_file():
                    print(*contents(path), sep="\n")
                continue
            print_report({**report, "every": arguments.all})
            if report["ignored"]:
                print(f"tensors that nothing reads: {', '.join(report['ignored'])}")
    return int(differs)


def parsed(text: str) -> tuple[str, Any]:
    """Return key and value of KEY=JSON; what is no JSON is a text."""
    key, _, value = text.partition("=")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", metavar="NAME", help="transformers' model_type, or GGUF's name")
    parser.add_argument(
        "--llama-cpp",
        metavar="PATH",
        default=os.environ.get("TREADLE_LLAMA_CPP"),
        help="llama.cpp's sources, or the sdist of llama-cpp-python",
    )
    parser.add_argument("--keep", metavar="FOLDER", help="write the model and the files there")
    parser.add_argument(
        "--set",
        metavar="KEY=JSON",
        action="append",
        default=[],
        help="change a key of the configuration; may be repeated",
    )
    parser.add_argument("--tolerance", type=float, help="relative error allowed for every step")
    parser.add_argument("--all", action="store_true", help="list every step, not only the layers")
    return parser.parse_args(words)


def main() -> int:
    try:
        return run(parse_arguments())
    except NewArchitectureError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
