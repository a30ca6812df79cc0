"""Predict time and memory from a configuration alone, and search for the fastest layout."""
