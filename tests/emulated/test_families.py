"""Families of models on emulated rows of Arm and RISC-V, and on the narrowest and the plain rows of
this machine: logits (states of an encoder) against float64, of a prompt and of decoding.

By default some stand for their kinds, and each runs on one row of this machine; with
TREADLE_EMULATED=all all of them run on both.
"""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tests import reference, reference_encoder_decoder
from tests.conftest import WriteTiny
from tests.emulated.device import GuestCpu
from tests.emulated.rows import EMULATED
from tests.kernels import rows
from tests.models.hf_tiny import N_VOCAB
from tests.tiny import rounding
from tests.tiny_t5 import write_t5
from treadle.api.encoder_decoder import open_encoder
from treadle.api.session import Session
from treadle.devices.cpu.device import Cpu
from treadle.engine.batch import BatchItem
from treadle.engine.engine import Engine
from treadle.files.gguf import open_gguf
from treadle.isa import ROWS
from treadle.models.graphs.encoder_decoder import encoder_config
from treadle.models.load import load_config

EVERY = os.environ.get("TREADLE_EMULATED") == "all"
# Each on another row than its neighbours.
FAMILIES = {
    "muse-glimmer": "neon_dotprod",
    "lfm3": "rvv256_zvfh",
    "bailingmoe3": "neon_bf16",
    "kimi-k3": "rvv128_zvfh",
    "deepseek32": "rvv128",
    "glm-dsa": "neon",
    "qwen4exp": "rvv512",
    "minimax-m3": "neon_i8mm",
    "spark2_5": "rvv256",
    "nanbeige": "neon",
    "embedding-gemma2": "rvv128_zvfh",
    "graniteswitch": "rvv256_zvfh",
    "inkling": "neon_dotprod",
    "axk2": "rvv256",
    "solar-open2": "neon_i8mm",
    "gigachat35": "neon_bf16",
    "cohere-compass": "rvv128",
    "deepseek4": "rvv256",
    "glm5-next": "neon_i8mm",
    "hy_v4": "rvv128_zvfh",
    "dots3note": "neon_bf16",
    "maple": "rvv512",
    "talkie": "neon",
    "hrm_text": "rvv256_zvfh",
    "llama-embed": "neon_dotprod",
    "t5": "rvv256",
}
# Their kernels are those of most others: of experts and windows, delta rules and latent attention,
# indexers by tokens and by blocks, streams and n-grams.
USUAL = ("muse-glimmer", "bailingmoe3", "deepseek32", "qwen4exp", "minimax-m3")
HOST = (rows.NARROW.name, "portable")
# Families with a test of their own on a row of this machine (``check_instruction_set``): here the
# first ones meet the plain row, the second ones the narrow one.
OWN_NARROW = (
    *("lfm3", "bailingmoe3", "graniteswitch", "inkling", "solar-open2"),
    "gigachat35",
    *("hy_v4", "dots3note", "maple", "hrm_text"),
)
OWN_PLAIN = ("muse-glimmer", "kimi-k3", "axk2", "cohere-compass", "talkie")


def host_row(i: int, arch: str) -> str:
    """Return the row of this machine for the i-th family: the others take turns."""
    if arch in OWN_NARROW:
        return HOST[1]
    return HOST[0] if arch in OWN_PLAIN else HOST[i % 2]


ON_HOST = [
    (arch, isa)
    for i, arch in enumerate(FAMILIES)
    for isa in HOST
    if EVERY or isa == host_row(i, arch)
]
N_TOKENS = 21  # more than a page of the cache


def check_family(device: Cpu, path: Path) -> None:
    """In one go, and the last two tokens one by one behind the others."""
    ids = np.random.default_rng(7).integers(6, 300, N_TOKENS).tolist()
    with open_gguf(path) as gguf:
        config = load_config(gguf)
        if config.switch is not None:  # without a control token there are no adapters
            ids[5] = config.switch.tokens[1]
        allowed = 2 * rounding(config)
        engine = Engine(gguf, config, device, n_ctx=64, kv="f32", n_sequences=2)
        if not config.causal:
            exact = reference.states(gguf, config, ids)
            found = engine.states(ids)
        else:
            exact = reference.forward(gguf, config, ids)
            with closing(engine.cache.sequence()) as whole:
                found = engine.run([BatchItem(whole, ids, N_TOKENS)]).copy()
            with closing(engine.cache.sequence()) as sequence:
                parts = [ids[:-2], ids[-2:-1], ids[-1:]]
                ends = [engine.run([BatchItem(sequence, part)])[0].copy() for part in parts]
            error = np.abs(np.array(ends) - exact[-3:]).max() / np.abs(exact).max()
            assert error <= allowed, ("decoding", error / allowed)
        engine.close()
    error = np.abs(found - exact).max() / np.abs(exact).max()
    assert error <= allowed, ("one go", error / allowed)


def check_t5(device: Cpu, path: Path) -> None:
    """A text that a prompt becomes, read in two parts."""
    rng = np.random.default_rng(7)
    source = [int(i) for i in rng.integers(3, N_VOCAB, N_TOKENS)]
    ids = [0, *(int(i) for i in rng.integers(3, N_VOCAB, N_TOKENS))]
    with open_gguf(path) as gguf:
        config = load_config(gguf)
        allowed = rounding(config) + rounding(encoder_config(config))
        exact = reference_encoder_decoder.logits(gguf, config, source, ids)
        engine = Engine(gguf, config, device, n_ctx=64, kv="f32", n_sequences=2)
        open_encoder(engine)
        with Session(engine, source=source) as session:
            found = np.concatenate([session.logits(ids[:-2]), session.logits(ids[-2:])])
        engine.close()
    error = np.abs(found - exact).max() / np.abs(exact).max()
    assert error <= allowed, error / allowed


def check(device: Cpu, arch: str, tiny: WriteTiny, folder: Path) -> None:
    if arch == "t5":
        check_t5(device, write_t5(folder / "t5.gguf", "flan"))
    else:
        check_family(device, tiny(arch))


@pytest.mark.parametrize("arch", FAMILIES if EVERY else USUAL)
def test_on_an_emulated_row(arch: str, tiny: WriteTiny, tmp_path: Path) -> None:
    check(GuestCpu(EMULATED[FAMILIES[arch]], 2), arch, tiny, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "isa"), ON_HOST)
def test_on_other_rows_of_this_machine(
    arch: str, isa: str, tiny: WriteTiny, tmp_path: Path
) -> None:
    check(Cpu(ROWS[isa], 2), arch, tiny, tmp_path)
