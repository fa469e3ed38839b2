"""What a client of the old model would notice in the new one."""

from __future__ import annotations

from typing import Any

import pytest

from prefork.compat import MOST, Signature, broken, signature


def made(*inputs: dict[str, Any], outputs: tuple[dict[str, Any], ...] = ()) -> Signature:
    return signature(inputs, outputs)


def spec(name: str, *shape: int | str, dtype: str = "FP32", kind: str = "tensor", **more: Any) -> dict[str, Any]:
    return {"name": name, "kind": kind, "dtype": dtype, "shape": list(shape), **more}


X = spec("x", "batch", 3)
Y = spec("y", "batch", 10)


@pytest.mark.parametrize(
    "new",
    [
        made(X, outputs=(Y,)),
        made(spec("x", "n", 3), outputs=(Y,)),
        made(spec("x", "n", "m"), outputs=(Y,)),
        made({**X, "shape": None}, outputs=(Y,)),
        made({**X, "default": True}, outputs=(Y,)),
        made(X, spec("z", 1, optional=True), outputs=(Y, spec("more", 1))),
        made(X, outputs=(spec("y", 1, 10),)),
    ],
    ids=["same", "renamed dimension", "any size", "any rank", "optional now", "more", "narrower output"],
)
def test_what_nobody_notices(new: Signature) -> None:
    assert broken(made(X, outputs=(Y,)), new) == ""


@pytest.mark.parametrize(
    ("new", "why"),
    [
        (made(outputs=(Y,)), "input 'x' is not there any more"),
        (made(spec("x", "n", 4), outputs=(Y,)), "input 'x' was FP32 [?, 3] and is FP32 [?, 4]"),
        (made(spec("x", 1, 3), outputs=(Y,)), "input 'x' was FP32 [?, 3] and is FP32 [1, 3]"),
        (made(spec("x", 3), outputs=(Y,)), "input 'x' was FP32 [?, 3] and is FP32 [3]"),
        (made(spec("x", "n", 3, dtype="FP64"), outputs=(Y,)), "and is FP64 [?, 3]"),
        (made(spec("x", "n", 3, kind="sequence"), outputs=(Y,)), "and is sequence of FP32 [?, 3]"),
        (made(X, spec("z", 1), outputs=(Y,)), "input 'z' (FP32 [1]) is required now"),
        (made(X), "output 'y' is not there any more"),
        (made(X, outputs=(spec("y", "n", 11),)), "output 'y' was FP32 [?, 10] and is FP32 [?, 11]"),
        (made(X, outputs=({**Y, "shape": None},)), "output 'y' was FP32 [?, 10] and is FP32"),
    ],
)
def test_what_a_client_would_notice(new: Signature, why: str) -> None:
    assert why in broken(made(X, outputs=(Y,)), new)


def test_an_input_that_was_optional_may_not_become_required() -> None:
    assert "is required now" in broken(made({**X, "optional": True}), made(X))


def test_only_so_many_are_compared() -> None:
    many = [spec(f"x{index}", 1) for index in range(MOST + 50)]
    assert len(made(*many)["inputs"]) == MOST and broken(made(*many), made(*many)) == ""
