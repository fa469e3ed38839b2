"""The forms a model can be asked to be served in: the name asked for, and the function that makes it. Loader's process.

Each entry stands alone. What a search may choose besides stands in candidates.py.
"""

from __future__ import annotations

from prefork.model.half import half_precision
from prefork.model.quantize import Make, as_it_is, int8_dynamic

FORMS: dict[str, Make] = {"none": as_it_is, "int8": int8_dynamic, "fp16": half_precision}
