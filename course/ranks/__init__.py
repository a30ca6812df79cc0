"""Processes that act as ranks, and explanations of which rank waits for which in a collective."""
