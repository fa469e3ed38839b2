"""How the demo model was made: `python -m prefork.demo.train [DIR]` writes digits.onnx and digits-eval.npz there.

Data: scikit-learn's bundled digits (1797 images; Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI
Machine Learning Repository, doi:10.24432/C50P49), a quarter of it held out, stratified by digit, and never trained on.
Network: 64 -> 128 ReLU -> 10 softmax; the weight decay is the best of 0.001, 0.01, 0.1 and 1 for that width in
five-fold cross-validation on the training part. Needs scikit-learn, which only the test extra brings; no serving
process imports this file.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

from prefork.demo import model_path

SEED = 0
PIXEL_MAX = 16.0
HIDDEN = 128
WEIGHT_DECAY = 0.1
EPOCHS = 200


@dataclass(frozen=True, slots=True)
class Digits:
    """Pixels uint8 [n, 64] of 0..16 and labels int64 [n], split into a training and a held-out part."""

    train_images: npt.NDArray[np.uint8]
    train_labels: npt.NDArray[np.int64]
    test_images: npt.NDArray[np.uint8]
    test_labels: npt.NDArray[np.int64]


def split() -> Digits:
    """The same split each time; the two parts share no sample."""
    pixels, labels = load_digits(return_X_y=True)
    images, labels = pixels.astype(np.uint8), labels.astype(np.int64)
    parts = train_test_split(images, labels, test_size=0.25, random_state=SEED, stratify=labels)
    train_images, test_images, train_labels, test_labels = parts
    return Digits(train_images, train_labels, test_images, test_labels)


def scale(images: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """What the graph does first: 0..16 -> 0..1."""
    return images.astype(np.float32) * np.float32(1 / PIXEL_MAX)


def fit(digits: Digits) -> MLPClassifier:
    network = MLPClassifier((HIDDEN,), alpha=WEIGHT_DECAY, max_iter=EPOCHS, n_iter_no_change=EPOCHS, random_state=SEED)
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # a fixed number of epochs never "converges"
        return network.fit(scale(digits.train_images), digits.train_labels)


def export(network: MLPClassifier, digits: Digits) -> onnx.ModelProto:
    """The fitted network as ONNX, its accuracy on the held-out part in the metadata."""
    weights: dict[str, Any] = {"scale": np.float32(1 / PIXEL_MAX)}
    for index, (w, b) in enumerate(zip(network.coefs_, network.intercepts_, strict=True)):
        weights |= {f"w{index}": w.astype(np.float32), f"b{index}": b.astype(np.float32)}
    nodes = [
        helper.make_node("Mul", ["image", "scale"], ["scaled"]),
        helper.make_node("Gemm", ["scaled", "w0", "b0"], ["pre"]),
        helper.make_node("Relu", ["pre"], ["hidden"]),
        helper.make_node("Gemm", ["hidden", "w1", "b1"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
        helper.make_node("ArgMax", ["logits"], ["label"], axis=1, keepdims=0),
    ]
    inputs = [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 64])]
    outputs = [
        helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["batch", 10]),
        helper.make_tensor_value_info("label", TensorProto.INT64, ["batch"]),
    ]
    initializers = [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "digits", inputs, outputs, initializers)
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, producer_name="prefork.demo.train"
    )
    helper.set_model_props(model, _properties(network, digits))
    onnx.checker.check_model(model, full_check=True)
    return model


def _properties(network: MLPClassifier, digits: Digits) -> dict[str, str]:
    predicted = network.predict(scale(digits.test_images))
    return {
        "accuracy": f"{np.mean(predicted == digits.test_labels):.6f}",
        "evaluated_on": f"{len(digits.test_labels)} held-out images, digits-eval.npz",
        "trained_on": f"{len(digits.train_labels)} images of scikit-learn's digits",
    }


def _save_evaluation(path: Path, digits: Digits) -> None:
    arrays: dict[str, Any] = {"image": digits.test_images, "labels": digits.test_labels.astype(np.uint8)}
    np.savez_compressed(path, **arrays)


def train(folder: Path) -> float:
    """Write both files into `folder`; returns the accuracy on the held-out part."""
    digits = split()
    model = export(fit(digits), digits)
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / "digits.onnx")
    _save_evaluation(folder / "digits-eval.npz", digits)
    return float({p.key: p.value for p in model.metadata_props}["accuracy"])


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else model_path().parent
    print(f"{target}: accuracy {train(target):.4f} on the held-out part")
