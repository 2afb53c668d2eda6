"""Pictures in every form and format that a caller gives, as pixels; and those that are refused."""

from __future__ import annotations

import base64
import io
import json
import random
import struct
import sys
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.media import picture_file
from treadle.media.file_formats import PICTURES, media_format
from treadle.media.limits import MediaLimits
from treadle.media.picture_header import picture_size
from treadle.media.source import read_picture, read_picture_size

LONG = MediaLimits(aspect_ratio=400)
# Exact but for these: what JPEG and lossy WebP lose of this picture of sharp edges.
LOSSY = {
    "q90.jpg": 35,
    "progressive.jpg": 163,
    "cmyk.jpg": 8,
    "exif6.jpg": 166,
    "lossy.webp": 167,
}
OF_COLOURS = ("palette.png", "frames.gif")  # 64 and 256 of them


@pytest.fixture
def media(data: Path) -> Path:
    return data / "media" / "media"


@pytest.fixture
def expected(media: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((media / "expected.json").read_text("utf-8"))
    return {name: row for name, row in found.items() if "length" not in row}


@pytest.fixture
def picture(media: Path) -> np.ndarray:
    """The 97 x 61 picture of all files, as Pillow reads the plain PNG."""
    with Image.open(media / "plain.png") as image:
        return np.asarray(image)


def luma(rgb: np.ndarray) -> np.ndarray:
    """ITU-R 601's, as uint8 [h, w, 3]."""
    grey = np.rint(rgb @ np.array([0.299, 0.587, 0.114]))
    return np.repeat(grey[:, :, None], 3, 2).astype(np.uint8)


def faded(rgb: np.ndarray) -> np.ndarray:
    """On white, with the alpha of the files: 128 on the left, 0 on the top, else 255."""
    alpha = np.full(rgb.shape[:2], 255)
    alpha[:, :48] = 128
    alpha[:20] = 0
    share = alpha[:, :, None] / 255
    return np.rint(rgb * share + 255 * (1 - share)).astype(np.uint8)


def worst(a: np.ndarray, b: np.ndarray) -> int:
    return int(np.abs(a.astype(int) - b.astype(int)).max())


def off(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a.astype(int) - b.astype(int)).mean())


# -- files -----------------------------------------------------------------------------------------


def test_every_file(media: Path, expected: dict[str, Any], picture: np.ndarray) -> None:
    seen = set()
    for name, row in expected.items():
        if "error" in row:
            continue
        got = read_picture(media / name, LONG)
        assert got.dtype == np.uint8
        assert got.shape == (*row["size"][::-1], 3)
        seen.add(name)
        if name in ("plain.png", "lossless.webp", "plain.bmp"):
            np.testing.assert_array_equal(got, picture)
        elif name in ("grey.png", "sixteen.png"):
            assert worst(got, luma(picture)) <= 1  # Pillow's coefficients have 16 bits
        elif name == "alpha.png":
            np.testing.assert_array_equal(got, faded(picture))
        elif name == "la.png":
            assert worst(got, faded(luma(picture))) <= 1
        elif name in LOSSY:
            assert worst(got, picture) <= LOSSY[name]
            others = (picture[::-1], picture[:, ::-1], picture[:, :, ::-1], 255 - picture)
            assert off(got, picture) < min(off(got, other) for other in others) / 3
        elif name in OF_COLOURS:
            assert worst(got, picture) <= 60
            with Image.open(media / name) as image:
                np.testing.assert_array_equal(got, np.asarray(image.convert("RGB")))
        else:
            assert name in ("tall.png", "one.png")
            with Image.open(media / name) as image:
                np.testing.assert_array_equal(got, np.asarray(image))
    assert len(seen) == 16


def test_sixteen_bits_are_scaled(media: Path) -> None:
    """The file has the grey one's values times 257."""
    grey = read_picture(media / "grey.png")
    np.testing.assert_array_equal(read_picture(media / "sixteen.png"), grey)


REFUSALS = {
    "cut.png": (FileError, "truncated"),
    "bomb.png": (UnsupportedError, "60000 x 60000 pixels are 3600.0 million: the limit is 64 mill"),
    "flat.png": (UnsupportedError, "12000 x 12000 pixels are 144.0 million: the limit is 64 mill"),
    "text.png": (FileError, "too large"),
    "not.png": (UnsupportedError, "SVG is not read: expected PNG, JPEG, WebP, GIF, BMP"),
    "empty.png": (FileError, "an empty file"),
    "tall.png": (UnsupportedError, "the longer side may be at most 200 times the shorter one"),
}


def test_every_refused_file(media: Path, expected: dict[str, Any]) -> None:
    assert {name for name, row in expected.items() if "error" in row} < set(REFUSALS)
    for name, (kind, words) in REFUSALS.items():
        with pytest.raises(kind, match=words) as caught:
            read_picture(media / name)
        assert str(caught.value).startswith(str(media / name))


def test_a_large_header_is_refused_before_pillow(
    media: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picture_file, "pillow", lambda module: pytest.fail("Pillow was asked"))
    for name in ("bomb.png", "flat.png", "tall.png", "not.png"):
        with pytest.raises(UnsupportedError):
            read_picture(media / name)


def test_every_source_of_a_file(media: Path, picture: np.ndarray) -> None:
    path = media / "plain.png"
    raw = path.read_bytes()
    with Image.open(path) as image:
        sources = [path, str(path), path.as_uri(), raw, bytearray(raw), memoryview(raw), image]
        for source in sources:
            np.testing.assert_array_equal(read_picture(source), picture)


def test_a_path_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.png", tmp_path):
        with pytest.raises(FileError, match=str(path)):
            read_picture(path)


@pytest.mark.parametrize("source", [None, 5, ["a"], {"url": "x"}, object()])
def test_other_types(source: Any) -> None:
    with pytest.raises(TreadleError, match=r"^message 1: .* is not read as a picture: expected"):
        read_picture(source, place="message 1")


def test_without_pillow(media: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(TreadleError, match=r'pip install "treadle\[pictures\]"'):
        read_picture(media / "plain.png")
    assert read_picture(np.zeros((2, 2), np.uint8)).shape == (2, 2, 3)  # needs none


# -- formats ---------------------------------------------------------------------------------------


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


@cache
def drawn() -> Image.Image:
    """A picture of smooth colours: JPEG keeps it within a few levels."""
    y, x = np.mgrid[0:24, 0:40]
    return Image.fromarray(np.stack([x * 6, y * 10, 255 - x * 3 - y * 4], -1).astype(np.uint8))


def opaque() -> dict[str, bytes]:
    return {
        "PNG": saved(drawn(), "PNG"),
        "JPEG": saved(drawn(), "JPEG", quality=95, subsampling=0),
        "WebP": saved(drawn(), "WEBP", lossless=True),
        "GIF": saved(drawn().quantize(256), "GIF"),
        "BMP": saved(drawn(), "BMP"),
    }


def test_formats_are_told_from_bytes() -> None:
    for name, data in opaque().items():
        found = media_format(data)
        assert found is not None
        assert found.name == name
        assert worst(read_picture(data), np.asarray(drawn())) <= (3 if name != "GIF" else 25)
    assert [known.name for known in PICTURES] == list(opaque())


def test_formats_that_are_not_read() -> None:
    others = [(saved(drawn(), "TIFF"), "TIFF"), (saved(drawn(), "ICO"), "ICO")]
    others += [(b"%PDF-1.7\n", "PDF"), (b"8BPS\0\1", "Photoshop"), (b"%!PS-Adobe", "PostScript")]
    others += [(b"<?xml version='1.0'?>\n<!-- a -->\n<svg>", "SVG"), (b"\xef\xbb\xbf <SVG ", "SVG")]
    others += [(b"<!DOCTYPE html><html>", "HTML"), (b"\0\0\0\x1cftypheic\0", "HEIC")]
    others += [(b"\0\0\0\x1cftypavif\0", "AVIF"), (b"\x1f\x8b\x08", "gzip"), (b"fLaC", "FLAC")]
    for data, name in others:
        with pytest.raises(UnsupportedError, match=f"{name} is not read: expected PNG"):
            read_picture(data)
    fits = b"SIMPLE  =                    T".ljust(2880)
    for data in (fits, b"a", b"P6 1 1 255 abc"):  # Pillow has readers for FITS and PPM
        with pytest.raises(UnsupportedError, match="unknown format"):
            read_picture(data)


@pytest.mark.parametrize("turn", range(1, 9))
def test_exif_turns(turn: int) -> None:
    upright = np.asarray(drawn())
    # the inverse of each turn, by the EXIF specification's table of rows and columns
    stored: dict[int, Callable[[np.ndarray], np.ndarray]] = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.swapaxes(0, 1),
        6: lambda a: a.swapaxes(0, 1)[::-1],
        7: lambda a: a.swapaxes(0, 1)[::-1, ::-1],
        8: lambda a: a.swapaxes(0, 1)[:, ::-1],
    }
    exif = Image.Exif()
    exif[0x0112] = turn
    image = Image.fromarray(np.ascontiguousarray(stored[turn](upright)))
    for kind, options in (("PNG", {}), ("WEBP", {"lossless": True})):
        data = saved(image, kind, exif=exif, **options)
        np.testing.assert_array_equal(read_picture(data), upright)
    assert worst(read_picture(saved(image, "JPEG", exif=exif, quality=95)), upright) < 30
    with Image.open(io.BytesIO(saved(image, "PNG", exif=exif))) as opened:
        np.testing.assert_array_equal(read_picture(opened), upright)
        assert opened.size == image.size  # the caller's own stays as it is


@pytest.mark.parametrize("turn", [None, *range(1, 9)])
def test_the_size_without_decoding(
    turn: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the upright picture; a file cut behind its header has one as well. WebP's reader
    checks the whole file when it opens one.
    """
    exif = Image.Exif()
    if turn is not None:
        exif[0x0112] = turn
    path = tmp_path / "picture"
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):
        own = {} if turn is None or kind in ("GIF", "BMP") else {"exif": exif}
        data = saved(drawn(), kind, **own)
        path.write_bytes(data)
        expected = read_picture(path).shape[:2]
        if kind != "WEBP":
            path.write_bytes(data[:-24])
        with monkeypatch.context() as patched:
            patched.setattr("PIL.ImageFile.ImageFile.load", None)  # decoding would fail
            assert read_picture_size(path) == expected, kind
            with pytest.raises(FileError):
                read_picture(path)


def test_the_size_has_the_limits_of_the_picture(tmp_path: Path) -> None:
    path = tmp_path / "long.png"
    path.write_bytes(saved(Image.new("L", (201, 1)), "PNG"))
    with pytest.raises(UnsupportedError, match="200 times"):
        read_picture_size(path)
    path.write_bytes(b"%PDF-1.7")
    with pytest.raises(UnsupportedError, match="PDF is not read"):
        read_picture_size(path)


def test_the_ratio_holds_for_both_directions() -> None:
    for shape in ((201, 1), (1, 201)):
        with pytest.raises(UnsupportedError, match="200 times"):
            read_picture(saved(Image.new("L", shape), "PNG"))
    assert read_picture(saved(Image.new("L", (200, 1)), "PNG")).shape == (1, 200, 3)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK", "YCbCr", "HSV"])
def test_opaque_images_of_pillow(mode: str) -> None:
    image = drawn().convert(mode)
    np.testing.assert_array_equal(read_picture(image), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "RGBa", "La"])
def test_images_with_alpha(mode: str) -> None:
    alpha = Image.fromarray(np.linspace(0, 255, 24 * 40).reshape(24, 40).astype(np.uint8))
    straight = drawn().convert("LA" if mode in ("LA", "La") else "RGBA")
    straight.putalpha(alpha)
    image = {
        "PA": lambda: drawn().quantize(16).convert("PA"),
        "RGBa": lambda: straight.convert("RGBa"),
        "La": lambda: straight.convert("La"),
    }.get(mode, lambda: straight)()
    assert image.mode == mode
    plain = image.convert("LA") if mode == "La" else image
    rgba = np.asarray(plain.convert("RGBA")).astype(float)
    share = rgba[:, :, 3:] / 255
    truth = np.rint(rgba[:, :, :3] * share + 255 * (1 - share))
    np.testing.assert_array_equal(read_picture(image), truth)


def test_modes_without_a_range() -> None:
    for mode in ("I", "F"):
        with pytest.raises(UnsupportedError, match=f"mode {mode}: its values have no fixed range"):
            read_picture(drawn().convert(mode))


def test_transparent_colours_are_white() -> None:
    """PNG's tRNS of grey, colours, palettes and 16 bits."""
    rgb = np.zeros((3, 4, 3), np.uint8)
    rgb[1, 2] = (9, 8, 7)
    image = Image.fromarray(rgb)
    assert read_picture(saved(image, "PNG", transparency=(9, 8, 7)))[1, 2].tolist() == [255] * 3
    grey = Image.fromarray(rgb[:, :, 0])
    got = read_picture(saved(grey, "PNG", transparency=9))
    assert got[1, 2].tolist() == [255] * 3
    assert got.sum() == 3 * 255
    got = read_picture(saved(grey.convert("P"), "PNG", transparency=9))
    assert got[1, 2].tolist() == [255] * 3
    assert got.sum() == 3 * 255
    deep = png(2, 1, 16, struct.pack(">BHH", 0, 300, 5000), tRNS=struct.pack(">H", 300))
    assert read_picture(deep)[0].tolist() == [[255] * 3, [round(5000 / 257)] * 3]


def test_a_picture_of_several() -> None:
    """GIF, WebP and APNG with frames; JPEG with a second picture, as phones write it."""
    other = Image.new("RGB", drawn().size, "red")
    more = {"save_all": True, "append_images": [other]}
    for kind, options in (("PNG", {}), ("WEBP", {"lossless": True}), ("MPO", {"quality": 95})):
        got = read_picture(saved(drawn(), kind, **more, **options))
        assert worst(got, np.asarray(drawn())) <= (0 if kind != "MPO" else 30)


def test_every_product_of_alpha_is_rounded() -> None:
    """All 65,536 pairs of a value and an alpha."""
    value, alpha = np.mgrid[0:256, 0:256]
    rgba = np.stack([value, value, value, alpha], -1).astype(np.uint8)
    exact = value * alpha + 255 * (255 - alpha)
    truth = (2 * exact + 255) // 510  # no product is half a level
    np.testing.assert_array_equal(read_picture(rgba), np.repeat(truth[:, :, None], 3, 2))


# -- headers, damage -------------------------------------------------------------------------------


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, depth: int, rows: bytes, **chunks: bytes) -> bytes:
    """A grey PNG of raw rows."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, 0, 0, 0, 0))
    more = b"".join(chunk(name.encode(), data) for name, data in chunks.items())
    body = chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + head + more + body + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(1, 1), (2, 3), (97, 61), (300, 17), (17, 300), (256, 255)])
def test_header_sizes_are_pillows(size: tuple[int, int]) -> None:
    image = Image.new("RGB", size, "teal")
    files = [saved(image, kind) for kind in ("PNG", "JPEG", "GIF", "BMP", "WEBP")]
    files += [saved(image, "JPEG", progressive=True), saved(image, "WEBP", lossless=True)]
    upright = Image.Exif()
    upright[0x0112] = 1
    files += [saved(image, "WEBP", exif=upright)]
    assert {bytes(f[12:16]) for f in files if f[:4] == b"RIFF"} == {b"VP8 ", b"VP8L", b"VP8X"}
    for data in files:
        found = media_format(data)
        assert found is not None
        assert picture_size(data, found, "x") == size[::-1]
        assert read_picture(data).shape == (*size[::-1], 3)


def test_large_headers_of_every_format() -> None:
    """Small files that state more than 64 million pixels are refused by their header."""
    most = 65535
    jpeg = opaque()["JPEG"]
    at = jpeg.index(b"\xff\xc0") + 5
    gif = bytearray(opaque()["GIF"])
    gif[6:10] = struct.pack("<HH", most, most)
    bmp = bytearray(opaque()["BMP"])
    bmp[18:26] = struct.pack("<ii", 100_000, -100_000)
    extended = b"RIFF\x1e\0\0\0WEBPVP8X\x0a\0\0\0" + bytes(4) + b"\xff\xff\xff\xff\xff\xff"
    lossless = b"RIFF\x1e\0\0\0WEBPVP8L\x0a\0\0\0\x2f" + struct.pack("<I", (1 << 28) - 1) + bytes(9)
    lossy = b"RIFF\x1e\0\0\0WEBPVP8 \x0a\0\0\0\0\0\0\x9d\x01\x2a" + struct.pack("<HH", 16383, 16383)
    files = [
        png(1 << 20, 1 << 20, 8, b""),
        jpeg[:at] + struct.pack(">HH", most, most) + jpeg[at + 4 :],
        bytes(gif),
        bytes(bmp),
        *(extended, lossless, lossy),
    ]
    for data in files:
        with pytest.raises(UnsupportedError, match="the limit is 64 million"):
            read_picture(data)


def test_sizes_of_nothing() -> None:
    jpeg = opaque()["JPEG"]
    at = jpeg.index(b"\xff\xc0") + 5
    for data in (png(0, 5, 8, b""), png(5, 0, 8, b""), jpeg[:at] + bytes(4) + jpeg[at + 4 :]):
        with pytest.raises(UnsupportedError, match="expected at least one"):
            read_picture(data)


@pytest.mark.parametrize("name", list(opaque()))
def test_cut_files(name: str) -> None:
    """At every length up to nine tenths: nothing but the last bytes may be missing."""
    noise = np.random.default_rng(0).integers(0, 256, (24, 40, 3), np.uint8)
    options = {"WebP": {"lossless": True}}.get(name, {})
    data = saved(Image.fromarray(noise), name.upper(), **options)
    for n in range(1, len(data) * 9 // 10, max(1, len(data) // 150)):
        with pytest.raises(TreadleError, match=r"^the file: "):
            read_picture(data[:n], place="the file")


@pytest.mark.parametrize("name", list(opaque()))
@pytest.mark.filterwarnings("ignore")  # of Pillow's, about metadata
def test_damaged_files(name: str) -> None:
    """A damaged file is a picture or an error of treadle's, whatever was changed."""
    data = opaque()[name]
    draw = random.Random(name)
    n_errors = 0
    for _ in range(300):
        changed = bytearray(data)
        for _ in range(draw.randint(1, 4)):
            changed[draw.randrange(min(len(data), 200))] = draw.randrange(256)
        try:
            got = read_picture(bytes(changed), MediaLimits(pixels=1_000_000))
        except TreadleError:
            n_errors += 1
        else:
            assert got.dtype == np.uint8
            assert got.shape[2:] == (3,)
    assert n_errors > 20


def test_a_damaged_image_of_pillows(media: Path) -> None:
    assert not ImageFile.LOAD_TRUNCATED_IMAGES
    with (
        Image.open(media / "cut.png") as image,
        pytest.raises(FileError, match=r"^the picture: damaged: .*truncated"),
    ):
        read_picture(image)


def test_limits(media: Path) -> None:
    path = media / "plain.png"
    n_bytes = path.stat().st_size
    for limits, words in (
        (MediaLimits(picture_bytes=n_bytes - 1), "the limit for a picture is 5.3 kB"),
        (MediaLimits(pixels=97 * 61 - 1), "the limit is"),
        (MediaLimits(aspect_ratio=1), "at most 1 times"),
    ):
        sources: list[Any] = [path, path.read_bytes()]
        if "picture_bytes" not in words and limits.picture_bytes > n_bytes:
            sources.append(np.zeros((61, 97), np.uint8))
            sources.append(Image.new("L", (97, 61)))
        for source in sources:
            with pytest.raises(UnsupportedError, match=words):
                read_picture(source, limits)
    exact = MediaLimits(picture_bytes=n_bytes, pixels=97 * 61, aspect_ratio=2)
    assert read_picture(path, exact).shape == (61, 97, 3)
    limits = MediaLimits(per_request=2)
    limits.check_count(2, "messages")
    with pytest.raises(UnsupportedError, match="messages: 3 pictures and sounds: the limit is 2"):
        limits.check_count(3, "messages")
    limits = MediaLimits(request_pixels=2_000_000)
    limits.check_pixels(2_000_000, "messages[0]")
    said = (
        r"messages\[1\]: the pictures up to this one have 3 million pixels: the limit is 2 million"
    )
    with pytest.raises(UnsupportedError, match=said):
        limits.check_pixels(3_000_000, "messages[1]")
    with pytest.raises(TreadleError, match="pixels=0: expected at least 1"):
        MediaLimits(pixels=0)


def test_the_defaults_are_those_documented() -> None:
    limits = MediaLimits()
    assert (limits.picture_bytes, limits.pixels, limits.aspect_ratio) == (
        20_000_000,
        64_000_000,
        200,
    )
    assert (limits.sound_bytes, limits.sound_seconds) == (200_000_000, 1800)


def test_an_endless_file_is_not_read_to_its_end() -> None:
    with pytest.raises(UnsupportedError, match=r"the limit for a picture is 1\.0 MB"):
        read_picture("/dev/zero", MediaLimits(picture_bytes=1_000_000))


# -- data: URLs ------------------------------------------------------------------------------------


def test_data_urls() -> None:
    data = opaque()["PNG"]
    text = base64.b64encode(data).decode()
    for prefix in (
        "data:image/png;base64,",
        "data:;base64,",
        "DATA:image/jpeg;BASE64,",
        "data:application/octet-stream;charset=utf-8;base64,",
    ):
        np.testing.assert_array_equal(read_picture(prefix + text), np.asarray(drawn()))
    bad = [
        "data:image/png," + text,
        "data:image/svg+xml;utf8,<svg/>",
        "data:",
        "data:image/png;base64" + text,
        "data:image/png;base64,%89PNG",
        "data:image/png;base64," + text[:40] + "\n" + text[40:],
        "data:image/png;base64, " + text,
        "data:image/png;base64," + text.rstrip("=")[:41],
        "data:image/png;base64," + text[:40] + "=" + text[40:],
        "data:image/png;base64,-_-_",
        "data:image/png;base64,\u00e9\u00e9\u00e9\u00e9",
        "data:" + ";a=b" * 10_000 + ";base64," + text,
    ]
    for url in bad:
        with pytest.raises(FileError, match=r"^messages\[0\]: .*base64"):
            read_picture(url, place="messages[0]")
    with pytest.raises(FileError, match="an empty file"):
        read_picture("data:image/png;base64,")


def test_data_urls_are_measured_before_decoding() -> None:
    for n in (3000, 3001, 3002):
        url = "data:image/png;base64," + base64.b64encode(bytes(n)).decode()
        with pytest.raises(UnsupportedError, match="unknown format"):
            read_picture(url, MediaLimits(picture_bytes=n))
        with pytest.raises(UnsupportedError, match="the limit for a picture"):
            read_picture(url, MediaLimits(picture_bytes=n - 1))
    with pytest.raises(UnsupportedError, match="the limit for a picture"):
        read_picture("data:image/png;base64," + "?" * 5000, MediaLimits(picture_bytes=3000))


# -- arrays ----------------------------------------------------------------------------------------


def test_arrays(picture: np.ndarray) -> None:
    for array in (
        picture,
        picture.astype(np.uint16) * 257,
        picture / 255,
        np.float32(picture / 255),
    ):
        np.testing.assert_array_equal(read_picture(array), picture)
    half = (picture / 255).astype(np.float16)  # 11 bits of a value's
    assert worst(read_picture(half), picture) <= 1
    np.testing.assert_array_equal(read_picture(picture[::-1, ::2]), picture[::-1, ::2])
    grey = picture[:, :, 0]
    for array in (grey, grey[:, :, None]):
        np.testing.assert_array_equal(read_picture(array), np.repeat(grey[:, :, None], 3, 2))
    deep = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    np.testing.assert_array_equal(read_picture(deep)[:, :, 0], np.rint(deep / 257))
    assert not np.shares_memory(read_picture(picture), picture)
    alpha = np.full((*grey.shape, 1), 0.5)
    faded = read_picture(np.concatenate([picture / 255, alpha], 2))
    assert worst(faded, (picture.astype(float) + 255) / 2) <= 1


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((3, 8, 8), np.uint8),
        np.zeros((8, 8, 2), np.uint8),
        np.zeros(8, np.uint8),
        np.zeros((1, 8, 8, 3), np.uint8),
        np.zeros((8, 8), np.int64),
        np.zeros((8, 8), bool),
        np.zeros((8, 8), complex),
        np.full((8, 8), 1.01),
        np.full((8, 8), -0.01),
        np.full((8, 8), np.nan),
        np.zeros((0, 8), np.uint8),
    ],
    ids=lambda a: f"{a.dtype}{a.shape}",
)
def test_arrays_that_are_refused(array: np.ndarray) -> None:
    with pytest.raises(TreadleError, match="expected"):
        read_picture(array)
