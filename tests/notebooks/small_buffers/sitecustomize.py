"""For processes of the tests: treadle measures the speed of caches. Memory's is read in gigabytes,
which takes most of the time of a notebook that measures.
"""

from __future__ import annotations

from treadle.profiling import peaks

peaks.BUFFER_BYTES = (8 << 20, 8 << 20)
