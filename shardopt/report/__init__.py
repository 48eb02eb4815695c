"""Reports: memory in use, numerical health, and the precision of a model's weights."""

from shardopt.report.cast import cast_model, is_norm
from shardopt.report.memory import MemoryReport, MemoryUse, memory_report, owner_of
from shardopt.report.numerics import check_numerics

__all__ = ["MemoryReport", "MemoryUse", "cast_model", "check_numerics", "is_norm", "memory_report", "owner_of"]
