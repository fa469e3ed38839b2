"""A recipe says which nodes a candidate quantizes and how; `build` writes it as a model file.

Loader's process (onnx).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from onnx import ModelProto

from prefork.errors import ModelError
from prefork.model import calibrate, external, half, quantize, weightonly
from prefork.model.linear import PLAIN, Treatment
from prefork.model.qlinear import Static, as_static
from prefork.model.quantize import Form
from prefork.model.sensitivity import FP32
from prefork.model.weights import Weights

BASIC = "basic.onnx"  # what quantize.folded leaves in its folder, and every recipe starts from


@dataclass(frozen=True, slots=True)
class Recipe:
    """`linear`: treatment of products by output, None leaves all products fp32; those that it does not name are
    quantized plainly when `others`, and so are LSTM, Attention and what stands in subgraphs. `static`: convolutions.
    `bits`: weight-only products, 8 or 4. `half`: float16. `why`: what was left in fp32 by choice, and why."""

    name: str
    linear: Mapping[str, Treatment] | None = None
    others: bool = True
    static: Static | None = None
    bits: int = 0
    half: bool = False
    why: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Built:
    form: Form
    treatments: dict[str, int]


def build(recipe: Recipe, folder: Path, stem: str, *, reduce_range: bool) -> Built:
    """Write the candidate as `stem`.onnx and `stem`.bin in `folder`, where the folded model lies. Raises ModelError
    when nothing in the model can be quantized so."""
    model = external.parse((folder / BASIC).read_bytes())
    done: Counter[str] = Counter()
    left: list[str] = list(recipe.why)
    with (folder / f"{stem}.bin").open("wb") as file:
        data = external.DataFile(file, f"{stem}.bin")
        if recipe.static is not None:
            static = as_static(model, _weights(model, folder), data, recipe.static)
            done += Counter({f"static {kind}": count for kind, count in static.done.items()})
            unknown = [name for name in static.kept if name not in recipe.static.keep]
            left += [f"{name}: no finite range was seen" for name in unknown]
        if recipe.bits and (count := weightonly.rewrite(model, _weights(model, folder), data, recipe.bits)):
            done[f"{recipe.bits}-bit weights"] += count
        if recipe.half:
            halves = half.as_half(model, folder, data)
            done += Counter({f"float16 {kind}": count for kind, count in halves.kinds.items()})
            left += [*halves.left, *half.without_kernel(halves, half.kernels(folder))]
        if recipe.linear is not None:
            rest = PLAIN if recipe.others else FP32
            rewrite = quantize.Rewrite(folder, data, reduce_range=reduce_range, plan=recipe.linear, rest=rest)
            rewrite.model(model)
            done += Counter(rewrite.treated)
            left += [f"{what}, {count} nodes" for what, count in sorted(rewrite.left.items())]
    if not done:
        raise ModelError("no operator that would gain")
    path = folder / f"{stem}.onnx"
    path.write_bytes(model.SerializeToString())
    return Built(Form(recipe.name, path, tuple(f"left in fp32: {what}" for what in left)), dict(done))


def _weights(model: ModelProto, folder: Path) -> Weights:
    return Weights(calibrate.fp32_initializers(model), folder)
