"""Models that cannot be served: the start ends with the reason and its code, and nothing is left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from prefork.client import Client
from prefork.demo import model_path
from tests.roles.models import large, unknown_operator
from tests.roles.server import Server
from tests.roles.wire import IMAGE


def missing(folder: Path) -> Path:
    return folder / "nowhere.onnx"


def empty(folder: Path) -> Path:
    (folder / "empty.onnx").touch()
    return folder / "empty.onnx"


def truncated(folder: Path) -> Path:
    data = model_path().read_bytes()
    (folder / "truncated.onnx").write_bytes(data[: len(data) // 2])
    return folder / "truncated.onnx"


def noise(folder: Path) -> Path:
    (folder / "noise.onnx").write_bytes(np.random.default_rng(0).bytes(100_000))
    return folder / "noise.onnx"


def a_folder(folder: Path) -> Path:
    (folder / "folder.onnx").mkdir()
    return folder / "folder.onnx"


WRONG: list[tuple[Callable[[Path], Path], str]] = [
    (missing, "No such file"),
    (empty, "empty"),
    (truncated, "truncated.onnx"),
    (noise, "noise.onnx"),
    (a_folder, "folder.onnx"),
    (unknown_operator, "Frobnicate"),
]


BAD_PATHS = (missing, empty, a_folder)  # seen by the configuration before any loader runs


@pytest.mark.parametrize(("make", "word"), WRONG, ids=[make.__name__ for make, _ in WRONG])
def test_a_model_that_cannot_be_served(place: Path, make: Callable[[Path], Path], word: str) -> None:
    server = Server(place, "--workers", "1", "--model", f"m={make(place)}")
    code = server.run_to_end()
    said = (place / "stderr").read_text()
    assert said.startswith("prefork-serve: error:") and said.count("\n") == 1, said
    assert word.lower() in said.lower(), said
    assert code == (78 if make in BAD_PATHS else 65), said
    assert not server.runtime.exists() or server.leftovers() == []


def test_the_second_model_is_named_and_the_first_leaves_nothing(place: Path) -> None:
    server = Server(place, "--workers", "1", "--model", f"good={large(place)}", "--model", f"bad={noise(place)}")
    assert server.run_to_end() == 65
    assert "model 'bad'" in (place / "stderr").read_text()
    assert server.leftovers() == []


def test_positional_and_named_models_are_served_together(place: Path) -> None:
    with Server(place, "--workers", "1", str(large(place)), "--model", f"demo={model_path()}") as server:
        with Client(server.address) as client:
            assert client.infer("large", {"n": np.array([3])})["y"].tolist() == [1, 1, 1]
            assert client.infer("demo", {"image": IMAGE})["label"].shape == (1,)
        assert {row["name"] for row in server.status()["models"]} == {"large", "demo"}


def test_a_large_model_is_served(place: Path, models_dir: Path) -> None:
    ids = np.array([[101, 7592, 2088, 102]], np.int64)
    inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    with Server(place, "--workers", "2", str(models_dir / "minilm.onnx")) as server, Client(server.address) as client:
        found = client.infer("minilm", inputs)["sentence_embedding"]
        assert found.shape == (1, 384) and abs(float(np.linalg.norm(found)) - 1) < 1e-3
