"""bench.models without a network: the tabular models, whole files, and clear refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from bench import models, tabular


def run(path: Path, features: Any) -> tuple[Any, Any]:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    label, probability = session.run(None, {"X": features})
    return label, probability


@pytest.mark.parametrize("name", models.TABULAR)
def test_tabular(name: str, tmp_path: Path) -> None:
    (path,) = models.fetch(tmp_path, [name])
    fitted = tabular.fit(name)
    label, probability = run(path, fitted.features)
    assert label.tolist() == fitted.classifier.predict(fitted.features).tolist()
    assert np.mean(label == fitted.labels) > 0.93
    assert isinstance(probability, list) and all(isinstance(row, dict) for row in probability)
    table = np.asarray([list(row.values()) for row in probability])
    assert np.allclose(table, fitted.classifier.predict_proba(fitted.features), atol=1e-4)
    assert isinstance(next(iter(probability[0])), str if name == "sklearn-wine" else int)


def test_names_agree() -> None:
    assert models.TABULAR == tabular.NAMES


def test_a_file_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "sklearn-wine.onnx").write_bytes(b"mine")
    assert models.fetch(tmp_path, ["sklearn-wine"]) == [tmp_path / "sklearn-wine.onnx"]
    assert (tmp_path / "sklearn-wine.onnx").read_bytes() == b"mine"


def test_overlapping_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.models", str(tmp_path), "sklearn-wine"]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    outputs = [child.communicate()[0] for child in children]
    assert [child.returncode for child in children] == [0, 0] and all(outputs)
    assert [path.name for path in tmp_path.iterdir()] == ["sklearn-wine.onnx"]
    assert len(run(tmp_path / "sklearn-wine.onnx", tabular.fit("sklearn-wine").features)[0])


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").mkdir()
    with pytest.raises(OSError):
        models.write(tmp_path / "model.onnx", b"bytes")
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_unknown_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert models.main([str(tmp_path), "no-such"]) == 69
    assert "unknown model 'no-such'; expected one of ppocr4-det" in capsys.readouterr().err


def test_pip_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    for name in ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    assert models.main([str(tmp_path), "silero"]) == 69
    assert "pip cannot download silero-vad==6.2.3: ERROR" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
