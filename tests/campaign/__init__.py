"""Random operations and faults against served models, every answer compared with a model of what may be answered.

rows           vectors that say which write of which key they are
contents       the served model: version directories whose dense weights say which content they are
expectations   the model: what may be answered now, and why
journal        what was done, kept for a finding
target         what answers: sessions of this process, or a real Triton
topics         what the broker holds
stores         the stores, and the broker, that a target reads
faults         what goes wrong, and how it heals
operations     what operators, trainers and sessions do
episode        one deployment under operations, faults and clients, drawn from a seed
__main__       the command line: `make campaign`

In `tests/`, since it stands on the real servers that tests start, and since `make test` runs seeds that once failed.
"""
