"""What a prepared model says about itself: plain values, as JSON in the segment beside graph and weights.

The loader writes a Manifest, the template, worker and control tool read it. It must import neither onnx nor
onnxruntime. Each field of the JSON is checked when it is read, and an error names the field by its path.
"""

from __future__ import annotations

import types
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

import orjson

from prefork.errors import SegmentCorrupt
from prefork.model.processor import Cpu
from prefork.model.version import FORMAT
from prefork.tensor import BY_ONNX, DTYPES

Kind: TypeAlias = Literal["tensor", "sequence", "map", "maps"]
Dim: TypeAlias = int | str | None
Fill: TypeAlias = Literal["zeros", "ones", "ids", "unit", "text", "value", "literal"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of the model.

    | ONNX type | kind | dtype | key |
    |---|---|---|---|
    | tensor(T) | tensor | T | None |
    | seq(tensor(T)) | sequence | T (of each element) | None |
    | map(K, tensor(T)) | map | T (each value is a scalar) | K |
    | seq(map(K, tensor(T))) | maps | T | K |

    `dtype` and `key` are names of prefork.tensor.DTYPES. `optional`: the type is optional(...), None is a value.
    `default`: an initializer of the same name stands in when the input is not given. `shape`: None when the rank is
    unknown; a dimension is its size, its symbolic name, or None when nothing is known. Maps have no shape.
    """

    name: str
    kind: Kind
    dtype: str
    shape: tuple[Dim, ...] | None = None
    optional: bool = False
    default: bool = False
    key: str | None = None

    @property
    def required(self) -> bool:
        """Whether a request must give this input."""
        return not (self.optional or self.default)


@dataclass(frozen=True, slots=True)
class ExternalTensor:
    """An initializer of the graph that lies in the weights section. `dtype`: TensorProto.DataType; `offset`: bytes from
    the start of the section; `length`: bytes, in ONNX's raw_data form."""

    name: str
    dtype: int
    shape: tuple[int, ...]
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class WarmupInput:
    """How to make one input that is known to run; `prefork.model.warmup.build` makes it.

    fill: zeros and ones; `ids`: small whole numbers; `unit`: [0, 1); `text`: words; `value`: every element is `value`;
    `literal`: `value` holds the base64 of the wire form of prefork.tensor. kind sequence: a list of one such tensor.
    kind map and maps: `shape` is (number of entries,).
    """

    name: str
    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    fill: Fill
    value: int | float | str | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Warmup:
    """A set of inputs that ran when the model was prepared. Inputs with `required` false may be missing from it.

    `digest`: `prefork.model.warmup.digest` of all outputs, in the order of `Manifest.outputs`, of the prepared model on
    one thread; None when two runs differ (random operators). `dims`: the size given to each symbolic dimension.
    """

    inputs: tuple[WarmupInput, ...]
    digest: str | None = None
    dims: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything a reader must know before it opens the graph.

    `optimized`: the graph is in its final form, open it with ORT_DISABLE_ALL; else with ORT_ENABLE_ALL.
    `packed`: the weights section also holds ORT's pre-packed copies, referred to from the graph.
    `session_config`: session configuration entries that opening needs, whatever else the reader sets.
    `warmup`: None when no inputs are known that run; `notes` then says why.
    `source` is the path as the owner gave it: for the owner's eyes, never for clients.
    `form`: what runs: "fp32" (the source's own types, optimised), "int8-dynamic", "int8-mixed" (each product as is best
    for it), "weights-8bit", "weights-4bit", "static-" and how ranges were found or what was left out (minmax, entropy,
    percentile, mixed, convolutions, tensor), "int8-both" (products and convolutions), "quantized-source" (came
    quantized), "as-is" (not optimised: ORT would not save it).
    """

    model: str
    source: str
    source_sha256: str
    source_bytes: int
    quantize: str
    form: str
    ort_version: str
    cpu: Cpu
    ir_version: int
    opsets: dict[str, int]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    external: tuple[ExternalTensor, ...]
    weights_bytes: int
    graph_bytes: int
    optimized: bool
    packed: bool
    warmup: Warmup | None = None
    session_config: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    report: dict[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT

    def to_json(self) -> bytes:
        """UTF-8 JSON, keys in the order of the fields."""
        return orjson.dumps(asdict(self))

    @classmethod
    def from_json(cls, data: bytes | bytearray | memoryview) -> Manifest:
        """The manifest in `data`. Raises SegmentCorrupt, naming the field, for anything that is not one."""
        try:
            raw = orjson.loads(data)
        except orjson.JSONDecodeError as e:
            raise SegmentCorrupt(f"manifest: not JSON: {e}") from None
        if isinstance(raw, dict) and raw.get("format_version") != FORMAT:
            raise SegmentCorrupt(f"manifest: format_version {raw.get('format_version')!r}, this program reads {FORMAT}")
        manifest: Manifest = _read(cls, raw, "manifest")
        _check(manifest)
        return manifest


def _check(manifest: Manifest) -> None:
    for where in ("inputs", "outputs"):
        for index, spec in enumerate(getattr(manifest, where)):
            if spec.dtype not in DTYPES or (spec.key is not None and spec.key not in DTYPES):
                raise SegmentCorrupt(f"manifest.{where}[{index}].dtype: {spec.dtype!r} is no element type")
            if (spec.key is None) == (spec.kind in ("map", "maps")):
                raise SegmentCorrupt(f"manifest.{where}[{index}].key: {spec.key!r} does not fit kind {spec.kind!r}")
    for index, tensor in enumerate(manifest.external):
        at = f"manifest.external[{index}]"
        if tensor.dtype not in BY_ONNX:
            raise SegmentCorrupt(f"{at}.dtype: {tensor.dtype} is no element type")
        if min(tensor.offset, tensor.length) < 0 or tensor.offset + tensor.length > manifest.weights_bytes:
            raise SegmentCorrupt(
                f"{at}: bytes {tensor.offset} to {tensor.offset + tensor.length} leave the weights section of "
                f"{manifest.weights_bytes} bytes"
            )


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _read(kind: Any, raw: Any, at: str) -> Any:
    """`raw` as a value of the annotated type `kind`; `at` is the path for the error."""
    if kind is Any:
        return raw
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _read_union(kind, raw, at)
    if origin is Literal:
        if raw not in get_args(kind):
            raise SegmentCorrupt(f"{at}: expected one of {', '.join(get_args(kind))}, found {raw!r}")
        return raw
    if origin is tuple:
        return tuple(_read(get_args(kind)[0], item, f"{at}[{i}]") for i, item in enumerate(_expect(list, raw, at)))
    if origin is dict:
        return {key: _read(get_args(kind)[1], item, f"{at}.{key}") for key, item in _expect(dict, raw, at).items()}
    if is_dataclass(kind) and isinstance(kind, type):
        return _read_fields(kind, _expect(dict, raw, at), at)
    return _expect(kind, raw, at)


def _read_union(kind: Any, raw: Any, at: str) -> Any:
    for member in get_args(kind):
        if raw is None and member is type(None):
            return None
        if raw is not None and member is not type(None):
            try:
                return _read(member, raw, at)
            except SegmentCorrupt:
                if is_dataclass(member) or get_origin(member) is tuple:
                    raise
    raise SegmentCorrupt(f"{at}: expected {_name(kind)}, found {_found(raw)}")


def _read_fields(cls: Any, raw: dict[str, Any], at: str) -> Any:
    names = {f.name for f in fields(cls)}
    if unknown := sorted(raw.keys() - names):
        raise SegmentCorrupt(f"{at}.{unknown[0]}: unknown field")
    if missing := [f.name for f in fields(cls) if f.name not in raw]:
        raise SegmentCorrupt(f"{at}.{missing[0]}: missing")
    return cls(**{name: _read(hint, raw[name], f"{at}.{name}") for name, hint in _hints(cls).items()})


def _expect(kind: Any, raw: Any, at: str) -> Any:
    right = isinstance(raw, kind) and (kind is bool or not isinstance(raw, bool))
    if kind is float and isinstance(raw, int) and not isinstance(raw, bool):
        return float(raw)
    if not right:
        raise SegmentCorrupt(f"{at}: expected {_name(kind)}, found {_found(raw)}")
    return raw


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)


def _found(raw: Any) -> str:
    return f"{type(raw).__name__} {str(raw)[:40]!r}"
