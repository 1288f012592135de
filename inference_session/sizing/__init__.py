"""How much memory a model needs, and what hit rate a cache of some size would have: told from a trace of keys."""
