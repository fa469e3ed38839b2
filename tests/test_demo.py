"""The demo model is what its metadata claims, and its training can be repeated."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from prefork.demo import evaluation, model_path
from prefork.demo.train import split, train


def session(path: Path) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def accuracy(model: Any) -> float:
    images, labels = evaluation()
    (predicted,) = model.run(["label"], {"image": images.astype(np.float32)})
    return float(np.mean(predicted == labels))


def claimed(model: Any) -> float:
    return float(model.get_modelmeta().custom_metadata_map["accuracy"])


def test_claimed_accuracy_is_true() -> None:
    model = session(model_path())
    assert accuracy(model) == pytest.approx(claimed(model), abs=1e-6)
    assert claimed(model) > 0.97


def test_interface() -> None:
    model = session(model_path())
    assert [(i.name, i.type, i.shape) for i in model.get_inputs()] == [("image", "tensor(float)", ["batch", 64])]
    assert [(o.name, o.type, o.shape) for o in model.get_outputs()] == [
        ("probabilities", "tensor(float)", ["batch", 10]),
        ("label", "tensor(int64)", ["batch"]),
    ]
    images, _ = evaluation()
    probabilities, label = model.run(None, {"image": images.astype(np.float32)})
    assert np.allclose(probabilities.sum(axis=1), 1, atol=1e-5)
    assert (probabilities.argmax(axis=1) == label).all()


def test_evaluation_set_is_the_held_out_part() -> None:
    images, labels = evaluation()
    digits = split()
    assert images.dtype == np.uint8 and images.max() == 16 and images.shape == (len(labels), 64)
    assert (images == digits.test_images).all() and (labels == digits.test_labels).all()
    trained_on = {image.tobytes() for image in digits.train_images}
    assert not any(image.tobytes() in trained_on for image in images)


def test_training_again_gives_the_same(tmp_path: Path) -> None:
    again = train(tmp_path)
    model = session(tmp_path / "digits.onnx")
    assert accuracy(model) == pytest.approx(again, abs=1e-6)
    # another BLAS may round otherwise: allow four of the 450 images to fall differently
    assert again == pytest.approx(claimed(session(model_path())), abs=4 / 450)
    with np.load(tmp_path / "digits-eval.npz") as written:
        assert (written["image"] == evaluation()[0]).all()


def test_small() -> None:
    assert model_path().stat().st_size + model_path().with_name("digits-eval.npz").stat().st_size < 100_000


def test_asking_for_the_path_imports_no_numpy() -> None:
    code = "import sys, prefork.demo as d; print(d.model_path().exists(), 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
