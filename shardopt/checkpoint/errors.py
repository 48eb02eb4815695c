"""The errors of saving and loading checkpoints."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint cannot be saved or loaded."""


class LostRanksError(CheckpointError):
    """Ranks cannot talk to each other any more: nobody knows how far the others are."""


class ReplacedError(CheckpointError):
    """Another process saved into the folder while a checkpoint was loaded from it; loading again may succeed."""


class InvalidError(Exception):
    """A file has content that no version of shardopt writes."""


def demand(holds: object, what: str) -> None:
    """Raises InvalidError, with the words, unless the condition holds."""
    if not holds:
        raise InvalidError(what)
