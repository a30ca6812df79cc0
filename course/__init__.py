"""Deep Learning at Scale: from one GPU to model parallelism. A map of the library, in reading order.

    errors, files       one exception for what a user can mend; files that are whole or absent; machine, what there is to use
    config              frozen dataclasses, presets, key=value; schema, plain values made into them, and limits, what they may be
    random              randomness as a pure function
    models              layers (the shared block), vit, gpt (its loss on a GPU in loss_kernel), and dit with its diffusion, serial
                        and unaware of parallelism
    data                layout (files on disk), weather (with atmosphere, stepping, sphere) and era5, their makers, pairs (the
                        samples of weather), latents (DiT's: made by packing, of pictures with a vae, and by digits) and tokens
                        (GPT's, in Megatron's files: indexed, made by corpus and jsonl of texts with bpe), order (who sees what
                        when), and loaders that give the same bits: native, threads (by extents, where a state's bytes lie) and
                        dali (also from numpy_files)
    parallel            mesh (who talks to whom), placement (what a rank holds), mappings (collectives with gradients),
                        data, zero and masters (dp), tensor, sequence, overlap, symmetric (a sum of it in symmetric_kernel) and
                        vocabulary (tp), context, ring and blocks (cp), schedule and pipeline (pp), trace (which collective each
                        rank is in)
    precision           number formats and the loss scale; fp8, FP8 by hand (its kernel in fp8_kernel), and te,
                        Transformer Engine behind the same seam; attention, its implementations; operators, what kernels by
                        hand have in common: between, what blocks do between matmuls, and gelu (both in between_kernel), and
                        packed, attention (attention_kernel)
    step                one optimizer step, for every layout; average, of its weights, and adam, which follows them in one pass
                        (adam_kernel); recompute, activations that are not kept; compilation, torch.compile; graphs, the whole
                        step as one CUDA graph
    train               a run: build, resume, fit, log, save; room, whether it fits the memory that there is
    verify              is this layout's training that of one process?
    validate, evaluate  how good the model is, while training and after; baselines and metrics to compare with
    sampling            from a trained DiT's predictions to samples; draw, `course generate`
    generate            tokens drawn from a GPT, with a key-value cache; sample, `course sample`;
                        ends, which tokens end a text
    checkpoint          what is written says nothing of the layout that wrote it (streaming: a tensor at a time; pieces: the boxes
                        that ranks have of it); reshard, cut up for another layout
    convert             other libraries' weights: library (a rule for each parameter), weights (files of named tensors),
                        huggingface (GPT-2 and Llama), dit, te (Transformer Engine's layers); command, `course convert`
    report, pictures    what a run tells; profile, a look into its steps
    stop                signals; watchdog, who stalls and who is gone; lock, one job at a time
    perf                Measured: bench, loaders and parallel (with harness, rivals, megatron, efficiency);
                        ladder, one GPU's, with its rungs, side by side in lanes; grid, the cases of a Megatron-LM reproduction;
                        curves, losses in every format; convergence, the runs behind lesson 08; profile, account and looks, where
                        a step's time goes; command, how they are started.
                        Predicted: flops and peaks; memory, with weights and activations; hardware, comms, kernels and host (with
                        kernel_table, with stand_in, and host_table, which measure them), of which blocktime predicts a block, as
                        local says what a rank has of it, and steptime a step; recorded and published, steps measured here and by
                        others (who compute as in others), and what is predicted of them.
                        Planned: layouts, those that a run takes, and their variants, of which plan finds the fastest (misfits,
                        why there is none); proposal, `course plan`; catalogue, `course presets`
    launch, worker      a function, even of a notebook's cell, on several ranks of this machine (forks of seed); meet, who
                        waits for whom
    doctor, cli         what this machine has; the `course` command, with its groups cli_data and cli_bench, and cli_words, what
                        they share
    lab                 lessons, exercises, checks and grading, on top of all this
"""
