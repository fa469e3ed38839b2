"""The architecture as a test: who may import whom, and how large anything may get. The table is the law; see DESIGN."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "prefork"

# What of ours a room (a folder, or a file at the top) may import besides itself. `a.b` allows that file only.
LEAVES = {"errors", "log", "options", "config"}
BOTH_SIDES = {"channel", "jobs", "background"}
MASTER = {
    *LEAVES, *BOTH_SIDES, "notify", "cpus", "placement", "listener", "control", "shm",
    "child", "slots", "fleet", "nursery", "generation", "house", "status", "control_server", "workdir", "reporting",
    "change", "turnover", "canary", "recycle", "desk", "watch", "effective",
    "activation", "herald", "watchdog", "supervisor", "estate", "succession", "signals", "compat",
    "preflight", "oom",
}  # fmt: skip
SERVING = {"errors", "tensor", "value", "codec", "model.session", "observe", "shm.scoreboard", "shm.words", "shm.arena"}
WORKER = {*LEAVES, *BOTH_SIDES, "placement", "attach", "shm", "serving", "codec", "value", "tensor", "model.session",
          "model.manifest", "model.warmup"}  # fmt: skip
WALLS: dict[str, set[str]] = {
    "errors": set(),
    "log": {"logsink"},
    "logsink": set(),
    "notify": set(),
    "cpus": {"cgroups"},
    "cgroups": set(),
    "facts": {"cgroups", "shm"},
    "needs": {"config", "cpus"},
    "preflight": {"errors", "config", "log", "facts", "needs"},
    "oom": {"child", "cgroups", "facts"},
    "placement": set(),
    "demo": set(),
    "channel": set(),
    "compat": set(),
    "background": set(),
    "ctlview": {"ctlchange"},
    "ctlchange": {"errors"},
    "tensor": {"errors"},
    "value": {"errors", "tensor"},
    "control": {"errors"},
    "options": {"errors"},
    "config": {"errors", "options"},
    "listener": {"errors", "options"},
    "layers": {"errors", "options", "config", "demo"},
    "effective": {"options", "config"},
    "shm": {"errors"},
    "codec": {"errors", "tensor", "value"},
    "model": {"errors", "tensor", "value"},
    "client": {"errors", "tensor", "value", "codec"},
    "serving": SERVING,
    "jobs": {"config", "log", "placement", "shm"},
    "loader": {*LEAVES, *BOTH_SIDES, "compat", "shm", "cache", "cache_key", "digests", "preparation", "handler", "bar"},
    "preparation": {*LEAVES, *BOTH_SIDES, "tensor", "shm", "model", "handler", "calibration"},
    "handler": {"errors"},
    "calibration": {"errors", "tensor", "handler"},
    "bar": set(),
    "cache": {"errors", "log", "shm.layout"},
    "cache_key": {"options", "config", "cache", "handler", "model.processor", "model.version", "shm.layout"},
    "digests": set(),
    "ahead": MASTER,
    "reportview": {"ctlview", "model.report"},
    "worker": WORKER,
    "checking": {"errors", "shm", "child"},
    "attach": {*WORKER, "checking"},
    "template": {*WORKER, "worker", "child"},
    "observe": {"errors", "shm.masterpage", "shm.scoreboard", "shm.words"},
    "telemetry": {"config", "errors", "log", *BOTH_SIDES, "shm", "observe"},
    **dict.fromkeys(
        (
            "master",
            "child",
            "slots",
            "fleet",
            "nursery",
            "generation",
            "house",
            "status",
            "control_server",
            "workdir",
            "check",
            "change",
            "turnover",
            "canary",
            "recycle",
            "desk",
            "watch",
            "supervisor",
            "succession",
            "signals",
        ),
        MASTER,
    ),
    "reporting": MASTER,
    "opening": {*MASTER, "master"},
    "estate": {*MASTER, "model.version"},
    "activation": {"errors", "listener"},
    "herald": {"notify", "child", "slots", "shm"},
    "watchdog": {"log", "notify", "slots", "shm"},
    "cli": {"errors", "options", "config", "layers", "effective", "check", "ahead", "reportview", "opening", "estate"},
    "__main__": {"cli"},
    "ctl": {
        "errors",
        "layers",
        "control",
        "ctlview",
        "ctlchange",
        "ctlinfer",
        "reportview",
        "shm.sweep",
        "shm.segment",
    },
    "ctlinfer": {"errors", "tensor", "value", "client", "codec.message"},
}
# What of others' a room may never import, also inside a function.
NUMERIC = {
    "numpy", "ml_dtypes", "onnx", "onnxruntime", "uvloop", "msgpack", "google", "orjson", "prometheus_client",
    "rich",
}  # fmt: skip
SANS_IO = {"socket", "select", "selectors", "asyncio", "threading", "time", "os", "subprocess"}
NEVER: dict[str, set[str]] = {
    "codec": SANS_IO,
    "shm": NUMERIC,
    "model": {"socket", "asyncio", "uvloop"},
    "serving": {"onnx"},
    "worker": {"onnx"},
    "attach": {"onnx"},
    "template": {"onnx", "uvloop", "asyncio"},
    "loader": NUMERIC,
    "telemetry": NUMERIC - {"prometheus_client"},
    "observe": (NUMERIC | {"socket"}) - {"prometheus_client"},
    "options": {"os", "socket"},
    "ctlview": {"os", "socket"},
}
# Roles, and what nothing that they can reach may import.
REACH = {
    "master": NUMERIC,
    "opening": NUMERIC,
    "check": NUMERIC,
    "ahead": NUMERIC,
    "reportview": NUMERIC,
    "cache_key": NUMERIC,
    "handler": NUMERIC,
    "digests": NUMERIC,
    "worker": {"onnx", "sklearn", "prometheus_client", "rich"},
    "template": {"onnx", "rich"},
    "telemetry": NUMERIC - {"prometheus_client"},
    "client": {"onnx", "onnxruntime", "rich"},
}
ONLY_DYNAMIC_IMPORT = "child"
MAX_FILE, MAX_FUNCTION = 400, 60


@dataclass(frozen=True)
class Module:
    name: str  # without the package: "shm.layout"
    path: Path
    ours: frozenset[str]
    others: frozenset[str]

    @property
    def room(self) -> str:
        return self.name.partition(".")[0]


def load_modules() -> dict[str, Module]:
    paths = {_name(path): path for path in PACKAGE.rglob("*.py")}
    found = {}
    for name, path in paths.items():
        ours: set[str] = set()
        others: set[str] = set()
        for imported in _imports(ast.parse(path.read_text()), set(paths)):
            if imported == "prefork" or imported.startswith("prefork."):
                ours.add(imported.removeprefix("prefork").lstrip("."))
            else:
                others.add(imported)
        found[name] = Module(name, path, frozenset(ours - {"", name}), frozenset(others))
    return found


def _name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(tree: ast.Module, known: set[str]) -> Iterator[str]:
    """Dotted names of all imports, those inside functions too, but for those that only a type checker sees."""
    unseen = {id(inner) for node in ast.walk(tree) if _for_types(node) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in unseen:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "relative imports hide the room"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner.removeprefix("prefork.") in known else node.module


def _for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


MODULES = load_modules()
SOURCES = sorted(path for folder in ("prefork", "tests", "bench", "tools") for path in (ROOT / folder).rglob("*.py"))


def allowed(imported: str, may: Iterable[str]) -> bool:
    return any(imported == name or imported.startswith(f"{name}.") for name in may)


def reach(start: str) -> dict[str, str]:
    """Every module that importing room or file `start` can come to, with the one that imports it."""
    found = {name: "" for name in MODULES if allowed(name, [start])}
    queue = list(found)
    while queue:
        name = queue.pop()
        for imported in MODULES[name].ours:
            if imported not in found:
                found[imported] = name
                queue.append(imported)
    return found


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_stay_within_the_walls(name: str) -> None:
    module = MODULES[name]
    if not name:
        assert not module.ours
        return
    assert module.room in WALLS, f"{name}: the table of walls has no room {module.room!r}"
    over = {imported for imported in module.ours if not allowed(imported, WALLS[module.room] | {module.room})}
    assert not over, f"{name} may not import {sorted(over)}"
    never = {imported for imported in module.others if allowed(imported, NEVER.get(module.room, set()))}
    assert not never, f"{name} may never import {sorted(never)}"


def test_nobody_imports_the_entry_points() -> None:
    nobody: set[str] = set()
    doors = {
        "cli": {"__main__"}, "opening": {"cli"}, "master": {"opening"}, "ctl": nobody, "worker": {"template"},
        "loader": nobody, "template": nobody, "telemetry": nobody, "bar": {"loader"},
    }  # fmt: skip
    for door, may in doors.items():
        assert {name for name, module in MODULES.items() if door in module.ours} <= may, door


def test_no_import_circle() -> None:
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"import circle: {' -> '.join([*trail[trail.index(name) :], name])}"
        if name not in done:
            for imported in sorted(MODULES[name].ours):
                visit(imported, (*trail, name))
            done.add(name)

    for name in sorted(MODULES):
        visit(name, ())


@pytest.mark.parametrize("start", sorted(REACH))
def test_a_role_reaches_no_library_that_it_must_not(start: str) -> None:
    assert any(allowed(name, [start]) for name in MODULES)
    for name, through in reach(start).items():
        bad = {imported for imported in MODULES[name].others if allowed(imported, REACH[start])}
        assert not bad, f"{start} reaches {name} (imported by {through or 'the command'}), which imports {sorted(bad)}"


def test_only_one_file_imports_by_name() -> None:
    dynamic = {
        name
        for name, module in MODULES.items()
        if "importlib" in module.others or re.search(r"__import__|import_module|runpy", module.path.read_text())
    }
    assert dynamic == {ONLY_DYNAMIC_IMPORT}


def test_a_real_master_has_no_numeric_library_and_one_thread() -> None:
    code = (
        "import os, sys, prefork.cli, prefork.check, prefork.master\n"
        "print(sorted(sys.modules.keys() & set(sys.argv[1:])), len(os.listdir('/proc/self/task')))"
    )
    ran = subprocess.run([sys.executable, "-c", code, *NUMERIC], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == ("[] 1\n", "")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sizes_and_habits(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    assert len(text.splitlines()) <= MAX_FILE
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= MAX_FUNCTION, f"{node.name} has {lines} lines"
    assert path.name not in ("utils.py", "util.py", "helpers.py", "common.py"), "a name that says nothing"
    assert not text.strip() or ast.get_docstring(tree), "a file opens with its law"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_excused_and_tests_do_not_wait_on_the_clock(path: Path) -> None:
    text = path.read_text()
    for excuse in ("no" + "qa", "type: " + "ignore", "ruff: " + "ignore", "mypy: " + "ignore"):
        assert f"# {excuse}" not in text
    if path.is_relative_to(ROOT / "tests"):
        assert not re.search(r"\bsleep" + r"\(", text)
