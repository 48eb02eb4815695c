"""The first step warns when it finds no gradient: the optimizer was made of parameters that were replaced later."""

import warnings

import pytest
import torch

import shardopt


def test_a_first_step_without_gradients_warns_once() -> None:
    optimizer = shardopt.AdamW8bit(torch.nn.Linear(64, 64).parameters())
    with pytest.warns(
        RuntimeWarning, match=r"no gradient in any of 2 parameters.*make the optimizer after fully_shard"
    ):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_a_first_step_with_one_gradient_does_not_warn() -> None:
    model = torch.nn.Linear(64, 64)
    optimizer = shardopt.AdamW8bit(model.parameters())
    model.bias.grad = torch.ones(64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        model.bias.grad = None
        optimizer.step()
