"""Servers with little: one core, a quota, a small /dev/shm, few descriptors, little memory. Right defaults, or a clear
refusal that leaves nothing."""

from __future__ import annotations

import os
import re
import resource
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefork import control
from prefork.client import Client
from prefork.errors import Code, ResourceExhausted
from tests.observe.scrape import samples
from tests.roles.confine import Confined, enter, group, memory, mounted, quota
from tests.roles.models import large
from tests.roles.watch import LogWatch, row, until_row
from tests.roles.wire import IMAGE, Wire, infer, live

MIB = 1 << 20


def serves(server: Confined) -> bool:
    with Client(server.unix, retries=0) as client:
        return client.infer("digits", {"image": IMAGE})["label"].shape == (1,)


def started(server: Confined) -> dict[str, Any]:
    return next(line for line in server.log() if line["event"] == "starting")


def findings(server: Confined) -> list[str]:
    return [line["finding"] for line in server.log() if line["event"] == "preflight"]


def refused(server: Confined, code: int, *words: str) -> str:
    """The server ends with that code and one line that has the words, and nothing is left."""
    (server.place / "stderr").unlink(missing_ok=True)
    found = server.run_to_end()
    said = (server.place / "stderr").read_text()
    assert found == code, said
    assert said.startswith("prefork-serve: error: ") and said.count("\n") == 1, said
    assert all(word in said for word in words), said
    assert not server.runtime.exists() or server.leftovers() == []
    return said


# processors


def test_a_cpu_set_of_one_core(place: Path) -> None:
    core = min(os.sched_getaffinity(0))
    with Confined(place).within("taskset", "-c", str(core)) as server:
        assert started(server)["workers"] == 1 == len(server.workers()) and serves(server)
        assert os.sched_getaffinity(server.workers()[0]) == {core}


def test_a_cpuset_of_one_core(place: Path) -> None:
    core = min(os.sched_getaffinity(0))
    settings = {"cpuset.mems": "0", "cpuset.cpus": str(core)}
    with group("cpuset", settings) as folder, Confined(place).within(*enter(folder)) as server:
        assert started(server)["workers"] == 1 == len(server.workers()) and serves(server)


def test_a_quota_of_150_percent(place: Path) -> None:
    with quota(150) as folder, Confined(place).within(*enter(folder)) as server:
        assert started(server)["workers"] == 1 == len(server.workers()) and serves(server)
        if len(os.sched_getaffinity(0)) > 1:
            assert started(server)["cpus"].startswith("quota of 1.5 CPUs in ")


# shared memory


def test_a_small_dev_shm(place: Path, models_dir: Path) -> None:
    with mounted("64m") as (wrap, shm):
        with Confined(place, "--workers", "2").within(*wrap) as server:
            assert serves(server) and len(list(shm.iterdir())) == 1
        assert list(shm.iterdir()) == []
        remedy = ("/dev/shm (64.0 MiB in all)", "enlarge it", "docker run --shm-size")
        (place / "large.onnx").write_bytes(b"x")
        os.truncate(place / "large.onnx", 416 * MIB)
        server = Confined(place, str(place / "large.onnx")).within(*wrap)  # whatever form it takes
        refused(server, 75, "the models' segments take at least 208.0 MiB", *remedy)
        server = Confined(place, str(models_dir / "minilm.onnx")).within(*wrap)  # only its loader can tell
        refused(server, 75, "model 'minilm'", "no room for a segment of 127.", *remedy)
        assert any("up to 172." in finding for finding in findings(server))
        assert list(shm.iterdir()) == []


def test_a_full_dev_shm(place: Path) -> None:
    with mounted("64m") as (wrap, shm):
        (shm / "other").write_bytes(bytes(64 * MIB))
        refused(Confined(place).within(*wrap), 75, "/dev/shm (64.0 MiB in all) has 0.0 MiB", "enlarge it")
        assert [path.name for path in shm.iterdir()] == ["other"]


# descriptors


@pytest.fixture
def many() -> Iterator[None]:
    """Descriptors enough for both ends of the tests' connections."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, before[1]), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("many")
def test_256_open_files(place: Path) -> None:
    with Confined(place, "--workers", "1").within("prlimit", "--nofile=256:256") as server, ExitStack() as stack:
        (finding,) = [finding for finding in findings(server) if finding.startswith("open files")]
        most = int(finding.partition("max_connections 4096 becomes ")[2].partition(":")[0].partition(",")[0])
        assert 150 < most < 256
        wires = [stack.enter_context(Wire(server.address)) for _ in range(300)]
        for wire in wires[:most]:
            wire.send(live(1))
            assert wire.answer().id == 1
        outcomes = [turned_away(wire, most) for wire in wires[most:]]
        assert outcomes.count("named") >= 30  # the spare descriptors; beyond them the loop hangs up
        for wire in wires[:most]:
            wire.send(live(2))
            assert wire.answer().id == 2
        assert until_row(server, connections=most)["restarts"] == 0
        stack.close()
        until_row(server, connections=0)
        assert serves(server)


def test_a_worker_without_any_descriptor_rests(place: Path) -> None:
    with Confined(place, "--workers", "1") as server, LogWatch(server) as log, ExitStack() as stack:
        (worker,) = server.workers()
        early = stack.enter_context(Wire(server.address))
        early.send(live(1))
        early.answer()
        assert polled(server)
        before = resource.prlimit(worker, resource.RLIMIT_NOFILE, (10, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        log.wait("no descriptor is left, not listening", connections=1)
        late = stack.enter_context(Wire(server.address))
        late.send(live(1))
        early.send(live(2))
        assert early.answer().id == 2 and row(server)["connections"] == 1
        assert not polled(server)
        resource.prlimit(worker, resource.RLIMIT_NOFILE, before)
        log.wait("listening again")
        assert late.answer().id == 1 and polled(server) and server.workers() == [worker]


def turned_away(wire: Wire, most: int) -> str:
    try:
        (error,) = wire.end()
    except (ValueError, ConnectionResetError):
        return "closed"
    return "named" if error.refused(Code.RESOURCE_EXHAUSTED, f"max_connections {most}") else "odd"


def polled(server: Confined) -> bool:
    """Whether the worker's loop waits on its listening TCP socket: who has nothing to accept with must not, for the
    socket is ready all the time."""
    pid, port = server.workers()[0], int(server.address.rpartition(":")[2])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and int(row[1].partition(":")[2], 16) == port}
    targets = re.findall(r"^tfd:\s*(\d+)", "".join(epolls(pid)), re.M)
    return any(str(Path(f"/proc/{pid}/fd/{fd}").readlink()) in listening for fd in targets)


def epolls(pid: int) -> Iterator[str]:
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        if str(fd.readlink()) == "anon_inode:[eventpoll]":
            yield Path(f"/proc/{pid}/fdinfo/{fd.name}").read_text()


def test_too_few_open_files(place: Path) -> None:
    words = ("open files: a worker needs", "hard RLIMIT_NOFILE is 64", "LimitNOFILE=")
    refused(Confined(place, "--workers", "2").within("prlimit", "--nofile=64:64"), 78, *words)
    refused(Confined(place, "--workers", "2", "--check").within("prlimit", "--nofile=64:64"), 78, *words)
    server = Confined(place, "--workers", "100").within("prlimit", "--nofile=256:256")
    refused(server, 78, "open files: the master needs", "hard RLIMIT_NOFILE is 256", "or fewer workers")


def test_no_scaling_beyond_the_open_files(place: Path) -> None:
    with Confined(place, "--workers", "1").within("prlimit", "--nofile=100:100") as server:
        control.request(server.runtime / "control.sock", "scale", {"workers": 3})
        with pytest.raises(ResourceExhausted, match=r"the master needs 158 .* RLIMIT_NOFILE is 100"):
            control.request(server.runtime / "control.sock", "scale", {"workers": 30})
        assert len(server.status()["workers"]) == 3 and serves(server)


# processes


def test_too_few_tasks(place: Path) -> None:
    with group("pids", {"pids.max": "12"}) as folder:
        server = Confined(place, "--workers", "8").within(*enter(folder))
        refused(server, 78, "processes: 8 worker(s)", "pids.max 12", "TasksMax=")


# memory


def test_a_loader_without_address_space(place: Path, models_dir: Path) -> None:
    server = Confined(place, str(models_dir / "minilm.onnx")).within("prlimit", f"--as={400 * 10**6}")
    refused(server, 75, "model 'minilm'", "may not have more memory (RLIMIT_AS")
    assert any(finding.startswith("address space") for finding in findings(server))


def test_no_address_space_at_all(place: Path) -> None:
    server = Confined(place).within("prlimit", f"--as={128 * MIB}")
    refused(server, 78, "address space: a process maps at least", "RLIMIT_AS is 128.0 MiB", "LimitAS=")


def test_a_loader_killed_for_memory_ends_the_start(place: Path, models_dir: Path) -> None:
    with memory(160 * MIB) as folder:
        server = Confined(place, "--workers", "1", str(models_dir / "minilm.onnx")).within(*enter(folder))
        refused(server, 75, "model 'minilm': the loader left: killed by the kernel for want of memory", folder.name)
        checked = Confined(place, "--check", str(models_dir / "minilm.onnx")).within(*enter(folder))
        assert checked.run_to_end() == 75
        said = (place / "stderr").read_text()
        assert "prefork-serve: warning: memory: segments and" in said


def test_a_worker_killed_for_memory_is_named(place: Path) -> None:
    with memory(400 * MIB) as folder:
        args = ("--workers", "1", "--metrics-bind", "127.0.0.1:0", str(large(place)))
        with Confined(place, *args).within(*enter(folder)) as server, LogWatch(server) as log:
            (victim,) = server.workers()
            with Wire(server.address) as wire:
                wire.send(infer(1, "large", n=np.array([200 * MIB])))
                with pytest.raises((EOFError, ConnectionResetError)):
                    wire.answer()
            died = log.wait("worker died", pid=victim)
            assert died["how"].startswith("killed by the kernel for want of memory") and folder.name in died["how"]
            assert float(died["how"].partition("it had ")[2].partition(" MiB")[0]) > 200
            log.wait("worker ready", slot=0)
            assert until_row(server, state="ready")["reason"] == died["how"]
            assert restarts(server) == {"oom": 1}
            killed(server, log)
            assert restarts(server) == {"oom": 1, "signal": 1}


def restarts(server: Confined) -> dict[str, float]:
    """Restarts by reason, as telemetry tells them."""
    with urllib.request.urlopen(f"http://{started(server)['metrics']}/metrics") as reply:
        found = samples(reply.read().decode())
    return {
        dict(labels)["reason"]: value
        for (name, labels), value in found.items()
        if name == "prefork_worker_restarts_total" and value
    }


def killed(server: Confined, log: LogWatch) -> None:
    """A worker that somebody kills is not taken for one that the kernel chose."""
    (victim,) = server.workers()
    os.kill(victim, signal.SIGKILL)
    assert log.wait("worker died", pid=victim)["how"] == "killed by SIGKILL"
    log.wait("worker ready", slot=0)


def test_a_core_leaves_the_segments_out(place: Path, models_dir: Path) -> None:
    cores = Path("/proc/sys/kernel/core_pattern").read_text().strip()
    if "/" in cores or "|" in cores:
        pytest.skip(f"cores do not go to the working directory: {cores}")
    args = ("--workers", "1", str(models_dir / "minilm.onnx"))
    wrap = ("sh", "-c", 'cd "$0" && ulimit -c unlimited && exec "$@"', str(place))
    with Confined(place, *args).within(*wrap) as server, LogWatch(server) as log:
        assert any(finding.startswith("cores are written") for finding in findings(server))
        (segment,) = [Path("/dev/shm", row["segment"]["name"]).read_bytes() for row in server.status()["models"]]
        (victim,) = server.workers()
        os.kill(victim, signal.SIGSEGV)
        log.wait("worker ready", slot=0)
        (core,) = [path.read_bytes() for path in place.glob("core*")]
        pages = {segment[at : at + 4096] for at in range(0, len(segment) - 4096, MIB)}  # weights, one page a MiB
        assert len(pages) > 100 and b"\x7fELF" in core and len(core) > MIB
        assert sum(page in core for page in pages) < len(pages) // 10
