"""Where the control groups of this process stand in the file system, versions 1 and 2. A leaf for the master.

Knows no controller's files, only their folders. Sources: cgroups(7),
https://docs.kernel.org/admin-guide/cgroup-v2.html, https://docs.kernel.org/admin-guide/cgroup-v1/cgroups.html.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")


def folders(controller: str, root: Path = ROOT) -> Iterator[Path]:
    """The folder of this process's own group for `controller`, then its ancestors', for each hierarchy that may have
    it. `root` is where /proc and /sys are found. What is not there is left out."""
    mount = root / "sys/fs/cgroup"
    for controllers, path in _groups(root / "proc/self/cgroup"):
        if not controllers:
            tops = [mount, mount / "unified"]
        elif controller in controllers.split(","):
            tops = [mount / name for name in dict.fromkeys((controllers, controller))]
        else:
            continue
        for top in tops:
            yield from (folder for folder in _upwards(top, path) if folder.is_dir())


def read(file: Path) -> str:
    """The text of a file; nothing where it cannot be read."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def _groups(file: Path) -> Iterator[tuple[str, str]]:
    """Controllers (none: version 2) and path of each hierarchy; a line is `id:controllers:path`."""
    for line in read(file).splitlines():
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if colon:
            yield controllers, path


def _upwards(top: Path, path: str) -> Iterator[Path]:
    """A path that leads out of our namespace, or is not mounted, leaves the mount itself: the container's own group."""
    relative = PurePosixPath(path.lstrip("/"))
    if ".." not in relative.parts:
        for part in (relative, *relative.parents):
            if part.parts:
                yield top / part
    yield top
