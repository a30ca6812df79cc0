"""What every room uses: errors, files that are whole or absent, randomness, this machine, plots."""
