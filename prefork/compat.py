"""Whether a model may take another's place under its clients: what they send and read must still fit. Pure.

Compares signatures as the loader reports them: for `inputs` and `outputs` a list of [name, kind, dtype, shape,
required], where a dimension is its size or null when it may be any. Used by the master before a reload goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Spec = Sequence[Any]
Signature = Mapping[str, Sequence[Spec]]
NAME, KIND, DTYPE, SHAPE, REQUIRED = range(5)
MOST = 200  # inputs or outputs that are compared; what a loader says is of bounded length


def signature(inputs: Sequence[Mapping[str, Any]], outputs: Sequence[Mapping[str, Any]]) -> Signature:
    """From the lists of a manifest."""
    return {"inputs": [_spec(each) for each in inputs[:MOST]], "outputs": [_spec(each) for each in outputs[:MOST]]}


def _spec(found: Mapping[str, Any]) -> Spec:
    shape = found.get("shape")
    dims = None if shape is None else [dim if isinstance(dim, int) else None for dim in shape]
    required = not (found.get("optional") or found.get("default"))
    return [found["name"][:100], found["kind"], found["dtype"], dims, required]


def broken(old: Signature, new: Signature) -> str:
    """What a client of `old` would miss or be refused for in `new`; nothing when it would notice no difference.

    An input may take more shapes than before or become optional, and there may be more optional inputs and outputs."""
    for was in old["inputs"]:
        now = _find(new["inputs"], was[NAME])
        if now is None:
            return f"input {was[NAME]!r} is not there any more"
        if not _same_type(was, now) or not _takes(now[SHAPE], was[SHAPE]):
            return f"input {was[NAME]!r} was {_text(was)} and is {_text(now)}"
    for now in new["inputs"]:
        before = _find(old["inputs"], now[NAME])
        if now[REQUIRED] and (before is None or not before[REQUIRED]):
            return f"input {now[NAME]!r} ({_text(now)}) is required now"
    for was in old["outputs"]:
        now = _find(new["outputs"], was[NAME])
        if now is None:
            return f"output {was[NAME]!r} is not there any more"
        if not _same_type(was, now) or not _takes(was[SHAPE], now[SHAPE]):
            return f"output {was[NAME]!r} was {_text(was)} and is {_text(now)}"
    return ""


def _find(specs: Sequence[Spec], name: str) -> Spec | None:
    return next((spec for spec in specs if spec[NAME] == name), None)


def _same_type(one: Spec, other: Spec) -> bool:
    return bool(one[KIND] == other[KIND] and one[DTYPE] == other[DTYPE])


def _takes(wide: Sequence[int | None] | None, narrow: Sequence[int | None] | None) -> bool:
    """Whether every value of shape `narrow` is one of shape `wide`; what is not known counts as any."""
    if wide is None:
        return True
    if narrow is None or len(wide) != len(narrow):
        return False
    return all(w is None or w == n for w, n in zip(wide, narrow, strict=True))


def _text(spec: Spec) -> str:
    dims = "" if spec[SHAPE] is None else f" [{', '.join('?' if dim is None else str(dim) for dim in spec[SHAPE])}]"
    return f"{'' if spec[KIND] == 'tensor' else f'{spec[KIND]} of '}{spec[DTYPE]}{dims}"
