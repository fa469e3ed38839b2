"""A reload under continuous requests of clients that do not retry: what is answered, what is kept, what is refused."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefork.codec.message import Kind
from prefork.errors import Code, FailedPrecondition, NotFound
from prefork.shm.sweep import list_segments
from tests.roles.changing import X, answer, ask, change, ctl, hold, links, reload, traffic, until_phase
from tests.roles.models import adder, unknown_operator
from tests.roles.server import Server
from tests.roles.watch import LogWatch, children_of, until, wait_gone
from tests.roles.wire import Wire, infer


@pytest.fixture
def server(place: Path, module_place: Path) -> Iterator[Server]:
    """Two workers; `adder` adds 10, `other` adds 20. What was prepared before is prepared no more."""
    models = ("--model", f"adder={adder(place / 'a.onnx', 10)}", "--model", f"other={adder(place / 'o.onnx', 20)}")
    with Server(place, "--workers", "2", "--cache-dir", str(module_place / "cache"), *models) as found:
        yield found


def generations(server: Server) -> list[int]:
    """Of the segments that there are of this server."""
    mine = [info for info in list_segments() if info.owner and info.owner.pid == server.pid]
    return sorted(info.generation or 0 for info in mine)


def version(server: Server, model: str) -> int:
    return next(row["generation"] for row in server.status()["models"] if row["name"] == model)


def test_ctl_and_hup_reload_without_a_failed_request(server: Server, place: Path) -> None:
    before = server.workers()
    with traffic(server) as clients:
        adder(place / "a.onnx", 11)
        ran = ctl(server, "reload")
        assert (ran.returncode, ran.stderr) == (0, "") and "reload done: generation 2, 2 of 2 workers" in ran.stdout
        adder(place / "a.onnx", 12)
        with LogWatch(server) as log:
            os.kill(server.pid, signal.SIGHUP)
            log.wait("reload done", generation=3)
        assert change(server, "restart")["phase"] == "done"
        assert change(server, "rollback")["phase"] == "done"
        until(server, lambda: clients.answers["kept"][-1] == clients.answers["fresh"][-1] == (11, "2"), "the old model")
    assert clients.seen == {(10, "1"), (11, "2"), (12, "3")}, "each answer is of the version that it names"
    for pid in before:
        wait_gone(pid)
    assert server.status()["restarts"] == 0


@pytest.mark.parametrize("args", [("--workers", "1"), ("--threads", "2", "--workers", "2"), ("--shm", "sysv")])
def test_a_server_of_any_kind_reloads(place: Path, args: tuple[str, ...]) -> None:
    """One worker; workers that open the models themselves; segments without a path."""
    with Server(place, *args, "--model", f"adder={adder(place / 'a.onnx', 1)}") as server, traffic(server) as clients:
        adder(place / "a.onnx", 2)
        assert reload(server)["phase"] == "done" and answer(server) == (2, "2")
        assert change(server, "rollback")["phase"] == "done" and answer(server) == (1, "1")
    assert clients.seen == {(1, "1"), (2, "2")}


def test_a_rollback_needs_no_file_and_can_be_rolled_back(server: Server, place: Path) -> None:
    adder(place / "a.onnx", 11)
    assert reload(server)["phase"] == "done" and answer(server) == (11, "2")
    (place / "a.onnx").unlink()
    (place / "o.onnx").write_bytes(b"")
    for expected in ((10, "1"), (11, "2"), (10, "1")):
        ran = ctl(server, "rollback")
        assert (ran.returncode, ran.stderr) == (0, "") and answer(server) == expected
    assert generations(server) == [1, 1, 2, 2]


def test_one_model_of_two(server: Server, place: Path) -> None:
    kept = next(row["segment"] for row in server.status()["models"] if row["name"] == "other")
    adder(place / "a.onnx", 11)
    adder(place / "o.onnx", 21)
    assert reload(server, "adder")["phase"] == "done"
    assert answer(server) == (11, "2") and answer(server, "other") == (20, "1")
    assert kept == next(row["segment"] for row in server.status()["models"] if row["name"] == "other")
    assert change(server, "rollback")["phase"] == "done" and answer(server) == (10, "1")
    assert reload(server, "other")["phase"] == "done"
    assert answer(server, "other") == (21, "4") and answer(server) == (10, "1")
    assert generations(server) == [1, 1, 4], "what only the generation before the last had is gone"


def test_segments_of_two_generations_are_kept_and_nothing_grows(server: Server) -> None:
    held: list[int] = []
    for _ in range(3):
        assert reload(server)["phase"] == "done"
        until(server, lambda: len(children_of(server.pid)) == 3, "two workers and a template")
        held.append(len(links(server.pid)))
    assert generations(server) == [3, 3, 4, 4] and server.status()["previous"] == 3
    until(server, lambda: len(links(server.pid)) <= held[0], "no more descriptors than after the first reload")


def test_only_what_is_served_is_kept_when_that_is_wanted(place: Path) -> None:
    with Server(place, "--workers", "1", "--keep-previous", "false") as server:
        assert reload(server)["phase"] == "done"
        assert generations(server) == [2] and server.status()["previous"] is None
        with pytest.raises(FailedPrecondition, match="no earlier generation"):
            ask(server, "rollback")


def test_what_cannot_be_loaded_leaves_what_serves(server: Server, place: Path) -> None:
    pids = server.workers()
    with traffic(server) as clients:
        unknown_operator(place).rename(place / "a.onnx")
        ran = ctl(server, "reload")
        assert ran.returncode == 1 and "Frobnicate" in ran.stderr and "served on" in ran.stderr
        assert "Frobnicate" in ask(server, "change")["reason"]
        (place / "a.onnx").write_bytes(b"no model")
        assert ctl(server, "reload", "adder").returncode == 1
        (place / "a.onnx").unlink()
        ran = ctl(server, "reload")
        assert ran.returncode != 0 and "a.onnx" in ran.stderr
        with LogWatch(server) as log:
            os.kill(server.pid, signal.SIGHUP)
            assert "a.onnx" in log.wait("reload refused")["reason"]
    assert clients.seen == {(10, "1")}
    assert server.workers() == pids and generations(server) == [1, 1] and server.status()["previous"] is None
    assert list(server.work.glob("*/*")) == []


def test_an_unknown_name_changes_nothing(server: Server) -> None:
    with pytest.raises(NotFound, match="'nobody' is not configured; expected one of 'adder', 'other'"):
        ask(server, "reload", models=["nobody"])
    assert ctl(server, "reload", "nobody").returncode != 0
    assert ask(server, "change")["kind"] == "start" and generations(server) == [1, 1]
    with pytest.raises(NotFound, match="change 7 is not known"):
        ask(server, "change", number=7)


def test_a_restart_replaces_everybody(server: Server) -> None:
    before = set(server.workers())
    with traffic(server, kept=1, fresh=4):  # a worker that has no client may get one in the moment in which it retires
        ran = ctl(server, "restart")
        assert ran.returncode == 0 and "restart done" in ran.stdout
        for _ in range(10):
            assert change(server, "restart")["phase"] == "done"
    assert not before & set(server.workers()) and server.status()["generation"] == 1
    for pid in before:
        wait_gone(pid)


def test_one_change_at_a_time_and_a_hup_waits(server: Server, place: Path) -> None:
    held = hold(server, "opening")
    for command in ("reload", "restart"):
        with pytest.raises(FailedPrecondition, match="reload is opening; one change at a time"):
            ask(server, command)
    with pytest.raises(FailedPrecondition, match="no canary"):
        ask(server, "promote")
    adder(place / "a.onnx", 11)
    with LogWatch(server) as log:
        os.kill(server.pid, signal.SIGHUP)
        held.go()
        log.wait("reload done", generation=2)
        log.wait("reload done", generation=3)
    assert ask(server, "change", number=2)["phase"] == "done" and answer(server) == (11, "3")


def test_the_configuration_is_read_again(place: Path) -> None:
    file = place / "serve.toml"

    def write(names: str, timeout: int) -> None:
        models = [
            f'[[models]]\nname = "{name}"\npath = "{adder(place / f"{name}.onnx", ord(name))}"\n' for name in names
        ]
        file.write_text(f"[limits]\ndefault_timeout_ms = {timeout}\n" + "".join(models))

    write("ab", 5000)
    with Server(place, "--workers", "1", "--config", str(file)) as server, LogWatch(server) as log:
        write("bc", 6000)
        assert reload(server)["phase"] == "done"
        assert log.wait("changed but read at a start only")["keys"] == "limits.default_timeout_ms"
        assert answer(server, "b") == (ord("b"), "2") and answer(server, "c") == (ord("c"), "2")
        with pytest.raises(NotFound):
            answer(server, "a")
        write("bcd", 5000)
        assert reload(server, "d")["phase"] == "done"
        assert [version(server, name) for name in "bcd"] == [2, 2, 3]
        file.write_text("[limits")
        os.kill(server.pid, signal.SIGHUP)
        assert "is not TOML" in log.wait("reload refused")["reason"]
        assert change(server, "rollback")["phase"] == "done"
        assert {row["name"] for row in server.status()["models"]} == {"b", "c"}


def test_scaling_while_the_slots_roll(server: Server) -> None:
    held = hold(server, "rolling")
    with traffic(server) as clients:
        ask(server, "scale", workers=4)
        held.go()
        assert until_phase(server, "done", "failed")["workers"] == 4
        held = hold(server, "rolling")
        ask(server, "scale", workers=1)
        held.go()
        assert until_phase(server, "done", "failed") | {"moved": 1, "workers": 1} == ask(server, "change")
        until(server, lambda: len(server.workers()) == 1, "one worker")
    assert answer(server) == (10, "3") and {row["generation"] for row in server.rows()} <= {3, None}
    assert clients.count()


def test_clients_that_stay_are_seen_off(place: Path) -> None:
    """One is quiet, one asks on whatever it is told; both are answered as long as they may be, and end in order."""
    args = ("--workers", "1", "--graceful-timeout", "2", "--model", f"adder={adder(place / 'a.onnx', 1)}")
    with Server(place, *args) as server, Wire(server.address) as quiet, Wire(server.unix) as deaf:
        for wire in (quiet, deaf):
            wire.send(infer(1, "adder", x=X))
            assert wire.answer().values["y"].tolist() == [2, 3]
        ask(server, "reload")
        kinds, number = [int(Kind.INFER_REPLY)], 1
        while kinds[-1] != Kind.ERROR:
            number += 1
            deaf.send(infer(number, "adder", x=X))
            kinds.append(deaf.answer().kind)
        told = kinds.index(Kind.GOAWAY)
        assert kinds[told + 1 : told + 10] == [Kind.INFER_REPLY] * 9 and kinds.count(Kind.GOAWAY) == 2
        assert all(answer.refused(Code.UNAVAILABLE, "draining") for answer in deaf.end())
        assert [answer.kind for answer in quiet.end()] == [Kind.GOAWAY]
        until(server, lambda: not server.status()["leaving"], "the end of the old worker")
