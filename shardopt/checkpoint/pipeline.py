"""Threads that read or write a few pieces ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

T = TypeVar("T")

THREADS = 2
#: Most jobs under way, from a job's start until the caller has used the result.
AHEAD = THREADS + 1


@contextmanager
def computed_ahead(jobs: Iterable[Callable[[], T]]) -> Iterator[Iterator[T]]:
    """The jobs' results in order, computed by threads a few jobs ahead of the caller.

    Iterates over ``jobs`` in the caller's thread, which computes all of them if the system refuses threads. The threads
    end with the context, also after an error.
    """
    # Not a ThreadPoolExecutor, which an asynchronous save could not use while the interpreter exits and waits for it.
    todo: SimpleQueue[tuple[Future[T], Callable[[], T]] | None] = SimpleQueue()
    threads: list[Thread] = []
    pending: deque[Future[T]] = deque()

    def results() -> Iterator[T]:
        for job in jobs:
            if not threads:
                yield job()
                continue
            future: Future[T] = Future()
            pending.append(future)
            todo.put((future, job))
            if len(pending) == AHEAD:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    try:
        with suppress(RuntimeError):  # what there are will do
            for _ in range(THREADS):
                thread = Thread(target=_work, args=(todo,), daemon=True)
                thread.start()
                threads.append(thread)
        yield results()
    finally:
        for future in pending:
            future.cancel()
        for _ in threads:
            todo.put(None)
        for thread in threads:
            thread.join()


def _work(todo: SimpleQueue[tuple[Future[T], Callable[[], T]] | None]) -> None:
    while (task := todo.get()) is not None:
        future, job = task
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(job())
        except BaseException as error:
            future.set_exception(error)
