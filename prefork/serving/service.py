"""What all connections of a worker share: limits, scheduler, counters, and the answers that need no run.

One object a worker, in its loop thread. Protocol shells look things up here and never reach beyond it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import prefork
from prefork.codec.limits import Limits as WireLimits
from prefork.codec.message import (
    Kind,
    Message,
    ModelMetadata,
    ModelRequest,
    Ready,
    ServerMetadata,
    TensorMetadata,
)
from prefork.codec.template import Templates
from prefork.errors import InvalidArgument, NotFound, ResourceExhausted, StatusError
from prefork.model.session import Session
from prefork.serving.scheduler import Scheduler
from prefork.shm import words as board

PLATFORM = "onnx_onnxruntime"  # the name that the Open Inference Protocol's servers give ONNX models


class Limits(Protocol):
    """The part of the configuration that connections obey; times in seconds where the name does not say ms."""

    @property
    def max_frame_bytes(self) -> int: ...
    @property
    def max_connections(self) -> int: ...
    @property
    def max_in_flight_per_connection(self) -> int: ...
    @property
    def default_timeout_ms(self) -> int: ...
    @property
    def max_timeout_ms(self) -> int: ...
    @property
    def read_timeout(self) -> float: ...
    @property
    def idle_timeout(self) -> float: ...
    @property
    def max_in_flight_bytes(self) -> int: ...


class Client(Protocol):
    """One connection, as the worker sees it."""

    def go_away(self) -> None: ...
    @property
    def unsent(self) -> int: ...
    @property
    def buffered(self) -> int: ...
    def stop(self) -> None: ...
    def quiet(self, now: float, patience: float) -> bool: ...
    def refuse(self, error: StatusError) -> None: ...
    def abort(self, message: str) -> None: ...
    def check_age(self, now: float) -> None: ...


class Service:
    """`leaving` and `draining` turn true once and stay; `changed` is set when something ends meanwhile."""

    def __init__(
        self,
        models: Mapping[str, Session],
        versions: Mapping[str, str],
        limits: Limits,
        wire_limits: WireLimits,
        scheduler: Scheduler,
        words: memoryview,
        log_fault: Callable[[Exception], None],
        rows: Sequence[Mapping[str, int]],
    ) -> None:
        """`rows`: by codec, the word of `words` that counts a model's answers of code 0 (Scoreboard.answer_rows)."""
        self.limits = limits
        self.wire_limits = wire_limits
        self.decode = Templates(wire_limits).decode
        self.scheduler = scheduler
        self.words = words
        self.rows = rows
        self.log_fault = log_fault
        self.leaving = False  # clients are asked to go
        self.draining = False  # and nothing new is taken from them
        self.bytes_in = self.bytes_out = 0  # until the next heartbeat takes them to the scoreboard
        self.now = time.monotonic()  # of the last heartbeat; good enough for idle clients, and free
        self.changed = asyncio.Event()
        self.clients: set[Client] = set()
        self._models = models
        self._versions = versions
        self.answers: Mapping[int, Callable[[Message], Message]] = {
            Kind.MODEL_METADATA: self._model_metadata,
            Kind.MODEL_READY: self._model_ready,
            Kind.SERVER_METADATA: lambda _: ServerMetadata("prefork-serve", prefork.__version__, []),
            Kind.SERVER_READY: lambda _: Ready(not self.draining),
            Kind.SERVER_LIVE: lambda _: Ready(True),
        }

    def enter(self, client: Client) -> bool:
        """Count a connection in; False when the worker has as many as it may."""
        self.words[board.ACCEPTED] += 1
        if len(self.clients) >= self.limits.max_connections:
            return False
        self.clients.add(client)
        self.words[board.CONNECTIONS] = len(self.clients)
        return True

    def leave(self, client: Client) -> None:
        self.clients.discard(client)
        self.words[board.CONNECTIONS] = len(self.clients)
        self.changed.set()

    @property
    def unsent(self) -> int:
        """Bytes of answers that clients have not taken yet."""
        return sum(client.unsent for client in self.clients)

    def look(self) -> None:
        """Once a second: end connections that do not get on, and bound what half-arrived requests hold together."""
        for client in list(self.clients):
            client.check_age(self.now)
        held = sorted(((client.buffered, index) for index, client in enumerate(self.clients)), reverse=True)
        total, clients = sum(size for size, _ in held), list(self.clients)
        for size, index in held:
            if total <= self.limits.max_in_flight_bytes:
                return
            total -= size
            clients[index].refuse(
                ResourceExhausted(
                    f"half-arrived requests of this worker exceed max_in_flight_bytes {self.limits.max_in_flight_bytes}"
                )
            )

    def drain(self) -> None:
        """Take nothing new from now on and tell every client."""
        self.leaving = self.draining = True
        for client in list(self.clients):
            client.go_away()

    def retire(self) -> None:
        """Ask every client to go, and serve it until it has: another worker takes what comes anew.

        A request that crosses the word on its way is answered, so it costs nobody one (as RFC 9113, 6.8 has it)."""
        self.leaving = True
        for client in list(self.clients):
            client.go_away()

    def see_off(self, patience: float) -> None:
        """End the connections that have been quiet for `patience` seconds since they were asked to go."""
        now = time.monotonic()
        for client in list(self.clients):
            if client.quiet(now, patience):
                client.stop()

    def _has(self, request: ModelRequest) -> bool:
        return request.name in self._models and request.version in ("", self._versions[request.name])

    def _model_ready(self, message: Message) -> Ready:
        return Ready(self._has(_model_request(message)) and not self.draining)

    def _model_metadata(self, message: Message) -> ModelMetadata:
        request = _model_request(message)
        if not self._has(request):
            served = ", ".join(f"{name} (version {version})" for name, version in sorted(self._versions.items()))
            raise NotFound(f"model {request.name!r} version {request.version or 'any'!r} is not served; here: {served}")
        inputs, outputs = self._models[request.name].metadata()
        return ModelMetadata(
            request.name,
            [self._versions[request.name]],
            PLATFORM,
            [TensorMetadata(*described) for described in inputs],
            [TensorMetadata(*described) for described in outputs],
        )


def _model_request(message: Message) -> ModelRequest:
    if not isinstance(message, ModelRequest):
        raise InvalidArgument("the body names no model")
    return message
