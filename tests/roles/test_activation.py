"""Sockets passed on by a service manager, to real servers: who serves them, and that nobody in their queues is lost."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from prefork.client import Client
from prefork.watchdog import QUESTION, answered
from tests.roles.supervisor import Supervised
from tests.roles.watch import until
from tests.roles.wire import IMAGE

Make = Callable[..., Supervised]


@pytest.fixture
def make(place: Path) -> Iterator[Make]:
    """Servers on given sockets, started one after the other; the last one may be left running."""
    made: list[Supervised] = []

    def call(given: list[socket.socket], *args: str) -> Supervised:
        (place / "ear").unlink(missing_ok=True)
        made.append(Supervised(place, *args, given=given))
        return made[-1]

    yield call
    for server in made:
        if server.process is not None and server.process.returncode is None:
            server.stop()
        server.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def tcp(stack: ExitStack, port: int = 0, reuse: bool = True) -> socket.socket:
    sock = stack.enter_context(socket.socket())
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, reuse)
    sock.bind(("127.0.0.1", port))
    sock.listen(128)
    return sock


def unix(stack: ExitStack, path: Path) -> socket.socket:
    sock = stack.enter_context(socket.socket(socket.AF_UNIX))
    sock.bind(str(path))
    sock.listen(128)
    return sock


def ask(sock: socket.socket) -> socket.socket:
    """A connection to the listening socket with a question sent; whoever accepts it may come later."""
    client = socket.socket(sock.family, socket.SOCK_STREAM)
    client.connect(sock.getsockname())
    client.sendall(QUESTION)
    return client


def ready(client: socket.socket) -> bool:
    """The answer; ends the connection."""
    data = b""
    with client:
        while (verdict := answered(data)) is None:
            more = client.recv(4096)
            assert more, f"closed after {data!r}"
            data += more
    return verdict


def serves(address: str) -> bool:
    with Client(address) as client:
        return bool(client.infer("digits", {"image": IMAGE})["label"].shape == (1,))


def whence(server: Supervised) -> str:
    (line,) = [line for line in server.log() if line["event"] == "sockets of the service manager"]
    return str(line["slots"])


def name(sock: socket.socket) -> str:
    host, port = sock.getsockname()
    return f"{host}:{port}"


def test_a_group_is_joined(make: Make, stack: ExitStack) -> None:
    given = tcp(stack)
    server = make([given], "--workers", "3").start()
    assert server.status()["bind"] == [name(given)] and whence(server).startswith("1 given, 2 opened beside")
    assert all(ready(client) for client in [ask(given) for _ in range(32)])
    assert serves(name(given)) and serves(server.unix)


def test_a_queue_is_shared(make: Make, stack: ExitStack) -> None:
    given = tcp(stack, reuse=False)
    server = make([given], "--workers", "2").start()
    assert "1 slots share the queue" in whence(server)
    assert all(ready(client) for client in [ask(given) for _ in range(32)])
    server.process.send_signal(signal.SIGTTIN)
    until(server, lambda: [row["state"] for row in server.rows()] == ["ready"] * 3, "a third worker")
    server.process.send_signal(signal.SIGTTOU)
    until(server, lambda: [row["state"] for row in server.rows()][2] == "retired", "two workers")
    assert all(ready(client) for client in [ask(given) for _ in range(32)])


def test_more_sockets_than_workers_are_all_served(make: Make, stack: ExitStack) -> None:
    first = tcp(stack)
    given = [first, *(tcp(stack, first.getsockname()[1]) for _ in range(2))]
    server = make(given, "--workers", "1").start()
    assert [row["state"] for row in server.rows()] == ["ready", "retired", "retired"]
    assert all(ready(client) for client in [ask(first) for _ in range(32)])


def test_a_unix_socket_takes_the_place_of_the_configured_one(make: Make, stack: ExitStack, place: Path) -> None:
    given, path = [tcp(stack)], place / "public"
    given.append(unix(stack, path))
    server = make(given, "--workers", "2").start()
    assert server.status()["unix"] == str(path) and not (server.runtime / "prefork.sock").exists()
    assert serves(f"unix:{path}") and serves(name(given[0]))
    server.process.send_signal(signal.SIGTTOU)
    until(server, lambda: server.rows()[1]["state"] == "retired", "one worker")
    assert serves(f"unix:{path}"), "a worker that leaves takes no path along"
    server.stop()
    assert path.is_socket()


def test_a_unix_socket_alone(make: Make, stack: ExitStack, place: Path) -> None:
    given = unix(stack, place / "public")
    server = make([given], "--workers", "2").start()
    assert server.status()["bind"] == [f"unix:{place / 'public'}"] and server.status()["unix"] is None
    assert all(ready(client) for client in [ask(given) for _ in range(16)])
    server.stop()
    assert (place / "public").is_socket()


@pytest.mark.parametrize("family", ["tcp", "unix"])
def test_who_comes_while_nobody_serves_is_served_by_the_next(
    make: Make, stack: ExitStack, place: Path, family: str
) -> None:
    given = tcp(stack) if family == "tcp" else unix(stack, place / "public")
    early = [ask(given) for _ in range(8)]
    make([given], "--workers", "2").start().stop()
    late = [ask(given) for _ in range(8)]
    make([given], "--workers", "2").start()
    assert all(ready(client) for client in [*early, *late])


def refused(server: Supervised) -> str:
    assert server.run_to_end() == 78
    return (server.place / "stderr").read_text()


def test_what_is_no_listening_socket_is_refused_by_name(make: Make, stack: ExitStack) -> None:
    datagram = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    deaf = stack.enter_context(socket.socket())
    assert "descriptor 3 (unnamed)" in refused(make([datagram])) and "SOCK_DGRAM" in refused(make([datagram]))
    said = refused(make([tcp(stack), deaf]))
    assert "descriptor 4 (unnamed)" in said and "AF_INET SOCK_STREAM that does not listen" in said
    assert "expected TCP sockets of one address" in refused(make([tcp(stack), tcp(stack)]))
