"""Inputs that really run: sizes and values tried in a sensible order, a bounded number of times. Loader's process.

Knows neither onnx nor onnxruntime: it is given the specs and a function that runs the model. What it finds is a Warmup,
from which the worker makes the same inputs again.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from prefork.errors import ModelError, PreforkError
from prefork.model import warmup
from prefork.model.manifest import Dim, Fill, TensorSpec, Warmup, WarmupInput
from prefork.tensor import Array
from prefork.value import Value

Run: TypeAlias = Callable[[Mapping[str, Value]], list[Value]]
Dims: TypeAlias = dict[str, int]

MAX_TRIES = 96
MAX_SECONDS = 30.0
MAX_ELEMENTS = 1 << 24  # of one guessed input; several free sizes multiply

SIZES: dict[str, tuple[int, ...]] = {
    "batch": (1, 2),
    "channel": (3, 1, 4),
    "image": (224, 64, 48, 32, 320, 640, 16, 128, 256, 512, 8),
    "length": (16, 8, 32, 512, 64, 1, 128, 256, 1024, 2, 4),
    "past": (0, 16, 1),
    "rank": (0, 1, 2, 3, 4),
}
UNRANKED: tuple[tuple[int, ...], ...] = ((1, 16), (), (1,), (1, 16, 16), (1, 3, 32, 32))
ROLES: tuple[tuple[str, str], ...] = (
    (r"past", "past"),
    (r"batch|^[nb]$", "batch"),
    (r"height|width|^[hw]$|image|pixel", "image"),
    (r"seq|len|time|token|frame|sample|^[tls]$", "length"),
    (r"channel|^c$", "channel"),
)
CONTROLS: tuple[tuple[str, tuple[int, ...]], ...] = ((r"^sr$|rate", (16000, 8000)), (r"", (1, 0, 2, 16)))


@dataclass(frozen=True, slots=True)
class Found:
    """`recipe` without its digest, the `outputs` of its inputs, and the `tries` it took."""

    recipe: Warmup
    outputs: list[Value]
    tries: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Nothing ran in `tries` tries; `reason`: what the last one said."""

    reason: str
    tries: int


def find(run: Run, specs: tuple[TensorSpec, ...], *, max_seconds: float = MAX_SECONDS) -> Found | Failed:
    """Try inputs until the model runs: at most MAX_TRIES times, and none is begun after `max_seconds`."""
    end, reason, tries = time.monotonic() + max_seconds, "no inputs to try", 0
    for recipe in itertools.islice(candidates(specs), MAX_TRIES):
        if tries and time.monotonic() > end:
            break
        tries += 1
        try:
            return Found(recipe, run(feeds(specs, recipe)), tries)
        except Exception as e:  # whatever the runtime raises, this one does not run
            reason = str(e)
    return Failed(reason, tries)


def feeds(specs: tuple[TensorSpec, ...], recipe: Warmup) -> dict[str, Value]:
    """The inputs of the recipe, None for each optional one that it does not have."""
    given = warmup.build(recipe)
    return {s.name: None for s in specs if s.optional and s.name not in given} | given


def given(run: Run, specs: tuple[TensorSpec, ...], arrays: Mapping[str, Array]) -> Found:
    """The recipe for inputs that the owner gave; raises ModelError when they do not fit the model or do not run."""
    known = {s.name for s in specs}
    if unknown := sorted(arrays.keys() - known):
        raise ModelError(f"warm-up input {unknown[0]!r} is none of the model's inputs: {', '.join(sorted(known))}")
    if missing := [s.name for s in specs if s.required and s.name not in arrays]:
        raise ModelError(f"warm-up input {missing[0]!r} is missing")
    try:
        recipe = Warmup(tuple(warmup.literal(name, array) for name, array in arrays.items()))
        return Found(recipe, run(feeds(specs, recipe)), 1)
    except PreforkError as e:
        raise ModelError(f"warm-up inputs: {e.message}") from None
    except Exception as e:  # onnxruntime's exceptions share no base class but this one
        raise ModelError(f"the warm-up inputs do not run: {e}") from None


def candidates(specs: tuple[TensorSpec, ...]) -> Iterator[Warmup]:
    """Recipes, most likely first: ways to fill, and sizes, both in their order, sizes varying first."""
    fillings = list(_fillings(specs))
    free = variables(specs)
    sizings = [dims for dims in _sizings(free) if not free or _elements(specs, dims) <= MAX_ELEMENTS][:MAX_TRIES]
    order = sorted(itertools.product(range(len(fillings)), range(len(sizings))), key=lambda at: at[0] * 6 + at[1])
    for filling, sizing in order:
        dims = sizings[sizing]
        inputs = tuple(
            WarmupInput(s.name, s.kind, s.dtype, shape_of(s, dims), *fillings[filling][s.name], s.key)
            for s in specs
            if s.name in fillings[filling]
        )
        yield Warmup(inputs, None, {k: v for k, v in dims.items() if k in _symbols(specs)})


def _elements(specs: tuple[TensorSpec, ...], dims: Dims) -> int:
    """Of the largest input."""
    return max(math.prod(shape_of(spec, dims)) for spec in specs)


def _symbols(specs: tuple[TensorSpec, ...]) -> set[str]:
    return {dim for s in specs for dim in s.shape or () if isinstance(dim, str)}


def variables(specs: tuple[TensorSpec, ...]) -> dict[str, str]:
    """The role of each size that must be chosen, by symbolic name, or `input.axis` where it has none."""
    found: dict[str, str] = {}
    for s in specs:
        if s.kind in ("map", "maps"):
            continue
        if s.shape is None:
            found[f"{s.name}.shape"] = "rank"
        for axis, dim in enumerate(s.shape or ()):
            for name in _terms(dim) if isinstance(dim, str) else [f"{s.name}.{axis}"] if dim is None else []:
                found.setdefault(name, _role(s, axis, name if isinstance(dim, str) else ""))
    return found


def _terms(dim: str) -> list[str]:
    """`past + 1` is a sum of names and numbers, as exporters of decoders write it."""
    return [term for term in dim.replace(" ", "").split("+") if not term.isdecimal()]


def _role(spec: TensorSpec, axis: int, symbol: str) -> str:
    for pattern, role in ROLES:
        if symbol and re.search(pattern, symbol.lower()):
            return role
    shape = spec.shape or ()
    if axis == 0 or re.search(r"state|hidden|cell|cache|^[hc]\d*$", spec.name.lower()):
        return "batch"
    if len(shape) >= 4:
        last = shape[-1] in (1, 3, 4) and shape[1] not in (1, 3, 4)
        return "channel" if axis == (len(shape) - 1 if last else 1) else "image"
    return "length"


def _sizings(roles: dict[str, str]) -> Iterator[Dims]:
    """All at their first choice, then their second, ...; then each in turn at 1; then each alone through its sizes."""
    rounds = range(max((len(SIZES[role]) for role in roles.values()), default=1))
    uniform = [{name: _pick(role, i) for name, role in roles.items()} for i in rounds]
    yield from uniform
    for name, role in roles.items():
        if role not in ("batch", "rank"):
            yield from ({**dims, name: 1} for dims in uniform[:6])
    for name, role in roles.items():
        yield from ({**uniform[0], name: size} for size in SIZES[role][1:])


def _pick(role: str, index: int) -> int:
    sizes = SIZES[role]
    return sizes[0] if role == "batch" else sizes[min(index, len(sizes) - 1)]


def shape_of(spec: TensorSpec, dims: Dims) -> tuple[int, ...]:
    """The concrete shape of one input."""
    if spec.kind in ("map", "maps"):
        return (4,)
    if spec.shape is None:
        return UNRANKED[dims[f"{spec.name}.shape"]]
    return tuple(_size(spec, axis, dim, dims) for axis, dim in enumerate(spec.shape))


def _size(spec: TensorSpec, axis: int, dim: Dim, dims: Dims) -> int:
    if isinstance(dim, int):
        return dim
    if dim is None:
        return dims[f"{spec.name}.{axis}"]
    terms = dim.replace(" ", "").split("+")
    return sum(int(term) if term.isdecimal() else dims[term] for term in terms)


Filling: TypeAlias = dict[str, tuple[Fill, int | None]]


def _fillings(specs: tuple[TensorSpec, ...]) -> Iterator[Filling]:
    needed = [s for s in specs if s.required]
    yield {s.name: _fill(s, 0) for s in needed}
    if any(s.dtype.lstrip("U").startswith("INT") for s in needed):
        yield from ({s.name: _fill(s, turn) for s in needed} for turn in range(1, 4))
    if any(not s.required for s in specs):
        yield from ({s.name: _fill(s, turn) for s in specs} for turn in range(2))


def _fill(spec: TensorSpec, turn: int) -> tuple[Fill, int | None]:
    name = spec.name.lower()
    if spec.dtype == "BYTES":
        return "text", None
    if spec.dtype == "BOOL" or "mask" in name:
        return "ones", None
    if not spec.dtype.lstrip("U").startswith("INT"):
        return "unit", None
    if spec.kind == "tensor" and spec.shape in ((), (1,)):
        values: Any = next(values for pattern, values in CONTROLS if re.search(pattern, name))
        return "value", values[turn % len(values)]
    if re.search(r"type|segment", name):
        return "zeros", None
    fills: tuple[Fill, ...] = ("ids", "zeros", "ones", "ids")
    return fills[turn], None
