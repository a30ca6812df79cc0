"""Latents with class labels: shards, and the commands that make them."""
