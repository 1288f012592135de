"""What `hotrow size` finds out about a version: its memory, and the hit rates of caches on a trace."""
