"""Row reads become look-ups: by which keys, in which table, and what is done with the vectors.

graph_lookups      the look-ups of a graph
hoisting           row reads out of Loop, Scan and If
pooling, bags      vectors that are added up
matrices, columns, stacking    vectors, and keys, that are parts of a matrix
negative_keys      what exporters write to count keys from the end
vector_values      which values depend on vectors, so that keys cannot be computed from them
"""
