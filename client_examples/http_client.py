"""Ask over HTTP, with binary tensors: the quickest way over HTTP.

python client_examples/http_client.py [--url 127.0.0.1:8000]
"""

from __future__ import annotations

import argparse

import tritonclient.http as triton
from example_request import MODEL, TYPES, inputs, show

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--url", default="127.0.0.1:8000", help="host:port of the HTTP endpoint")
options = parser.parse_args()

tensors = []
for name, array in inputs().items():
    tensor = triton.InferInput(name, array.shape, TYPES[array.dtype.name])
    tensor.set_data_from_numpy(array, binary_data=True)
    tensors.append(tensor)

with triton.InferenceServerClient(options.url.removeprefix("http://")) as client:
    # OUTPUT0 has all tasks side by side; `liked` and `loved` can be asked for by name.
    outputs = [triton.InferRequestedOutput("OUTPUT0", binary_data=True)]
    answer = client.infer(MODEL, tensors, outputs=outputs)
    show(answer.as_numpy("OUTPUT0"))
