"""Random operations and faults against served models; every answer is compared with a model of the allowed answers.

rows           vectors that name their key and their write
contents       the served model: version directories whose dense weights name their content
expectations   the model: the answers that are allowed now, and why
journal        the operations so far, kept for a finding
target         the server: sessions of this process, or a real Triton
topics         the messages that the broker holds
stores         the stores, and the broker, that a target reads
faults         faults, and how they heal
operations     actions of operators, trainers and sessions
episode        one deployment under operations, faults and clients, drawn from a seed
__main__       the command line: `make campaign`

It is in `tests/` because it uses the real servers that tests start, and `make test` runs seeds that once failed.
"""
