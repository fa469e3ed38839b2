"""A canary on a real server: a share that waits, and what decides by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from prefork.client import Client
from prefork.errors import FailedPrecondition, InvalidArgument, StatusError
from tests.roles.changing import X, answer, ask, canary, ctl, reload, traffic, until_phase
from tests.roles.models import adder
from tests.roles.server import Server
from tests.roles.watch import LogWatch, until
from tests.roles.wire import Wire, infer

MANY = 500  # rounds of requests
LONG = 3600.0  # seconds that no test waits for; what ends before is ended by the figures


@pytest.fixture
def server(place: Path, module_place: Path) -> Iterator[Server]:
    args = (
        "--workers",
        "2",
        "--cache-dir",
        str(module_place / "cache"),
        "--run-in",
        "inline",
        "--model",
        f"adder={adder(place / 'a.onnx', 1)}",
    )
    with Server(place, *args) as found:
        yield found


def generations(server: Server) -> list[int | None]:
    return sorted(row["generation"] for row in server.rows())


def ask_until_judged(server: Server) -> None:
    """Requests to both workers, whose answers may be errors, for as long as the canary holds."""
    with ExitStack() as stack:
        wires = [stack.enter_context(Wire(server.address)) for _ in range(16)]
        for turn in range(MANY):
            if ask(server, "change")["phase"] != "holding":
                return
            for wire in wires:
                wire.send(infer(turn + 1, "adder", x=X))
            for wire in wires:
                wire.answer()


def test_a_canary_waits_for_a_word(server: Server, place: Path) -> None:
    adder(place / "a.onnx", 2)
    with traffic(server, fresh=2) as clients:
        ran = ctl(server, "reload", "--canary", "50%")
        assert (ran.returncode, ran.stderr) == (0, "") and "reload holding: generation 2, 1 of 2 workers" in ran.stdout
        assert generations(server) == [1, 2] and server.status()["generation"] == 1
        until(server, lambda: {(1.0, "1"), (2.0, "2")} <= set(clients.answers["fresh"][-200:]), "answers of both")
        ran = ctl(server, "promote")
        assert ran.returncode == 0 and "reload done" in ran.stdout
        assert generations(server) == [2, 2] and answer(server) == (2, "2")
        adder(place / "a.onnx", 3)
        assert canary(server)["moved"] == 1
        ran = ctl(server, "rollback")
        assert ran.returncode == 0 and "rolled back on request" in ran.stdout
        assert generations(server) == [2, 2] and server.status()["previous"] == 1
    assert clients.seen == {(1, "1"), (2, "2"), (3, "3")}


def test_the_only_worker_may_be_a_canary(place: Path) -> None:
    with Server(place, "--workers", "1", "--model", f"adder={adder(place / 'a.onnx', 1)}") as server:
        adder(place / "a.onnx", 2)
        with traffic(server):
            assert canary(server, 0.1)["moved"] == 1 and answer(server) == (2, "2")
            ask(server, "rollback")
            until_phase(server, "failed")
        assert answer(server) == (1, "1")


def test_a_changed_signature_is_rejected(server: Server, place: Path) -> None:
    adder(place / "a.onnx", 2, called="other")
    assert ask(server, "reload", canary=0.5, canary_seconds=LONG, force=True)["hold_s"] == LONG
    until_phase(server, "holding")
    ask_until_judged(server)
    found = until_phase(server, "failed")
    assert found["reason"].startswith("canary rejected: 100.00% of its") and "0.00% of the old" in found["reason"]
    assert generations(server) == [1, 1] and answer(server) == (1, "1")


def test_a_slower_model_is_rejected(server: Server, place: Path) -> None:
    adder(place / "a.onnx", 2, rounds=10)
    ask(server, "reload", canary=0.5, canary_seconds=LONG)
    until_phase(server, "holding")
    ask_until_judged(server)
    found = until_phase(server, "failed")
    assert found["reason"].startswith("canary rejected: its p99 of a run is"), found
    assert answer(server) == (1, "1")


def test_one_that_does_as_well_is_promoted(server: Server, place: Path) -> None:
    adder(place / "a.onnx", 2)
    with LogWatch(server) as log:
        with traffic(server):
            ran = ctl(server, "reload", "--canary", "0.5", "--canary-seconds", "0.5")
        assert (ran.returncode, ran.stderr) == (0, "") and "reload done" in ran.stdout, "it is waited for"
        assert "answers" in log.wait("canary promoted")["why"]
    assert answer(server) == (2, "2")


def test_ctl_tells_that_a_canary_was_rejected(server: Server, place: Path) -> None:
    adder(place / "a.onnx", 2, called="other")
    with Client(server.address, retries=0, pool_size=1) as client, pytest.raises(StatusError):
        client.infer("adder", {"other": X})
    with LogWatch(server) as log:
        assert (
            ctl(server, "reload", "--canary", "50%", "--canary-seconds", str(LONG), "--force", "--no-wait").returncode
            == 0
        )
        log.wait("canary holds")
    ask_until_judged(server)
    assert until_phase(server, "failed")["kind"] == "reload"
    with pytest.raises(FailedPrecondition, match="the last change is failed"):
        ask(server, "promote")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"canary": 1.5}, "canary must be a number from 0 to 1"),
        ({"canary": True}, "canary must be a number"),
        ({"canary_seconds": 5}, "canary_seconds needs a canary"),
        ({"canary": 0.5, "canary_seconds": -1}, "canary_seconds must be a number"),
        ({"models": "adder"}, "models must be a list of names"),
    ],
)
def test_wrong_words(demo: Server, args: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        ask(demo, "reload", **args)
    assert ask(demo, "change")["kind"] == "start"


def test_a_reload_after_a_canary_begins_anew(server: Server, place: Path) -> None:
    canary(server)
    ask(server, "rollback")
    until_phase(server, "failed")
    adder(place / "a.onnx", 5)
    assert reload(server)["phase"] == "done" and answer(server) == (5, "3")
