"""A machine under a real systemd: a Debian tree booted by systemd-nspawn, with our unit files and our package in it.

Part of bench.systemd_live. The tree itself stays as it is: the machine writes into an overlay in memory, sees no
network but its own loopback, and is gone when the block ends. Needs root.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
REPOSITORY = Path(__file__).parents[1]
INSIDE = "/opt/prefork-serve"
WRAPPER = """#!/bin/sh
export PYTHONPATH={inside}/lib:{inside}/site PYTHONDONTWRITEBYTECODE=1
exec /usr/bin/python3 -m prefork{module} "$@"
"""
POLL = 0.02  # seconds between two looks at what announces itself nowhere
PATIENCE = 90.0  # seconds after which a look is given up


class Box:
    """`run` runs a command in the machine; `etc` is its /etc/prefork-serve."""

    def __init__(self, nspawn: subprocess.Popen[bytes], place: Path) -> None:
        self._nspawn = nspawn
        self.etc = place / "etc"
        self.leader = 0

    def boot(self) -> str:
        """Until systemd has started everything; the state it names."""
        self.leader = self.until(self._find_leader, "a machine")
        self.until((self.root / "run/systemd/private").exists, "systemd")
        return self.run("systemctl", "is-system-running", "--wait").stdout.strip()

    def _find_leader(self) -> int:
        assert self._nspawn.poll() is None, f"systemd-nspawn ended with {self._nspawn.returncode}"
        for task in Path(f"/proc/{self._nspawn.pid}/task").iterdir():
            for pid in map(int, (task / "children").read_text().split()):
                if Path(f"/proc/{pid}/comm").read_text().strip() == "systemd":
                    return pid
        return 0

    @property
    def root(self) -> Path:
        """The machine's files as we see them."""
        return Path(f"/proc/{self.leader}/root")

    def command(self, *argv: str) -> list[str]:
        return ["nsenter", "--target", str(self.leader), "-m", "-u", "-i", "-n", "-p", "-C", "-r", "-w", *argv]

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(*argv), capture_output=True, text=True, check=False, timeout=PATIENCE)

    def systemctl(self, *argv: str) -> int:
        """The exit code."""
        return self.run("systemctl", *argv).returncode

    def show(self, *names: str, unit: str = "prefork.service") -> dict[str, str]:
        """Properties of a unit."""
        lines = self.run("systemctl", "show", unit, *(f"--property={name}" for name in names)).stdout.splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def write(self, inside: str, text: str) -> None:
        """A file in the machine."""
        path = self.root / inside.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def until(self, look: Callable[[], T | None], what: str) -> T:
        """What `look` gives once it is something true. Raises AssertionError when it never is."""
        end = time.monotonic() + PATIENCE
        while not (found := look()):
            assert time.monotonic() < end, f"never: {what}"
            time.sleep(POLL)
        return found


@contextmanager
def boot(tree: Path, site: Path, place: Path) -> Iterator[Box]:
    """A machine of the files of `tree`. `site`: folder of the packages that we need, for its Python; `place`: scratch
    folder. Raises AssertionError when it does not boot."""
    stage = _stage(place)
    with _cgroup(f"prefork-live-{os.getpid()}") as enter:
        binds = {
            stage: INSIDE, site: f"{INSIDE}/site", REPOSITORY / "prefork": f"{INSIDE}/lib/prefork",
            place / "etc": "/etc/prefork-serve", place / "models": "/srv/models",
            **{REPOSITORY / "conf" / name: f"/etc/systemd/system/{name}" for name in UNITS},
        }  # fmt: skip
        command = [
            *enter, nspawn_program(), "--quiet", f"--directory={tree}", "--volatile=overlay", "--private-network",
            f"--machine=prefork-{os.getpid()}", "--console=pipe", "--boot",
            *(f"--bind-ro={source}:{target}" for source, target in binds.items()),
        ]  # fmt: skip
        if not Path("/run/systemd/system").exists():  # nobody here to register the machine with
            command += ["--register=no", "--keep-unit"]
        with (place / "console").open("wb") as console:
            env = {**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"}
            nspawn = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=console, stderr=console, env=env)
        try:
            yield Box(nspawn, place)
        finally:
            nspawn.send_signal(signal.SIGTERM)  # an orderly shutdown of the machine
            try:
                nspawn.wait(30)
            except subprocess.TimeoutExpired:
                nspawn.kill()
                nspawn.wait()


UNITS = ("prefork.service", "prefork.socket")


def nspawn_program() -> str:
    """Raises AssertionError when there is none."""
    found = os.environ.get("NSPAWN") or shutil.which("systemd-nspawn")
    assert found, "systemd-nspawn is not installed (Debian: systemd-container), and NSPAWN names none"
    return found


def _stage(place: Path) -> Path:
    stage = place / "stage"
    for folder in (stage / "bin", stage / "lib/prefork", stage / "site", place / "etc", place / "models"):
        folder.mkdir(parents=True, exist_ok=True)
    for name, module in (("prefork-serve", ""), ("prefork-ctl", ".ctl")):
        script = stage / "bin" / name
        script.write_text(WRAPPER.format(inside=INSIDE, module=module))
        script.chmod(0o755)
    return stage


@contextmanager
def _cgroup(name: str) -> Iterator[list[str]]:
    """Words before a command that put it into a control group of its own, which is removed afterwards: systemd-nspawn
    without a manager would leave its groups beside everybody's."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    tops = [Path(where) for _, where, kind, options, *_ in mounts
            if kind == "cgroup2" or (kind == "cgroup" and "name=systemd" in options)]  # fmt: skip
    ours = [top / name for top in tops]
    for group in ours:
        group.mkdir()
    joins = "".join(f"echo $$ >{group}/cgroup.procs; " for group in ours)
    try:
        yield ["sh", "-c", f'{joins}exec "$@"', "sh"]
    finally:
        for group in ours:
            for folder in sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True):
                with suppress(OSError):
                    folder.rmdir()
            with suppress(OSError):
                group.rmdir()
