"""Models that listen: what is prepared of sounds, and their rows, against transformers' truth."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.media.media_cases import layout_text, off
from tests.media.sound_cases import (
    BY_NAME,
    CASES,
    RATE,
    SoundCase,
    clip_of,
    family,
    of_truth,
    opened,
    sound,
    truth_of,
)
from treadle.base.fork_safety import UseLock
from treadle.convert.open import open_model
from treadle.devices import open_device
from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.files.gguf import GGUFWriter, open_gguf
from treadle.files.metadata import MetadataReader
from treadle.files.tensor import Tensor
from treadle.media.clip_config import _IN_LAYERS, ClipConfig
from treadle.media.convolutions import rows_of_1d, rows_of_2d
from treadle.media.families import hf_names_of
from treadle.media.families.ultravox import Ultravox
from treadle.media.hf_projector import folder_modalities, is_media_folder
from treadle.media.mel import log_mel
from treadle.media.mel_input import MelSpectrogram
from treadle.media.prepared import PreparedMedia
from treadle.media.projector import MediaTower, Projector, open_projector, open_projector_file
from treadle.models.load import load_config
from treadle.tokenizer.tokenizer import load_tokenizer

NEAR = 1e-5  # of rows; a wrong activation is 1e-4 off, other mistakes 1e-2 and more
MEL_NEAR = 2e-5  # transformers' torch path is 1.5e-5 off its numpy path
every = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
folders = pytest.mark.parametrize(
    "case", [case for case in CASES if case.folder], ids=lambda case: case.name
)


def prepared(case: SoundCase, projector: Projector) -> PreparedMedia:
    return of_truth(case, projector.prepare(sound(), None, "audio"))


# -- preparation ------------------------------------------------------------------------------


@every
def test_frames_are_those_of_transformers(case: SoundCase, data: Path) -> None:
    made = prepared(case, opened(case.name, data))
    (expected,) = truth_of(case.name, data)["input_features"]
    (one,) = made.inputs
    n = min(len(one.patches), expected.shape[1])
    assert n >= 296
    assert np.abs(one.patches[:n] - expected.T[:n]).max() < MEL_NEAR


@every
def test_the_prompt_is_that_of_transformers(case: SoundCase, data: Path) -> None:
    projector = opened(case.name, data)
    of = projector.family("audio")
    text = layout_text(of, prepared(case, projector)).join(case.text)
    tokenizer = load_tokenizer(open_model(data / "media" / case.name / "text.gguf"))
    ids = tokenizer.encode(text, bos=False, special=True)
    assert ids == truth_of(case.name, data)["input_ids"][0].tolist()
    assert of.placeholders[0] in layout_text(of, prepared(case, projector)).replace(
        of.row_mark * case.n_rows, of.row_mark
    )


def qwen2audio_rows(n: int) -> int:
    frames = ceil(n / 160)  # transformers 5.24, qwen2_audio.processing_qwen2_audio
    return (((frames - 1) // 2 + 1) - 2) // 2 + 1


def qwen3asr_rows(n: int) -> int:
    n = max(n, 8000)  # transformers 5.24, qwen3_asr.processing_qwen3_asr
    frames = n // 160
    rest = frames % 100
    first = (rest - 1) // 2 + 1
    second = (first - 1) // 2 + 1
    return (second - 1) // 2 + 1 + frames // 100 * 13


@pytest.mark.parametrize(
    ("name", "rows", "lengths"),
    [
        ("qwen2audio", qwen2audio_rows, [321, 480, 640, 641, 801, 16000, 47999, 48000]),
        ("qwen3asr", qwen3asr_rows, [1, 7999, 8161, 16000, 16160, 31999, 128000, 128160, 900000]),
        ("voxtral", lambda n: 37 * ceil(n / 47360), [1, 160, 47360, 47361, 48000, 300000]),
    ],
)
def test_rows_by_length(
    name: str, rows: Callable[[int], int], lengths: list[int], data: Path
) -> None:
    """As many as transformers' processors count, and no frame is computed for it."""
    of = family(clip_of(name, data))
    for n in lengths:
        made = of.prepare(np.zeros(n, np.float32), None)
        assert made.n_rows == made.advance == rows(n), n
        ranges = [part for part in made.layout if isinstance(part, range)]
        assert ranges == [range(made.n_rows)]
        assert made.size == (1, n)
        assert made.positions is None
        assert made.n_bytes < 4 * max(n, made.resized[1]) + 200_000
        sound = made.inputs[0].sound  # type: ignore[union-attr]
        assert "frames" not in vars(sound)


@every
def test_silence_and_very_short_sounds(case: SoundCase, data: Path) -> None:
    projector = opened(case.name, data)
    for n in (1, 150, 5000):
        made = projector.prepare(np.zeros(n, np.float32), None, "audio")
        rows = projector.encode(made)
        assert made.n_rows == len(rows) >= 1
        assert np.isfinite(rows).all()


@every
def test_bad_sounds(case: SoundCase, data: Path) -> None:
    of = family(clip_of(case.name, data))
    with pytest.raises(TreadleError, match="a sound without samples"):
        of.prepare(np.zeros(0, np.float32), None)
    with pytest.raises(TreadleError, match=r"a sound of [0-9]+ rows, more than 20"):
        of.prepare(sound(2.96), 20)


def test_qwen2_audio_hears_one_window(data: Path) -> None:
    of = family(clip_of("qwen2audio", data))
    assert of.prepare(sound(3.0), None).n_rows == 75
    with pytest.raises(TreadleError, match=r"a sound of 3.1 s: this model hears at most 3 s"):
        of.prepare(sound(3.1), None)


def test_the_spectrogram_is_that_of_the_whole_sound() -> None:
    """The loudest frame of all bounds the quietest of each part; behind the end are zeros."""
    quiet_then_loud = np.concatenate([1e-4 * sound(1), sound(1)])
    mel = MelSpectrogram(quiet_then_loud, 80, 2 * RATE)
    assert np.array_equal(mel.frames, log_mel(quiet_then_loud, 80).T)
    assert np.abs(mel.frames[:90] - log_mel(quiet_then_loud[:RATE], 80).T[:90]).max() > 0.1


def test_convolutions_are_products() -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((7, 2)), rng.standard_normal((4, 2, 3))
    for step in (1, 2):
        found = rows_of_1d(x, step) @ w.reshape(4, -1).T
        for i, row in enumerate(found):
            at = [step * i + k for k in range(-1, 2)]
            seen = sum(w[:, :, k] @ x[j] for k, j in enumerate(at) if 0 <= j < len(x))
            assert np.allclose(row, seen)
    x, w = rng.standard_normal((5, 4, 2)), rng.standard_normal((3, 2, 3, 3))
    found = (rows_of_2d(x, 2) @ w.reshape(3, -1).T).reshape(3, 2, 3)
    padded = np.pad(x, ((1, 1), (1, 1), (0, 0)))
    for i in range(3):
        for j in range(2):
            seen = padded[2 * i : 2 * i + 3, 2 * j : 2 * j + 3]
            assert np.allclose(found[i, j], np.einsum("oikl,kli->o", w, seen))


# -- rows -------------------------------------------------------------------------------------


def check_rows(case: SoundCase, projector: Projector, data: Path) -> None:
    rows = projector.encode(prepared(case, projector))
    expected = truth_of(case.name, data)["projected"].reshape(case.n_rows, -1)
    assert rows.dtype == np.float32
    assert off(rows, expected) < NEAR


@every
def test_rows_are_the_truth_s(case: SoundCase, data: Path) -> None:
    check_rows(case, opened(case.name, data), data)


@folders
def test_rows_of_a_folder(case: SoundCase, data: Path) -> None:
    projector = opened(case.name, data, folder=True)
    assert projector.modalities == ("audio",)
    check_rows(case, projector, data)


@every
def test_rows_on_another_instruction_set(case: SoundCase, data: Path) -> None:
    check_rows(case, opened(case.name, data, isa="avx2"), data)


@every
def test_products_of_16_bit_numbers(case: SoundCase, data: Path) -> None:
    projector = opened(case.name, data, exact=False)
    rows = projector.encode(prepared(case, projector))
    expected = truth_of(case.name, data)["projected"].reshape(case.n_rows, -1)
    assert off(rows, expected) < 1e-3


@pytest.mark.parametrize("name", ["voxtral", "qwen3asr"])
def test_states_are_the_truth_s(name: str, data: Path) -> None:
    case = BY_NAME[name]
    projector = opened(name, data)
    tower = projector.towers["audio"]
    made = prepared(case, projector)
    tower.projectors = []
    tower.family.projectors = ()
    tower.family.projector_input = lambda states, grid: states  # type: ignore[method-assign]
    expected = truth_of(name, data)["tower"].reshape(-1, 64)
    assert off(projector.encode(replace(made, n_rows=len(expected))), expected) < NEAR


@every
def test_it_fits_its_decoder(case: SoundCase, data: Path) -> None:
    projector = opened(case.name, data)
    config = load_config(open_gguf(data / "media" / case.name / "text.gguf"))
    projector.check(config)
    with pytest.raises(TreadleError, match="audio rows have 64 values; the model's have 128"):
        projector.check(replace(config, n_embd=128))
    with pytest.raises(TreadleError, match=r"audio rows are for models of type .*; this model is"):
        projector.check(replace(config, arch=replace(config.arch, name="gemma3")))
    with pytest.raises(TreadleError, match="reads no image, only audio"):
        projector.family("image")


def finished(tower: MediaTower, made: list[PreparedMedia]) -> list[np.ndarray]:
    runs = tower.encode(made)
    while True:
        try:
            next(runs)
        except StopIteration as done:
            rows: list[np.ndarray] = done.value
            return rows


@every
def test_sounds_encoded_together_have_the_bits_of_each_alone(case: SoundCase, data: Path) -> None:
    projector = opened(case.name, data)
    sounds = [sound(), sound()[::-1].copy(), sound(1.5), sound(2.2)]
    made = [projector.prepare(each, None, "audio") for each in sounds]
    alone = [projector.encode(each) for each in made]
    together = finished(projector.towers["audio"], made)
    assert all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True))
    assert off(alone[1], alone[0]) > 1e-2


def test_windows_of_qwen3_asr_do_not_see_each_other(data: Path) -> None:
    """8 s each, with the spectrogram of the whole sound."""
    projector = opened("qwen3asr", data)
    both = np.concatenate([sound(8), 0.5 * sound(1)])
    made = projector.prepare(both, None, "audio")
    assert [each.grid for each in made.inputs] == [(1, 104), (1, 13)]
    rows = projector.encode(made)
    parts = [
        replace(made, inputs=(each,), n_rows=each.grid[1], layout=(range(each.grid[1]),))
        for each in made.inputs
    ]
    assert np.array_equal(rows, np.concatenate([projector.encode(each) for each in parts]))


def test_progress_and_plans(data: Path) -> None:
    """Convolutions are reported as part of the work, and warmed with the tower."""
    for case in CASES:
        projector = opened(case.name, data)
        made = projector.prepare(sound(), None, "audio")
        projector.warm(made)
        tower = projector.towers["audio"]
        engines = [engine for engine, _ in tower.engine_runs(made)]
        assert set(map(id, engines)) == set(
            map(id, (*tower.stems, tower.engine, *tower.projectors))
        )
        plans = [set(engine._ready) for engine in engines]
        shares: list[float] = []
        runs = projector.encode_runs([made], shares.append)
        for _ in runs:
            pass
        assert shares == sorted(shares)
        assert 0 < shares[0] <= tower.family.stem_share
        assert shares[-1] == pytest.approx(1)
        assert [set(engine._ready) for engine in engines] == plans
        projector.close()


# -- Ultravox ---------------------------------------------------------------------------------

STACK = 8
N_OUT = 64


def ultravox_clip(
    data: Path, *, edit: Callable[[dict[str, np.ndarray]], None] | None = None
) -> ClipConfig:
    """Voxtral's encoder with a projector of Ultravox in llama.cpp's layout."""
    clip = clip_of("voxtral", data)
    rng = np.random.default_rng(1)
    width = STACK * clip.n_embd
    made = {
        "mm.a.norm_pre.weight": 0.4 + rng.random(width),
        "mm.a.mlp.1.weight": rng.standard_normal((80, width)) / width**0.5,
        "mm.a.norm_mid.weight": 0.4 + rng.random(40),
        "mm.a.mlp.2.weight": rng.standard_normal((N_OUT, 40)) / 40**0.5,
    }
    if edit is not None:
        edit(made)
    values = {**dict(clip.keys.values), "projector.stack_factor": STACK}
    keys = MetadataReader(values, clip.keys.path, None, clip.keys.prefix)
    clip = replace(clip, projector_type="ultravox", keys=keys)
    old = {name for name in clip.gguf.tensors if name.startswith("mm.")}
    clip = clip.replaced({name: values.astype(np.float32) for name, values in made.items()})
    clip.gguf.tensors = {n: t for n, t in clip.gguf.tensors.items() if n not in old - made.keys()}
    return clip


def erf(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.vectorize(math.erf)(x))


def gelu(x: np.ndarray) -> np.ndarray:
    return np.asarray(0.5 * x * (1 + erf(x / 2**0.5)))


def layer_norm(x: np.ndarray, w: np.ndarray, b: np.ndarray) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return np.asarray(centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * w + b)


def rms_norm(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * w)


def encoder_twin(clip: ClipConfig, mel: np.ndarray) -> np.ndarray:
    """Whisper's encoder in float64: states [n, n_embd] of frames [n_frames, n_mels]."""

    def w(name: str) -> np.ndarray:
        return np.asarray(clip.gguf.tensors[name].dequantize(), np.float64)

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        y = x @ w(f"{name}.weight").T
        return np.asarray(y + w(f"{name}.bias") if clip.has(f"{name}.bias") else y)

    x = gelu(linear(rows_of_1d(mel.astype(np.float64), 1), "conv1d.1"))
    x = gelu(linear(rows_of_1d(x, 2), "conv1d.2"))
    x = x + w("position_embd.weight")[: len(x)]
    n_head = clip.n_head
    for i in range(clip.n_layer):
        at = f"blk.{i}"
        h = layer_norm(x, w(f"{at}.attn_norm.weight"), w(f"{at}.attn_norm.bias"))
        q, k, v = (
            linear(h, f"{at}.attn_{name}").reshape(len(h), n_head, -1).transpose(1, 0, 2)
            for name in "qkv"
        )
        scores = q @ k.transpose(0, 2, 1) / q.shape[-1] ** 0.5
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        seen = (scores / scores.sum(-1, keepdims=True)) @ v
        x = x + linear(seen.transpose(1, 0, 2).reshape(len(h), -1), f"{at}.attn_output")
        h = layer_norm(x, w(f"{at}.ffn_norm.weight"), w(f"{at}.ffn_norm.bias"))
        x = x + linear(gelu(linear(h, f"{at}.ffn_up")), f"{at}.ffn_down")
    return layer_norm(x, w("post_ln.weight"), w("post_ln.bias"))


def projector_twin(clip: ClipConfig, states: np.ndarray) -> np.ndarray:
    """Ultravox's projector in float64; the second half of the first product is the gate."""

    def w(name: str) -> np.ndarray:
        return np.asarray(clip.gguf.tensors[f"mm.a.{name}.weight"].dequantize(), np.float64)

    states = np.pad(states, ((0, -len(states) % STACK), (0, 0)))
    x = rms_norm(states.reshape(len(states) // STACK, -1), w("norm_pre")) @ w("mlp.1").T
    up, gate = np.split(x, 2, axis=1)
    return np.asarray(rms_norm(up * gate / (1 + np.exp(-gate)), w("norm_mid")) @ w("mlp.2").T)


def test_the_twin_is_whisper_s_encoder(data: Path) -> None:
    """Against transformers' own states of Voxtral, which has the same encoder."""
    truth = truth_of("voxtral", data)
    states = encoder_twin(clip_of("voxtral", data), truth["input_features"][0].T)
    assert off(states, truth["tower"][0]) < 1e-6


@pytest.mark.parametrize("seconds", [0.01, 1.0, 1.33, 4.0])
def test_rows_of_ultravox(seconds: float, data: Path) -> None:
    """The sound alone, without silence behind it; longer ones in windows (here of 2.96 s)."""
    clip = ultravox_clip(data)
    of = family(clip)
    assert isinstance(of, Ultravox)
    samples = sound(seconds)
    made = of.prepare(samples, None)
    n = max(ceil(len(samples) / 160), 2)
    windows = [min(296, n - at) for at in range(0, n, 296)]
    assert made.n_rows == sum(ceil(each / 16) for each in windows)
    assert made.layout == (range(made.n_rows),)
    mel = log_mel(samples, 128, 160 * n).T
    expected = np.concatenate(
        [projector_twin(clip, encoder_twin(clip, mel[at : at + 296])) for at in range(0, n, 296)]
    )
    device = open_device("cpu", None, 1, None)

    tower = MediaTower(of, device, UseLock(), exact=True)
    (rows,) = finished(tower, [made])
    assert rows.shape == (made.n_rows, N_OUT)
    assert off(rows, expected) < NEAR


def test_ultravox_of_other_layouts(data: Path) -> None:
    """Version 0.4's norm behind the projector is another model; odd halves are damage."""
    device = open_device("cpu", None, 1, None)

    def older(tensors: dict[str, np.ndarray]) -> None:
        del tensors["mm.a.norm_mid.weight"]

    with pytest.raises(FileError, match=r"mm.a.norm_mid.weight.*missing"):
        MediaTower(family(ultravox_clip(data, edit=older)), device, UseLock())

    def odd(tensors: dict[str, np.ndarray]) -> None:
        tensors["mm.a.mlp.1.weight"] = tensors["mm.a.mlp.1.weight"][:79]

    with pytest.raises(FileError, match=r"mm.a.mlp.1.weight.*shape \[79, 512\]"):
        family(ultravox_clip(data, edit=odd))


def ultravox_file(data: Path, to: Path) -> Path:
    """The same as a file in llama.cpp's layout."""
    clip = ultravox_clip(data)
    writer = GGUFWriter(to)
    with open_gguf(data / "media" / "voxtral" / "mmproj.gguf") as gguf:
        keys = {key: value for key, value in gguf.metadata.items() if "quantization" not in key}
    keys |= {"clip.projector_type": "ultravox", "clip.audio.projector.stack_factor": STACK}
    for key, value in keys.items():
        writer.add(key, value)
    stems = {ours: theirs for theirs, ours in _IN_LAYERS.items()}
    for name, tensor in clip.gguf.tensors.items():
        *at, stem, kind = name.split(".")
        own = name if name.startswith("mm.") else ".".join(["a", *at, stems.get(stem, stem), kind])
        values = tensor.dequantize().astype(np.float32)
        writer.add_tensor(own, values.shape, "F32", values)
    writer.write()
    return to


LLAMA = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_ultravox_in_a_conversation(data: Path, tmp_path: Path) -> None:
    """Its model's template knows texts alone: a sound stands where the message has it, without
    tokens around it, and a user's own mark stays text.
    """
    made = ultravox_file(data, tmp_path / "mmproj.gguf")
    text = data / "media" / "voxtral" / "text.gguf"
    settings: dict[str, Any] = {"kv": "f32", "threads": 1, "context": 256}
    with treadle.load(text, mmproj=made, chat_template=LLAMA, **settings) as model:
        assert model.modalities == {"audio"}
        parts = [
            {"type": "text", "text": "Listen <|audio|>: "},
            {"type": "audio", "audio": (sound(1.0), RATE)},
            {"type": "text", "text": " What is said?"},
        ]
        answer = model.chat([{"role": "user", "content": parts}], max_tokens=2)
        answer.finish()
        (usage,) = answer.media
        assert usage.n_tokens == 7
        first = model.engine.media.first_id
        ids = list(answer.prompt_ids)
        where = [i for i, id in enumerate(ids) if id >= first]
        assert where == list(range(where[0], where[0] + 7))
        assert model.detokenize(ids[: where[0]]).endswith("Listen <|audio|>: \n")
        assert model.detokenize(ids[where[-1] + 1 :]) == "\n What is said?<|assistant|>"


def ultravox_folder(data: Path, to: Path, *, whole: bool, **config: Any) -> Path:
    """The same as a folder: Voxtral's encoder and text model, in Ultravox's names. ``whole``:
    whether the text model's weights are among them.
    """
    source = data / "media" / "voxtral"
    raw = (source / "model.safetensors").read_bytes()
    n = 8 + int.from_bytes(raw[:8], "little")
    made: dict[str, tuple[str, list[int], bytes]] = {}
    for name, each in json.loads(raw[8:n]).items():
        if name != "__metadata__" and "multi_modal_projector" not in name:
            first, last = each["data_offsets"]
            made[name] = each["dtype"], each["shape"], raw[n + first : n + last]
    clip = ultravox_clip(data)
    names = {"norm_pre": "ln_pre", "mlp.1": "linear_1", "norm_mid": "ln_mid", "mlp.2": "linear_2"}
    for ours, theirs in names.items():
        weight = clip.gguf.tensors[f"mm.a.{ours}.weight"].dequantize()
        of = "F32", [*weight.shape], weight.tobytes()
        made[f"multi_modal_projector.{theirs}.weight"] = of
    if not whole:
        made = {n: each for n, each in made.items() if n.startswith(("audio_", "multi_"))}
    to.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (to / name).write_bytes((source / name).read_bytes())
    keys = json.loads((source / "config.json").read_text())
    keys |= {"model_type": "ultravox", "stack_factor": STACK, "projector_ln_mid": True, **config}
    (to / "config.json").write_text(json.dumps(keys))
    header: dict[str, Any] = {}
    body = b""
    for name, (dtype, shape, data_of) in made.items():
        place = len(body), len(body) + len(data_of)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": place}
        body += data_of
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    (to / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + body)
    return to


def test_a_folder_of_ultravox(data: Path, tmp_path: Path) -> None:
    """As a projector beside another model, whose weights it may lack; opened alone, it names that
    model.
    """
    device = open_device("cpu", None, 1, None)
    file = open_projector(ultravox_file(data, tmp_path / "mmproj.gguf"), device, exact=True)
    expected = file.encode(file.prepare(sound(1.0), None, "audio"))
    given = {"text_config": None, "text_model_id": "meta-llama/Llama-3.2-1B-Instruct"}
    folder = ultravox_folder(data, tmp_path / "apart", whole=False, **given)
    projector = open_projector(folder, device, exact=True)
    rows = projector.encode(projector.prepare(sound(1.0), None, "audio"))
    assert off(rows, expected) < NEAR  # of BF16, which the file has as F32
    text = data / "media" / "voxtral" / "text.gguf"
    settings: dict[str, Any] = {"threads": 1, "context": 256}
    with treadle.load(text, mmproj=folder, chat_template=LLAMA, **settings) as model:
        assert model.modalities == {"audio"}
    what = r"no weights of its text model \(they are those of meta-llama/Llama-3.2-1B-Instruct\)"
    with pytest.raises(UnsupportedError, match=what):
        treadle.load(folder, **settings)
    whole = ultravox_folder(data, tmp_path / "whole", whole=True)
    with treadle.load(whole, chat_template=LLAMA, **settings) as model:
        assert model.modalities == {"audio"}
        assert model.config.arch.name == "llama"


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("projector_ln_mid", False, "before 0.5"),
        ("projector_act", "gelu", "expected 'swiglu'"),
        ("num_projector_layers", 2, "not supported"),
        ("audio_latency_block_size", 100, "not supported"),
    ],
)
def test_folders_of_ultravox_that_are_refused(
    key: str, value: Any, what: str, data: Path, tmp_path: Path
) -> None:
    folder = ultravox_folder(data, tmp_path / "apart", whole=False, **{key: value})
    with pytest.raises(UnsupportedError, match=f"{key}.*{what}"):
        open_projector_file(folder)


# -- damaged files ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("qwen2audio", "a.conv1d.1.weight"),
        ("qwen2audio", "a.position_embd.weight"),
        ("qwen2audio", "mm.a.fc.weight"),
        ("voxtral", "mm.a.mlp.2.weight"),
        ("voxtral", "a.post_ln.weight"),
        ("qwen3asr", "a.conv2d.2.weight"),
        ("qwen3asr", "a.conv_out.weight"),
        ("qwen3asr", "a.blk.1.ffn_up.weight"),
    ],
)
def test_a_missing_tensor_is_named(name: str, tensor: str, data: Path) -> None:
    gguf = open_gguf(data / "media" / name / "mmproj.gguf")
    del gguf.tensors[tensor]
    with pytest.raises(FileError, match=f"{tensor.removeprefix('a.')}.*missing"):
        open_projector(gguf, open_device("cpu", None, 1, None))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("qwen2audio", "a.conv1d.1.weight"),
        ("qwen2audio", "a.conv1d.2.weight"),
        ("voxtral", "a.position_embd.weight"),
        ("qwen3asr", "a.conv2d.1.weight"),
        ("qwen3asr", "a.conv2d.3.weight"),
        ("qwen3asr", "a.position_embd.weight"),
    ],
)
def test_a_tensor_of_another_shape_is_named(name: str, tensor: str, data: Path) -> None:
    """Half as many rows, twice as wide."""
    gguf = open_gguf(data / "media" / name / "mmproj.gguf")
    of: Tensor = gguf.tensors[tensor]
    n, *rest = of.shape
    gguf.tensors[tensor] = replace(of, shape=(n // 2, 2 * rest[0], *rest[1:]))
    with pytest.raises(FileError, match="shape"):
        open_projector(gguf, open_device("cpu", None, 1, None))


def test_a_wrong_key_is_named(data: Path) -> None:
    path = data / "media" / "voxtral" / "mmproj.gguf"
    for key, value, said in [
        ("projector.stack_factor", 0, "clip.audio.projector.stack_factor"),
        ("projector.stack_factor", 3, "148 positions, of which 3 are one row"),
        ("num_mel_bins", None, "clip.audio.num_mel_bins: the key is missing"),
    ]:
        gguf = open_gguf(path)
        made = {**gguf.metadata, f"clip.audio.{key}": value}
        gguf.metadata = {name: each for name, each in made.items() if each is not None}
        with pytest.raises(FileError, match=said):
            open_projector(gguf, open_device("cpu", None, 1, None))


def test_windows_of_another_length_are_refused() -> None:
    audio = {"n_window": 100, "n_window_infer": 800}
    config = MetadataReader({"audio_config": audio, "text_config": {}}, Path("config.json"))
    table = hf_names_of("qwen3_asr", "config.json")
    with pytest.raises(UnsupportedError, match=r"audio_config.n_window: 100 frames"):
        table.read(config, config)


def test_names_of_qwen2_audio_s_folder(data: Path) -> None:
    """As transformers 5.24 has them: each name is one of mmproj.gguf, and with layer 1 all."""
    layer = """self_attn_layer_norm final_layer_norm self_attn.q_proj self_attn.k_proj
        self_attn.v_proj self_attn.out_proj fc1 fc2"""
    stems = ["conv1", "conv2", "layer_norm", *(f"layers.1.{each}" for each in layer.split())]
    names = [f"audio_tower.{stem}.{kind}" for stem in stems for kind in ("weight", "bias")]
    names.remove("audio_tower.layers.1.self_attn.k_proj.bias")
    names += ["audio_tower.embed_positions.weight"]
    names += [f"multi_modal_projector.linear.{kind}" for kind in ("weight", "bias")]
    table = hf_names_of("qwen2_audio", "config.json")
    assert all(name.startswith(table.prefixes) for name in names)
    tensors = open_gguf(data / "media" / "qwen2audio" / "mmproj.gguf").tensors
    theirs = {name for name in tensors if not name.startswith(("a.blk.0.", "a.blk.2."))}
    assert {table.name_of(name, {}) for name in names} == theirs


def first_layout(folder: Path, to: Path) -> Path:
    """A folder of Qwen3-ASR as the first ones were published: its parts are within another."""
    raw = (folder / "model.safetensors").read_bytes()
    n = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + n])
    begins = {
        "model.audio_tower.": "thinker.audio_tower.",
        "model.multi_modal_projector.linear_": "thinker.audio_tower.proj",
        "model.language_model.": "thinker.model.",
    }
    renamed = {}
    for name, entry in header.items():
        begin = next((each for each in begins if name.startswith(each)), "")
        renamed[begins.get(begin, "") + name.removeprefix(begin)] = entry
    head = json.dumps(renamed).encode()
    (to / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + raw[8 + n :])
    config = json.loads((folder / "config.json").read_text("utf-8"))
    parts = {key: config.pop(key) for key in ("audio_config", "text_config")}
    config["thinker_config"] = {"model_type": "qwen3_asr_thinker", **parts}
    (to / "config.json").write_text(json.dumps(config), "utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (to / name).symlink_to(folder / name)
    return to


def test_the_first_folders_of_qwen3_asr(data: Path, tmp_path: Path) -> None:
    """They have other names, and are the same model."""
    folder = data / "media" / "qwen3asr"
    first = first_layout(folder, tmp_path)
    device = open_device("cpu", None, 1, None)
    projectors = [open_projector(each, device, exact=True) for each in (folder, first)]
    files = [projector.gguf for projector in projectors]
    assert files[0].metadata == files[1].metadata
    assert files[0].tensors.keys() == files[1].tensors.keys()
    check_rows(BY_NAME["qwen3asr"], projectors[1], data)
    assert is_media_folder(first)
    assert folder_modalities(first) == ("audio",)
    ids = [40 + i for i in range(20)]
    logits = []
    for each in (folder, first):
        with treadle.load(each, kv="f32", threads=1, context=64) as model:
            assert model.config.arch.name == "qwen3vl"
            assert model.modalities == {"audio"}
            logits.append(model.logits(ids))
    assert np.array_equal(logits[0], logits[1])
