"""Recipes: each a flat config and a `run` that reads top to bottom."""
