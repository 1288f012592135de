"""Configurations in JSON as HugeCTR reads them, for tests of `hotrow train`."""

from __future__ import annotations

from typing import Any


def dcn_configuration() -> dict[str, Any]:
    """As a configuration of release 3.0, without a name for its graph."""

    def dense(kind: str, bottom: Any, top: Any, **fields: Any) -> dict[str, Any]:
        return {"name": f"{top}", "type": kind, "bottom": bottom, "top": top, **fields}

    return {
        "solver": {
            "lr_policy": "fixed", "display": 5, "max_iter": 31, "gpu": [0], "batchsize": 100, "batchsize_eval": 100,
            "snapshot": 20, "snapshot_prefix": "./dcn", "eval_interval": 10, "max_eval_batches": 2,
            "input_key_type": "I64", "eval_metrics": ["AUC:0.99", "AverageLoss"],
        },
        "optimizer": {
            "type": "Adam", "update_type": "Global",
            "adam_hparam": {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-7, "warmup_steps": 2},
        },
        "layers": [
            {
                "name": "data", "type": "Data", "source": "train.txt", "eval_source": "eval.txt", "check": "Sum",
                "label": {"top": "label", "label_dim": 1}, "dense": {"top": "dense", "dense_dim": 13},
                "sparse": [
                    {"top": "data1", "type": "DistributedSlot", "max_feature_num_per_sample": 30, "slot_num": 26}
                ],
            },
            {
                "name": "sparse_embedding1", "type": "DistributedSlotSparseEmbeddingHash", "bottom": "data1",
                "top": "sparse_embedding1",
                "sparse_embedding_hparam": {
                    "max_vocabulary_size_per_gpu": 1447751, "embedding_vec_size": 4, "combiner": "sum"
                },
            },
            dense("Reshape", "sparse_embedding1", "reshape1", leading_dim=104),
            dense("Concat", ["reshape1", "dense"], "concat1"),
            dense("MultiCross", "concat1", "multicross1", mc_param={"num_layers": 3}),
            dense("InnerProduct", "concat1", "fc1", fc_param={"num_output": 16, "weight_init": "XavierUniform"}),
            dense("ReLU", "fc1", "relu1"),
            dense("Dropout", "relu1", "dropout1", rate=0.5),
            dense("Concat", ["dropout1", "multicross1"], "concat2"),
            dense("InnerProduct", "concat2", "fc3", fc_param={"num_output": 1}),
            dense("BinaryCrossEntropyLoss", ["fc3", "label"], "loss"),
        ],
    }  # fmt: skip
