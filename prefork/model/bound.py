"""Small runs over memory that is bound once: the road for models whose run costs about as much as its call.

ONNX Runtime's `run` makes a value for each input and output and a list around them; an IOBinding keeps them, so a run
of a tiny model takes two thirds of the time. What is bound is one set of input shapes with its output shapes, in memory
of its own: requests are copied in, answers are copied out, which is why only small ones come here. Template's and
worker's side, called by session.py alone.

A binding is taken on only after it gave, over memory full of other bytes, exactly what the ordinary run gave: so models
that draw random numbers, or give other output shapes for the same input shapes, never get one.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from prefork.model.manifest import TensorSpec
from prefork.model.values import plain
from prefork.tensor import DTYPES, Array, Tensor

LARGEST = 16 * 1024  # bytes of inputs and outputs; above this the copies cost what the binding saves
MOST = 32  # sets of shapes with a binding
SEEN_BEFORE = 3  # ordinary runs of the same shapes before one is bound
_OTHER_BYTE = 0xA5
_SHAPES = "invalid dimensions"  # in ORT's message when an output has another shape than the memory bound for it

Key = tuple[tuple[int, ...], ...]


class _In(NamedTuple):
    name: str
    dtype: str
    nbytes: int
    view: memoryview


class _Out(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    memory: Array


class _Bound:
    """One set of shapes. `lock`: its memory serves one run at a time."""

    __slots__ = ("binding", "inputs", "lock", "memory", "outputs")

    def __init__(self, inner: Any, feed: Mapping[str, Array], labels: Sequence[tuple[str, str]], values: list[Array]):
        self.binding = inner.io_binding()
        self.lock = threading.Lock()
        self.memory = [np.array(array) for array in feed.values()]
        self.inputs: list[_In] = []
        self.outputs: list[_Out] = []
        for name, array in zip(feed, self.memory, strict=True):
            self.binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        for (name, dtype), value in zip(labels, values, strict=True):
            out = np.empty_like(value)
            out.reshape(-1).view(np.uint8)[:] = _OTHER_BYTE
            self.binding.bind_output(name, "cpu", 0, out.dtype.type, out.shape, out.ctypes.data)
            self.outputs.append(_Out(name, dtype, out.shape, out))

    def expect(self, tensors: Sequence[Tensor], order: Mapping[str, int]) -> None:
        """The tensors, in the request's order, whose data goes into the bound memory."""
        for tensor in tensors:
            view = self.memory[order[tensor.name]].reshape(-1).view(np.uint8).data
            self.inputs.append(_In(tensor.name, tensor.dtype, len(tensor.data), view))


class Bindings:
    """The bindings of one session. `run` gives None when the ordinary road is to be taken, and then `offer` is called
    with what that road gave. Any thread may call them."""

    def __init__(self, inner: Any, outputs: Sequence[TensorSpec]) -> None:
        """`inner`: the onnxruntime.InferenceSession, not its C++ object."""
        self._inner = inner
        self._labels = [(spec.name, spec.dtype) for spec in outputs]
        self._run: Any = getattr(getattr(inner, "_sess", None), "run_with_iobinding", None)
        self._known: dict[Key, _Bound] = {}
        self._seen: dict[Key, int] = {}

    @staticmethod
    def possible(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> bool:
        """Only plain tensors whose bytes need no look."""
        return all(
            spec.kind == "tensor" and not spec.optional and spec.dtype not in ("BOOL", "BYTES")
            and plain(DTYPES[spec.dtype])
            for spec in (*inputs, *outputs)
        )  # fmt: skip

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        bound = self._known.get(tuple([tensor.shape for tensor in tensors]))
        if bound is None or not bound.lock.acquire(False):
            return None
        try:
            for tensor, (name, dtype, nbytes, view) in zip(tensors, bound.inputs, strict=True):
                if tensor.name != name or tensor.dtype != dtype or len(tensor.data) != nbytes:
                    return None
                view[:] = tensor.data
            self._run(bound.binding._iobinding, None)
            return [Tensor(name, dtype, shape, memory.tobytes()) for name, dtype, shape, memory in bound.outputs]
        except Exception as e:  # the ordinary road finds the words, or shows that only the binding was wrong
            if _SHAPES in str(e):
                self._known.pop(tuple([tensor.shape for tensor in tensors]), None)
            return None
        finally:
            bound.lock.release()

    def offer(self, tensors: Sequence[Tensor], feed: Mapping[str, Array], values: list[Array]) -> None:
        """An ordinary run gave `values` for `feed`, which was made of `tensors`; bind it when it comes often."""
        if self._run is None or len(self._known) >= MOST:
            return
        size = sum(len(tensor.data) for tensor in tensors) + sum(value.nbytes for value in values)
        if size > LARGEST or len(feed) != len(tensors) or not all(value.size for value in (*feed.values(), *values)):
            return
        key = tuple([tensor.shape for tensor in tensors])
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        if seen == SEEN_BEFORE:
            self._bind(key, tensors, feed, values)
        if len(self._seen) > 8 * MOST:
            self._seen.clear()

    def _bind(self, key: Key, tensors: Sequence[Tensor], feed: Mapping[str, Array], values: list[Array]) -> None:
        try:
            bound = _Bound(self._inner, feed, self._labels, values)
            bound.expect(tensors, {name: index for index, name in enumerate(feed)})
            self._run(bound.binding._iobinding, None)
        except Exception:  # whatever ORT does not bind runs as before
            return
        if all(out.memory.tobytes() == value.tobytes() for out, value in zip(bound.outputs, values, strict=True)):
            self._known[key] = bound
