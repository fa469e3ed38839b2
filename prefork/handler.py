"""The owner's code: finding, importing and checking the class that `handler = "module:Class"` names.

A leaf: knows no role, no model, no wire and no numeric library. Only a process that may hold the owner's code imports
the class (the loader); whoever makes a cache key asks for `sources`, which runs none of it. Modules are searched for in
the current directory of the server's start, then along PYTHONPATH and the rest of sys.path. Owner's code runs within
`guarded`: what it raises and how long it takes ends as a ModelError that names it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import pkgutil
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from prefork.errors import ModelError

HOOKS = ("calibration",)  # methods that the server calls; a class has one at least
PATIENCE = 60.0  # seconds that an import or a constructor may take: the largest libraries take ten
AGAIN = 1.0  # seconds after which code that caught the interruption is interrupted again
GRACE = 10.0  # seconds beyond which native code that does not come back ends the process
STDERR = 2


class _Late(BaseException):
    """Time is over. No Exception, so that the owner's own handlers let it pass."""


def extend_path() -> None:
    """Search the current directory first, as `python -m` does; a console script has its own folder there."""
    with contextlib.suppress(FileNotFoundError):  # it was removed
        here = str(Path.cwd())
        if sys.path[:1] != [here]:
            sys.path.insert(0, here)


def sources(reference: str) -> list[Path]:
    """Files of the module of `module:name` and of the packages around it, as far as they are found without running any
    of them; the module's own is the last."""
    paths = [Path(spec.origin) for spec in _specs(reference) if spec.has_location and spec.origin]
    return [path for path in paths if path.is_file()]


def check_found(reference: str) -> None:
    """Raises ModelError unless there is such a module; runs none of it but a package's own path."""
    module = reference.partition(":")[0]
    found = _specs(reference)
    if len(found) < len(module.split(".")):
        missing = ".".join(module.split(".")[: len(found) + 1])
        places = f"the current directory ({_here()}) or on PYTHONPATH"
        raise ModelError(f"handler {reference!r}: expected a module {missing!r} in {places}, found none")


def load(reference: str) -> type[Any]:
    """The class that `module:Class` names. Raises ModelError naming module, attribute, what was expected and found."""
    module, _, name = reference.partition(":")
    check_found(reference)
    with guarded(f"handler {reference!r}: importing module {module!r}", PATIENCE):
        found: Any = _imported(module)
    at = f"handler {reference!r}: module {module!r} ({getattr(found, '__file__', None) or 'no file'})"
    for part in name.split("."):
        if not hasattr(found, part):
            classes = [key for key, value in vars(found).items() if inspect.isclass(value) and not key.startswith("_")]
            raise ModelError(f"{at}: expected a class {name!r}, found {', '.join(classes) or 'no class'}")
        found = getattr(found, part)
    if not inspect.isclass(found):
        raise ModelError(f"{at}: expected {name!r} to be a class, found {type(found).__name__}")
    hooks = [hook for hook in HOOKS if hasattr(found, hook)]
    if not hooks:
        raise ModelError(f"{at}: expected class {name!r} to have {' or '.join(HOOKS)}, found none of them")
    for hook in hooks:
        if not callable(getattr(found, hook)):
            kind = type(getattr(found, hook)).__name__
            raise ModelError(f"{at}: expected {name}.{hook} to be a method, found {kind}")
    return found


def make(reference: str, cls: type[Any]) -> Any:
    """One object of the class, made without arguments. Raises ModelError."""
    with guarded(f"handler {reference!r}: {cls.__name__}()", PATIENCE):
        return cls()


@contextlib.contextmanager
def guarded(what: str, seconds: float) -> Iterator[None]:
    """Run the owner's code in the main thread. Raises ModelError for whatever it raises, SystemExit too, and when it
    takes longer.

    It is interrupted by SIGALRM (setitimer(2)); native code that holds the interpreter ends the process GRACE later,
    with its traceback on standard error. What it prints goes there too: standard output is for what was asked."""
    before = signal.signal(signal.SIGALRM, _ring)
    faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=STDERR)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
    try:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _Late:
        raise ModelError(f"{what}: it took longer than {seconds:g} s") from None
    except ModelError:  # what was expected and not found
        raise
    except BaseException as e:
        raise ModelError(f"{what}: {type(e).__name__}: {e}{_place(e)}") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


def _ring(number: int, frame: object) -> NoReturn:
    raise _Late


def _place(error: BaseException) -> str:
    """Where it was raised, in the owner's code or below it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def _imported(module: str) -> ModuleType:
    """Leaves no byte code: the folder is not ours to write to, and byte code is matched to its source by a time in
    seconds, where a cache key has seen the content."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        found: ModuleType = pkgutil.resolve_name(f"{module}:")
    finally:
        sys.dont_write_bytecode = before
    return found


def _specs(reference: str) -> list[ModuleSpec]:
    """Of each package on the way to the module, and of the module; ends where nothing is found."""
    found: list[ModuleSpec] = []
    parts = reference.partition(":")[0].split(".")
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        spec = _within(name, found[-1].submodule_search_locations or []) if found else _top(name)
        if spec is None:
            break
        found.append(spec)
    return found


def _top(name: str) -> ModuleSpec | None:
    try:
        return find_spec(name)
    except ValueError:  # __main__, or a module that somebody made by hand
        return None


def _within(name: str, places: Iterable[str]) -> ModuleSpec | None:
    """What importlib would find there. Its own finder wants the packages around a namespace to be imported."""
    portions: list[str] = []
    for place in places:
        finder = pkgutil.get_importer(place)
        spec = finder.find_spec(name) if finder is not None else None
        if spec is not None and spec.loader is not None:
            return spec
        portions += (spec.submodule_search_locations or []) if spec is not None else []
    namespace = ModuleSpec(name, None, is_package=True)
    namespace.submodule_search_locations = portions
    return namespace if portions else None


def _here() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return "removed"
