"""Veritune post-trains reasoning language models with verified rewards."""

__version__ = "0.1.0"
