"""How much memory a model needs, and the hit rate of a cache by its size, computed from a trace of keys."""
