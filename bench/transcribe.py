"""Seconds to transcribe a sound, beside faster-whisper's and whisper.cpp's on it, in turns.

::

    python bench/transcribe.py SOUND --model WHISPER                       # treadle alone
    python bench/transcribe.py SOUND --model WHISPER --rival PYTHON --ct2 FOLDER
    python bench/transcribe.py SOUND --model WHISPER --whisper-cpp DIR --ggml FILE

PYTHON is the interpreter of an environment with faster-whisper; FOLDER has CTranslate2's files
(``model.bin``, ``tokenizer.json``, ...) of the same model, which it computes with in int8. DIR has
whisper.cpp's sources in ``src`` and its shared libraries in ``build/bin``::

    cmake -S DIR/src -B DIR/build -DCMAKE_BUILD_TYPE=Release && cmake --build DIR/build

All search with ``--beams`` beams (1: greedy), see the text before each window, and have no voice
detector. Each round runs all; a table has the medians and the ratios of rounds. The models are open
before. For treadle the time to the first segment is told, too. ``bench/whisper_shapes.py`` writes
models in the shapes of larger ones, whose text is the same in all programs.

Processor seconds are of all threads: on a busy machine their ratios say more than those of seconds.
Threads of faster-whisper that wait count as busy; with one thread none does.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rival import Program, Rival

if TYPE_CHECKING:
    from treadle.api.speech import SpeechRecognizer

# Run by the rival's interpreter: folder of the model, sound, threads, beams.
FASTER_WHISPER = """
import json, sys, time
from faster_whisper import WhisperModel
folder, sound, threads, beams = sys.argv[1:5]
model = WhisperModel(folder, device="cpu", compute_type="int8", cpu_threads=int(threads))
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    began, used = time.perf_counter(), time.process_time()
    segments, info = model.transcribe(sound, language="en", beam_size=int(beams), vad_filter=False)
    text = "".join(segment.text for segment in segments)
    took = time.perf_counter() - began, time.process_time() - used
    print(json.dumps([*took, text]), flush=True)
"""
SOURCE = Path(__file__).parent / "whisper_cpp.c"


def whisper_cpp(
    build: Path, model: Path, sound: Path, threads: int, beams: int, into: Path
) -> Program:
    """Compile and start the program that calls whisper.cpp."""
    from treadle.media.limits import MediaLimits
    from treadle.media.sound_file import decode_sound

    program, samples = into / "whisper_cpp", into / "samples"
    decoded = decode_sound(sound.read_bytes(), MediaLimits(), str(sound))
    decoded.astype(np.float32).tofile(samples)
    libraries = (build / "build" / "bin").resolve()
    folders = [f"-I{build}/src/include", f"-I{build}/src/ggml/include", f"-L{libraries}"]
    linked = [f"-Wl,-rpath,{libraries}", "-lwhisper", "-lggml", "-lggml-base"]
    subprocess.run(["cc", "-O2", *folders, SOURCE, *linked, "-o", program], check=True)
    return Program(program, model, samples, threads, beams)


def own_times(
    model: SpeechRecognizer, sound: Path, beams: int
) -> tuple[tuple[float, float], float, float, str]:
    """Return treadle's seconds and processor seconds, seconds to the first segment, the length of
    the sound, and the text.
    """
    began, used = time.perf_counter(), time.process_time()
    running = model.transcribe(sound, language="en", beams=beams, voice_activity="off")
    next(iter(running))
    first = time.perf_counter() - began
    result = running.finish()
    took = time.perf_counter() - began, time.process_time() - used
    return took, first, result.seconds, result.text.strip()


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sound", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rival", metavar="PYTHON")
    parser.add_argument("--ct2", metavar="FOLDER")
    parser.add_argument("--whisper-cpp", type=Path, metavar="DIR")
    parser.add_argument("--ggml", type=Path, metavar="FILE")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--beams", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if (given.rival is None) != (given.ct2 is None):
        parser.error("--rival and --ct2 go together")
    if (given.whisper_cpp is None) != (given.ggml is None):
        parser.error("--whisper-cpp and --ggml go together")

    import treadle

    rivals: dict[str, Program] = {}
    settings = given.sound, given.threads, given.beams
    with tempfile.TemporaryDirectory() as made:
        if given.rival is not None:
            rival = Rival(given.rival, FASTER_WHISPER, given.ct2, *settings)
            rivals["faster-whisper"] = rival
        if given.whisper_cpp is not None:
            program = whisper_cpp(given.whisper_cpp, given.ggml, *settings, Path(made))
            rivals["whisper.cpp"] = program
    own: list[tuple[float, float]] = []
    firsts: list[float] = []
    theirs: dict[str, list[tuple[float, float]]] = {name: [] for name in rivals}
    length = 0.0
    with treadle.load_speech(given.model, threads=given.threads) as model:
        for i in range(given.rounds + 1):  # the first one compiles
            took, first, length, text = own_times(model, given.sound, given.beams)
            answers = {name: program.ask() for name, program in rivals.items()}
            if i:
                own.append(took)
                firsts.append(first)
                for name, (seconds, processor, _) in answers.items():
                    theirs[name].append((seconds, processor))
                continue
            print("treadle:", text)
            for name, (*_, other) in answers.items():
                print(f"{name}:", "the same" if other.strip() == text else other.strip())
    for program in rivals.values():
        program.process.kill()
    median, processor = (statistics.median(each) for each in zip(*own, strict=True))
    print(f"\n{length:.1f} s of sound, {given.threads} threads, {given.beams} beams")
    print(
        f"treadle: {median:.2f} s (processor: {processor:.2f}), {length / median:.1f} times as "
        f"fast as the sound; the first segment after {statistics.median(firsts):.2f} s"
    )
    for name, times in theirs.items():
        median, processor = (statistics.median(each) for each in zip(*times, strict=True))
        print(f"{name}: {median:.2f} s (processor: {processor:.2f}); treadle is", end=" ")
        parts = []
        for which, what in enumerate(("times as fast", "by processor time")):
            ratios = sorted(b[which] / a[which] for a, b in zip(own, times, strict=True))
            low, high = ratios[0], ratios[-1]
            parts.append(f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f}) {what}")
        print(", ".join(parts))


if __name__ == "__main__":
    main()
