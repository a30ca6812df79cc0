"""Measuring tools for the lessons."""
