"""The errors of saving and loading checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved or loaded."""


class ReplacedError(CheckpointError):
    """Another process saved into the folder while a checkpoint was loaded from it; loading again may succeed."""


@contextmanager
def plain_errors(on_failure: Callable[[], None] | None = None) -> Iterator[None]:
    """Turns the exception that torch.distributed.checkpoint raises on every rank if some fail into a CheckpointError.

    The error has the message of each failed rank; the original exception, with the ranks' tracebacks, is the error's
    cause. On a rank that was interrupted, the interruption (such as KeyboardInterrupt) is raised instead.

    Args:
        on_failure: cleans up after any error, before this function raises, such as :meth:`PortableWriter.discard`.
            Errors in the cleaning up are dropped.

    Raises:
        ReplacedError: every rank that failed raised a ReplacedError.
        CheckpointError: a rank failed with another error.
    """
    try:
        yield
    except BaseException as error:
        if on_failure is not None:
            with suppress(Exception):  # the first error matters
                on_failure()
        if isinstance(error, CheckpointException):
            raise _plain(error) from error
        raise


def _plain(error: CheckpointException) -> BaseException:
    failures = {rank: failure[0] for rank, failure in sorted(error.failures.items())}
    here = failures.get(dist.get_rank() if dist.is_initialized() else 0)
    if here is not None and not isinstance(here, Exception):
        return here
    ranks: dict[str, list[int]] = {}
    for rank, failure in failures.items():
        kind = "" if isinstance(failure, CheckpointError) else f"{type(failure).__name__}: "
        ranks.setdefault(f"{kind}{failure}", []).append(rank)
    lines = [f"rank {', '.join(map(str, of))}: {message}" for message, of in ranks.items()]
    replaced = all(isinstance(failure, ReplacedError) for failure in failures.values())
    return (ReplacedError if replaced else CheckpointError)("\n".join(lines))
