"""What reads batches: native, threads, DALI."""
