"""The blocking client: thread-safe, no thread of its own, usable again after a fork. Connections are in link.py."""

from __future__ import annotations

import itertools
import os
import socket
import time
import weakref
from collections.abc import Mapping, Sequence
from threading import Condition
from typing import Self

from prefork.client import calls
from prefork.client.address import Address
from prefork.client.connection import Leaving
from prefork.client.link import Link
from prefork.client.pool import Need, Pool
from prefork.client.retry import ELSEWHERE, Attempts, earliest, timeout_ms
from prefork.codec.frame import Frame
from prefork.codec.message import InferReply, Kind, Message, ModelMetadata, ModelRequest, Ready, ServerMetadata
from prefork.errors import DeadlineExceeded, FailedPrecondition, PreforkError, Unavailable
from prefork.value import Parameter, Value

_clients: weakref.WeakSet[Client] = weakref.WeakSet()


class Client:
    """A client of one server, or of several that serve the same models; share it between threads.

    `addresses`: `host:port`, `[v6]:port` or `unix:/path`, one or a list (tried in turn). `timeout` is the default
    deadline of a call in seconds, connecting and retries included; None leaves it to the server. `retries`: repetitions
    of a request at most, see retry.py. `max_body`: the largest reply in bytes. Connections are opened when needed,
    `pool_size` at most, each with `max_in_flight` requests at most; further calls wait for their turn. After a fork the
    child opens its own. Raises InvalidArgument for an argument out of range.

    Each method may raise the StatusError that the server answered, DeadlineExceeded, Unavailable (its `maybe_executed`
    tells whether the request may have run), and ProtocolError for a reply that cannot be read."""

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        codec: calls.CodecName = "msgpack",
        pool_size: int = 4,
        timeout: float | None = 30.0,
        retries: int = 2,
        connect_timeout: float = 5.0,
        max_body: int = 1 << 30,
        max_in_flight: int = 64,
    ) -> None:
        self._settings = calls.settings(
            addresses, codec, pool_size, timeout, retries, connect_timeout, max_body, max_in_flight
        )
        self.retried = 0
        """Requests sent again so far."""
        self._closed = False
        self._fresh()
        _clients.add(self)

    def _fresh(self) -> None:
        self._pool: Pool[Link] = Pool(self._settings.pool_size, self._settings.max_in_flight)
        self._changed = Condition()  # guards the pool; notified when `take` may answer otherwise than WAIT
        self._turn = itertools.count()

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Value],
        *,
        outputs: Sequence[str] | None = None,
        timeout: float | None = None,
        version: str = "",
        parameters: Mapping[str, Parameter] | None = None,
        traceparent: str | None = None,
        idempotent: bool = True,
    ) -> dict[str, Value]:
        """The model's outputs by name: read-only arrays, a list for a sequence, a dict for a map, None for an empty
        optional. Inputs: arrays, those compound values, or Python numbers and nested lists (floats FP32, integers
        INT64). `outputs`: the wanted ones, None for all. `idempotent` False: never sent again when it may have run;
        inference is a pure function, so the default is True."""
        reply = self.infer_raw(
            model, inputs, outputs=outputs, timeout=timeout, version=version, parameters=parameters,
            traceparent=traceparent, idempotent=idempotent,
        )  # fmt: skip
        return calls.values(reply)

    def infer_raw(
        self,
        model: str,
        inputs: Mapping[str, Value],
        *,
        outputs: Sequence[str] | None = None,
        timeout: float | None = None,
        version: str = "",
        parameters: Mapping[str, Parameter] | None = None,
        traceparent: str | None = None,
        idempotent: bool = True,
    ) -> InferReply:
        """As `infer`, giving the reply itself with its tensors, parameters and model version."""
        request = calls.infer_request(model, inputs, outputs, version, parameters, traceparent)
        return calls.decode(self._call(Kind.INFER, request, timeout, idempotent), InferReply)

    def metadata(self, model: str, *, version: str = "", timeout: float | None = None) -> ModelMetadata:
        """Names, element types and shapes of the model's inputs and outputs. Raises NotFound for an unknown model."""
        return calls.decode(self._call(Kind.MODEL_METADATA, ModelRequest(model, version), timeout), ModelMetadata)

    def server_metadata(self, *, timeout: float | None = None) -> ServerMetadata:
        return calls.decode(self._call(Kind.SERVER_METADATA, None, timeout), ServerMetadata)

    def model_ready(self, model: str, *, version: str = "", timeout: float | None = None) -> bool:
        return calls.decode(self._call(Kind.MODEL_READY, ModelRequest(model, version), timeout), Ready).ready

    def ready(self, *, timeout: float | None = None) -> bool:
        """Whether the server takes inference requests."""
        return calls.decode(self._call(Kind.SERVER_READY, None, timeout), Ready).ready

    def live(self, *, timeout: float | None = None) -> bool:
        return calls.decode(self._call(Kind.SERVER_LIVE, None, timeout), Ready).ready

    def health(self, *, timeout: float | None = None) -> bool:
        """As `ready`, and False when the server cannot be reached or does not answer in time."""
        try:
            return self.ready(timeout=timeout)
        except (Unavailable, DeadlineExceeded):
            return False

    def close(self) -> None:
        """Pending calls of other threads end with Cancelled, later ones with FailedPrecondition. May be repeated."""
        with self._changed:
            self._closed = True
            links, self._pool.links = self._pool.links, []
            idle = [link for link in links if not link.users]
            self._changed.notify_all()
        for link in links:
            link.end("the client was closed")
        for link in idle:
            link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, kind: Kind, message: Message, timeout: float | None, idempotent: bool = True) -> Frame:
        seconds = self._settings.timeout if timeout is None else timeout
        deadline = None if seconds is None else time.monotonic() + seconds
        body = self._settings.codec.encode(kind, message)
        attempts = Attempts(self._settings.retries, deadline, idempotent)
        while True:
            try:
                return self._attempt(kind, body, deadline)
            except PreforkError as error:
                time.sleep(attempts.wait_before_next(error, time.monotonic()))
                self.retried += 1

    def _attempt(self, kind: Kind, body: bytes, deadline: float | None) -> Frame:
        tried = 0
        while True:
            link = self._lease(deadline)
            try:
                return link.call(kind, body, deadline)
            except Leaving:  # another thread has heard it since we looked
                tried += 1
                if tried == ELSEWHERE:
                    raise
            finally:
                self._release(link)

    def _lease(self, deadline: float | None) -> Link:
        while (link := self._take(deadline)) is not None:
            if link.look_up():
                return link
            self._release(link)  # it ended while idle
        return self._open(deadline)

    def _take(self, deadline: float | None) -> Link | None:
        """A connection of the pool; None when one is to be opened."""
        with self._changed:
            while True:
                if self._closed:
                    raise FailedPrecondition("the client is closed")
                taken = self._pool.take()
                if isinstance(taken, Link):
                    return taken
                if taken is Need.OPEN:
                    return None
                if not self._changed.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
                    self._changed.notify()  # in case this thread was the one that was just told
                    raise DeadlineExceeded("the deadline passed before there was a connection")

    def _release(self, link: Link) -> None:
        with self._changed:
            unused = self._pool.release(link)
            self._changed.notify()
        if unused:
            link.close()

    def _open(self, deadline: float | None) -> Link:
        try:
            link = self._connect(deadline)
        except BaseException:
            with self._changed:
                self._pool.not_opened()
                self._changed.notify_all()
            raise
        with self._changed:
            self._pool.opened(link)
            self._changed.notify_all()
            closed = self._closed
        if closed:
            link.end("the client was closed")
        return link

    def _connect(self, deadline: float | None) -> Link:
        """The next address in turn that accepts. Raises Unavailable naming what each of them said."""
        addresses, failures = self._settings.addresses, []
        turn = next(self._turn)
        for offset in range(len(addresses)):
            address = addresses[(turn + offset) % len(addresses)]
            timeout_ms(deadline, time.monotonic())
            until = earliest(deadline, time.monotonic() + self._settings.connect_timeout)
            try:
                sock = _dial(address, max(0.001, until - time.monotonic()))
            except OSError as error:
                failures.append(f"{address}: {error}")
                continue
            return Link(sock, str(address), self._settings.codec.CODEC, self._settings.max_body)
        timeout_ms(deadline, time.monotonic())
        raise Unavailable(f"no connection: {'; '.join(failures)}")

    def _forget_inherited(self) -> None:
        """In a forked child, which is alone: close its copies and leave the parent's connections be."""
        links, self._pool.links = self._pool.links, []
        for link in links:
            link.close()
        self._fresh()


def _dial(address: Address, seconds: float) -> socket.socket:
    if not address.path:
        sock = socket.create_connection((address.host, address.port), seconds)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(seconds)
        sock.connect(address.path)
    except BaseException:
        sock.close()
        raise
    return sock


def _after_fork() -> None:
    for client in list(_clients):
        client._forget_inherited()


os.register_at_fork(after_in_child=_after_fork)
