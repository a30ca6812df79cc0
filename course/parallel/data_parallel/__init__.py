"""Data parallelism: gradient synchronization, ZeRO-1, master weights."""
