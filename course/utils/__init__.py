"""What every package uses: errors, files that are whole or absent, randomness, this machine, plots."""
