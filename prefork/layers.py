"""Where the configuration comes from: defaults, a TOML file, the environment, flags; the later wins.

The flag of a key is `--key-with-dashes` and its variable PREFORK_KEY; the keys of [log] have `log` before them
(`--log-level`, PREFORK_LOG_LEVEL). Besides there are PREFORK_CONFIG (the file) and PREFORK_MODEL
(`name=path;name2=path2`). Models are one list: those of flags replace those of the environment, which replace the
file's; a key of a model given as flag or variable (`--quantize`, PREFORK_QUANTIZE) holds for every model.
PREFORK_TEST_* belongs to the tests. Paths in a file are relative to that file, others to the working directory. Used by
the commands, before any process is started.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from prefork.config import (
    SEARCH,
    SECTIONS,
    ComputeConfig,
    Config,
    Entry,
    LimitsConfig,
    LogConfig,
    ModelConfig,
    ServerConfig,
    TelemetryConfig,
    common,
    entries,
    entries_of,
)
from prefork.demo import evaluation_path, model_path
from prefork.errors import ConfigError
from prefork.options import AUTO, MAX_SOCKET_PATH, read, split_bind, suggest

DEMO = "digits"
SPECIAL = ("PREFORK_CONFIG", "PREFORK_MODEL")
NEEDED = ("name", "path")  # of each model


@dataclass(frozen=True, slots=True)
class Raw:
    """A value as it was found: where, whether as text or as a TOML value, and what its relative paths start from."""

    value: object
    source: str
    text: bool
    base: Path


def load(
    flags: Mapping[str, str],
    environ: Mapping[str, str],
    *,
    file: Path | None = None,
    models: Sequence[str] = (),
    cwd: Path | None = None,
) -> Config:
    """The configuration of one start. `flags` by flat key (`workers`, `log_level`, `quantize`), `models` as
    `[NAME=]PATH`, `file` as `--config`.

    Raises ConfigError naming the key, where its value came from, what was expected and what was found."""
    here = cwd.absolute() if cwd is not None else _here()
    found, listed = _gather(flags, environ, file, here)
    if text := environ.get("PREFORK_MODEL"):
        listed = [_named(part.strip(), "PREFORK_MODEL", here) for part in text.split(";") if part.strip()]
    if models:
        listed = [_named(text, "command line", here) for text in models]

    sources: dict[str, str] = {}
    values = _scalars(found, sources)
    _place(values["server"], environ, here)
    chosen = _models(listed, found, sources)
    config = Config(
        server=ServerConfig(**values["server"]),
        limits=LimitsConfig(**values["limits"]),
        compute=ComputeConfig(**values["compute"]),
        telemetry=TelemetryConfig(**values["telemetry"]),
        log=LogConfig(**values["log"]),
        models=chosen,
        sources=sources,
        warnings=_ignored(chosen, sources),
    )
    _check(config)
    return config


def _here() -> Path:
    try:
        return Path.cwd()
    except OSError as e:
        raise ConfigError(
            f"working directory: expected one that paths can begin at, found none ({e.strerror})"
        ) from None


def control_path(flags: Mapping[str, str], environ: Mapping[str, str], *, file: Path | None = None) -> Path:
    """Where the server of this configuration listens for prefork-ctl; its models need not exist. Raises ConfigError."""
    here = _here()
    values = _scalars(_gather(flags, environ, file, here)[0], {})["server"]
    _place(values, environ, here)
    path: Path = values["control"]
    return path


def _gather(
    flags: Mapping[str, str], environ: Mapping[str, str], file: Path | None, here: Path
) -> tuple[dict[str, Raw], list[dict[str, Raw]]]:
    """The winning raw value of each flat key, and the models of the file."""
    if file is None and environ.get("PREFORK_CONFIG"):
        file = Path(environ["PREFORK_CONFIG"])
    found, listed = _from_file(here / file) if file else ({}, [])
    found |= _from_environment(environ, here)
    found |= {key: Raw(text, "--" + key.replace("_", "-"), True, here) for key, text in flags.items()}
    return found, listed


def _from_environment(environ: Mapping[str, str], base: Path) -> dict[str, Raw]:
    by_variable = {entry.variable: entry.flat for entry in (*entries(), *common())}
    known = [*by_variable, *SPECIAL]
    for name in environ:
        if name.startswith("PREFORK_") and not name.startswith("PREFORK_TEST_") and name not in known:
            raise ConfigError(f"environment variable {name} is unknown{suggest(name, known)}")
    return {flat: Raw(environ[v], v, True, base) for v, flat in by_variable.items() if v in environ}


def _from_file(path: Path) -> tuple[dict[str, Raw], list[dict[str, Raw]]]:
    """Scalars by flat key, and the raw keys of each model."""
    try:
        text = path.read_bytes().decode()
        document = tomllib.loads(text)
    except OSError as e:
        raise ConfigError(f"configuration file {path} cannot be read: {e.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise ConfigError(f"configuration file {path} is not TOML: {e}") from None
    lines = _lines(text)
    found: dict[str, Raw] = {}
    for section, table in document.items():
        if section == "models":
            continue
        if section not in SECTIONS or not isinstance(table, dict):
            hint = suggest(section, [*SECTIONS, "models"])
            raise ConfigError(f"{path}:{lines.get(section, 1)}: section [{section}] is unknown{hint}")
        known = {entry.name: entry for entry in entries_of(section, SECTIONS[section])}
        for name, raw in _table(path, section, table, known, lines).items():
            found[known[name].flat] = raw
    models = document.get("models", [])
    if not isinstance(models, list) or not all(isinstance(item, dict) for item in models):
        raise ConfigError(f"{path}:{lines.get('models', 1)}: models must be written as [[models]]")
    keys = {entry.name: entry for entry in entries_of("models", ModelConfig)}
    return found, [_table(path, f"models.{n}", item, keys, lines) for n, item in enumerate(models)]


def _table(
    path: Path, section: str, table: Mapping[str, Any], known: Mapping[str, Entry], lines: Mapping[str, int]
) -> dict[str, Raw]:
    found = {}
    for name, value in table.items():
        source = f"{path}:{lines.get(f'{section}.{name}', lines.get(section, 1))}"
        if name not in known:
            raise ConfigError(f"{source}: key {section.partition('.')[0]}.{name} is unknown{suggest(name, known)}")
        found[name] = Raw(value, source, False, path.parent)
    return found


def _lines(text: str) -> dict[str, int]:
    """The line of each section and key as usually written; others are reported at their section's line."""
    found: dict[str, int] = {}
    section, models = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.match(r"\s*\[\[?\s*([\w-]+)\s*\]", line):
            section = match[1]
            found.setdefault(section, number)
            if section == "models":
                section, models = f"models.{models}", models + 1
                found[section] = number
        elif match := re.match(r"\s*([\w-]+)\s*[.=]", line):
            found.setdefault(f"{section}.{match[1]}" if section else match[1], number)
    return found


def _named(text: str, source: str, base: Path) -> dict[str, Raw]:
    """The keys of a model given as `[NAME=]PATH`; without a name it is called as its file, less the suffix."""
    name, equals, path = text.partition("=")
    if not equals or "/" in name:
        name, path = Path(text).stem, text
    return {"name": Raw(name, source, True, base), "path": Raw(path, source, True, base)}


def _value(entry: Entry, raw: Raw) -> Any:
    value = read(entry.key.kind, entry.path, raw.value, raw.source, text=raw.text)
    return raw.base / value if isinstance(value, Path) else value


def _scalars(found: Mapping[str, Raw], sources: dict[str, str]) -> dict[str, dict[str, Any]]:
    values: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for entry in entries():
        raw = found.get(entry.flat)
        sources[entry.path] = raw.source if raw else "default"
        values[entry.section][entry.name] = _value(entry, raw) if raw else entry.default
    return values


def _place(server: dict[str, Any], environ: Mapping[str, str], here: Path) -> None:
    """Put paths where the section says AUTO."""
    if server["runtime_dir"] == AUTO:
        if systemd := environ.get("RUNTIME_DIRECTORY"):  # a list when the unit names several (systemd.exec(5))
            server["runtime_dir"] = here / systemd.split(":")[0]
        elif (session := environ.get("XDG_RUNTIME_DIR")) and Path(session).is_dir():
            server["runtime_dir"] = here / session / "prefork-serve"
        else:
            server["runtime_dir"] = Path(f"/tmp/prefork-serve-{os.getuid()}")
    for name, file in (("unix", "prefork.sock"), ("control", "control.sock")):
        if server[name] == AUTO:
            server[name] = server["runtime_dir"] / file
    if server["work_dir"] == AUTO:
        server["work_dir"] = here / environ.get("TMPDIR", "/tmp")
    if server["cache_dir"] == AUTO:
        found = _cache_dir(environ)
        server["cache_dir"] = here / found if found else None


def _cache_dir(environ: Mapping[str, str]) -> Path | None:
    """Of a service its CacheDirectory (systemd.exec(5)), else in the user's cache (XDG Base Directory Specification,
    where a path that is not absolute counts as none); none for a user without a home."""
    if systemd := environ.get("CACHE_DIRECTORY"):
        return Path(systemd.split(":")[0])
    xdg = Path(environ.get("XDG_CACHE_HOME", ""))
    if not xdg.is_absolute():
        if not environ.get("HOME"):
            return None
        xdg = Path(environ["HOME"], ".cache")
    return xdg / "prefork-serve" / "prepared"


def _models(
    listed: Sequence[Mapping[str, Raw]], flat: Mapping[str, Raw], sources: dict[str, str]
) -> tuple[ModelConfig, ...]:
    chosen: dict[str, ModelConfig] = {}
    of_all = {entry.name: flat[entry.flat] for entry in common() if entry.flat in flat}
    for found in listed or [_demo()]:
        values, given = {}, {**found, **of_all}
        for entry in entries_of("models", ModelConfig):
            if raw := given.get(entry.name):
                values[entry.name] = _value(entry, raw)
            elif entry.name in NEEDED:
                origin = next(iter(given.values())).source if given else "[[models]]"
                raise ConfigError(f"models.{entry.name} ({origin}): every model needs {entry.key.help}, found none")
            else:
                values[entry.name] = entry.default
        model = ModelConfig(**values)
        if model.name in chosen:
            origin = f"{sources[f'models.{model.name}.name']} and {given['name'].source}"
            raise ConfigError(f"models.name ({origin}): two models are called {model.name!r}; names must differ")
        for name, raw in given.items():
            sources[f"models.{model.name}.{name}"] = raw.source
        chosen[model.name] = model
    return tuple(chosen.values())


def _demo() -> dict[str, Raw]:
    known = {"name": DEMO, "path": str(model_path()), "eval": str(evaluation_path())}
    return {name: Raw(text, "default", True, Path("/")) for name, text in known.items()}


def _ignored(models: Sequence[ModelConfig], sources: Mapping[str, str]) -> tuple[str, ...]:
    """Keys of a search that were given where none is made."""
    found: dict[str, str] = {}  # by where it was given: a flag for every model is heeded when one of them searches
    heeded = {sources.get(f"models.{m.name}.{key}") for m in models if m.quantize == AUTO for key in SEARCH}
    for model in models:
        for name in SEARCH if model.quantize != AUTO else ():
            source = sources.get(f"models.{model.name}.{name}", "default")
            default = ModelConfig.__dataclass_fields__[name].default  # a file may list every key
            if source not in ("default", *heeded) and getattr(model, name) != default:
                why = f"quantize is {model.quantize!r}, and only 'auto' searches"
                found.setdefault(source, f"models.{name} ({source}) is ignored for {model.name!r}: {why}")
    return tuple(found.values())


def _check(config: Config) -> None:
    """What no single key can know."""
    sources, limits = config.sources, config.limits
    if limits.default_timeout_ms > limits.max_timeout_ms:
        _refuse("limits.default_timeout_ms", sources, f"at most max_timeout_ms = {limits.max_timeout_ms}",
                limits.default_timeout_ms)  # fmt: skip
    if limits.max_frame_bytes > limits.max_in_flight_bytes:
        _refuse("limits.max_frame_bytes", sources, f"at most max_in_flight_bytes = {limits.max_in_flight_bytes}",
                limits.max_frame_bytes)  # fmt: skip
    for name, path in (("server.unix", config.server.unix), ("server.control", config.server.control)):
        if path is not None and len(os.fsencode(path)) > MAX_SOCKET_PATH:
            _refuse(name, sources, f"a socket path of at most {MAX_SOCKET_PATH} bytes", str(path))
    if config.server.unix == config.server.control:
        _refuse("server.unix", sources, "another path than server.control", str(config.server.unix))
    metrics = config.telemetry.metrics_bind
    if metrics and split_bind(metrics) == split_bind(config.server.bind) and split_bind(metrics)[1]:
        _refuse("telemetry.metrics_bind", sources, "another address than server.bind", metrics)
    if not config.server.work_dir.is_dir() or not os.access(config.server.work_dir, os.W_OK | os.X_OK):
        _refuse("server.work_dir", sources, "a folder that can be written to", str(config.server.work_dir))
    for model in config.models:
        for entry in entries_of("models", ModelConfig):
            if isinstance(path := getattr(model, entry.name), Path):
                _readable(f"models.{model.name}.{entry.name}", sources, path)


def _readable(name: str, sources: Mapping[str, str], path: Path) -> None:
    try:
        with path.open("rb") as file:
            empty = not file.read(1)
    except OSError as e:
        raise ConfigError(f"{name} ({sources[name]}): {str(path)!r} cannot be read: {e.strerror}") from None
    if empty:
        _refuse(name, sources, "a file with content", str(path))


def _refuse(name: str, sources: Mapping[str, str], expected: str, found: object) -> NoReturn:
    raise ConfigError(f"{name} ({sources[name]}): expected {expected}, found {found!r}")
