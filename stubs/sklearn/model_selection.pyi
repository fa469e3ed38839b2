from typing import Any

import numpy.typing as npt

def train_test_split(
    *arrays: npt.NDArray[Any], test_size: float, random_state: int, stratify: npt.NDArray[Any]
) -> list[npt.NDArray[Any]]: ...
