"""Megatron-Core's DistributedOptimizer with shardopt's optimizers on the CPU, in the processes of a pool.

Megatron is made for CUDA. Here its tensors are on the CPU: a torch function mode puts tensors for "cuda" there and has
``Tensor.type()`` say what Megatron expects; three functions of torch.cuda and Megatron's random state of the device are
replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import shardopt
from ranks.layouts import values
from ranks.models import make_net
from shardopt.optim import ShardedOptimizer

LR, DECAY = 1e-2, 0.1
OPTIONS = {"min_quantized_numel": 64}
BUCKET = 4000  # elements: several buckets, and parameters cut in the middle of blocks


class _OnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return result.replace("torch.", "torch.cuda.", 1)
        return result


@contextmanager
def on_cpu() -> Iterator[None]:
    """Inside, Megatron runs on the CPU."""
    with (
        _OnCpu(),
        mock.patch("torch.cuda.current_device", return_value=torch.device("cpu")),
        mock.patch("torch.cuda.current_stream"),
        mock.patch("torch.cuda.synchronize"),
        mock.patch("megatron.core.tensor_parallel.random.CudaRNGStatesTracker.fork", return_value=nullcontext()),
    ):
        yield


def divide(tensor_parallel: int = 1) -> None:
    """Makes Megatron's process groups."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        if parallel_state.get_tensor_model_parallel_world_size() == tensor_parallel:
            return
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)


class Run(NamedTuple):
    """A model as Megatron trains it.

    Attributes:
        bare: the model.
        chunk: Megatron's DistributedDataParallel around it.
        optimizer: the result of get_megatron_optimizer.
    """

    bare: nn.Module
    chunk: Any
    optimizer: Any

    @property
    def inner(self) -> Any:
        """The DistributedOptimizer."""
        (wrapper,) = self.optimizer.chained_optimizers
        return wrapper


def make(dtype: torch.dtype, seed: int = 0, net: nn.Module | None = None, overrides: Any = None, **config: Any) -> Run:
    """A model under Megatron's DistributedDataParallel, with Megatron's Adam. To be called within :func:`on_cpu`."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    divide()
    bf16 = dtype == torch.bfloat16
    of_model = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True, bf16=bf16, params_dtype=dtype
    )
    bare = make_net(dtype, seed) if net is None else net
    of_ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, bucket_size=BUCKET, average_in_collective=False
    )
    chunk = DistributedDataParallel(of_model, of_ddp, bare)
    options = {"optimizer": "adam", "lr": LR, "weight_decay": DECAY, "use_distributed_optimizer": True, **config}
    # A norm that is never reached: Megatron's sum of squares has another order on each number of ranks.
    of_optimizer = OptimizerConfig(bf16=bf16, params_dtype=dtype, clip_grad=1e30, **options)
    return Run(bare, chunk, get_megatron_optimizer(of_optimizer, [chunk], config_overrides=overrides))


def replaced(
    dtype: torch.dtype,
    seed: int = 0,
    optimizer_class: Any = shardopt.AdamW8bit,
    net: nn.Module | None = None,
    **options: Any,
) -> Run:
    """A model as of :func:`make`, with one of shardopt's optimizers in place of Megatron's Adam."""
    from shardopt.clients.megatron import replace_adam

    run = make(dtype, seed, net)
    assert replace_adam(run.optimizer, optimizer_class, **OPTIONS, **options) is run.optimizer
    return run


def make_gpt(tensor_parallel: int) -> tuple[Any, Any]:
    """The config and the model of a small GPT of Megatron's own layers: this rank's tensor-parallel part."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=2,
        hidden_size=48,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tensor_parallel,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return config, GPTModel(config, get_gpt_layer_local_spec(), vocab_size=100, max_sequence_length=16)


def loss_of_gpt(model: Any, step: int) -> Tensor:
    """The mean loss of a batch, the same on all ranks."""
    tokens = torch.randint(100, (2, 16), generator=torch.Generator().manual_seed(step))
    mask = torch.triu(torch.ones(1, 1, 16, 16, dtype=torch.bool), 1)
    loss: Tensor = model(tokens, torch.arange(16).expand(2, 16), mask, labels=tokens).mean()
    return loss


def gradient_of(param: Tensor, index: int, step: int) -> Tensor:
    """The gradient of a parameter in a step, the same on all ranks."""
    return values(tuple(param.shape), 100 * step + index, param.dtype)


def train(run: Run, first: int, last: int) -> None:
    """Steps with given gradients: those that Megatron's reduce-scatter leaves in its buffers."""
    for step in range(first, last):
        run.chunk.zero_grad_buffer()
        run.optimizer.zero_grad()
        for index, param in enumerate(run.bare.parameters()):
            param.main_grad.copy_(gradient_of(param, index, step))
        succeeded, _, _ = run.optimizer.step()
        assert succeeded


class Unsharded(NamedTuple):
    """The unsharded run of the same steps: float32 masters of one process, and the model that they are copied to."""

    model: nn.Module
    masters: nn.Module
    optimizer: ShardedOptimizer

    @classmethod
    def make(
        cls, dtype: torch.dtype, seed: int = 0, optimizer_class: Any = shardopt.AdamW8bit, **options: Any
    ) -> Unsharded:
        """A model, and masters of its values; Megatron's two param groups, of matrices and of the rest."""
        model = make_net(dtype, seed)
        masters = make_net()
        masters.load_state_dict({name: x.float() for name, x in model.state_dict().items()})
        params = list(masters.parameters())
        groups = [{"params": [p for p in params if p.dim() > 1]}, {"params": [p for p in params if p.dim() == 1]}]
        return cls(model, masters, optimizer_class(groups, lr=LR, weight_decay=DECAY, **OPTIONS, **options))

    def train(self, first: int, last: int) -> None:
        """Steps as :func:`train` does."""
        for step in range(first, last):
            pairs = zip(self.model.parameters(), self.masters.parameters(), strict=True)
            for index, (param, master) in enumerate(pairs):
                master.grad = gradient_of(param, index, step).float()
            self.optimizer.step()
            self.model.load_state_dict(self.masters.state_dict())
