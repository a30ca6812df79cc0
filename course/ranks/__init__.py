"""Processes for ranks, and an account of who waits for whom in which collective."""
