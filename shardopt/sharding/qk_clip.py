"""QK-Clip (Kimi K2, arXiv 2507.20534, algorithm 1): scales query and key weights down where logits explode."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module
from torch.optim import Optimizer

from shardopt.kernels.autograd import without_autograd
from shardopt.layout import Exchange, FlatBuffer, FlatShard, Shard, read_model, shard_of
from shardopt.layout.names import parameter_names
from shardopt.optim.base import ShardedOptimizer
from shardopt.report.memory import owner_of
from shardopt.sharding.exchange import RanksExchange, device_of
from shardopt.state.full_precision import joined, split_into
from shardopt.step.agreement import digest_of, is_common

#: The rows of one head: how many, and the power of the head's factor that multiplies them.
HeadRows = Sequence[tuple[int, float]]
#: The rows of a parameter: those of each head of a query or key projection; or of one head, one head after another; or
#: blocks of heads, each with their number.
Rows = Literal["query", "key"] | HeadRows | Sequence[tuple[int, HeadRows]]

_USUAL: Mapping[str, Rows] = {"q_proj.*": "query", "k_proj.*": "key"}
_POWER = 0.5  # of queries and keys, whose product takes the whole factor
_ERROR = "error"  # key of an error of a rank among arguments that ranks compare


class _Block(NamedTuple):
    """Consecutive rows of a parameter: so many heads, one after another."""

    heads: int
    rows: HeadRows

    @property
    def is_scaled(self) -> bool:
        """Whether a row has a power other than 0."""
        return any(power for _, power in self.rows)


class _Place(NamedTuple):
    """A parameter of the bare model: in this tensor of the wrapped model, by itself or as a segment."""

    tensor: Tensor
    segment: int | None
    shard: Shard


@without_autograd
def qk_clip_(
    model: Module,
    max_logits: Mapping[str, Tensor],
    threshold: float = 100.0,
    *,
    heads: Mapping[str, Rows] = _USUAL,
    optimizer: Optimizer | None = None,
    group: ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """Scales query and key weights in place so that the largest attention logits come down to ``threshold``.

    A head whose largest logit S is above the threshold has the factor ``threshold / S``, others 1. Queries and keys
    take its root. In attention with latent keys (MLA) rotary queries take all of it, as the rotary key belongs to all
    heads and stays. Where query heads share a key head (GQA), the group takes the least factor of its heads, as in
    Megatron. Call this after each ``optimizer.step()``; momenta stay as they are.

    Parameters may be plain, or as DDP, FSDP1, FSDP2, HSDP or tensor parallelism have them; each rank scales its part.
    Weights in 16 bits are scaled in float32, with the low bits that ``master_weight_bits`` keeps in the optimizer's
    state, and rounded to the nearest once.

    Each error is raised on all ranks, before any weight is changed: ranks compare their arguments first.

    Args:
        model: the model, maybe wrapped. All ranks call this, with the same modules.
        max_logits: by the name of an attention module in the bare model, the largest logit of each query head on this
            rank since the last call: after scaling by ``1 / sqrt(head_dim)``, before the softmax. Float, ``(heads,)``;
            -inf for heads that are on other ranks, as under tensor parallelism. Maxima over the ranks are taken here.
        threshold: the largest logit that is left alone.
        heads: by pattern, relative to the module, how rows of parameters belong to heads; of patterns that match a
            parameter the last one counts, and biases are scaled where one matches them. "query" has as many heads as
            ``max_logits``, "key" heads of as many rows as the query's, and both the power 0.5. Other layouts list the
            rows of a head, with the power of the factor that each takes: MLA of DeepSeek and Kimi is
            ``{"q_b_proj.weight": [(128, 0.5), (64, 1.0)], "kv_b_proj.weight": [(128, 0.5), (128, 0.0)]}``. Queries,
            keys and values that lie one behind the other are blocks with their number of heads:
            ``{"qkv.*": [(32, [(128, 0.5)]), (8, [(128, 0.5)]), (8, [(128, 0.0)])]}``.
        optimizer: the optimizer that has the parameters. Necessary for weights in 16 bits, whose low bits its state may
            have.
        group: ranks to take maxima over; all by default.

    Returns:
        The maxima over the ranks, like ``max_logits``.

    Raises:
        TypeError: ``max_logits`` or ``heads`` is no mapping.
        ValueError: an argument is malformed, a pattern or module matches no parameter, rows or heads do not divide, or
            ``optimizer`` is missing or has not the parameters.
        RuntimeError: DeepSpeed's ZeRO keeps the weights, or ZeroRedundancyOptimizer low bits on another rank; or
            another rank has raised, or has other modules, heads or another threshold.
        FloatingPointError: a logit is NaN or infinite.
    """
    ranks = RanksExchange((_world(group),), device_of(group)) if dist.is_initialized() else None
    error: Exception | None = None
    try:
        places, matched = _checked(model, max_logits, threshold, heads, optimizer)
        said = {"threshold": repr(float(threshold)), "heads": repr(dict(heads))}
        said |= {f"max_logits[{module!r}]": f"{x.numel()} heads" for module, x in sorted(max_logits.items())}
    except Exception as raised:  # any kind of error: other ranks must not wait for this rank
        error, said = raised, {_ERROR: f"{type(raised).__name__}: {raised}"}
    differs = None if ranks is None else _difference(ranks, said)
    if error is not None:
        raise error
    if differs is not None:
        raise RuntimeError(differs)
    factors: dict[str, dict[str, Tensor]] = {}
    maxima = _maxima(max_logits, ranks)
    for module, largest in maxima.items():
        if not bool((largest < math.inf).all()):
            raise FloatingPointError(
                f"max_logits[{module!r}]: got NaN or infinite logits, expected finite ones, or -inf for heads of other "
                "ranks; leave this call out after a step that was skipped, or look for the cause with "
                "shardopt.check_numerics; no weight was changed"
            )
    for module, largest in maxima.items():
        gamma = torch.where(largest > threshold, threshold / largest, 1.0)
        if bool((gamma < 1.0).any()):
            factors[module] = _factors(gamma, matched[module])
    by_tensor: dict[Tensor, dict[int | None, Tensor]] = {}
    for of_module in factors.values():
        for name, rows in of_module.items():
            place = places[name]
            by_tensor.setdefault(place.tensor, {})[place.segment] = rows
    for tensor, of_segments in by_tensor.items():
        _scale(tensor, of_segments, optimizer)
    return maxima


def _places(model: Module) -> dict[str, _Place]:
    """The parameters by their names in the bare model."""
    read_model(model)
    places: dict[str, _Place] = {}
    for name, tensor in parameter_names(model).items():
        shard = shard_of(tensor)
        if isinstance(shard, FlatBuffer):
            places.update((s.name, _Place(tensor, index, s.shard)) for index, s in enumerate(shard.segments))
        else:
            places[name] = _Place(tensor, None, shard)
    return places


def _checked(
    model: Module,
    max_logits: Mapping[str, Tensor],
    threshold: float,
    heads: Mapping[str, Rows],
    optimizer: Optimizer | None,
) -> tuple[dict[str, _Place], dict[str, dict[str, list[_Block]]]]:
    """The parameters by their names, and by attention module the blocks of heads in its parameters; without messages.

    Raises:
        TypeError: an argument is no mapping.
        ValueError: an argument is wrong.
        RuntimeError: DeepSpeed or another rank keeps the weights.
    """
    for name, given in (("max_logits", max_logits), ("heads", heads)):
        if not isinstance(given, Mapping):
            raise TypeError(
                f"{name}: got a {type(given).__name__}, expected a mapping; pass the largest logits by modules' names, "
                "and heads by patterns over parameters' names"
            )
    if not 0.0 < threshold < math.inf:
        raise ValueError(
            f"threshold: got {threshold!r}, expected a finite number above 0; pass the largest logit to leave alone, "
            "such as 100.0"
        )
    places = _places(model)
    matched = {module: _matched(module, logits, heads, places) for module, logits in max_logits.items()}
    tensors = {places[name].tensor: None for of_module in matched.values() for name in of_module}
    _check_owners(tensors, optimizer, {id(place.tensor): name for name, place in places.items()})
    return places, matched


def _world(group: ProcessGroup | None) -> ProcessGroup:
    group = dist.group.WORLD if group is None else group
    assert group is not None
    return group


def _difference(ranks: Exchange, said: Mapping[str, str]) -> str | None:
    """The error if ranks have other arguments, or one of them an error; None if all have the same."""
    text = json.dumps(said)
    if is_common(ranks, digest_of(text)):
        return None
    of_ranks = {rank: json.loads(theirs) for rank, theirs in sorted(ranks.gathered(text.encode()).items())}
    for rank, theirs in of_ranks.items():
        if _ERROR in theirs:
            return (
                f"got arguments that rank {rank} refuses, expected valid ones on all ranks; correct them there, no "
                f"weight was changed: {theirs[_ERROR]}"
            )
    first = next(iter(of_ranks))
    rank, key = next(
        (rank, key)
        for rank, theirs in of_ranks.items()
        for key in [*of_ranks[first], *theirs]
        if theirs.get(key) != of_ranks[first].get(key)
    )
    return (
        f"got ranks that differ in {key}: {of_ranks[first].get(key, 'none')} on rank {first} and "
        f"{of_ranks[rank].get(key, 'none')} on rank {rank}, expected the same on all ranks; pass all of them the same "
        "modules, heads and threshold, or group= with the ranks that have the same modules; no weight was changed"
    )


def _maxima(max_logits: Mapping[str, Tensor], ranks: Exchange | None) -> dict[str, Tensor]:
    """The largest logits over the ranks: float32, with infinity for NaN."""
    in_order = sorted(max_logits.items())  # ranks may have filled theirs in other orders
    found = {name: x.detach().float().nan_to_num(math.inf, math.inf, -math.inf) for name, x in in_order}
    if not found or ranks is None:
        return found
    device = next(iter(found.values())).device
    together = torch.cat([x.to(device) for x in found.values()])
    ranks.all_reduce_max(together)
    parts = torch.split(together, [x.numel() for x in found.values()])
    return {name: part.to(x.device) for (name, x), part in zip(found.items(), parts, strict=True)}


def _matched(
    module: str, max_logits: Tensor, heads: Mapping[str, Rows], places: Mapping[str, _Place]
) -> dict[str, list[_Block]]:
    """The blocks of heads in each parameter of an attention module.

    Raises:
        ValueError: a pattern matches no parameter, or rows or heads do not divide.
    """
    is_tensor = isinstance(max_logits, Tensor)
    if not is_tensor or max_logits.dim() != 1 or not max_logits.numel() or not max_logits.dtype.is_floating_point:
        shape = f" of shape {tuple(max_logits.shape)} of {max_logits.dtype}" if is_tensor else ""
        raise ValueError(
            f"max_logits[{module!r}]: got a {type(max_logits).__name__.lower()}{shape}, expected a tensor of floats "
            "of shape (heads,); pass the largest logit of each query head, as logits.amax((0, 2, 3)) gives it for "
            "(batch, heads, queries, keys)"
        )
    prefix = f"{module}." if module else ""
    inside = {name: name.removeprefix(prefix) for name in places if name.startswith(prefix)}
    found: dict[str, tuple[Rows, int]] = {}  # layout and rows, by name
    for pattern, layout in heads.items():
        names = [name for name, short in inside.items() if fnmatchcase(short, pattern)]
        if not names:
            raise ValueError(
                f"heads[{pattern!r}]: got a pattern that matches no parameter of {module!r}, expected one of "
                f"{', '.join(inside.values()) or 'a module of the model'}; correct the pattern or the module's name"
            )
        found.update((name, (layout, places[name].shard.global_shape[0])) for name in names)
    count = max_logits.numel()
    queries = [rows for layout, rows in found.values() if layout == "query"]
    blocks = {name: _blocks(name, layout, rows, count, queries) for name, (layout, rows) in found.items()}
    groups = _groups(blocks, count)
    for name, of_name in blocks.items():
        for block in of_name:
            if not block.heads or count % block.heads or (block.is_scaled and block.heads % groups):
                raise ValueError(
                    f"{name}: got {block.heads} heads beside {count} in max_logits[{module!r}] and {groups} where they "
                    f"are fewest, expected a divisor of {count} and a multiple of {groups}; correct the rows of a head "
                    "in heads, or pass one logit per query head"
                )
    return blocks


def _groups(blocks: Mapping[str, list[_Block]], count: int) -> int:
    """The least number of heads among the scaled blocks of a module's parameters: heads of a group share a factor."""
    scaled = (block.heads for of_name in blocks.values() for block in of_name if block.is_scaled and block.heads)
    return min(scaled, default=count)


def _blocks(name: str, layout: Rows, rows: int, count: int, queries: Sequence[int]) -> list[_Block]:
    """The blocks of heads in a parameter of ``rows`` rows, in a module of ``count`` query heads."""
    if isinstance(layout, str):
        if layout not in ("query", "key") or not queries or queries[0] % count or rows % (queries[0] // count):
            raise ValueError(
                f"{name}: got {layout!r} for {rows} rows and {count} heads, expected 'query', or 'key' beside a query, "
                "and rows that heads divide; list the rows of a head"
            )
        head = queries[0] // count
        return [_Block(rows // head, [(head, _POWER)])]
    if _is_head(layout):
        head = sum(size for size, _ in layout)
        blocks = [_Block(rows // head if head else 0, layout)]
    elif _are_pairs(layout) and all(_is_count(number) and _is_head(of_head) for number, of_head in layout):
        blocks = [_Block(number, of_head) for number, of_head in layout]
    else:
        raise ValueError(
            f"{name}: got heads of {layout!r}, expected 'query', 'key', the rows of a head with their powers, or "
            "blocks of heads; write [(128, 0.5)], or [(32, [(128, 0.5)]), (8, [(128, 0.5)])]"
        )
    total = sum(block.heads * sum(size for size, _ in block.rows) for block in blocks)
    if total != rows:
        raise ValueError(
            f"{name}: got {rows} rows and heads of {total} rows in all, expected as many; correct the rows of a head, "
            "or the number of heads, in heads"
        )
    return blocks


def _is_count(value: object) -> bool:
    return isinstance(value, Integral) and int(value) >= 0


def _are_pairs(value: object) -> TypeGuard[Sequence[tuple[Any, Any]]]:
    return isinstance(value, Sequence) and all(isinstance(pair, Sequence) and len(pair) == 2 for pair in value)


def _is_head(value: object) -> TypeGuard[HeadRows]:
    """Whether this lists numbers of rows with their powers."""
    return _are_pairs(value) and all(
        _is_count(size) and isinstance(power, Real) and 0.0 <= float(power) < math.inf for size, power in value
    )


def _factors(gamma: Tensor, matched: Mapping[str, list[_Block]]) -> dict[str, Tensor]:
    """The factor of each row of a module's parameters: float32, ``(rows,)``."""
    groups = _groups(matched, gamma.numel())
    least = gamma.view(groups, -1).amin(1)
    factors = {}
    for name, blocks in matched.items():
        parts = []
        for block in blocks:
            ones = gamma.new_ones(block.heads)
            of_head = least.repeat_interleave(block.heads // groups) if block.is_scaled else ones
            rows = [_power(of_head, power).unsqueeze(1).expand(-1, size) for size, power in block.rows]
            parts.append(torch.cat(rows, 1).reshape(-1))
        factors[name] = torch.cat(parts)
    return factors


def _power(gamma: Tensor, power: float) -> Tensor:
    return gamma.sqrt() if power == _POWER else gamma.pow(power)


def _check_owners(tensors: Mapping[Tensor, object], optimizer: Optimizer | None, names: Mapping[int, str]) -> None:
    """Checks that whoever keeps more bits of the weights than the model has is known here.

    Raises:
        ValueError: the optimizer is missing, or does not have a parameter.
        RuntimeError: DeepSpeed or another rank keeps the weights.
    """
    given = set() if optimizer is None else {id(p) for group in optimizer.param_groups for p in group["params"]}
    owner = None if optimizer is None else owner_of(optimizer)
    held = set() if owner is None else {id(p) for group in owner.param_groups for p in group["params"]}
    for tensor in tensors:
        name = names[id(tensor)]
        if hasattr(tensor, "ds_id") or hasattr(tensor, "_hp_mapping"):
            raise RuntimeError(
                f"{name}: got a parameter of DeepSpeed's ZeRO, whose next step would write its own weights over "
                "scaled ones, expected parameters of DDP, FSDP1, FSDP2 or none; scale them with "
                "deepspeed.utils.safe_get_full_fp32_param and safe_set_full_fp32_param"
            )
        if optimizer is None and tensor.dtype != torch.float32:
            raise ValueError(
                f"optimizer: got None for {name} of {tensor.dtype}, expected the optimizer, whose state may have more "
                "bits of the weights; pass optimizer="
            )
        if optimizer is not None and id(tensor) not in given:
            raise ValueError(
                f"optimizer: got one without {name}, expected the optimizer that steps it; call this after its step, "
                "when the model is sharded again"
            )
        if optimizer is not None and id(tensor) not in held and tensor.dtype != torch.float32:
            raise RuntimeError(
                f"{name}: got weights of {tensor.dtype} whose low bits may be on another rank, as "
                "ZeroRedundancyOptimizer has them, expected float32; train with FSDP2 instead"
            )


def _scale(tensor: Tensor, of_segments: Mapping[int | None, Tensor], optimizer: Optimizer | None) -> None:
    """Multiplies rows of a tensor's parameters, in this rank's part, and the low bits in the optimizer's state."""
    owner = None if optimizer is None else owner_of(optimizer)
    group = next((g for g in owner.param_groups if any(p is tensor for p in g["params"])), None) if owner else None
    if isinstance(owner, ShardedOptimizer) and group is not None:
        owner.synchronize()
        spec, state = owner._internals.state_of(tensor, group), owner.state.get(tensor, {})
        weights = joined(spec, tensor, state)
        _multiply(spec.shard.local(weights), spec.shard, of_segments)
        state = split_into(spec, tensor, state, weights, owner._internals.residency.of(tensor).state)
        if state:
            owner.state[tensor] = state
        return
    shard = shard_of(tensor)
    local = shard.local(tensor.detach())
    weights = local.float()
    _multiply(weights, shard, of_segments)
    local.copy_(weights)


def _multiply(local: Tensor, shard: Shard, of_segments: Mapping[int | None, Tensor]) -> None:
    """Multiplies the rows of this rank's part, float32; ``of_segments`` has the factors of all rows."""
    for index, factors in of_segments.items():
        part, elements = shard, local
        if index is not None:
            assert isinstance(shard, FlatBuffer)
            segment = shard.segments[index]
            part, elements = segment.shard, segment.of(local)
        if not elements.numel():
            continue
        own = factors.to(elements.device)
        if isinstance(part, FlatShard):
            places = torch.arange(part.start, part.end, device=elements.device)
            elements.mul_(own[places // max(part.row_numel, 1)])
        else:
            rows = torch.cat([own[first:end] for first, end in part.indices[0]])
            elements.mul_(rows.view(-1, *(1,) * (elements.dim() - 1)))
