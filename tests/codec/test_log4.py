"""The codec log4: both moments in a byte, their means exact, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import shardopt
from codec_cases import Kind
from helpers import with_gradient
from reference import dither
from shardopt.codec import CODECS, Moment, decode_moments, encode_moments
from shardopt.codec.log4 import Log4
from shardopt.kernels.numeric import bits
from weight_formats import BF16

LOG4 = CODECS["log4"]
MOMENTS = (Moment("exp_avg", signed=True), Moment("exp_avg_sq", signed=False))
#: Random bits with all shares of a level that the second moment can get.
ALL_SHARES = torch.arange(2**16) << 16


def blocks(seed: int = 0, rows: int = 64) -> tuple[Tensor, Tensor]:
    """Moments of gradients that differ in scale: (rows, 128), some of both zero."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.randn(rows, 128, generator=generator).exp()
    m, v = scale * torch.randn(rows, 128, generator=generator), scale.square()
    dead = torch.rand(rows, 128, generator=generator) < 0.1
    return torch.where(dead, 0.0, 0.1 * m), torch.where(dead, 0.0, v)


def test_every_byte_stands_for_a_pair() -> None:
    """All 255 pairs of a level and a signed code, and zero: decoded and encoded they are the same byte again."""
    byte = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    scales = torch.tensor([1.0, 2.0**20])
    root, y = (LOG4.decode(byte, s, signed=signed) for s, signed in ((scales, False), (torch.tensor([1.0]), True)))
    assert len(set(zip(root.tolist(), y.tolist(), strict=True))) == 256
    assert (root[0], y[0]) == (0, 0)
    again = LOG4.encode(root, scales, signed=False) + LOG4.encode(y, torch.tensor([1.0]), signed=True)
    assert torch.equal(again, byte)
    assert isinstance(LOG4, Log4)
    assert y.abs().unique().tolist() == pytest.approx([c / (14 - c) for c in range(8)])


def test_means_are_exact() -> None:
    """Over all random numbers: of the second moment within the range, and of the first in units of the coded root."""
    u = torch.tensor([[1.0, 0.77, 0.31, 0.0101, 0.0039063]])
    scales = Kind("log4", signed=False).measure(u)
    codes = LOG4.encode(u.expand(2**16, -1), scales, ALL_SHARES[:, None].expand(-1, 5), signed=False)
    decoded = LOG4.decode(codes, scales, signed=False).double()
    low, high = decoded.amin(0).square(), decoded.amax(0).square()
    assert ((decoded.square().mean(0) - u[0].double().square()).abs() <= (high - low) * 2.0**-15).all()
    r = torch.tensor([[1.0, -0.9, 0.5, -0.07, 0.03, 0.0]])
    scale = Kind("log4", signed=True).measure(r)
    random = ALL_SHARES * pow(0x9E3779B9, -1, 2**32) % 2**32  # the first moment multiplies by this odd number
    codes = LOG4.encode(r.expand(2**16, -1), scale, random[:, None].expand(-1, 6), signed=True)
    decoded = LOG4.decode(codes + 1, scale, signed=True).double()  # the byte's level is 1 or more
    assert ((decoded.mean(0) - r[0].double()).abs() <= (decoded.amax(0) - decoded.amin(0)) * 2.0**-15 + 2.0**-24).all()


def test_moments_share_the_byte() -> None:
    m, v = blocks()
    random = dither(1, torch.arange(m.numel()).view_as(m))
    first, second = encode_moments(LOG4, MOMENTS, [m, v], random=random)
    assert torch.equal(first.codes, second.codes)
    assert (first.codes[v == 0] == 0).all()
    got_m, got_v = decode_moments(LOG4, MOMENTS, [first, second]).values
    assert (got_m[v == 0] == 0).all()
    level = (bits(v.sqrt()).double() - bits(got_v.sqrt()).double()).abs() / second.scales[..., 1:].double()
    within = v.sqrt() >= second.scales[..., :1] * 2.0**-8
    assert level[within].max() <= 1 + 2.0**-10
    assert within.float().mean() > 0.8
    unit = got_v.sqrt()
    widest = (first.scales[..., :1] * unit).double() / 4  # of the outermost codes, 3 / 4 and 1
    assert ((got_m - m).double().abs() <= widest * (1 + 2.0**-20)).all()


def state_of(**options: Any) -> dict[str, Tensor]:
    param = Parameter(torch.linspace(-1, 1, 64 * 128).view(64, 128))
    optimizer = shardopt.AdamW4bit([param], **options)
    with_gradient(param, blocks()[0])
    optimizer.step()
    return optimizer.state[param]


def test_bytes_of_state() -> None:
    state = state_of()
    assert set(state) == {"step", "moment_codes", "exp_avg_scales", "exp_avg_sq_scales"}
    nbytes = sum(entry.nbytes for entry in state.values()) - state["step"].nbytes
    assert nbytes / (64 * 128) == 1 + 12 / 128


def test_repaid_weights_are_nearer_to_the_exact_ones() -> None:
    """One gradient and then none: all later movement is that of a first moment that was coded."""
    gaps = {}
    for repay in (True, False):
        found = {}
        for codec in ("log4", "fp32"):
            param = Parameter(torch.zeros(64, 128))
            options = {"repay": repay} if codec == "log4" else {}
            optimizer = shardopt.AdamW([param], lr=1e-3, weight_decay=0.0, codec=codec, **options)
            for t in range(30):
                with_gradient(param, blocks()[0] if t == 0 else torch.zeros(64, 128))
                optimizer.step()
            found[codec] = param.detach()
        gaps[repay] = float((found["log4"] - found["fp32"]).abs().mean() / found["fp32"].abs().mean())
    assert gaps[True] < gaps[False]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: shardopt.Lion([p], codec="log4"), "codec: got 'log4' for Lion .* expected another codec"),
        (lambda p: shardopt.Muon([p], algorithm="adamw", codec="log4"), "codec: got 'log4' for a group of Muon"),
        (lambda p: shardopt.AdamW4bit([p], amsgrad=True), "codec: got 'log4' .* rule 'amsgrad'"),
        (lambda p: shardopt.AdamW8bit([p], amsgrad=True, repay=True), "repay: got True beside amsgrad"),
        (lambda p: shardopt.AdamW([p], codec="companded8", repay=True), "repay: got True with codec 'companded8'"),
        (lambda p: shardopt.AdamW4bit([p], repay=1), "repay: got 1, expected True or False"),
        (lambda p: shardopt.AdamW4bit([Parameter(p.detach().to(BF16))]), "repay: got a parameter of torch.bfloat16"),
        (
            lambda p: shardopt.AdamW8bit([Parameter(p.detach().half())], repay=True),
            "repay: got a parameter of torch.float16 without master weights, expected float32 or master_weight_bits",
        ),
    ],
)
def test_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(Parameter(torch.zeros(64, 128)))


@pytest.mark.parametrize(
    ("dtype", "options", "own_dtype", "own"),
    [
        (torch.float32, {}, BF16, {"repay": False}),
        (BF16, {"codec": "log8"}, torch.float32, {"codec": "log8", "repay": True}),
    ],
    ids=str,
)
def test_a_converted_checkpoint_leaves_repay_as_it_is(
    tmp_path: Path, dtype: torch.dtype, options: dict[str, Any], own_dtype: torch.dtype, own: dict[str, Any]
) -> None:
    """Codec and weights decide whether it is possible, and those are the loading optimizer's."""
    models = [torch.nn.Linear(128, 64).to(each) for each in (dtype, own_dtype)]
    saved, fresh = (shardopt.AdamW4bit(m.parameters(), **o) for m, o in zip(models, (options, own), strict=True))
    shardopt.checkpoint.save(tmp_path, models[0], saved)
    shardopt.checkpoint.load(tmp_path, models[1], fresh, convert=True)
    assert fresh.param_groups[0]["repay"] == own.get("repay")
    for param in models[1].parameters():
        with_gradient(param, torch.ones_like(param))
    fresh.step()
