"""Convert weights of other libraries: `command` is `course convert`, `rules` the part that all share, `weight_files` files of
named tensors. `huggingface` covers GPT-2 and Llama, `dit` facebookresearch/DiT, `transformer_engine` Transformer Engine."""
