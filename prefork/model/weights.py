"""Weight values: read one at a time from the file they lie in, and turned into int8. Loader's process only (onnx)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, numpy_helper

from prefork.model import external

Floats: TypeAlias = npt.NDArray[np.float32]
BLOCK = 1 << 22  # elements; bounds the temporaries


@dataclass(frozen=True, slots=True)
class Weights:
    """fp32 tensors by name, external ones in files of `folder`."""

    tensors: Mapping[str, TensorProto]
    folder: Path

    def array(self, name: str) -> Floats:
        """The fp32 values; a read-only map of the file when they are external."""
        tensor = self.tensors[name]
        if not external.is_external(tensor):
            return np.asarray(numpy_helper.to_array(tensor), np.float32)
        offset, _ = external.span(tensor)
        path = self.folder / external.entry(tensor, "location")
        return np.memmap(path, np.dtype("<f4"), "r", offset, tuple(tensor.dims))


def per_channel(weight: Floats, axis: int, top: int, *, swap: bool) -> tuple[npt.NDArray[np.int8], Floats]:
    """Symmetric int8 values in [-top, top] and the scale of each channel.

    The scale is max |w| / top over `axis`, so that it has the shape of `weight` without it; 1 for a channel of zeros.
    `swap`: the values come with their last two axes swapped. NaN and infinity give a scale of the same kind, and so
    show in the outputs."""
    scales = np.maximum(weight.max(axis=axis), -weight.min(axis=axis)) / np.float32(top)
    scales = np.where(scales == 0, np.float32(1), scales).astype(np.float32)
    divisor = np.expand_dims(scales, axis)
    out = np.empty(weight.shape, np.int8)
    flat, rows = weight.reshape(-1, weight.shape[-1]), max(1, BLOCK // weight.shape[-1])
    spread = np.broadcast_to(divisor, weight.shape).reshape(-1, weight.shape[-1]) if weight.ndim != 2 else None
    for start in range(0, len(flat), rows):
        part = slice(start, start + rows)
        by = spread[part] if spread is not None else np.broadcast_to(divisor, weight.shape)[part]
        with np.errstate(invalid="ignore"):
            out.reshape(flat.shape)[part] = np.clip(np.rint(flat[part] / by), -top, top)
    return np.ascontiguousarray(np.swapaxes(out, -1, -2)) if swap else out, scales
