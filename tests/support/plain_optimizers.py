"""Optimizers that torch.optim does not have, in a few lines of PyTorch each, in the parameters' dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

State = dict[str, Any]


class Plain(Optimizer):
    """Calls ``update(p, g, state, **hyper)``, which steps a parameter in place; ``state["step"]`` counts from 1."""

    def __init__(self, update: Callable[..., None], params: Any, **hyper: Any) -> None:
        super().__init__(params, hyper)
        self._update = update

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            hyper = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for p in group["params"]:
                self.state[p]["step"] = self.state[p].get("step", 0) + 1
                self._update(p, p.grad, self.state[p], **hyper)


def moment(state: State, name: str, p: Tensor) -> Tensor:
    """A moment, which is zeros before the first step."""
    found: Tensor = state.setdefault(name, torch.zeros_like(p))
    return found


def adam_direction(p: Tensor, g: Tensor, state: State, betas: tuple[float, float], eps: float) -> Tensor:
    """Adam's quotient of corrected moments (arXiv 1412.6980, algorithm 1)."""
    (beta1, beta2), t = betas, state["step"]
    m, v = moment(state, "exp_avg", p), moment(state, "exp_avg_sq", p)
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    return m / (1 - beta1**t) / (v.sqrt() / math.sqrt(1 - beta2**t) + eps)


def signum(p: Tensor, g: Tensor, state: State, lr: float, momentum: float, weight_decay: float) -> None:
    """Signum (arXiv 1802.04434, algorithm 2)."""
    m = moment(state, "momentum_buffer", p).lerp_(g, 1 - momentum)
    p.mul_(1 - lr * weight_decay).sub_(lr * m.sign())


def ademamix(p: Tensor, g: Tensor, state: State, lr: float, betas: Any, weight_decay: float, **hyper: Any) -> None:
    """AdEMAMix (arXiv 2409.03137, algorithm 1 and its schedules)."""
    (beta1, beta2, beta3), t, alpha = betas, state["step"], hyper["alpha"]
    if hyper.get("alpha_steps"):
        alpha = min(t * alpha / hyper["alpha_steps"], alpha)
    if hyper.get("beta3_steps"):
        share, low, high = t / hyper["beta3_steps"], math.log(beta1), math.log(beta3)
        beta3 = min(math.exp(low * high / ((1 - share) * high + share * low)), beta3) if share < 1 else beta3
    slow = moment(state, "exp_avg_slow", p).lerp_(g, 1 - beta3)
    fast = adam_direction(p, g, state, (beta1, beta2), 1e-8)
    denominator = state["exp_avg_sq"].sqrt() / math.sqrt(1 - beta2**t) + 1e-8
    p.sub_(lr * (fast + alpha * slow / denominator + weight_decay * p))


def adopt(
    p: Tensor, g: Tensor, state: State, lr: float, betas: Any, weight_decay: float, decoupled_weight_decay: bool
) -> None:
    """ADOPT (arXiv 2411.02853, algorithm 2)."""
    (beta1, beta2), t = betas, state["step"]
    m, v = moment(state, "exp_avg", p), moment(state, "exp_avg_sq", p)
    if not decoupled_weight_decay:
        g = g + weight_decay * p
    if t == 1:
        v.copy_(g * g)
        return
    if decoupled_weight_decay:
        p.mul_(1 - lr * weight_decay)
    clip = (t - 1) ** 0.25
    m.lerp_((g / v.sqrt().clamp(min=1e-6)).clamp(-clip, clip), 1 - beta1)
    p.sub_(lr * m)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)


def adan(p: Tensor, g: Tensor, state: State, lr: float, betas: Any, weight_decay: float, no_prox: bool) -> None:
    """Adan (arXiv 2208.06677, algorithm 1), with the decay rates of its authors' code."""
    (beta1, beta2, beta3), t = betas, state["step"]
    m, d, n, last = (moment(state, k, p) for k in ("exp_avg", "exp_avg_diff", "exp_avg_sq", "neg_pre_grad"))
    difference = g + last if t > 1 else torch.zeros_like(g)
    m.lerp_(g, 1 - beta1)
    d.lerp_(difference, 1 - beta2)
    n.lerp_((g + beta2 * difference) ** 2, 1 - beta3)
    last.copy_(-g)
    denominator = n.sqrt() / math.sqrt(1 - beta3**t) + 1e-8
    step = lr * (m / (1 - beta1**t) + beta2 * d / (1 - beta2**t)) / denominator
    p.copy_(p * (1 - lr * weight_decay) - step if no_prox else (p - step) / (1 + lr * weight_decay))


def lamb(p: Tensor, g: Tensor, state: State, lr: float, betas: Any, weight_decay: float) -> None:
    """LAMB (arXiv 1904.00962, algorithm 2), with phi(x) = x."""
    direction = adam_direction(p, g, state, betas, 1e-6) + weight_decay * p
    weight, norm = p.norm(), direction.norm()
    p.sub_(lr * (weight / norm if weight > 0 and norm > 0 else 1.0) * direction)


def lars(
    p: Tensor, g: Tensor, state: State, lr: float, momentum: float, weight_decay: float, trust_coefficient: float
) -> None:
    """LARS (arXiv 1708.03888, algorithm 1)."""
    buffer, weight, norm = moment(state, "momentum_buffer", p), p.norm(), g.norm()
    local = trust_coefficient * weight / (norm + weight_decay * weight) if weight > 0 and norm > 0 else 1.0
    buffer.mul_(momentum).add_(lr * local * (g + weight_decay * p))
    p.sub_(buffer)


def stable_adamw(p: Tensor, g: Tensor, state: State, lr: float, betas: Any, weight_decay: float) -> None:
    """StableAdamW (arXiv 2304.13013, algorithm 2)."""
    eps = 1e-8
    direction = adam_direction(p, g, state, betas, eps)
    corrected = state["exp_avg_sq"] / (1 - betas[1] ** state["step"])
    rms = (g * g / corrected.clamp(min=eps * eps)).mean().sqrt() if p.numel() else 1.0
    p.sub_(lr / max(1.0, float(rms)) * (weight_decay * p + direction))


def cautious_step(p: Tensor, g: Tensor, change: Tensor, decay: float, **cautious: bool) -> None:
    """Adds a change and a decoupled decay to a parameter, cautiously (arXiv 2411.16085, 2510.12402)."""
    decaying = torch.full_like(p, decay)
    if cautious.get("cautious_weight_decay"):
        decaying[change * p > 0] = 0
    if cautious.get("cautious"):
        goes_with = (change * g < 0).to(p.dtype)
        change = change * goes_with * (p.numel() / (goes_with.sum() + 1))
    p.copy_(p * (1 - decaying) + change)


def cautious_adamw(p: Tensor, g: Tensor, state: State, lr: float, betas: Any, weight_decay: float, **more: Any) -> None:
    change = -lr * adam_direction(p, g, state, betas, 1e-8)
    cautious_step(p, g, change, lr * weight_decay, **more)


def lion(p: Tensor, g: Tensor, state: State, lr: float, betas: Any, weight_decay: float, **more: Any) -> None:
    """Lion (arXiv 2302.06675, algorithm 2); the decay comes first, as in torch's AdamW."""
    (beta1, beta2), m = betas, moment(state, "exp_avg", p)
    change = -lr * (beta1 * m + (1 - beta1) * g).sign()
    cautious_step(p, g, change, lr * weight_decay, **more)
    m.copy_(beta2 * m + (1 - beta2) * g)


class PlainProdigy(Optimizer):
    """Prodigy (arXiv 2306.06101, algorithm 4), with the weight decay, the slow average and the eps of its authors."""

    def __init__(self, params: Any, lr: float = 1.0, betas: tuple[float, float] = (0.9, 0.999), **hyper: Any) -> None:
        others = {"eps": 1e-8, "weight_decay": 0.0, "d_coef": 1.0, "d0": 1e-6, "growth_rate": math.inf, **hyper}
        super().__init__(params, {"lr": lr, "betas": betas, "d": others["d0"], "d_max": others["d0"], **others})
        self.numerator, self.steps = 0.0, 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        first, self.steps = self.param_groups[0], self.steps + 1
        (beta1, beta2), d, d0 = first["betas"], first["d"], first["d0"]
        beta3 = first.get("beta3") or math.sqrt(beta2)
        correction = 1.0
        if first.get("use_bias_correction"):
            correction = math.sqrt(1 - beta2**self.steps) / (1 - beta1**self.steps)
        rate = d * max(group["lr"] for group in self.param_groups) * correction
        away = slow = 0.0
        each = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for group, p in each:
            state = self.state[p]
            p0 = state.setdefault("p0", p.clone())
            m, v, s = (moment(state, name, p) for name in ("exp_avg", "exp_avg_sq", "s"))
            g = p.grad if group.get("decouple", True) else p.grad + group["weight_decay"] * p
            if not group["lr"]:
                continue
            away += float((g.double() * (p0 - p).double()).sum())
            m.lerp_(d * g, 1 - beta1)
            v.lerp_((d * g) ** 2, 1 - beta2)
            s.mul_(beta3).add_(g, alpha=d / d0 * (d if group.get("safeguard_warmup") else rate))
            slow += float(s.double().abs().sum())
        if slow:
            self.numerator = beta3 * self.numerator + d / d0 * rate * away
            estimate = first["d_coef"] * self.numerator / slow
            d_max = max(first["d_max"], estimate)
            next_d = min(d_max, (max(d, estimate) if d == d0 else d) * first["growth_rate"])
            for group in self.param_groups:
                group.update(d=next_d, d_max=d_max)
        for group, p in each:
            if group["lr"] and slow:
                state = self.state[p]
                decay = group["weight_decay"] if group.get("decouple", True) else 0.0
                direction = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + first["d"] * group["eps"])
                p.mul_(1 - rate * decay).sub_(rate * direction)
