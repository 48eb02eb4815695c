"""Removed names and options end with a sentence that says what to use instead."""

from __future__ import annotations

import pytest

import shardopt
from shardopt.removed import REMOVED


@pytest.mark.parametrize("name", REMOVED)
def test_names(name: str) -> None:
    assert not hasattr(shardopt, name)
    said = f"; {name} was removed: {REMOVED[name]}"
    with pytest.raises(AttributeError) as attribute:
        getattr(shardopt, name)
    with pytest.raises(ImportError) as imported:
        exec(f"from shardopt import {name}", {})
    assert str(attribute.value).endswith(said)
    assert str(imported.value).endswith(said)
