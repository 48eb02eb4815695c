"""torch's own tests of optimizers, test/test_optim.py of PyTorch's source, run unchanged over our rules.

PyTorch's wheels hold the database that the tests go over, ``torch.testing._internal.common_optimizers``, but not the
tests. The environment variable PYTORCH_TESTS names the ``test`` folder of a checkout of PyTorch, of the tag of the
torch that is installed; the database needs ``expecttest``. The imports change flags of torch for the whole process, so
run this file by itself::

    PYTORCH_TESTS=.../pytorch/test pytest tests/clients/test_torch_optim_suite.py

The database says that no rule is for sparse or complex parameters or differentiable, and that none has the variants
``foreach`` and ``fused``, flags that all rules accept and ignore: torch makes no tests of these.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardopt
from helpers import CASES, RuleCase
from shardopt.layout import block_grid
from shardopt.optim import ShardedOptimizer

FOLDER = os.environ.get("PYTORCH_TESTS")
if FOLDER is None:
    pytest.skip(
        "PYTORCH_TESTS is not set: clone PyTorch's source at the tag "
        f"v{torch.__version__.partition('+')[0]}, and let PYTORCH_TESTS name its folder 'test'",
        allow_module_level=True,
    )
pytest.importorskip("expecttest", reason="expecttest not installed: pip install expecttest")

database: Any = importlib.import_module("torch.testing._internal.common_optimizers")

#: Hyper-parameters of the cases that are too large to train with.
USUAL: dict[str, dict[str, Any]] = {
    "prodigy": {"d_coef": 1.0, "weight_decay": 0.1},
    "decoupled_prodigy": {"d_coef": 1.0},
}
CODECS = ("fp32", "log8")

#: Tests of torch that are not for a class of ours, with the reason.
SKIPS = {
    (shardopt.Prodigy, "test_param_groups_lr"): "Prodigy refuses param groups with different lr",
    (shardopt.Prodigy, "test_param_group_with_lrscheduler_goes_right_direction"): (
        "Prodigy refuses param groups with different lr"
    ),
}


class RuleInfo(database.OptimizerInfo):  # type: ignore[misc]
    """A rule of ours with a codec, as an entry of torch's database."""

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
            skips=[
                database.DecorateInfo(unittest.skip(reason), "TestOptimRenewed", test)
                for (optimizer, test), reason in SKIPS.items()
                if case.optimizer is optimizer
            ],
        )

    @property
    def name(self) -> str:
        return f"{self.rule}_{self.codec}"

    def inputs(self, device: str, dtype: torch.dtype | None = None) -> list[Any]:
        """Options that each test goes over; the decay is always among them, for some tests leave it out."""
        no_decay = {**self.hyper, "weight_decay": 0.0}
        options = {
            "defaults": {"weight_decay": 0.0},
            "all terms": dict(self.hyper),
            "another lr": {**no_decay, "lr": self.hyper.get("lr", 1e-3) / 2},
            "maximize": {**no_decay, "maximize": True},
            "maximize, all terms": {**self.hyper, "maximize": True},
        }
        return [database.OptimizerInput(params=None, kwargs=kwargs, desc=desc) for desc, kwargs in options.items()]

    def errors(self, device: str, dtype: torch.dtype) -> list[Any]:
        """torch's errors of all optimizers, and options out of range.

        torch's own check of a tensor as lr has no parameters at all, which it looks at later than ``ShardedOptimizer``.
        """
        param = torch.nn.Parameter(torch.zeros(1, 1, device=device, dtype=dtype))
        wrong: dict[str, tuple[object, str]] = {
            "lr": (torch.tensor([0.001, 0.001]), "a tensor of 2 elements"),
            "weight_decay": (-1.0, "-1.0"),
            "codec": ("none", "'none'"),
            "block_size": (100, "100"),
            "differentiable": (True, "True"),
        }
        return [
            *(
                error
                for error in database.get_error_inputs_for_all_optims(device, dtype)
                if error.optimizer_error_input.params is not None
            ),
            *(
                database.ErrorOptimizerInput(
                    database.OptimizerInput(params=[param], kwargs={name: value}, desc=name),
                    error_type=ValueError,
                    error_regex=f"{name}: got {got}",
                )
                for name, (value, got) in wrong.items()
            ),
        ]


def with_codec(optimizer: type[ShardedOptimizer], codec: str) -> type[ShardedOptimizer]:
    """The class with other defaults, under its own name, by which torch's tests know Muon and AdamW."""

    def init(self: ShardedOptimizer, params: Any, **options: Any) -> None:
        optimizer.__init__(self, params, **{"codec": codec, "min_quantized_numel": 1, **options})

    return type(optimizer.__name__, (optimizer,), {"__init__": init})


def torch_suite(folder: Path) -> dict[str, type]:
    """Imports torch's file with our rules for its database: its test classes, by name."""
    database.optim_db = [
        RuleInfo(rule, case, codec) for rule, case in CASES.items() for codec in CODECS if rule != "muon_in_waves"
    ]
    if not (folder / "test_optim.py").is_file():
        raise FileNotFoundError(f"PYTORCH_TESTS: got {folder}, expected the folder 'test' of PyTorch's source")
    sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location("torch_test_optim", folder / "test_optim.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return {name: each for name, each in vars(module).items() if name.startswith("TestOptimRenewed")}


@pytest.fixture(scope="module", autouse=True)
def _quantize_short_rows() -> Iterator[None]:
    """The rows of torch's parameters have 1 to 10 elements, which shardopt would keep in float32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_grid, "MIN_ROW_NUMEL", 1)
        yield


globals().update(torch_suite(Path(FOLDER)))


@pytest.mark.parametrize("info", database.optim_db, ids=lambda info: info.name)
def test_matrices_are_quantized_by_log8(info: RuleInfo) -> None:
    """The tests of torch would show nothing of log8 if their parameters kept float32 state."""
    for options in info.inputs("cpu"):
        param = torch.nn.Parameter(torch.randn(2, 3))
        optimizer = info.optim_cls([param], **options.kwargs)
        param.grad = torch.ones_like(param)
        optimizer.step()
        moments = optimizer.state[param].keys() - {"step"}
        assert any(name.endswith("_codes") for name in moments) == (info.codec == "log8" and bool(moments))
