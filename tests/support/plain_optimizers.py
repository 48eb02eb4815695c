"""Optimizers that torch.optim does not have, in a few lines of PyTorch each, in the parameters' dtype."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Plain(Optimizer, ABC):
    """Calls :meth:`update` for each parameter; moments are zeros before the first step."""

    def __init__(self, params: Any, **hyper: Any) -> None:
        super().__init__(params, hyper)

    @abstractmethod
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], **hyper: Any) -> None:
        """Steps a parameter in place; ``state["step"]`` counts from 1."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            hyper = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for p in group["params"]:
                self.state[p]["step"] = self.state[p].get("step", 0) + 1
                self.update(p, p.grad, self.state[p], **hyper)


def moment(state: dict[str, Any], name: str, p: Tensor) -> Tensor:
    found: Tensor = state.setdefault(name, torch.zeros_like(p))
    return found


class PlainLion(Plain):
    """Lion (arXiv 2302.06675, algorithm 2); the decay comes first, as in torch's AdamW."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], **hyper: Any) -> None:
        (beta1, beta2), m = hyper["betas"], moment(state, "exp_avg", p)
        direction = (beta1 * m + (1 - beta1) * g).sign()
        p.mul_(1 - hyper["lr"] * hyper.get("weight_decay", 0.0)).sub_(hyper["lr"] * direction)
        m.copy_(beta2 * m + (1 - beta2) * g)


class PlainSignum(Plain):
    """Signum (arXiv 1802.04434, algorithm 2)."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], **hyper: Any) -> None:
        m = moment(state, "momentum_buffer", p)
        m.lerp_(g, 1 - hyper["momentum"])
        p.mul_(1 - hyper["lr"] * hyper.get("weight_decay", 0.0)).sub_(hyper["lr"] * m.sign())


class PlainAdEMAMix(Plain):
    """AdEMAMix (arXiv 2409.03137, algorithm 1 and its schedules)."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], **hyper: Any) -> None:
        (beta1, beta2, beta3), t, alpha = hyper["betas"], state["step"], hyper["alpha"]
        if hyper.get("alpha_steps"):
            alpha = min(t * alpha / hyper["alpha_steps"], alpha)
        if hyper.get("beta3_steps"):
            share, low, high = t / hyper["beta3_steps"], math.log(beta1), math.log(beta3)
            beta3 = min(math.exp(low * high / ((1 - share) * high + share * low)), beta3) if share < 1 else beta3
        fast, slow, v = (moment(state, name, p) for name in ("exp_avg_fast", "exp_avg_slow", "exp_avg_sq"))
        fast.lerp_(g, 1 - beta1)
        slow.lerp_(g, 1 - beta3)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        denominator = v.sqrt() / math.sqrt(1 - beta2**t) + hyper.get("eps", 1e-8)
        direction = (fast / (1 - beta1**t) + alpha * slow) / denominator + hyper["weight_decay"] * p
        p.sub_(hyper["lr"] * direction)


class PlainADOPT(Plain):
    """ADOPT (arXiv 2411.02853, algorithm 2)."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], **hyper: Any) -> None:
        (beta1, beta2), t = hyper["betas"], state["step"]
        m, v = moment(state, "exp_avg", p), moment(state, "exp_avg_sq", p)
        decay = hyper.get("weight_decay", 0.0)
        if not hyper["decoupled_weight_decay"]:
            g = g + decay * p
        if t == 1:
            v.copy_(g * g)
            return
        if hyper["decoupled_weight_decay"]:
            p.mul_(1 - hyper["lr"] * decay)
        clip = (t - 1) ** 0.25
        m.lerp_((g / v.sqrt().clamp(min=hyper.get("eps", 1e-6))).clamp(-clip, clip), 1 - beta1)
        p.sub_(hyper["lr"] * m)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)


class PlainAdan(Plain):
    """Adan (arXiv 2208.06677, algorithm 1), with the decay rates of its authors' code."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], **hyper: Any) -> None:
        (beta1, beta2, beta3), t, lr = hyper["betas"], state["step"], hyper["lr"]
        m, d, n, last = (moment(state, k, p) for k in ("exp_avg", "exp_avg_diff", "exp_avg_sq", "neg_pre_grad"))
        difference = g + last if t > 1 else torch.zeros_like(g)
        m.lerp_(g, 1 - beta1)
        d.lerp_(difference, 1 - beta2)
        n.lerp_((g + beta2 * difference) ** 2, 1 - beta3)
        last.copy_(-g)
        denominator = n.sqrt() / math.sqrt(1 - beta3**t) + hyper.get("eps", 1e-8)
        step = lr * (m / (1 - beta1**t) + beta2 * d / (1 - beta2**t)) / denominator
        decay = lr * hyper["weight_decay"]
        p.copy_(p * (1 - decay) - step if hyper["no_prox"] else (p - step) / (1 + decay))


class PlainLAMB(Plain):
    """LAMB (arXiv 1904.00962, algorithm 2), with phi(x) = x."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], **hyper: Any) -> None:
        (beta1, beta2), t = hyper["betas"], state["step"]
        m, v = moment(state, "exp_avg", p), moment(state, "exp_avg_sq", p)
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        ratio = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + hyper.get("eps", 1e-6))
        direction = ratio + hyper["weight_decay"] * p
        weight, norm = p.norm(), direction.norm()
        p.sub_(hyper["lr"] * (weight / norm if weight > 0 and norm > 0 else 1.0) * direction)


class PlainLARS(Plain):
    """LARS (arXiv 1708.03888, algorithm 1)."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], **hyper: Any) -> None:
        buffer, decay = moment(state, "momentum_buffer", p), hyper["weight_decay"]
        weight, norm = p.norm(), g.norm()
        local = hyper["trust_coefficient"] * weight / (norm + decay * weight) if weight > 0 and norm > 0 else 1.0
        buffer.mul_(hyper["momentum"]).add_(hyper["lr"] * local * (g + decay * p))
        p.sub_(buffer)


class PlainStableAdamW(Plain):
    """StableAdamW (arXiv 2304.13013, algorithm 2)."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], **hyper: Any) -> None:
        (beta1, beta2), t, eps = hyper["betas"], state["step"], hyper.get("eps", 1e-8)
        m, v = moment(state, "exp_avg", p), moment(state, "exp_avg_sq", p)
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        corrected = v / (1 - beta2**t)
        rms = (g * g / corrected.clamp(min=eps * eps)).mean().sqrt() if p.numel() else 1.0
        lr = hyper["lr"] / max(1.0, float(rms))
        p.sub_(lr * (hyper["weight_decay"] * p + m / (1 - beta1**t) / (corrected.sqrt() + eps)))


def cautious_step(p: Tensor, g: Tensor, change: Tensor, decay: float, **hyper: Any) -> None:
    """Adds an optimizer's change and decoupled decay to a parameter, cautiously as the options say."""
    decaying = torch.full_like(p, decay)
    if hyper.get("cautious_weight_decay"):
        decaying[change * p > 0] = 0
    if hyper.get("cautious"):
        goes_with = (change * g < 0).to(p.dtype)
        change = change * goes_with * (p.numel() / (goes_with.sum() + 1))
    p.copy_(p * (1 - decaying) + change)


class PlainCautiousAdamW(Plain):
    """AdamW with cautious updates (arXiv 2411.16085) and decay (arXiv 2510.12402)."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], **hyper: Any) -> None:
        (beta1, beta2), t = hyper["betas"], state["step"]
        m, v = moment(state, "exp_avg", p), moment(state, "exp_avg_sq", p)
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        change = -hyper["lr"] * m / (1 - beta1**t) / (v.sqrt() / math.sqrt(1 - beta2**t) + hyper.get("eps", 1e-8))
        cautious_step(p, g, change, hyper["lr"] * hyper["weight_decay"], **hyper)


class PlainCautiousLion(Plain):
    """Lion, likewise."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], **hyper: Any) -> None:
        (beta1, beta2), m = hyper["betas"], moment(state, "exp_avg", p)
        change = -hyper["lr"] * (beta1 * m + (1 - beta1) * g).sign()
        cautious_step(p, g, change, hyper["lr"] * hyper["weight_decay"], **hyper)
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
