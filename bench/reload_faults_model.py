"""A reload that cannot be: a broken new model, no room for its segment. Part of bench.reload_faults."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import onnx

from bench.scene import Scene
from prefork.demo import model_path

TEMPFAIL = 75  # sysexits.h: no room


def _noise(path: Path) -> None:
    path.write_bytes(random.Random(1).randbytes(20_000))


def _opset(path: Path) -> None:
    model = onnx.load(str(model_path()))
    model.opset_import[0].version = 9999
    path.write_bytes(model.SerializeToString())


def _missing(path: Path) -> None:
    path.unlink()


def _signature(path: Path) -> None:
    model = onnx.load(str(model_path()))
    old, new = model.graph.input[0].name, "picture"
    model.graph.input[0].name = new
    for node in model.graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
    path.write_bytes(model.SerializeToString())


BROKEN: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "not ONNX": (_noise, ("digits",)),
    "unknown opset": (_opset, ("digits", "9999")),
    "file missing": (_missing, ("digits.onnx",)),
    "other signature": (_signature, ("digits", "picture")),
}


def broken(spoil: Callable[[Path], None], words: tuple[str, ...], place: Path) -> list[str]:
    """The file is spoilt as `spoil` does; each of `words` must be in what the command says."""
    with Scene(place) as scene:
        fresh = place / "fresh"
        fresh.write_bytes(b"")
        spoil(fresh)
        if fresh.exists():
            fresh.replace(scene.live)
        else:
            scene.live.unlink()
        code, said = scene.operator.ctl("reload")
        if not code:
            return [f"exit 0, generation {scene.generation()} serves it"]
        problems = [f"{word!r} is not in: {said}" for word in words if word not in said]
        return problems + scene.untouched() + scene.lost()


def no_room(place: Path) -> list[str]:
    """/dev/shm has room for one generation and a half."""
    with Scene(place / "size") as scene:
        size = int(scene.server.status()["models"][0]["segment"]["size"])
        problems = scene.lost()
    with Scene(place / "small", size=f"{size * 3 // 2 // 1024}k") as scene:
        code, said = scene.operator.ctl("reload")
        problems += [] if code else ["exit 0"]
        problems += [] if "room" in said else [f"'room' is not in: {said}"]
        return problems + scene.untouched(again=False) + scene.lost()
