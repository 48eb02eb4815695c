"""8-bit optimizers for sharded training: a step gives the same bits however parameters are sharded."""

import importlib as _importlib
import sys as _sys
import typing as _typing

try:
    _importlib.import_module("shardopt._C")
except ModuleNotFoundError as _error:  # not built; an extension that is built but fails to load raises ImportError
    if _error.name != "shardopt._C":
        raise
    raise ImportError(
        f"shardopt in {__path__[0]} is not built for {_sys.implementation.cache_tag}: start Python in another "
        "folder if the package is installed by pip install . (run pytest, not python -m pytest, and shardopt, not "
        "python -m shardopt), or build it there (python setup.py build_ext --inplace)"
    ) from None

from shardopt import optim as _optim
from shardopt import removed as _removed
from shardopt import sharding as _sharding  # noqa: F401  registers the kinds of shards
from shardopt.clients.names import register
from shardopt.optim import *  # noqa: F403  all optimizers
from shardopt.optim.clip import clip_grad_norm_
from shardopt.optim.muon_groups import muon_groups
from shardopt.optim.param_groups import ParamGroups, param_groups
from shardopt.optim.stable_embedding import StableEmbedding
from shardopt.release.gradient_release import GradientRelease, release_gradients
from shardopt.report import MemoryReport, memory_report
from shardopt.wrapper import quantize_state

if _typing.TYPE_CHECKING:  # see __getattr__
    from shardopt import checkpoint as checkpoint
    from shardopt import comm as comm
    from shardopt import unit as unit

__version__ = "0.2.0.dev0"

__all__ = [
    "GradientRelease",
    "MemoryReport",
    "ParamGroups",
    "StableEmbedding",
    "clip_grad_norm_",
    "memory_report",
    "muon_groups",
    "param_groups",
    "quantize_state",
    "register",
    "release_gradients",
]
__all__ += _optim.__all__


def __getattr__(name: str) -> object:
    """Imports checkpoint, comm and unit on first use, as they are slow to import; explains names that were removed."""
    if name in ("checkpoint", "comm", "unit"):
        return _importlib.import_module(f"shardopt.{name}")
    # "from shardopt import NAME" would replace an AttributeError's text by Python's own, but not an ImportError's.
    explanation = _removed.explain_removed([name])
    is_from = bool(explanation) and _sys._getframe(1).f_code.co_name == "_handle_fromlist"
    text = f"module 'shardopt' has no attribute {name!r}{explanation}"
    # Python guesses a name that is meant from ``obj``: with None it does not beside an explanation.
    raise ImportError(text) if is_from else AttributeError(text, **({"name": name, "obj": None} if explanation else {}))
