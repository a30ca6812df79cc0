"""Latents with their classes: shards, and what makes them."""
