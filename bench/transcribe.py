"""Seconds to transcribe a sound, beside faster-whisper's on the same sound, in turns.

::

    python bench/transcribe.py SOUND --model WHISPER                        # treadle alone
    python bench/transcribe.py SOUND --model WHISPER --rival PYTHON --ct2 FOLDER

PYTHON is the interpreter of an environment with faster-whisper; FOLDER has CTranslate2's files
(``model.bin``, ``tokenizer.json``, ...) of the same model, which it computes with in int8. Both
search with ``--beams`` beams (1: greedy), see the text before each window, and have no voice
detector. Each round runs both; a table has the medians and the ratios of rounds. The models are
open before. For treadle the time to the first segment is told, too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from rival import Rival

# Run by the rival's interpreter: folder of the model, sound, threads, beams.
FASTER_WHISPER = """
import json, sys, time
from faster_whisper import WhisperModel
folder, sound, threads, beams = sys.argv[1:5]
model = WhisperModel(folder, device="cpu", compute_type="int8", cpu_threads=int(threads))
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    began = time.perf_counter()
    segments, info = model.transcribe(sound, language="en", beam_size=int(beams), vad_filter=False)
    text = "".join(segment.text for segment in segments)
    print(json.dumps([time.perf_counter() - began, text]), flush=True)
"""


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sound", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rival", metavar="PYTHON")
    parser.add_argument("--ct2", metavar="FOLDER")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--beams", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if (given.rival is None) != (given.ct2 is None):
        parser.error("--rival and --ct2 go together")

    import treadle

    rival = None
    if given.rival is not None:
        settings = (given.ct2, given.sound, given.threads, given.beams)
        rival = Rival(given.rival, FASTER_WHISPER, *settings)
    own: list[float] = []
    first: list[float] = []
    theirs: list[float] = []
    length = 0.0
    text = ""
    with treadle.load_speech(given.model, threads=given.threads) as model:
        for i in range(given.rounds + 1):  # the first one compiles
            began = time.perf_counter()
            running = model.transcribe(
                given.sound, language="en", beams=given.beams, voice_activity="off"
            )
            next(iter(running))
            at_first = time.perf_counter() - began
            result = running.finish()
            took = time.perf_counter() - began
            length = result.seconds
            text = result.text
            other = rival.ask() if rival is not None else [0.0, ""]
            if i:
                own.append(took)
                first.append(at_first)
                theirs.append(other[0])
            elif rival is not None:
                print("treadle:       ", text.strip())
                print("faster-whisper:", other[1].strip())
    if rival is not None:
        rival.process.kill()
    median = statistics.median(own)
    print(f"\n{length:.1f} s of sound, {given.threads} threads, {given.beams} beams")
    print(
        f"treadle: {median:.2f} s, {length / median:.1f} times as fast as the sound; "
        f"the first segment after {statistics.median(first):.2f} s"
    )
    if rival is not None:
        ratios = sorted(b / a for a, b in zip(own, theirs, strict=True))
        print(
            f"faster-whisper, int8: {statistics.median(theirs):.2f} s; treadle is "
            f"{statistics.median(ratios):.2f} times as fast ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )


if __name__ == "__main__":
    main()
