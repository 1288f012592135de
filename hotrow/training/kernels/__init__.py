"""Compiled code of training on the processor: keys to rows of a growing table, and rows read, written and added up.

What a key's hash and an index's bucket are is the product's own (`inference_session.kernels.cpu.hash_index`).
"""
