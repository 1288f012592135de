"""Serves a real model on a real Triton and queries it: `python -m demo`. `python -m demo.train` trains the model."""
