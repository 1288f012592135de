#!/usr/bin/env bash
# Ask in plain JSON with curl: what will a student who likes Star Wars (50) think of Return of the Jedi (181)?
#     client_examples/json_curl.sh [http://127.0.0.1:8000]
set -euo pipefail
url=${1:-http://127.0.0.1:8000}

curl --silent --show-error --fail-with-body "$url/v2/models/movielens/infer" --data '{
  "inputs": [
    {"name": "user_id",         "datatype": "INT64", "shape": [1, 1],  "data": [0]},
    {"name": "age",             "datatype": "INT64", "shape": [1, 1],  "data": [24]},
    {"name": "gender",          "datatype": "INT64", "shape": [1, 1],  "data": [1]},
    {"name": "occupation",      "datatype": "INT64", "shape": [1, 1],  "data": [19]},
    {"name": "liked_movies",    "datatype": "INT64", "shape": [1, 10], "data": [50, 0, 0, 0, 0, 0, 0, 0, 0, 0]},
    {"name": "disliked_movies", "datatype": "INT64", "shape": [1, 10], "data": [0, 0, 0, 0, 0, 0, 0, 0, 0, 0]},
    {"name": "mean_rating",     "datatype": "FP32",  "shape": [1, 1],  "data": [5]},
    {"name": "num_ratings",     "datatype": "FP32",  "shape": [1, 1],  "data": [1]},
    {"name": "movie_id",        "datatype": "INT64", "shape": [1, 1],  "data": [181]},
    {"name": "genres",          "datatype": "INT64", "shape": [1, 6],  "data": [1, 2, 14, 15, 17, 0]}
  ],
  "outputs": [{"name": "liked"}, {"name": "loved"}]
}'
echo
