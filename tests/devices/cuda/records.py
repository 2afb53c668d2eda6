"""What the emulator's compiled parts and Python tell each other: records of i64."""

from __future__ import annotations

import numpy as np

# What a thread waits for: nothing, its end, or one place in the code: 4 * its number + its kind.
READY, BARRIER, WARP, ENDED = range(4)
# tid to shared: its Simt operations. exchange: of its warp, two areas of LANE bytes a lane, in
# turns: who is late may still read the one before. copies: a ring of COPY records; n_copies were
# asked for, n_done of them done, n_groups committed. room: bytes for its frame; where they are not
# enough, ``frame`` says how many are needed. fault: where faults are noted.
THREAD_FIELDS = "tid cta n_ctas shared exchange turn waits copies n_copies n_done n_groups"
THREAD_FIELDS += " seed room frame fault"
THREAD = np.dtype([(name, "i8") for name in THREAD_FIELDS.split()])
COPY = np.dtype([(name, "i8") for name in ("to", "frm", "n_bytes", "group")])
MOST_COPIES = 512
LANE = 64
# Of a launch; the first one is kept.
FAULT = np.dtype([(name, "i8") for name in ("kind", "cta", "tid", "place", "other")])
FAULTS = (
    "",
    "threads of a block wait at different barriers, or have ended",
    "threads of a warp wait at different places, or have ended",
    f"a thread has more than {MOST_COPIES} copies under way",
    "a thread ends before it has waited for all its copies",
    "an address is not aligned",
    "memory outside what the block shares was written",
)
BLOCK_SPLIT, WARP_SPLIT, MANY_COPIES, LATE_COPIES, UNALIGNED, OUTSIDE = range(1, len(FAULTS))
# shared to handles: memory for one block. begin, end: which blocks. fault: where it is noted.
LAUNCH_FIELDS = (
    "function args run count base per scratch begin end n_ctas n_threads shared n_shared "
    "threads frames n_frame exchange copies handles seed fault"
)
LAUNCH = np.dtype([(name, "i8") for name in LAUNCH_FIELDS.split()])
PAD = 256  # bytes before and behind what a block shares, that nobody may write
POISON = -1  # NaN in every float format
