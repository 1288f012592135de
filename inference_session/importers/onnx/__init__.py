"""ONNX models in: embedding tables are carved out, the rest becomes the dense network.

wire, weights                 the file, without loading what is bulky
graph                         queries of graphs; `Builder` writes new nodes
canonical, bag_loops          one form for the many forms that exporters write
computed_tables               tables that are computed from constants become initializers
tables                        which initializers are only read by rows
hoisting                      row reads out of Loop, Scan and If
lookups, pooling, bags, matrices, columns   row reads become look-ups
carve                         the dense network and the network that computes keys
empty_lists                   operators that crash ONNX Runtime where a list is empty
probe, replay                 the original is run, and compared with the result
independence, sample_axis     whether the samples of a batch may be computed together
context, ranking              networks that compute what is given once, once
importer                      all steps, into a version directory that appears whole or not at all
"""

from inference_session.importers.onnx.importer import import_onnx, import_staged
from inference_session.importers.onnx.spec import TablePlace

__all__ = ["TablePlace", "import_onnx", "import_staged"]
