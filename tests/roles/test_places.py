"""Addresses and places: whose they are, who gets them, and that nobody loses theirs to a second server."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefork import cpus
from prefork.client import Client
from tests.roles.server import Server
from tests.roles.wire import IMAGE


def beside(place: Path, *args: str) -> Server:
    """A server of its own in a folder of its own."""
    folder = place / "second"
    folder.mkdir(exist_ok=True)
    return Server(folder, "--workers", "1", *args)


def refused(server: Server, *words: str) -> bool:
    """Whether the server ended with 78, saying all the words and leaving nothing."""
    assert server.run_to_end() == 78
    said = (server.place / "stderr").read_text()
    assert all(word in said for word in words), said
    assert said.count("\n") == 1, said
    return True


def answers(address: str) -> bool:
    with Client(address, retries=0) as client:
        return client.infer("digits", {"image": IMAGE})["label"].shape == (1,)


@pytest.fixture(scope="module")
def first(demo: Server) -> Iterator[Server]:
    yield demo
    assert answers(demo.address) and answers(demo.unix)


def test_one_master_a_runtime_directory(first: Server, place: Path) -> None:
    second = beside(place)
    second.runtime = first.runtime
    assert refused(second, str(first.pid), str(first.runtime), "--runtime-dir")
    assert first.status()["pid"] == first.pid


def test_one_server_a_port(first: Server, place: Path) -> None:
    second = beside(place, "--bind", first.address)
    assert refused(second, first.address, "another server listens there")
    assert second.leftovers() == []


def test_a_living_unix_socket_is_not_taken(first: Server, place: Path) -> None:
    second = beside(place, "--unix", first.unix.removeprefix("unix:"))
    assert refused(second, "prefork.sock", "a living server listens there")
    assert answers(first.unix)


def test_a_living_control_socket_is_not_taken(first: Server, place: Path) -> None:
    second = beside(place, "--control", str(first.runtime / "control.sock"))
    assert refused(second, "control.sock", "a living server listens there")
    assert first.status()["pid"] == first.pid


@pytest.mark.parametrize("flag", ["--unix", "--control"])
def test_a_file_in_the_place_of_a_socket_survives(place: Path, flag: str) -> None:
    precious = place / "precious"
    precious.write_text("data")
    assert refused(beside(place, flag, str(precious)), str(precious), "no socket")
    assert precious.read_text() == "data"


def test_a_dead_servers_socket_is_replaced(place: Path) -> None:
    server = Server(place, "--workers", "1")
    server.runtime.mkdir()
    for name in ("prefork.sock", "control.sock"):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(os.fspath(server.runtime / name))
            dead.listen()
    with server:
        assert answers(server.unix)
        assert (server.runtime / "control.sock").stat().st_mode & 0o777 == 0o600
        assert (server.runtime / "prefork.sock").stat().st_mode & 0o777 == 0o660


def test_a_runtime_directory_of_another_user_is_refused(place: Path) -> None:
    server = beside(place)
    if os.getuid() == 0:
        server.runtime.mkdir()
        os.chown(server.runtime, 65534, 65534)
        assert refused(server, "belongs to user 65534")
        assert list(server.runtime.iterdir()) == []
    else:
        server.runtime = Path("/")
        assert refused(server, "belongs to user 0")


def test_a_path_too_long_for_a_socket_is_refused(place: Path) -> None:
    assert refused(beside(place, "--unix", str(place / ("x" * 120))), "server.unix", "107 bytes")


def test_ipv6(place: Path) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 here")
    with Server(place, "--workers", "2", "--bind", "[::1]:0") as server:
        assert server.address.startswith("[::1]:") and not server.address.endswith(":0")
        assert answers(server.address)


def test_no_unix_socket_when_none_is_wanted(place: Path) -> None:
    with Server(place, "--workers", "1", "--unix", "") as server:
        assert server.status()["unix"] is None and not (server.runtime / "prefork.sock").exists()
        assert answers(server.address)


def test_zero_workers_are_one_a_cpu(place: Path) -> None:
    with Server(place, "--workers", "0") as server:
        assert len(server.workers()) == cpus.allowed().count


def test_a_pid_file(place: Path) -> None:
    path = place / "pid"
    with Server(place, "--workers", "1", "--pid-file", str(path)) as server:
        assert path.read_text() == f"{server.pid}\n"
    assert not path.exists()
    assert refused(beside(place, "--pid-file", str(place / "nowhere" / "pid")), "pid_file", "nowhere")


def test_a_log_file_that_cannot_be_opened(place: Path) -> None:
    assert refused(beside(place, "--log-file", str(place / "nowhere" / "log")), "log.file", "nowhere")
