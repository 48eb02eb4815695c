"""Problems for the stand-in of a CUDA device (:mod:`late_streams`), which have the same bits on the CPU."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import Parameter

import shardopt
from helpers import CASES, Named
from ranks.layouts import values
from ranks.snapshot import snapshot
from shardopt.comm.progress import Progress
from shardopt.comm.reduction import Reduction
from shardopt.optim import ShardedOptimizer, clip
from shardopt.state import residency

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16 = torch.bfloat16
SHAPES = ((5, 130), (3, 2000), (40, 33), (257,))

#: Takes steps on a device, and gives what came out, on the CPU.
Scenario = Callable[[torch.device], Named]


@contextmanager
def side_stream(device: torch.device, apart: bool = True) -> Iterator[None]:
    """A stream of its own, which waits for the current one, and the current one for it."""
    if device.type == "cpu" or not apart:
        yield
        return
    here, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        yield
    here.wait_stream(stream)


@contextmanager
def chunks_of(nbytes: int) -> Iterator[None]:
    """Copies between host and device in chunks of this size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(residency, "CHUNK_BYTES", nbytes)
        yield


class Problem:
    """Parameters on a device and their optimizer. Gradients are computed there, in the current stream.

    Attributes:
        before_gradients: called before they are computed.
    """

    before_gradients: Callable[[], object] = staticmethod(lambda: None)

    def __init__(
        self,
        device: torch.device,
        rule: str = "adamw",
        codec: str = "log8",
        strided: bool = False,
        kept: int = 0,
        **options: Any,
    ) -> None:
        initial = [values(s, seed, BF16) for seed, s in enumerate(SHAPES)]
        if strided:
            initial = [x.T.contiguous().T if x.dim() == 2 else x for x in initial]
        self.params = {str(s): Parameter(x.to(device)) for s, x in zip(SHAPES, initial, strict=True)}
        options = {"codec": codec, "min_quantized_numel": 0, **options}
        params: list[Any] = list(self.params.values())
        if kept:  # the state of so many stays on the device
            params = [{"params": params[:kept], "offload": None}, {"params": params[kept:]}]
        self.optimizer: ShardedOptimizer = CASES[rule].make(params, **options)
        self.sources = [[values(s, 10 * t + i, BF16).to(device) for i, s in enumerate(SHAPES)] for t in range(6)]

    def set_gradients(self, t: int, without: tuple[int, ...] = (), bad: int = 0) -> None:
        self.before_gradients()
        for i, (param, source) in enumerate(zip(self.params.values(), self.sources[t], strict=True)):
            gradient = source * 0.125 + param.detach() * 0.25
            gradient.view(-1)[:bad] = torch.nan
            param.grad = None if i in without else gradient

    def step(self, t: int, without: tuple[int, ...] = (), bad: int = 0) -> None:
        self.set_gradients(t, without, bad)
        self.optimizer.step()

    def result(self, **more: Any) -> Named:
        self.optimizer.synchronize()
        found = on_cpu(snapshot(self.params, self.optimizer))
        return found | {name: torch.as_tensor(value).cpu() for name, value in more.items()}


def on_cpu(tensors: Named) -> Named:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def steps(device: torch.device, chunk: int = 4608, **options: Any) -> Named:
    """Steps in changing streams, on changing sets of gradients, and again after everything was looked up anew."""
    with chunks_of(chunk):
        problem = Problem(device, **options)
        for t in (0, 1, 2, 5, 3):
            with side_stream(device, apart=t in (1, 3)):
                problem.step(t, without=(1,) if t == 1 else (), bad=3 if t == 3 else 0)
        problem.optimizer._internals.invalidate_steps()
        problem.step(4, without=(0, 2))
        return {**problem.result(), "skipped": torch.tensor(problem.optimizer.nonfinite_count)}


def device_scalars(device: torch.device, rule: str = "lamb", **options: Any) -> Named:
    """Learning rate and loss scale are computed on the device; tables are dropped in another stream than theirs."""
    lr = torch.full((), 0.01, dtype=torch.float32, device=device)
    problem = Problem(device, rule=rule, lr=lr, **options)
    problem.step(0)
    here = nullcontext() if device.type == "cpu" else torch.cuda.stream(torch.cuda.current_stream())
    with side_stream(device):
        for t in (1, 2, 3):
            lr.mul_(0.5)
            problem.optimizer.grad_scale = torch.full((), 4.0, device=device) * 2
            problem.optimizer.found_inf = torch.full((), float(t == 2), device=device)
            problem.step(t, bad=t)
            if t == 1:
                problem.optimizer._internals.invalidate_steps()
        with here:
            skipped = problem.optimizer.nonfinite_count
    return problem.result(skipped=skipped)


def clipped(device: torch.device, **options: Any) -> Named:
    """Clipped in place and by the step, in changing streams, by both norms; gradients are freed right afterwards.

    Tables are dropped in another stream than theirs, and what they were in is used again there.
    """
    problem, found = Problem(device, **options), {}
    here = nullcontext() if device.type == "cpu" else torch.cuda.stream(torch.cuda.current_stream())
    for t in range(6):
        with side_stream(device, apart=t in (1, 3)):
            problem.set_gradients(t, without=(t // 2,))
            optimizer = problem.optimizer if t % 2 else None
            kind = math.inf if t == 2 else 2.0
            found[f"norm {t}"] = shardopt.clip_grad_norm_(problem.params.values(), 0.5, kind, optimizer=optimizer)
            problem.optimizer.step()
            problem.optimizer.zero_grad()
            if t == 3:
                clip._norms.clear()
                with here:
                    others = [torch.full((n,), 7, dtype=torch.uint8, device=device) for n in range(16, 4000, 400)]
                del others
    return problem.result(**found)


def replaced(device: torch.device) -> Named:
    """State put in the place of the optimizer's, while that is on its way."""
    problem = Problem(device, offload="state")
    for t in range(3):
        problem.step(t)
        for state in problem.optimizer.state.values():
            if "exp_avg_codes" in state:
                state["exp_avg_codes"] = torch.full_like(state["exp_avg_codes"], 130 + t)
    return problem.result()


def let_go(device: torch.device) -> Named:
    """Parameters are replaced while copies of their state are on their way to the host."""
    problem = Problem(device, offload="state")
    for t in range(2):
        problem.step(t)
        problem.optimizer.state.clear()
        group = problem.optimizer.param_groups[0]
        group["params"] = [Parameter(param.detach().clone()) for param in group["params"]]
        problem.params = dict(zip(problem.params, group["params"], strict=True))
        gc.collect()
    problem.step(2)
    return problem.result()


def slept(device: torch.device, **options: Any) -> Named:
    """State that goes to the host and comes back while steps are under way, and is read there, in all orders."""
    problem, found = Problem(device, **options), {}
    optimizer = problem.optimizer
    for t in range(6):
        with side_stream(device, apart=t == 3):
            problem.step(t)
        optimizer.offload()
        if t == 2:
            saved = optimizer.state_dict()["state"]
            found.update({f"{i} {key}": x.clone() for i, state in saved.items() for key, x in state.items()})
        if t == 4:
            optimizer.load_state_dict(optimizer.state_dict())
        if t % 2:
            optimizer.reload()
        if t == 1:
            optimizer.offload()
            optimizer.reload()
    return problem.result(**found)


def captured(device: torch.device, **options: Any) -> Named:
    """Steps in a CUDA graph, replayed, with a step of other gradients in between."""
    lr = torch.full((), 0.01, device=device)
    problem = Problem(device, lr=lr, **options)
    static = [torch.zeros_like(source) for source in problem.sources[0]]
    graph = None
    for t in range(6):
        lr.mul_(0.75)
        for to, source in zip(static, problem.sources[t], strict=True):
            to.copy_(source * 0.125)
        if t == 3:
            problem.step(t)
            problem.optimizer._internals.invalidate_steps()
            continue
        for param, gradient in zip(problem.params.values(), static, strict=True):
            param.grad = gradient
        if device.type == "cpu" or t == 0:
            with side_stream(device):
                problem.optimizer.step()
            continue
        if graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                problem.optimizer.step()
        graph.replay()
    return problem.result()


class Layers(nn.Module):
    """Linear layers, and their backward pass by hand: PyTorch without CUDA has none for cuda:0."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b, device="meta") for a, b in ((33, 70), (70, 40), (40, 130)))
        for seed, layer in enumerate(self.layers):
            for name, param in list(layer.named_parameters()):
                setattr(layer, name, Parameter((values(tuple(param.shape), seed) * 0.1).to(device)))
        self.hooks: dict[Tensor, Callable[[Tensor], object]] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.inputs = []
        for layer in self.layers:
            self.inputs.append(x.detach())
            x = layer(x)
        return x

    @torch.no_grad()
    def backward(self, gradient: Tensor) -> None:
        for layer, x in zip(reversed(self.layers), reversed(self.inputs), strict=True):
            for param, added in ((layer.weight, gradient.t() @ x), (layer.bias, gradient.sum(0))):
                param.grad = added if param.grad is None else param.grad + added
            gradient = gradient @ layer.weight
            for param in (layer.bias, layer.weight):
                if param in self.hooks:
                    self.hooks[param](param)

    def release(self, optimizer: ShardedOptimizer, **options: Any) -> None:
        def register(param: Tensor, hook: Callable[[Tensor], object]) -> object:
            self.hooks[param] = hook
            return SimpleNamespace(remove=lambda: self.hooks.pop(param))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "register_post_accumulate_grad_hook", register)
            shardopt.release_gradients(self, optimizer, **options)


def released(
    device: torch.device,
    norm_type: float | None = None,
    scale: float | None = None,
    chunk: int = 4608,
    reads: bool = False,
    between: Callable[[], object] = bool,
    release: dict[str, Any] | None = None,
    **options: Any,
) -> Named:
    """Parameters stepped during the backward pass, or the next forward pass, as the options ``release`` say.

    Clipped by the norm of ``norm_type``, if one is given; ``scale`` is a loss scaler's first one. ``reads``: the
    parameters are copied after each step, by a state dict. ``between`` is called after each step.
    """
    release, found = release or {}, Named()
    with chunks_of(chunk):
        model = Layers(device)
        optimizer = shardopt.AdamW8bit(model.parameters(), lr=0.01, min_quantized_numel=64, **options)
        if device.type == "cuda":
            model.release(optimizer, **release)
        scaler = GradScaler(device.type, init_scale=scale or 1.0, growth_interval=2, enabled=scale is not None)
        for t in range(4):
            for micro in range(release.get("micro_batches", 1)):
                gradient = model(values((8, 33), 50 + 10 * t + micro).to(device)).detach() * 0.01
                model.backward(scaler.scale(gradient))
            if scale is not None:
                scaler.unscale_(optimizer)
            if norm_type is not None:
                norm = shardopt.clip_grad_norm_(model.parameters(), 0.02, norm_type, optimizer=optimizer)
                found[f"norm {t}"] = norm
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            between()
            if reads:
                found.update((f"{name} {t}", value.clone()) for name, value in model.state_dict().items())
        optimizer.synchronize()
        found["scale"] = torch.tensor(scaler.get_scale())
        return on_cpu({**found, **snapshot(dict(model.named_parameters()), optimizer)})


def held(device: torch.device, micro_batches: int = 1, norm_type: float = 2.0, **options: Any) -> Named:
    """Gradients held in the host's memory, clipped by their norm, with steps during the next forward pass."""
    how = {"overlap_forward": True, "waiting_gradients": 2, "micro_batches": micro_batches}
    return released(device, norm_type, release=how, **{"offload": "step", **options})


class Peers:
    """A process group of ranks that all send what this one does, in the current stream."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


def messages(device: torch.device) -> Named:
    """Ordered sums of two passes."""
    found: Named = {}
    progress = Progress(nn.Module(), micro_batches=4, ranks=2)
    scattered = Reduction(progress, "e4m3", [(4, 150)], [Peers()])  # type: ignore[list-item]
    for t in range(2):
        progress.done = t
        whole = values((2, 300), t).to(device) * 0.5
        out = torch.empty(300, device=device)
        scattered.reduce_scatter(whole, out)
        found[f"scattered {t}"] = out
    return on_cpu(found)


def checkpoints(device: torch.device, folder: Path, **options: Any) -> Named:
    """Saved while steps are under way, loaded into another optimizer, stepped on."""
    found: Named = {}
    for how in ("save", "async_save"):
        problem, other = Problem(device, **options), Problem(device, **options)
        models = [nn.ParameterDict({f"p{i}": p for i, p in enumerate(x.params.values())}) for x in (problem, other)]
        for t in range(2):
            problem.step(t)
            other.step(t + 2)
        path = folder / f"{device.type}-{how}"
        saving = getattr(shardopt.checkpoint, how)(path, models[0], problem.optimizer)
        problem.step(2)
        if saving is not None:
            saving.result()
        shardopt.checkpoint.load(path, models[1], other.optimizer)
        other.step(3)
        for key, result in (("saved", problem.result()), ("loaded", other.result())):
            found.update({f"{how} {key} {name}": tensor for name, tensor in result.items()})
    return found


def dropped(device: torch.device, **options: Any) -> Named:
    """An optimizer goes while its copies are under way; the parameters are used on."""
    problem = Problem(device, **options)
    problem.step(0)
    params = problem.params
    del problem
    gc.collect()
    return on_cpu({name: param.detach() for name, param in params.items()})


def scenarios(folder: Path) -> dict[str, Scenario]:
    """Steps that have the same bits on the CPU. folder: for checkpoints."""
    return {
        "steps": partial(steps, codec="log4", master_weight_bits=24),
        "offload state": partial(steps, offload="state"),
        "offload step": partial(steps, offload="step"),
        "few chunks": partial(steps, offload="state", chunk=30000),
        "offload a part": partial(steps, offload="state", kept=1),
        "strided, prodigy": partial(steps, rule="prodigy", strided=True, offload="state", chunk=30000),
        "lamb, master weights": partial(steps, rule="lamb", master_weight_bits=24, offload="state"),
        "device scalars": device_scalars,
        "clipped": clipped,
        "clipped offloaded step": partial(clipped, offload="step"),
        "dropped step": partial(dropped, offload="step"),
        "replaced": replaced,
        "let go": let_go,
        "slept": partial(slept, master_weight_bits=24),
        "captured": captured,
        "released": partial(released, offload="state"),
        "released step": partial(released, offload="step"),
        "released forward": partial(released, release={"overlap_forward": True}, offload="step"),
        "held": held,
        "held in parts": partial(held, micro_batches=2, chunk=8192),
        "held, read": partial(held, reads=True),
        "held, largest": partial(held, norm_type=math.inf, micro_batches=2, scale=1000.0),
        "messages": messages,
        "checkpoints": partial(checkpoints, folder=folder),
        "offloaded checkpoints": partial(checkpoints, folder=folder, offload="state"),
    }
