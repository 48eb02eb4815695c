"""Marks of tests that need packages which shardopt does without."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

#: Extras of packages that need other versions of transformers than ``clients``, and so an environment of their own.
ALONE = {"nemo_automodel": "nemo-automodel", "verl": "verl"}


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skips a test where one of these packages is missing, and says which; nothing is imported."""
    missing = [package for package in packages if find_spec(package) is None]
    extras = ",".join(ALONE[package] for package in missing if package in ALONE) or "clients,deepspeed,megatron-core"
    reason = f"{', '.join(missing)} not installed: pip install 'shardopt[{extras}]'"
    return pytest.mark.skipif(bool(missing), reason=reason)
