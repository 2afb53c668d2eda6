"""Sizes, canvases and grids of tiles, beside those of transformers 5.24 for the same pictures."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from treadle.errors import TreadleError
from treadle.media.families import idefics3, internvl, lfm2, llama4, llava, pixtral
from treadle.media.tiles import closest_grid, tiles_of, tiles_within

PINS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
Size = tuple[int, int]


class Golden(NamedTuple):
    """What transformers' functions give for a picture: height and width each."""

    size: Size
    idefics_scaled: Size  # longest edge 2048
    idefics_canvas: Size  # tiles of 512
    llava_canvas: Size
    llava_fitted: Size
    llava_unpadded: Size  # media rows without newlines, and lines, of 24 x 24 patches a tile
    pixtral: Size  # rows and columns: longest edge 1540, steps of 28
    internvl: Size  # rows and columns: 1 to 12 tiles of 448
    lfm2_whole: Size
    lfm2_tiles: Size
    llama4_canvas: Size  # up to 16 tiles of 336
    llama4_fitted: Size


# fmt: off
GOLDEN = [
    Golden((61, 97), (1288, 2048), (1536, 2048), (336, 672), (336, 535), (912, 24), (3, 4), (2, 3), (224, 352), (1, 1), (336, 336), (211, 336)),  # noqa: E501
    Golden((97, 61), (2048, 1288), (2048, 1536), (336, 672), (336, 212), (384, 24), (4, 3), (3, 2), (352, 224), (1, 1), (336, 336), (336, 211)),  # noqa: E501
    Golden((50, 120), (854, 2048), (1024, 2048), (336, 672), (280, 672), (960, 20), (2, 5), (2, 5), (192, 416), (1, 1), (336, 336), (140, 336)),  # noqa: E501
    Golden((1, 1), (2048, 2048), (2048, 2048), (336, 672), (336, 336), (576, 24), (1, 1), (1, 1), (256, 256), (1, 1), (336, 336), (336, 336)),  # noqa: E501
    Golden((3000, 2000), (2048, 1366), (2048, 1536), (672, 672), (672, 448), (1536, 48), (55, 37), (3, 2), (608, 416), (3, 2), (1680, 1008), (1512, 1008)),  # noqa: E501
    Golden((1080, 1920), (1152, 2048), (1536, 2048), (672, 672), (378, 672), (1344, 28), (31, 55), (2, 4), (384, 672), (2, 4), (1008, 1680), (945, 1680)),  # noqa: E501
    Golden((480, 640), (1536, 2048), (1536, 2048), (672, 672), (504, 672), (1728, 36), (18, 23), (3, 4), (416, 576), (1, 1), (672, 672), (480, 640)),  # noqa: E501
    Golden((333, 1000), (682, 2048), (1024, 2048), (336, 1008), (336, 1008), (1728, 24), (12, 36), (1, 3), (288, 864), (1, 1), (336, 1008), (333, 1000)),  # noqa: E501
    Golden((2999, 31), (2048, 22), (2048, 512), (1008, 336), (1008, 11), (0, 72), (55, 1), (12, 1), (3008, 32), (1, 1), (3024, 336), (2999, 31)),  # noqa: E501
    Golden((336, 672), (1024, 2048), (1024, 2048), (336, 672), (336, 672), (1152, 24), (12, 24), (1, 2), (320, 672), (1, 1), (336, 672), (336, 672)),  # noqa: E501
    Golden((700, 700), (2048, 2048), (2048, 2048), (672, 672), (672, 672), (2304, 48), (25, 25), (2, 2), (512, 512), (1, 1), (1008, 1008), (700, 700)),  # noqa: E501
    Golden((512, 513), (2044, 2048), (2048, 2048), (672, 672), (671, 672), (2304, 48), (19, 19), (1, 1), (512, 512), (1, 1), (672, 672), (512, 513)),  # noqa: E501
]
# fmt: on


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: "x".join(map(str, golden.size)))
def test_sizes_are_those_of_transformers(golden: Golden) -> None:
    size = golden.size
    scaled = idefics3.scaled_size(size, 2048)
    assert scaled == golden.idefics_scaled
    assert idefics3.canvas_size(scaled, 512) == golden.idefics_canvas
    canvas = llava.best_canvas(size, PINS)
    assert canvas == golden.llava_canvas
    assert llava.fitted_size(size, canvas) == golden.llava_fitted
    grid = canvas[0] // 14, canvas[1] // 14
    down, across = llava.unpadded(size, grid)
    n_lines = len(range(grid[0])[down])
    assert (n_lines * len(range(grid[1])[across]), n_lines) == golden.llava_unpadded
    rows, columns = golden.pixtral
    assert pixtral.scaled_size(size, 1540, 28, None) == (28 * rows, 28 * columns)
    assert closest_grid(size, 448, 1, 12) == golden.internvl
    assert lfm2.scaled_size(size, 32, lfm2.Lfm2Limits()) == golden.lfm2_whole
    assert lfm2.tile_grid(size, 32, lfm2.Lfm2Limits()) == golden.lfm2_tiles
    canvas = llama4.best_canvas(size, llama4.canvases(16, 336))
    assert canvas == golden.llama4_canvas
    assert llama4.fitted_size(size, canvas, 336) == golden.llama4_fitted


def test_the_largest_idefics_picture_is_bounded() -> None:
    assert idefics3.scaled_size((3000, 2000), 5000) == (4096, 2731)
    assert idefics3.scaled_size((2000, 3000), 5000) == (2731, 4096)


def test_tiles_are_cut_row_by_row() -> None:
    pixels = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    tiles = tiles_of(pixels, 2, 3)
    assert len(tiles) == 4
    assert np.array_equal(tiles[1], pixels[:2, 3:])
    assert np.array_equal(tiles[2], pixels[2:, :3])


@pytest.mark.parametrize("n", [1, 2, 5, 12])
def test_a_grid_has_no_more_tiles_than_allowed(n: int) -> None:
    for size in ((10, 1000), (1000, 10), (700, 500), (1, 1)):
        rows, columns = closest_grid(size, 448, 1, n)
        assert rows * columns <= n


def test_of_grids_of_one_shape_a_large_picture_gets_the_larger() -> None:
    assert closest_grid((448, 448), 448, 1, 12) == (1, 1)
    assert closest_grid((1000, 1000), 448, 1, 12) == (3, 3)


def test_bounds_of_rows_count_the_whole_picture() -> None:
    assert tiles_within(None, 256, 12) == 12
    assert tiles_within(1280, 256, 12) == 4
    assert tiles_within(1279, 256, 12) == 3
    assert tiles_within(256, 256, 12) == 1
    assert tiles_within(100_000, 256, 12) == 12
    with pytest.raises(TreadleError, match=r"at least 256 tokens .*at most 255"):
        tiles_within(255, 256, 12)


def test_pixtral_keeps_to_its_bound_of_rows() -> None:
    for size in ((1000, 1000), (3000, 200), (200, 3000), (61, 97)):
        for most in (1, 7, 40, 576):
            height, width = pixtral.scaled_size(size, 1540, 28, most)
            assert height * width <= most * 28 * 28
            assert height % 28 == width % 28 == 0
    assert pixtral.scaled_size((61, 97), 1540, 28, 12) == (84, 112)  # as without a bound


def test_lfm2_keeps_to_its_bound_of_rows() -> None:
    """Of long pictures the shorter side stays one row, where transformers' rule exceeds a small
    limit: it has 56 rows of the first.
    """
    limits = lfm2.Lfm2Limits(min_rows=4, max_rows=16)
    for size in ((6000, 30), (30, 6000), (1000, 1000), (500, 120)):
        height, width = lfm2.scaled_size(size, 32, limits)
        assert 32 * 32 <= height * width <= 16 * 32 * 32


def test_internvl_has_no_whole_picture_beside_a_single_tile() -> None:
    pixels = np.zeros((40, 40, 3), np.uint8)
    tiles, size = internvl.cut(pixels, 56, 1, 4)
    assert len(tiles) == 1
    assert size == (56, 56)
    tiles, size = internvl.cut(np.zeros((40, 120, 3), np.uint8), 56, 1, 4)
    assert len(tiles) == 4
    assert size == (56, 168)


def test_llama4_has_no_whole_picture_beside_a_single_tile() -> None:
    tiles, grid = llama4.cut(np.full((20, 20, 3), 255, np.uint8), 56, 4)
    assert len(tiles) == 1
    assert grid == (1, 1)
    tiles, grid = llama4.cut(np.full((20, 200, 3), 255, np.uint8), 56, 4)
    assert len(tiles) == 5
    assert grid == (1, 4)
    assert tiles[0][25:].max() == 0  # black canvas below
    assert tiles[-1].min() == 255  # the whole picture fills its tile
