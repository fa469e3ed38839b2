"""One conformance case, judged plainly and our way. In a worker of tests.conformance: imports onnxruntime."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from prefork.codec.message import InferReply, InferRequest
from prefork.codec.registry import CODECS, BodyCodec
from prefork.errors import PreforkError
from prefork.model import pack
from prefork.model.repository import read_model
from prefork.model.session import InMemory, Mapped, Session
from prefork.tensor import Tensor
from prefork.value import Parameter, Value, flatten, unflatten
from tests.backend_cases import Case
from tests.plain_ort import Plain, close, same_bits


def judge_plain(case: Case) -> tuple[str, str, Plain | None]:
    """The verdict, the reason, and the session when it passed."""
    try:
        plain = Plain(case.model)
    except Exception as e:
        return "does not load", _line(e), None
    for inputs, wanted in case.datasets:
        try:
            found = plain.run(inputs)
        except Exception as e:
            return "fails to run", _line(e), None
        for name, value in wanted.items():
            if why := close(found[name], value, case.rtol, case.atol):
                return "differs", f"{name}: {why}", None
    return "pass", "", plain


def judge_ours(case: Case, plain: Plain, folder: Path, *, in_memory: bool = False) -> tuple[str, str]:
    """The verdict and the reason of the same case, prepared and sent through both codecs. `in_memory`: the weights are
    memory without a path."""
    try:
        session = _open(case, folder, in_memory=in_memory)
    except PreforkError as e:
        return "not prepared", _line(e)
    try:
        return _judge_runs(case, plain, session.run)
    except PreforkError as e:
        return "refused", _line(e)
    finally:
        session.close()


Run = Callable[[list[Tensor], list[str], Mapping[str, Parameter]], tuple[list[Tensor], dict[str, Parameter]]]


def _judge_runs(case: Case, plain: Plain, run: Run) -> tuple[str, str]:
    verdict = "identical"
    for inputs, wanted in case.datasets:
        reference = plain.run(inputs)
        for codec in CODECS.values():
            found = call(run, codec, inputs)
            if all(same_bits(found[name], reference[name]) for name in reference):
                continue
            verdict = "within tolerance"
            for name, value in wanted.items():
                if why := close(found[name], value, case.rtol, case.atol):
                    return "differs", f"{name} through {codec.CODEC.name.lower()}: {why}"
    return verdict, ""


def call(run: Run, codec: BodyCodec, inputs: Mapping[str, Value]) -> dict[str, Value]:
    """`run` as a client sees it: request and reply are bytes in between."""
    tensors: list[Tensor] = []
    parameters: dict[str, Parameter] = {}
    for name, value in inputs.items():
        flatten(name, value, tensors, parameters)
    body = codec.encode_infer_request(InferRequest("m", tensors, parameters=parameters))
    request = codec.decode_infer_request(body)
    outputs, extra = run(request.inputs, request.outputs, request.parameters)
    reply = codec.decode_infer_reply(codec.encode_infer_reply(InferReply("m", outputs, parameters=extra)))
    return unflatten(reply.outputs, reply.parameters)


def _open(case: Case, folder: Path, *, in_memory: bool) -> Session:
    with tempfile.TemporaryDirectory(dir=folder) as work:
        path = case.save(Path(work))
        prepared = pack.prepare(read_model(path), name=case.name, work_dir=Path(work))
        if not in_memory:
            return Session.open(prepared.manifest, prepared.graph, Mapped(work))
        view = memoryview(prepared.weights.read_bytes())
        return Session.open(prepared.manifest, pack.embed_subgraphs(prepared.graph, prepared.weights), InMemory(view))


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
