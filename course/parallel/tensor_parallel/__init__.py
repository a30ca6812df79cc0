"""Tensor and sequence parallelism: linears, vocabulary, overlapped communication."""
