"""The loader: one process for one model file; it leaves a complete, checksummed segment or a reason.

The master's side of it is generation.py. A model that the cache holds is copied from there, with the standard library
alone; else preparation.py is imported, with onnx and the quantization tools, which cost time and memory that nobody
else should carry. It exits when the segment is published and the cache is filled. Killed at any line it leaves at most
its scratch directory, which the master removes, and a locked file of the cache, which the next loader removes.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from prefork import cache_key, handler
from prefork.cache import Cache, CacheError, Damaged, Entry, locate, placeholder
from prefork.channel import Channel
from prefork.compat import signature
from prefork.digests import Digests
from prefork.errors import ModelError, SegmentError
from prefork.jobs import MANIFEST, LoaderJob
from prefork.log import Logger
from prefork.shm import writer
from prefork.shm.owner import segment_name
from prefork.shm.writer import SegmentWriter

if TYPE_CHECKING:
    from prefork.model.repository import Source

# As long as the largest search may take in another process that prepares the same model.
PATIENCE = 1800.0
LOWEST = 19  # nice(2)


def main(channel: socket.socket, job: LoaderJob) -> int:
    """Do what the job's purpose says; the exit code. Raises PreforkError with the reason when that cannot be."""
    if job.generation > 1:  # a reload: what prepares must not take the processor from those who serve meanwhile
        os.nice(LOWEST)
    log = job.log.for_role("loader", model=job.model.name)
    os.environ["TMPDIR"] = str(job.work_dir)  # libraries that make scratch files make them where they are swept
    if job.model.handler or ":" in job.model.metric:
        handler.extend_path()
    if job.model.handler:
        handler.check_found(job.model.handler)
    if job.purpose == "check":
        from prefork import preparation

        preparation.read(job)
        return 0
    Loader(job, log, Channel(channel)).run()
    return 0


class Loader:
    """One job; `run` is the only door."""

    def __init__(self, job: LoaderJob, log: Logger, line: Channel) -> None:
        self._job, self._log, self._line = job, log, line
        self._began = time.monotonic()
        self._cache = self._open_cache()

    def run(self) -> None:
        """Take the model from the cache, or prepare it and fill the cache."""
        if self._cache is None:
            self._make(self._read(), None, "")
            return
        with ExitStack() as locks:
            self._run_cached(self._cache, Digests(self._cache.sources), locks)

    def _run_cached(self, cache: Cache, digests: Digests, locks: ExitStack) -> None:
        source, key = None, self._guess(digests)
        again: set[str] = set()
        while True:
            if key and self._hit(cache, key):
                return
            if key and self._wait(cache, key, locks) and cache.has(key) and key not in again:
                locks.close()  # another stored it meanwhile; whoever waits too need not wait for our copy
                again.add(key)  # but once only: there are entries that can be neither used nor removed
                continue
            source = source or self._read()
            true = self._key_of(digests, source)
            if true in (key, ""):
                break
            key = true  # it has external data that was not known of, or was replaced just now
        self._make(source, cache if true else None, true)

    # the cache

    def _open_cache(self) -> Cache | None:
        if self._job.cache is None:
            return None
        try:
            return Cache(self._job.cache.folder, self._job.cache.limit, self._log)
        except CacheError as e:
            self._complain(e)
            return None

    def _complain(self, error: CacheError) -> None:
        """A cache that cannot be used stops nobody but those who asked for nothing else."""
        if self._job.purpose == "prepare":
            raise error
        self._log.warning("serving without the cache", reason=error.message)

    def _wait(self, cache: Cache, key: str, locks: ExitStack) -> bool:
        """Become the one who prepares it; whether that worked, and so another may have stored it meanwhile."""
        try:
            locks.enter_context(cache.lock(key, PATIENCE))
        except CacheError as e:
            self._complain(e)
            return False
        return True

    def _guess(self, digests: Digests) -> str:
        """The key as far as it is known without reading the model: its external data is what it once was seen to be."""
        path = self._job.model.path
        try:
            main = digests.of(path)
            parts = [digests.of(path.parent / name) for name in digests.parts(main)]
            return self._key_from(digests, [main, *parts])
        except OSError:
            return ""  # reading it will say what is wrong

    def _key_of(self, digests: Digests, source: Source) -> str:
        """The key of the model as it was read; empty when a file has changed since."""
        try:
            main, *parts = [digests.of(path) for path, _ in source.files]
            whole = hashlib.sha256("\n".join([main, *parts]).encode()).hexdigest() if parts else main
            if whole != source.sha256:
                return ""
            if parts:
                folder = self._job.model.path.parent
                digests.remember_parts(main, [str(path.relative_to(folder)) for path, _ in source.files[1:]])
            return self._key_from(digests, [main, *parts])
        except OSError:
            return ""

    def _key_from(self, digests: Digests, files: list[str]) -> str:
        given = cache_key.options(self._job.model, digests.of)
        return cache_key.key(files, given, self._job.kind, cache_key.host())

    def _hit(self, cache: Cache, key: str) -> bool:
        """Whether the cache has it, and all is done."""
        entry = cache.find(key)
        if entry is None:
            return False
        with entry:
            try:
                self._use(entry)
            except Damaged as e:
                cache.remove(key, e)
                return False
        return True

    def _use(self, entry: Entry) -> None:
        """Raises Damaged before anything is published."""
        job = self._job
        manifest = self._named(entry.read("manifest"))
        if job.purpose != "serve":
            entry.verify()
            self._leave(manifest, "cache")
            return
        graph = self._located(entry.read("graph"), entry.place)
        weights = entry.section("weights")
        with self._draft(weights.size, graph, manifest) as draft:
            try:
                found = draft.copy("weights", entry.fd, weights.offset)
            except SegmentError as e:
                raise Damaged(f"cache entry {entry.path}: {e.message}") from None
            entry.check("weights", found)
            self._publish(draft, graph, manifest, "cache")

    # preparing

    def _read(self) -> Source:
        from prefork import preparation

        return preparation.read(self._job)

    def _make(self, source: Source, cache: Cache | None, key: str) -> None:
        from prefork import preparation

        place = placeholder()
        with self._telling() as progress:
            made = preparation.prepare(self._job, source, place, progress)
        if self._job.purpose == "serve":
            graph = self._located(made.graph, place)
            with self._draft(made.weights.stat().st_size, graph, made.manifest) as draft:
                draft.fill("weights", made.weights)
                self._publish(draft, graph, made.manifest, "file")
        else:
            self._leave(made.manifest, "file")
        if cache is not None:
            try:
                cache.store(key, place, {"weights": made.weights, "graph": made.graph, "manifest": made.manifest})
            except CacheError as e:
                self._complain(e)
        elif self._job.purpose == "prepare":
            raise ModelError(f"model file {str(self._job.model.path)!r} changed while it was being prepared; try again")

    @contextmanager
    def _telling(self) -> Iterator[Callable[[str], None]]:
        """How progress is told: drawn where a person looks at the terminal, in lines of the log elsewhere."""
        if not self._log.live:
            yield self._progress
            return
        from prefork.bar import Bar

        with Bar(self._job.model.name) as bar:

            def tell(step: str) -> None:
                bar.tell(step)
                if not self._log.to_terminal:  # the lines go to a file
                    self._progress(step)

            yield tell

    def _hear(self) -> bool:
        """Obey what the master has said meanwhile; whether it holds the segment."""
        said = [message.get("command") for message, _ in self._line.receive()]
        if "reopen" in said:
            self._log.reopen()
        return "held" in said

    def _progress(self, step: str) -> None:
        self._hear()
        done = getattr(step, "fraction", None)  # a report.Step knows how far it is
        self._log.info("preparing", step=str(step), **({} if done is None else {"percent": round(done * 100)}))

    def _leave(self, manifest: bytes, origin: str) -> None:
        (self._job.work_dir / MANIFEST).write_bytes(manifest)
        self._line.send({"event": "done", "report": self._report(json.loads(manifest), origin)})

    # the segment

    def _named(self, manifest: bytes) -> bytes:
        """The manifest with the name and path that this server has for the model."""
        return json.dumps(
            {**json.loads(manifest), "model": self._job.model.name, "source": str(self._job.model.path)}
        ).encode()

    def _located(self, graph: bytes, place: str) -> bytes:
        job = self._job
        return locate(graph, place, segment_name(job.owner, job.generation, job.model.name))

    def _draft(self, weights: int, graph: bytes, manifest: bytes) -> SegmentWriter:
        job, sizes = self._job, [("weights", weights), ("graph", len(graph)), ("manifest", len(manifest))]
        return writer.create(job.kind, sizes, job.owner, job.generation, job.model.name)

    def _publish(self, draft: SegmentWriter, graph: bytes, manifest: bytes, origin: str) -> None:
        """Fill what is left, publish, and stay until the master holds the segment: until then this process does."""
        draft.fill("graph", graph)
        draft.fill("manifest", manifest)
        ref = draft.publish()
        known = json.loads(manifest)
        self._line.send({"event": "done", "segment": ref.to_dict(), "report": self._report(known, origin)})
        while not self._hear() and not self._line.closed:
            self._line.wait()
        for note in known["notes"]:
            self._log.info("note", text=note)

    def _report(self, manifest: Mapping[str, Any], origin: str) -> dict[str, Any]:
        """What the master keeps for people. `origin`: where the prepared form came from, the file or the cache."""
        return {
            "form": manifest["form"],
            "source": manifest["source"],
            "origin": origin,
            "notes": [note[:500] for note in manifest["notes"][:20]],
            "prepare_s": round(time.monotonic() - self._began, 3),
            "signature": signature(manifest["inputs"], manifest["outputs"]),
        }
