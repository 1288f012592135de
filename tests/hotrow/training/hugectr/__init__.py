"""Training scripts of HugeCTR on PyTorch."""
