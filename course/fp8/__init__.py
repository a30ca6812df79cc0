"""FP8 matmuls: in PyTorch (`native`) or with Transformer Engine (`transformer_engine`)."""
