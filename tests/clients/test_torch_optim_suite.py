"""torch's own tests of optimizers, test/test_optim.py of PyTorch's source, run unchanged over our rules.

PyTorch's wheels hold the database that the tests go over, ``torch.testing._internal.common_optimizers``, but not the
tests. The environment variable PYTORCH_TESTS names the ``test`` folder of a checkout of PyTorch, of the tag of the
torch that is installed; the database needs ``expecttest``. The imports change flags of torch for the whole process, so
run this file by itself::

    PYTORCH_TESTS=.../pytorch/test pytest tests/clients/test_torch_optim_suite.py

Sparse, complex and differentiable optimizers, and the flags ``foreach`` and ``fused``, are none of ours: the database
says so, and torch makes no tests of them.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import CASES, RuleCase
from shardopt.optim import ShardedOptimizer

FOLDER = os.environ.get("PYTORCH_TESTS")
if FOLDER is None:
    pytest.skip(
        "PYTORCH_TESTS is not set: git clone --depth 1 --branch v"
        f"{torch.__version__.partition('+')[0]} the source of PyTorch, and let it name the folder 'test' there",
        allow_module_level=True,
    )
pytest.importorskip("expecttest", reason="expecttest not installed: pip install expecttest")

from torch.testing._internal import common_optimizers
from torch.testing._internal.common_optimizers import ErrorOptimizerInput, OptimizerInfo, OptimizerInput

#: Hyper-parameters of the cases that are too large to train with.
USUAL: dict[str, dict[str, Any]] = {"decoupled_prodigy": {"d_coef": 1.0}}
CODECS = ("fp32", "log8")


class RuleInfo(OptimizerInfo):  # type: ignore[misc]
    """A rule of ours with a codec, as an entry of torch's database; small parameters are quantized, too."""

    def __init__(self, rule: str, case: RuleCase, codec: str) -> None:
        self.rule, self.codec = rule, codec
        self.hyper = {"weight_decay": 0.0, **case.hyper, **USUAL.get(rule, {})}
        if rule == "repaid_adamw":
            self.hyper["repay"] = codec == "log8"
        super().__init__(
            with_codec(case.optimizer, codec),
            optim_inputs_func=self.inputs,
            optim_error_inputs_func=self.errors,
            supported_impls=(),
            supports_complex=False,
        )

    @property
    def name(self) -> str:
        return f"{self.rule}_{self.codec}"

    def inputs(self, device: str, dtype: torch.dtype | None = None) -> list[OptimizerInput]:
        """Options that each test goes over; the decay is always among them, for some tests leave it out."""
        no_decay = {**self.hyper, "weight_decay": 0.0}
        options = {
            "defaults": {"weight_decay": 0.0},
            "all terms": dict(self.hyper),
            "another lr": {**no_decay, "lr": self.hyper.get("lr", 1e-3) / 2},
            "maximize": {**no_decay, "maximize": True},
            "maximize, all terms": {**self.hyper, "maximize": True},
        }
        return [OptimizerInput(params=None, kwargs=kwargs, desc=desc) for desc, kwargs in options.items()]

    def errors(self, device: str, dtype: torch.dtype) -> list[ErrorOptimizerInput]:
        """torch's errors of all optimizers, and options out of range."""
        wrong: Mapping[str, Any] = {"lr": -1.0, "weight_decay": -1.0, "codec": "none", "block_size": 100}
        param = torch.nn.Parameter(torch.zeros(1, 1, device=device, dtype=dtype))
        return [
            *common_optimizers.get_error_inputs_for_all_optims(device, dtype),
            *(
                ErrorOptimizerInput(
                    OptimizerInput(params=[param], kwargs={name: value}, desc=name),
                    error_type=ValueError,
                    error_regex=rf"{name}: got {value!r}",
                )
                for name, value in wrong.items()
            ),
        ]


def with_codec(optimizer: type[ShardedOptimizer], codec: str) -> type[ShardedOptimizer]:
    """The class with other defaults, under its own name, by which torch's tests know Muon and AdamW."""

    def init(self: ShardedOptimizer, params: Any, **options: Any) -> None:
        optimizer.__init__(self, params, **{"codec": codec, "min_quantized_numel": 1, **options})

    return type(optimizer.__name__, (optimizer,), {"__init__": init})


def torch_suite(folder: Path) -> dict[str, type]:
    """Imports torch's file with our rules for its database: its test classes, by name."""
    common_optimizers.optim_db = [
        RuleInfo(rule, case, codec) for rule, case in CASES.items() for codec in CODECS if rule != "muon_in_waves"
    ]
    sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location("torch_test_optim", folder / "test_optim.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return {name: each for name, each in vars(module).items() if name.startswith("TestOptimRenewed")}


globals().update(torch_suite(Path(FOLDER)))
