"""The row of ``isa/`` that plans of the wgpu device are lowered for. Only its traits count, since
the kernels are WGSL.
"""

from __future__ import annotations

from dataclasses import replace

from treadle.isa.isa import Tiles
from treadle.isa.portable import PORTABLE

# Activations stay f32, in plain rows: tiles of one token.
WGSL = replace(PORTABLE, name="wgsl", rounds=False, tiles=Tiles(floats=(8, 1)))
