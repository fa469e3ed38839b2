"""One cache directory under another runtime, another processor, a writer killed at work and a disk that takes no more:
the model is prepared anew, and what lies there is never served to whom it was not made for."""

from __future__ import annotations

import ctypes
import os
import select
import shlex
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from onnx import helper, numpy_helper

from prefork.cache import Cache
from prefork.log import setup
from tests.model import small
from tests.roles.server import REPOSITORY, Server
from tests.roles.test_warm_start import answer, entries, first, origin, start
from tests.roles.watch import IN_CREATE, WATCHDOG, children_of

VNNI = ("avx512_vnni", "avx_vnni")


@pytest.fixture
def cache(place: Path) -> Path:
    return place / "cache"


def another_runtime(place: Path) -> str:
    """A search path where ONNX Runtime is installed as another version: its files, with another version's metadata."""
    spec = find_spec("onnxruntime")
    assert spec is not None and spec.origin is not None
    installed = place / "installed"
    (installed / "onnxruntime-99.0.0.dist-info").mkdir(parents=True)
    (installed / "onnxruntime").symlink_to(Path(spec.origin).parent)
    return f"{installed}:{REPOSITORY}"


def test_another_version_of_the_runtime_prepares_anew(place: Path, cache: Path) -> None:
    expected, entry = first(place, cache)
    server = start(place, cache)
    server.env = {"PYTHONPATH": another_runtime(place)}
    with server:
        assert origin(server) == "file" and answer(server) == expected
    assert len(entries(cache)) == 2 and entry in entries(cache)
    with start(place, cache) as server:
        assert origin(server) == "cache" and answer(server) == expected


class Elsewhere(Server):
    """A server that reads another /proc/cpuinfo, in a mount namespace of its own."""

    cpuinfo = Path()

    @property
    def command(self) -> list[str]:
        script = f'mount --bind {shlex.quote(str(self.cpuinfo))} /proc/cpuinfo && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", script, "sh", *super().command]


def test_a_processor_with_other_flags_prepares_anew(place: Path, cache: Path) -> None:
    if os.getuid() != 0 or subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs root and mount namespaces")
    expected, entry = first(place, cache)
    text = Path("/proc/cpuinfo").read_text()
    flag = next((flag for flag in VNNI if f" {flag} " in text), "fpu")
    Elsewhere.cpuinfo = place / "cpuinfo"
    Elsewhere.cpuinfo.write_text(text.replace(f" {flag} ", " "))
    folder = place / "elsewhere"
    folder.mkdir()
    for found in ("file", "cache"):
        with Elsewhere(folder, "--workers", "1", "--cache-dir", str(cache)) as server:
            assert origin(server) == found and answer(server) == expected
        server.log_file.unlink()
    assert len(entries(cache)) == 2 and entry in entries(cache)


LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
os.execv(sys.argv[2], sys.argv[2:])
"""


def prepare(place: Path, cache: Path, model: Path, *wrapper: str) -> subprocess.Popen[str]:
    work = place / "work"
    work.mkdir(exist_ok=True)
    flags = ["--cache-dir", str(cache), "--work-dir", str(work), "--log-level", "warning", "--quantize", "none"]
    command = [*wrapper, sys.executable, "-m", "prefork", "prepare", str(model), *flags]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=pipe, stderr=pipe, text=True)


def large(folder: Path) -> Path:
    """x [1, 4096] -> y: weights of 64 MiB, which take a while to write."""
    weights = np.random.default_rng(0).standard_normal((4096, 4096), np.float32)
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    shape = [1, 4096]
    proto = small.model([node], [small.value("x", shape)], [small.value("y", shape)],
                        [numpy_helper.from_array(weights, "w")])  # fmt: skip
    return small.save(proto, folder / "large.onnx")


@contextmanager
def made_in(folder: Path) -> Iterator[Callable[[str], None]]:
    """A wait for a file with that suffix to be made there."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.inotify_init1(os.O_CLOEXEC)
    assert libc.inotify_add_watch(fd, os.fsencode(folder), IN_CREATE) >= 0

    def wait(suffix: str) -> None:
        while True:
            assert select.select([fd], [], [], WATCHDOG)[0], f"no {suffix} is made in {folder}"
            data = os.read(fd, 65536)
            while data:  # struct inotify_event, inotify(7)
                length = struct.unpack_from("iIII", data)[3]
                name, data = data[16 : 16 + length].rstrip(b"\0"), data[16 + length :]
                if name.endswith(suffix.encode()):
                    return

    try:
        yield wait
    finally:
        os.close(fd)


def test_a_writer_killed_at_work_leaves_nothing_that_is_served(place: Path, cache: Path) -> None:
    model = large(place)
    cache.mkdir(mode=0o700)
    with made_in(cache) as wait, prepare(place, cache, model) as writing:
        wait(".tmp")
        (loader,) = children_of(writing.pid)
        os.kill(loader, signal.SIGKILL)
        _, said = writing.communicate()
        assert writing.returncode == 70 and "killed by SIGKILL" in said
    assert sorted(path.suffix for path in entries(cache)) == [".lock", ".tmp"]
    with prepare(place, cache, model) as again:
        shown, said = again.communicate()
        assert again.returncode == 0 and "from the cache" not in shown, said
    (entry,) = entries(cache)
    found = Cache(cache, 1 << 40, setup("error", "json", place / "log")).find(entry.stem)
    assert found is not None
    with found:
        found.verify()
    assert list((place / "work").iterdir()) == []


def test_a_file_that_may_not_grow_is_not_kept_by_half(place: Path, cache: Path, tmp_path: Path) -> None:
    """EFBIG, as RLIMIT_FSIZE makes it (setrlimit(2)), where no disk can be filled."""
    model = small.save(small.mlp(), place / "mlp.onnx")
    with prepare(place, tmp_path / "other", model) as whole:
        whole.communicate()
    (entry,) = entries(tmp_path / "other")
    most = str(entry.stat().st_size - 1)
    with prepare(place, cache, model, sys.executable, "-c", LIMITED, most) as cut:
        _, said = cut.communicate()
    assert cut.returncode == 73 and "File too large" in said, said
    assert entries(cache) == []
    with prepare(place, cache, model) as again:
        shown, _ = again.communicate()
        assert again.returncode == 0 and "from the cache" not in shown
    assert len(entries(cache)) == 1
