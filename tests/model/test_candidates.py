"""The table: its order, when a row is tried, and how a row finds its form from what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from prefork.model.calibrate import Method
from prefork.model.candidates import TABLE, Row, Tried
from prefork.model.gate import Gate, Measured, Timing, inaccurate, refusal
from prefork.model.linear import Treatment
from prefork.model.qlinear import Static
from prefork.model.recipe import Recipe
from prefork.model.sensitivity import Product

ROWS = {row.name: row for row in TABLE}
GATE = Gate()


@dataclass
class Known:
    """A State of plain values: what a study of a model would have found."""

    linear_kinds: int = 3
    reachable: int = 3
    others: bool = False
    convolutions: Sequence[str] = ("c1", "c2", "c3", "c4", "c5", "c6")
    calibrated: bool = True
    half_kernels: bool = True
    tried: list[Tried] = field(default_factory=list)
    errors: tuple[float, ...] = (0.4, 0.3, 0.2, 0.1)

    def products(self) -> Sequence[Product]:
        return [
            Product(f"n{i}", f"y{i}", (100, 100), (Treatment("int8", None, e), Treatment("rows", None, e / 100)))
            for i, e in enumerate(self.errors)
        ]

    def static(self, method: Method, *, per_channel: bool, around: bool, keep: Sequence[str] = ()) -> Static:
        return Static({}, per_channel, tuple(keep), around)

    def ranked(self) -> Sequence[tuple[str, float]]:
        return [(name, 1 / rank) for rank, name in enumerate(self.convolutions, 1)]

    def add(self, row: str, recipe: Recipe, delta: float, ratio: float = 2.0) -> Measured:
        timings = () if delta > GATE.budget else (Timing("1", 1.0, 1 / ratio, ratio),)
        measured = Measured(recipe.name, 1, delta, 1 - delta, timings)
        self.tried.append(Tried(row, recipe, measured, refusal(measured, GATE), not inaccurate(measured, GATE.budget)))
        return measured


def reasons(state: Known) -> dict[str, str]:
    return {row.name: row.when(state) for row in TABLE}


def walk(row: Row, state: Known, worst: float) -> list[Recipe]:
    """The recipes of a row on a model whose loss is that of its worst node, and of 1 for each static convolution."""
    recipes = []
    forms = row.forms(state)
    recipe: Recipe | None = next(forms, None)
    while recipe is not None:
        recipes.append(recipe)
        errors = [treatment.error for treatment in (recipe.linear or {}).values()]
        delta = 0.0 if max(errors, default=0.0) <= worst else 1.0
        if recipe.static is not None:
            delta = 0.0 if len(recipe.static.keep) >= worst else 1.0
        measured = state.add(row.name, recipe, delta)
        try:
            recipe = forms.send(measured)
        except StopIteration:
            recipe = None
    return recipes


def test_the_order_is_cheap_forms_first_and_both_last() -> None:
    assert [row.name for row in TABLE] == [
        "int8-dynamic", "int8-mixed", "weights-8bit", "weights-4bit",
        "static-minmax", "static-entropy", "static-percentile", "static-mixed", "static-convolutions", "static-tensor",
        "int8-both", "fp16",
    ]  # fmt: skip


def test_at_first_every_row_whose_operators_are_there_is_open() -> None:
    assert {name for name, reason in reasons(Known()).items() if reason} == {"int8-both"}
    products = reasons(Known(convolutions=()))
    assert products["static-minmax"] == products["static-mixed"] == "no convolution with constant weights"
    convolutions = reasons(Known(linear_kinds=0, reachable=0))
    assert convolutions["int8-dynamic"].startswith("no matrix product")
    assert convolutions["static-minmax"] == ""
    assert reasons(Known(calibrated=False))["static-minmax"] == "static ranges need real inputs: give --calibration"
    only_lstm = reasons(Known(reachable=0, others=True))
    assert only_lstm["int8-dynamic"] == ""
    assert only_lstm["int8-mixed"] == "no matrix product in the main graph"


@pytest.mark.parametrize(
    ("row", "delta", "ratio", "closed"),
    [
        ("int8-dynamic", 0.001, 3.0, {"int8-mixed", "weights-8bit", "weights-4bit", "int8-both", "fp16"}),
        ("int8-dynamic", 0.001, 1.0, {"int8-mixed", "int8-both"}),
        ("int8-dynamic", 0.1, 3.0, {"int8-both"}),
        ("static-minmax", 0.001, 2.0,
         {"static-entropy", "static-percentile", "static-mixed", "static-convolutions", "static-tensor", "int8-both",
          "fp16"}),
        ("static-minmax", 0.001, 0.5, {"static-entropy", "static-percentile", "static-mixed", "int8-both"}),
        ("static-minmax", 0.1, 2.0, {"int8-both"}),
    ],
)  # fmt: skip
def test_what_was_measured_closes_rows(row: str, delta: float, ratio: float, closed: set[str]) -> None:
    state = Known()
    state.add(row, Recipe(row), delta, ratio)
    assert {name for name, reason in reasons(state).items() if reason} == closed


def test_half_precision_is_tried_where_it_may_win() -> None:
    assert ROWS["fp16"].when(Known()) == ""
    assert ROWS["fp16"].when(Known(half_kernels=False)) == ""
    assert "as fp32 on this processor" in ROWS["fp16"].when(Known(half_kernels=False, calibrated=False))
    assert ROWS["fp16"].when(Known(linear_kinds=0, convolutions=())) == "no matrix product or convolution"
    state = Known()
    state.add("int8-dynamic", Recipe("int8-dynamic", linear={}), 0.001, 1.9)
    assert ROWS["fp16"].when(state) == ""
    state.add("int8-mixed", Recipe("int8-mixed", linear={}), 0.001, 2.1)
    assert ROWS["fp16"].when(state).startswith("not needed: a form that passes is 2.10 times as fast")


def test_both_takes_the_fastest_of_each_side() -> None:
    state = Known()
    state.add("int8-dynamic", Recipe("int8-dynamic", linear={}), 0.001, 2.0)
    state.add("static-minmax", Recipe("static-minmax", static=Static({})), 0.001, 1.5)
    state.add("static-tensor", Recipe("static-tensor", static=Static({}, per_channel=False)), 0.001, 1.7)
    assert ROWS["int8-both"].when(state) == ""
    (recipe,) = walk(ROWS["int8-both"], state, 9)
    assert recipe.linear == {}
    assert recipe.static is not None
    assert not recipe.static.per_channel


@pytest.mark.parametrize(("worst", "plain"), [(0.05, 0), (0.1, 1), (0.25, 2), (0.3, 3), (0.35, 3)])
def test_mixed_finds_the_largest_tolerance_that_holds(worst: float, plain: int) -> None:
    state = Known()
    walk(ROWS["int8-mixed"], state, worst)
    best = max((one for one in state.tried if one.accurate), key=lambda one: _plain(one.recipe))
    assert _plain(best.recipe) == plain
    assert len(state.tried) <= 5


def _plain(recipe: Recipe) -> int:
    return sum(treatment.kind == "int8" for treatment in (recipe.linear or {}).values())


def test_mixed_tries_without_what_it_cannot_measure_when_nothing_else_holds() -> None:
    state = Known(others=True)
    recipes = walk(ROWS["int8-mixed"], state, -1.0)
    assert {recipe.others for recipe in recipes} == {True, False}
    assert not any(recipe.others for recipe in recipes[len(recipes) // 2 :])
    holds = Known(others=True)
    assert all(recipe.others for recipe in walk(ROWS["int8-mixed"], holds, 0.2))


def test_mixed_says_which_nodes_stay_and_why() -> None:
    first = next(ROWS["int8-mixed"].forms(Known(errors=(0.001, 900.0))))
    assert first.why == ("n1: int8 here moves the outputs by 900.00%",)


@pytest.mark.parametrize(("needed", "kept"), [(1, 1), (2, 2), (3, 3), (5, 5)])
def test_static_mixed_keeps_as_few_convolutions_as_needed(needed: int, kept: int) -> None:
    state = Known()
    walk(ROWS["static-mixed"], state, needed)
    statics = [one.recipe.static for one in state.tried if one.accurate]
    assert min(len(static.keep) for static in statics if static is not None) == kept
    assert all(static is not None and "c1" in static.keep for static in statics)
