"""First lines of a bundle's ``__main__.py``, before pex's own; any Python can parse them, even 2.7.
They find a suitable Python and a folder to unpack the program into; an unpacked program is started
at once.
"""

import os
import sys

if sys.platform == "win32":
    sys.exit("treadle: error: this bundle is for Linux, and this is Windows")

BUNDLE = "id"  # these three are replaced when a bundle is built
PYTHONS = [(3, 10)]
MACHINES = ["x86_64"]
START = "treadle.cli.bundled"
OTHERS = 0o022  # write permission of group and others
STICKY = 0o1000  # users can delete only their own files there
NOEXEC = 8  # ST_NOEXEC, which Python 2.7 does not name


def candidates():  # type: () -> list[str]
    """Return the folders that the program may be unpacked into, best first."""
    if os.environ.get("PEX_ROOT"):
        return [os.environ["PEX_ROOT"]]
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    found = [os.environ.get("TREADLE_CACHE") or os.path.join(caches, "treadle")]
    # Any of these folders may be missing, read-only, or mounted noexec.
    beside = os.path.dirname(os.path.realpath(sys.argv[0]))
    for folder in (os.environ.get("TMPDIR"), "/var/tmp", "/tmp", "/dev/shm", beside):
        if folder:
            found.append(os.path.join(folder, "treadle-%d" % os.getuid()))
    return [os.path.join(folder, "bundles") for folder in found]


def is_ours(path):  # type: (str) -> bool
    """Return whether the file or folder ``path`` belongs to this user or root."""
    return os.stat(path).st_uid in (os.getuid(), 0)


def fits(folder):  # type: (str) -> bool
    """Create the folder if it is missing. Return whether code can be written there and run, and no
    other user can change it.
    """
    try:
        above = os.path.dirname(folder)
        for one in (above, folder):
            if not os.path.isdir(one):
                os.makedirs(one, 0o700)
            about = os.stat(one)
            # Others may write to a folder such as /tmp, but cannot remove our files.
            shared = one == above and about.st_mode & STICKY and is_ours(one)
            if not shared and (about.st_uid != os.getuid() or about.st_mode & OTHERS):
                return False
        noexec = os.statvfs(folder).f_flag & NOEXEC
        return not noexec and os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        return False


def runs(python, version):  # type: (str, tuple[int, int]) -> bool
    """Return whether the command ``python`` starts a Python of this ``version``. It is run to find
    out: pyenv has shims for all versions that it knows, and most of them fail.
    """
    import subprocess

    asked = "import sys; sys.exit(sys.version_info[:2] != %r)" % (version,)
    with open(os.devnull, "w") as nothing:
        try:
            return not subprocess.call([python, "-c", asked], stdout=nothing, stderr=nothing)
        except OSError:  # built for another architecture
            return False


def fitting_python():  # type: () -> None
    """Restart with another Python if this one is not in PYTHONS; exit with an error if there is
    none.
    """
    if sys.version_info[:2] in PYTHONS:
        return
    for version in reversed(PYTHONS):
        for folder in os.environ.get("PATH", "").split(os.pathsep):
            python = os.path.join(folder, "python%d.%d" % version)
            if os.access(python, os.X_OK) and runs(python, version):
                os.execv(python, [python] + sys.argv)
    names = ", ".join("%d.%d" % version for version in PYTHONS)
    sys.exit(
        "treadle: error: this is Python %d.%d: the bundle needs Python %s"
        % (sys.version_info[0], sys.version_info[1], names)
    )


def start():  # type: () -> None
    """Run the program if it is unpacked; else choose a folder and return, so that pex unpacks it
    there.
    """
    if not sys.platform.startswith("linux"):
        sys.exit("treadle: error: this bundle is for Linux, and this is %s" % sys.platform)
    machine = os.uname()[4]
    if machine not in MACHINES:
        sys.exit(
            "treadle: error: this machine's CPU is %s, and the bundle is for %s"
            % (machine, ", ".join(MACHINES))
        )
    name = os.environ["TREADLE_BUNDLE"] = BUNDLE + "-" + machine
    again = "PEX_ROOT" in os.environ  # pex restarts itself while it unpacks
    folders = candidates()
    for folder in folders:
        try:
            with open(os.path.join(folder, name)) as file:  # cli/bundled.py wrote it
                python = file.readline().strip()
            known = is_ours(folder) and is_ours(file.name) and os.access(python, os.X_OK)
        except OSError:
            continue
        if known:
            os.environ["PEX"] = os.path.realpath(sys.argv[0])
            os.environ["TREADLE_BUNDLES"] = folder
            os.execv(python, [python, "-I", "-m", START] + sys.argv[1:])
    fitting_python()
    for folder in folders:
        if fits(folder):
            os.environ["PEX_ROOT"] = os.environ["TREADLE_BUNDLES"] = folder
            if not again:
                sys.stderr.write("treadle: unpacking about 350 MB into %s, once\n" % folder)
            return
    sys.exit(
        "treadle: error: no folder to unpack the program into: none of %s is owned "
        "by you alone, writable and mounted without noexec; set PEX_ROOT=FOLDER"
        % ", ".join(folders)
    )


if __name__ == "__main__":
    start()
