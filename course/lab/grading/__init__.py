"""Collect, check and mark a class's submissions."""
