"""Errors of updates, compared with those computed from the whole state and from all values that a code can have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import shardopt
from attack.index_file import read_index, write_index
from quality import update_error
from quality.update_error import UpdateError, main, update_errors
from shardopt.checkpoint import save
from shardopt.codec import get_codec

ROWS, COLUMNS, BLOCK = 40, 150, 128  # a block of 128 and one of 22 in each row
Make = Callable[[Iterable[nn.Parameter]], Optimizer]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ROWS, COLUMNS))
        self.bias = nn.Parameter(torch.zeros(COLUMNS))


def stepped(make: Make) -> tuple[Model, Any]:
    """A model and its optimizer after three steps; gradients of some elements are zero."""
    model = Model()
    optimizer = make(model.parameters())
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for param in model.parameters():
            x = torch.randn(2, *param.shape, generator=generator)
            param.grad = torch.where(torch.arange(param.shape[-1]) % 11 == 0, 0, x[0] * (3 * x[1]).exp())
        optimizer.step()
    return model, optimizer


def errors_of(path: Path, make: Make) -> tuple[dict[str, UpdateError], dict[str, Any]]:
    model, optimizer = stepped(make)
    save(path, model, optimizer)
    errors, problems = update_errors(path)
    assert problems == []
    return errors, optimizer.state[model.weight]


def blocks(x: Tensor, zero: int = 0) -> Tensor:
    return nn.functional.pad(x, (0, 2 * BLOCK - COLUMNS), value=zero).reshape(ROWS, 2, BLOCK)


def decoded(
    state: dict[str, Any], codec: str, name: str, shared: str | None = None, *, signed: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Values of codes, and half the way to the farther of the neighbours among all values; a whole one for log4."""
    own = get_codec(codec)
    codes, scales = state[shared or f"{name}_codes"], state[f"{name}_scales"].reshape(ROWS, 2, -1)
    codes = codes if own.code_dtype == torch.uint8 else codes.view(torch.int16).squeeze(-1)
    x = own.decode(blocks(codes, own.zero_code(signed=signed)), scales, signed=signed).numpy()
    bits = 8 * own.code_dtype.itemsize
    every = torch.arange(2**bits, dtype=torch.int32).to(own.code_dtype)
    values = own.decode(every.expand(ROWS, 2, -1), scales, signed=signed).numpy()
    error = np.zeros_like(x)
    for at in np.ndindex(ROWS, 2):
        of_block = np.unique(values[at])
        of_block = of_block if signed else of_block[of_block > 0]
        index = np.searchsorted(of_block, x[at])
        below, above = of_block[np.maximum(index - 1, 0)], of_block[np.minimum(index + 1, len(of_block) - 1)]
        error[at] = np.maximum(x[at] - below, above - x[at]) * np.float32(1 if codec == "log4" else 0.5)
    error[(x == 0) & (not signed)] = 0
    return x, error


def expect(
    errors: dict[str, UpdateError], formula: str, update: np.ndarray, error: np.ndarray, at_floor: int = 0
) -> None:
    """Compares with updates and errors in blocks, with padding."""
    assert errors.keys() == {"weight"}  # the bias is not quantized
    weight = errors["weight"]
    assert weight.update == formula
    numel = ROWS * COLUMNS
    update, error = (x.reshape(ROWS, 2 * BLOCK)[:, :COLUMNS].ravel() for x in (update, error))
    scale = math.sqrt(math.fsum(update**2) / numel)
    rounding = 2 * numel * 2.0**-53  # of sums of squares in float64, in any order, of the root and of the division
    in_order = np.sort(error.astype(np.float32))
    for value, rank in ((weight.median, numel // 2), (weight.most, numel * 99 // 100)):
        quantile = in_order[rank - 1 : rank].view(np.int32) >> 16
        edge = ((quantile + 1) << 16).view(np.float32)[0] if quantile else 0.0
        assert value == pytest.approx(float(edge) / scale, rel=rounding, abs=0)
        assert in_order[rank - 1] <= edge <= in_order[rank - 1] * (1 + 2.0**-7)
    assert weight.at_floor == at_floor / numel
    assert int(weight.histogram.sum()) + weight.exact == numel
    assert weight.exact == (error == 0).sum()
    # Bins of the histogram have the right share of the errors, whichever side of an edge a fine bin is counted on.
    reached = np.cumsum(weight.histogram.numpy()) + weight.exact
    edges = scale * 2.0 ** (
        update_error.FIRST_OCTAVE + np.arange(1, update_error.BINS + 1) / update_error.BINS_PER_OCTAVE
    )
    assert (reached >= np.searchsorted(in_order, edges * (1 - 2.0**-6))).all()
    assert (reached <= np.searchsorted(in_order, edges * (1 + 2.0**-6))).all()


def adam(m: tuple[np.ndarray, ...], u: tuple[np.ndarray, ...], eps: float) -> tuple[np.ndarray, np.ndarray]:
    """Updates and their errors: of root, error of the root."""
    (value, off), (root, least) = ([x.astype(np.float64) for x in pair] for pair in (m, u))
    value = np.abs(value)
    with np.errstate(divide="ignore", invalid="ignore"):
        update = value / (root + eps)
        error = (value + off) / (least + eps) - update
    return np.where(root > 0, update, 0), np.where(root > 0, error, 0)


@pytest.mark.parametrize("eps", [1e-8, 0.3])
@pytest.mark.parametrize("codec", ["log8", "companded8", "dynamic8", "companded16", "log4"])
def test_adam(tmp_path: Path, codec: str, eps: float) -> None:
    errors, state = errors_of(tmp_path, lambda params: shardopt.AdamW(params, codec=codec, eps=eps))
    shared = "moment_codes" if codec == "log4" else None
    m = decoded(state, codec, "exp_avg", shared, signed=True)
    x, off = decoded(state, codec, "exp_avg_sq", shared, signed=False)
    u = (x, x.astype(np.float64) - off)
    if codec in ("log8", "log4"):
        m = m[0] * x, m[1] * x
    if codec == "dynamic8":
        u = tuple(np.sqrt(each.astype(np.float64)) for each in u)
    at_floor = 0
    if codec in ("companded8", "dynamic8", "companded16"):
        codes = state["exp_avg_sq_codes"]
        at_floor = int((codes.view(torch.int16) if codec == "companded16" else codes).eq(1).sum())
    if codec == "log4":
        reaches = blocks_at_range(state["exp_avg_sq_scales"])
        level = (state["moment_codes"].int() - 1).remainder(17)
        at_floor = int(((level == 0) & (state["moment_codes"] > 0) & reaches).sum())
    assert bool(at_floor) == (codec != "log8")  # whose range of 32 octaves holds all of these
    expect(errors, "exp_avg / (sqrt(exp_avg_sq) + eps)", *adam(m, u, eps), at_floor)


def blocks_at_range(scales: Tensor) -> Tensor:
    """Of log4's elements, those in blocks whose roots span 8 octaves, in 16 steps."""
    return (scales[..., 1] == 2**22).repeat_interleave(BLOCK, 1)[:, :COLUMNS]


@pytest.mark.parametrize("codec", ["log8", "dynamic8"])
def test_one_moment(tmp_path: Path, codec: str) -> None:
    errors, state = errors_of(tmp_path / "lion", lambda params: shardopt.Lion(params, codec=codec))
    x, off = decoded(state, codec, "exp_avg", signed=True)
    expect(errors, "exp_avg", x.astype(np.float64), off.astype(np.float64))
    errors, state = errors_of(tmp_path / "adagrad", lambda params: shardopt.Adagrad(params, codec=codec))
    x, off = (each.astype(np.float64) for each in decoded(state, codec, "sum", signed=False))
    root, least = (x, x - off) if codec == "log8" else (np.sqrt(x), np.sqrt(x - off))
    at_floor = 0 if codec == "log8" else int((state["sum_codes"] == 1).sum())
    expect(errors, "sqrt(sum)", root, root - least, at_floor)


def test_formulas(tmp_path: Path) -> None:
    cases: list[tuple[str, Make]] = [
        ("exp_avg / (sqrt(max_exp_avg_sq) + eps)", lambda params: shardopt.AdamW8bit(params, amsgrad=True)),
        ("exp_avg / (exp_inf + eps)", shardopt.Adamax8bit),
        ("exp_avg", shardopt.ADOPT8bit),
        ("exp_avg_fast / (sqrt(exp_avg_sq) + eps)", shardopt.AdEMAMix8bit),
        ("momentum_buffer", lambda params: shardopt.RMSprop8bit(params, centered=True, momentum=0.9)),
        ("sqrt(square_avg)", shardopt.RMSprop8bit),
    ]
    for index, (formula, make) in enumerate(cases):
        errors, _ = errors_of(tmp_path / str(index), make)
        assert {name: each.update for name, each in errors.items()} == {"weight": formula}


def test_options_of_no_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, *stepped(shardopt.AdamW8bit))
    for key, wrong in (("block_size", 64), ("codec", "dynamic4"), ("min_quantized_numel", "x")):
        content = read_index(tmp_path)
        options = content["header"]["param_groups"][0]["options"]
        right, options[key] = options[key], wrong
        write_index(tmp_path, content)
        assert main([str(tmp_path)]) == 1
        assert "no update errors of weight: " in capsys.readouterr().out
        options[key] = right
        write_index(tmp_path, content)


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_floats_have_no_error(tmp_path: Path, codec: str, capsys: pytest.CaptureFixture[str]) -> None:
    errors, _ = errors_of(tmp_path, lambda params: shardopt.AdamW(params, codec=codec))
    assert errors == {}
    assert main([str(tmp_path)]) == 0
    assert "no state in codes" in capsys.readouterr().out


def test_no_optimizer_no_parameters_and_no_step(tmp_path: Path) -> None:
    fresh = Model()
    optimizer = shardopt.AdamW8bit(fresh.parameters())
    save(tmp_path / "fresh", fresh, optimizer)
    for param in fresh.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    save(tmp_path / "zeros", fresh, optimizer)
    save(tmp_path / "model", fresh)
    save(tmp_path / "empty", nn.Module())
    for name in ("fresh", "zeros", "model", "empty"):
        assert update_errors(tmp_path / name) == ({}, [])
        assert main([str(tmp_path / name)]) == 0


def test_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    errors, _ = errors_of(tmp_path, shardopt.AdamW8bit)
    weight = errors["weight"]
    assert main([str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for needed in ("log8", weight.update, "of 99%", f"{weight.median:.2%}", f"{weight.most:.2%}"):
        assert needed in text


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'shardopt[plot]'")
    errors, _ = errors_of(tmp_path / "saved", shardopt.AdamW8bit)
    histogram, exact = update_error.error_counts(errors)["log8"]
    assert int(histogram.sum()) + exact == ROWS * COLUMNS
    assert main([str(tmp_path / "saved"), "--plot", str(tmp_path / "codes.png")]) == 0
    assert (tmp_path / "codes.png").read_bytes().startswith(b"\x89PNG")


def test_plots_without_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'shardopt[plot]'")
    save(tmp_path / "saved", Model())
    assert main([str(tmp_path / "saved"), "--plot", str(tmp_path / "codes.png")]) == 1
    assert "got no state in codes to plot" in capsys.readouterr().err
    assert not (tmp_path / "codes.png").exists()


def test_codes_are_drawn_by_value() -> None:
    by_sign = [*range(128, 256), *range(128)]
    assert update_error.order_of_codes("exp_avg_codes", "log8").tolist() == by_sign
    assert update_error.order_of_codes("exp_avg_codes", "companded8").tolist() == by_sign
    for entry, codec in (("exp_avg_sq_codes", "log8"), ("exp_avg_codes", "dynamic8"), ("moment_codes", "log4")):
        assert update_error.order_of_codes(entry, codec).tolist() == list(range(256))


def test_state_that_cannot_be_decoded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = stepped(shardopt.AdamW8bit)
    optimizer.state[model.weight]["exp_avg_scales"][3, 1] = torch.nan
    save(tmp_path / "nan", model, optimizer)
    assert main([str(tmp_path / "nan")]) == 1
    assert "no update errors of weight: " in capsys.readouterr().out

    class Mine(shardopt.AdamW8bit):
        pass

    save(tmp_path / "mine", *stepped(Mine))
    assert main([str(tmp_path / "mine")]) == 1
    assert "got the state of Mine, expected that of an optimizer of shardopt" in capsys.readouterr().out


def test_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, *stepped(shardopt.AdamW8bit))
    (data,) = tmp_path.glob("*.bin")
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    assert main([str(tmp_path)]) == 1
    assert "checksum" in capsys.readouterr().err
