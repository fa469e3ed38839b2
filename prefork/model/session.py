"""The only place that runs a model: opens a prepared graph over shared weights, checks requests, runs. Template's and
worker's side; never imports onnx, and knows no socket, segment or wire.

A Session does not change after `open`, and ONNX Runtime's run may be entered by several threads at once, so `run` needs
no lock. A session that a forked child inherited must not be destroyed there (leave by os._exit).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

from onnxruntime import InferenceSession

from prefork.errors import FailedPrecondition, InvalidArgument, StatusError, Unimplemented
from prefork.model.bind import Inputs
from prefork.model.bound import Bindings
from prefork.model.faults import run_error
from prefork.model.manifest import Manifest, TensorSpec
from prefork.model.opening import InMemory, Mapped, Opened, Weights, open_inner
from prefork.model.values import Feed, as_ort_value, carried, from_array, from_ort, plain
from prefork.model.warmup import build, digest
from prefork.tensor import DTYPES, Buffer, Tensor
from prefork.value import KIND, Parameter, flatten, unflatten

__all__ = ["Described", "InMemory", "Mapped", "Session", "Warm", "Weights"]

Parameters: TypeAlias = dict[str, Parameter]

WARM_RUNS = 8
WARM_SECONDS = 0.02  # a start should not wait longer for a figure that later runs correct


BINDABLE_GRAPH = 1 << 20  # bytes; bindings keep the Python class, and that the graph, of which small models are made


class Described(NamedTuple):
    """One input or output for the wire, in the order of codec.message.TensorMetadata.

    `shape` has -1 for each dynamic dimension and is empty for maps and for an unknown rank (parameter `unranked`).
    `parameters`: `kind` (sequence, map, maps), `key` (datatype of a map's keys), `optional` (may be left out)."""

    name: str
    datatype: str
    shape: list[int]
    parameters: Parameters


class Warm(NamedTuple):
    """`seconds`: median of one run, the first left out where there are more. `matches`: whether the outputs were, bit
    for bit, those that the loader saw; None where it gave none to compare with, or there are several threads."""

    seconds: float
    matches: bool | None


class Session:
    """Doors: `open`, `warm`, `run`, `metadata`, `close`; `manifest`, `inputs` and `outputs` are the loader's words."""

    def __init__(self, manifest: Manifest, opened: Opened, threads: int) -> None:
        inner = opened.inner
        self._views = opened.views
        self._threads = threads
        self.manifest = manifest
        self.inputs: tuple[TensorSpec, ...] = manifest.inputs
        self.outputs: tuple[TensorSpec, ...] = manifest.outputs
        self._inputs = Inputs(manifest.inputs)
        self._outputs = {spec.name: spec for spec in manifest.outputs}
        self._names = list(self._outputs)
        self._plain = all(map(_is_plain, manifest.outputs))
        self._echoed = self._outputs.keys() & {spec.name for spec in manifest.inputs}
        # The bound C++ object's run takes the same arguments as the Python class's. The latter's is 2 to 3 us slower,
        # and on a provider's failure it prints to stdout and builds the session anew.
        self._run: Callable[..., list[Any]] = getattr(inner, "_sess", inner).run
        # held for these models only: the Python class keeps the graph's bytes
        self._inner = inner if any(map(_is_carried, manifest.outputs)) else None
        self._bindings = None
        if Bindings.possible(manifest.inputs, manifest.outputs) and manifest.graph_bytes <= BINDABLE_GRAPH:
            self._bindings = Bindings(inner, manifest.outputs)

    @classmethod
    def open(cls, manifest: Manifest, graph: Buffer, weights: Weights, threads: int = 1) -> Session:
        """Open `graph` over `weights` (see opening.py for the two kinds) with `threads` intra-op threads.

        Raises ModelError when ONNX Runtime does not take it."""
        return cls(manifest, open_inner(manifest, graph, weights, threads), threads)

    def metadata(self) -> tuple[list[Described], list[Described]]:
        """Inputs and outputs for the wire."""
        return [_describe(spec) for spec in self.inputs], [_describe(spec) for spec in self.outputs]

    def run(
        self, tensors: Sequence[Tensor], outputs: Sequence[str] = (), parameters: Mapping[str, Parameter] = {}
    ) -> tuple[list[Tensor], Parameters]:
        """Run once. `outputs` empty: all of them, in the model's order. `parameters` are the request's; the `kind.`
        ones tell how compound inputs are laid out (prefork.value). Gives the output tensors, over ORT's own memory,
        and the parameters for compound outputs. Inputs are not copied and are not needed after the call.

        Raises InvalidArgument (what was given does not fit the model), ResourceExhausted (memory), Unimplemented,
        FailedPrecondition (closed) or Internal."""
        bindings = None if outputs or parameters else self._bindings
        if bindings is not None and (found := bindings.run(tensors)) is not None:
            return found, {}
        feed = self._inputs.feed(tensors, parameters)
        names, specs, simple = self._names, self.outputs, self._plain
        if outputs:
            names, specs = self._chosen(outputs)
            simple = simple or all(map(_is_plain, specs))
        if not simple and (inner := self._inner) is not None and any(map(_is_carried, specs)):
            return self._run_ort_values(inner, names, specs, feed)
        try:
            values = self._run(names, feed, None)
        except Exception as e:
            raise self._fault(e) from None
        if bindings is not None:
            bindings.offer(tensors, feed, values)
        if simple:
            return [from_array(s.name, v, s.dtype) for s, v in zip(specs, values, strict=True)], {}
        parts: list[Tensor] = []
        extra: Parameters = {}
        for spec, value in zip(specs, values, strict=True):
            flatten(spec.name, value, parts, extra)
        return parts, extra

    def warm(self, most: int = WARM_RUNS) -> Warm | None:
        """Run the manifest's warm-up `most` times, or fewer: no other run after WARM_SECONDS, but a second one where
        more than one is allowed. None when it has none.

        Raises as `run` does: what ran in the loader does not run here."""
        warmup = self.manifest.warmup
        if warmup is None:
            return None
        tensors: list[Tensor] = []
        parameters: Parameters = {}
        for name, value in build(warmup).items():
            flatten(name, value, tensors, parameters)
        started = perf_counter()
        outputs, extra = self.run(tensors, (), parameters)
        times = [perf_counter() - started]
        values = unflatten(outputs, extra)
        same = digest(self._names, [values[name] for name in self._names]) == warmup.digest
        while len(times) < most and (len(times) == 1 or sum(times) < WARM_SECONDS):
            started = perf_counter()
            self.run(tensors, (), parameters)
            times.append(perf_counter() - started)
        return Warm(median(times[1:] or times), same if warmup.digest is not None and self._threads == 1 else None)

    def close(self) -> None:
        """Give up the model; a later `run` raises FailedPrecondition. Outputs already given stay valid."""
        self._run, self._inner, self._bindings, self._views = _closed, None, None, []

    def _run_ort_values(
        self, inner: InferenceSession, names: list[str], specs: Sequence[TensorSpec], feed: Mapping[str, Feed]
    ) -> tuple[list[Tensor], Parameters]:
        if any(spec.kind != "tensor" for spec in specs):
            raise _cannot_mix(specs)
        given = {name: as_ort_value(name, value) for name, value in feed.items()}
        try:
            values = inner.run_with_ort_values(names, given)
        except Exception as e:
            raise self._fault(e) from None
        tensors: list[Tensor] = []
        extra: Parameters = {}
        for spec, value in zip(specs, values, strict=True):
            if not value.has_value():
                extra[KIND + spec.name] = "none"
                continue
            tensor = from_ort(spec.name, value, spec.dtype)
            if spec.name in self._echoed:  # an output that is an input: ORT gives back the request's own memory
                tensor.data = bytes(tensor.data)
            tensors.append(tensor)
        return tensors, extra

    def _chosen(self, outputs: Sequence[str]) -> tuple[list[str], tuple[TensorSpec, ...]]:
        names = list(outputs)
        for name in names:
            if name not in self._outputs:
                known = ", ".join(map(repr, self._names))
                raise InvalidArgument(f"output {name!r} is unknown; expected {known}")
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidArgument(f"output {twice!r} is asked for twice")
        return names, tuple(self._outputs[name] for name in names)

    def _fault(self, error: Exception) -> StatusError:
        return error if isinstance(error, StatusError) else run_error(self.manifest.model, error)


def _closed(*_: object) -> list[Any]:
    raise FailedPrecondition("the model is closed")


def _is_plain(spec: TensorSpec) -> bool:
    return spec.kind == "tensor" and not spec.optional and plain(DTYPES[spec.dtype])


def _is_carried(spec: TensorSpec) -> bool:
    return carried(DTYPES[spec.dtype])


def _cannot_mix(specs: Sequence[TensorSpec]) -> Unimplemented:
    compound = next(spec for spec in specs if spec.kind != "tensor")
    other = next(filter(_is_carried, specs))
    return Unimplemented(
        f"outputs {compound.name!r} ({compound.kind}) and {other.name!r} ({other.dtype}) cannot be given by one run: "
        "ONNX Runtime's Python has no call for both; ask for them one at a time"
    )


def _describe(spec: TensorSpec) -> Described:
    parameters: Parameters = {}
    if spec.kind != "tensor":
        parameters["kind"] = spec.kind
    if spec.key is not None:
        parameters["key"] = spec.key
    if not spec.required:
        parameters["optional"] = True
    if spec.shape is None and spec.key is None:
        parameters["unranked"] = True
    return Described(
        spec.name, spec.dtype, [dim if isinstance(dim, int) else -1 for dim in spec.shape or ()], parameters
    )
