"""What a model and its optimizer take up in memory, before there is one: ``shardopt estimate``."""

from shardopt.estimate.config import model_of_config
from shardopt.estimate.ledger import Setup, estimate
from shardopt.estimate.model import Model, ParameterShape

__all__ = ["Model", "ParameterShape", "Setup", "estimate", "model_of_config"]
