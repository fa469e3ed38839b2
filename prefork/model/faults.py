"""ONNX Runtime's exceptions as ours: who is at fault, and a message fit for a client. Worker's side.

ORT raises its own classes or RuntimeError, with the text `[ONNXRuntimeError] : number : NAME : text` for whatever its
core said. The text may hold paths of the build, of the segment and C++ signatures; `clean` takes those out. The numbers
are OrtErrorCode of onnxruntime_c_api.h. Nothing here imports onnxruntime.
"""

from __future__ import annotations

import re

from prefork.errors import Internal, InvalidArgument, ModelError, ResourceExhausted, StatusError, Unimplemented

LIMIT = 400  # characters of a message: C++ conditions can run to kilobytes

_CODE = re.compile(r"\[ONNXRuntimeError\] : (\d+) : (\w+) : ")
_NODE = re.compile(r"Non-zero status code returned while running (\w+) node\. Name:'(?:[^']*)' Status Message: ")
_ENFORCE = re.compile(r"(?:\S*/)?[\w.-]+\.(?:h|hpp|cc|cpp|inl):\d+ .*? was false\. ?", re.S)
_SOURCE = re.compile(r"(?:\S*/)?[\w.-]+\.(?:h|hpp|cc|cpp|inl):\d+ (?:[^()\n]*::[^()\n]*\([^()]*\)(?: const)? ?)?")
_PATH = re.compile(r"\"?(?<![\w.])/(?:[^\s\"':;,()]+/)*[^\s\"':;,()]+\"?")
_MEMORY = re.compile(r"bad_alloc|Failed to allocate|allocat\w* (?:memory|failed)|out of memory", re.I)
_INPUT = re.compile(
    r"dimension|shape|rank|broadcast|axis|axes|index|indices|out of (?:data )?bounds?|range|mismatch|invalid|negative|"
    r"\bsize\b|length|divis|must |should |expect|equal|empty|cannot be|not supported for",
    re.I,
)


def open_error(model: str, error: Exception) -> ModelError:
    """Why the session did not open."""
    return ModelError(f"model {model!r}: ONNX Runtime cannot open it: {clean(str(error))}")


def run_error(model: str, error: Exception) -> StatusError:
    """Why a run failed: ResourceExhausted without memory, InvalidArgument where a kernel refused what it was given,
    Unimplemented where ORT lacks the kernel, else Internal.

    The model ran when it was prepared, so what a kernel refuses now came with the request."""
    text = str(error)
    code = int(found[1]) if (found := _CODE.match(text)) else 0
    said = f"model {model!r}: the run failed: {clean(text)}"
    if isinstance(error, MemoryError) or _MEMORY.search(text):
        return ResourceExhausted(f"model {model!r}: not enough memory for this run")
    if code == 2 or (code in (1, 6) and _NODE.search(text) and _INPUT.search(clean(text))):
        return InvalidArgument(said)
    return Unimplemented(said) if code == 9 else Internal(said)


def clean(text: str) -> str:
    """ORT's text in one line, without its prefix, node names, source places, signatures and paths."""
    text = _CODE.sub("", text)
    text = _NODE.sub(r"\1: ", text)
    text = _ENFORCE.sub("", text)
    text = _SOURCE.sub("", text)
    text = _PATH.sub("(path)", text)
    text = " ".join(text.split())
    return text if len(text) <= LIMIT else text[: LIMIT - 3] + "..."
