"""Folders of drafters that read another model's states: Muse Glimmer's assistant against
transformers; EAGLE 3, DFlash and DSpark, in the layouts that are published.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.convert.test_hf import convert
from tests.convert.test_hf_muse import build as build_muse
from tests.convert.test_hf_pictures import save
from tests.models.hf_tiny import _draw, float64_only
from tests.spec_decode import tiny_drafters as tiny
from tests.spec_decode.test_dflash import FIRST, drafter_of
from tests.spec_decode.tiny_drafters import N_VOCAB, Owner, ids_of, load
from tests.tiny import rounding
from treadle.cli import main
from treadle.convert.hf.config import read_config
from treadle.convert.open import open_model
from treadle.engine.batch import BatchItem
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.models.drafters.dflash import MASK
from treadle.models.load import load_config

N_DRAFT = 100
LAYER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": N_VOCAB,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
Tensors = dict[str, np.ndarray]


def layer_of(i: str, width: int, **more: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Shapes of a Llama layer whose attention reads ``width`` values."""
    shapes = {
        "self_attn.q_proj": (128, width),
        "self_attn.k_proj": (64, width),
        "self_attn.v_proj": (64, width),
        "self_attn.o_proj": (64, 128),
        "mlp.gate_proj": (96, 64),
        "mlp.up_proj": (96, 64),
        "mlp.down_proj": (64, 96),
        "input_layernorm": (64,),
        "post_attention_layernorm": (64,),
        **more,
    }
    return {f"{i}.{name}.weight": shape for name, shape in shapes.items()}


def write_folder(folder: Path, config: dict[str, Any], shapes: dict[str, Any], **more: Any) -> Path:
    """A drafter's folder with random weights, and the tensors ``more``."""
    folder.mkdir()
    rng = np.random.default_rng(3)
    tensors = {name: _draw(rng, name, shape, False) for name, shape in shapes.items()}
    tensors = {name: np.asarray(x, np.float32) for name, x in tensors.items()}
    save_file({**tensors, **more}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


TABLE = {
    "d2t": np.arange(N_DRAFT, dtype=np.int64) * 2,
    "t2d": np.zeros(N_VOCAB, bool),
}
NORM = {"norm.weight": (64,)}
HEAD_NORMS = {"self_attn.q_norm": (32,), "self_attn.k_norm": (32,)}
BLOCK = {"fc.weight": (64, 128), "hidden_norm.weight": (64,), **NORM}


def specforge(folder: Path, **change: Any) -> Path:
    """EAGLE 3 as SpecForge saves it: under the name of its layer's model type."""
    config = {
        **LAYER,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": N_DRAFT,
        "tie_word_embeddings": True,
        **change,
    }
    shapes = layer_of("midlayer", 128, hidden_norm=(64,))
    shapes |= {**NORM, "fc.weight": (64, 192), "lm_head.weight": (N_DRAFT, 64)}
    return write_folder(folder, config, shapes, **TABLE)


def speculator(folder: Path) -> Path:
    """EAGLE 3 as speculators saves it: the layer's keys within, embeddings of its own."""
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": {**LAYER, "model_type": "llama", "num_hidden_layers": 1},
        "draft_vocab_size": N_DRAFT,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "target_hidden_size": 64,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
    }
    shapes = layer_of("layers.0", 128, hidden_norm=(64,))
    shapes |= {**NORM, "fc.weight": (64, 192), "input_norm.weight": (192,)}
    shapes |= {"lm_head.weight": (N_DRAFT, 64), "embed_tokens.weight": (N_VOCAB, 64)}
    return write_folder(folder, config, shapes, **TABLE)


def dflash(folder: Path, **change: Any) -> Path:
    """DFlash as z-lab saves it."""
    config = {
        **LAYER,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "block_size": 8,
        "dflash_config": {"mask_token_id": 4, "target_layer_ids": [1, 4], **change},
        "layer_types": ["full_attention"] * 2,
    }
    shapes = {
        name: n for i in range(2) for name, n in layer_of(f"layers.{i}", 64, **HEAD_NORMS).items()
    }
    return write_folder(folder, config, {**shapes, **BLOCK})


def dspark(folder: Path) -> Path:
    """DSpark as speculators saves it."""
    config = {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "transformer_layer_config": {**LAYER, "model_type": "qwen3", "num_hidden_layers": 2},
        "aux_hidden_state_layer_ids": [2, 5],
        "mask_token_id": 4,
        "block_size": 8,
        "draft_vocab_size": N_DRAFT,
    }
    shapes = {
        name: n for i in range(2) for name, n in layer_of(f"layers.{i}", 64, **HEAD_NORMS).items()
    }
    shapes |= {
        "markov_head.markov_w1.weight": (N_VOCAB, 32),
        "confidence_head.proj.weight": (1, 96),
    }
    shapes |= {"markov_head.markov_w2.weight": (N_DRAFT, 32), "confidence_head.proj.bias": (1,)}
    sinks = {f"layers.{i}.self_attn.sinks": np.ones(4, np.float32) for i in range(2)}
    return write_folder(
        folder, config, {**shapes, **BLOCK, "lm_head.weight": (N_DRAFT, 64)}, **TABLE, **sinks
    )


def gemma_dspark(folder: Path) -> Path:
    """DSpark with the layers of Gemma 4."""
    config = {
        **LAYER,
        "architectures": ["Gemma4DSparkModel"],
        "model_type": "gemma4_text",
        "num_hidden_layers": 1,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 2,
        "num_key_value_heads": 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_k_eq_v": True,
        "layer_types": ["full_attention"],
        "tie_word_embeddings": True,
        "target_layer_ids": [1, 4],
        "mask_token_id": 4,
        "block_size": 8,
    }
    more = {"pre_feedforward_layernorm": (64,), "post_feedforward_layernorm": (64,)}
    shapes = layer_of("layers.0", 64, **HEAD_NORMS, **more)
    del shapes["layers.0.self_attn.v_proj.weight"]
    shapes |= {"markov_head.markov_w1.weight": (N_VOCAB, 32)}
    shapes |= {"markov_head.markov_w2.weight": (N_VOCAB, 32)}
    scale = {"layers.0.layer_scalar": np.full(1, 0.5, np.float32)}
    return write_folder(folder, config, {**shapes, **BLOCK}, **scale)


def dflash2(folder: Path, **change: Any) -> Path:
    """DFlash 2 as z-lab saves it."""
    n = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 32, "selector_top_k": 8}
    own = {"block_size": 8, "mask_token_id": 4, "target_layer_ids": [1, 4], **n}
    own |= {"output_multiplier": 0.5, "final_logit_softcapping": 20.0, **change}
    config = {
        **LAYER,
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "is_causal": False,
        "dflash_config": own,
        "layer_types": ["sliding_attention"] * 2,
        "use_sliding_window": True,
        "sliding_window": 12,
    }
    more = {**HEAD_NORMS, **{f"{at}_conv.kernel_projection": (16, 64) for at in _CONVOLVED}}
    shapes = {name: n for i in range(2) for name, n in layer_of(f"layers.{i}", 64, **more).items()}
    for i in range(2):
        shapes |= {f"layers.{i}.{at}_conv.base_kernel": (2, 2, 64) for at in _CONVOLVED}
    at = "candidate_selector"
    shapes |= {f"{at}.{which}_codebook": (N_VOCAB, 32) for which in ("predecessor", "successor")}
    shapes |= {f"{at}.hidden_projection.weight": (32, 64)}
    return write_folder(folder, config, {**shapes, **BLOCK})


_CONVOLVED = ("attention", "mlp")
FOLDERS = {f.__name__: f for f in (specforge, speculator, dflash, dflash2, dspark, gemma_dspark)}
KEYS: dict[str, dict[str, Any]] = {
    "specforge": {"eagle3.vocab_size": N_VOCAB},
    "speculator": {
        "eagle3.target_layers": [1, 3, 6],
        "eagle3.norm_before_residual": True,
        "eagle3.norm_before_fc": True,
    },
    "dflash": {"dflash.block_size": 8, "dflash.target_layers": [2, 5], MASK: 4},
    "dflash2": {
        "dflash.block_size": 8,
        "dflash.target_layers": [2, 5],
        "dflash.attention.causal": False,
        "dflash.attention.sliding_window": 12,
        "dflash.conv_kernel_size": 2,
        "dflash.conv_group_size": 16,
        "dflash.selector_rank": 32,
        "dflash.selector_top_k": 8,
        "dflash.logit_scale": 0.5,
        "dflash.final_logit_softcapping": 20.0,
        MASK: 4,
    },
    "dspark": {"dflash.target_layers": [2, 5], "dflash.sample_from_anchor": False, MASK: 4},
    "gemma_dspark": {
        "dflash.target_layers": [2, 5],
        "dflash.sample_from_anchor": True,
        "dflash.attention.key_length": 32,
        "dflash.attention.head_count_kv": 2,
        "dflash.embedding_scale": 8.0,
    },
}


@pytest.mark.parametrize("name", FOLDERS)
def test_in_place_and_converted(name: str, tmp_path: Path) -> None:
    """The same drafts from the folder, and from files with the model's vocabulary and without."""
    model = tiny.target(tmp_path / "model.gguf")
    folder = FOLDERS[name](tmp_path / name)
    with open_model(folder) as file:
        assert {key: file.metadata[key] for key in KEYS[name]} == KEYS[name]
        config = load_config(file)
        assert set(config.ignored) <= {"conf_proj.weight", "conf_proj.bias"}
    files = [folder, convert(folder, tmp_path / "plain.gguf"), tmp_path / "made.gguf"]
    arguments = ["convert", str(folder), str(files[2]), "--draft-for", str(model)]
    assert main(arguments) == 0
    with open_gguf(files[2]) as file, open_gguf(model) as target:
        for key in ("tokens", "scores", "eos_token_id"):
            key = f"tokenizer.ggml.{key}"
            found: Any = file.metadata[key]
            given: Any = target.metadata[key]
            assert found == given or [*found] == [*given]
        assert file.metadata[f"{config.arch.name}.target_layers"]
    texts = []
    for draft in files:
        with load(model, draft, kv="f32") as loaded:
            drafter = loaded.stepper.scheduler.drafting.drafter
            assert drafter is not None
            made: list[Any] = []
            write = drafter.draft_ids

            def kept(wanted: Any, write: Any = write, made: list[Any] = made) -> Any:
                result = write(wanted)
                made.append([*result.values()])
                return result

            drafter.draft_ids = kept  # type: ignore[method-assign]
            text = loaded.generate(ids_of(9), max_tokens=20, temperature=0, ignore_eos=True)
            text.finish()
            texts.append((text.ids, made))
    assert texts[0] == texts[1] == texts[2]
    assert texts[0][1]


def test_muse_glimmers_assistant(tmp_path: Path) -> None:
    """A block's logits are those of transformers, in float64. Its window has a token more."""
    import torch
    import transformers
    from transformers.cache_utils import DFlashCache

    cls = transformers.MuseGlimmerAssistantModel  # imported before float64 is the only float
    target = build_muse()
    text = target.config.text_config
    own = {
        "hidden_size": text.hidden_size,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"],
        "block_size": 8,
        "mask_token_id": 7,
        "target_layer_ids": [0, 2, 4],
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
        "attn_implementation": "eager",
    }
    with float64_only():
        drafter = cls(transformers.MuseGlimmerAssistantConfig(**own)).eval()
    rng = np.random.default_rng(5)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            drawn = _draw(rng, name, tuple(parameter.shape), False)
            parameter.copy_(torch.from_numpy(drawn.astype(np.float64)))
    folder = save(drafter, tmp_path / "assistant")
    config = json.loads((folder / "config.json").read_text())
    config["vocab_size"] = text.vocab_size  # of a tiny model
    (folder / "config.json").write_text(json.dumps(config))
    model = convert(save(target, tmp_path / "model"), tmp_path / "model.gguf")
    ids = ids_of(30)
    noise = [ids[-1], *[7] * 7]
    drafter.config.sliding_window = own["sliding_window"] - 1
    with float64_only(), torch.no_grad():
        states = target(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
        cache = DFlashCache(config=drafter.config)
        cache.set_previous_accepted_tokens(len(ids) - 1)
        rows = drafter(
            cache=cache,
            position_ids=torch.arange(len(ids) - 1 + len(noise))[None],
            noise_embeds=target.get_input_embeddings().weight[noise][None],
            context_hidden_states=torch.cat([states[i + 1] for i in (0, 2, 4)], -1),
        ).last_hidden_state
        exact = target.get_output_embeddings()(rows[0, 1:]).numpy()
    for draft in (folder, convert(folder, tmp_path / "draft.gguf")):
        with load(model, draft, kv="f32") as loaded:
            drafts = drafter_of(loaded)
            owner = Owner(loaded.engine.cache.sequence())
            part = BatchItem(owner.seq, ids[:-1], 1, (FIRST,))
            loaded.engine.sample([part], drafts.observer)
            drafts.prefill_chunk(owner, ids, 1e9)
            assert drafts.draft_ids({owner: (ids, 7)})[owner] == exact.argmax(1).tolist()
            seq = drafts._texts[owner].seq
            got = drafts.engine.sample([BatchItem(seq, noise, 7, (FIRST,))])
            found = np.array([row.logits() for row in got])
            allowed = 2 * rounding(drafts.engine.config) * np.abs(exact).max()
            assert np.abs(found - exact).max() <= allowed
            owner.seq.close()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"mask_token_id": None}, "mask_token_id"),
        ({"target_layer_ids": None}, "target_layer_ids: is missing"),
        ({"target_layer_ids": [1, "2"]}, "target_layer_ids: holds '2'"),
        ({"selector_rank": 4}, "selector_top_k: is missing"),
        ({"conv_group_size": 4}, "conv_kernel_size: is missing"),
        ({"markov_head_type": "gated"}, "supports only 'vanilla'"),
        ({"rope_is_neox_style": False}, "rope_is_neox_style"),
    ],
)
def test_folders_that_are_refused(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises((FileError, UnsupportedError), match=why):
        open_model(dflash(tmp_path / "draft", **change))


def test_tables_that_are_refused(tmp_path: Path) -> None:
    folder = specforge(tmp_path / "draft")
    floats = {"d2t": np.zeros(N_DRAFT, np.float32)}
    write_folder(
        tmp_path / "floats", {**LAYER, "architectures": ["Eagle3DraftModel"]}, {}, **floats
    )
    config = (folder / "config.json").read_text()
    (tmp_path / "floats" / "config.json").write_text(config)
    with pytest.raises(FileError, match=r"d2t.* is in F32"):
        open_model(tmp_path / "floats")
    with pytest.raises(FileError, match="eagle_aux_hidden_state_layer_ids: has 2 entries"):
        open_model(specforge(tmp_path / "two", eagle_aux_hidden_state_layer_ids=[1, 2]))
    with pytest.raises(UnsupportedError, match="num_hidden_layers: is 2"):
        open_model(specforge(tmp_path / "deep", num_hidden_layers=2))


def test_windows(tmp_path: Path) -> None:
    """Those of all layers by DFlash's own keys, those of some by transformers', or none."""
    config = {
        **LAYER,
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 2,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
        "target_layer_ids": [1],
    }
    own = {"mask_token_id": 4, "use_swa": True, "swa_window_size": 32}
    for more, window, flags in (
        ({"dflash_config": own}, 32, [True, True]),
        ({"use_sliding_window": True, "mask_token_id": 4}, 64, [True, False]),
        ({"mask_token_id": 4, "is_causal": True}, None, None),
    ):
        made = read_config({**config, **more}, Path("config.json")).metadata
        assert made.get("dflash.attention.sliding_window") == window
        found = made.get("dflash.attention.sliding_window_pattern")
        assert (None if found is None else [*found]) == flags
        assert made.get("dflash.attention.causal") == more.get("is_causal")
