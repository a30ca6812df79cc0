"""FP8 matmuls: in PyTorch (`native`) and by Transformer Engine."""
