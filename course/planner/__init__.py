"""Predictions from a configuration alone, and the search for the fastest layout."""
