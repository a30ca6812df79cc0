"""Predictions and measurements of speed."""
