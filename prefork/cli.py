"""prefork-serve: argv -> Config -> one call. Nothing imports this file; it becomes the master.

Imports nothing numeric: what is imported here stays in the master for ever.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NoReturn

import prefork
from prefork.config import Config, Entry, common, entries
from prefork.effective import to_toml
from prefork.errors import ConfigError, PreforkError
from prefork.layers import load
from prefork.options import show_size, suggest

DESCRIPTION = """\
Serve ONNX models on CPU: each model is prepared once in shared memory and answered from by N pre-forked workers,
over TCP and a Unix socket. Without a model the embedded demo model "digits" is served.
"""
EPILOG = """\
Every flag is also a key of the configuration file and a PREFORK_* variable (--max-dims is PREFORK_MAX_DIMS). A flag
wins over the environment, the environment over the file, the file over the default. PREFORK_MODEL lists models as
NAME=PATH;NAME=PATH. conf/prefork.toml documents each key. Signals: TERM stops gracefully, QUIT and INT at once,
HUP reloads configuration and models, TTIN and TTOU add and remove a worker, USR1 reopens the log file, USR2 has the
installed program take over.

As the first word `prepare` fills the cache with the models and leaves, and `inspect` shows what would be served; both
take the same flags, and --json. A model file of such a name is written ./prepare.

exit status: 0 stopped as asked, 65 a model cannot be served, 73 the cache cannot be filled, 75 no room in shared
memory, 78 bad configuration.
"""
COMMANDS = {
    "prepare": "Prepare models for this machine and keep them in the cache, so that a start only copies them.",
    "inspect": "Show what would be served of each model and why; prepares it unless the cache has it.",
}
TITLES = {
    "server": "server", "limits": "limits of a worker", "compute": "compute", "telemetry": "telemetry", "log": "log",
}  # fmt: skip


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)

    def flags(self) -> list[str]:
        return list(self._option_string_actions)


def build_parser(command: str = "") -> _Parser:
    """The parser: values stay text, so that config.py judges them and names the flag when one is bad. `command`: a key
    of COMMANDS, or nothing to serve."""
    usage = "[MODEL.onnx ...] [--model NAME=PATH] [--workers N] [--bind HOST:PORT] [--config FILE] ..."
    if command:
        usage = f"{command} [MODEL.onnx ...] [--model NAME=PATH] [--quantize FORM] [--cache-dir DIR] [--json] ..."
    parser = _Parser(
        prog="prefork-serve",
        usage=f"prefork-serve {usage}",
        description=COMMANDS.get(command, DESCRIPTION),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"prefork-serve {prefork.__version__}")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML configuration file (PREFORK_CONFIG)")
    if command:
        parser.add_argument("--json", action="store_true", help="print JSON")
    else:
        parser.add_argument(
            "--check", action="store_true", help="validate everything, print what would hold, do not start"
        )
    models = parser.add_argument_group("models")
    models.add_argument("paths", nargs="*", metavar="MODEL.onnx", help="a model, called as its file, less the suffix")
    models.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME=PATH",
        dest="named",
        help="a model and its name; repeatable",
    )
    groups = {section: parser.add_argument_group(title) for section, title in TITLES.items()} | {"models": models}
    for entry in (*common(), *entries()):
        words = "of every model, " if entry.section == "models" else ""
        groups[entry.section].add_argument(
            entry.flag, dest=f"key.{entry.flat}", metavar=entry.key.metavar, help=words + _help(entry)
        )
    return parser


def _help(entry: Entry) -> str:
    choices = f"{', '.join(entry.key.kind.choices)}; " if entry.key.kind.choices else ""
    default = show_size(entry.default) if entry.key.metavar == "SIZE" else entry.default
    return f"{entry.key.help} ({choices}default {'none' if default is None else default})".replace("%", "%%")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags, all as text. Raises ConfigError for one that is unknown or lacks its value."""
    command = argv[0] if argv and argv[0] in COMMANDS else ""
    parser = build_parser(command)
    args, unknown = parser.parse_known_args(argv[1:] if command else argv, argparse.Namespace(command=command))
    if unknown:
        name = unknown[0].partition("=")[0]
        raise ConfigError(f"flag {name} is unknown{suggest(name, parser.flags())}")
    return args


def configure(args: argparse.Namespace, environ: Mapping[str, str]) -> Config:
    """The configuration that `args` and `environ` ask for. Raises ConfigError."""
    flags = {name.removeprefix("key."): text for name, text in vars(args).items() if name.startswith("key.")}
    given = {name: text for name, text in flags.items() if text is not None}
    return load(given, environ, file=args.config, models=[*args.paths, *args.named])


def main(argv: Sequence[str] | None = None) -> int:
    """Console script `prefork-serve`; the exit status."""
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except PreforkError as e:
        print(f"prefork-serve: error: {' '.join(e.message.split())}", file=sys.stderr)
        _decline(e)
        return e.exit_code


def _decline(error: PreforkError) -> None:
    """A master that has us take its place, and to which nobody has spoken yet, is to know why we do not."""
    if sys.platform == "linux":
        from prefork import estate

        estate.decline(os.environ, error)


def _fill_standard_descriptors() -> None:
    """Started with standard streams closed, the next descriptors would take their numbers, and our log lines."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)


def _run(argv: Sequence[str]) -> int:
    args = parse(argv)
    if sys.platform != "linux":
        raise ConfigError(f"prefork-serve needs Linux (SO_REUSEPORT, subreaper, /dev/shm), found {sys.platform}")
    _fill_standard_descriptors()
    config = configure(args, os.environ)
    # Imported here: --help and --version answer on any system
    if args.command:
        return _prepare(config, args.command, as_json=args.json)
    if args.check:
        from prefork.check import check

        check(config)
        for text in config.warnings:
            print(f"prefork-serve: warning: {text}", file=sys.stderr)
        print(to_toml(config), end="")
        return 0
    from prefork.opening import serve

    return serve(config, lambda: configure(args, os.environ))


def _prepare(config: Config, purpose: Literal["prepare", "inspect"], *, as_json: bool) -> int:
    from prefork import ahead, reportview

    found = []
    for manifest in ahead.prepare(config, purpose):
        found.append(reportview.brief(manifest))
        if not as_json:
            print(reportview.text(manifest), flush=True)
    if as_json:
        print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
