"""Model files: what is read from good ones, and what is said of bad ones."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from prefork.errors import ModelError
from prefork.model import external
from prefork.model.repository import read_model
from tests.model import small


def save_external(folder: Path, location: str = "m.data") -> Path:
    path = folder / "m.onnx"
    onnx.save_model(small.mlp(), path, save_as_external_data=True, location=location, size_threshold=1024)
    return path


def test_a_plain_file_is_described(tmp_path: Path) -> None:
    path = small.save(small.mlp(), tmp_path / "m.onnx")
    source = read_model(path)
    assert source.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert source.nbytes == path.stat().st_size
    assert source.weights == {"w1": 256 * 512 * 4, "w2": 64 * 512 * 4, "c": 64 * 4}
    assert source.complaint == ""
    assert source.skeleton.ByteSize() < 2000
    assert [n.op_type for n in source.skeleton.graph.node] == ["MatMul", "Relu", "Gemm"]


def test_weights_in_constant_nodes_are_counted(tmp_path: Path) -> None:
    source = read_model(small.save(small.convolution(), tmp_path / "m.onnx"))
    assert source.weights == {"w1": 32 * 27 * 4, "w2": 32 * 32 * 4}


def test_external_data_is_hashed_and_not_loaded(tmp_path: Path) -> None:
    path = save_external(tmp_path)
    source = read_model(path)
    assert [file.name for file, _ in source.files] == ["m.onnx", "m.data"]
    assert source.nbytes == sum(f.stat().st_size for f in tmp_path.iterdir())
    assert source.weights["w1"] == 256 * 512 * 4
    before = source.sha256
    with (tmp_path / "m.data").open("r+b") as file:
        file.write(b"\x01")
    assert read_model(path).sha256 != before
    with pytest.raises(ModelError, match=r"m\.data.*changed while it was being prepared"):
        source.check_unchanged()


@pytest.mark.parametrize("location", ["../m.data", "/etc/passwd", "sub/../../m.data", ""])
def test_external_data_outside_the_folder_is_refused(tmp_path: Path, location: str) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    path = save_external(folder)
    (tmp_path / "m.data").write_bytes((folder / "m.data").read_bytes())
    model = onnx.load(path, load_external_data=False)
    for tensor in external.initializers(model):
        if external.is_external(tensor):
            external.point(tensor, location, *external.span(tensor))
    small.save(model, path)
    with pytest.raises(ModelError, match="outside the model's folder"):
        read_model(path)


def test_external_data_behind_a_symbolic_link(tmp_path: Path) -> None:
    """Download caches keep links to the model and its data side by side; a link that leads elsewhere is refused."""
    blobs, shown = tmp_path / "blobs", tmp_path / "shown"
    blobs.mkdir()
    shown.mkdir()
    save_external(blobs)
    for name in ("m.onnx", "m.data"):
        (shown / name).symlink_to(blobs / name)
    assert read_model(shown / "m.onnx").nbytes == read_model(blobs / "m.onnx").nbytes
    (shown / "m.onnx").unlink()
    (shown / "m.onnx").write_bytes((blobs / "m.onnx").read_bytes())
    with pytest.raises(ModelError, match="outside the model's folder"):
        read_model(shown / "m.onnx")


def test_short_or_missing_external_data_is_refused(tmp_path: Path) -> None:
    path = save_external(tmp_path)
    os.truncate(tmp_path / "m.data", 1000)
    with pytest.raises(ModelError, match=r"takes bytes .* which has 1000"):
        read_model(path)
    (tmp_path / "m.data").unlink()
    with pytest.raises(ModelError, match=r"m\.data.*No such file"):
        read_model(path)


def test_every_truncation_is_refused_or_complained_of(tmp_path: Path) -> None:
    whole = small.mlp().SerializeToString()
    path = tmp_path / "m.onnx"
    for end in range(1, len(whole) - 1, 4999):
        path.write_bytes(whole[:end])
        with pytest.raises(ModelError, match=r"m\.onnx"):
            read_model(path)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is empty"),
        (b"hello, this is text\n" * 50, "not an ONNX model"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "not an ONNX model"),
        (b"\x18\x00\x00\x00ORTM" + bytes(64), r"\.ort format"),
        (b"PK\x03\x04" + bytes(200), "not an ONNX model"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=said):
        read_model(path)


def test_a_file_too_large_for_protobuf_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    with path.open("wb") as file:
        file.truncate(3 << 30)
    with pytest.raises(ModelError, match="must be saved as external data"):
        read_model(path)


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No such file"):
        read_model(tmp_path / "none.onnx")
    with pytest.raises(ModelError, match="found a directory"):
        read_model(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelError, match="found a pipe"):
        read_model(tmp_path / "pipe")


def test_the_checkers_complaint_is_kept(tmp_path: Path) -> None:
    node = helper.make_node("NoSuchOperator", ["x"], ["y"], "odd")
    model = small.model([node], [small.value("x", [1])], [small.value("y", [1])])
    source = read_model(small.save(model, tmp_path / "m.onnx"))
    assert "NoSuchOperator" in source.complaint


def test_raw_data_of_every_storage_form_is_measured() -> None:
    tensor = helper.make_tensor("i4", TensorProto.INT4, [3], [1, -2, 3])
    assert external.nbytes(tensor) == 2
    assert len(external.raw_bytes(tensor)) == 2
    assert external.nbytes(numpy_helper.from_array(np.array(["ab", "c"], object), "s")) == 3
