"""Encoders' Hugging Face folders: states, tokenizers and poolings, in place and converted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.test_hf import convert, prompt, worst
from tests.models.hf_cases import Case
from tests.models.hf_tiny import build, compute_logits, require_transformers
from tests.tiny import rounding
from treadle.api.embedding import Embedder
from treadle.convert.hf.folder import open_hf, open_hf_source
from treadle.convert.recipe import plan_entries
from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.files.gguf import GGUFWriter, open_gguf
from treadle.formats import by_name
from treadle.tokenizer.tokenizer import load_tokenizer
from treadle.tokenizer.vocab import SPACES

_ALL = {"num_key_value_heads": 4, "pad_token_id": 0}
_GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "tie_word_embeddings": True}
CASES: dict[str, Case] = {
    "bert": Case("Bert", "bert", _ALL, "Model"),
    "bert-tanh": Case("Bert", "bert", {**_ALL, "hidden_act": "gelu_new"}, "Model"),
    "bert-masked": Case("Bert", "bert", {**_ALL, "tie_word_embeddings": True}, "ForMaskedLM"),
    "xlm-roberta": Case("XLMRoberta", "bert", {**_ALL, "pad_token_id": 1}, "Model"),
    "nomic-bert": Case("NomicBert", "nomic-bert", _ALL, "Model"),
    "modern-bert": Case(
        "ModernBert",
        "modern-bert",
        {**_ALL, "num_hidden_layers": 6, "local_attention": 16},
        "Model",
    ),
    # The first layer has no norm before attention, and so no bias of one.
    "modern-bert-biases": Case(
        "ModernBert",
        "modern-bert",
        {
            **_ALL,
            "num_hidden_layers": 4,
            "local_attention": 16,
            "norm_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
        },
        "Model",
    ),
    "eurobert": Case("EuroBert", "eurobert", _ALL, "Model"),
}
# Sizes of the shared files that llama.cpp's converter wrote.
SHARED = {
    "bert": Case("Bert", "bert", {**_ALL, "max_position_embeddings": 64}, "Model"),
    "modernbert": CASES["modern-bert"],
}


def save(case: Case, folder: Path) -> Any:
    """Written by transformers in float32; its model, in float64."""
    require_transformers()
    import torch

    model = build(case)
    model.to(torch.float32).save_pretrained(folder)
    return model.to(torch.float64)


@pytest.mark.parametrize("case", CASES)
def test_states_in_place_and_converted(case: str, tmp_path: Path) -> None:
    model = save(CASES[case], tmp_path / "hf")
    ids = prompt()
    expected = compute_logits(getattr(model, model.base_model_prefix, model), ids)
    for path in (tmp_path / "hf", convert(tmp_path / "hf", tmp_path / "made.gguf")):
        with treadle.load(path, threads=2, kv="f32") as loaded:
            assert loaded.config.ignored == ()
            error = worst(loaded.states(ids), expected)
            assert error <= rounding(loaded.config), (path, error / rounding(loaded.config))


def test_norms_with_their_older_names(tmp_path: Path) -> None:
    """As bert-base-uncased has them."""
    from safetensors.numpy import load_file, save_file

    save(CASES["bert-masked"], tmp_path)
    path = tmp_path / "model.safetensors"
    older = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    states = []
    for _ in range(2):
        with treadle.load(tmp_path, threads=1) as model:
            states.append(model.states(prompt()))
        tensors = load_file(path)
        for new, old in older.items():
            tensors = {name.replace(new, old): tensors[name] for name in tensors}
        save_file(tensors, path)
    assert np.array_equal(states[0], states[1])
    assert sum(name.endswith(".gamma") for name in tensors) == 8


@pytest.mark.parametrize("asked", [None, "Q8_0"])
def test_tables_are_in_f32(asked: str | None, tmp_path: Path) -> None:
    """Of bfloat16 weights: llama.cpp adds rows of F32 to its states, and aborts at others."""
    import torch

    require_transformers()
    build(CASES["bert"]).to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    source = open_hf_source(tmp_path / "hf")
    entries = plan_entries(source, None if asked is None else by_name(asked))
    found = {entry.tensor.name: entry.type.name for entry in entries}
    source.close()
    assert {found["position_embd.weight"], found["token_types.weight"]} == {"F32"}
    assert {found["token_embd.weight"], found["blk.0.attn_q.weight"]} == {asked or "BF16"}
    assert found["blk.0.attn_q.bias"] == "F32"


@pytest.mark.parametrize("name", SHARED)
def test_converts_to_what_llama_cpp_has(name: str, tmp_path: Path, data: Path) -> None:
    save(SHARED[name], tmp_path / "hf")
    made = convert(tmp_path / "hf", tmp_path / "ours.gguf")
    with open_gguf(made) as ours, open_gguf(data / "arch" / f"{name}.gguf") as theirs:
        shapes = [{n: (t.shape, t.type_name) for n, t in f.tensors.items()} for f in (ours, theirs)]
        assert shapes[0] == shapes[1]
        arch = theirs.metadata["general.architecture"]
        for key in ("attention.causal", "attention.head_count", "attention.sliding_window"):
            assert ours.metadata.get(f"{arch}.{key}") == theirs.metadata.get(f"{arch}.{key}")


# -- poolings -----------------------------------------------------------------------------------


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    save(CASES["bert"], tmp_path / "bert")
    return tmp_path / "bert"


def pooled(folder: Path, said: dict[str, Any]) -> Any:
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(said))
    with open_hf(folder) as model:
        return model.metadata.get("bert.pooling_type")


def test_poolings(bert: Path) -> None:
    with open_hf(bert) as model:
        assert "bert.pooling_type" not in model.metadata
    for mode, number in (("cls_token", 2), ("mean_tokens", 1), ("lasttoken", 3)):
        assert pooled(bert, {f"pooling_mode_{mode}": True, "pooling_mode_max_tokens": False}) == (
            number
        )
    assert pooled(bert, {"pooling_mode": "cls"}) == 2
    assert pooled(bert, {"pooling_mode": ["cls"], "pooling_mode_mean_tokens": True}) == 2
    with pytest.raises(UnsupportedError, match="'weightedmean'"):
        pooled(bert, {"pooling_mode": "weightedmean", "pooling_mode_mean_tokens": True})
    with pytest.raises(UnsupportedError, match="max_tokens"):
        pooled(bert, {"pooling_mode_max_tokens": True})
    with pytest.raises(UnsupportedError, match="cls_token, pooling_mode_mean"):
        pooled(bert, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True})
    (bert / "modules.json").write_text('[{"type": "sentence_transformers.models.LSTM"}]')
    with pytest.raises(UnsupportedError, match="LSTM"):
        pooled(bert, {"pooling_mode": "cls"})
    (bert / "modules.json").write_text('{"type": 3}')
    with pytest.raises(FileError, match="modules"):
        pooled(bert, {"pooling_mode": "cls"})


def test_a_pooling_in_another_folder(bert: Path) -> None:
    """modules.json says where it is, and what is where it mostly is counts no more."""
    module = {"type": "sentence_transformers.models.Pooling", "path": "pool"}
    (bert / "modules.json").write_text(json.dumps([module]))
    with pytest.raises(FileError, match=r"pool/config\.json: cannot be opened"):
        pooled(bert, {"pooling_mode": "cls"})
    (bert / "pool").mkdir()
    (bert / "pool" / "config.json").write_text('{"pooling_mode": "lasttoken"}')
    assert pooled(bert, {"pooling_mode": "cls"}) == 3


# -- matrices behind the pooling -----------------------------------------------------------------

IDENTITY = "torch.nn.modules.linear.Identity"


def put_dense(folder: Path, *shapes: tuple[int, int], activation: str | None = IDENTITY) -> Any:
    """Dense modules as sentence-transformers writes them; the matrices."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(5)
    made = []
    modules = [{"type": "sentence_transformers.models.Transformer", "path": ""}]
    modules.append({"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"})
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    for i, shape in enumerate(shapes, 2):
        at = folder / f"{i}_Dense"
        at.mkdir(exist_ok=True)
        said = {} if activation is None else {"activation_function": activation}
        (at / "config.json").write_text(json.dumps(said))
        made.append(rng.standard_normal(shape).astype(np.float32))
        save_file({"linear.weight": made[-1]}, at / "model.safetensors")
        modules.append({"type": "sentence_transformers.models.Dense", "path": at.name})
    modules.append({"type": "sentence_transformers.models.Normalize", "path": ""})
    (folder / "modules.json").write_text(json.dumps(modules))
    return made


@pytest.mark.parametrize("deterministic", [False, True])
def test_matrices_behind_the_pooling(bert: Path, tmp_path: Path, deterministic: bool) -> None:
    """In place and converted: vectors are as wide as the last of them."""
    a, b = put_dense(bert, (96, 64), (32, 96))
    made = convert(bert, tmp_path / "made.gguf")
    texts = [prompt()[:9], prompt()[:21]]
    for path in (bert, made):
        with treadle.load(path, threads=2, kv="f32", deterministic=deterministic) as model:
            pooled = model.engine.embed(texts, unit=False).astype(np.float64)
            whole = pooled @ a.T @ b.T
            for dimensions in (None, 8):
                embedder = Embedder(model, dimensions=dimensions)
                cut = whole[:, :dimensions]
                expected = cut / np.linalg.norm(cut, axis=1, keepdims=True)
                assert np.abs(embedder.vectors(texts) - expected).max() < 1e-5
            bare = Embedder(model, normalize=False).vectors(texts)
            assert np.abs(bare - whole).max() < 1e-5 * np.abs(whole).max()
            with pytest.raises(TreadleError, match="expected 1 to 32"):
                Embedder(model, dimensions=33)
    with open_gguf(made) as file:
        sizes = [file.metadata[f"bert.dense_{i}_feat_{of}"] for i in (2, 3) for of in ("in", "out")]
        assert sizes == [64, 96, 96, 32]


def test_modules_that_are_refused(bert: Path) -> None:
    for activation, named in (("torch.nn.modules.activation.Tanh", "Tanh"), (None, "Tanh")):
        put_dense(bert, (96, 64), activation=activation)
        with pytest.raises(UnsupportedError, match=named):
            open_hf(bert)
    put_dense(bert, (64, 64))
    for said, named in (
        ({"use_residual": True}, "use_residual is true"),
        ({"module_input_name": "token_embeddings"}, "module_input_name: is 'token_embeddings'"),
        ({"module_output_name": "other"}, "module_output_name: is 'other'"),
    ):
        (bert / "2_Dense" / "config.json").write_text(
            json.dumps({"activation_function": IDENTITY, **said})
        )
        with pytest.raises(UnsupportedError, match=named):
            open_hf(bert)
    put_dense(bert, (96, 64), (32, 95))
    with pytest.raises(FileError, match=r"shape \[32, 95\].*\[any, 96\]"):
        open_hf(bert)
    put_dense(bert, (64, 64), (64, 64), (64, 64))
    with pytest.raises(UnsupportedError, match="at most 2 Dense"):
        open_hf(bert)
    kinds = [{"type": "models.Normalize"}, {"type": "models.Dense", "path": "2_Dense"}]
    (bert / "modules.json").write_text(json.dumps(kinds))
    with pytest.raises(UnsupportedError, match="in this order"):
        open_hf(bert)
    (bert / "modules.json").write_text(json.dumps([{"type": "m.Transformer", "path": "0_T"}]))
    with pytest.raises(UnsupportedError, match="the model is in '0_T'"):
        open_hf(bert)
    (bert / "modules.json").write_text(json.dumps([{"type": "models.Dense", "path": "../x"}]))
    with pytest.raises(FileError, match="a subfolder of this folder"):
        open_hf(bert)


# -- tokenizers ---------------------------------------------------------------------------------

TEXTS = [
    "Hello  world, this is a test.",
    "hello unaffable worlds",
    "  \t spaces   and\nlines ",
    "Ünïcödé ﬁne ½ 東京",
    "[SEP] </s> <s> in plain text",
    "",
]


def wordpiece() -> Any:
    from tokenizers import Tokenizer, normalizers, pre_tokenizers, trainers
    from tokenizers.models import WordPiece
    from tokenizers.processors import TemplateProcessing

    made = Tokenizer(WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=special)
    made.train_from_iterator(TEXTS * 3, trainer)
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return made


def unigram() -> Any:
    from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers, trainers
    from tokenizers.models import Unigram
    from tokenizers.processors import TemplateProcessing

    made = Tokenizer(Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=special, unk_token="<unk>")
    made.train_from_iterator(TEXTS * 3, trainer)
    made.normalizer = normalizers.Sequence(
        [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    made.post_processor = TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    return made


@pytest.mark.parametrize("make", [wordpiece, unigram])
def test_ids_are_those_of_tokenizers(make: Callable[[], Any], bert: Path, tmp_path: Path) -> None:
    theirs = make()
    theirs.save(str(bert / "tokenizer.json"))
    special = {token.content for token in theirs.get_added_tokens_decoder().values()}
    with open_hf(bert) as straight, open_gguf(convert(bert, tmp_path / "x.gguf")) as converted:
        for model in (straight, converted):
            ours = load_tokenizer(model)
            for text in TEXTS:
                if not any(name in text for name in special):
                    assert ours.encode(text) == theirs.encode(text).ids, text
            # Text never spells a control token, unless it is asked to.
            plain = ours.encode(TEXTS[4], bos=False)
            assert not any(ours.is_control(i) for i in plain)
            asked = ours.encode(TEXTS[4], special=True, bos=False)
            assert asked == theirs.encode(TEXTS[4], add_special_tokens=False).ids
            assert ours.decode(ours.encode("hello worlds")).strip() == "hello worlds"


RUNS, MARKED, WHITE, ONE = (
    {"type": "Replace", "pattern": {"Regex": regex}, "content": content}
    for regex, content in ((" {2,}", " "), (" {2,}", "▁"), (r"\s+", " "), (r"\s+", "▁"))
)
RIGHT = {"type": "Strip", "strip_left": False, "strip_right": True}
LEFT = {"type": "Strip", "strip_left": True, "strip_right": False}
MARKS = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
FIRST, NEVER = ({**MARKS, "prepend_scheme": scheme} for scheme in ("first", "never"))
SPLIT = {"type": "WhitespaceSplit"}
SPACED = [text for text in TEXTS if "<" not in text]
SPACED += [" a", "b ", "  a  b  ", "a\n\tb ", "\n a b\n", "   ", "▁a", "a ▁ b"]
BEFORE: tuple[list[Any], ...] = (
    [],
    [RUNS],
    [MARKED],
    [WHITE],
    [ONE],
    [RIGHT, MARKED],
    [RUNS, LEFT],
)
CUTS = ([MARKS], [FIRST], [NEVER], [SPLIT, MARKS], [SPLIT, FIRST], [{**FIRST, "split": False}])


@pytest.mark.parametrize("cuts", CUTS)
def test_what_is_done_to_spaces(cuts: list[Any], bert: Path, tmp_path: Path) -> None:
    """GGUF's keys have three ways; the others are in treadle's own."""
    from tokenizers import Tokenizer

    spec = json.loads(unigram().to_str())
    known = {piece for piece, _ in spec["model"]["vocab"]}
    more = [piece for piece in ("a▁b", "▁▁", "▁\n", "\n", "▁") if piece not in known]
    spec["model"]["vocab"] += [[piece, -3.0] for piece in more]
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": cuts}
    texts = [*SPACED, *(f"{a}</s>{b}" for a in SPACED[-4:] for b in SPACED[-8:])]
    for normalizers in BEFORE:
        spec["normalizer"] = {"type": "Sequence", "normalizers": normalizers}
        (bert / "tokenizer.json").write_text(json.dumps(spec))
        theirs = Tokenizer.from_str(json.dumps(spec))
        with open_hf(bert) as straight, open_gguf(convert(bert, tmp_path / "x.gguf")) as converted:
            for ours in map(load_tokenizer, (straight, converted)):
                for text in texts:
                    found = ours.encode(text, special=True, bos=False)
                    assert found == theirs.encode(text, add_special_tokens=False).ids, text
                if cuts == [FIRST] and LEFT not in normalizers:
                    ids = ours.encode("hello</s> a</s>b", special=True, bos=False)
                    assert ours.decode(ids) == "hello ab"


FORMS = ["NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "StripAccents"]


@pytest.mark.parametrize(
    "names", [*([name] for name in FORMS), ["Nmt", "NFKC", "runs"], ["NFD", "StripAccents"]]
)
def test_forms_of_unicode(names: list[str], bert: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    spec = json.loads(unigram().to_str())
    steps = [RUNS if name == "runs" else {"type": name} for name in names]
    nested = {"type": "Sequence", "normalizers": steps}
    texts = [
        *SPACED,
        "ﬁne Ａb １２",
        "Éa e\u0301 Å",
        "\u200b\u2028a\u3000b",
        "HELLO ｈｅllo",
        "½ ²",
    ]
    for node in (steps[0], nested) if len(steps) == 1 else (nested,):
        spec["normalizer"] = node
        (bert / "tokenizer.json").write_text(json.dumps(spec))
        theirs = Tokenizer.from_str(json.dumps(spec))
        with open_hf(bert) as straight, open_gguf(convert(bert, tmp_path / "x.gguf")) as converted:
            for ours in map(load_tokenizer, (straight, converted)):
                for text in texts:
                    found = ours.encode(text, special=True, bos=False)
                    assert found == theirs.encode(text, add_special_tokens=False).ids, text


@pytest.mark.parametrize(
    "cuts", [[], [SPLIT], [MARKS, SPLIT], [MARKS, MARKS], [{**MARKS, "replacement": "_"}]]
)
def test_cuts_that_are_refused(cuts: list[Any], bert: Path) -> None:
    spec = json.loads(unigram().to_str())
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": cuts}
    (bert / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(UnsupportedError, match="Metaspace"):
        open_hf(bert)


def test_steps_in_a_file_that_are_none(bert: Path, tmp_path: Path) -> None:
    spec = json.loads(unigram().to_str())
    spec["pre_tokenizer"] = FIRST
    (bert / "tokenizer.json").write_text(json.dumps(spec))
    source = open_hf_source(bert)
    assert source.metadata[SPACES] == "strip runs first"
    for steps in ("", "first first", "words charsmap first", "charsmap first", "runs", "3"):
        writer = GGUFWriter(tmp_path / "x.gguf")
        for key, value in {**source.metadata, SPACES: steps}.items():
            writer.add(key, value)
        writer.write()
        with open_gguf(tmp_path / "x.gguf") as gguf, pytest.raises(FileError, match="spaces"):
            load_tokenizer(gguf)
    source.close()


def test_a_table_that_rewrites_text(bert: Path) -> None:
    """sentencepiece's own, of XLM-RoBERTa and T5: compatibility forms become plain ones."""
    pytest.importorskip("sentencepiece")
    import io

    import sentencepiece

    raw = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([t for t in TEXTS if t] * 30),
        model_writer=raw,
        model_type="unigram",
        vocab_size=70,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    theirs = sentencepiece.SentencePieceProcessor(model_proto=raw.getvalue())
    spec = json.loads(unigram().to_str())
    pieces = range(theirs.get_piece_size())
    spec["model"]["vocab"] = [[theirs.id_to_piece(i), theirs.get_score(i)] for i in pieces]
    spec["model"]["unk_id"] = theirs.unk_id()
    spec["added_tokens"] = []
    spec["post_processor"] = None
    spec["normalizer"]["normalizers"][:0] = [
        {"type": "Precompiled", "precompiled_charsmap": _charsmap(raw.getvalue())}
    ]
    (bert / "tokenizer.json").write_text(json.dumps(spec))
    with open_hf(bert) as model:
        ours = load_tokenizer(model)
        for text in TEXTS[:4]:
            assert ours.encode(text, bos=False) == theirs.encode(text), text


def _charsmap(raw: bytes) -> str:
    """Field 2 of NormalizerSpec, which is field 3 of the model."""
    import base64

    from sentencepiece import sentencepiece_model_pb2

    model: Any = sentencepiece_model_pb2
    model = model.ModelProto.FromString(raw)
    return base64.b64encode(model.normalizer_spec.precompiled_charsmap).decode()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda s: s["model"].update(vocab=[["a", "b"]]), "pieces with scores"),
        (lambda s: s["model"].update(unk_id=999), "unk_id"),
        (lambda s: s.update(pre_tokenizer={"type": "Digits"}), "unsupported rule"),
        (lambda s: s.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "é"}), "64"),
    ],
)
def test_broken_vocabularies(change: Callable[[Any], Any], why: str, bert: Path) -> None:
    spec = json.loads(unigram().to_str())
    change(spec)
    (bert / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises((FileError, UnsupportedError), match=why), open_hf(bert) as model:
        load_tokenizer(model)


@pytest.mark.parametrize(
    ("part", "change", "why"),
    [
        ("model", {"max_input_chars_per_word": 200}, "max_input_chars_per_word is 200"),
        ("pre_tokenizer", {"type": "WhitespaceSplit"}, "pre_tokenizer.type is 'WhitespaceSplit'"),
        ("normalizer", {"handle_chinese_chars": False}, "handle_chinese_chars is False"),
        ("normalizer", {"clean_text": False}, "clean_text is False"),
        ("normalizer", {"type": "Lowercase"}, "treadle supports only BertNormalizer here"),
    ],
)
def test_other_words_than_bert_has(part: str, change: Any, why: str, bert: Path) -> None:
    """GGUF has no keys for them: texts would get other ids, without a sign."""
    spec = json.loads(wordpiece().to_str())
    (bert / "tokenizer.json").write_text(json.dumps(spec))
    open_hf(bert).close()
    spec[part] |= change
    (bert / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(UnsupportedError, match=why):
        open_hf(bert)


def test_texts_in_lower_case(bert: Path) -> None:
    """sentence-transformers may make texts lower case before a tokenizer that does not."""
    spec = json.loads(wordpiece().to_str())
    spec["normalizer"] |= {"lowercase": False, "strip_accents": False}
    (bert / "tokenizer.json").write_text(json.dumps(spec))
    ids = []
    for lower in (False, True):
        said = json.dumps({"max_seq_length": 128, "do_lower_case": lower})
        (bert / "sentence_bert_config.json").write_text(said)
        with open_hf(bert) as model:
            ids.append([load_tokenizer(model).encode(text) for text in ("Hello Ü", "hello ü")])
    assert ids[0][0] != ids[0][1]
    assert ids[1][0] == ids[1][1] == ids[0][1]
    (bert / "tokenizer.json").write_text(unigram().to_str())
    with pytest.raises(UnsupportedError, match=r"sentence_bert_config\.json: do_lower_case"):
        open_hf(bert)


@pytest.mark.parametrize("own", [{}, {"lowercase": False}, {"strip_accents": False}])
def test_lower_case_before_berts_own(own: dict[str, bool], bert: Path) -> None:
    from tokenizers import Tokenizer

    spec = json.loads(wordpiece().to_str())
    both = [{"type": "Lowercase"}, {**spec["normalizer"], **own}]
    spec["normalizer"] = {"type": "Sequence", "normalizers": both}
    (bert / "tokenizer.json").write_text(json.dumps(spec))
    theirs = Tokenizer.from_file(str(bert / "tokenizer.json"))
    with open_hf(bert) as model:
        ours = load_tokenizer(model)
        for text in ("Hello WORLDS", "HÉLLO h\u00e9llo", "E\u0301 One", "\u0130stanbul"):
            assert ours.encode(text) == theirs.encode(text).ids, text


@pytest.mark.parametrize("says", [{}, {"do_lower_case": False}, {"strip_accents": False}])
@pytest.mark.parametrize("lower", [False, True])
def test_berts_own_tokenizer(says: dict[str, bool], lower: bool, bert: Path) -> None:
    """transformers' class builds the normalizer anew, by tokenizer_config.json alone."""
    import transformers

    spec = json.loads(wordpiece().to_str())
    spec["normalizer"] |= {"lowercase": lower, "strip_accents": not lower}
    (bert / "tokenizer.json").write_text(json.dumps(spec))
    settings = {"tokenizer_class": "BertTokenizer", **says}
    (bert / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = transformers.AutoTokenizer.from_pretrained(bert)
    texts = ["Hello worlds", "HÉLLO h\u00e9llo", "e\u0301 one"]
    with open_hf(bert) as model:
        tokenizer = load_tokenizer(model)
        bare = [tokenizer.encode(text, bos=False) for text in texts]
    assert bare == [theirs(text, add_special_tokens=False).input_ids for text in texts]


def test_a_head_with_another_activation(tmp_path: Path) -> None:
    options = {**_ALL, "classifier_activation": "silu"}
    save(Case("ModernBert", "modern-bert", options, "ForSequenceClassification"), tmp_path)
    with pytest.raises(UnsupportedError, match="classifier_activation: is 'silu'"):
        open_hf(tmp_path)


@pytest.mark.parametrize("family", ["Qwen3", "Mistral"])
def test_decoders_without_a_head(family: str, tmp_path: Path) -> None:
    """Embedders are saved as they are trained: an output matrix of their own is not there."""
    options = {"head_dim": 32, "tie_word_embeddings": False, "sliding_window": None}
    arch = "llama" if family == "Mistral" else "qwen3"
    model = save(Case(family, arch, options, "Model"), tmp_path / "hf")
    (tmp_path / "hf" / "1_Pooling").mkdir()
    said = json.dumps({"pooling_mode_lasttoken": True})
    (tmp_path / "hf" / "1_Pooling" / "config.json").write_text(said)
    ids = prompt()
    expected = compute_logits(model, ids)
    for path in (tmp_path / "hf", convert(tmp_path / "hf", tmp_path / "made.gguf")):
        with treadle.load(path, threads=2, kv="f32") as loaded:
            error = worst(loaded.states(ids), expected)
            assert error <= rounding(loaded.config), (path, error / rounding(loaded.config))
            last = expected[-1] / np.linalg.norm(expected[-1])
            assert np.abs(loaded.engine.embed([ids])[0] - last).max() < 1e-5


def test_gemma_that_reads_both_ways(tmp_path: Path) -> None:
    """transformers halves the window when it reads a file, so that a saved one has half of it."""
    case = Case(
        "Gemma3",
        "gemma-embedding",
        {
            **_GEMMA,
            "num_hidden_layers": 7,
            "sliding_window": 16,
            "use_bidirectional_attention": True,
        },
        "TextModel",
    )
    model = save(case, tmp_path)
    ids = prompt()
    path = tmp_path / "config.json"
    assert model.config.sliding_window == 9
    path.write_text(json.dumps({**json.loads(path.read_text()), "sliding_window": 16}))
    with treadle.load(tmp_path, threads=2, kv="f32") as loaded:
        error = worst(loaded.states(ids), compute_logits(model, ids))
        assert error <= rounding(loaded.config)
