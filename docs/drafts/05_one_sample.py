# Joins lesson 05, before "In practice", when `course bench vit` has recorded its rung "one sample: compiled".

# %% [markdown]
# Now the other regime. One sample of a small model (12 layers of width 768, 256 tokens): hundreds of kernels, each shorter
# than its launch. The GPU waits for the host (lesson 02).
#
# > **Predict.** Memory does not bound this step. Will compiling help nevertheless, and how many times?

# %%
my_small_speedup = 1.0           # your prediction

# %%
small_rungs = ("one sample: eager", "one sample: compiled")
lab.beside("one sample, uncompiled over compiled", my_small_speedup,
           step_ms(small_rungs[0], 1) / step_ms(small_rungs[1], 1), "times", "recorded")
lab.picture(figures_fusing.rungs({rung: step_ms(rung, 1) for rung in small_rungs}, "ms a step",
                                 "12 layers of width 768, one sample, bf16, on an H200",
                                 {small_rungs[1]: step_ms(small_rungs[0], 1) / my_small_speedup}),
            "Two bars: one sample uncompiled, and compiled, which is shorter; a diamond marks the prediction")

# %% [markdown]
# Fewer kernels are fewer launches, and here launches are all that counts; compiled code also calls them with less Python in
# between. But some hundred are left, and the host still has to start every one, in every step, in the same order as in the
# step before. Why again and again? That is the next lesson.
#
