"""Towers, which encode pictures and sound, and projectors: rows of patches in, rows of states out.

::

    tower.py    the graph: a stem, layers whose tokens all see each other, a tail
    config.py   TowerConfig: hyper-parameters of a tower
    stages.py   TowerStage: the steps of a stem or a tail
    bounds.py   tensors that clamp a matrix' input and result
    whisper.py  Whisper's encoder
"""
