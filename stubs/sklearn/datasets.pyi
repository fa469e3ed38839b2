from typing import Any, Literal

import numpy.typing as npt

class Bunch:
    data: npt.NDArray[Any]
    target: npt.NDArray[Any]
    target_names: npt.NDArray[Any]

def load_digits(*, return_X_y: Literal[True]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]: ...
def load_wine() -> Bunch: ...
def load_breast_cancer() -> Bunch: ...
