"""What is imported when: nothing heavy before it is needed, and nothing is traced when warm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import WriteTiny
from tests.tokenizer.vocabularies import LETTER_OF_BYTE, NORMAL, Piece, write_vocab

HEAVY = ["numpy", "llvmlite", "sentencepiece", "tokenizers", "jinja2", "llguidance", "rich"]
HEAVY += ["huggingface_hub", "safetensors", "prompt_toolkit", "click"]
MOST_MODULES = 82  # of treadle, in a warm start from Python
MOST_OF_COMMAND = 90  # and of a warm start of ``treadle run``
# Packages and modules that read a file, build a graph, lower it, or emit a kernel.
COLD = [f"treadle.{name}." for name in ("kernels.moe", "kernels.quantize", "kernels.recurrent")]
COLD += [
    f"treadle.models.{name}."
    for name in ("archs", "graphs", "mixers", "ffns", "keys", "ops", "structure", "load", "layer")
]
COLD += [f"treadle.models.{name}." for name in ("digest", "ignored_tensors", "pooling_head")]
COLD += [f"treadle.files.{name}." for name in ("gguf_writer", "gguf_strings", "mistaken")]
COLD += [f"treadle.kernels.{name}." for name in ("activation_layout", "transpose")]
COLD += [f"treadle.jit.{name}." for name in ("values", "builder", "compile", "math")]
COLD += [f"treadle.isa.{name}." for name in ("isa", "portable", "x86", "amx", "arm")]
COLD += [f"treadle.{name}." for name in ("jit.types", "jit.ir", "kernels.spec", "kernels.matmul")]
COLD += [f"treadle.{name}." for name in ("kernels.attention", "kernels.elementwise", "formats")]
COLD += [f"treadle.files.{name}." for name in ("gguf_header", "reader", "bundled")]
COLD += [f"treadle.{name}." for name in ("plan.lowering", "spec_decode", "kvcache.media")]
COLD += [f"treadle.scheduler.{name}." for name in ("media_queue", "encoder_queue")]
COLD += ["treadle.convert.", "treadle.devices.cpu.step_loop.", "treadle.devices.cpu.fault_handler."]


def run(script: str, *args: str, **environment: str) -> Any:
    """What a new Python prints, as JSON; it must say nothing else and end well."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, *args],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


LOADED = "import json, sys; print(json.dumps(sorted(sys.modules)))"


def test_importing_treadle_is_light() -> None:
    modules = set(run(f"import treadle, treadle.errors; treadle.__version__; {LOADED}"))
    assert "treadle" in modules
    assert not modules.intersection(HEAVY)
    # and the names in __all__ are there when they are asked for
    names = run(
        "import json, treadle; print(json.dumps([n for n in treadle.__all__ "
        "if not hasattr(treadle, n)]))"
    )
    assert names == []


def test_what_one_comes_for_is_shown_first() -> None:
    """To ``dir`` and so to completion, and to ``help``: before anything of it is imported."""
    names = run("import json, treadle; print(json.dumps(dir(treadle)))")
    classes = ["AttentionWeights", "ChatCompletions", "ControlVector", "Generation", "LensLogits"]
    classes += ["Model", "Reply", "Sampling", "Session", "SpeechRecognizer", "StepValues", "Trace"]
    classes += ["Transcript", "TranscriptSegment", "TranscriptWord", "Transcription"]
    functions = ["load", "load_session", "load_shared", "load_speech", "make_control_vector"]
    functions.append("run_tools")
    assert names == [*classes, "__version__", "errors", *functions]
    first = run("import json, treadle; print(json.dumps(treadle.__all__[:6]))")
    assert first == ["load", "Model", "Sampling", "Generation", "Session", "load_session"]
    script = (
        "import json, pydoc, treadle; print(json.dumps(pydoc.plain(pydoc.render_doc(treadle))))"
    )
    text = run(script)
    at = [text.index(word) for word in ("load(path)", "``Model``", "``Sampling``", "CLASSES")]
    assert at == sorted(at)
    assert [name for name in classes if f"    class {name}(" in text] == classes
    assert "FUNCTIONS\n    load(" in text
    assert "class FileError" not in text  # they would fill the first screens


def test_every_exception_is_here_and_in_errors() -> None:
    import treadle

    lazy = {"load", "Model", "Sampling", "Generation", "Session", "load_session"}
    lazy |= {"Reply", "run_tools", "ControlVector", "make_control_vector"}
    lazy |= {"Trace", "StepValues", "AttentionWeights", "LensLogits"}
    lazy |= {"ChatCompletions", "load_shared", "load_speech", "SpeechRecognizer"}
    lazy |= {"Transcription", "Transcript", "TranscriptSegment", "TranscriptWord"}
    kinds = {
        name
        for name, kind in vars(treadle.errors).items()
        if isinstance(kind, type) and issubclass(kind, treadle.TreadleError)
    }
    assert set(treadle.__all__) == lazy | kinds
    assert len(treadle.__all__) == len(set(treadle.__all__))


GENERATE = """
import json, sys, treadle
model = treadle.load(sys.argv[1], threads=2)
made = model.generate("once upon", max_tokens=6, sampling=treadle.Sampling(seed=1))
made.finish()
model.logits([5] * 40)
print(json.dumps({"ids": made.ids, "modules": sorted(sys.modules)}))
"""

COMMAND = """
import io, json, sys
from treadle.cli import main
shown, sys.stdout = sys.stdout, io.StringIO()
main(["run", sys.argv[1], "once upon", "-n", "1", "-t", "2"])
print(json.dumps(sorted(sys.modules)), file=shown)
"""


def link_kernels(of: Path, to: Path) -> None:
    """Kernels of one cache, and no plan, in another one. Across disks none: they are compiled."""
    to.mkdir(mode=0o700, exist_ok=True)
    for kernel in of.glob("*.o"):
        with suppress(OSError):
            (to / kernel.name).hardlink_to(kernel)


@pytest.mark.parametrize(
    "arch",
    [
        "llama",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "deepseek2", "mamba2")),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3moe", "lfm2")),
    ],
)
def test_a_warm_run_compiles_and_traces_nothing(
    tiny: WriteTiny, tmp_path: Path, one_kernel_cache: Path, arch: str
) -> None:
    """Of llama from an empty cache. The other architectures find the kernels that other tests have
    compiled: they differ in what a warm run imports, and in the plans that a cold one stores.
    """
    cache = str(tmp_path / "kernels")
    if arch != "llama":
        link_kernels(one_kernel_cache, tmp_path / "kernels")
    sizes = {"n_expert": 8, "n_ff_exp": 64} if "moe" in arch else {}
    path = str(tiny(arch, "F32" if arch in ("mamba2", "lfm2") else "Q8_0", **sizes))
    settings = {"TREADLE_CACHE": cache, "TREADLE_PLANS": "1"}
    cold = run(GENERATE, path, **settings)
    link_kernels(tmp_path / "kernels", one_kernel_cache)
    warm = run(GENERATE, path, **settings, TREADLE_NO_COMPILE="1")
    assert warm["ids"] == cold["ids"]
    found = [name for name in warm["modules"] if f"{name}.".startswith(tuple(COLD))]
    assert found == []
    assert "treadle.plan.lowering.ops" in cold["modules"]
    others = ("tokenizers", "jinja2", "llguidance", "rich", "huggingface_hub")
    for absent in ("treadle.jit.values", "numpy.random", *others):
        assert absent not in warm["modules"]
    assert len([name for name in warm["modules"] if name.startswith("treadle")]) <= MOST_MODULES
    if arch != "llama":
        return
    assert "treadle.jit.values" in cold["modules"]  # the kernel language
    run(COMMAND, path, **settings)
    modules = run(COMMAND, path, **settings, TREADLE_NO_COMPILE="1")
    assert [name for name in modules if f"{name}.".startswith(tuple(COLD))] == []
    assert len([name for name in modules if name.startswith("treadle")]) <= MOST_OF_COMMAND


def test_a_prompt_of_ascii_needs_no_library(tmp_path: Path) -> None:
    pieces: list[Piece] = [(LETTER_OF_BYTE[byte], NORMAL) for byte in range(256)]
    pieces.append(("ab", NORMAL))
    path = write_vocab(tmp_path / "bpe.gguf", "gpt2", pieces, merges=["a b"], pre="gpt-2")
    script = f"""
import json, sys
from treadle.files.gguf import open_gguf
from treadle.tokenizer import short_texts
from treadle.tokenizer.tokenizer import load_tokenizer
short_texts.MIN_PIECES = 1
tokenizer = load_tokenizer(open_gguf({str(path)!r}))
ids = tokenizer.encode("bab")
found = "tokenizers" in sys.modules
tokenizer.encode("é")
print(json.dumps([ids, found, "tokenizers" in sys.modules]))
"""
    assert run(script) == [[98, 256], False, True]


def test_ctrl_c_is_ours_at_once() -> None:
    """What is imported before ``run_process`` is called shows a traceback where Ctrl-C ends it."""
    new = "set(sys.modules) - before"
    script = (
        "import json, sys; before = set(sys.modules); import treadle.cli; "
        f"print(json.dumps(sorted({new})))"
    )
    assert set(run(script)) <= {"__future__", "treadle", "treadle.cli"}
    early = (
        "import os, treadle.cli as cli; cli.open_streams = lambda: os.kill(os.getpid(), 2); "
        "cli.run_process()"
    )
    done = subprocess.run(
        [sys.executable, "-c", early], capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


END = """
import json, sys, treadle
model = treadle.load(sys.argv[1], threads=3)
model.logits([5] * 40)
print(json.dumps("done"))
"""


@pytest.mark.slow
def test_a_program_may_end_without_closing_anything(tiny: WriteTiny) -> None:
    """Its workers are still awake then, for they wait a while for the next run."""
    for last in ("", "\nraise SystemExit", "\ndel model", "\nglobals().clear()"):
        assert run(END + last, str(tiny())) == "done"


FORK = """
import json, os, sys, warnings, numpy, treadle
warnings.simplefilter("ignore")  # Python 3.12 warns of every fork of a process with threads
model = treadle.load(sys.argv[1], threads=3)
before = model.logits([5] * 40)
child = os.fork()
same = numpy.array_equal(model.logits([5] * 40), before)
if not child:
    os._exit(0 if same else 3)
_, status = os.waitpid(child, 0)
print(json.dumps([same, os.waitstatus_to_exitcode(status)]))
"""


def test_a_forked_child_has_a_team_of_its_own(tiny: WriteTiny) -> None:
    assert run(FORK, str(tiny("llama", n_layer=2))) == [True, 0]
