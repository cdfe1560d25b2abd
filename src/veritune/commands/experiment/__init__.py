"""Experiments: a question, the cells that answer it, and the sweep that runs them."""
