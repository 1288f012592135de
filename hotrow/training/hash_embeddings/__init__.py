"""Embeddings of any keys, without a vocabulary, that grow as they learn."""
