"""T5 and its kin from folders, converted and quantised, beside transformers in float64."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.test_hf import convert, keys_of
from tests.models.hf_tiny import N_VOCAB, float64_only, require_transformers
from tests.tiny import rounding
from treadle.convert.hf.folder import open_hf, open_hf_source
from treadle.convert.llamacpp_differences import reading_differences
from treadle.convert.recipe import plan_entries
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.formats import by_name
from treadle.models.graphs.encoder_decoder import encoder_config

END = 1
RNG = np.random.default_rng(5)
SOURCE = [int(i) for i in RNG.integers(3, N_VOCAB, 170)]
IDS = [0, *(int(i) for i in RNG.integers(3, N_VOCAB, 149))]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5", {"feed_forward_proj": "relu"}),
    "flan": ("T5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("MT5", {"tie_word_embeddings": False}),
    "umt5": ("UMT5", {"num_decoder_layers": 4}),
}


def save(case: str, folder: Path, **more: Any) -> Any:
    """Written by transformers in float32; its model, in float64."""
    require_transformers()
    import torch
    import transformers

    name, options = CASES[case]
    sizes = {"d_model": 64, "d_kv": 32, "d_ff": 96, "num_layers": 3, "num_heads": 4}
    given = {"vocab_size": N_VOCAB, "num_decoder_layers": 2, "decoder_start_token_id": 0}
    config = getattr(transformers, f"{name}Config")(**sizes, **{**given, **options, **more})
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    with float64_only():
        model = kind(config).eval()
        draws = torch.Generator().manual_seed(11)
        for at, weight in model.named_parameters():
            drawn = torch.randn(weight.shape, generator=draws, dtype=torch.float32).double()
            share = 1.0 if "bias" in at or "shared" in at else weight.shape[-1] ** -0.5
            share = 0.4 * share if at.endswith("Attention.q.weight") else share
            weight.data = 1 + 0.1 * drawn if weight.dim() == 1 else share * drawn
            weight.data = weight.data.float().double()
        if case != "t5":
            shape = model.shared.weight.shape
            drawn = 0.125 * torch.randn(shape, generator=draws, dtype=torch.float32)
            model.lm_head.weight = torch.nn.Parameter(drawn.double())
    model.to(torch.float32).save_pretrained(folder)
    return model.to(torch.float64)


def logits_of(model: Any, source: list[int], ids: list[int]) -> np.ndarray:
    import torch

    with float64_only(), torch.no_grad():
        made = model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([ids]))
    rows: np.ndarray = made.logits[0].numpy()
    assert rows.dtype == np.float64
    return rows


def greedy(model: Any, source: list[int], n: int) -> list[int]:
    import torch

    with float64_only(), torch.no_grad():
        given = {"max_new_tokens": n, "do_sample": False, "num_beams": 1, "use_cache": False}
        made = model.generate(torch.tensor([source]), **given)[0].tolist()
    return [i for i in made[1:] if i != model.config.eos_token_id]


@pytest.mark.parametrize("case", CASES)
def test_logits_and_texts(case: str, tmp_path: Path) -> None:
    """From the folder and from GGUF, in one go, in chunks and token by token."""
    model = save(case, tmp_path / "hf")
    expected = logits_of(model, SOURCE, IDS)
    sources = [SOURCE, SOURCE[:9], SOURCE[20:61]]
    texts = [greedy(model, source, 16) for source in sources]
    bits = []
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    for path, threads in ((tmp_path / "hf", 1), (made, 2)):
        with treadle.load(path, threads=threads, kv="f32", n_sequences=2) as loaded:
            assert loaded.config.ignored == ()
            allowed = rounding(loaded.config) + rounding(encoder_config(loaded.config))
            allowed *= np.abs(expected).max()
            bits.append(loaded.logits(IDS, source=SOURCE))
            assert np.abs(bits[-1] - expected).max() <= allowed
            with loaded.session(source=SOURCE) as session:
                rows = [session.logits(IDS[at : at + 47]) for at in range(0, 141, 47)]
                rows += [session.feed([i])[None] for i in IDS[141:]]
            assert np.abs(np.concatenate(rows) - expected).max() <= allowed
            found = loaded.generate_many(sources, max_tokens=16, temperature=0)
            cut = [each.ids[: (*each.ids, END).index(END)] for each in found]  # no vocabulary
            assert cut == texts
    assert np.array_equal(bits[0], bits[1])


@pytest.mark.parametrize("case", ["t5", "umt5"])
def test_what_is_written(case: str, tmp_path: Path) -> None:
    """The names that the gguf package lists; biases by distance stay F32."""
    gguf = pytest.importorskip("gguf")
    arch = gguf.MODEL_ARCH.T5
    known = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[arch]}
    save(case, tmp_path / "hf")
    with open_gguf(convert(tmp_path / "hf", tmp_path / "made.gguf")) as file:
        for name in file.tensors:
            assert re.sub(r"\.\d+\.", ".{bid}.", name.removesuffix(".weight")) in known, name
        for key, value in (
            (gguf.Keys.LLM.DECODER_BLOCK_COUNT, 4 if case == "umt5" else 2),
            (gguf.Keys.LLM.DECODER_START_TOKEN_ID, 0),
            (gguf.Keys.Attention.REL_BUCKETS_COUNT, 32),
        ):
            assert file.metadata[key.format(arch="t5")] == value
        assert ("output.weight" in file.tensors) == (case != "t5")
        (said,) = reading_differences(file.metadata, file.tensors)
        assert said.endswith("it multiplies no logits of t5; the file says 0.125")
    source = open_hf_source(tmp_path / "hf")
    found = {e.tensor.name: e.type.name for e in plan_entries(source, by_name("Q8_0"))}
    source.close()
    assert found["enc.blk.0.attn_o.weight"] == found["dec.blk.1.cross_attn_o.weight"] == "Q8_0"
    assert {kind for name, kind in found.items() if "rel_b" in name} == {"F32"}


def test_copies_of_the_embeddings(tmp_path: Path) -> None:
    """Checkpoints may have them under three names; the model has one matrix."""
    from safetensors.numpy import load_file, save_file

    model = save("flan", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    shared = tensors["shared.weight"]
    expected = logits_of(model, SOURCE, IDS[:9])
    for names in (
        ("decoder.embed_tokens.weight",),
        ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    ):
        del tensors["shared.weight"]
        tensors |= {name: shared.copy() for name in names}
        save_file(tensors, path)
        with treadle.load(tmp_path, kv="f32") as loaded:
            found = loaded.logits(IDS[:9], source=SOURCE)
            assert np.abs(found - expected).max() < 1e-4
        tensors["shared.weight"] = shared


@pytest.mark.parametrize("name", ["T5", "MT5", "UMT5"])
def test_defaults(name: str) -> None:
    require_transformers()
    import transformers

    left_out = {"model_type": name.lower(), "architectures": [f"{name}ForConditionalGeneration"]}
    full = getattr(transformers, f"{name}Config")().to_dict()
    keys = keys_of(left_out)
    assert keys == keys_of({**full, **left_out})
    assert keys["general.architecture"] == "t5"
    assert (keys["t5.logit_scale"] == 1.0) == (name == "MT5")


def test_damaged_folders(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    save("t5", tmp_path)
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    for name in (
        "encoder.block.1.layer.0.SelfAttention.q.weight",
        "decoder.block.1.layer.1.EncDecAttention.o.weight",
        "decoder.final_layer_norm.weight",
    ):
        save_file({key: value for key, value in whole.items() if key != name}, path)
        with pytest.raises(FileError, match=f"{re.escape(name)}: the tensor is missing"):
            open_hf(tmp_path)
    save_file({**whole, "decoder.block.2.layer.0.layer_norm.weight": np.ones(64, "f4")}, path)
    with pytest.raises(FileError, match=r"block\.2\.layer\.0\.layer_norm"):
        open_hf(tmp_path)
    save_file(whole, path)
    config = tmp_path / "config.json"
    said = json.loads(config.read_text())
    for key, value, kind in (
        ("relative_attention_max_distance", 64, UnsupportedError),
        ("feed_forward_proj", "gated-silu", UnsupportedError),
        ("decoder_start_token_id", N_VOCAB, FileError),
        ("num_decoder_layers", 0, FileError),
    ):
        config.write_text(json.dumps({**said, key: value}))
        with pytest.raises(kind, match=key):
            open_hf(tmp_path)


# -- vocabularies ----------------------------------------------------------------------------------

TEXTS = [
    *("Hello world", "  before and behind  ", "a\nb\n\nc", "tab\there", "a  b   c", "", " "),
    *("Übersetze: straße", "ﬁ ① ｆｕｌｌ", "日本語のテキスト。", "emoji 🙂", "e\u0301", "İ ǅ"),
    *("<extra_id_0> x <extra_id_99>", "</s> in text </s>", "<pad>", "<unk> token", "</s></s>"),
    *("<2de> How are you?", "<2de>How<2fr>are", "a<2de> b", "<2de>", "< 2de >", " <extra_id_1>x"),
    *("▁▁ marks ▁", "\u200b zero\u00a0nbsp", "don't stop-now.", "3.14", "\r\nwin\r\n", "x" * 50),
]


def sentencepieces(folder: Path) -> Path:
    """As T5's: a table of normal forms, no beginning, and languages as pieces of the user's."""
    import sentencepiece

    text = folder / "text.txt"
    page = Path(__file__).resolve().parents[2] / "docs" / "flow.md"
    text.write_text(page.read_text("utf-8") + "\n".join(TEXTS * 20), "utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "spiece"),
        vocab_size=900,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        user_defined_symbols=["<2de>", "<2fr>"],
        character_coverage=0.999,
        minloglevel=2,
    )
    text.unlink()
    return folder / "spiece.model"


def test_both_vocabularies_of_folders(tmp_path: Path) -> None:
    """``spiece.model`` alone and ``tokenizer.json`` alone, as folders are, and as GGUF."""
    require_transformers()
    pytest.importorskip("sentencepiece")
    import transformers

    save("t5", tmp_path / "pieces", vocab_size=1008)
    sentencepieces(tmp_path / "pieces")
    reader = transformers.T5Tokenizer.from_pretrained(tmp_path / "pieces")
    save("t5", tmp_path / "json", vocab_size=1008)
    reader.save_pretrained(tmp_path / "json")
    assert not (tmp_path / "json" / "spiece.model").exists()
    made = convert(tmp_path / "pieces", tmp_path / "made.gguf")
    for path in (tmp_path / "pieces", tmp_path / "json", made):
        with treadle.load(path) as loaded:
            tokenizer = loaded.tokenizer
            assert (tokenizer.pad, tokenizer.eos, tokenizer.unk) == (0, 1, 2)
            assert tokenizer.eog == {1}
            for text in TEXTS:
                ids = reader(text)["input_ids"]
                assert loaded.tokenize(text) == ids, text
                if not {2, *tokenizer.encode("<2de><2fr>", bos=False)} & set(ids):
                    assert loaded.detokenize(ids) == reader.decode(ids, skip_special_tokens=True)
    settings = tmp_path / "pieces" / "tokenizer_config.json"
    settings.write_text('{"extra_ids": 0}')  # mT5's
    with treadle.load(tmp_path / "pieces") as loaded:
        assert loaded.tokenizer.token_id("<extra_id_0>") is None


def test_a_vocabulary_of_another_kind(tmp_path: Path) -> None:
    require_transformers()
    sentencepiece = pytest.importorskip("sentencepiece")
    save("t5", tmp_path, vocab_size=1008)
    path = sentencepieces(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat\n" * 9)
    given = {"input": str(text), "model_prefix": str(tmp_path / "spiece"), "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(vocab_size=25, model_type="bpe", **given)
    with pytest.raises(UnsupportedError, match="of type BPE: treadle supports only unigram here"):
        open_hf(tmp_path)
    path.write_bytes(b"")
    with pytest.raises(FileError, match="sentencepiece"):
        open_hf(tmp_path)
