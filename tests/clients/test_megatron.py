"""Megatron-Core's DistributedOptimizer with our kernels on its ranges, on the CPU.

Megatron is made for CUDA. Here its tensors are on the CPU: a torch function mode puts tensors for "cuda" there and has
``Tensor.type()`` say what Megatron expects; three functions of torch.cuda and Megatron's random state of the device are
replaced.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import shardopt
from needed import needs
from ranks.layouts import values
from ranks.models import make_net
from ranks.pool import Pool
from ranks.snapshot import assert_same, snapshot
from shardopt.optim import ShardedOptimizer

pytestmark = needs("megatron")
STEPS = 3
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
    """A model, Megatron's DistributedDataParallel around it (a chunk), and the result of get_megatron_optimizer."""

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


def adamw_for_vectors() -> Any:
    """The overrides that docs/megatron.md has for Muon."""
    from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

    vectors = ParamKey(predicate=ParamPredicate(name="vectors", fn=lambda param: param.dim() < 2))
    return {vectors: {"algorithm": "adamw"}}


def replaced(
    dtype: torch.dtype,
    seed: int = 0,
    optimizer_class: Any = shardopt.AdamW8bit,
    net: nn.Module | None = None,
    **options: Any,
) -> Run:
    """A model as of :func:`make`, with one of shardopt's optimizers in place of Megatron's Adam."""
    from shardopt.clients.megatron import replace_adam

    run = make(dtype, seed, net, adamw_for_vectors() if optimizer_class is shardopt.Muon8bit else None)
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
        model, masters = make_net(dtype, seed), make_net()
        masters.load_state_dict({name: x.float() for name, x in model.state_dict().items()})
        params = list(masters.parameters())
        groups = [{"params": [p for p in params if p.dim() > 1]}, {"params": [p for p in params if p.dim() == 1]}]
        if optimizer_class is shardopt.Muon8bit:
            groups[1]["algorithm"] = "adamw"
        return cls(model, masters, optimizer_class(groups, lr=LR, weight_decay=DECAY, **OPTIONS, **options))

    def train(self, first: int, last: int) -> None:
        """Steps as :func:`train` does."""
        for step in range(first, last):
            pairs = zip(self.model.parameters(), self.masters.parameters(), strict=True)
            for index, (param, master) in enumerate(pairs):
                master.grad = gradient_of(param, index, step).float()
            self.optimizer.step()
            self.model.load_state_dict(self.masters.state_dict())


def assert_parameters(run: Run, whole: Unsharded) -> None:
    """Demands the unsharded run's parameters: Megatron gathers them after each step."""
    assert_same(dict(run.bare.named_parameters()), dict(whole.model.named_parameters()))


def assert_state(run: Run, whole: Unsharded, folder: Path) -> None:
    """Demands the unsharded run's masters and state: a checkpoint of them, loaded into an unsharded optimizer."""
    shardopt.checkpoint.save(folder, run.chunk, run.optimizer)
    loaded = Unsharded.make(torch.float32, 5, type(whole.optimizer))
    assert shardopt.checkpoint.load(folder, loaded.masters, loaded.optimizer).converted == {}
    got, expected = (snapshot(dict(each.masters.named_parameters()), each.optimizer) for each in (loaded, whole))
    assert_same(got, expected)


def train_and_save(dtype: torch.dtype, optimizer_class: Any, folder: Path) -> None:
    with on_cpu():
        run, whole = replaced(dtype, 0, optimizer_class), Unsharded.make(dtype, 0, optimizer_class)
        assert type(run.inner.optimizer) is optimizer_class
        held = [len(p) for group in run.inner.optimizer.param_groups for p in group["params"]]
        assert dist.get_world_size() == 1 or 0 in held  # a rank without any element of a parameter
        train(run, 0, STEPS)
        whole.train(0, STEPS)
        assert_parameters(run, whole)
        assert_state(run, whole, folder)


def load_and_go_on(dtype: torch.dtype, optimizer_class: Any, folder: Path) -> None:
    with on_cpu():
        run, whole = replaced(dtype, 1, optimizer_class), Unsharded.make(dtype, 0, optimizer_class)
        shardopt.checkpoint.load(folder, run.bare, run.inner.optimizer)  # the model in the wrapper does as well
        whole.train(0, STEPS)
        assert_parameters(run, whole)
        train(run, STEPS, 2 * STEPS)
        whole.train(STEPS, 2 * STEPS)
        assert_parameters(run, whole)
        assert_state(run, whole, folder / "after")


@pytest.mark.parametrize(
    ("world_size", "dtype", "optimizer_class", "others"),
    [
        *((3, dtype, shardopt.AdamW8bit, (2, 1)) for dtype in (torch.float32, torch.bfloat16)),
        *((2, torch.bfloat16, other, ()) for other in (shardopt.Lion8bit, shardopt.LAMB8bit, shardopt.AdamW)),
        (3, torch.float32, shardopt.Muon8bit, ()),
    ],
    ids=str,
)
def test_bits_of_the_unsharded_run(
    client_ranks: Pool,
    tmp_path: Path,
    world_size: int,
    dtype: torch.dtype,
    optimizer_class: Any,
    others: tuple[int, ...],
) -> None:
    """Parameters and state; and a portable checkpoint loads on another number of ranks."""
    client_ranks.run(world_size, train_and_save, dtype, optimizer_class, tmp_path)
    for other in others:
        client_ranks.run(other, load_and_go_on, dtype, optimizer_class, tmp_path)


@pytest.mark.client_ranks
@pytest.mark.parametrize(("world_size", "tensor_parallel"), [(2, 1), (4, 2)])
def test_backward_pass(world_size: int, tensor_parallel: int) -> None:
    """Megatron's GPT, backward pass, exchange, norm, step and schedule; one batch on all ranks, so means are exact.

    Two data-parallel ranks have the bits of one, for each of two tensor-parallel parts of the model as well.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from shardopt.clients.megatron import replace_adam

    with on_cpu():
        divide(tensor_parallel)
        config, bare = make_gpt(tensor_parallel)
        of_ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True, bucket_size=BUCKET
        )
        chunk = DistributedDataParallel(config, of_ddp, bare)
        of_optimizer = OptimizerConfig(
            optimizer="adam", lr=LR, min_lr=0.0, weight_decay=DECAY, use_distributed_optimizer=True, clip_grad=1e30
        )
        optimizer = replace_adam(get_megatron_optimizer(of_optimizer, [chunk]), shardopt.AdamW8bit, **OPTIONS)
        schedule = OptimizerParamScheduler(optimizer, 0.0, LR, 0.0, 2, 9, "linear", DECAY, DECAY, 0, "constant")
        _, whole = make_gpt(tensor_parallel)
        named = dict(whole.named_parameters())
        groups = [{"params": [p for p in named.values() if (p.dim() == 1) == is_one]} for is_one in (False, True)]
        expected = shardopt.AdamW8bit(groups, **OPTIONS)
        for step in range(1, 1 + STEPS):
            schedule.step(1)
            for group, theirs in zip(expected.param_groups, optimizer.param_groups, strict=True):
                group.update(lr=theirs["lr"], weight_decay=theirs["weight_decay"])
            assert expected.param_groups[0]["lr"] == pytest.approx({1: LR / 2, 2: LR, 3: LR * 6 / 7}[step])
            assert [group["weight_decay"] for group in expected.param_groups] == [DECAY, 0.0]
            chunk.zero_grad_buffer()
            optimizer.zero_grad()
            loss_of_gpt(chunk, step).backward()
            finalize_model_grads([chunk], None)
            assert optimizer.step()[0]
            loss_of_gpt(whole, step).backward()
            expected.step()
            expected.zero_grad()
            assert_same(dict(bare.named_parameters()), named)
        if tensor_parallel > 1:
            with pytest.raises(ValueError, match="got a Megatron model on 4 ranks with data parallelism of 2"):
                shardopt.checkpoint.save("nowhere", chunk, optimizer)
            with pytest.raises(ValueError, match="got LAMB8bit, which needs whole parameters"):
                replace_adam(get_megatron_optimizer(of_optimizer, [chunk]), shardopt.LAMB8bit)


def make_experts() -> torch.nn.Module:
    net = make_net()
    for param in net.up.parameters():
        param.allreduce = False
    return net


@pytest.mark.client_ranks(2)
def test_experts() -> None:
    """Parameters that Megatron takes for experts' have buffers and an optimizer of their own."""
    with on_cpu():
        run, whole = replaced(torch.float32, net=make_experts()), Unsharded.make(torch.float32)
        assert len(run.optimizer.chained_optimizers) == 2
        train(run, 0, STEPS)
        whole.train(0, STEPS)
        assert_parameters(run, whole)
        with pytest.raises(ValueError, match="got a Megatron model with 2 DistributedOptimizers"):
            shardopt.checkpoint.save("nowhere", run.chunk, run.optimizer)
        with pytest.raises(ValueError, match="got Prodigy8bit, which needs sums over all parameters, with several"):
            replaced(torch.float32, 0, shardopt.Prodigy8bit, make_experts())


def model_of(run: Run) -> dict[str, Any]:
    """The model in Megatron's sharded state dict."""
    from megatron.core.dist_checkpointing import ShardedTensor

    rank = dist.get_rank()
    named = run.bare.named_parameters()
    return {name: ShardedTensor.from_rank_offsets(name, p, replica_id=(0, 0, rank)) for name, p in named}


def state_of(run: Run, kind: str, *, is_loading: bool = False) -> dict[str, Any]:
    model = model_of(run)
    metadata = {"distrib_optim_sharding_type": kind, "distrib_optim_fully_reshardable_mem_efficient": False}
    optimizer = run.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer}


def where_adam_is(package: str) -> Any:
    """Has Megatron's checkpoints expect the Adam of torch, or that of Transformer Engine, whose step is an option."""
    is_te = package == "transformer_engine"
    return mock.patch.multiple(
        "megatron.core.optimizer.distrib_optimizer", HAVE_APEX_OR_TE=is_te, USING_TE_OPTIMIZER=is_te
    )


def save_by_megatron(kind: str, package: str, folder: Path, adam: bool) -> None:
    from megatron.core import dist_checkpointing

    with on_cpu(), where_adam_is(package):
        run = make(torch.bfloat16) if adam else replaced(torch.bfloat16)
        train(run, 0, STEPS)
        with mock.patch.dict(multiprocessing.current_process()._config, daemon=False):  # type: ignore[attr-defined]
            dist_checkpointing.save(state_of(run, kind), str(folder))  # by processes of its own


def load_by_megatron(kind: str, package: str, folder: Path) -> None:
    from megatron.core import dist_checkpointing

    with on_cpu(), where_adam_is(package):
        run = replaced(torch.bfloat16, 1)
        loaded = dist_checkpointing.load(state_of(run, kind, is_loading=True), str(folder))
        run.bare.load_state_dict(loaded["model"])
        run.optimizer.load_state_dict(loaded["optimizer"])
        whole = Unsharded.make(torch.bfloat16)
        whole.train(0, STEPS)
        train(run, STEPS, 2 * STEPS)
        whole.train(STEPS, 2 * STEPS)
        assert_parameters(run, whole)


@pytest.mark.parametrize("package", ["torch", "transformer_engine"])
@pytest.mark.parametrize("kind", ["dp_reshardable", "fully_reshardable"])
def test_megatrons_own_checkpoint(client_ranks: Pool, tmp_path: Path, kind: str, package: str) -> None:
    """Decoded moments on disk; encoded again, bf16 weights go on with the run's bits, on other ranks as well."""
    client_ranks.run(2, save_by_megatron, kind, package, tmp_path, False)
    for world_size in (2, 3):
        client_ranks.run(world_size, load_by_megatron, kind, package, tmp_path)


def move_over(kind: str, folder: Path) -> None:
    """Loads a checkpoint of Megatron's Adam, and gives it back: the moments are encoded ones of Adam's."""
    from megatron.core import dist_checkpointing

    with on_cpu():
        run = replaced(torch.bfloat16, 1)
        loaded = dist_checkpointing.load(state_of(run, kind, is_loading=True), str(folder))
        run.bare.load_state_dict(loaded["model"])
        run.optimizer.load_state_dict(loaded["optimizer"])
        theirs = make(torch.bfloat16)
        train(theirs, 0, STEPS)
        assert_same(dict(run.bare.named_parameters()), dict(theirs.bare.named_parameters()))
        decoded = run.inner.optimizer.state_dict(dequantize=True)["state"]
        tensors = [param for group in run.inner.optimizer.param_groups for param in group["params"]]
        ours = {param: decoded[index] for index, param in enumerate(tensors) if index in decoded}
        held = {param: tensor for group in run.inner._nonempty for param, tensor in group.items()}
        for param, other in zip(run.bare.parameters(), theirs.bare.parameters(), strict=True):
            if param in held:
                state, expected = ours[held[param]], theirs.inner.optimizer.state[other.main_param]
                assert int(state["step"]) == int(expected["step"]) == STEPS
                roots = state["exp_avg_sq"].sqrt(), expected["exp_avg_sq"].sqrt()
                assert torch.allclose(*roots, rtol=0.1 if param.dim() > 1 else 0, atol=0)  # vectors are float32


def test_a_run_moves_from_megatrons_adam(client_ranks: Pool, tmp_path: Path) -> None:
    client_ranks.run(2, save_by_megatron, "dp_reshardable", "torch", tmp_path, True)
    client_ranks.run(2, move_over, "dp_reshardable", tmp_path)


@pytest.mark.client_ranks(1)
def test_errors() -> None:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    from shardopt.clients.megatron import replace_adam

    with on_cpu():
        stepped = make(torch.float32)
        train(stepped, 0, 1)
        with pytest.raises(ValueError, match="has state already"):
            replace_adam(stepped.optimizer, shardopt.AdamW8bit)
        whole = OptimizerConfig(optimizer="adam", lr=0.1)
        with pytest.raises(TypeError, match="FP32Optimizer, expected DistributedOptimizer"):
            replace_adam(get_megatron_optimizer(whole, [make(torch.float32).chunk]), shardopt.AdamW8bit)
        for config, option in (("ddp_config", "use_megatron_fsdp"), ("config", "use_precision_aware_optimizer")):
            run = make(torch.float32)
            setattr(getattr(run.inner, config), option, True)
            with pytest.raises((TypeError, ValueError), match=f"got {option}=True"):
                replace_adam(run.optimizer, shardopt.AdamW8bit)
        on_the_host = make(torch.float32)
        on_the_host.inner.optimizer = object.__new__(HybridDeviceOptimizer)
        with pytest.raises(ValueError, match="got optimizer_cpu_offload=True"):
            replace_adam(on_the_host.optimizer, shardopt.AdamW8bit)
        lion = replaced(torch.float32, 0, shardopt.Lion8bit)
        with pytest.raises(RuntimeError, match=r"use shardopt\.checkpoint\.save and load"):
            state_of(lion, "dp_reshardable")
        amsgrad = replaced(torch.float32, amsgrad=True)
        with pytest.raises(RuntimeError, match="without amsgrad"):
            amsgrad.optimizer.state_dict()
        with pytest.raises(TypeError, match="got an optimizer beside a Megatron engine"):
            shardopt.checkpoint.save("nowhere", lion.chunk, amsgrad.inner.optimizer)
