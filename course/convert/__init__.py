"""Weights of other libraries, read and written: `weights`, files of named tensors; `huggingface`, GPT-2 and Llama; `dit`."""
