"""What one message may hold. Each limit is refused by its name; the body's size itself is FrameReader's `max_body`.

No byte is read here and nothing is configured here: the values come from the configuration. Any process may use it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one decoded message; the defaults fit every model of the ONNX zoo with room to spare."""

    max_tensors: int = 256  # inputs or outputs; sequences are one tensor an element. It bounds the objects of a message
    max_dims: int = 32  # numpy 1.x cannot hold more
    max_name_bytes: int = 1024  # of a name, version, id or parameter's key; URLs and tensor paths stay far below
    max_parameters: int = 256  # in one map
    max_parameter_bytes: int = 65536  # of one string value; a traceparent has 55, a prompt for a handler a few thousand
    # elements of one tensor that each become an object, up to 0.5 us apart: BYTES, and protobuf's typed contents
    max_objects: int = 1 << 20


DEFAULT = Limits()
_NONE = (1 << 63) - 1
UNBOUNDED = Limits(_NONE, _NONE, _NONE, _NONE, _NONE, _NONE)
"""For writers: what is too much is the reader's to say."""
