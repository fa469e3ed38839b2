"""The effective configuration as TOML, each line with where its value came from. Pure; for `prefork-serve --check`.

What it writes is a configuration file: read again it gives the same values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prefork.config import SECTIONS, Config, ModelConfig, entries_of
from prefork.options import Key, show_size


def to_toml(config: Config) -> str:
    """TOML text of `config`, every key, with a comment on each line naming its source."""
    lines: list[str] = []
    for section, cls in SECTIONS.items():
        lines.append(f"[{section}]")
        values = asdict(getattr(config, section))
        lines += [_line(e.name, e.key, values[e.name], config.sources[e.path]) for e in entries_of(section, cls)]
        lines.append("")
    for model in config.models:
        lines += [*_model(model, config), ""]
    return "\n".join(lines[:-1]) + "\n"


def differing(first: Config, second: Config) -> list[str]:
    """The keys of the sections whose values differ; models are not looked at."""
    return [
        f"{section}.{entry.name}"
        for section, cls in SECTIONS.items()
        for entry in entries_of(section, cls)
        if getattr(getattr(first, section), entry.name) != getattr(getattr(second, section), entry.name)
    ]


def _model(model: ModelConfig, config: Config) -> Iterator[str]:
    yield "[[models]]"
    for entry in entries_of("models", ModelConfig):
        source = config.sources.get(f"models.{model.name}.{entry.name}", "default")
        yield _line(entry.name, entry.key, getattr(model, entry.name), source)


def _line(name: str, key: Key, value: Any, source: str) -> str:
    comment = source if source.isprintable() else ascii(source)
    return f"{f'{name} = {_value(key, value)}':<48}  # {comment}"


def _value(key: Key, value: Any) -> str:
    if value is None:
        return '""'
    if key.metavar == "SIZE":
        return json.dumps(show_size(value))
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | Path):
        # A JSON string is a TOML basic string, but for DEL, which JSON leaves as it is
        return json.dumps(str(value)).replace("\x7f", "\\u007f")
    return repr(value)
