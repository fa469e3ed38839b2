"""Reading the same request again without parsing it again. Bytes in, messages out, like the codecs; no I/O here.

Requests of one client differ in the numbers, hardly ever in names, types and shapes. A body of a length that was seen
before is compared with what that body had around its tensor data; when all of it is equal, the body says the same, and
only the data is new. What a template accepts, the codec would have accepted with the same result: the codec reads data
as opaque bytes of a stated length, and types whose bytes need looking at (BOOL, BYTES, packed ones) get no template.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from prefork.codec.limits import Limits
from prefork.codec.message import InferRequest
from prefork.codec.registry import codec_of
from prefork.codec.validate import PLAIN
from prefork.tensor import Buffer, Tensor

MOST = 256  # lengths remembered; a client with more shapes than that parses as everybody did
LARGEST = 1 << 16  # above this the parse is small beside copying the data
TRIES = 8  # times that a length may turn out to be another request before it is left alone


class _Hole(NamedTuple):
    """Where the data of one tensor lies."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(slots=True)
class _Template:
    around: list[tuple[int, int, bytes]]  # start, end, the bytes that must stand there
    holes: list[_Hole]
    request: InferRequest


class Templates:
    """The templates of one worker. `decode` is the only door; not for several threads."""

    __slots__ = ("_known", "_limits", "_tries")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._known: dict[tuple[int, int], _Template] = {}
        self._tries: dict[tuple[int, int], int] = {}

    def decode(self, codec: int, body: Buffer) -> InferRequest:
        """The request in `body`. Raises InvalidArgument or Unimplemented, as the codec does."""
        key = (codec, len(body))
        found = self._known.get(key)
        if found is None:
            return self._learn(key, body)
        if type(body) is not bytes:  # aligned, and never a view of something larger
            body = bytes(body)
        for start, end, expected in found.around:
            if body[start:end] != expected:
                return self._learn(key, body)
        inputs = [Tensor(name, dtype, shape, body[start:end]) for name, dtype, shape, start, end in found.holes]
        same = found.request
        return InferRequest(same.model_name, inputs, same.outputs, same.model_version, same.id, same.parameters)

    def _learn(self, key: tuple[int, int], body: Buffer) -> InferRequest:
        codec = codec_of(key[0])
        request = codec.decode_infer_request(body, self._limits)
        tries = self._tries.get(key, 0)
        if tries >= TRIES or key[1] > LARGEST or (not tries and len(self._tries) >= MOST):
            return request
        self._tries[key] = tries + 1
        body = bytes(body)
        if all(tensor.dtype in PLAIN and len(tensor.data) for tensor in request.inputs):
            low, high = (codec.encode_infer_request(_filled(request, byte)) for byte in (b"\0", b"\xff"))
            if template := _template(request, body, low, high):
                self._known[key] = template
        return request


def _filled(request: InferRequest, byte: bytes) -> InferRequest:
    return replace(request, inputs=[replace(tensor, data=byte * len(tensor.data)) for tensor in request.inputs])


def _template(request: InferRequest, body: bytes, low: bytes, high: bytes) -> _Template | None:
    """`low` and `high` are the request with all data bytes 0 and 255: they differ exactly where the data is. None
    when the body was written in another way than ours."""
    if len(low) != len(body) or len(high) != len(body):
        return None
    runs = _runs(low, high)
    lengths = [len(tensor.data) for tensor in request.inputs]
    if [end - start for start, end in runs] != lengths:
        return None
    holes = [
        _Hole(tensor.name, tensor.dtype, tensor.shape, start, end)
        for tensor, (start, end) in zip(request.inputs, runs, strict=True)
    ]
    edges = [0, *(edge for run in runs for edge in run), len(body)]
    around = [(start, end, body[start:end]) for start, end in zip(edges[::2], edges[1::2], strict=True) if end > start]
    if any(low[start:end] != expected for start, end, expected in around):
        return None
    return _Template(around, holes, replace(request, inputs=[]))


def _runs(low: bytes, high: bytes) -> Sequence[tuple[int, int]]:
    """(start, end) of each run of bytes in which the two differ."""
    differs = np.frombuffer(low, np.uint8) != np.frombuffer(high, np.uint8)
    turns = np.flatnonzero(np.diff(differs.astype(np.int8), prepend=0, append=0)).tolist()
    return list(zip(turns[::2], turns[1::2], strict=True))
