"""Which kernel does a format's search."""

from __future__ import annotations

from treadle.formats import Format
from treadle.formats.k_offset import OffsetSearch
from treadle.formats.k_signed import SignedSearch
from treadle.formats.scale_search import Coder
from treadle.kernels.search import BLOCK, SearchKernel
from treadle.kernels.search_ladder import LadderSearchKernel
from treadle.kernels.search_offset import OffsetSearchKernel
from treadle.kernels.search_signed import SignedSearchKernel

KINDS: dict[type, type[SearchKernel]] = {
    OffsetSearch: OffsetSearchKernel,
    SignedSearch: SignedSearchKernel,
    Coder: LadderSearchKernel,
}


def search_kernel(fmt: Format, aware: bool) -> SearchKernel | None:
    """The kernel; None where the format has no search, or numpy alone has it. ``aware``: of the
    importance of weights.
    """
    if isinstance(fmt.search, Coder) and (fmt.search.nearest is None or fmt.block != BLOCK):
        return None
    kind = KINDS.get(type(fmt.search))
    return kind(fmt.name, aware) if kind else None
