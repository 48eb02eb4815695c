"""Frameworks of reinforcement learning: each builds our optimizers as its code does, moves their state, and resumes.

verl and NeMo Automodel run themselves where they are installed, each in an environment of its own (``nemo-automodel``
with ``--no-deps`` on a machine without CUDA).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

import shardopt
from hugging_face import save_model
from needed import needs
from ranks.models import make_frozen, make_net, named_parameters, set_gradients
from ranks.pool import Pool
from ranks.snapshot import assert_same, snapshot

verl = needs("verl")
PAGE = Path(__file__).parents[2] / "docs" / "reinforcement_learning.md"


def _of_the_page() -> Callable[..., shardopt.Muon8bit]:
    """The function of docs/reinforcement_learning.md."""
    (code,) = re.findall(r"```python\n(.*?def muon.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    found: dict[str, Any] = {}
    exec(code, found)
    return found["muon"]


muon = _of_the_page()


class Copying(TorchFunctionMode):
    """``tensor.to(device)`` makes a copy, as between two devices."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result.clone() if function is Tensor.to and result is args[0] else result


def test_muon_by_shape() -> None:
    model = make_frozen(0)
    optimizer = muon(model.parameters(), vocabulary=97, adamw_lr=1e-3, lr=1e-2, weight_decay=0.1)
    names = {param: name for name, param in model.named_parameters()}
    by_muon, by_adamw = ({names[param] for param in group["params"]} for group in optimizer.param_groups)
    assert by_muon == {"up.weight", "down.weight", "conv.weight", "gate.weight"}
    assert "head.weight" in by_adamw
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1e-3]
    set_gradients(model, 0)
    optimizer.step()


# verl itself.


@verl
@pytest.mark.client_ranks(1)
@pytest.mark.parametrize(
    ("name", "override", "module", "expected"),
    [
        ("Lion8bit", None, "shardopt", {"lr": 1e-6, "betas": (0.9, 0.99)}),
        ("AdEMAMix8bit", {"betas": [0.9, 0.999, 0.9999]}, "shardopt", {"betas": [0.9, 0.999, 0.9999]}),
        ("muon", {"vocabulary": 97, "adamw_lr": 1e-6}, __name__, {"algorithm": "muon"}),
    ],
)
def test_verl_builds(name: str, override: dict[str, Any] | None, module: str, expected: dict[str, Any]) -> None:
    """Only classes with "adam" in their names get verl's betas; ``test_verl_reads_the_example`` builds AdamW8bit."""
    from verl.workers.config.optimizer import FSDPOptimizerConfig, build_optimizer

    config = FSDPOptimizerConfig(
        optimizer=name, optimizer_impl=module, lr=1e-6, betas=(0.9, 0.98), override_optimizer_config=override
    )
    model = make_net()
    optimizer = build_optimizer(model.parameters(), config)
    set_gradients(model, 0)
    optimizer.step()
    assert type(optimizer).__name__ == {"muon": "Muon8bit"}.get(name, name)
    assert {option: optimizer.param_groups[0][option] for option in expected} == expected


def use_cpu() -> None:
    """Tells verl that the CPU is an accelerator, and FSDP1, too; verl's load of FSDP1's weights has nothing to do."""
    from torch.distributed.fsdp import _init_utils
    from verl.plugin.platform import set_platform
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    memory = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    module = SimpleNamespace(
        empty_cache=lambda: None,
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
        mem_get_info=lambda: (0, 0),
        **dict.fromkeys(memory, lambda: 0),
    )

    class PlatformCPU(PlatformCUDA):  # type: ignore[misc]
        device_name = "cpu"
        device_module = module

        def is_available(self) -> bool:
            return True

        def current_device(self) -> Any:
            return torch.device("cpu")

        def communication_backend_name(self) -> str:
            return "gloo"

    set_platform(PlatformCPU())
    from verl.workers.engine.fsdp import transformer_impl

    _init_utils._check_module_states_for_sync_module_states = lambda states: None
    transformer_impl.load_fsdp_model_to_gpu = lambda model: None


def batch(seed: int, rank: int) -> Any:
    """Two sequences of verl's format."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils

    generator = torch.Generator().manual_seed(10 * seed + rank)
    tokens = [torch.randint(3, 60, (length,), generator=generator) for length in (9, 12)]

    def nested(tensors: Iterator[Tensor]) -> Tensor:
        return torch.nested.as_nested_tensor(list(tensors), layout=torch.jagged)

    made = TensorDict(
        {
            "input_ids": nested(iter(tokens)),
            "position_ids": nested(torch.arange(len(x)) for x in tokens),
            "loss_mask": nested(torch.ones(len(x)) for x in tokens),
        },
        batch_size=2,
    )
    settings = {"use_remove_padding": False, "use_dynamic_bsz": False, "use_fused_kernels": False}
    tensordict_utils.assign_non_tensor(
        made, micro_batch_size_per_gpu=2, global_batch_size=2 * dist.get_world_size(), temperature=1.0, **settings
    )
    return made


def engine(model: Path, strategy: str, dtype: str) -> Any:
    """verl's engine with AdamW8bit, which offloads weights and state between steps."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    made = FSDPEngineWithLMHead(
        HFModelConfig(
            path=str(model),
            external_lib="shardopt",
            use_remove_padding=False,
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "sdpa"},
        ),
        FSDPEngineConfig(
            strategy=strategy, model_dtype=dtype, use_torch_compile=False, param_offload=True, optimizer_offload=True
        ),
        FSDPOptimizerConfig(
            optimizer="AdamW8bit",
            optimizer_impl="shardopt",
            lr=1e-3,
            total_training_steps=4,
            override_optimizer_config={"min_quantized_numel": 64},
        ),
        CheckpointConfig(),
    )
    made.initialize()
    return made


def train(made: Any, step: int) -> None:
    from verl.workers.utils.losses import sft_loss

    with Copying(), made.train_mode():
        made.train_batch(batch(step, dist.get_rank()), partial(sft_loss, config=None))
        made.lr_scheduler_step()


def resumed(folder: Path, strategy: str, dtype: str) -> None:
    """An engine that was saved after two of three steps and loaded ends with the bits of one that went on."""
    use_cpu()
    runs = []
    for _ in range(2):
        made = engine(folder / "model", strategy, dtype)
        if runs:
            made.load_checkpoint(str(folder / "saved"), del_local_after_load=False)
        else:
            train(made, 0)
            train(made, 1)
            made.save_checkpoint(str(folder / "saved"), global_step=2)
        train(made, 2)
        runs.append(snapshot(named_parameters(made.module), made.optimizer))
    assert_same(*runs)
    assert any(name.endswith("exp_avg_sq_codes") for name in runs[0])


@verl
@pytest.mark.parametrize(
    ("size", "strategy", "dtype"), [(1, "fsdp2", "fp32"), (2, "fsdp2", "bf16"), (2, "fsdp", "fp32")]
)
def test_verls_engine_resumes(client_ranks: Pool, tmp_path: Path, size: int, strategy: str, dtype: str) -> None:
    client_ranks.run(1, save_model, tmp_path / "model")
    client_ranks.run(size, resumed, tmp_path, strategy, dtype, timeout=300)


@needs("nemo_automodel")
@pytest.mark.client_ranks(1)
@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("shardopt.AdamW8bit", {"lr": 1e-5, "betas": [0.9, 0.999]}, ["AdamW8bit", "log8"]),
        (f"{__name__}.muon", {"vocabulary": 97, "adamw_lr": 1e-5}, ["Muon8bit", "log8", "log8"]),
    ],
)
def test_automodel_builds(name: str, options: dict[str, Any], expected: list[str]) -> None:
    from nemo_automodel.components.optim.optimizer import build_optimizer

    model = make_frozen(0)
    (optimizer,) = build_optimizer(model, (name, options))
    set_gradients(model, 0)
    optimizer.step()
    assert [type(optimizer).__name__, *(str(group.get("codec")) for group in optimizer.param_groups)] == expected
