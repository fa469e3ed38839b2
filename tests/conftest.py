"""Settings that must stand before numpy or onnxruntime is imported by any test, and the folder of real models."""

import os

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # the import would start a thread that dials out
os.environ["OPENBLAS_NUM_THREADS"] = "1"

from pathlib import Path

import pytest

MODELS = "PREFORK_TEST_MODELS"


@pytest.fixture(scope="session")
def models_dir() -> Path:
    """The folder that PREFORK_TEST_MODELS names, with real models as NAME.onnx; skips without it."""
    folder = os.environ.get(MODELS)
    if not folder:
        pytest.skip(f"needs real models: set {MODELS} to a folder that holds them as NAME.onnx")
    return Path(folder)
