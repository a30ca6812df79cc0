"""Weather: its files, the simulated atmosphere, ERA5, scores and baselines."""
