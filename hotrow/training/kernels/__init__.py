"""Compiled code of training on the processor: keys to rows of a growing table, and rows read, written and added up.

The hash of a key and the buckets of an index are those of `inference_session.kernels.cpu.hash_index`.
"""
