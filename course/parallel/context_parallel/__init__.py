"""Context parallelism: attention over a sequence that ranks share."""
