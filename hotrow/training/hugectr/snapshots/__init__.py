"""The files that training is saved to, and goes on from."""
