"""Checkpoints of other libraries: their names and layouts into ours, and back."""
