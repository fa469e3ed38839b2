"""From a file into a segment by the kernel's own copy, checksummed where it lands, both at the same time. Loader only.

Knows descriptors and a view; opens nothing.
"""

from __future__ import annotations

import os
import threading

from prefork.errors import SegmentError
from prefork.shm import layout

CHUNK = 4 << 20  # what is checksummed is still in the last-level cache
_FILE_BYTES = 1 << 16  # read and written where there is no descriptor to copy to


class _Copier(threading.Thread):
    """Copies `size` bytes of `source` from `offset` to `target` at `start`; `done` is released at each chunk."""

    def __init__(self, source: int, offset: int, target: int, start: int, size: int) -> None:
        super().__init__(name="copier", daemon=True)
        self._source, self._offset, self._target, self._start, self._size = source, offset, target, start, size
        self.done = threading.Semaphore(0)
        self.error: OSError | EOFError | None = None

    def run(self) -> None:
        try:
            os.lseek(self._target, self._start, os.SEEK_SET)
            at = 0
            while at < self._size:
                end = min(at + CHUNK, self._size)
                while at < end:
                    count = os.sendfile(self._target, self._source, self._offset + at, end - at)
                    if count == 0:
                        raise EOFError(f"the source ended after {at}")
                    at += count
                self.done.release()
        except (OSError, EOFError) as e:
            self.error = e
            self.done.release()


def copy(source: int, offset: int, target: int, start: int, view: memoryview) -> int:
    """Fill `view`, which maps the file `target` from `start`, from the file `source` at `offset`; its checksum.

    The checksum is of what stands in `view` afterwards. Raises SegmentError when the source ends too early or cannot be
    read."""
    copier = _Copier(source, offset, target, start, len(view))
    copier.start()
    crc = 0
    try:
        for at in range(0, len(view), CHUNK):
            copier.done.acquire()
            if copier.error is not None:
                reason = getattr(copier.error, "strerror", None) or copier.error
                raise SegmentError(f"expected {len(view)} bytes from offset {offset}: {reason}")
            with view[at : at + CHUNK] as chunk:
                crc = layout.checksum(chunk, crc)
    finally:
        copier.join()
    return crc


def read(source: int, offset: int, view: memoryview) -> int:
    """The same by reading, for memory without a descriptor."""
    crc, at = 0, 0
    while at < len(view):
        with view[at : at + _FILE_BYTES] as chunk:
            count = os.preadv(source, [chunk], offset + at)
            if count == 0:
                raise SegmentError(f"expected {len(view)} bytes from offset {offset}: the source ended after {at}")
            with chunk[:count] as got:
                crc = layout.checksum(got, crc)
        at += count
    return crc
