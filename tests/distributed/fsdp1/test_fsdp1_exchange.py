"""The exchange among ranks of FSDP1 for the blocks that they share, and steps without it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from helpers import EIGHT_BIT, RULES
from ranks.collectives import counted_collectives
from ranks.flat import Piece, block_numbers, blocks_of, gathered_parameters, piece_state, pieces, shared_blocks
from ranks.layouts import Shape
from ranks.models import WAYS, fsdp1, loss_of, make_batch, make_net, make_odds
from ranks.pool import Pool
from ranks.runs import make_optimizer, step_with, trained
from ranks.snapshot import Snapshot, assert_same
from shardopt.codec import encode_moments, get_codec
from shardopt.kernels.numeric import to_blocks
from shardopt.optim import ShardedOptimizer


def _count(way: str, rule: str, options: dict[str, Any]) -> list[list[tuple[str, int]]]:
    """The collectives of three steps; in the last one nothing has a gradient."""
    model, optimizer = trained(way, 0, rule, **options)
    found = []
    for step in range(2):
        with counted_collectives() as collectives:
            step_with(model, optimizer, step)
        found.append(collectives)
    with counted_collectives() as collectives:
        optimizer.step()
    return [*found, collectives]


@pytest.mark.parametrize(
    ("world_size", "way", "rule", "options", "rounds"),
    [
        (3, "fsdp1", "adamw", {}, 2),
        (3, "fsdp1 flat", "adamw", {}, 2),
        (4, "fsdp1 nested", "adamw", {"codec": "companded8"}, 1),
        (4, "fsdp1 nested", "lion", {}, 1),
        (3, "fsdp1", "momentum", {"codec": "dynamic8", "block_size": 16}, 1),
        (3, "fsdp1", "adamw", {"nonfinite": "raise"}, 3),  # one to agree that gradients are finite
        (3, "fsdp1", "adamw", {"codec": "fp32"}, 0),
        (3, "fsdp1", "adamw", {"exact_cut_blocks": False}, 0),
        (3, "fsdp1 none", "adamw", {}, 0),
        (3, "fsdp1 none flat", "adamw", {}, 0),
        (1, "fsdp1", "adamw", {}, 0),
        (2, "zero", "adamw", {}, None),
    ],
)
def test_one_collective_per_round(
    ranks: Pool, world_size: int, way: str, rule: str, options: dict[str, Any], rounds: int | None
) -> None:
    """However many parameters there are, and whether or not anything has a gradient; before the first, one to agree."""
    for steps in ranks.run(world_size, _count, way, rule, options):
        names = [[name for name, _ in step] for step in steps]
        if rounds is None:  # ZeRO's own
            assert all(name.startswith("broadcast") for step in names for name in step)
        else:
            agreed = world_size > 1 and "none" not in way
            assert names == [["allreduce"] * (rounds + agreed), *[["allreduce"] * rounds] * 2]


def _exchanged_bytes() -> tuple[int, int]:
    model, optimizer = trained("fsdp1", 0)
    with counted_collectives() as collectives:
        step_with(model, optimizer, 0)
    shared = shared_blocks(model, 128)
    roll = 8 * (1 + sum(1 for blocks in shared.values() if blocks))
    return collectives[1][1] - roll, sum(
        len(shared[name]) for name, shape in model.bare_shapes.items() if is_coded(shape)
    )


def test_bytes_of_a_round(ranks: Pool) -> None:
    """Two extremes of four bytes, per cut block and moment, on all ranks."""
    for found, cut in ranks.run(4, _exchanged_bytes):
        assert cut > 0
        assert found == cut * 2 * 2 * 4


def is_coded(shape: Shape) -> bool:
    """Whether the tests' options quantize a parameter: rows of 32 elements do."""
    return len(shape) > 1 and torch.Size(shape[1:]).numel() >= 32


def held_pieces(model: nn.Module, block_size: int) -> Iterator[tuple[Piece, Tensor]]:
    """This rank's pieces of coded parameters, and which of their elements are in blocks that others share."""
    shared = shared_blocks(model, block_size)
    for piece in pieces(model):
        if piece.numel and is_coded(piece.shape):
            mine = block_numbers(piece.shape, block_size)[piece.start : piece.start + piece.numel]
            yield piece, torch.isin(mine, torch.tensor(shared[piece.name]))


def _after_one_step(orig: bool, codec: str, block_size: int) -> tuple[list[nn.Module], list[ShardedOptimizer]]:
    """With exact cut blocks, without, and a whole model with float32 moments, which are those before they are coded."""
    whole, exact = make_odds(use_orig_params=orig)
    _, inexact = make_odds(use_orig_params=orig)
    models = [exact, inexact, whole]
    optimizers = []
    for model, own in zip(models, (codec, codec, "fp32"), strict=True):
        options = {"block_size": block_size, "min_quantized_numel": 32, "exact_cut_blocks": model is not inexact}
        optimizers.append(RULES["adamw"].make(model.parameters(), codec=own, **options))
        step_with(model, optimizers[-1], 0)
    return models, optimizers


@pytest.mark.ranks
@pytest.mark.parametrize(("world_size", "orig", "block_size"), [(3, True, 16), (4, False, 128)])
@pytest.mark.parametrize("codec", EIGHT_BIT)
def test_without_exchange_each_fragment_is_a_block(world_size: int, orig: bool, block_size: int, codec: str) -> None:
    """The first step begins with no moments, so the parameters are exact, and each fragment is coded by itself."""
    (exact, inexact, whole), optimizers = _after_one_step(orig, codec, block_size)
    assert_same(gathered_parameters(inexact), gathered_parameters(exact))
    moments = optimizers[0].rule(optimizers[0].param_groups[0]).moments
    exactly = {piece.name: piece_state(optimizers[0], piece) for piece in pieces(exact)}
    cut_blocks = differing = 0
    for piece, cut in held_pieces(inexact, block_size):
        coded = piece_state(optimizers[1], piece)
        true = optimizers[2].state[whole.get_parameter(piece.name)]
        numbers = block_numbers(piece.shape, block_size)[piece.start : piece.start + piece.numel]
        for index, number in enumerate(blocks_of(piece, block_size)):
            here = numbers == number
            values = [to_blocks(piece.cut(true[moment.name])[here].view(1, -1), block_size) for moment in moments]
            differs = False
            for moment, expected in zip(moments, encode_moments(get_codec(codec), moments, values), strict=True):
                codes, scales = (f"{moment.name}_{kind}" for kind in ("codes", "scales"))
                assert torch.equal(coded[codes][here], expected.codes.reshape(-1)[: here.sum()]), (piece.name, index)
                assert torch.equal(coded[scales][index].reshape(-1), expected.scales.reshape(-1)), (piece.name, index)
                differs |= not torch.equal(coded[codes][here], exactly[piece.name][codes][here])
                differs |= not torch.equal(coded[scales][index], exactly[piece.name][scales][index])
            assert cut[here].all() or not differs, f"{piece.name}: block {number} is not cut, but differs"
            cut_blocks += bool(cut[here].any())
            differing += differs
    counts = torch.tensor([cut_blocks, differing])
    dist.all_reduce(counts)
    assert counts[0] > 20
    assert counts[1] > 10, "hardly anything differs: this test sees nothing"


def _decoded(optimizer: ShardedOptimizer, piece: Piece) -> dict[str, Tensor]:
    """The float32 moments of a piece."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    place = next(index for index, param in enumerate(params) if param is piece.tensor)
    state = optimizer.state_dict(dequantize=True)["state"].get(place, {})
    return {key: piece.of(value) for key, value in state.items() if key != "step"}


def _largest_space(codec: str, *, signed: bool) -> float:
    """Between neighbouring values that a codec has (roots, where it is unsigned), in a block whose largest is one."""
    codes = torch.arange(256, dtype=torch.uint8).view(get_codec(codec).code_dtype)
    scales = torch.ones(256, 1)
    found = get_codec(codec).decode(codes.view(-1, 1), scales, signed=signed).flatten()
    values = (found if signed else found.sqrt()).unique()
    return float(values.diff().max())


@pytest.mark.ranks(3)
@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("codec", ["companded8", "dynamic8"])
def test_without_exchange_moments_are_as_near(codec: str, orig: bool) -> None:
    """With or without the exchange an element's code is next to it, in units of a scale that is the block's at most."""
    (exact, inexact, whole), optimizers = _after_one_step(orig, codec, 128)
    exactly = {piece.name: _decoded(optimizers[0], piece) for piece in pieces(exact)}
    for piece, cut in held_pieces(inexact, 128):
        numbers = block_numbers(piece.shape, 128)
        for key, value in _decoded(optimizers[1], piece).items():
            signed = key == "exp_avg"
            root = (lambda x: x) if signed else torch.sqrt
            true = root(optimizers[2].state[whole.get_parameter(piece.name)][key]).reshape(-1)
            largest = torch.zeros(int(numbers.max()) + 1).scatter_reduce(0, numbers, true.abs(), "amax")
            step = piece.cut(largest[numbers]) * _largest_space(codec, signed=signed)
            for found in (exactly[piece.name][key], value):
                error = (root(found) - piece.cut(true)).abs()
                assert (error <= step * (1 + 2**-20)).all(), (piece.name, key)
            assert torch.equal(value[~cut], exactly[piece.name][key][~cut])


def _train_inexactly(way: str) -> list[float]:
    model = WAYS[way](make_net())
    optimizer = make_optimizer(way, model, lr=1e-2, block_size=16, exact_cut_blocks=False)
    losses = []
    for step in range(6):
        loss = loss_of(model, make_batch(step % 2))
        loss.backward()
        with counted_collectives() as collectives:
            optimizer.step()
        assert len(collectives) == (step == 0)  # to agree
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("way", ["fsdp1", "fsdp1 flat"])
def test_trains_without_exchange(ranks: Pool, way: str) -> None:
    for losses in ranks.run(4, _train_inexactly, way):
        assert losses[-1] < losses[0]


@pytest.mark.ranks(3)
def test_changed_between_steps() -> None:
    """The option may be set per group, and changed between steps: the ranks say so, and agree anew."""
    models = [fsdp1(make_net()) for _ in range(2)]
    optimizers = [make_optimizer("fsdp1", model, block_size=16) for model in models]
    found: list[Snapshot] = []
    for model, optimizer in zip(models, optimizers, strict=True):
        for step in range(3):
            optimizer.param_groups[0]["exact_cut_blocks"] = step == 1 or optimizer is optimizers[0]
            with counted_collectives() as collectives:
                step_with(model, optimizer, step)
            assert len(collectives) == ((1 + 2, 2, 2) if optimizer is optimizers[0] else (1, 1 + 2, 1 + 1))[step]
        found.append(gathered_parameters(model))
    assert any(not torch.equal(found[0][name], found[1][name]) for name in found[0])
