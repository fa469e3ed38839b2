"""From a request's tensors to what a run takes, against what the manifest says of each input. Worker's side.

`Inputs` is made once a session and never changes, so any thread may use it. Every refusal is InvalidArgument and names
the input, what was expected and what was found. Must not import onnx.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from prefork.errors import InvalidArgument
from prefork.model.manifest import TensorSpec
from prefork.model.values import Feed, check_bool, plain, to_ort
from prefork.tensor import DTYPES, Tensor, numpy_dtype
from prefork.value import KIND, Parameter, Value, unflatten


class Input:
    """One input's expectation, worked out ahead. `pinned`: (axis, size) of each dimension that is not dynamic; `rank`:
    None when unknown; `good`: (shape, bytes) that needs no further look, the only thing here that changes. It is one
    tuple, so that threads see a whole one."""

    __slots__ = ("dtype", "good", "itemsize", "numpy", "pinned", "rank", "simple", "spec")

    def __init__(self, spec: TensorSpec) -> None:
        kind, dims = DTYPES[spec.dtype], spec.shape or ()
        self.spec = spec
        self.dtype = spec.dtype
        self.simple = spec.kind == "tensor" and plain(kind) and spec.dtype != "BOOL"
        self.numpy = numpy_dtype(spec.dtype)
        self.itemsize = self.numpy.itemsize
        self.rank = None if spec.shape is None else len(dims)
        self.pinned = tuple((axis, size) for axis, size in enumerate(dims) if isinstance(size, int))
        sizes = tuple(size for _, size in self.pinned)
        self.good: tuple[tuple[int, ...] | None, int] = (
            (sizes, math.prod(sizes) * self.itemsize) if self.rank == len(sizes) else (None, 0)
        )

    def take(self, tensor: Tensor) -> Feed:
        """The tensor as ORT takes it, over the same memory. Raises InvalidArgument."""
        shape = tensor.shape
        good, nbytes = self.good
        if self.simple and shape == good and tensor.dtype == self.dtype and len(tensor.data) == nbytes:
            return np.ndarray(shape, self.numpy, tensor.data)
        if self.spec.kind != "tensor":
            raise InvalidArgument(
                f"input {tensor.name!r}: expected a {self.spec.kind} of {self.dtype}, found one tensor of "
                f"{tensor.dtype} {list(shape)}; see the parameter {KIND + tensor.name!r}"
            )
        self.check(tensor)
        if self.simple and len(tensor.data) == (nbytes := math.prod(shape) * self.itemsize):
            self.good = (shape, nbytes)
            return np.ndarray(shape, self.numpy, tensor.data)
        return to_ort(tensor)

    def check(self, tensor: Tensor) -> None:
        """Element type, rank and fixed dimensions of a tensor, or of one element of a sequence."""
        shape = tensor.shape
        if tensor.dtype != self.dtype:
            raise InvalidArgument(f"input {tensor.name!r}: expected {self.dtype}, found {tensor.dtype}")
        if shape and min(shape) < 0:
            raise InvalidArgument(f"input {tensor.name!r}: shape {list(shape)} has a negative dimension")
        if self.rank is None:
            return
        fits = len(shape) == self.rank
        for axis, size in self.pinned if fits else ():
            fits = fits and shape[axis] == size
        if not fits:
            raise InvalidArgument(
                f"input {tensor.name!r}: expected {self.dtype} of shape {shown(self.spec.shape or ())}, "
                f"found shape {list(shape)}"
            )

    def take_value(self, value: Value, parts: Mapping[str, Tensor]) -> Feed:
        """A compound value, laid out by prefork.value, as ORT takes it; `parts` are the tensors it came from."""
        spec = self.spec
        fits = {
            "sequence": isinstance(value, list) and all(isinstance(item, np.ndarray) for item in value),
            "maps": isinstance(value, list) and all(isinstance(item, dict) for item in value),
            "map": isinstance(value, dict),
        }.get(spec.kind, False)
        if not fits:
            found = "a list" if isinstance(value, list) else f"a {type(value).__name__}"
            raise InvalidArgument(f"input {spec.name!r}: expected a {spec.kind} of {self.dtype}, found {found}")
        if spec.kind == "sequence":
            return [self._element(parts[f"{spec.name}/{index}"]) for index in range(len(value))]
        self._check_map(parts)
        return value

    def _element(self, tensor: Tensor) -> Feed:
        self.check(tensor)
        if tensor.dtype == "BOOL":
            check_bool(tensor)
        return to_ort(tensor)

    def _check_map(self, parts: Mapping[str, Tensor]) -> None:
        spec = self.spec
        if (keys := parts.get(f"{spec.name}/keys")) is not None and keys.dtype != spec.key:
            raise InvalidArgument(f"input {spec.name!r}: expected keys of {spec.key}, found {keys.dtype}")
        values = parts.get(f"{spec.name}/values")
        # Python's numbers have one float and one int, so a client cannot say FP32 in a dict
        if values is not None and (values.dtype == "BYTES") != (self.dtype == "BYTES"):
            raise InvalidArgument(f"input {spec.name!r}: expected values of {self.dtype}, found {values.dtype}")


class Inputs:
    """All inputs of a model. Its door is `feed`."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self._inputs = {spec.name: Input(spec) for spec in specs}
        self._required = [spec.name for spec in specs if spec.required]
        self._only_tensors = all(spec.kind == "tensor" and not spec.optional for spec in specs)

    def feed(self, tensors: Sequence[Tensor], parameters: Mapping[str, Parameter]) -> dict[str, Feed]:
        """What ORT's run takes for these tensors. Raises InvalidArgument for whatever does not fit the model."""
        inputs = self._inputs
        feed: dict[str, Feed] = {}
        if len(tensors) == len(inputs):
            for tensor in tensors:
                if (want := inputs.get(tensor.name)) is None:
                    break
                feed[tensor.name] = want.take(tensor)
            else:
                if len(feed) == len(inputs):
                    return feed
        feed.clear()
        rest: list[Tensor] = []
        for tensor in tensors:
            name = tensor.name
            if (want := inputs.get(name)) is None:
                rest.append(tensor)
            else:
                feed[name] = want.take(tensor)
        if len(feed) + len(rest) != len(tensors):
            raise InvalidArgument(f"input {_twice(tensors)!r} is given twice")
        if not self._only_tensors:
            self._feed_values(rest, parameters, feed)
        elif rest:
            raise self._unknown(rest[0].name)
        if len(feed) != len(inputs):
            self._check_missing(feed)
        return feed

    def _feed_values(self, rest: list[Tensor], parameters: Mapping[str, Parameter], feed: dict[str, Feed]) -> None:
        kinds = {name: kind for name, kind in parameters.items() if name.startswith(KIND)}
        for name in kinds:
            if name.removeprefix(KIND) in feed:
                raise InvalidArgument(f"input {name.removeprefix(KIND)!r} is given both as a tensor and as a compound")
        parts = {tensor.name: tensor for tensor in rest}
        for name, value in unflatten(rest, kinds).items():
            if (want := self._inputs.get(name)) is None:
                raise self._unknown(name)
            if value is not None:
                feed[name] = want.take_value(value, parts)
            elif not want.spec.optional:
                raise InvalidArgument(f"input {name!r}: expected {want.dtype}, found none; it is not optional")

    def _check_missing(self, feed: Mapping[str, Feed]) -> None:
        if missing := [name for name in self._required if name not in feed]:
            found = ", ".join(map(repr, feed)) or "none"
            raise InvalidArgument(f"input {', '.join(map(repr, missing))} is missing; found {found}")

    def _unknown(self, name: str) -> InvalidArgument:
        return InvalidArgument(f"input {name!r} is unknown; expected {', '.join(map(repr, self._inputs)) or 'none'}")


def shown(dims: Iterable[int | str | None]) -> str:
    """A shape for people: `[batch, 3, ?]`."""
    return "[" + ", ".join("?" if dim is None else str(dim) for dim in dims) + "]"


def _twice(tensors: Sequence[Tensor]) -> str:
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            return tensor.name
        seen.add(tensor.name)
    raise AssertionError("unreachable: called only when a name is repeated")
