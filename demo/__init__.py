"""A real model on a real Triton, asked about real people: `python -m demo`. `python -m demo.train` trains the model."""
