"""load_config: llama.cpp's keys and defaults, and a typed error for every number that is wrong."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.formats import FORMATS
from treadle.models.archs import ARCHS
from treadle.models.config import Config, Layer
from treadle.models.graphs.decoder import LAYER_ROWS
from treadle.models.load import load_config
from treadle.models.rope import Rope

KEYS: dict[str, Any] = {
    "block_count": 7,
    "embedding_length": 48,
    "feed_forward_length": 80,
    "context_length": 512,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


def fake(arch: str = "llama", optional: tuple[str, ...] = (), **changes: Any) -> Any:
    """A GGUF without a file: sound keys, then ``changes`` ("__" for ".", None deletes)."""
    keys = {**KEYS, **{key.replace("__", "."): value for key, value in changes.items()}}
    metadata = {f"{arch}.{key}": value for key, value in keys.items() if value is not None}
    metadata |= {"general.architecture": arch, "tokenizer.ggml.tokens": ["a"] * 32}
    head = keys.get("attention.key_length") or 12
    size = {"n_embd": 48, "n_ff": 80, "n_head": 4, "head_dim": head, "n_q": 4 * head, "n_attn": 48}
    size["one"] = 1
    n_head_kv = 4 if keys["attention.head_count_kv"] is None else 2
    size |= {"n_k": n_head_kv * head, "n_v": n_head_kv * 12, "q_norm": head, "k_norm": head}
    shapes = {"token_embd.weight": (32, 48), "output_norm.weight": (48,)}
    needs = ARCHS[arch].needs if arch in ARCHS else frozenset()
    lacks = ARCHS[arch].lacks if arch in ARCHS else frozenset()
    for row in LAYER_ROWS:
        missing = row.optional or row.name in lacks
        if not missing or row.name in needs or row.name in optional:
            places = (f"blk.{i}.{row.name}" for i in range(7))
            shape = tuple(size[word] for word in row.shape)
            shapes |= {name: shape for name in places if name not in lacks}
    tensors = {name: tensor(name, shape) for name, shape in shapes.items()}
    return SimpleNamespace(path=Path("fake.gguf"), metadata=metadata, tensors=tensors)


def tensor(name: str, shape: tuple[int, ...], values: Any = (), ggml_type: int = 0) -> Any:
    data = np.asarray(values, "<f4").view(np.uint8)
    return SimpleNamespace(
        name=name,
        shape=shape,
        ggml_type=ggml_type,
        format=FORMATS.get(ggml_type),
        data=data,
        offset=64,
    )


def test_defaults_are_llama_cpps() -> None:
    config = load_config(fake())
    assert (config.n_layer, config.n_embd, config.n_vocab) == (7, 48, 32)
    assert config.layers == tuple(Layer(4, 2, 12, 12, 80, kv_from=i) for i in range(7))
    assert config.ropes == (Rope(12, 10000.0, n_ctx_orig=512),)
    assert (config.embd_scale, config.attn_scale) == (1.0, 1 / math.sqrt(12))
    assert (config.attn_softcap, config.logit_softcap) == (0.0, 0.0)
    assert config.tied
    assert config.optional == frozenset()
    assert config.ignored == ()
    assert load_config(fake(attention__head_count_kv=None)).layers[0].n_head_kv == 4


def test_gemma3_rows_of_traits() -> None:
    config = load_config(
        fake(
            "gemma3",
            attention__sliding_window=64,
            rope__freq_base=1e6,
            final_logit_softcapping=30.0,
        )
    )
    assert [layer.window for layer in config.layers] == [64] * 5 + [0, 64]
    assert [layer.rope for layer in config.layers] == [1] * 5 + [0, 1]
    assert config.ropes == (Rope(12, 1e6, n_ctx_orig=512), Rope(12, 1e4))
    assert config.embd_scale == math.sqrt(48)
    assert config.logit_softcap == 30.0
    assert config.optional == ARCHS["gemma3"].needs


def test_gemma3_27b_scales_attention_by_width() -> None:
    """62 layers: the converter writes no key for it."""
    gguf = fake("gemma3", block_count=62, attention__key_length=32)
    for name in [n for n in gguf.tensors if n.startswith("blk.0.")]:
        for i in range(62):
            gguf.tensors[name.replace(".0.", f".{i}.")] = gguf.tensors[name]
    assert load_config(gguf).attn_scale == 1 / math.sqrt(48 / 4)
    assert load_config(fake("gemma3", attention__key_length=32)).attn_scale == 1 / math.sqrt(32)


@pytest.mark.parametrize(
    ("pattern", "local"),
    [
        (3, [1, 1, 0, 1, 1, 0, 1]),
        (1, [0] * 7),
        (0, [1] * 7),
        ([0, 1, 1, 0, 1, 0, 0], [0, 1, 1, 0, 1, 0, 0]),
        ([True] * 7, [1] * 7),
    ],
)
def test_sliding_window_pattern(pattern: Any, local: list[int]) -> None:
    changes = {"attention__sliding_window": 64, "attention__sliding_window_pattern": pattern}
    layers = load_config(fake("gemma3", **changes)).layers
    assert [layer.window for layer in layers] == [64 * flag for flag in local]
    assert [layer.rope for layer in layers] == local


def test_window_of_an_architecture_that_has_none_is_ignored() -> None:
    for config in (
        load_config(fake("qwen2", attention__sliding_window=64)),
        load_config(fake("gemma3")),
    ):
        assert not any(layer.window for layer in config.layers)
        assert len(config.ropes) == 1


@pytest.mark.parametrize("scaling", ["linear", "yarn"])
def test_layers_with_a_window_are_never_stretched(scaling: str) -> None:
    gguf = fake(
        "gemma3",
        attention__sliding_window=64,
        rope__scaling__type=scaling,
        rope__scaling__factor=8.0,
        rope__scaling__attn_factor=2.0,
    )
    full, local = load_config(gguf).ropes
    assert (full.scaling, full.scale, full.attn_factor) == (scaling, 8.0, 2.0)
    assert local == Rope(12, 10000.0)


def test_arrays_of_equal_layers_are_one_number() -> None:
    arrays: dict[str, Any] = {"attention__head_count_kv": [2] * 7, "feed_forward_length": [80] * 7}
    assert load_config(fake(**arrays)) == load_config(fake())


def test_layers_may_differ() -> None:
    n_ff = [16, 32, 48, 64, 80, 96, 112]
    gguf = fake(feed_forward_length=n_ff)
    for i, n in enumerate(n_ff):
        for name, shape in (("gate", (n, 48)), ("up", (n, 48)), ("down", (48, n))):
            gguf.tensors[f"blk.{i}.ffn_{name}.weight"].shape = shape
    assert [layer.n_ff for layer in load_config(gguf).layers] == n_ff
    gguf.tensors["blk.2.ffn_up.weight"].shape = (80, 48)
    with pytest.raises(FileError, match=r"blk\.2\.ffn_up\.weight: .* \[48, 48\] \(n_ff, n_embd"):
        load_config(gguf)
    with pytest.raises(FileError, match=r"blk\.6\.attn_k\.weight"):
        load_config(fake(attention__head_count_kv=[2] * 6 + [1]))
    with pytest.raises(FileError, match=r"head_count_kv: 3 does not divide 4 heads"):
        load_config(fake(attention__head_count_kv=[2] * 6 + [3]))


@pytest.mark.parametrize(
    ("changes", "scaling", "scale"),
    [
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}, "linear", 4.0),
        ({"rope__scale_linear": 4.0}, "linear", 4.0),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, "none", 1.0),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 0.0}, "none", 1.0),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}, "yarn", 4.0),
    ],
)
def test_rope_scaling(changes: dict[str, Any], scaling: str, scale: float) -> None:
    config = load_config(fake(**changes))
    assert config.ropes == (Rope(12, 10000.0, scaling=scaling, scale=scale, n_ctx_orig=512),)


def test_rope_factors_are_read() -> None:
    gguf = fake(rope__scaling__type="llama3")
    with pytest.raises(FileError, match="llama3, but its factors are missing"):
        load_config(gguf)
    gguf.tensors["rope_freqs.weight"] = tensor("rope_freqs.weight", (6,), [1, 1, 1, 2, 8, 8])
    config = load_config(gguf)
    assert config.ropes[0].factors == (1, 1, 1, 2, 8, 8)
    assert config.ropes[0].scaling == "none"
    assert config.optional == frozenset({"rope_freqs.weight"})
    gguf.tensors["rope_freqs.weight"].data = np.asarray([1, 1, 0, 1, 1, 1], "<f4").view(np.uint8)
    with pytest.raises(FileError, match=r"at byte 64: rope_freqs\.weight"):
        load_config(gguf)
    gguf.tensors["rope_freqs.weight"] = tensor("rope_freqs.weight", (6,), ggml_type=8)
    with pytest.raises(FileError, match="ggml type 8"):
        load_config(gguf)


BAD: list[tuple[str, Any]] = [
    ("block_count", None),
    ("block_count", 0),
    ("block_count", 1 << 40),
    ("block_count", "7"),
    ("block_count", True),
    ("embedding_length", -48),
    ("embedding_length", 47),
    ("feed_forward_length", [80] * 6),
    ("feed_forward_length", [80.0] * 7),
    ("feed_forward_length", [0] * 7),
    ("context_length", None),
    ("attention.head_count", 0),
    ("attention.head_count", 5),
    ("attention.head_count_kv", 3),
    ("attention.head_count_kv", 0),
    ("attention.key_length", 0),
    ("attention.causal", 1),
    ("attention.layer_norm_rms_epsilon", None),
    ("attention.layer_norm_rms_epsilon", math.nan),
    ("attention.layer_norm_rms_epsilon", -1.0),
    ("attention.scale", math.inf),
    ("rope.dimension_count", 11),
    ("rope.dimension_count", 14),
    ("rope.freq_base", 0.0),
    ("rope.scaling.factor", math.nan),
    ("rope.scaling.type", 3),
    ("rope.scaling.original_context_length", 0),
    ("rope.scaling.yarn_beta_fast", 0.0),
    ("final_logit_softcapping", -1.0),
]


@pytest.mark.parametrize(("key", "value"), BAD, ids=[f"{key}={value}" for key, value in BAD])
def test_a_wrong_number_names_its_key(key: str, value: Any) -> None:
    with pytest.raises(FileError) as caught:
        load_config(fake(**{key: value}))
    assert caught.value.where is not None
    assert caught.value.where.startswith("llama.")
    assert key in caught.value.where or key == "embedding_length"  # whose divisor is named instead


def test_sliding_pattern_of_the_wrong_length() -> None:
    with pytest.raises(
        FileError, match=r"sliding_window_pattern: has 3 entries \(expected 7 flags"
    ):
        load_config(
            fake("gemma3", attention__sliding_window=8, attention__sliding_window_pattern=[1, 0, 1])
        )


def test_missing_and_misshapen_tensors_are_named() -> None:
    gguf = fake("qwen3")
    del gguf.tensors["blk.3.attn_k_norm.weight"]
    with pytest.raises(
        FileError, match=r"blk\.3\.attn_k_norm\.weight: the tensor is missing .*\[12\]"
    ):
        load_config(gguf)
    gguf = fake()
    gguf.tensors["blk.6.ffn_down.weight"].shape = (80, 48)
    with pytest.raises(FileError, match=r"blk\.6\.ffn_down\.weight: shape \[80, 48\] .*\[48, 80\]"):
        load_config(gguf)
    gguf = fake(optional=("attn_q.bias",))
    del gguf.tensors["blk.0.attn_q.bias"]
    with pytest.raises(FileError, match=r"blk\.0\.attn_q\.bias: the tensor is missing"):
        load_config(gguf)
    gguf = fake()
    gguf.tensors.clear()
    with pytest.raises(FileError, match="a vocabulary only"):
        load_config(gguf)


LOST = [
    ("stablelm", "blk.1.ffn_norm.weight"),  # without one in any layer both halves read the same
    ("gemma4-dense", "blk.0.attn_v.weight"),  # of a layer with a window: values are no keys there
    ("gemma4-e", "blk.0.attn_v.weight"),
    ("modernbert", "blk.1.attn_norm.weight"),  # the first layer alone has none
    ("modernbert", "blk.0.ffn_norm.weight"),
]


@pytest.mark.parametrize(("file", "name"), LOST)
def test_what_a_layer_may_lack_it_may_lack_alone(file: str, name: str, data: Path) -> None:
    with open_gguf(data / "arch" / f"{file}.gguf") as gguf:
        load_config(gguf)
        del gguf.tensors[name]
        with pytest.raises(FileError, match=rf"{file}\.gguf: {name}: the tensor is missing"):
            load_config(gguf)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("bert", "token_embd_norm.weight"),
        ("bert", "token_embd_norm.bias"),
        ("bert", "token_types.weight"),
        ("modernbert", "token_embd_norm.weight"),
    ],
)
def test_encoders_need_what_their_embeddings_have(file: str, name: str, data: Path) -> None:
    """Of one type of tokens there need be no tensor: DistilBERT has none, RoBERTa has."""
    with open_gguf(data / "arch" / f"{file}.gguf") as gguf:
        gone = gguf.tensors.pop(name)
        with pytest.raises(FileError, match=rf"{file}\.gguf: {name}: the tensor is missing"):
            load_config(gguf)
        gguf.metadata = {**gguf.metadata, "tokenizer.ggml.token_type_count": 1}
        if name == "token_types.weight":
            assert load_config(gguf).n_types == 0
            gguf.tensors[name] = gone
            assert load_config(gguf).n_types == 2


@pytest.mark.parametrize("file", ["gpt-oss", "modernbert", "cohere2", "embeddinggemma", "olmo3"])
def test_a_pattern_of_windows_needs_a_window(file: str, data: Path) -> None:
    """0 says that there is none; a file of no size without one leaves the key out."""
    with open_gguf(data / "arch" / f"{file}.gguf") as gguf:
        key = next(key for key in gguf.metadata if key.endswith("attention.sliding_window"))
        assert any(layer.window for layer in load_config(gguf).layers)
        gguf.metadata = {**gguf.metadata, key: 0}
        assert not any(layer.window for layer in load_config(gguf).layers)
        gguf.metadata = {name: value for name, value in gguf.metadata.items() if name != key}
        with pytest.raises(FileError, match=rf"{file}\.gguf: {key}: the key is missing"):
            load_config(gguf)


@pytest.mark.parametrize("arch", ["gemma3", "exaone4", "phi3", "gemma2"])
def test_windows_that_sizes_of_an_architecture_leave_out(arch: str) -> None:
    """Gemma 2's is known, EXAONE 4's small model and others have none."""
    windows = {layer.window for layer in load_config(fake(arch)).layers}
    assert windows == ({0, 4096} if arch == "gemma2" else {0})


def test_keys_that_encoders_obey(data: Path) -> None:
    """Granite's ModernBERT has silu; no encoder's tokens see only those before them."""
    with open_gguf(data / "arch/modernbert.gguf") as gguf:
        arch = "modern-bert"
        whole = gguf.metadata
        for word, activation in (("gelu", "gelu_erf"), ("silu", "silu")):
            gguf.metadata = {**whole, f"{arch}.hidden_activation": word}
            assert load_config(gguf).arch.activation == activation
        for key, value, says in (
            (
                "hidden_activation",
                "bogus",
                "'bogus': treadle supports gelu, gelu_pytorch_tanh, silu",
            ),
            ("attention.causal", True, "causal attention is not supported"),
        ):
            gguf.metadata = {**whole, f"{arch}.{key}": value}
            with pytest.raises(UnsupportedError, match=rf"\.gguf: {arch}\.{key}: {says}"):
                load_config(gguf)


def test_values_are_keys_in_all_layers_without_a_window_or_in_none() -> None:
    gguf = fake("gemma4")
    assert {layer.mixer for layer in load_config(gguf).layers} == {"attention"}
    del gguf.tensors["blk.3.attn_v.weight"]
    with pytest.raises(FileError, match=r"blk\.3\.attn_v\.weight: the tensor is missing"):
        load_config(gguf)
    for i in range(7):
        gguf.tensors.pop(f"blk.{i}.attn_v.weight", None)
    assert {layer.mixer for layer in load_config(gguf).layers} == {"attention_keys"}


def test_a_norm_of_one_kind_of_layer_alone_is_damage() -> None:
    """GLM 4.5 has no ffn_norm, neither in dense layers nor in those with experts."""
    keys: dict[str, Any] = {
        "expert_count": 4,
        "expert_used_count": 2,
        "leading_dense_block_count": 1,
    }
    gguf = fake("glm4moe", **keys)
    gguf.tensors["blk.0.ffn_norm.weight"] = tensor("blk.0.ffn_norm.weight", (48,))
    with pytest.raises(FileError, match=r"blk\.1\.ffn_norm\.weight: the tensor is missing"):
        load_config(gguf)


def test_vocabulary_agrees_with_the_embeddings() -> None:
    gguf = fake()
    gguf.metadata["tokenizer.ggml.tokens"] = ["a"] * 31
    with pytest.raises(FileError, match=r"token_embd\.weight: has 32 rows \(expected 31"):
        load_config(gguf)
    del gguf.metadata["tokenizer.ggml.tokens"]
    assert load_config(gguf).n_vocab == 32
    gguf.metadata["llama.vocab_size"] = 33
    with pytest.raises(FileError, match="expected 33"):
        load_config(gguf)
    del gguf.tensors["token_embd.weight"]
    with pytest.raises(FileError, match=r"token_embd\.weight: is missing"):
        load_config(gguf)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"expert_used_count": 9}, "expert_used_count"),
        ({"expert_used_count": None}, "expert_used_count"),
        ({"expert_group_count": 3}, "expert_group_count"),
        ({"expert_group_count": 4, "expert_group_used_count": 5}, "expert_group_used_count"),
        # Of two groups of two there are not five to choose.
        (
            {"expert_used_count": 5, "expert_group_count": 4, "expert_group_used_count": 2},
            "expert_used_count",
        ),
        ({"nextn_predict_layers": 7}, "nextn_predict_layers"),
    ],
)
def test_experts_that_cannot_be_are_named(changes: dict[str, Any], key: str) -> None:
    keys = {"expert_count": 8, "expert_used_count": 2, **changes}
    with pytest.raises(FileError, match=rf"qwen3moe\.{key}"):
        load_config(fake("qwen3moe", **keys))


def test_layers_are_left_out_only_where_they_predict_further_tokens() -> None:
    """One too many in the key would make a model without its last layer, which writes nonsense."""
    gguf = fake("qwen3moe", nextn_predict_layers=2)
    gguf.tensors["blk.6.nextn.enorm.weight"] = tensor("blk.6.nextn.enorm.weight", (64,))
    says = r"qwen3moe\.nextn_predict_layers: counts layer 5 as an MTP layer, but it has no nextn"
    with pytest.raises(FileError, match=says):
        load_config(gguf)
    for name in [name for name in gguf.tensors if name.startswith("blk.5.")]:
        del gguf.tensors[name]  # a converter that dropped it left nothing of it
    load_config(gguf)


def test_unknown_tensors_are_listed(caplog: pytest.LogCaptureFixture) -> None:
    """In one line, once a process, as far as nothing else reads them."""
    gguf = fake(optional=("ffn_up.bias",))
    gguf.path = Path("mystery.gguf")
    names = ("blk.0.mystery.weight", "v.1", "v.2", "v.3", "v.4", "cls.weight", "dense_2.weight")
    gguf.tensors |= {name: tensor(name, (3,)) for name in names}
    for _ in range(2):
        config = load_config(gguf)
    assert config.ignored == names
    assert config.optional == frozenset({"ffn_up.bias"})
    says = "unused tensors: blk.0.mystery.weight, v.1, v.2, v.3 and 1 more (see"
    assert [record.getMessage() for record in caplog.records] == [
        f"mystery.gguf: {says} treadle inspect)"
    ]


@pytest.mark.parametrize("stem", ["blk.0.attn_q", "blk.5.ffn_down"])
def test_a_factor_of_a_matrix(stem: str) -> None:
    """llama.cpp's converter writes them for NVFP4. What quantises activations changes no sum."""
    gguf = fake()
    gguf.tensors[f"{stem}.input_scale"] = tensor(f"{stem}.input_scale", (1,), [0.5])
    assert not load_config(gguf).factors
    gguf.tensors[f"{stem}.scale"] = tensor(f"{stem}.scale", (1,), [0.5])
    config = load_config(gguf)
    assert config.factors == {f"{stem}.scale"}
    assert config.ignored == (f"{stem}.input_scale",)


def test_nothing_is_said_of_what_sound_files_have(caplog: pytest.LogCaptureFixture) -> None:
    """Layers that predict further tokens, and keys of layers that read others' (Gemma 4)."""
    gguf = fake("qwen3moe", nextn_predict_layers=1)
    gguf.tensors["blk.6.nextn.enorm.weight"] = tensor("blk.6.nextn.enorm.weight", (64,))
    load_config(gguf)
    gguf = fake("gemma4", attention__shared_kv_layers=1)
    assert "blk.6.attn_k.weight" in load_config(gguf).ignored
    assert not caplog.records


@pytest.mark.parametrize(
    ("file", "key", "value", "message"),
    [
        (
            "gemma4-moe",
            "gemma4.expert_count",
            None,
            r"blk\.0\.ffn_\S+: is unused: by the file's keys layer 0 is attention and gated",
        ),
        ("gemma4-moe", "gemma4.expert_count", 0, r"blk\.0\.ffn_\S+: is unused"),
        (
            "falconh1",
            "falcon-h1.attention.head_count_kv",
            0,
            r"blk\.0\.attn_\S+: is unused: by the file's keys layer 0 is mamba2 and gated",
        ),
        ("qwen3moe", "qwen3moe.leading_dense_block_count", 1, r"blk\.0\."),
        ("gemma4-e", "gemma4.embedding_length_per_layer_input", 0, r"per_layer_|inp_gate"),
    ],
)
def test_a_layer_of_another_kind_than_its_tensors(
    file: str, key: str, value: Any, message: str, data: Path
) -> None:
    """Without its experts, or its attention, it would compute something else."""
    with open_gguf(data / "arch" / f"{file}.gguf") as gguf:
        load_config(gguf)
        gguf.metadata = {**gguf.metadata, key: value}
        with pytest.raises(FileError, match=rf"{file}\.gguf: {message}"):
            load_config(gguf)


@pytest.mark.parametrize("file", ["deepseek3", "glm4moelite"])
def test_gating_that_a_file_does_not_name(file: str, data: Path) -> None:
    """GLM 4.7 Flash's files name none, and choose by a bias; DeepSeek 2's do neither."""
    with open_gguf(data / "arch" / f"{file}.gguf") as gguf:
        gguf.metadata = {k: v for k, v in gguf.metadata.items() if "gating_func" not in k}
        gatings = [layer.experts.gating for layer in load_config(gguf).layers if layer.experts]
        assert set(gatings) == {"sigmoid"}
        gguf.tensors = {k: v for k, v in gguf.tensors.items() if "exp_probs_b" not in k}
        gatings = [layer.experts.gating for layer in load_config(gguf).layers if layer.experts]
        assert set(gatings) == {"softmax"}


@pytest.mark.parametrize(
    ("gguf", "message"),
    [
        (fake("plamo"), r"'plamo': not supported: its model is custom code"),  # no slip
        (fake("Gemma-3"), r"treadle supports .*, t5encoder; did you mean gemma3\?$"),
        (fake("lama"), r"treadle supports .*, t5encoder; did you mean llama\?$"),
        (fake("qwne3"), r"treadle supports .*, t5encoder; did you mean qwen3\?$"),
        (fake("rwkv6"), r"'rwkv6': not supported: its states follow .*attention$"),
        (fake("mlama"), r"'mlama': treadle supports llama, .*, t5encoder$"),
        (fake("no-such"), r"'no-such': treadle supports llama, .*, t5encoder$"),
        (fake("superpoint"), r"'superpoint': treadle supports llama, .*, t5encoder$"),
        (
            fake(expert_count=8, expert_used_count=2, expert_gating_func=5),
            "5: treadle supports 0, 1",
        ),
        (fake(attention__causal=False), "an encoder"),
        (fake(rope__scaling__type="dynamic"), "'dynamic': treadle supports none, linear, yarn"),
    ],
    ids=[
        "other name",
        "sign",
        "lost",
        "swapped",
        "rwkv6",
        "mlama",
        "no-such",
        "far",
        "experts",
        "encoder",
        "scaling",
    ],
)
def test_unsupported(gguf: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        load_config(gguf)


@pytest.mark.parametrize("name", [None, 3])
def test_architecture_must_be_named(name: Any) -> None:
    gguf = fake()
    gguf.metadata["general.architecture"] = name
    with pytest.raises(FileError, match=r"general\.architecture"):
        load_config(gguf)


VALUES = st.one_of(
    st.none(),
    st.integers(-(1 << 63), 1 << 64),
    st.integers(0, 64),
    st.floats(),
    st.booleans(),
    st.sampled_from(["", "2", "yarn", "none"]),
    st.lists(st.one_of(st.integers(-2, 8), st.floats(), st.just("2")), max_size=8),
)
FUZZED = sorted({key for key, _ in BAD} | {"attention.sliding_window_pattern", "expert_count"})


@pytest.mark.slow
@given(st.sampled_from(sorted(ARCHS)), st.dictionaries(st.sampled_from(FUZZED), VALUES, max_size=4))
def test_any_value_gives_a_config_or_a_typed_error(arch: str, changes: dict[str, Any]) -> None:
    try:
        config = load_config(fake(arch, **changes))
    except TreadleError:
        return
    assert isinstance(config, Config)
    assert not any(layer.n_head % layer.n_head_kv for layer in config.layers)
    assert math.isfinite(config.attn_scale)


@pytest.mark.parametrize(
    "name",
    [
        "stories260K.gguf",
        "stories260K_split/stories260K-00001-of-00003.gguf",
        "babyllama105/babyllama105-Q4_1.gguf",
        "other/gridcore_test.gguf",
        "other/llama-2-tiny-random.gguf",
    ],
)
def test_real_files_load(data: Path, name: str) -> None:
    with open_gguf(data / "models" / name) as gguf:
        config = load_config(gguf)
    assert config.arch is ARCHS["llama"]
    assert config.ignored == ()


def test_a_file_that_is_no_language_model_is_refused(data: Path) -> None:
    with (
        open_gguf(data / "models/other/superpoint.gguf") as gguf,
        pytest.raises(UnsupportedError, match="superpoint"),
    ):
        load_config(gguf)


def test_surplus_layers_are_refused_by_name() -> None:
    """Without its last layers a model writes nonsense; other tensors are left aside."""
    with pytest.raises(
        FileError, match=r"fake\.gguf: blk\.5\.\S+: belongs to layer 5, but .* is 5"
    ):
        load_config(fake(block_count=5))
    gguf = fake()
    gguf.tensors["blk.0.attn_rot_embd"] = tensor("blk.0.attn_rot_embd", (6,))
    gguf.tensors["v.blk.9.ln.bias"] = tensor("v.blk.9.ln.bias", (6,))
    assert load_config(gguf).ignored == ("blk.0.attn_rot_embd", "v.blk.9.ln.bias")
