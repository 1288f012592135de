"""Exports, updates and checkpoints of live models: PyTorch and TorchRec as they really are."""
