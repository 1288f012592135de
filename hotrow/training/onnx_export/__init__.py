"""A live model, or a torch.export program, becomes a version directory."""
