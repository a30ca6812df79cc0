"""Weather data: file layout, simulated atmosphere, ERA5 conversion, metrics and baselines."""
