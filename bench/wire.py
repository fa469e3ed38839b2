"""Requests as bytes, and one exchange over a plain socket: what load generators replay. Knows the frame, no client."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import msgpack

from bench.inputs import Feed
from prefork.codec.frame import Frame, FrameReader, encode_frame
from prefork.codec.message import Codec, ErrorReply, InferReply, InferRequest, Kind, Message
from prefork.codec.registry import codec_of
from prefork.tensor import Tensor

PATIENCE = 30.0  # seconds without a byte after which a server is taken for dead


def request(
    model: str, feed: Feed, outputs: Sequence[str] = (), codec: Codec = Codec.MSGPACK, number: int = 1
) -> bytes:
    """A whole INFER frame."""
    tensors = [Tensor.from_numpy(name, array) for name, array in feed.items()]
    body = codec_of(codec).encode_infer_request(InferRequest(model, tensors, list(outputs)))
    return encode_frame(Kind.INFER, codec, number, body)


def dial(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host, int(port)), PATIENCE)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def exchange(address: str, data: bytes) -> tuple[InferReply, int]:
    """The reply to one request on a connection of its own, and its size in bytes with its header."""
    reader, size = FrameReader(1 << 30), 0
    with dial(address) as sock:
        sock.sendall(data)
        while True:
            chunk = sock.recv(1 << 20)
            size += len(chunk)
            events = reader.receive(chunk) if chunk else []
            if not chunk or events:
                break
    if not events or not isinstance(events[0], Frame):
        raise ConnectionError(f"{address} closed the connection after {size} bytes")
    message = read(events[0])
    assert isinstance(message, InferReply), f"{address} answered {message}"
    return message, size


def read(frame: Frame) -> Message:
    """The message in a frame; None for a kind without body."""
    return None if frame.kind == Kind.GOAWAY else codec_of(frame.codec).decode(frame.kind, frame.body)


def why(message: Message) -> str:
    """The words of an error, or what came instead of one."""
    return f"{message.code}: {message.message}" if isinstance(message, ErrorReply) else type(message).__name__


def echo_request(frame: bytes) -> bytes:
    """The same body for the echo server, behind a bare length."""
    body = frame[24:]
    return len(body).to_bytes(4, "little") + body


def echo_outputs(reply: InferReply) -> tuple[list[str], int]:
    """Arguments of bench.echo for the same outputs, and the size of its reply with the length."""
    words: list[str] = []
    maps: list[dict[str, Any]] = []
    for tensor in reply.outputs:
        shape = [int(d) for d in tensor.shape]
        words += [tensor.name, tensor.dtype, "x".join(map(str, shape)), str(len(tensor.data))]
        maps.append({"name": tensor.name, "datatype": tensor.dtype, "shape": shape, "data": bytes(tensor.data)})
    return words, 4 + len(msgpack.packb({"model_name": reply.model_name, "outputs": maps}))
