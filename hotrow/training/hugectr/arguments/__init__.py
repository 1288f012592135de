"""What training scripts give to HugeCTR's classes, by its names."""
