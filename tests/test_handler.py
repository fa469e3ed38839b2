"""Importing the owner's code: what is taken, what is refused and how, and that it always comes to an end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefork import handler
from prefork.errors import ModelError
from tests.roles.server import REPOSITORY

GOOD = """
class Outer:
    class Inner:
        def calibration(self):
            yield {}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """On the search path; the modules in it are forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(folder: Path, text: str, name: str = "owners") -> Path:
    path = folder / f"{name}.py"
    path.write_text(text)
    return path


def refusal(reference: str) -> str:
    with pytest.raises(ModelError) as caught:
        handler.load(reference)
    assert caught.value.message.startswith(f"handler {reference!r}: ")
    return caught.value.message


def test_a_class_of_a_module_or_within_another(folder: Path) -> None:
    write(folder, GOOD)
    assert handler.load("owners:Outer.Inner").__name__ == "Inner"
    package = folder / "box" / "deep"
    package.mkdir(parents=True)
    (folder / "box" / "__init__.py").touch()
    write(package, GOOD, "inner")  # deep is a namespace
    assert handler.load("box.deep.inner:Outer.Inner").__module__ == "box.deep.inner"
    assert not list(folder.rglob("*.pyc"))


@pytest.mark.parametrize(
    ("text", "reference", "said"),
    [
        (GOOD, "nowhere:C", "expected a module 'nowhere' in the current directory ("),
        (GOOD, "owners.inner:C", "expected a module 'owners.inner' in the current directory ("),
        (
            "import nowhere_at_all",
            "owners:C",
            "importing module 'owners': ModuleNotFoundError: No module named 'nowhere",
        ),
        ("\nx = 1 / 0", "owners:C", "importing module 'owners': ZeroDivisionError: division by zero ("),
        ("class C(:", "owners:C", "importing module 'owners': SyntaxError: "),
        ("raise SystemExit(3)", "owners:C", "importing module 'owners': SystemExit: 3 ("),
        (GOOD + "class D: pass", "owners:C", "expected a class 'C', found Outer, D"),
        ("", "owners:C", "expected a class 'C', found no class"),
        ("def C(): pass", "owners:C", "expected 'C' to be a class, found function"),
        ("class C: pass", "owners:C", "expected class 'C' to have calibration, found none of them"),
        ("class C: calibration = 3", "owners:C", "expected C.calibration to be a method, found int"),
    ],
)
def test_what_is_no_handler_is_refused_by_name(folder: Path, text: str, reference: str, said: str) -> None:
    path = write(folder, text)
    message = refusal(reference)
    assert said in message
    if "expected" in said and "module" not in said:
        assert f"module 'owners' ({path})" in message
    if "Zero" in said:
        assert f"({path}, line 2)" in message


def test_a_constructor_that_fails(folder: Path) -> None:
    path = write(folder, "class C:\n  def __init__(self, x): pass\n  def calibration(self): pass\n")
    with pytest.raises(ModelError, match=r"handler 'owners:C': C\(\): TypeError: .*missing 1 required positional"):
        handler.make("owners:C", handler.load("owners:C"))
    path.write_text("class C:\n  def __init__(self): raise KeyError('x')\n  def calibration(self): pass\n")
    with pytest.raises(ModelError, match=r"handler 'owners:C': C\(\): KeyError: 'x' \(.*owners.py, line 2\)"):
        sys.modules.pop("owners")
        handler.make("owners:C", handler.load("owners:C"))


def test_code_that_does_not_end_is_interrupted() -> None:
    with pytest.raises(ModelError, match=r"^it: it took longer than 0\.05 s$"), handler.guarded("it", 0.05):
        while True:
            pass


def test_code_that_catches_everything_is_interrupted_again() -> None:
    caught = []
    with pytest.raises(ModelError, match="took longer"), handler.guarded("it", 0.05):
        try:
            while True:
                pass
        except BaseException as e:
            caught.append(e)
            while True:
                pass
    assert len(caught) == 1


NATIVE = """
import itertools, sys
from prefork import handler
handler.GRACE = 0.1
with handler.guarded("it", 0.05):
    sum(itertools.repeat(0))  # never asks the interpreter for signals
"""


def test_native_code_that_does_not_come_back_ends_the_process() -> None:
    ran = subprocess.run([sys.executable, "-c", NATIVE], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "Timeout" in ran.stderr and 'File "<string>", line 6' in ran.stderr


def test_what_owners_code_prints_is_no_output(capsys: pytest.CaptureFixture[str]) -> None:
    with handler.guarded("it", 60):
        print("owner")
    found = capsys.readouterr()
    assert (found.out, found.err) == ("", "owner\n")


def test_sources_are_found_without_running_them(folder: Path) -> None:
    package = folder / "box" / "deep"
    package.mkdir(parents=True)
    around = write(folder / "box", "raise RuntimeError", "__init__")
    own = write(package, "raise RuntimeError", "inner")
    assert handler.sources("box.deep.inner:f") == [around, own]
    assert handler.sources("box.deep.other:f") == [around]
    assert handler.sources("box:f") == [around]
    assert handler.sources("nowhere:f") == handler.sources("sys:f") == []
    assert "box" not in sys.modules
