"""The embedded demo model: a digits classifier with real weights and the held-out images that it is measured on.

Any process may ask `model_path`, the master too: numpy is imported only by `evaluation`. How the two files were made is
in train.py, which nothing imports at run time.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_HERE = Path(__file__).parent


def model_path() -> Path:
    """digits.onnx: `image` FP32 [batch, 64] (8x8 pixels of 0..16, row by row) -> `probabilities` FP32 [batch, 10] and
    `label` INT64 [batch]. Its accuracy on `evaluation` is in its metadata under `accuracy`."""
    return _HERE / "digits.onnx"


def evaluation_path() -> Path:
    """digits-eval.npz: `image` and `labels`, as `evaluation` gives them; a file for the key eval."""
    return _HERE / "digits-eval.npz"


def evaluation() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """The images (uint8 [n, 64], 0..16) and labels (int64 [n], 0..9) that the model was never trained on."""
    import numpy as np  # the master imports this module

    with np.load(evaluation_path()) as data:
        return data["image"], data["labels"].astype(np.int64)
