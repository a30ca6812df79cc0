"""The data loaders: native, threads, DALI."""
