"""A run: assembled, stepped, logged, validated, verified."""
