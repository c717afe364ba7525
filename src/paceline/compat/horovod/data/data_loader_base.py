"""The base of loaders, and a mixin that reads batches ahead in a thread."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Any

_WAIT_SECONDS = 0.1


class BaseDataLoader:
    """A loader: subclasses have ``__len__`` and ``_iterate``."""

    def __len__(self) -> int:
        """How many batches there are."""
        raise NotImplementedError

    def _iterate(self) -> Iterator[Any]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        """The batches."""
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _process_batch(self, batch: Any) -> Any:
        """A place to change each batch before it is used."""
        return batch


class AsyncDataLoaderMixin:
    """Put before a loader among the bases, has its batches read ahead in a thread.

    ``async_loader_queue_size`` is how many at most; 0: none, in the caller's thread.
    """

    def __init__(
        self,
        async_loader_queue_size: int = 64,
        debug_data_loader: bool = False,
        *args: Any,
        **options: Any,
    ) -> None:
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        self._reader: _ReadAhead | None = None
        super().__init__(*args, **options)

    def close_async_loader(self) -> None:
        """End the thread, and drop what it has read."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def __iter__(self) -> Iterator[Any]:
        """The batches, read ahead."""
        loader: Any = self
        self.close_async_loader()
        if self.async_loader_queue_size <= 0:
            batches = loader._iterate()
        else:
            self._reader = _ReadAhead(loader._iterate(), self.async_loader_queue_size)
            batches = self._reader.batches()
        for batch in batches:
            yield loader._process_batch(batch)


class _ReadAhead:
    """One pass over batches, read by a thread."""

    def __init__(self, source: Iterator[Any], most: int) -> None:
        self._queue: queue.Queue[tuple[Any, BaseException | None, bool]] = queue.Queue(most)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(source,), daemon=True)
        self._thread.start()

    def batches(self) -> Iterator[Any]:
        """What was read; an error of the source is raised here."""
        while True:
            batch, error, is_last = self._queue.get()
            if error is not None:
                raise error
            if is_last:
                return
            yield batch

    def close(self) -> None:
        """Stop reading."""
        self._stopped.set()
        self._thread.join()

    def _read(self, source: Iterator[Any]) -> None:
        try:
            for batch in source:
                if not self._put((batch, None, False)):
                    return
            self._put((None, None, True))
        except Exception as error:
            self._put((None, error, True))

    def _put(self, item: tuple[Any, BaseException | None, bool]) -> bool:
        while not self._stopped.is_set():
            with contextlib.suppress(queue.Full):
                self._queue.put(item, timeout=_WAIT_SECONDS)
                return True
        return False
