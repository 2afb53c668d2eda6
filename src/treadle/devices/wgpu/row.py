"""What the wgpu device asks of the lowering, as a row of ``isa/``: its kernels are in WGSL, so of
the row only the traits count.
"""

from __future__ import annotations

from dataclasses import replace

from treadle.isa.isa import Tiles
from treadle.isa.portable import PORTABLE

# Activations stay f32, in plain rows: tiles of one token.
WGSL = replace(PORTABLE, name="wgsl", rounds=False, tiles=Tiles(floats=(8, 1)))
