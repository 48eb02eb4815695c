"""Memory that a model and its optimizer will take up: ``shardopt estimate``."""

from shardopt.estimate.ledger import Setup, estimate
from shardopt.estimate.model import Model, ParameterShape

__all__ = ["Model", "ParameterShape", "Setup", "estimate"]
