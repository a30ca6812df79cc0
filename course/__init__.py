"""Deep Learning at Scale: from one GPU to model parallelism.

A room is a folder. Each imports only rooms above it in this list, so you can read from the top (tests/test_rooms.py checks it).

    utils        errors with a cure, files that are whole or absent, counter-based randomness, this machine, plots
    ops          tensor functions and their Triton kernels, which know no model and no mesh: attention, fused add + LayerNorm,
                 GELU, cross-entropy, FP8 cast, Adam and EMA; number formats
    models       ViT, GPT and DiT as serial modules, on shared layers; diffusion targets
    config       all settings and their defaults, presets, YAML and key=value, and the rules that a configuration must keep
    parallel     the mesh, what a rank holds of a parameter, differentiable collectives, and surgery that cuts a model:
                 data_parallel, tensor_parallel, context_parallel, pipeline_parallel, expert_parallel
    ranks        processes for a notebook's ranks, and who waits for whom in which collective
    fp8          FP8 matmuls in PyTorch (native) and by Transformer Engine
    checkpoint   one format for every layout: shards, index, checksums
    resilience   stalls, preemption, one writer a folder
    data         weather, text and latents: their files, their makers, and the loaders
    planner      predictions from a configuration alone: FLOPs, memory, step time, and the search for the fastest layout
    training     the run: assemble, step, optimizer, compile, CUDA graph, checkpointed activations, validation, log, verify
    inference    forecasts and their scores, text with a KV cache, images by diffusion
    bench        what `course bench` measures on your machine, and the recorded results that lessons read
    convert      weights of Hugging Face, DiT and Transformer Engine; a checkpoint for another layout
    lab          what lessons call: exercises, checks, sandbox, grading, figures, a Slurm on one machine
    cli          the `course` command, one file a group
"""
