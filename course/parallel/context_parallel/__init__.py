"""Context parallelism: attention over a sequence that is split across ranks."""
