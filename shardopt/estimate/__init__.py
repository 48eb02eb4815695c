"""Estimates the memory of a model's weights, gradients and optimizer state before training: ``shardopt estimate``."""

from shardopt.estimate.ledger import Setup, estimate
from shardopt.estimate.model import Model, ParameterShape

__all__ = ["Model", "ParameterShape", "Setup", "estimate"]
