"""Choice of the search kernel for a format."""

from __future__ import annotations

from treadle.formats import Format
from treadle.formats.k_offset import OffsetSearch
from treadle.formats.k_signed import SignedSearch
from treadle.formats.scale_search import FormatCoder
from treadle.kernels.quantize.codebook import PointSearchKernel, fits
from treadle.kernels.quantize.k_search import SearchKernel
from treadle.kernels.quantize.ladder import LadderSearchKernel
from treadle.kernels.quantize.offset import OffsetSearchKernel
from treadle.kernels.quantize.signed import SignedSearchKernel


def search_kernel(fmt: Format, aware: bool) -> SearchKernel | None:
    """Return the search kernel of format ``fmt``; None if the format has no search, only a numpy
    one, or without importances only rounds (``Format.rounds``). ``aware``: with the weights'
    importances.
    """
    kind = _kind_of(fmt.search) if aware or not fmt.rounds else None
    return kind(fmt.name, aware) if kind else None


def _kind_of(how: object) -> type[SearchKernel] | None:
    if isinstance(how, OffsetSearch):
        return OffsetSearchKernel
    if isinstance(how, SignedSearch):
        return SignedSearchKernel
    if isinstance(how, FormatCoder) and how.nearest is not None:
        return LadderSearchKernel
    if isinstance(how, FormatCoder) and how.signs == "any" and fits(how.points):
        return PointSearchKernel
    return None
