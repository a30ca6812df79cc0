"""Use trained models: forecasts and their scores, text, images."""
