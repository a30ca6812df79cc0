"""Weights of other libraries, read and written: `command` is `course convert`, `rules` what all have in common, `weight_files`
files of named tensors; `huggingface`, GPT-2 and Llama; `dit`, facebookresearch/DiT; `transformer_engine`, Transformer Engine's
layers."""
