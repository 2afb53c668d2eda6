"""Processes that have mapped a file, read from ``/proc``."""

from __future__ import annotations

import os
from pathlib import Path

from treadle.machine.mapped_files import command_of, mapping_processes

MAPS = """55d0c0000000-55d0c0001000 r--p 00000000 00:19 11 /usr/bin/python
7f0000000000-7f0000001000 rw-p 00000000 00:00 0 [heap]
7f0000002000-7f0000003000 r--s 00000000 {device} {inode} {path}
"""


def process(proc: Path, pid: int, **mapping: object) -> None:
    (proc / str(pid)).mkdir(parents=True)
    (proc / str(pid) / "maps").write_text(MAPS.format(**mapping))
    (proc / str(pid) / "cmdline").write_bytes(b"treadle\0serve\0" + b"x" * 100)


def test_a_mapping_is_known_by_its_path_or_its_inode(tmp_path: Path) -> None:
    """A file that was renamed since has another path; some file systems tell another device."""
    file = tmp_path / "model gguf"
    file.write_bytes(b"x")
    link = tmp_path / "link"
    link.symlink_to(file)
    info = file.stat()
    device = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}"
    proc = tmp_path / "proc"
    process(proc, 1, device=device, inode=info.st_ino, path="/gone/model.gguf (deleted)")
    process(proc, 2, device="ff:ff", inode=7, path=file)
    process(proc, 3, device=device, inode=info.st_ino + 1, path="/another")
    process(proc, os.getpid(), device=device, inode=info.st_ino, path=file)
    (proc / "4").mkdir()  # has ended, or is another user's
    (proc / "self").mkdir()
    found = mapping_processes([link], proc)
    assert [each.pid for each in found] == [1, 2]
    assert found[0].command.startswith("treadle serve xxx")
    assert len(found[0].command) == 60


def test_where_the_system_does_not_tell_there_are_none(tmp_path: Path) -> None:
    assert mapping_processes([tmp_path / "x"], tmp_path / "absent") == []
    assert command_of(tmp_path / "absent") == ""
