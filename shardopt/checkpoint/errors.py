"""What goes wrong with a checkpoint, as an error that says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved or loaded."""


@contextmanager
def plain_errors(on_failure: Callable[[], None] | None = None) -> Iterator[None]:
    """Turns what torch.distributed.checkpoint raises on every rank, when some fail, into a CheckpointError.

    It says what each failed rank said; the original, with the ranks' tracebacks, is its cause.

    Args:
        on_failure: called first, such as :meth:`PortableWriter.discard`.

    Raises:
        CheckpointError: some ranks failed.
    """
    try:
        yield
    except CheckpointException as error:
        if on_failure is not None:
            on_failure()
        failures = {rank: failure[0] for rank, failure in sorted(error.failures.items())}
        if not all(isinstance(failure, Exception) for failure in failures.values()):
            raise  # somebody wants to stop
        ranks: dict[str, list[int]] = {}
        for rank, failure in failures.items():
            kind = "" if isinstance(failure, CheckpointError) else f"{type(failure).__name__}: "
            ranks.setdefault(f"{kind}{failure}", []).append(rank)
        lines = [f"rank {', '.join(map(str, of))}: {message}" for message, of in ranks.items()]
        raise CheckpointError("\n".join(lines)) from error
