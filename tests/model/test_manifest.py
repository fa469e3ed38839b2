"""The manifest's JSON: whole round trips, and a named field for every fault."""

from __future__ import annotations

import json
from typing import Any

import pytest

from prefork.errors import SegmentCorrupt
from prefork.model.manifest import ExternalTensor, Manifest, TensorSpec, Warmup, WarmupInput
from prefork.model.processor import Cpu


def example() -> Manifest:
    return Manifest(
        model="m",
        source="/models/m.onnx",
        source_sha256="00",
        source_bytes=10,
        quantize="none",
        form="fp32",
        ort_version="1.0",
        cpu=Cpu("v", "m", "f", True),
        ir_version=8,
        opsets={"ai.onnx": 17},
        inputs=(TensorSpec("x", "tensor", "FP32", (1, "n", None)), TensorSpec("s", "sequence", "FP16", None, True)),
        outputs=(TensorSpec("p", "maps", "FP32", key="INT64"),),
        external=(ExternalTensor("w", 1, (2, 3), 8, 24),),
        weights_bytes=32,
        graph_bytes=5,
        optimized=True,
        packed=True,
        warmup=Warmup((WarmupInput("x", "tensor", "FP32", (1, 2), "unit"),), "ab", {"n": 2}),
        notes=("a note",),
        report={"seconds": {"form": 0.5}},
    )


def test_round_trip_keeps_every_value() -> None:
    manifest = example()
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert Manifest.from_json(memoryview(manifest.to_json())).to_json() == manifest.to_json()


def test_required_is_neither_optional_nor_defaulted() -> None:
    x, s = example().inputs
    assert x.required
    assert not s.required
    assert not TensorSpec("b", "tensor", "FP32", (), default=True).required


@pytest.mark.parametrize(
    ("path", "bad", "named"),
    [
        ("cpu", 3, "manifest.cpu: expected dict"),
        ("ir_version", True, "manifest.ir_version: expected int, found bool"),
        ("opsets", {"": "x"}, "manifest.opsets.: expected int"),
        ("inputs", [{"name": "x"}], "manifest.inputs[0].kind: missing"),
        ("outputs", [1], "manifest.outputs[0]: expected dict"),
        ("weights_bytes", 31, "manifest.external[0]: bytes 8 to 32 leave"),
        ("format_version", 99, "format_version 99"),
        ("surprise", 1, "manifest.surprise: unknown field"),
        ("warmup", {"inputs": [], "digest": 4, "dims": {}}, "manifest.warmup.digest"),
    ],
)
def test_fault_names_its_field(path: str, bad: Any, named: str) -> None:
    raw = json.loads(example().to_json())
    raw[path] = bad
    with pytest.raises(SegmentCorrupt) as caught:
        Manifest.from_json(json.dumps(raw).encode())
    assert named in caught.value.message


@pytest.mark.parametrize(
    ("path", "key", "bad", "named"),
    [
        ("inputs", "dtype", "FP33", "manifest.inputs[0].dtype: 'FP33'"),
        ("inputs", "kind", "tensors", "manifest.inputs[0].kind: expected one of tensor"),
        ("inputs", "shape", [1.5], "manifest.inputs[0].shape[0]"),
        ("inputs", "key", "INT64", "manifest.inputs[0].key"),
        ("external", "dtype", 99, "manifest.external[0].dtype: 99"),
        ("external", "offset", -1, "manifest.external[0]: bytes -1"),
    ],
)
def test_fault_inside_a_list_names_its_place(path: str, key: str, bad: Any, named: str) -> None:
    raw = json.loads(example().to_json())
    raw[path][0][key] = bad
    with pytest.raises(SegmentCorrupt) as caught:
        Manifest.from_json(json.dumps(raw).encode())
    assert named in caught.value.message


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"format_version": 1}'])
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(SegmentCorrupt, match="manifest"):
        Manifest.from_json(data)


def test_every_cut_of_the_json_is_refused() -> None:
    data = example().to_json()
    for end in range(len(data)):
        with pytest.raises(SegmentCorrupt):
            Manifest.from_json(data[:end])
