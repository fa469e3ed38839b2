"""Manifests by hand, for tests of the worker's side alone: the graph as it is, nothing optimised or moved out of it."""

from __future__ import annotations

import onnx
import onnxruntime

from prefork.model import signature
from prefork.model.manifest import ExternalTensor, Manifest, Warmup
from prefork.model.processor import Cpu


def manifest_of(
    model: onnx.ModelProto, *, warmup: Warmup | None = None, external: tuple[ExternalTensor, ...] = ()
) -> Manifest:
    graph = model.SerializeToString()
    return Manifest(
        model="m",
        source="m.onnx",
        source_sha256="",
        source_bytes=len(graph),
        quantize="none",
        form="as-is",
        ort_version=onnxruntime.__version__,
        cpu=Cpu("", "", "", False),
        ir_version=model.ir_version,
        opsets={item.domain: item.version for item in model.opset_import},
        inputs=signature.inputs(model),
        outputs=signature.outputs(model),
        external=external,
        weights_bytes=max((tensor.offset + tensor.length for tensor in external), default=0),
        graph_bytes=len(graph),
        optimized=False,
        packed=False,
        warmup=warmup,
    )
