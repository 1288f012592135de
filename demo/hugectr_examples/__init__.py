"""HugeCTR's training API end to end: train, import, serve on a real Triton, score. One program per model."""
