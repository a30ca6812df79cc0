"""Figures of the lessons: pure functions from numbers to a matplotlib figure."""
