"""The table of candidates: which forms are tried, in which order, when, and how each finds its best shape. Loader's
process.

A row's `when` says why it is not tried, or "". Its `forms` yields recipes and is sent what was measured of each (None
when it could not be built), so that a row may look for the right one. The search stops at the first row that time does
not allow; the fastest form that passes the gate is chosen among all measured.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from prefork.model.calibrate import Method
from prefork.model.gate import Measured
from prefork.model.qlinear import Static
from prefork.model.recipe import Recipe
from prefork.model.sensitivity import Product, levels, plan

Forms: TypeAlias = Generator[Recipe, Measured | None, None]

NARROWER = 2.0  # times that half the width can be as fast, at best
TURNS = 5  # of one bisection: each halves what is left, and takes seconds for a large model


@dataclass(frozen=True, slots=True)
class Tried:
    """A candidate that was measured; `refusal`: "" when it passed."""

    row: str
    recipe: Recipe
    measured: Measured
    refusal: str
    accurate: bool


class State(Protocol):
    """What the rows may ask."""

    linear_kinds: int  # products, LSTM and Attention in the whole model
    reachable: int  # those that sensitivity and weight-only forms reach: products of the main graph
    others: bool  # there are further ones
    convolutions: Sequence[str]  # first outputs
    calibrated: bool  # the owner gave inputs
    half_kernels: bool  # this processor computes float16
    tried: list[Tried]

    def products(self) -> Sequence[Product]: ...
    def static(self, method: Method, *, per_channel: bool, around: bool, keep: Sequence[str] = ()) -> Static: ...
    def ranked(self) -> Sequence[tuple[str, float]]: ...


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    when: Callable[[State], str]
    forms: Callable[[State], Forms]
    group: str = field(default="")


def _passed(state: State, group: str) -> list[Tried]:
    return [one for one in state.tried if not one.refusal and GROUPS.get(one.row) == group]


def _accurate(state: State, group: str) -> list[Tried]:
    return [one for one in state.tried if one.accurate and GROUPS.get(one.row) == group]


def _has_products(state: State) -> str:
    return "" if state.linear_kinds else "no matrix product, LSTM or Attention of a size that gains"


def _reachable(state: State) -> str:
    return _has_products(state) or ("" if state.reachable else "no matrix product in the main graph")


def _product_fails(state: State) -> str:
    if reason := _reachable(state):
        return reason
    return "not needed: int8-dynamic holds the budget" if _accurate(state, "linear") else ""


def _no_product_passes(state: State) -> str:
    if reason := _reachable(state):
        return reason
    return "not needed: a faster form of the products passes" if _passed(state, "linear") else ""


def _has_convolutions(state: State) -> str:
    if not state.convolutions:
        return "no convolution with constant weights"
    return "" if state.calibrated else "static ranges need real inputs: give --calibration"


def _no_static_passes(state: State) -> str:
    if reason := _has_convolutions(state):
        return reason
    return "not needed: static-minmax passes" if _passed(state, "static") else ""


def _no_static_is_accurate(state: State) -> str:
    if reason := _has_convolutions(state):
        return reason
    return "not needed: another static form holds the budget" if _accurate(state, "static") else ""


def _half_may_win(state: State) -> str:
    if not state.linear_kinds and not state.convolutions:
        return "no matrix product or convolution"
    best = max((one.measured.speedup for one in state.tried if not one.refusal), default=0.0)
    if best >= NARROWER:
        return f"not needed: a form that passes is {best:.2f} times as fast, half the width gives {NARROWER:g} at best"
    if not state.half_kernels and not state.calibrated:
        return "onnxruntime computes float16 as fp32 on this processor; measured all the same when inputs are given"
    return ""


def _half(state: State) -> Forms:
    yield Recipe("fp16", half=True)


def _both_hold(state: State) -> str:
    for group, what in (("linear", "products"), ("static", "convolutions")):
        if not _gaining(state, group):
            return f"no form of the {what} alone holds the budget without being slower"
    return ""


def _gaining(state: State, group: str) -> list[Tried]:
    return [one for one in _accurate(state, group) if one.measured.speedup >= 1]


def _plain(state: State) -> Forms:
    yield Recipe("int8-dynamic", linear={})


def _mixed(state: State) -> Forms:
    """Bisect the price of speed in accuracy; at each price every node takes the treatment that is best for it."""
    products = state.products()
    steps = levels(products)
    for others in (True, False) if state.others else (True,):
        low, high = 0, len(steps) + 1  # steps[:low] hold; all of them do not
        for _ in range(TURNS):
            if high - low <= 1:
                break
            middle = (low + high) // 2
            # a price between two levels, where the plan is the same throughout
            measured = yield _recipe(products, (steps[middle - 1] + steps[min(middle, len(steps) - 1)]) / 2, others)
            low, high = (middle, high) if measured is not None and _holds(state) else (low, middle)
        if low:
            return


def _holds(state: State) -> bool:
    return bool(state.tried) and state.tried[-1].accurate


def _recipe(products: Sequence[Product], price: float, others: bool) -> Recipe:
    chosen = plan(products, price)
    why = tuple(
        f"{p.node or p.output}: int8 here moves the outputs by {p.least:.2%}"
        for p in products
        if chosen[p.output].kind == "fp32"
    )
    return Recipe("int8-mixed", linear=chosen, others=others, why=why)


def _bits(bits: int) -> Callable[[State], Forms]:
    def forms(state: State) -> Forms:
        yield Recipe(f"weights-{bits}bit", bits=bits)

    return forms


def _static(name: str, method: Method, *, per_channel: bool = True, around: bool = True) -> Callable[[State], Forms]:
    def forms(state: State) -> Forms:
        yield Recipe(name, static=state.static(method, per_channel=per_channel, around=around))

    return forms


def _static_mixed(state: State) -> Forms:
    """Bisect how many convolutions, the most sensitive first, stay in fp32."""
    ranked = state.ranked()
    low, high = 0, len(ranked)  # so many do not suffice; all of them do, and are no form
    for _ in range(TURNS):
        if high - low <= 1:
            return
        middle = max(low + 1, min((low + high) // 2, 2 * low + 2))  # few first: each costs speed
        why = tuple(f"{name}: alone it moves the outputs by {error:.2%}" for name, error in ranked[:middle])
        static = state.static("minmax", per_channel=True, around=True, keep=[name for name, _ in ranked[:middle]])
        yield Recipe("static-mixed", static=static, why=why)
        low, high = (low, middle) if _holds(state) else (middle, high)


def _both(state: State) -> Forms:
    linear, static = (max(_gaining(state, g), key=lambda one: one.measured.speedup) for g in ("linear", "static"))
    why = (*linear.recipe.why, *static.recipe.why)
    taken = linear.recipe
    yield Recipe("int8-both", taken.linear, taken.others, static.recipe.static, taken.bits, why=why)


TABLE: tuple[Row, ...] = (
    #   name                      when it is tried         how                                      group
    Row("int8-dynamic",           _has_products,           _plain,                                  "linear"),
    Row("int8-mixed",             _product_fails,          _mixed,                                  "linear"),
    Row("weights-8bit",           _no_product_passes,      _bits(8),                                "linear"),
    Row("weights-4bit",           _no_product_passes,      _bits(4),                                "linear"),
    Row("static-minmax",          _has_convolutions,       _static("static-minmax", "minmax"),      "static"),
    Row("static-entropy",         _no_static_is_accurate,  _static("static-entropy", "entropy"),    "static"),
    Row("static-percentile",      _no_static_is_accurate,  _static("static-percentile", "percentile"), "static"),
    Row("static-mixed",           _no_static_is_accurate,  _static_mixed,                           "static"),
    Row("static-convolutions",    _no_static_passes,
        _static("static-convolutions", "minmax", around=False),                                     "static"),
    Row("static-tensor",          _no_static_passes,
        _static("static-tensor", "minmax", per_channel=False),                                      "static"),
    Row("int8-both",              _both_hold,              _both,                                   "both"),
    Row("fp16",                   _half_may_win,           _half,                                   "half"),
)  # fmt: skip
GROUPS = {row.name: row.group for row in TABLE}
