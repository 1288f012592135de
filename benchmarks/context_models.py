"""The models of benchmarks/context.py: six kinds of ranking networks, with random weights.

Each of `KINDS` makes one as ONNX, with the names of its context inputs. Inputs are int64 keys, or float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from networks import network_of
from numpy.typing import NDArray
from onnx import ModelProto

Array = NDArray[Any]
NUM_CLICKS = 50


@dataclass(frozen=True)
class Input:
    """One input of a model."""

    width: int
    """Elements of a row; 0: the input has one dimension."""
    num_keys: int
    """Keys are below this; 0: numbers."""
    is_contexts: bool


@dataclass(frozen=True)
class RankingModel:
    """A model, and the content of its requests."""

    name: str
    model: ModelProto
    inputs: Mapping[str, Input]

    @property
    def context(self) -> tuple[str, ...]:
        """The inputs that are given once per context."""
        return tuple(name for name, kind in self.inputs.items() if kind.is_contexts)

    def request(self, num_contexts: int, num_candidates: int, seed: int = 0) -> dict[str, Array]:
        """Inputs of this many contexts, and this many candidates in total."""
        random = np.random.default_rng(seed)
        arrays: dict[str, Array] = {}
        for name, kind in self.inputs.items():
            count = num_contexts if kind.is_contexts else num_candidates
            shape = (count, kind.width) if kind.width else (count,)
            if kind.num_keys:
                arrays[name] = random.integers(0, kind.num_keys, shape)
            else:
                arrays[name] = random.standard_normal(shape, np.float32)
        return arrays

    def tiled(self, request: Mapping[str, Array], counts: Array) -> dict[str, Array]:
        """The inputs without contexts: each context's row repeated for each of its candidates."""
        rows = np.repeat(np.arange(len(counts)), counts)
        return {name: array[rows] if self.inputs[name].is_contexts else array for name, array in request.items()}


class _Weights:
    """Random weights, under the names in a graph's text."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self.arrays: dict[str, Array] = {}

    def table(self, name: str, num_rows: int, dim: int) -> None:
        """An embedding table."""
        self.arrays[name] = self._random.normal(0, 0.1, (num_rows, dim)).astype(np.float32)

    def layer(self, name: str, width: int, units: int) -> None:
        """`<name>_w` and `<name>_b`."""
        self.arrays[f"{name}_w"] = (self._random.standard_normal((width, units)) / np.sqrt(width)).astype(np.float32)
        self.arrays[f"{name}_b"] = self._random.normal(0, 0.1, units).astype(np.float32)

    def mlp(self, name: str, source: str, output: str, widths: tuple[int, ...], last: str = "Identity") -> str:
        """The text of layers with ReLU between them."""
        lines = []
        for i, (width, units) in enumerate(pairwise(widths)):
            self.layer(f"{name}{i}", width, units)
            target = output if i == len(widths) - 2 else f"{name}{i}_y"
            activation = last if i == len(widths) - 2 else "Relu"
            lines.append(f"{name}{i}_x = Gemm({source}, {name}{i}_w, {name}{i}_b)")
            lines.append(f"{target} = {activation}({name}{i}_x)")
            source = target
        return "\n".join(lines)

    def model(self, text: str) -> ModelProto:
        """The model of a graph's text."""
        constants = {"one": [1], "two": [2], "minus_one": [-1]}
        arrays = {**self.arrays, **{name: np.array(values) for name, values in constants.items()}}
        return network_of(text, arrays)


def _user(width: int, num_keys: int) -> Input:
    return Input(width, num_keys, is_contexts=True)


def _item(width: int, num_keys: int) -> Input:
    return Input(width, num_keys, is_contexts=False)


def din(rows: int) -> RankingModel:
    """A deep interest network: an MLP of 80 and 40 units weighs every click by the candidate."""
    weights, dim = _Weights(0), 64
    for name in ("users", "items"):
        weights.table(name, rows, dim)
    for name, width, units in (("a0", 4 * dim, 80), ("a1", 80, 40), ("a2", 40, 1)):
        weights.layer(name, width, units)
    text = f"""din (int64[n] user, int64[n, {NUM_CLICKS}] clicks, float[n, 16] profile, int64[n] item)
        => (float[n, 1] click) {{
        u = Gather(users, user)
        h = Gather(items, clicks)
        t = Gather(items, item)
        t_row = Unsqueeze(t, one)
        h_shape = Shape(h)
        t_all = Expand(t_row, h_shape)
        difference = Sub(h, t_all)
        product = Mul(h, t_all)
        features = Concat<axis = -1>(h, t_all, difference, product)
        a0_x = MatMul(features, a0_w)
        a0_z = Add(a0_x, a0_b)
        a0_y = Sigmoid(a0_z)
        a1_x = MatMul(a0_y, a1_w)
        a1_z = Add(a1_x, a1_b)
        a1_y = Sigmoid(a1_z)
        a2_x = MatMul(a1_y, a2_w)
        scores = Add(a2_x, a2_b)
        weights = Softmax<axis = 1>(scores)
        weighted = Mul(h, weights)
        interest = ReduceSum<keepdims = 0>(weighted, one)
        x = Concat<axis = 1>(u, profile, interest, t)
        {weights.mlp("m", "x", "click", (3 * dim + 16, 200, 80, 1), "Sigmoid")}
    }}"""
    inputs = {
        "user": _user(0, rows),
        "clicks": _user(NUM_CLICKS, rows),
        "profile": _user(16, 0),
        "item": _item(0, rows),
    }
    return RankingModel("DIN, history attention", weights.model(text), inputs)


def mmoe(rows: int) -> RankingModel:
    """Two tasks over four experts, and three histories that are pooled."""
    weights, dim = _Weights(1), 32
    for name in ("users", "items"):
        weights.table(name, rows, dim)
    width = 13 * dim
    lines = []
    for expert in range(4):
        lines.append(weights.mlp(f"e{expert}_", "x", f"expert{expert}", (width, 64, 32), "Relu"))
        lines.append(f"row{expert} = Unsqueeze(expert{expert}, one)")
    for task in ("click", "like"):
        weights.layer(f"{task}_gate", width, 4)
        lines.append(f"""{task}_logits = Gemm(x, {task}_gate_w, {task}_gate_b)
            {task}_weights = Softmax<axis = 1>({task}_logits)
            {task}_row = Unsqueeze({task}_weights, one)
            {task}_mixed = MatMul({task}_row, experts)
            {task}_input = Flatten({task}_mixed)
            {weights.mlp(f"{task}_tower", f"{task}_input", task, (32, 16, 1), "Sigmoid")}""")
    text = f"""mmoe (int64[n, 8] user, int64[n, {NUM_CLICKS}] clicks, int64[n, {NUM_CLICKS}] likes,
        int64[n, {NUM_CLICKS}] views, int64[n, 2] item) => (float[n, 1] click, float[n, 1] like) {{
        u = Gather(users, user)
        u_row = Flatten(u)
        h1 = Gather(items, clicks)
        p1 = ReduceMean<axes = [1], keepdims = 0>(h1)
        h2 = Gather(items, likes)
        p2 = ReduceMean<axes = [1], keepdims = 0>(h2)
        h3 = Gather(items, views)
        p3 = ReduceMean<axes = [1], keepdims = 0>(h3)
        t = Gather(items, item)
        t_row = Flatten(t)
        x = Concat<axis = 1>(u_row, p1, p2, p3, t_row)
        {lines[0]}
        {lines[1]}
        {lines[2]}
        {lines[3]}
        {lines[4]}
        {lines[5]}
        {lines[6]}
        {lines[7]}
        experts = Concat<axis = 1>(row0, row1, row2, row3)
        {lines[8]}
        {lines[9]}
    }}"""
    inputs = {"user": _user(8, rows), "item": _item(2, rows)}
    inputs |= dict.fromkeys(("clicks", "likes", "views"), _user(NUM_CLICKS, rows))
    return RankingModel("MMoE, pooled histories", weights.model(text), inputs)


def self_attention(rows: int) -> RankingModel:
    """A transformer layer over the clicks, whose result the candidate attends to."""
    weights, dim, heads = _Weights(2), 64, 4
    for name in ("users", "items"):
        weights.table(name, rows, dim)
    layers = [(name, dim, dim) for name in "qkvo"]
    for name, width, units in (*layers, ("f0", dim, 128), ("f1", 128, dim)):
        weights.layer(name, width, units)
    weights.arrays["heads"] = np.array([0, NUM_CLICKS, heads, dim // heads])
    weights.arrays["whole"] = np.array([0, NUM_CLICKS, dim])
    weights.arrays["scale"] = np.array(1 / np.sqrt(dim // heads), np.float32)
    for name in ("n0", "n1"):
        weights.arrays[f"{name}_w"], weights.arrays[f"{name}_b"] = np.ones(dim, np.float32), np.zeros(dim, np.float32)
    projections = "\n".join(
        f"""{name}_x = MatMul(h, {name}_w)
        {name}_y = Add({name}_x, {name}_b)
        {name}_heads = Reshape({name}_y, heads)
        {name}_t = Transpose<perm = [{perm}]>({name}_heads)"""
        for name, perm in (("q", "0, 2, 1, 3"), ("k", "0, 2, 3, 1"), ("v", "0, 2, 1, 3"))
    )
    text = f"""sequence (int64[n] user, int64[n, {NUM_CLICKS}] clicks, int64[n] item) => (float[n, 1] click) {{
        u = Gather(users, user)
        h = Gather(items, clicks)
        t = Gather(items, item)
        {projections}
        s0 = MatMul(q_t, k_t)
        s1 = Mul(s0, scale)
        s2 = Softmax<axis = -1>(s1)
        c0 = MatMul(s2, v_t)
        c1 = Transpose<perm = [0, 2, 1, 3]>(c0)
        c2 = Reshape(c1, whole)
        c3 = MatMul(c2, o_w)
        c4 = Add(c3, o_b)
        r0 = Add(h, c4)
        r1 = LayerNormalization(r0, n0_w, n0_b)
        f0_x = MatMul(r1, f0_w)  f0_z = Add(f0_x, f0_b)
        f0_y = Relu(f0_z)
        f1_x = MatMul(f0_y, f1_w)  f1_z = Add(f1_x, f1_b)
        r2 = Add(r1, f1_z)
        keys = LayerNormalization(r2, n1_w, n1_b)
        t_row = Unsqueeze(t, one)
        keys_t = Transpose<perm = [0, 2, 1]>(keys)
        scores = MatMul(t_row, keys_t)  weights = Softmax<axis = -1>(scores)
        interest_row = MatMul(weights, keys)
        interest = Squeeze(interest_row, one)
        x = Concat<axis = 1>(u, interest, t)
        {weights.mlp("m", "x", "click", (3 * dim, 128, 64, 1), "Sigmoid")}
    }}"""
    inputs = {"user": _user(0, rows), "clicks": _user(NUM_CLICKS, rows), "item": _item(0, rows)}
    return RankingModel("self-attention, 50 clicks", weights.model(text), inputs)


def dcn(rows: int) -> RankingModel:
    """DCN-v2: two cross layers of low rank parallel to a deep network."""
    weights, dim = _Weights(3), 16
    num_user, num_item, rank = 30, 8, 32
    width = (num_user + num_item) * dim
    weights.table("features", rows, dim)
    lines = []
    for i in range(2):
        weights.layer(f"v{i}", width, rank)
        weights.layer(f"u{i}", rank, width)
        lines.append(f"""v{i}_x = MatMul(x{i}, v{i}_w)
            u{i}_x = Gemm(v{i}_x, u{i}_w, u{i}_b)
            c{i} = Mul(x0, u{i}_x)
            x{i + 1} = Add(c{i}, x{i})""")
    weights.layer("cross", width, 1)
    text = f"""dcn (int64[n, {num_user}] user, int64[n, {num_item}] item) => (float[n, 1] click) {{
        u = Gather(features, user)
        u_row = Flatten(u)
        t = Gather(features, item)
        t_row = Flatten(t)
        x0 = Concat<axis = 1>(u_row, t_row)
        {lines[0]}
        {lines[1]}
        crossed = Gemm(x2, cross_w, cross_b)
        {weights.mlp("d", "x0", "deep", (width, 512, 128, 1))}
        total = Add(crossed, deep)
        click = Sigmoid(total)
    }}"""
    return RankingModel("DCN-v2", weights.model(text), {"user": _user(num_user, rows), "item": _item(num_item, rows)})


def dlrm(rows: int) -> RankingModel:
    """DLRM: dense features of the user, all pairs of 27 vectors."""
    weights, dim = _Weights(4), 64
    num_user, num_item = 20, 6
    total = 1 + num_user + num_item
    weights.table("features", rows, dim)
    places = [i * total + j for i in range(total) for j in range(i)]
    weights.arrays["places"] = np.array(places)
    weights.arrays["stack"] = np.array([-1, 1, dim])
    weights.arrays["flat"] = np.array([-1, total * total])
    text = f"""dlrm (float[n, 13] dense, int64[n, {num_user}] user, int64[n, {num_item}] item) => (float[n, 1] click) {{
        {weights.mlp("b", "dense", "bottom", (13, 256, dim), "Relu")}
        bottom_row = Reshape(bottom, stack)
        u = Gather(features, user)
        t = Gather(features, item)
        vectors = Concat<axis = 1>(bottom_row, u, t)
        turned = Transpose<perm = [0, 2, 1]>(vectors)
        pairs = MatMul(vectors, turned)
        pairs_row = Reshape(pairs, flat)
        interactions = Gather<axis = 1>(pairs_row, places)
        x = Concat<axis = 1>(bottom, interactions)
        {weights.mlp("t", "x", "click", (dim + len(places), 512, 128, 1), "Sigmoid")}
    }}"""
    inputs = {"dense": _user(13, 0), "user": _user(num_user, rows), "item": _item(num_item, rows)}
    return RankingModel("DLRM", weights.model(text), inputs)


def two_towers(rows: int) -> RankingModel:
    """A tower for the user, one for the item, and an MLP over both."""
    weights, dim = _Weights(5), 32
    num_user, num_item = 16, 8
    weights.table("features", rows, dim)
    text = f"""towers (int64[n, {num_user}] user, int64[n, {num_item}] item) => (float[n, 1] click) {{
        u = Gather(features, user)
        u_row = Flatten(u)
        {weights.mlp("u", "u_row", "user_vector", (num_user * dim, 256, 64), "Relu")}
        t = Gather(features, item)
        t_row = Flatten(t)
        {weights.mlp("t", "t_row", "item_vector", (num_item * dim, 256, 64), "Relu")}
        product = Mul(user_vector, item_vector)
        x = Concat<axis = 1>(user_vector, item_vector, product)
        {weights.mlp("m", "x", "click", (192, 128, 1), "Sigmoid")}
    }}"""
    inputs = {"user": _user(num_user, rows), "item": _item(num_item, rows)}
    return RankingModel("two towers, MLP", weights.model(text), inputs)


KINDS: tuple[Callable[[int], RankingModel], ...] = (din, mmoe, self_attention, dcn, dlrm, two_towers)
