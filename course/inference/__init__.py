"""What trained models are for: forecasts and their scores, text, images."""
