"""Pure tensor functions and their Triton kernels, which know no model and no mesh."""
