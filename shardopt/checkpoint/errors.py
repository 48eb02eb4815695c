"""The errors of saving and loading checkpoints."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved or loaded."""


class LostRanksError(CheckpointError):
    """A collective failed, as when a rank died: whether the other ranks finished their work is unknown."""


class ReplacedError(CheckpointError):
    """Another save replaced the checkpoint while it was being loaded; loading again may succeed."""


class InvalidError(Exception):
    """The content of a file, whose checksum is right, is malformed. Callers turn this into a CheckpointError."""


def demand(holds: object, what: str) -> None:
    """Raises an InvalidError with the message ``what`` unless the condition ``holds``."""
    if not holds:
        raise InvalidError(what)
