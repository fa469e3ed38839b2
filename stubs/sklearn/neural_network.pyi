from typing import Any, Self

import numpy.typing as npt

class MLPClassifier:
    coefs_: list[npt.NDArray[Any]]
    intercepts_: list[npt.NDArray[Any]]
    def __init__(
        self,
        hidden_layer_sizes: tuple[int, ...] = ...,
        *,
        alpha: float = ...,
        max_iter: int = ...,
        n_iter_no_change: int = ...,
        random_state: int | None = ...,
    ) -> None: ...
    def fit(self, X: npt.NDArray[Any], y: npt.NDArray[Any]) -> Self: ...
    def predict(self, X: npt.NDArray[Any]) -> npt.NDArray[Any]: ...
