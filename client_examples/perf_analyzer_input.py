"""Write an --input-data file for perf_analyzer: random requests that a model of the repository accepts.

    python client_examples/perf_analyzer_input.py model_repository/movielens --output movielens.json
    perf_analyzer -m movielens -i grpc -u 127.0.0.1:8001 -b 64 --concurrency-range 4 --input-data movielens.json

Ids are keys of the model's tables; how high other integers may go, the model itself is asked. For a model with
`max_batch_size: 0` an entry is a whole request of --samples samples, and perf_analyzer takes no -b. For a model that
ranks candidates for a context, an entry is a request of one context and --candidates candidates.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from hotrow.answer_quality.random_requests import RandomRequests
from inference_session import InferenceSession
from inference_session.model_spec import SESSION_FILE, NamedArrays
from triton_backend.repository.model_config import CONFIG_FILE, ModelConfig

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", type=Path, help="folder of the model, in its repository")
parser.add_argument("--output", type=Path, required=True, help="the JSON file to write")
parser.add_argument("--entries", type=int, default=256, help="samples, or requests where max_batch_size is 0")
parser.add_argument("--samples", type=int, default=64, help="of one request, where max_batch_size is 0")
parser.add_argument("--candidates", type=int, help="of one context; for models that were imported with --context")
parser.add_argument("--length", type=int, default=8, help="of dimensions that the model leaves open")


def entry(inputs: NamedArrays, *, batched: bool) -> dict[str, Any]:
    """One request as perf_analyzer reads it; without the dimension of samples where the server adds that."""
    shapes = {name: array.shape[1:] if batched else array.shape for name, array in inputs.items()}
    return {name: {"content": array.ravel().tolist(), "shape": shapes[name]} for name, array in inputs.items()}


options = parser.parse_args()
versions = [int(path.parent.name) for path in options.model.glob(f"[0-9]*/{SESSION_FILE}")]
if not versions:
    raise SystemExit(f"{options.model} holds no version that hotrow imported")
batched = ModelConfig.read(options.model / CONFIG_FILE).max_batch_size > 0
with InferenceSession.open(options.model / str(max(versions))) as session:
    if options.candidates and not session.spec.context:
        raise SystemExit(f"{options.model} was imported without --context: it has no candidates")
    num_samples = 1 if batched else options.candidates or options.samples
    num_contexts = 1 if options.candidates else num_samples
    source = RandomRequests(session, num_samples=num_samples, num_contexts=num_contexts, length=options.length)
    rng = np.random.default_rng(0)
    requests = [source.draw(rng) for _ in range(options.entries)]
    if source.num_unknown(*requests) is None:
        raise SystemExit(f"{options.model} does not accept random inputs")
entries = [entry(request, batched=batched) for request in requests]
options.output.write_text(json.dumps({"data": entries}))
print(f"{options.output}: {len(entries)} entries")
