"""The tables: what is sent again, how addresses are written, which connection is next, what arguments are refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from prefork.client import AsyncClient, Client, retry
from prefork.client.address import Address, parse
from prefork.client.calls import as_value
from prefork.client.pool import Need, Pool
from prefork.errors import (
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    NotFound,
    PreforkError,
    ProtocolError,
    ResourceExhausted,
    StatusError,
    Unavailable,
    from_wire,
)


def lost(maybe_executed: bool) -> Unavailable:
    error = Unavailable("lost")
    error.maybe_executed = maybe_executed
    return error


@pytest.mark.parametrize(
    ("error", "idempotent", "otherwise"),
    [
        (lost(False), True, True),
        (lost(True), True, False),
        (from_wire(14, "", retryable=True), True, True),
        (from_wire(14, "", retryable=False), False, False),
        (from_wire(8, "", retryable=True), True, True),
        (from_wire(8, "", retryable=False), False, False),
        (from_wire(13, "", retryable=True), False, False),
        (DeadlineExceeded(""), False, False),
        (NotFound(""), False, False),
        (Internal(""), False, False),
        (Cancelled(""), False, False),
        (ProtocolError(""), False, False),
    ],
)
def test_may_repeat(error: PreforkError, idempotent: bool, otherwise: bool) -> None:
    assert (retry.may_repeat(error, True), retry.may_repeat(error, False)) == (idempotent, otherwise)


def test_waits_grow_with_full_jitter() -> None:
    for made, most in ((0, 0.05), (1, 0.1), (2, 0.2), (9, 2.0)):
        waits = [retry.Attempts(20, None, True, made).wait_before_next(lost(True), 0) for _ in range(300)]
        assert 0 <= min(waits) < most / 4 and most * 3 / 4 < max(waits) <= most


def test_the_servers_advice_comes_first() -> None:
    refused = ResourceExhausted("", retry_after_ms=500)
    assert 0.5 <= retry.Attempts(2, 10.0, True).wait_before_next(refused, 0) <= 0.55
    with pytest.raises(ResourceExhausted):
        retry.Attempts(2, 0.5, True).wait_before_next(refused, 0)


def test_attempts_are_counted() -> None:
    attempts = retry.Attempts(2, None, True)
    attempts.wait_before_next(lost(True), 0)
    attempts.wait_before_next(lost(True), 0)
    with pytest.raises(StatusError) as caught:
        attempts.wait_before_next(lost(True), 0)
    assert caught.value.__notes__ == ["after 3 attempts"]


def test_timeout_ms() -> None:
    assert retry.timeout_ms(None, 5) == 0
    assert retry.timeout_ms(5.0001, 5) == 1
    assert retry.timeout_ms(1e12, 5) == 0xFFFFFFFF
    with pytest.raises(DeadlineExceeded):
        retry.timeout_ms(5, 5)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("localhost:70", Address("localhost", 70)),
        ("10.0.0.1:65535", Address("10.0.0.1", 65535)),
        ("[::1]:7070", Address("::1", 7070)),
        ("unix:/run/p.sock", Address(path="/run/p.sock")),
    ],
)
def test_addresses(text: str, address: Address) -> None:
    assert parse(text) == address and str(address) == text


@pytest.mark.parametrize("text", ["", "host", "host:", ":7070", "host:0", "host:65536", "host:x", "::1:70", "unix:"])
def test_no_addresses(text: str) -> None:
    with pytest.raises(InvalidArgument, match="expected host:port"):
        parse(text)


@pytest.mark.parametrize("client", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"addresses": []}, "at least one"),
        ({"codec": "json"}, "codec 'json' is unknown"),
        ({"pool_size": 0}, "pool_size"),
        ({"max_in_flight": 0}, "max_in_flight"),
        ({"retries": -1}, "retries"),
        ({"timeout": 0}, "timeouts must be positive"),
        ({"connect_timeout": 0}, "timeouts must be positive"),
        ({"max_body": 1 << 32}, "max_body"),
    ],
)
def test_arguments(client: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        client(**{"addresses": "localhost:1", **options})


def test_python_numbers_become_model_types() -> None:
    assert as_value([[1.0, 2.0]]).dtype == np.float32
    assert as_value([1, 2]).dtype == np.int64
    assert as_value(True).dtype == np.bool_ and as_value("text").shape == ()
    assert as_value(np.array([1.0])).dtype == np.float64
    assert as_value([]) == [] and as_value(None) is None
    with pytest.raises(InvalidArgument, match="a nested list is no tensor"):
        as_value([[1.0], [1.0, 2.0]])


@dataclass(eq=False)
class Fake:
    """A plain value for the pool, which asks no more of a connection."""

    name: str
    usable: bool = True
    users: int = 0


def test_pool() -> None:
    pool: Pool[Fake] = Pool(2, 3)
    assert pool.take() is Need.OPEN
    assert pool.take() is Need.OPEN
    assert pool.take() is Need.WAIT
    a, b = pool.opened(Fake("a")), pool.opened(Fake("b"))
    assert not pool.release(a)
    assert [pool.take(), pool.take(), pool.take()] == [a, b, a]  # the fewest, then the least recently used
    assert [pool.take(), pool.take(), pool.take()] == [b, a, Need.WAIT]  # three each
    for link in (a, a, a, b, b, b):
        pool.release(link)
    assert [pool.take(), pool.take()] == [b, a]
    a.usable = False
    assert pool.take() is Need.OPEN
    pool.not_opened()
    assert pool.release(a) and not pool.release(b)
    assert pool.take() is b
