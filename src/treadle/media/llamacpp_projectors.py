"""Differences in how llama.cpp and treadle read a projector file that treadle wrote.

Each row of ROWS states what llama.cpp's sources of October 2026 do (tools/mtmd), and for which
files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

# Projectors whose activation is the exact GELU; llama.cpp's is the tanh form.
EXACT_GELU = frozenset(
    {
        "qwen2vl_merger",
        "qwen2.5vl_merger",
        "qwen3vl_merger",
        "pixtral",
        "internvl",
        "lfm2",
        "llama4",
        "mlp",
    }
)
CLASS = "v.class_embd"
# Of files with a class token, by type (ggml-org/llama.cpp#25814, open; InternVL's graph has the
# same order), and of all files.
MOVED = "it gives each patch its neighbour's position, and the first one the class token's"
CLASS_TOKENS = {
    "mlp": f"{MOVED}, whose row it takes in place of the first patch's",
    "internvl": MOVED,
}
ORDERS = {"llama4": "its rows of a tile stand column by column"}
WINDOW = 112  # pixels of Qwen2.5-VL's windows

Keys = Mapping[str, Any]


def projector_differences(metadata: Keys, tensors: Collection[str] = ()) -> list[str]:
    """Return a sentence for each difference between llama.cpp's reading of a projector file and
    treadle's. ``metadata``: the file's keys; ``tensors``: the names of its tensors.
    """
    prefix = "clip."
    keys = {key.removeprefix(prefix): v for key, v in metadata.items() if key.startswith(prefix)}
    texts = [row(keys) for row in ROWS]
    texts.append(ORDERS.get(_type(keys), ""))
    if CLASS in tensors:
        texts.append(CLASS_TOKENS.get(_type(keys), ""))
    return [f"llama.cpp will read this file differently: {text}" for text in texts if text]


def _type(keys: Keys) -> str:
    """Return the projector type of a file, or else that of its picture part; "" if it has none.
    ``keys``: the file's keys without ``clip.``.
    """
    return str(keys.get("projector_type") or keys.get("vision.projector_type", ""))


def _gelu(keys: Keys) -> str:
    if _type(keys) not in EXACT_GELU:
        return ""
    return "its projector computes GELU's tanh form, 0.0001 of a row's largest value off"


def _window(keys: Keys) -> str:
    size = keys.get("vision.window_size", WINDOW)
    return "" if size == WINDOW else f"its windows are {WINDOW} pixels wide; the file says {size}"


def _whole_layers(keys: Keys) -> str:
    whole = keys.get("vision.wa_layer_indexes")
    if whole is None:
        return ""
    numbers = ", ".join(map(str, whole))
    return f"it refuses layers without windows that are not every n-th (here {numbers})"


def _tiles(keys: Keys) -> str:
    if not keys.get("vision.image_grid_pinpoints"):
        return ""
    return "its tiles keep their padding, and have no row that ends a line"


def _square(keys: Keys) -> str:
    if _type(keys) != "mlp" or keys.get("vision.image_grid_pinpoints"):
        return ""
    return "it pads pictures to a square; transformers takes their middle square"


ROWS: tuple[Callable[[Keys], str], ...] = (
    _gelu,
    _window,
    _whole_layers,
    _tiles,
    _square,
)
