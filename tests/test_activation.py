"""Sockets that a service manager passes on: which are taken, which are refused and how, and what slots get of them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prefork import activation
from prefork.activation import Given
from prefork.errors import ConfigError

FIRST = 200  # pytest has the low numbers
Give = Callable[..., dict[str, str]]


@pytest.fixture
def give() -> Iterator[Give]:
    """Puts descriptors at FIRST and on; the environment that announces them."""
    count = 0

    def call(*given: socket.socket | int, names: str = "") -> dict[str, str]:
        nonlocal count
        for one in given:
            os.dup2(one if isinstance(one, int) else one.fileno(), FIRST + count)
            count += 1
        return {"LISTEN_PID": "42", "LISTEN_FDS": str(count), "LISTEN_FDNAMES": names, "HOME": "/"}

    yield call
    for fd in range(FIRST, FIRST + count):
        try:
            os.close(fd)
        except OSError:
            continue


def tcp(port: int = 0, reuse: bool = True) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, reuse)
    sock.bind(("127.0.0.1", port))
    sock.listen()
    return sock


def unix(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    sock.listen()
    return sock


def take(environ: dict[str, str]) -> Given:
    return activation.take(environ, 42, FIRST)


def end(given: Given) -> None:
    for sock in (*given.slots, *([given.unix] if given.unix else [])):
        sock.detach()  # the fixture closes them


def test_nothing_is_given() -> None:
    environ = {"HOME": "/"}
    given = take(environ)
    assert not given and given.kept == "" and not given.has_unix and environ == {"HOME": "/"}


def test_what_is_meant_for_another_process_is_not_ours(give: Give) -> None:
    with tcp() as sock:
        environ = give(sock) | {"LISTEN_PID": "43"}
        assert not take(environ)
    assert environ == {"HOME": "/"}, "nor is it for a child of ours"


def test_sockets_of_one_port_and_a_unix_socket(give: Give, tmp_path: Path) -> None:
    with tcp() as one, tcp(one.getsockname()[1]) as two, unix(tmp_path / "s") as local:
        given = take(give(one, local, two, names="a:b"))
        assert [sock.getsockname() for sock in given.slots] == [one.getsockname()] * 2
        assert given.unix is not None and given.unix.getsockname() == str(tmp_path / "s")
        assert given.has_unix and given.kept == "slots,unix"
        for sock in (*given.slots, given.unix):
            assert not sock.getblocking() and not sock.get_inheritable()
        assert given.slots[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        end(given)


def test_a_unix_socket_alone_is_for_the_slots(give: Give, tmp_path: Path) -> None:
    with unix(tmp_path / "s") as local:
        given = take(give(local))
        assert len(given.slots) == 1 and given.unix is None and given.has_unix and given.kept == "slots"
        end(given)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM), "AF_INET SOCK_DGRAM that does not listen"),
        (lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM), "AF_UNIX SOCK_DGRAM that does not listen"),
        (socket.socket, "AF_INET SOCK_STREAM that does not listen"),
        (lambda: socket.socketpair()[0], "AF_UNIX SOCK_STREAM that does not listen"),
        (lambda: os.open("/dev/null", os.O_RDWR), r"none \(Socket operation on non-socket\)"),
    ],
)
def test_refused_by_name(give: Give, make: Callable[[], socket.socket | int], found: str) -> None:
    thing = make()
    environ = give(thing, names="metrics")
    with pytest.raises(ConfigError, match=rf"descriptor {FIRST} \(metrics\).*listening stream socket, found {found}"):
        take(environ)
    os.close(thing) if isinstance(thing, int) else thing.close()


def test_a_packet_socket_that_listens_is_refused(give: Give, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(str(tmp_path / "s"))
        sock.listen()
        with pytest.raises(ConfigError, match=r"found AF_UNIX SOCK_SEQPACKET$"):
            take(give(sock))


def test_a_descriptor_that_is_not_there(give: Give) -> None:
    environ = give() | {"LISTEN_FDS": "1"}
    with pytest.raises(ConfigError, match=rf"descriptor {FIRST} \(unnamed\).*found none \(Bad file descriptor\)"):
        take(environ)


@pytest.mark.parametrize("count", ["", "-1", "many"])
def test_a_number_that_is_none(count: str) -> None:
    with pytest.raises(ConfigError, match="LISTEN_FDS: expected a number"):
        take({"LISTEN_PID": "42", "LISTEN_FDS": count})


def test_addresses_that_differ_are_refused(give: Give) -> None:
    with tcp() as one, tcp() as two, pytest.raises(ConfigError, match=r"one address, found 127\.0.* and 127"):
        take(give(one, two))


def test_two_unix_sockets_are_refused(give: Give, tmp_path: Path) -> None:
    with unix(tmp_path / "a") as one, unix(tmp_path / "b") as two, pytest.raises(ConfigError, match="at most one Unix"):
        take(give(one, two))


def words(given: Given, count: int) -> tuple[list[socket.socket], str]:
    return activation.slot_sockets(given, "127.0.0.1:0", count, 16)


def test_without_given_sockets_the_address_is_opened() -> None:
    sockets, whence = words(Given(), 2)
    assert len(sockets) == 2 and whence == ""
    for sock in sockets:
        sock.close()


def test_fewer_than_slots_are_joined_or_shared(tmp_path: Path) -> None:
    for given, said in (
        (tcp(), "1 given, 2 opened beside in the same SO_REUSEPORT group"),
        (tcp(reuse=False), "1 given, 2 slots share the queue of the first, whose group cannot be joined"),
        (unix(tmp_path / "s"), "1 given, 2 slots share the queue of the first, whose group cannot be joined"),
    ):
        sockets, whence = words(Given((given,)), 3)
        assert whence == said and [sock.getsockname() for sock in sockets] == [given.getsockname()] * 3
        for sock in sockets:
            sock.close()


def test_more_than_slots_are_all_kept() -> None:
    one = tcp()
    two = tcp(one.getsockname()[1])
    sockets, whence = words(Given((one, two)), 1)
    assert sockets == [one, two] and whence == "2 given"
    one.close()
    two.close()
