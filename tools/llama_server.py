"""Run ``treadle serve`` under the options of llama.cpp's ``llama-server``.

``tools/compatibility.py`` puts this program in the place of ``llama-server``, so that llama.cpp's
own server tests can be run against treadle. Models are named by repository there; ``MODELS`` names
the file that stands in for each. Without a model llama-server serves all downloaded ones: those
of ``LIBRARY`` then. An option that treadle does not have ends the program with exit code 1 and a
line that names it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

# llama.cpp's repository, or repository and file: the key of TREADLE_SUITE_MODELS (a JSON object).
MODELS = {
    "ggml-org/test-model-stories260K": "stories",
    "ggml-org/models/tinyllamas/stories260K.gguf": "stories",
    "ggml-org/models/tinyllamas/split/stories15M-q8_0-00001-of-00003.gguf": "stories-split",
    "ggml-org/models/bert-bge-small/ggml-model-f16.gguf": "encoder",
    "ggml-org/tinygemma3-GGUF:Q8_0": "pictures",
    "ggml-org/stories15M_MOE/stories15M_MOE-F16.gguf": "stories",
}
# The downloaded models of a server without a model, and their stand-ins.
LIBRARY = {
    "ggml-org/tinygemma3-GGUF:Q8_0": "pictures",
    "ggml-org/test-model-stories260K:F32": "stories",
    "ggml-org/test-model-stories260K-infill:F32": "stories",
}
# Options with a value that are passed on, by treadle's name.
PASSED = {
    "--port": "--port",
    "--temp": "--temp",
    "--seed": "--seed",
    "--n-predict": "--max-tokens",
    "--threads": "-t",
    "--alias": "--alias",
    "--api-key": "--api-key",
    "--slot-save-path": "--slot-save-path",
    "--reasoning": "--reasoning",
    "--chat-template": "--chat-template",
    "--chat-template-file": "--chat-template",
    "--lora": "--lora",
    "--cors-origins": "--allow-origin",
    "-ctk": "--kv",
    "--models-dir": "--models-dir",
    "--models-max": "--models-max",
    "--sleep-idle-seconds": "--idle-unload",
    "--api-key-file": "--api-key-file",
    "--api-prefix": "--api-prefix",
    "--ssl-cert-file": "--ssl-cert-file",
    "--ssl-key-file": "--ssl-key-file",
}
# Flags that are passed on, and flags and options whose subject treadle does by itself.
FLAGS = {
    "--metrics": "--metrics",
    "--no-ui": "--no-page",
    "--no-mmproj": "--no-mmproj",
    "--no-models-autoload": "--no-models-autoload",
    "--props": "--props",
}
NOTHING = {
    *("--offline", "--cont-batching", "--embedding", "--swa-full", "--slots"),
    *("--no-slots", "--jinja", "--no-jinja", "--verbose", "--reranking"),
    *("--no-cache-idle-slots", "--backend_sampling"),
}
NOTHING_WITH_VALUE = {
    *("--batch-size", "--ubatch-size", "--n-gpu-layers", "-ctv", "-fa", "--cache-ram"),
    *("--reasoning-format", "--spec-draft-n-max", "--spec-draft-n-min", "--pooling"),
    "--spec-type",
}
NAMED = ("--hf-repo", "--hf-file", "--model", "--model-draft", "--ctx-size", "--parallel")
# Options that say what a server serves; without one of them it is the library.
SERVED = ("--hf-repo", "--model", "--models-dir")


class NotSupported(Exception):
    """An option of llama-server's that treadle does not have."""


def arguments(given: list[str], models: dict[str, str]) -> list[str]:
    """The command line of ``treadle`` for one of ``llama-server``."""
    names: dict[str, str] = {}
    out = ["serve", "--no-log"]
    words = iter(given)
    for word in words:
        if word in FLAGS:
            out.append(FLAGS[word])
        elif word in NOTHING:
            continue
        elif word == "--kv-unified":  # any slot may have all of the context
            names[word] = "yes"
        elif word in NOTHING_WITH_VALUE:
            next(words)
        elif word == "--host":  # several, with commas between them
            for host in next(words).split(","):
                out += ["--host", host.strip()]
        elif word in PASSED:
            value = next(words)
            if (word, value) != ("--n-predict", "-1"):  # no limit
                out += [PASSED[word], value]
        elif word in NAMED:
            names[word] = next(words)
        else:
            raise NotSupported(word)
    n_slots = int(names.get("--parallel", 4))
    out += ["--sequences", str(n_slots)]
    if "--ctx-size" in names:  # llama-server divides it among its slots
        shares = 1 if "--kv-unified" in names else n_slots
        out += ["-c", str(int(names["--ctx-size"]) // shares)]
    if "--model-draft" in names:
        out += ["--draft", names["--model-draft"]]
    if not any(word in given for word in SERVED):
        served = {name: models[stand_in] for name, stand_in in LIBRARY.items()}
        return [*out, "--presets", write_presets(served)]
    if "--models-dir" in given:
        return out
    return [*out, model_of(names, models)]


def write_presets(served: dict[str, str]) -> str:
    """Write a file of presets with models, paths by name, into the current folder; its path."""
    path = Path(f"presets-{os.getpid()}.toml").resolve()
    tables = [
        f"[models.{json.dumps(name)}]\nmodel = {json.dumps(model)}\n"
        for name, model in served.items()
    ]
    path.write_text("".join(tables), "utf-8")
    return str(path)


def model_of(names: dict[str, str], models: dict[str, str]) -> str:
    """The path of the model that the options name."""
    if "--model" in names:
        return names["--model"]
    name = "/".join(names[key] for key in ("--hf-repo", "--hf-file") if key in names)
    stand_in = models.get(MODELS.get(name, ""))
    if stand_in is None:
        raise NotSupported(f"model {name}")
    return stand_in


if __name__ == "__main__":
    stand_ins = json.loads(os.environ["TREADLE_SUITE_MODELS"])
    try:
        command = arguments(sys.argv[1:], stand_ins)
    except NotSupported as e:
        record = os.environ.get("TREADLE_SUITE_UNSUPPORTED")
        if record:
            Path(record).write_text(str(e), "utf-8")
        sys.exit(f"treadle has no {e}")
    os.execv(sys.executable, [sys.executable, "-m", "treadle", *command])
