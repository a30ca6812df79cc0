"""What lessons measure with."""
