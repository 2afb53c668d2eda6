"""Formats of pictures and sounds, told from a file's first bytes; file names are not used."""

from __future__ import annotations

from treadle.base.fast_classes import dataclass
from treadle.media.kinds import MediaKind


@dataclass(frozen=True)
class MediaFormat:
    """One file format. ``kind``: None for formats that are known but refused. ``reader``: the
    format's name in Pillow for a picture, in FFmpeg for a compressed sound; "" for WAV and refused
    formats.
    """

    name: str
    kind: MediaKind | None
    reader: str = ""


PNG = MediaFormat("PNG", "image", "PNG")
JPEG = MediaFormat("JPEG", "image", "JPEG")
WEBP = MediaFormat("WebP", "image", "WEBP")
GIF = MediaFormat("GIF", "image", "GIF")
BMP = MediaFormat("BMP", "image", "BMP")
WAV = MediaFormat("WAV", "audio")
FLAC = MediaFormat("FLAC", "audio", "flac")
OGG = MediaFormat("Ogg", "audio", "ogg")
MP3 = MediaFormat("MP3", "audio", "mp3")
AAC = MediaFormat("AAC", "audio", "aac")
MP4 = MediaFormat("MP4", "audio", "mp4")
WEBM = MediaFormat("WebM", "audio", "matroska")
PICTURES = (PNG, JPEG, WEBP, GIF, BMP)
SOUNDS = (WAV, FLAC, OGG, MP3, AAC, MP4, WEBM)

# Known, so that an error can name them. Each begins with these bytes.
_REFUSED = {
    b"%PDF": "PDF",
    b"%!PS": "PostScript",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"8BPS": "Photoshop",
    b"\0\0\1\0": "ICO",
    b"\xff\x0a": "JPEG XL",
    b"\0\0\0\x0cJXL ": "JPEG XL",
    b"\0\0\0\x0cjP  ": "JPEG 2000",
    b"\x1f\x8b": "gzip",
    b"PK\3\4": "ZIP",
    b"FORM": "AIFF",
    b"RF64": "RF64",
    b"RIFX": "RIFX",
    b"#!AMR": "AMR",
    b"MThd": "MIDI",
    b"caff": "CAF",
    b"0&\xb2u": "WMA",
    b"#EXTM3U": "M3U",
}
_BRANDS = {b"heic": "HEIC", b"heix": "HEIC", b"mif1": "HEIF", b"avif": "AVIF", b"avis": "AVIF"}


def media_format(data: bytes | memoryview) -> MediaFormat | None:
    """Return the format of a file's bytes; None if it is unknown. Reads at most 1,024 bytes."""
    head = bytes(data[:1024])
    return _picture(head) or _sound(head) or _refused(head)


def _picture(head: bytes) -> MediaFormat | None:
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return PNG
    if head.startswith(b"\xff\xd8\xff"):
        return JPEG
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return WEBP
    if head.startswith((b"GIF87a", b"GIF89a")):
        return GIF
    return BMP if head.startswith(b"BM") else None


def _sound(head: bytes) -> MediaFormat | None:
    if head.startswith(b"RIFF") and head[8:12] == b"WAVE":
        return WAV
    if head.startswith(b"fLaC"):
        return FLAC
    if head.startswith(b"OggS"):
        return OGG
    if head[4:8] == b"ftyp" and head[8:12] not in _BRANDS:
        return MP4
    if head.startswith(b"\x1a\x45\xdf\xa3"):
        return WEBM
    if head.startswith(b"ID3"):
        return MP3
    if len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0:  # 11 bits that begin a frame
        layer = head[1] >> 1 & 3
        if layer == 0:
            return AAC if head[1] & 0xF0 == 0xF0 else None
        return MP3
    return None


def _refused(head: bytes) -> MediaFormat | None:
    for start, name in _REFUSED.items():
        if head.startswith(start):
            return MediaFormat(name, None)
    if head[4:8] == b"ftyp":
        return MediaFormat(_BRANDS[head[8:12]], None)
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith(b"<svg") or (text.startswith(b"<") and b"<svg" in text):
        return MediaFormat("SVG", None)
    if text.startswith((b"<!doctype html", b"<html")):
        return MediaFormat("HTML", None)
    return MediaFormat("XML", None) if text.startswith(b"<?xml") else None
