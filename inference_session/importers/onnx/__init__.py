"""ONNX models in: embedding tables are carved out, the rest becomes the dense network.

importer           all steps, into a version directory that appears whole or not at all
model_file, weights, types, remote_model    the file, without loading what is bulky
renaming           inputs and outputs get the names that the caller chose
canonical, loops/    one form for the many forms that exporters write
shapes             the shapes of all values, for inputs of given sizes
decided_branches    branches that sizes decide on are taken
computed_tables    tables that are computed from constants become initializers
tables             which initializers are only read by rows
lookups/           row reads become look-ups
carve              the dense network and the network that computes keys
empty_lists        operators that crash ONNX Runtime where a list is empty
evaluation, probe, replay    the original is run, and compared with the result
samples/           whether the samples of a batch may be computed together
context/, ranking/    networks that compute what is given once, once
spec               what session.json says of it
"""

from inference_session.importers.onnx.importer import import_draft, import_onnx
from inference_session.importers.onnx.spec import TablePlace

__all__ = ["TablePlace", "import_draft", "import_onnx"]
