"""Reports how much memory an optimizer's parameters, gradients and state take up on this rank."""

from shardopt.report.memory import MemoryReport, MemoryUse, memory_report, owner_of

__all__ = ["MemoryReport", "MemoryUse", "memory_report", "owner_of"]
