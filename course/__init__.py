"""Deep Learning at Scale: from one GPU to model parallelism."""
