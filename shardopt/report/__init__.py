"""The report of memory in use."""

from shardopt.report.memory import MemoryReport, MemoryUse, memory_report, owner_of

__all__ = ["MemoryReport", "MemoryUse", "memory_report", "owner_of"]
