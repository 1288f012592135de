"""Ask in plain JSON, as any HTTP client can.

python client_examples/json_requests.py [--url http://127.0.0.1:8000]
"""

from __future__ import annotations

import argparse

import numpy as np
import requests
from example_request import MODEL, TYPES, inputs, show

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the HTTP endpoint")
options = parser.parse_args()

body = {
    "inputs": [
        {"name": name, "shape": array.shape, "datatype": TYPES[array.dtype.name], "data": array.ravel().tolist()}
        for name, array in inputs().items()
    ],
    "outputs": [{"name": "OUTPUT0"}],
}
url = options.url if "://" in options.url else f"http://{options.url}"
response = requests.post(f"{url}/v2/models/{MODEL}/infer", json=body, timeout=10)
if not response.ok:
    raise SystemExit(f"{response.status_code}: {response.text}")
output = response.json()["outputs"][0]
show(np.array(output["data"], np.float32).reshape(output["shape"]))
