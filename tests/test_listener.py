"""Listening sockets: one group a port, no port or path of somebody else."""

from __future__ import annotations

import errno
import os
import socket
import stat
import threading
from pathlib import Path

import pytest

from prefork import listener
from prefork.errors import ConfigError


def close(*sockets: socket.socket) -> None:
    for sock in sockets:
        sock.close()


def test_slots_share_one_port_that_the_kernel_chose() -> None:
    sockets = listener.open_tcp("127.0.0.1:0", 4, 16)
    ports = {sock.getsockname()[1] for sock in sockets}
    assert len(sockets) == 4 and len(ports) == 1 and 0 not in ports
    assert all(not sock.getblocking() and not sock.get_inheritable() for sock in sockets)
    grown, own = listener.grow(sockets[0], 16)
    assert own and grown.getsockname() == sockets[0].getsockname()
    close(grown, *sockets)


def test_the_group_takes_connections_in_every_socket() -> None:
    sockets = listener.open_tcp("127.0.0.1:0", 2, 256)
    clients = [socket.create_connection(sockets[0].getsockname()) for _ in range(64)]
    counts = [0, 0]
    for index, sock in enumerate(sockets):
        try:
            while True:
                accepted, _ = sock.accept()
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                accepted.close()
                counts[index] += 1
        except BlockingIOError:
            continue
    assert sum(counts) == 64 and all(counts)
    close(*clients, *sockets)


def test_a_port_in_use_is_refused_even_where_it_may_be_shared() -> None:
    (first,) = listener.open_tcp("127.0.0.1:0", 1, 16)
    address = listener.name_of(first)
    with pytest.raises(ConfigError, match=r"another server listens there") as caught:
        listener.open_tcp(address, 1, 16)
    assert address in caught.value.message
    first.close()
    close(*listener.open_tcp(address, 1, 16))


@pytest.mark.parametrize("address", ["192.0.2.1:0", "no.such.host.invalid:7070"])
def test_an_address_that_is_not_ours(address: str) -> None:
    with pytest.raises(ConfigError, match="bind address"):
        listener.open_tcp(address, 2, 16)


def test_a_queue_without_a_group_is_shared(tmp_path: Path) -> None:
    alone = socket.create_server(("127.0.0.1", 0))
    unix = listener.open_unix(tmp_path / "s", 16)
    for sock in (alone, unix):
        grown, own = listener.grow(sock, 16)
        assert not own and grown.getsockname() == sock.getsockname()
        sock.close()
        with socket.socket(grown.family, socket.SOCK_STREAM) as client:
            client.connect(grown.getsockname())
            client.setblocking(True)
            grown.setblocking(True)
            grown.accept()[0].close()
        grown.close()


def test_the_group_of_another_user_cannot_be_joined() -> None:
    if os.geteuid():
        pytest.skip("needs root")
    theirs = socket.socket()
    os.fchown(theirs.fileno(), 65534, 65534)  # whose group it becomes goes by the owner of the socket's inode
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    theirs.bind(("127.0.0.1", 0))
    theirs.listen()
    grown, own = listener.grow(theirs, 16)
    assert not own
    close(grown, theirs)


def test_a_group_is_of_one_kind_of_ipv6() -> None:
    like = socket.socket(socket.AF_INET6)
    try:
        like.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        like.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        like.bind(("::", 0))
    except OSError:
        pytest.skip("no IPv6 here")
    grown, own = listener.grow(like, 16)
    assert own and grown.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) == 1
    close(grown, like)


def test_an_abstract_unix_socket_has_a_name() -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(b"\0prefork-test-" + str(os.getpid()).encode())
        assert listener.name_of(sock) == f"unix:@prefork-test-{os.getpid()}"


def test_a_privileged_port_needs_the_privilege() -> None:
    if os.geteuid() == 0:
        pytest.skip("root may")
    with pytest.raises(ConfigError, match=os.strerror(errno.EACCES)):
        listener.open_tcp("127.0.0.1:1", 1, 16)


def test_ipv6() -> None:
    try:
        (sock,) = listener.open_tcp("[::1]:0", 1, 16)
    except ConfigError:
        pytest.skip("no IPv6 here")
    name = listener.name_of(sock)
    assert name.startswith("[::1]:") and not name.endswith(":0")
    grown, own = listener.grow(sock, 16)
    assert own
    close(sock, grown)


def test_every_interface() -> None:
    (sock,) = listener.open_tcp(":0", 1, 16)
    port = sock.getsockname()[1]
    close(socket.create_connection(("127.0.0.1", port)), sock)


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "s"
    sock = listener.open_unix(path, 16)
    status = path.stat()
    assert stat.S_ISSOCK(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o660
    assert listener.name_of(sock) == f"unix:{path}"
    with pytest.raises(ConfigError, match="a living server listens there"):
        listener.open_unix(path, 16)
    assert path.exists()
    sock.close()
    listener.open_unix(path, 16).close()


def test_a_full_queue_is_a_living_server(tmp_path: Path) -> None:
    path = tmp_path / "s"
    sock = listener.open_unix(path, 0)
    clients = []
    for _ in range(3):
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        clients.append(client)
        try:
            client.connect(str(path))
        except BlockingIOError:
            break
    with pytest.raises(ConfigError, match="a living server"):
        listener.open_unix(path, 16)
    close(sock, *clients)


def test_a_file_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("data")
    with pytest.raises(ConfigError, match="no socket"):
        listener.open_unix(path, 16)
    assert path.read_text() == "data"


def test_a_path_that_cannot_be(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere" / "s", tmp_path / ("x" * 200)):
        with pytest.raises(ConfigError, match="Unix socket"):
            listener.open_unix(path, 16)


def test_the_mask_is_put_back(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        listener.open_unix(tmp_path / "s", 16).close()
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


def test_a_connection_that_waits_survives_who_has_the_socket() -> None:
    (sock,) = listener.open_tcp("127.0.0.1:0", 1, 16)
    other = sock.dup()
    client = socket.create_connection(sock.getsockname())
    sock.close()  # a worker dies; its successor has a copy
    other.setblocking(True)
    accepted, _ = other.accept()
    threading.Thread(target=accepted.sendall, args=(b"x",)).start()
    assert client.recv(1) == b"x"
    close(accepted, client, other)
