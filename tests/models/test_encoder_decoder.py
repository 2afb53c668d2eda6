"""T5 and its kin against a forward pass in float64, and what is wrong with a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.kernels.rows import DISTINCT, name
from tests.models.hf_tiny import N_VOCAB
from tests.reference_encoder_decoder import logits
from tests.tiny import rounding
from tests.tiny_t5 import VARIANTS, write_t5
from treadle.api.model import Model
from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.isa.isa import Isa
from treadle.models.graphs.encoder_decoder import encoder_config
from treadle.models.load import load_config

RNG = np.random.default_rng(7)
SOURCE = [int(i) for i in RNG.integers(3, N_VOCAB, 150)]  # longer than the reach of distances
IDS = [0, *(int(i) for i in RNG.integers(3, N_VOCAB, 139))]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("t5")
    return {variant: write_t5(folder / f"{variant}.gguf", variant) for variant in VARIANTS}


@pytest.fixture(scope="module")
def truth(paths: dict[str, Path]) -> dict[str, np.ndarray]:
    found = {}
    for variant, path in paths.items():
        with open_gguf(path) as gguf:
            config = load_config(gguf)
            found[variant] = logits(gguf, config, SOURCE, IDS)
    return found


def check(model: Model, found: np.ndarray, expected: np.ndarray) -> None:
    both = rounding(model.config) + rounding(encoder_config(model.config))
    assert np.abs(found - expected).max() <= both * np.abs(expected).max()


@pytest.mark.parametrize("variant", VARIANTS)
def test_in_one_go_and_in_chunks(
    variant: str, paths: dict[str, Path], truth: dict[str, np.ndarray]
) -> None:
    """A plain and a gated FFN, an output that is tied and scaled or neither, biases of the first
    layer or of each.
    """
    expected = truth[variant]
    with treadle.load(paths[variant], threads=2, kv="f32") as model:
        assert model.config.ignored == ()
        whole = model.logits(IDS, source=SOURCE)
        check(model, whole, expected)
        with model.session(source=SOURCE) as session:
            rows = [session.logits(IDS[:1])]
            for n in (3, 64, 70):
                rows.append(session.logits(IDS[session.n_past : session.n_past + n]))
            rows += [session.feed([i])[None] for i in IDS[session.n_past :]]
            check(model, np.concatenate(rows), expected)
            session.truncate(20)
            check(model, session.logits(IDS[20:60]), expected[20:60])
        model.plan(1).check()
        encoder = model.engine.encoder
        assert encoder is not None
        for plan in encoder.plans(len(SOURCE)):
            assert len(plan)
        encoder.engine.plan(len(SOURCE), 1, "states").check()
    with treadle.load(paths[variant], threads=1, kv="f32") as model:
        assert np.array_equal(model.logits(IDS, source=SOURCE), whole)


@pytest.mark.slow
@pytest.mark.parametrize("isa", DISTINCT, ids=name)
def test_every_kind_of_vectors(
    isa: Isa, paths: dict[str, Path], truth: dict[str, np.ndarray]
) -> None:
    with treadle.load(paths["flan"], threads=2, kv="f32", isa=isa.name) as model:
        assert model.isa is isa
        check(model, model.logits(IDS[:40], source=SOURCE), truth["flan"][:40])


def test_pages_of_16_bits(paths: dict[str, Path], truth: dict[str, np.ndarray]) -> None:
    """Keys and values lose half a unit of their last place, 2**-11 of them, in each of seven
    attentions, whose sums may double it.
    """
    with treadle.load(paths["t5"], threads=2) as model:
        error = np.abs(model.logits(IDS, source=SOURCE) - truth["t5"]).max()
        assert error <= 7 * 2 * 2.0**-11 * np.abs(truth["t5"]).max()


def test_deterministic_bits(paths: dict[str, Path]) -> None:
    """However the text is cut, and whatever else is in a batch."""
    with treadle.load(paths["flan"], threads=2, deterministic=True, n_sequences=2) as model:
        whole = model.logits(IDS[:40], source=SOURCE)
        with model.session(source=SOURCE) as session:
            rows = [session.logits(IDS[at : at + 7]) for at in range(0, 40, 7)]
            assert np.array_equal(np.concatenate(rows)[:40], whole)


def test_the_decoders_reach_has_one_direction(paths: dict[str, Path]) -> None:
    """The decoder's own numbers of near keys: those of the encoder would be others."""
    from treadle.kernels.attention.relative_bias import buckets

    far = np.arange(-200, 1)
    one, two = buckets(far, 32, 128, causal=True), buckets(far, 32, 128)
    assert one[-17:].tolist() == [*range(16, -1, -1)]
    assert one.max() == 31
    assert two.max() == 15
    assert not buckets(np.arange(1, 50), 32, 128, causal=True).any()


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"without": ("enc.blk.1.attn_q.weight",)}, "enc.blk.1.attn_q.weight: the tensor is miss"),
        ({"without": ("dec.blk.1.cross_attn_o.weight",)}, "blk.1.cross_attn_output.weight"),
        ({"without": ("enc.output_norm.weight",)}, "enc.output_norm.weight: the tensor is missing"),
        ({"without": ("enc.blk.0.attn_rel_b.weight",)}, "enc.blk.0.attn_rel_b.weight: the tensor"),
        ({"without": ("dec.blk.0.attn_rel_b.weight",)}, "blk.0.attn_rel_b.weight: the tensor is"),
        ({"keys": {"decoder_block_count": 3}}, "blk.2.attn_norm.weight: the tensor is missing"),
        ({"keys": {"decoder_block_count": 1}}, "layer 1, but t5.decoder_block_count is 1"),
        ({"keys": {"decoder_block_count": 0}}, "t5.decoder_block_count: is 0"),
        ({"keys": {"decoder_start_token_id": N_VOCAB}}, "t5.decoder_start_token_id: is 320"),
        ({"keys": {"attention.relative_buckets_count": 3}}, "t5.attention.relative_buckets_count"),
        ({"keys": {"block_count": 2}}, "enc.blk.2"),
        ({"keys": {"attention.head_count": 3}}, r"attn_rel_b.weight: shape \[32, 4\]"),
    ],
)
def test_damaged_files(more: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = write_t5(tmp_path / "t5.gguf", **more)
    with open_gguf(path) as gguf, pytest.raises(FileError, match=said):
        load_config(gguf)


def test_what_files_may_lack_or_have(tmp_path: Path) -> None:
    """llama.cpp's defaults; a bias of cross attention, which the first files have and no code
    reads.
    """
    with open_gguf(write_t5(tmp_path / "a.gguf", keys={"logit_scale": 1.0})) as gguf:
        assert load_config(gguf).logit_scale == 1.0
    with open_gguf(write_t5(tmp_path / "b.gguf", "flan")) as gguf:
        assert load_config(gguf).logit_scale == 1.0
    beside = {"dec.blk.0.cross_attn_rel_b.weight": (32, 4)}
    lacking = {"decoder_start_token_id": None}
    with open_gguf(write_t5(tmp_path / "c.gguf", beside=beside, keys=lacking)) as gguf:
        config = load_config(gguf)
        assert config.ignored == ("blk.0.cross_attn_rel_b.weight",)
        assert (config.start_id, config.logit_scale) == (0, 64**-0.5)
        assert (config.n_layer, encoder_config(config).n_layer) == (2, 3)


def test_calls_without_a_prompt(paths: dict[str, Path]) -> None:
    with treadle.load(paths["t5"], threads=1) as model:
        for call in (
            lambda: model.logits([0]),
            lambda: model.session().feed([0]),
            lambda: model.profile(1),
        ):
            with pytest.raises(UnsupportedError, match="a prompt that its encoder has read"):
                call()
        for call in (lambda: model.embed("the cat"), lambda: model.states([3])):
            with pytest.raises(UnsupportedError, match="t5 generates text"):
                call()
        with pytest.raises(TreadleError, match="the source is empty"):
            model.session(source=[])
        with pytest.raises(TreadleError, match="a token id outside"):
            model.session(source=[N_VOCAB])
