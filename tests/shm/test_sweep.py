"""Segments of the dead are removed, of the living never: killed processes, namespaces, races, strangers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sysv_ipc

from prefork.errors import SegmentError
from prefork.shm import posix, sysv
from prefork.shm import sweep as sweeping
from prefork.shm.owner import Owner, segment_name
from prefork.shm.segment import Kind, SegmentRef, attach
from prefork.shm.sweep import SegmentInfo, discard, list_segments, sweep

Start = Callable[..., Any]
WHOLE = """
writer = create(kind, sections, Owner.current(), 1, model)
fill(writer)
ref = writer.publish()
held = hold(ref)
writer.close()
say(ref.kind, ref.name, ref.size)
wait()
"""


def of(model: str) -> list[SegmentInfo]:
    return [info for info in list_segments() if info.model == model]


def dead_owner() -> Owner:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    owner = Owner(pid, 1, Owner.current().namespace)
    os.waitpid(pid, 0)
    return owner


def dead_name(model: str) -> str:
    return segment_name(dead_owner(), 1, model)


def test_a_killed_master_leaves_only_what_a_sweep_removes(kind: Kind, model: str, start: Start) -> None:
    actor = start(WHOLE, kind)
    ref = actor.ref()
    (info,) = of(model)
    assert (info.alive, info.published, info.ref) == (True, True, ref)
    assert info.owner is not None
    assert info.owner.pid == actor.pid
    sweep()
    attach(ref).close()
    actor.kill()
    removed = [info.ref for info in sweep() if info.model == model]
    assert removed == ([ref] if kind == "posix" else [])  # the kernel has removed the other kind by itself
    assert of(model) == []


@pytest.mark.parametrize("step", ["create", "half", "full", "publish"])
def test_a_killed_loader(kind: Kind, model: str, start: Start, step: str) -> None:
    actor = start(
        """
        writer = create(kind, sections, Owner.current(), 1, model)
        if sys.argv[3] != "create":
            writer.fill("graph", bytes(65536))
        if sys.argv[3] in ("full", "publish"):
            for name in ("weights", "manifest", "empty"):
                writer.fill(name, bytes(dict(sections)[name]))
        if sys.argv[3] == "publish":
            writer.publish()
        say("there")
        wait()
        """,
        kind, step,
    )  # fmt: skip
    actor.line()
    assert [info.model for info in sweep() if info.model == model] == []
    visible = kind == "sysv" or step == "publish"
    assert [info.published for info in of(model)] == ([step == "publish"] if visible else [])
    actor.kill()
    assert [info.alive for info in sweep() if info.model == model] == ([False] if visible else [])
    assert of(model) == []


@pytest.mark.parametrize("step", ["draft", "published"])
def test_a_loader_that_dies_under_a_living_master(kind: Kind, model: str, start: Start, step: str) -> None:
    me = Owner.current()
    loader = start(
        """
        writer = create(kind, sections, Owner(*map(int, sys.argv[3:6])), 5, model)
        fill(writer)
        if sys.argv[6] == "published":
            writer.publish()
        say("there")
        wait()
        """,
        kind, str(me.pid), str(me.start), str(me.namespace), step,
    )  # fmt: skip
    loader.line()
    loader.kill()
    assert [info.model for info in sweep() if info.model == model] == []
    assert [info.model for info in discard(me, 4) if info.model == model] == []
    visible = kind == "sysv" or step == "published"
    assert [info.model for info in discard(me, 5)] == ([model] if visible else [])
    assert of(model) == []


def test_kill_at_every_line(kind: Kind, model: str, start: Start) -> None:
    """Loader and master in one, killed before line n of our code for every n, then a sweep: nothing may be left."""
    actor = start(
        """
        def life():
            writer = create(kind, sections, Owner.current(), 1, model)
            fill(writer)
            ref = writer.publish()
            held = hold(ref)
            writer.close()
            with attach(ref) as segment:
                segment.verify()
            retire(ref)
            held.release()

        def killed_at(limit):
            seen = 0
            def trace(frame, event, arg):
                nonlocal seen
                if "prefork/shm/" not in frame.f_code.co_filename:
                    return None
                if event == "line":
                    seen += 1
                    if seen == limit:
                        os.kill(os.getpid(), signal.SIGKILL)
                return trace
            pid = os.fork()
            if pid == 0:
                sys.settrace(trace)
                life()
                os._exit(0)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

        limit, code, swept, before = 1, -9, 0, {row.name for row in sysv.rows()}
        while code == -9 and limit < 5000:
            code = killed_at(limit)
            swept += len([info for info in sweep() if info.model in (model, None)])
            left = [info for info in list_segments() if info.model == model]
            blank = [row for row in sysv.rows() if row.ours and row.name not in before and row.attached == 0]
            if left or (kind == "sysv" and blank):
                say("left after line", limit, left, blank)
            limit += 1
        say("end", code, limit > 100, swept > 0)
        """,
        kind,
    )
    assert actor.line() == "end 0 True True"
    assert actor.end() == 0


def test_workers_keep_what_they_have_attached(kind: Kind, model: str, start: Start) -> None:
    master = start(WHOLE, kind)
    ref = master.ref()
    worker = start(
        """
        segment = attach(SegmentRef(kind, sys.argv[3], int(sys.argv[4])))
        say("attached")
        wait()
        segment.verify()
        say("sound")
        """,
        kind, ref.name, str(ref.size),
    )  # fmt: skip
    worker.line()
    master.kill()
    sweep()
    worker.process.stdin.close()
    assert worker.line() == "sound"
    worker.end()
    sweep()


def test_a_living_owner_without_a_lock_is_spared(kind: Kind, model: str, start: Start) -> None:
    """Between the loader's end and the master's hold nobody holds the segment; its owner lives."""
    master = start("say(Owner.current().start); wait()", kind)
    owner = Owner(master.pid, int(master.line()), Owner.current().namespace)
    loader = start(
        """
        with create(kind, sections, Owner(*map(int, sys.argv[3:6])), 1, model) as writer:
            fill(writer)
            writer.publish()
        """,
        kind, str(owner.pid), str(owner.start), str(owner.namespace),
    )  # fmt: skip
    assert loader.end() == 0
    assert [info.model for info in sweep() if info.model == model] == []
    assert [info.alive for info in of(model)] == [True]
    master.kill()
    assert [info.model for info in sweep() if info.model == model] == [model]


def test_a_reused_pid_is_not_the_owner(kind: Kind, model: str, start: Start) -> None:
    me = Owner.current()
    loader = start(
        """
        with create(kind, sections, Owner(*map(int, sys.argv[3:6])), 1, model) as writer:
            fill(writer)
            writer.publish()
        """,
        kind, str(me.pid), str(me.start + 1), str(me.namespace),
    )  # fmt: skip
    assert loader.end() == 0
    assert [info.alive for info in of(model)] == [False]
    assert [info.model for info in sweep() if info.model == model] == [model]


def test_an_owner_in_another_pid_namespace(
    kind: Kind, model: str, start: Start, isolate: Callable[..., tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = start(WHOLE, kind, wrap=isolate("-p", "-f", "--mount-proc"))
    ref = actor.ref()
    (info,) = of(model)
    assert info.owner is not None
    assert (info.owner.pid, info.owner.comparable) == (1, False)
    monkeypatch.setattr(sweeping, "GRACE", -1.0)  # so that the lock or the attachment alone decides
    assert [info.model for info in sweep() if info.model == model] == []
    attach(ref).close()
    actor.kill()
    monkeypatch.undo()
    if kind == "posix":  # nobody can know that it is dead, but it has just changed
        assert [info.model for info in sweep() if info.model == model] == []
        monkeypatch.setattr(sweeping, "GRACE", -1.0)
        assert [info.model for info in sweep() if info.model == model] == [model]
    assert of(model) == []


def test_concurrent_sweeps(kind: Kind, model: str, start: Start) -> None:
    loader = start(
        """
        for generation in range(20):
            with create(kind, sections, Owner.current(), generation, model) as writer:
                fill(writer)
                writer.publish()
        """,
        kind,
    )
    assert loader.end() == 0
    assert len(of(model)) == 20
    code = 'say("ready"); wait(); say(*(info.generation for info in sweep() if info.model == model))'
    sweepers = [start(code, kind) for _ in range(4)]
    for sweeper in sweepers:
        assert sweeper.line() == "ready"
    for sweeper in sweepers:
        sweeper.process.stdin.close()
    removed = [int(word) for sweeper in sweepers for word in sweeper.process.stdout.read().split()]
    assert set(removed) == set(range(20))
    assert of(model) == []


def test_junk_under_our_prefix(model: str, tmp_path: Path) -> None:
    shm = Path("/dev/shm")
    target = tmp_path / "precious"
    target.write_bytes(b"x")
    link, folder, fifo = (shm / dead_name(model + word) for word in ("link", "folder", "fifo"))
    strange = shm / "prefork-something-else"
    empty, noise = shm / dead_name(model), shm / dead_name(model + "noise")
    try:
        link.symlink_to(target)
        folder.mkdir()
        os.mkfifo(fifo)
        strange.write_bytes(b"")
        empty.touch()
        noise.write_bytes(os.urandom(100_000))
        assert {info.name for info in list_segments() if info.model and model in info.model} == {empty.name, noise.name}
        sweep()
        for path in (link, folder, fifo):
            with pytest.raises(SegmentError):
                attach(SegmentRef("posix", path.name, 1))
        assert target.read_bytes() == b"x"
        assert all(os.path.lexists(path) for path in (link, folder, fifo, strange, empty, noise))
    finally:
        for path in (link, fifo, strange, empty, noise):
            path.unlink(missing_ok=True)
        folder.rmdir()


def test_a_ruined_header_does_not_hide_a_dead_segment(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("/dev/shm") / dead_name(model)
    path.write_bytes(os.urandom(70_000))
    (info,) = of(model)
    assert not info.published
    assert "magic" in info.problem
    monkeypatch.setattr(sweeping, "GRACE", -1.0)
    assert [info.name for info in sweep() if info.model == model] == [path.name]
    assert not path.exists()


def test_a_strangers_file_is_left_alone(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    path = Path("/dev/shm") / dead_name(model)
    path.touch()
    shutil.chown(path, 12345)
    monkeypatch.setattr(sweeping, "GRACE", -1.0)
    sweep()
    assert [(info.uid, info.alive) for info in of(model)] == [(12345, False)]
    path.unlink()


def test_a_replaced_file_is_left_alone(model: str) -> None:
    path = Path("/dev/shm") / dead_name(model)
    path.write_bytes(b"old")
    with posix.inspect(path.name) as fd:
        assert not posix.held(fd)
        path.unlink()
        assert not posix.remove_locked(path.name, fd)
        path.write_bytes(b"new")
        assert not posix.remove_locked(path.name, fd)
    assert path.read_bytes() == b"new"
    path.unlink()


def test_killed_before_the_first_store(model: str, start: Start) -> None:
    actor = start("memory = sysv._create(200_000); say(memory.id); wait()", "sysv")
    name = actor.line()
    sweep()
    (info,) = [info for info in list_segments() if info.name == name]
    assert (info.owner, info.alive, info.problem) == (None, True, "nothing is written yet")
    actor.kill()
    assert name in [info.name for info in sweep()]


def test_other_system_v_segments_are_left_alone(model: str) -> None:
    plain = sysv_ipc.SharedMemory(None, sysv_ipc.IPC_CREX, 0o600, 200_000)
    keyed = sysv_ipc.SharedMemory(sysv.KEY_PREFIX << 16 | 0xFFFF, sysv_ipc.IPC_CREX, 0o600, 200_000)  # blanks
    try:
        for memory in (plain, keyed):
            memory.detach()
        names = {str(plain.id), str(keyed.id)}
        assert not names & {info.name for info in list_segments()}
        assert not names & {info.name for info in sweep()}
        assert names <= {row.name for row in sysv.rows()}
    finally:
        plain.remove()
        keyed.remove()


def test_a_list_of_vanishing_segments(kind: Kind, model: str, start: Start) -> None:
    """Listing while another process makes and removes segments all the time never raises."""
    actor = start(
        """
        say("go")
        for generation in range(300):
            with create(kind, sections, Owner.current(), generation, model) as writer:
                fill(writer)
                ref = writer.publish()
            retire(ref)
        """,
        kind,
    )
    assert actor.line() == "go"
    while actor.process.poll() is None:
        for info in of(model):
            assert isinstance(info.ref, SegmentRef)
    assert actor.end() == 0
