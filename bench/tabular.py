"""Classifiers on scikit-learn's bundled tables, trained on the spot and converted by skl2onnx with its ZipMap kept.

Their second output is a sequence of maps (label -> probability), which no tensor-only server can express; the labels of
`sklearn-wine` are strings. A quarter of each table is held out and never trained on. Needs the test extra.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto
from skl2onnx import to_onnx
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

Array = npt.NDArray[Any]

NAMES = ("sklearn-digits", "sklearn-wine", "sklearn-breast-cancer")
OPSETS = {"": 17, "ai.onnx.ml": 3}


@dataclass(frozen=True, slots=True)
class Fitted:
    """A classifier and the part of its table that it has not seen: features float32 [n, d], labels int64 or str [n]."""

    classifier: Pipeline
    features: Array
    labels: Array


def table(name: str) -> tuple[Array, Array]:
    """Features float32 [n, d] and labels [n] of one of NAMES; raises KeyError for another name."""
    if name == "sklearn-digits":
        features, labels = load_digits(return_X_y=True)
    elif name == "sklearn-wine":
        wine = load_wine()
        features, labels = wine.data, wine.target_names[wine.target]
    elif name == "sklearn-breast-cancer":
        cancer = load_breast_cancer()
        features, labels = cancer.data, cancer.target
    else:
        raise KeyError(name)
    return features.astype(np.float32), labels


def fit(name: str) -> Fitted:
    features, labels = table(name)
    parts = train_test_split(features, labels, test_size=0.25, random_state=0, stratify=labels)
    train_x, test_x, train_y, test_y = parts
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)).fit(train_x, train_y)
    return Fitted(classifier, test_x, test_y)


def export(fitted: Fitted) -> ModelProto:
    """Input `X` FP32 [None, d]; outputs `output_label` [n] and `output_probability`, a sequence of n maps."""
    return to_onnx(fitted.classifier, fitted.features[:1], target_opset=OPSETS)
