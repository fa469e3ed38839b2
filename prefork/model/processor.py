"""The processor a model is prepared on. Loader's side, and whoever must know whether a prepared model still fits.

Standard library only: a loader that finds its model prepared imports this and no numeric library.
"""

from __future__ import annotations

import hashlib
import platform
from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Cpu:
    """The processor the model was prepared on; `flags_sha256` is over its sorted feature flags."""

    vendor: str
    model: str
    flags_sha256: str
    vnni: bool


def processor(text: str | None = None) -> Cpu:
    """This processor; `text`: the contents of /proc/cpuinfo (proc(5)), read when not given.

    `vnni`: it multiplies u8 by s8 without overflow between (avx512_vnni or avx_vnni; on Arm always)."""
    fields: dict[str, str] = {}
    for line in (CPUINFO.read_text() if text is None else text).splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = sorted(set((fields.get("flags") or fields.get("Features") or "").split()))
    arm = "CPU implementer" in fields
    return Cpu(
        vendor=fields.get("vendor_id") or fields.get("CPU implementer") or "unknown",
        model=fields.get("model name") or fields.get("CPU part") or platform.machine(),
        flags_sha256=hashlib.sha256(" ".join(flags).encode()).hexdigest(),
        vnni=arm or "avx512_vnni" in flags or "avx_vnni" in flags,
    )
