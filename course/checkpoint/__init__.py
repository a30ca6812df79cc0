"""Checkpoints in one format for every layout."""
