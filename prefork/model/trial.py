"""A form of a model opened exactly as a worker opens it, to be run and timed. Loader's process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prefork.model.session import Session
from prefork.tensor import Tensor
from prefork.value import Parameter, Value, flatten, unflatten


@dataclass(frozen=True, slots=True)
class Trial:
    """`nbytes`: of graph and weights as a segment would hold them."""

    session: Session
    nbytes: int

    def run(self, feeds: Mapping[str, Value]) -> list[Value]:
        """All outputs, in the model's order; raises as Session.run."""
        return run(self.session, feeds)

    def call(self, feeds: Mapping[str, Value]) -> Callable[[], object]:
        """The run alone, its inputs ready beforehand."""
        tensors, parameters = _request(feeds)
        return lambda: self.session.run(tensors, (), parameters)


def run(session: Session, feeds: Mapping[str, Value]) -> list[Value]:
    """All outputs of one run, in the model's order; raises as Session.run."""
    tensors, parameters = _request(feeds)
    values = unflatten(*session.run(tensors, (), parameters))
    return [values[spec.name] for spec in session.outputs]


def _request(feeds: Mapping[str, Value]) -> tuple[list[Tensor], dict[str, Parameter]]:
    tensors: list[Tensor] = []
    parameters: dict[str, Parameter] = {}
    for name, value in feeds.items():
        flatten(name, value, tensors, parameters)
    return tensors, parameters
