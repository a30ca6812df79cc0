"""Pure tensor functions and their Triton kernels, independent of models and meshes."""
