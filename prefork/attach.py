"""From published segments to sessions that have answered a warm-up. Runs in the template, or in a worker that opens the
models itself, before it says READY.

The only place where a segment and a session meet: shared memory knows no model, the model room knows no segment.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prefork.checking import checked
from prefork.codec.limits import Limits as WireLimits
from prefork.codec.message import Codec, InferReply, InferRequest
from prefork.codec.registry import codec_of
from prefork.config import Config
from prefork.errors import ModelError, PreforkError
from prefork.jobs import LoadedModel
from prefork.model.manifest import Manifest
from prefork.model.session import InMemory, Mapped, Session
from prefork.model.warmup import build
from prefork.serving.costs import Costs
from prefork.shm import segment
from prefork.value import flatten


@dataclass(frozen=True, slots=True)
class Opened:
    """Sessions by model name, and the segments that they look into, which must live as long."""

    sessions: dict[str, Session]
    segments: list[segment.Segment]


@dataclass(frozen=True, slots=True)
class Ready:
    """Models that have answered their warm-up, what that cost, and the notes on those that could not."""

    opened: Opened
    costs: Costs
    wire_limits: WireLimits
    notes: list[str]


def make_ready(models: Sequence[LoadedModel], config: Config, scratch: Path) -> Ready:
    """Attach, verify, open and warm every model. Raises SegmentError or ModelError naming the model."""
    tempfile.tempdir = str(scratch)  # what a killed process leaves there goes with the master
    costs, limits = Costs(), WireLimits(config.limits.max_tensors, config.limits.max_dims)
    segments = [segment.attach(model.ref) for model in models]
    with checked(segments):  # wrong weights give wrong numbers, and those are dropped with the error
        opened = open_models(models, segments, config.compute.threads)
        notes = warm(opened, costs, limits)
    return Ready(opened, costs, limits, notes)


def open_models(models: Sequence[LoadedModel], segments: Sequence[segment.Segment], threads: int) -> Opened:
    """Open every model over its segment, of which manifest and graph are verified here, for they are parsed.

    Raises SegmentError or ModelError naming the model."""
    opened = Opened({}, list(segments))
    for model, attached in zip(models, segments, strict=True):
        attached.verify(("manifest", "graph"))
        manifest = Manifest.from_json(attached.section("manifest"))
        weights: Mapped | InMemory
        if attached.path is not None:
            weights = Mapped(str(Path(attached.path).parent))
        else:
            weights = InMemory(attached.section("weights"))
        opened.sessions[model.name] = Session.open(manifest, attached.section("graph"), weights, threads=threads)
    return opened


def warm(opened: Opened, costs: Costs, limits: WireLimits) -> list[str]:
    """Answer each model's warm-up as if it had come over each codec, and learn its cost.

    The notes say which models know no inputs that run. Raises ModelError when a warm-up fails or its answer is not the
    one that the loader saw."""
    notes = []
    for name, session in opened.sessions.items():
        measured = session.warm()
        if measured is None:
            notes.append(f"model {name!r}: no inputs are known that run; the first request will be slower")
            continue
        if measured.matches is False:
            raise ModelError(f"model {name!r}: its warm-up gives other numbers here than it gave when it was prepared")
        for number in (Codec.MSGPACK, Codec.PROTOBUF):
            costs.learn(name, _answer(name, session, number, limits), measured.seconds)
    return notes


def _answer(name: str, session: Session, number: Codec, limits: WireLimits) -> int:
    """Take the warm-up through one codec, the way of a request; the size of its body in bytes."""
    request = InferRequest(name, [])
    if session.manifest.warmup is not None:
        for key, value in build(session.manifest.warmup).items():
            flatten(key, value, request.inputs, request.parameters)
    codec = codec_of(number)
    try:
        body = codec.encode_infer_request(request)
        received = codec.decode_infer_request(body, limits)
        outputs, parameters = session.run(received.inputs, received.outputs, received.parameters)
        codec.encode_infer_reply(InferReply(name, outputs, "", "", parameters))
    except PreforkError as e:
        raise ModelError(f"model {name!r}: its own warm-up fails over {number.name.lower()}: {e.message}") from None
    return len(body)
