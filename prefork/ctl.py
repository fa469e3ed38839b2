"""prefork-ctl: argv -> one question to a running server -> text or JSON. Nothing imports this file.

`status`, `scale`, `stop` and the changes (ctlchange.py) speak with the master over its control socket; `report` asks it
for the segment and reads that itself; `segments` looks at the machine's shared memory and needs no server; `infer`,
`metadata` and `health` are a client's calls (ctlinfer.py). What only some commands need is imported by them: `status`
loads no numpy.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import prefork
from prefork import control, ctlchange, ctlview
from prefork.errors import ConfigError, NotFound, PreforkError, Unavailable
from prefork.layers import control_path

EPILOG = """\
The control socket is found as the server finds it: --control, --runtime-dir, --config, PREFORK_* variables, default.

examples:
  prefork-ctl status
  prefork-ctl infer digits --input image=@image.npy --output label
  prefork-ctl infer minilm --input 'ids=[[101, 102]]' --input 'mask=[[1, 1]]' --save embedding=@embedding.npy
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def build_parser() -> argparse.ArgumentParser:
    """The parser; each command's namespace carries `run`, the function that does it."""
    parser = _Parser(
        prog="prefork-ctl",
        description="Ask a running prefork-serve, and call the models it serves.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"prefork-ctl {prefork.__version__}")
    parser.set_defaults(control=None, runtime_dir=None, config=None, json=False)
    _common(parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _command(commands, "status", _status, "state of the server, its models and workers")
    report = _command(commands, "report", _report, "how a served model was prepared, what was chosen and why")
    report.add_argument("model", metavar="MODEL")
    _command(commands, "segments", _segments, "shared memory segments of this machine; needs no server")
    _command(commands, "stop", _stop, "stop gracefully, as TERM does")
    scale = _command(commands, "scale", _scale, "change the number of workers")
    scale.add_argument("workers", type=int, metavar="N")
    _change_commands(commands)
    _client_commands(commands)
    return parser


def _common(parser: argparse.ArgumentParser) -> None:
    """What may stand before and after the command; without a default, so that neither place undoes the other."""
    none = argparse.SUPPRESS
    parser.add_argument("--control", metavar="PATH", default=none, help="control socket of the server")
    parser.add_argument("--runtime-dir", metavar="DIR", default=none, help="its folder, for control.sock in it")
    parser.add_argument("--config", type=Path, metavar="FILE", default=none, help="the server's configuration file")
    parser.add_argument("--json", action="store_true", default=none, help="print JSON")


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
    parser.set_defaults(run=run)
    _common(parser)
    return parser


def _change_commands(commands: Any) -> None:
    reload = _command(commands, "reload", _reload, "load models anew and serve them, without a dropped request")
    reload.add_argument("models", nargs="*", metavar="MODEL", help="only these; default: all")
    reload.add_argument("--canary", metavar="SHARE", help="only so many workers, as 10%%, until promote or rollback")
    reload.add_argument("--canary-seconds", type=float, metavar="S", help="then decide by errors and latency; or never")
    reload.add_argument("--force", action="store_true", help="also when inputs or outputs change, at clients' cost")
    changes = [
        reload,
        _command(commands, "rollback", _change, "give up the change under way, else serve what was served before it"),
        _command(commands, "restart", _change, "replace every worker, one after the other"),
        _command(commands, "promote", _change, "let all workers follow the canary"),
        _command(commands, "upgrade", _upgrade, "have the program as it is installed now take the server's place"),
    ]
    for parser in changes:
        parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="to wait for it (600)")
        parser.add_argument("--no-wait", action="store_true", help="begin it only")
    for name, help in (
        ("drain", "empty a slot: its worker leaves, others take its connections"),
        ("undrain", "give a drained slot a worker again"),
        ("recycle", "replace the worker of a slot"),
    ):
        _command(commands, name, _slot, help).add_argument("slot", type=int, metavar="SLOT")


def _client_commands(commands: Any) -> None:
    infer = _command(commands, "infer", _infer, "run a model once")
    infer.add_argument("model", metavar="MODEL")
    infer.add_argument(
        "--input", action="append", default=[], metavar="NAME=VALUE", help="@FILE.npy, or JSON in the input's type"
    )
    infer.add_argument("--output", action="append", default=[], metavar="NAME", help="only these outputs; repeatable")
    infer.add_argument(
        "--save", action="append", default=[], metavar="NAME=@FILE.npy", help="write an output to a file"
    )
    metadata = _command(commands, "metadata", _metadata, "inputs and outputs of a model")
    metadata.add_argument("model", metavar="MODEL")
    health = _command(commands, "health", _health, "whether the server answers; exit status 0 or 1")
    for parser in (infer, metadata, health):
        parser.add_argument("--connect", metavar="ADDRESS", help="HOST:PORT or unix:PATH; default: as status tells")
        parser.add_argument("--codec", choices=("msgpack", "protobuf"), default="msgpack")
        parser.add_argument("--timeout", type=float, default=30.0, metavar="SECONDS")


def main(argv: Sequence[str] | None = None) -> int:
    """Console script `prefork-ctl`; the exit status."""
    try:
        args = build_parser().parse_args(sys.argv[1:] if argv is None else argv)
        run: Callable[[argparse.Namespace], int] = args.run
        return run(args)
    except PreforkError as e:
        print(f"prefork-ctl: error: {' '.join(e.message.split())}", file=sys.stderr)
        return e.exit_code
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141


def _ask(args: argparse.Namespace, command: str, **values: Any) -> Any:
    given = {"control": args.control, "runtime_dir": args.runtime_dir}
    flags = {name: text for name, text in given.items() if text is not None}
    return control.request(control_path(flags, os.environ, file=args.config), command, values)


def _show(args: argparse.Namespace, found: Any, view: Callable[[Any], str]) -> None:
    print(json.dumps(found, indent=2, allow_nan=False) if args.json else view(found))


def _status(args: argparse.Namespace) -> int:
    _show(args, _ask(args, "status"), ctlview.status)
    return 0


def _report(args: argparse.Namespace) -> int:
    from prefork import reportview
    from prefork.shm import segment

    models = {row.get("name"): row for row in _ask(args, "status").get("models", [])}
    if args.model not in models:
        known = ", ".join(map(repr, models)) or "none"
        raise NotFound(f"model {args.model!r} is not served; expected one of {known}")
    with segment.attach(segment.SegmentRef.from_dict(models[args.model]["segment"])) as attached:
        view = attached.section("manifest")
        manifest = json.loads(bytes(view))
        view.release()
    _show(args, reportview.brief({**manifest, **_origin(models[args.model])}), reportview.text)
    return 0


def _origin(row: dict[str, Any]) -> dict[str, Any]:
    """What only the server knows: whether this start prepared the model, and how long that took."""
    return {key: row[key] for key in ("origin", "prepare_s") if key in row}


def _segments(args: argparse.Namespace) -> int:
    from prefork.shm.sweep import list_segments

    rows = [
        {
            "kind": info.kind,
            "name": info.name,
            "size": info.size,
            "owner_pid": info.owner.pid if info.owner else None,
            "alive": info.alive,
            "age_s": round(info.age, 3),
            "model": info.model,
            "generation": info.generation,
            "published": info.published,
            "uid": info.uid,
            "mode": f"{info.mode:04o}",
            "problem": info.problem,
        }
        for info in list_segments()
    ]
    _show(args, rows, ctlview.segments)
    return 0


def _scale(args: argparse.Namespace) -> int:
    _show(args, _ask(args, "scale", workers=args.workers), lambda found: f"workers: {found.get('workers')}")
    return 0


def _stop(args: argparse.Namespace) -> int:
    _show(args, _ask(args, "stop"), lambda _: "stopping")
    return 0


def _reload(args: argparse.Namespace) -> int:
    values: dict[str, Any] = {"models": args.models, "force": args.force}
    if args.canary is not None:
        values["canary"] = ctlchange.share(args.canary)
    if args.canary_seconds is not None:
        values["canary_seconds"] = args.canary_seconds
    return _follow(args, values)


def _change(args: argparse.Namespace) -> int:
    return _follow(args, {})


def _follow(args: argparse.Namespace, values: dict[str, Any]) -> int:
    row = ctlchange.follow(partial(_ask, args), args.command, values, args.timeout, wait=not args.no_wait)
    _show(args, row, ctlchange.view)
    return 0


def _upgrade(args: argparse.Namespace) -> int:
    row = ctlchange.upgrade(partial(_ask, args), args.timeout, wait=not args.no_wait)
    _show(args, row, lambda found: f"upgrade {found['state']}: pid {found['pid']}")
    return 0


def _slot(args: argparse.Namespace) -> int:
    _show(args, _ask(args, args.command, slot=args.slot), lambda found: f"{args.command}: slot {found.get('slot')}")
    return 0


def _address(args: argparse.Namespace) -> str:
    """Where to send requests: `--connect`, else the running server's Unix socket, else its first TCP address."""
    if args.connect:
        return str(args.connect)
    found = _ask(args, "status")
    if found.get("unix"):
        return f"unix:{found['unix']}"
    if found.get("bind"):
        return str(found["bind"][0])
    raise Unavailable(f"the server listens nowhere (state {found.get('state')})")


def _limit_threads() -> None:
    """Read when numpy is first imported: a command of one call needs no thread for each CPU."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def _infer(args: argparse.Namespace) -> int:
    _limit_threads()
    from prefork import ctlinfer

    job = ctlinfer.Job(args.model, args.input, args.output, args.save)
    _show(args, ctlinfer.infer(_address(args), args.codec, args.timeout, job, whole=args.json), ctlview.outputs)
    return 0


def _metadata(args: argparse.Namespace) -> int:
    _limit_threads()
    from prefork import ctlinfer

    _show(args, ctlinfer.metadata(_address(args), args.codec, args.timeout, args.model), ctlview.metadata)
    return 0


def _health(args: argparse.Namespace) -> int:
    _limit_threads()
    from prefork import ctlinfer

    found = ctlinfer.health(_address(args), args.codec, args.timeout)
    _show(args, found, lambda state: "ready" if state["ready"] else "live, not ready")
    return 0 if found["ready"] else 1


if __name__ == "__main__":
    sys.exit(main())
