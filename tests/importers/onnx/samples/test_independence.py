"""Requests are computed together only where it is proved that no sample looks at another one, and then rightly.

Each hostile graph here makes the answer of a sample depend on its batch, some under rare values only. The others do
what recommenders do, and have to be joined.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper

from inference_session import InferenceSession
from inference_session.importers.onnx import import_onnx
from inference_session.requests.batch import Request
from tests.testing.onnx_evaluation import Arrays, run_network
from tests.testing.onnx_models import model_of, table

HEAD = "m (int64[n] id, float[n, 4] d, int64[n, 3] ids) => (float[n, k] y)"
"""`e` is [n, 4] and follows from `id`, `h` is [n, 3, 4] and follows from `ids`."""
COMMON = "e = Gather(w, id)  h = Gather(w, ids)  both = Add(e, d)"
PLACES = """samples = Shape<end = 1>(d) many = Squeeze(samples) nought = Constant<value = int64 {0}>()
    unit = Constant<value = int64 {1}>() places = Range(nought, many, unit)"""
"""The place of each sample in the batch."""
TWICE = """flag = Constant<value = int32 {1}>() goes_on = Cast<to = 9>(flag) twice = Constant<value = int64 {2}>()"""
"""What a Loop begins with."""

HOSTILE = {
    "products of samples, moved": """
        g = com.microsoft.FusedMatMul<transBatchA = 1, transBatchB = 1, transB = 1>(h, h)
        m = ReduceSum<keepdims = 0>(g, az) y = MatMul(m, both)""",
    "products of samples, transposed": "g = com.microsoft.FusedMatMul<transA = 1>(both, both) y = MatMul(both, g)",
    "sums over samples, transposed": """t = Transpose<perm = [1, 0]>(both)
        g = com.microsoft.FusedMatMul<transB = 1>(t, t) y = MatMul(both, g)""",
    "places that wrap": """b = Cast<to = 3>(places) p = Cast<to = 7>(b) m = Constant<value = int64 {3}>()
        k = Mod(id, m) v = Unsqueeze(p, one) u = Unsqueeze(k, one) j = Concat<axis = 1>(v, u) x = GatherND(h, j)
        y = Add(x, both)""",
    "places that wrap, in a list": """m = Constant<value = int64 {3}>() k = Mod(id, m) v = Unsqueeze(places, one)
        u = Unsqueeze(k, one) i = Concat<axis = 1>(v, u) b = Cast<to = 2>(i) j = Cast<to = 7>(b) x = GatherND(h, j)
        y = Add(x, both)""",
    "loop that counts in a list": """l9 = Constant<value = float {1000}>() far = Greater(d, l9)
        rare = Cast<to = 1>(far) a1 = Unsqueeze(rare, az) a = Concat<axis = 0>(a1, a1)
        f = Constant<value = int64[2] {-1, 4}>()
        y = Loop(twice, goes_on, both) <body = b (int64[1] j, bool cin, float[n, 4] state) => (bool cout,
        float[n, 4] next) { cout = Identity(cin) x = Gather(a, j) p = CumSum(x, one) r = Reshape(p, f)
        next = Add(state, r) }>""",
    "maximum of the batch": "a = Constant<value = int64[1] {0}>() m = ReduceMax(d, a) y = Sub(both, m)",
    "branch on the maximum": """a = Constant<value = int64[1] {0, 1}>() m = ReduceMax<keepdims = 0>(d)
        l = Constant<value = float {3}>() c = Greater(m, l)
        y = If (c) <then_branch = t () => (float[n, 4] u) { u = Neg(both) },
                    else_branch = f () => (float[n, 4] v) { v = Identity(both) }>""",
    "branch on the minimum": """m = ReduceMin<keepdims = 0>(d) l = Constant<value = float {-5}>() c = Less(m, l)
        y = If (c) <then_branch = t () => (float[n, 4] u) { u = Neg(both) },
                    else_branch = f () => (float[n, 4] v) { v = Identity(both) }>""",
    "branch on any zero": """x = Abs(d) m = ReduceMin<keepdims = 0>(x) l = Constant<value = float {0}>() c =
        Equal(m, l)
        y = If (c) <then_branch = t () => (float[n, 4] u) { u = Neg(both) },
                    else_branch = f () => (float[n, 4] v) { v = Identity(both) }>""",
    "branch on the number of samples": """s = Size(d) l = Constant<value = int64 {100}>() c = Greater(s, l)
        y = If (c) <then_branch = t () => (float[n, 4] u) { u = Neg(both) },
                    else_branch = f () => (float[n, 4] v) { v = Identity(both) }>""",
    "branch on one sample": """s = Shape<end = 1>(d) l = Constant<value = int64[1] {1}>() q = Equal(s, l) c = Squeeze(q)
        y = If (c) <then_branch = t () => (float[n, 4] u) { u = Neg(both) },
                    else_branch = f () => (float[n, 4] v) { v = Identity(both) }>""",
    "branch on a rare row": """m = ReduceMax<keepdims = 0>(e) l = Constant<value = float {100}>() c = Greater(m, l)
        f = Cast<to = 1>(c) y = Add(both, f)""",
    "threshold far away": """m = ReduceMax<keepdims = 0>(d) l = Constant<value = float {90000}>() c = Greater(m, l)
        f = Cast<to = 1>(c) y = Add(both, f)""",
    "any sample, by a sum": """l = Constant<value = float {50}>() c = Greater(d, l) f = Cast<to = 1>(c)
        s = ReduceSum<keepdims = 0>(f) y = Add(both, s)""",
    "mean of the batch": "m = ReduceMean<keepdims = 1>(d) y = Sub(both, m)",
    "norm over the batch": "a = Constant<value = int64[1] {0}>() m = ReduceL2(both, a) y = Div(both, m)",
    "log-sum-exp over the batch": "a = Constant<value = int64[1] {0}>() m = ReduceLogSumExp(e, a) y = Sub(both, m)",
    "product over the batch": "a = Constant<value = int64[1] {-2}>() m = ReduceProd(d, a) y = Add(both, m)",
    "norm over the batch, of ONNX-ML": """t = Transpose<perm = [1, 0]>(both)
        z = ai.onnx.ml.Normalizer<norm = "L1">(t) y = Transpose<perm = [1, 0]>(z)""",
    "features of the first sample": """t = Transpose<perm = [1, 0]>(both) i = Constant<value = int64[1] {0}>()
        g = ai.onnx.ml.ArrayFeatureExtractor(t, i) u = Transpose<perm = [1, 0]>(g) y = Sub(both, u)""",
    "scaled by its place in the batch": """i = Constant<value = int64 {1}>() c = Gather<axis = 1>(both, i)
        z = ai.onnx.ml.Imputer<imputed_value_floats = [7.0], replaced_value_float = 0.0>(c)
        u = Unsqueeze(z, one) y = Add(both, u)""",
    "vectorized over the batch": """t = Transpose<perm = [1, 0]>(both)
        v = ai.onnx.ml.FeatureVectorizer<inputdimensions = [1]>(t) u = Transpose<perm = [1, 0]>(v) y = Add(both, u)""",
    "a tree over the batch": """t = Transpose<perm = [1, 0]>(both)
        x = ai.onnx.ml.TreeEnsembleRegressor<n_targets = 1, nodes_treeids = [0, 0, 0], nodes_nodeids = [0, 1, 2],
        nodes_featureids = [0, 0, 0], nodes_values = [0.5, 0.0, 0.0], nodes_modes = ["BRANCH_LEQ", "LEAF", "LEAF"],
        nodes_truenodeids = [1, 0, 0], nodes_falsenodeids = [2, 0, 0], target_ids = [0, 0], target_nodeids = [1, 2],
        target_treeids = [0, 0], target_weights = [3.0, -4.0]>(t) u = Transpose<perm = [1, 0]>(x) y = Add(both, u)""",
    "as many samples as a number": """s = Shape(both) q = Constant<value = int64[2] {30, -1}>() c = Equal(s, q)
        f = Cast<to = 1>(c) m = ReduceSum<keepdims = 0>(f) y = Add(both, m)""",
    "softmax over the batch": "y = Softmax<axis = 0>(both)",
    "softmax over the batch, counted from the end": "y = Softmax<axis = -2>(both)",
    "log-softmax over the batch": "y = LogSoftmax<axis = 0>(both)",
    "hardmax over the batch": "y = Hardmax<axis = 0>(both)",
    "cumulative sum": "a = Constant<value = int64 {0}>() y = CumSum(both, a)",
    "cumulative sum from the end": "a = Constant<value = int64 {-2}>() y = CumSum<reverse = 1>(both, a)",
    "best of the batch": "k = Constant<value = int64[1] {1}>() v, i = TopK<axis = 0>(both, k) y = Sub(both, v)",
    "position of the best": "i = ArgMax<axis = 0>(both) f = Cast<to = 1>(i) y = Add(both, f)",
    "first sample": "i = Constant<value = int64[1] {0}>() f = Gather<axis = 0>(both, i) y = Sub(both, f)",
    "last sample": "i = Constant<value = int64[1] {-1}>() f = Gather<axis = 0>(both, i) y = Sub(both, f)",
    "first sample by GatherND": "i = Constant<value = int64[1] {0}>() f = GatherND(both, i) y = Sub(both, f)",
    "order turned round": """b = Constant<value = int64[1] {-1}>() t = Constant<value = int64[1]
        {-9223372036854775807}>()
        a = Constant<value = int64[1] {0}>() r = Slice(both, b, t, a, b) y = Add(both, r)""",
    "first samples, repeated": """z = Constant<value = int64[1] {0}>() t = Constant<value = int64[1] {20}>()
        r = Slice(both, z, t, z) m = ReduceMax<keepdims = 0>(r) y = Add(both, m)""",
    "halves exchanged": """num = Shape<end = 1>(both) two = Constant<value = int64[1] {2}>() half = Div(num, two)
        begin = Constant<value = int64[1] {0}>() p = Slice(both, begin, half, begin)
        q = Slice(both, half, num, begin) r = Concat<axis = 0>(q, p) y = Add(both, r)""",
    "shifted by one": """p = Constant<value = int64[4] {1, 0, -1, 0}>() r = Pad(both, p) y = Add(both, r)""",
    "gram matrix": """t = Transpose<perm = [1, 0]>(both) g = MatMul(both, t) x = ReduceMean<keepdims = 0>(g) y
        = Add(both, x)""",
    "attention over the batch": """t = Transpose<perm = [1, 0]>(e) g = MatMul(d, t) s = Softmax<axis = 1>(g) y
        = MatMul(s, e)""",
    "covariance": "c = Gemm<transA = 1>(both, both) y = MatMul(both, c)",
    "einsum over pairs": """g = Einsum<equation = "ik,jk->ij">(e, d) y = MatMul(g, both)""",
    "einsum over the batch": """s = Einsum<equation = "ij->j">(both) y = Add(both, s)""",
    "number of samples": "s = Shape(d) f = Cast<to = 1>(s) x = ReduceSum<keepdims = 0>(f) y = Mul(both, x)",
    "as many samples as a constant, beside -1": """n = Shape<end = 1>(d) none = Constant<value = int64[1] {-1}>()
        s = Concat<axis = 0>(n, none) q = Constant<value = int64[2] {30, -1}>() c = Equal(s, q) f = Cast<to = 1>(c)
        m = ReduceSum<keepdims = 0>(f) y = Add(both, m)""",
    "share of the number of samples": """s = Shape<end = 1>(d) f = Cast<to = 1>(s) y = Div(both, f)""",
    "at most a hundred samples": """s = Shape<end = 1>(d) l = Constant<value = int64[1] {60}>() t = Min(s, l)
        f = Cast<to = 1>(t) y = Add(both, f)""",
    "position in the batch": """s = Shape(d) i = Constant<value = int64 {0}>() o = Constant<value = int64
        {1}>() t = Gather(s, i)
        r = Range(i, t, o) f = Cast<to = 1>(r) u = Unsqueeze(f, ax) y = Add(both, u)""",
    "row of the position in the batch": """s = Shape(d) i = Constant<value = int64 {0}>() o = Constant<value =
        int64 {1}>()
        t = Gather(s, i) r = Range(i, t, o) v = Gather(w, r) y = Add(both, v)""",
    "number of positives": """r = Relu(d) z = NonZero(r) s = Shape(z) f = Cast<to = 1>(s) x =
        ReduceSum<keepdims = 0>(f)
        y = Add(both, x)""",
    "number of different keys": "u = Unique(id) s = Shape(u) f = Cast<to = 1>(s) y = Add(both, f)",
    "normalisation in training": """x, i, j = BatchNormalization<training_mode = 1>(both, ones, zeros, zeros, ones)
        y = Identity(x)""",
    "instance normalisation over the batch": """t = Transpose<perm = [1, 0]>(both) a = Constant<value =
        int64[1] {0}>()
        u = Unsqueeze(t, a) x = InstanceNormalization(u, ones, zeros) v = Squeeze(x, a) y = Transpose<perm =
        [1, 0]>(v)""",
    "layer normalisation over the batch": """t = Transpose<perm = [1, 0]>(both) q = Constant<value = float[1] {1}>()
        x = LayerNormalization<axis = -1>(t, q) y = Transpose<perm = [1, 0]>(x)""",
    "lp normalisation over the batch": "y = LpNormalization<axis = 0>(both)",
    "mean and variance of the batch": "y = MeanVarianceNormalization<axes = [0]>(both)",
    "reshaped across samples": """s = Constant<value = int64[2] {4, -1}>() r = Reshape(both, s) x =
        Softmax<axis = 1>(r)
        t = Constant<value = int64[2] {-1, 4}>() y = Reshape(x, t)""",
    "transposed and reshaped": """t = Transpose<perm = [1, 0]>(both) s = Constant<value = int64[2] {-1, 4}>()
        r = Reshape(t, s) y = Softmax<axis = 1>(r)""",
    "flattened softmax": """s = Constant<value = int64[1] {-1}>() r = Reshape(both, s) x = Softmax<axis = 0>(r)
        t = Constant<value = int64[2] {-1, 4}>() y = Reshape(x, t)""",
    "LSTM over the batch": """a = Constant<value = int64[1] {1}>() u = Unsqueeze(both, a)
        x, o, p = LSTM<hidden_size = 4>(u, lw, lr) b = Constant<value = int64[2] {1, 2}>() y = Squeeze(x, b)""",
    "GRU back over the batch": """a = Constant<value = int64[1] {1}>() u = Unsqueeze(both, a)
        x, o = GRU<hidden_size = 4, direction = "reverse">(u, gw, gr) b = Constant<value = int64[2] {1, 2}>()
        y = Squeeze(x, b)""",
    "RNN over the batch": """a = Constant<value = int64[1] {1}>() u = Unsqueeze(both, a)
        x, o = RNN<hidden_size = 4>(u, rw, rr) b = Constant<value = int64[2] {1, 2}>() y = Squeeze(x, b)""",
    "scan over the batch": """y0 = Constant<value = float[4] {0, 0, 0, 0}>()
        last, y = Scan<num_scan_inputs = 1, body = b (float[4] state, float[4] x) => (float[4] next, float[4] z)
        { next = Max(state, x) z = Identity(next) }>(y0, both)""",
    "loop with the largest so far": """s = Shape(d) i = Constant<value = int64 {0}>() t = Gather(s, i) c =
        Constant<value = int32 {1}>()
        cb = Cast<to = 9>(c) z0 = Constant<value = float[4] {0, 0, 0, 0}>()
        last, y = Loop(t, cb, z0) <body = b (int64 j, bool cin, float[4] state) => (bool cout, float[4] next,
        float[4] z)
        { cout = Identity(cin) x = Gather(both, j) next = Max(state, x) z = Identity(next) }>""",
    "loop as often as the largest": """m = ReduceMax<keepdims = 0>(d) l = Constant<value = float {4}>() q = Min(m, l)
        t = Cast<to = 7>(q) c = Constant<value = int32 {1}>() cb = Cast<to = 9>(c)
        y = Loop(t, cb, both) <body = b (int64 j, bool cin, float[n, 4] state) => (bool cout, float[n, 4] next)
        { cout = Identity(cin) next = Neg(state) }>""",
    "convolution along the batch": """t = Transpose<perm = [1, 0]>(both) a = Constant<value = int64[1] {0}>() u
        = Unsqueeze(t, a)
        x = Conv<kernel_shape = [3], pads = [1, 1]>(u, cw) v = Squeeze(x, a) y = Transpose<perm = [1, 0]>(v)""",
    "pooling along the batch": """t = Transpose<perm = [1, 0]>(both) a = Constant<value = int64[1] {0}>() u =
        Unsqueeze(t, a)
        x = MaxPool<kernel_shape = [3], pads = [1, 1]>(u) v = Squeeze(x, a) y = Transpose<perm = [1, 0]>(v)""",
    "global pooling of the batch": """t = Transpose<perm = [1, 0]>(both) a = Constant<value = int64[1] {0}>() u
        = Unsqueeze(t, a)
        x = GlobalAveragePool(u) b = Constant<value = int64[2] {0, 2}>() v = Squeeze(x, b) y = Sub(both, v)""",
    "resized along the batch": """r = Constant<value = float[0] {}>() s = Constant<value = float[2] {2, 1}>()
        x = Resize<mode = "linear">(both, r, s) z = Constant<value = int64[1] {0}>() sh = Shape(both)
        t = Slice(sh, z, one) q = Slice(x, z, t, z) y = Add(both, q)""",
    "elements of other samples": """i = Constant<value = int64[1, 4] {0, 0, 0, 0}>() s = Shape(both) x = Expand(i, s)
        g = GatherElements<axis = 0>(both, x) y = Sub(both, g)""",
    "scattered to the first": """i = Constant<value = int64[1, 4] {0, 0, 0, 0}>() s = Shape(both) x = Expand(i, s)
        y = ScatterElements<axis = 0, reduction = "add">(both, x, d)""",
    "scattered by position": """i = Constant<value = int64[1, 1] {0}>() u = ReduceMax<keepdims = 1>(d) q =
        Constant<value = int64[2] {1, 4}>()
        v = Expand(u, q) y = ScatterND(both, i, v)""",
    "samples left out": """s = ReduceMax<keepdims = 0>(d, one) l = Constant<value = float {0}>() c = Greater(s, l)
        x = Compress<axis = 0>(both, c) m = ReduceSum<keepdims = 0>(x) y = Add(both, m)""",
    "quantised by the range of the batch": """q, s, z = DynamicQuantizeLinear(both) y = DequantizeLinear(q, s, z)""",
    "triangle over the batch": """t = Transpose<perm = [1, 0]>(both) g = MatMul(both, t) x = Trilu<upper =
        0>(g) y = MatMul(x, both)""",
    "reversed sequence over the batch": """a = Constant<value = int64[1] {1}>() u = Unsqueeze(both, a) s =
        Shape<end = 1>(both)
        x = ReverseSequence<batch_axis = 1, time_axis = 0>(u, s) v = Squeeze(x, a) y = Add(both, v)""",
    "random": "r = RandomNormalLike<seed = 1.0>(both) z = Mul(r, r) m = ReduceMean<keepdims = 0>(both) y = Add(z, m)",
    "history of other samples": """m = ReduceMax<keepdims = 0>(h, az) x = ReduceSum<keepdims = 0>(m, az) y =
        Add(both, x)""",
    "merged axis": """s = Constant<value = int64[2] {-1, 4}>() f = Reshape(h, s) m = ReduceMax(f, az) y =
        Add(both, m)""",
    "merged axis, from the middle": """t = Transpose<perm = [1, 0, 2]>(h) s = Constant<value = int64[2] {-1,
        4}>() f = Reshape(t, s)
        i = Constant<value = int64[1] {2}>() g = Gather(f, i) y = Add(both, g)""",
    "wide as the batch": """s = Shape<end = 1>(d) q = Concat<axis = 0>(s, s) u = ReduceMax(both, one)  x =
        Expand(u, q)
        v = ReduceSum(x, one) y = Add(both, v)""",
    "repeated for each sample": """s = Shape<end = 1>(d) l = Constant<value = int64[1] {1}>() q = Concat<axis = 0>(s, l)
        t = Tile(both, q) f = Constant<value = int64[1] {4}>() z = Concat<axis = 0>(s, s, f) r = Reshape(t, z)
        y = ReduceSum<keepdims = 0>(r, az)""",
    "a number that few samples are below": """s = Shape<end = 1>(d) l = Constant<value = int64[1] {30}>() m = Max(s, l)
        f = Cast<to = 1>(m) y = Add(both, f)""",
    "the history of the next sample": """
        q = Add(places, unit) p = Mod(q, many) m = Constant<value = int64 {3}>() k = Mod(id, m) v = Unsqueeze(p,
        one) u = Unsqueeze(k, one) j = Concat<axis = 1>(v, u) x = GatherND(h, j) y = Add(x, both)""",
    "an item by the place in the batch": """
        m = Constant<value = int64 {3}>() k = Mod(places, m) v = Unsqueeze(places, one) u = Unsqueeze(k, one) j =
        Concat<axis = 1>(v, u) x = GatherND(h, j) y = Add(x, both)""",
    "an item by the place, from a number": """
        m = Constant<value = int64 {3}>() z = Add(id, places) k = Mod(z, m) v = Unsqueeze(places, one) u =
        Unsqueeze(k, one) j = Concat<axis = 1>(v, u) x = GatherND(h, j) y = Add(x, both)""",
    "past the end of a flat history": """
        m = Constant<value = int64 {3}>() p = Mul(places, m) l = Constant<value = int64 {4}>() k = Mod(id, l) q =
        Add(p, k) n = Mul(many, m) last = Sub(n, unit) j = Min(q, last) s4 = Constant<value = int64[2] {-1, 4}>() f
        = Reshape(h, s4) x = Gather(f, j) y = Add(x, both)""",
    "an item of a turned history": """
        a = Transpose<perm = [1, 0, 2]>(h) b = Constant<value = int64[3] {-1, 3, 4}>() f = Reshape(a, b) m =
        Constant<value = int64 {3}>() k = Mod(id, m) v = Unsqueeze(places, one) u = Unsqueeze(k, one) j =
        Concat<axis = 1>(v, u) x = GatherND(f, j) y = Add(x, both)""",
    "written into the next sample": """
        q = Add(places, unit) p = Mod(q, many) v = Unsqueeze(p, one) y = ScatterND<reduction = "add">(both, v, d)""",
    "what another sample writes": """
        m = Constant<value = int64 {3}>() k = Mod(id, m) v = Unsqueeze(places, one) u = Unsqueeze(k, one) j =
        Concat<axis = 1>(v, u) q = CumSum(e, nought) x = ScatterND(h, j, q) z = ReduceSum<keepdims = 0>(x, one) y =
        Add(z, both)""",
    "loop over states that are mixed": """
        y = Loop(twice, goes_on, both) <body = b (int64 j, bool cin, float[n, 4] state) => (bool cout, float[n, 4]
        next) { cout = Identity(cin) m = ReduceMax(state, az) next = Sub(state, m) }>""",
    "loop whose parts grow, which seldom matters": """
        l = Constant<value = float {90000}>() far = Greater(d, l) rare = Cast<to = 1>(far) a = Transpose<perm = [1,
        0, 2]>(h) k = Constant<value = int64[1] {-1}>() q = Constant<value = int64[3] {-1, 1, 4}>() y = Loop(twice,
        goes_on, both) <body = b (int64 j, bool cin, float[n, 4] state) => (bool cout, float[n, 4] next) { cout =
        Identity(cin) i = Unsqueeze(j, az) g = Add(i, one) x = Slice(a, az, g, az) s = Shape(state) f = Slice(s, az,
        one) o = Concat<axis = 0>(f, k) r = Reshape(x, o) z = ReduceMax(r, one) seldom = Mul(z, rare) next =
        Add(state, seldom) }>""",
    "loop that a sample ends": """
        nine = Constant<value = int64 {9}>() l = Constant<value = float {30}>() y = Loop(nine, goes_on, both) <body
        = b (int64 j, bool cin, float[n, 4] state) => (bool cout, float[n, 4] next) { next = Add(state, state) m =
        ReduceMax<keepdims = 0>(state) cout = Less(m, l) }>""",
    "loop that reads the sample of its number": """
        y = Loop(twice, goes_on, both) <body = b (int64 j, bool cin, float[n, 4] state) => (bool cout, float[n, 4]
        next) { cout = Identity(cin) zero = Sub(j, j) x = Gather(both, zero) next = Add(state, x) }>""",
    "loop as often as there are samples": """
        s = Size(id) y = Loop(s, goes_on, both) <body = b (int64 j, bool cin, float[n, 4] state) => (bool cout,
        float[n, 4] next) { cout = Identity(cin) next = Add(state, d) }>""",
    "loop that turns its state": """
        f = Constant<value = int64[2] {4, -1}>() y = Loop(twice, goes_on, both) <body = b (int64 j, bool cin,
        float[n, 4] state) => (bool cout, float[n, 4] next) { cout = Identity(cin) s = Shape(state) r =
        Transpose<perm = [1, 0]>(state) next = Reshape(r, s) }>""",
    "hidden in a function of sizes": """s = Shape<end = 1>(d) l = Constant<value = int64[1] {30}>() c = Greater(s, l)
        f = Constant<value = int64[1] {4}>() r = Where(c, f, s) q = Constant<value = int64[1] {-1}>() z =
        Concat<axis = 0>(r, q)
        x = Reshape(both, z) v = Softmax<axis = 1>(x) p = Constant<value = int64[2] {-1, 4}>() y = Reshape(v, p)""",
}

NOISY = frozenset({"random", "normalisation in training"})
"""ONNX Runtime itself answers these in different ways, with and without its optimisations."""

SOUND = {
    "quantised by fixed scales": """s = Constant<value = float {0.0625}>() z = Constant<value = uint8 {128}>()
        q = QuantizeLinear(both, s, z) x = DequantizeLinear(q, s, z)
        c = Constant<value = float[4] {0.25, 0.5, 0.125, 1}>() o = Constant<value = int8[4] {0, 1, -3, 0}>()
        p = QuantizeLinear<axis = 1>(x, c, o) y = DequantizeLinear<axis = -1>(p, c, o)""",
    "encoded and hashed": """a = ai.onnx.ml.LabelEncoder<keys_int64s = [1, 2], values_int64s = [5, 7],
        default_int64 = 3>(ids) b = com.microsoft.MurmurHash3<positive = 0>(a) c = Constant<value = int32 {50}>()
        f = Mod(b, c) k = Cast<to = 7>(f) v = Gather(w, k) r = ReduceSum<keepdims = 0>(v, one) y = Add(r, both)""",
    "activations of ONNX Runtime": """a = com.microsoft.Gelu(both) b = com.microsoft.BiasGelu(a, ones)
        c = com.microsoft.QuickGelu(b) y = com.microsoft.FastGelu(c)""",
    "layers that ONNX Runtime has fused": """
        a = com.microsoft.FusedGemm<transB = 1, activation = "Relu">(both, m44, ones)
        b = com.microsoft.FusedMatMul<transB = 1, alpha = 0.5>(a, m44)
        c = Transpose<perm = [1, 0]>(b) g = com.microsoft.FusedMatMul<transA = 1>(c, m44)
        u = Unsqueeze(g, one) t = com.microsoft.FusedMatMul<transB = 1>(u, h) s = Softmax<axis = -1>(t)
        v = MatMul(s, h) n = com.microsoft.SkipLayerNormalization(u, v, ones, zeros) y = Squeeze(n, one)""",
    "axes that ONNX Runtime moves": """b = Unsqueeze(m44, az)
        a = com.microsoft.FusedMatMul<transBatchA = 1>(h, b) p = Transpose<perm = [1, 0, 2]>(a)
        y = ReduceSum<keepdims = 0>(p, one)""",
    "bfloat16 between layers": "b = Cast<to = 16>(both) c = Cast<to = 1>(b) y = Mul(c, d)",
    "dense layers": "a = MatMul(both, m44) b = Relu(a) y = Gemm<transB = 1>(b, m44, ones)",
    "factorisation machine": """s = ReduceSum<keepdims = 0>(h, one) q = Mul(s, s) p = Mul(h, h) r =
        ReduceSum<keepdims = 0>(p, one)
        x = Sub(q, r) y = Add(x, both)""",
    "attention within a sample": """u = Unsqueeze(both, ax) t = Transpose<perm = [0, 2, 1]>(h) g = MatMul(u, t)
        s = Softmax<axis = -1>(g)
        v = MatMul(s, h) y = Squeeze(v, ax)""",
    "attention as einsum": """g = Einsum<equation = "bld,bd->bl">(h, both) s = Softmax<axis = -1>(g)
        y = Einsum<equation = "bl,bld->bd">(s, h)""",
    "interactions of a DLRM": """u = Unsqueeze(both, ax) c = Concat<axis = 1>(u, h) t = Transpose<perm = [0, 2,
        1]>(c) g = MatMul(c, t)
        s = Constant<value = int64[2] {-1, 16}>() f = Reshape(g, s) i = Constant<value = int64[6] {1, 2, 3, 6,
        7, 11}>()
        y = Gather<axis = 1>(f, i)""",
    "GRU over the history": """t = Transpose<perm = [1, 0, 2]>(h) x, o = GRU<hidden_size = 4>(t, gw, gr) a =
        Constant<value = int64[1] {0}>()
        v = Squeeze(o, a) y = Add(v, both)""",
    "LSTM from both ends": """t = Transpose<perm = [1, 0, 2]>(h) x, o, p = LSTM<hidden_size = 4>(t, lw, lr)
        q = Transpose<perm = [2, 0, 1, 3]>(x) s = Constant<value = int64[2] {0, -1}>() y = Reshape(q, s)""",
    "dense layer on a flat history": """s = Constant<value = int64[2] {-1, 4}>() f = Reshape(h, s) a = MatMul(f, m44)
        b = Relu(a) q = Constant<value = int64[3] {-1, 3, 4}>() r = Reshape(b, q) y = ReduceMax<keepdims =
        0>(r, one)""",
    "tensordot with sizes": """s = Shape(h) pair = Constant<value = int64[2] {0, 1}>() t = Gather(s, pair) p =
        ReduceProd<keepdims = 1>(t)
        l = Constant<value = int64[1] {4}>() q = Concat<axis = 0>(p, l) f = Reshape(h, q) a = MatMul(f, m44)
        z = Concat<axis = 0>(t, l) r = Reshape(a, z) y = ReduceMean<keepdims = 0>(r, one)""",
    "positions within the history": """s = Shape(h) o = Constant<value = int64 {1}>() z = Constant<value =
        int64 {0}>() t = Gather(s, o)
        r = Range(z, t, o) p = Gather(small, r) a = Add(h, p) y = ReduceSum<keepdims = 0>(a, one)""",
    "a learnt vector for each sample": """s = Shape<end = 1>(d) t = Constant<value = int64[2] {1, 4}>() q =
        Concat<axis = 0>(s, t)
        x = Expand(query, q) g = Concat<axis = 1>(x, h) y = ReduceMax<keepdims = 0>(g, one)""",
    "a constant repeated for each sample": """s = Shape<end = 1>(d) l = Constant<value = int64[1] {1}>()
        q = Concat<axis = 0>(s, l) u = Unsqueeze(ones, az) t = Tile(u, q) c = Less(t, both) y = Where(c, both, t)""",
    "sizes that two values are stretched to": """s = Shape(h) q = Shape(query) m = Max(q, s) x = Expand(query, m)
        g = Add(h, x) y = ReduceSum<keepdims = 0>(g, one)""",
    "zeros for each sample": """s = Shape(both) z = ConstantOfShape(s) c = Greater(both, z) y = Where(c, both, z)""",
    "mask from keys": """z = Constant<value = int64 {0}>() c = Equal(ids, z) f = Cast<to = 1>(c) u = Unsqueeze(f, two)
        m = Mul(h, u) y = ReduceSum<keepdims = 0>(m, one)""",
    "normalisation": """x = BatchNormalization(both, ones, zeros, zeros, ones) y = LayerNormalization<axis =
        -1>(x, ones)""",
    "convolution over the history": """t = Transpose<perm = [0, 2, 1]>(h) x = Conv<kernel_shape = [3], pads =
        [1, 1]>(t, cw)
        y = ReduceMax<keepdims = 0>(x, two)""",
    "sums and ranks within the history": """a = Constant<value = int64 {1}>() c = CumSum(h, a) k =
        Constant<value = int64[1] {2}>()
        v, i = TopK<axis = 1>(c, k) y = ReduceMean<keepdims = 0>(v, one)""",
    "rows of ONNX-ML": """a = ai.onnx.ml.Scaler<offset = [0.5, 0.0, 1.0, 2.0], scale = [1.0, 2.0, 0.5, 1.0]>(both)
        b = ai.onnx.ml.Imputer<imputed_value_floats = [7.0], replaced_value_float = 0.0>(a)
        c = ai.onnx.ml.Normalizer<norm = "L2">(b)
        q = ai.onnx.ml.LinearRegressor<coefficients = [1.0, 2.0, 0.5, 4.0], intercepts = [0.5], targets = 1>(c)
        r = ai.onnx.ml.TreeEnsembleRegressor<n_targets = 1, nodes_treeids = [0, 0, 0], nodes_nodeids = [0, 1, 2],
        nodes_featureids = [1, 0, 0], nodes_values = [0.5, 0.0, 0.0], nodes_modes = ["BRANCH_LEQ", "LEAF", "LEAF"],
        nodes_truenodeids = [1, 0, 0], nodes_falsenodeids = [2, 0, 0], target_ids = [0, 0], target_nodeids = [1, 2],
        target_treeids = [0, 0], target_weights = [3.0, -4.0]>(both)
        i = Constant<value = int64[2] {3, 0}>() s = ai.onnx.ml.ArrayFeatureExtractor(both, i)
        y = ai.onnx.ml.FeatureVectorizer<inputdimensions = [4, 1, 1, 2]>(c, q, r, s)""",
    "categories of ONNX-ML": """o = ai.onnx.ml.OneHotEncoder<cats_int64s = [3, 998, 999], zeros = 1>(ids)
        x = ReduceSum<keepdims = 0>(o, one) y = Concat<axis = 1>(x, both)""",
    "classes of ONNX-ML": """c = Constant<value = int64[4] {30, 10, 20, 40}>() i = ArgMax<axis = 1, keepdims = 0>(both)
        l = ai.onnx.ml.ArrayFeatureExtractor(c, i) m = Constant<value = int64[2] {-1, 1}>() r = Reshape(l, m)
        f = Cast<to = 1>(r) y = Add(f, both)""",
    "elements of a constant": """z = Constant<value = int64 {50}>() i = Mod(ids, z)
        g = GatherElements<axis = 0>(small, i) x = ReduceSum(g, one) y = Add(x, both)""",
    "a new axis of TensorFlow": """u = Unsqueeze(both, two) b = Constant<value = int32[2] {0, 0}>()
        t = Constant<value = int32[2] {1000000000, 1000000000}>() a = Constant<value = int32[2] {0, 2}>()
        q = Constant<value = int32[2] {1, 1}>() r = Slice(u, b, t, a, q) v = Mul(r, r)
        y = ReduceSum<keepdims = 0>(v, two)""",
    "expanded by PyTorch": """s = Shape(both) three = Constant<value = int64[1] {3}>() wide = Concat<axis = 0>(three, s)
        k = Shape(wide) all = ConstantOfShape<value = int64[1] {1}>(k) m = Constant<value = int64 {-1}>()
        none = Mul(all, m) c = Equal(wide, none) r = Where(c, all, wide) x = Expand(small3, r) p = Greater(both, x)
        f = Cast<to = 1>(p) y = ReduceSum<keepdims = 0>(f, az)""",
    "a learnt vector, expanded by PyTorch": """n = Shape<end = 1>(both) none = Constant<value = int64[1] {-1}>()
        wide = Concat<axis = 0>(n, none, none) k = Shape(wide) all = ConstantOfShape<value = int64[1] {1}>(k)
        m = Constant<value = int64 {-1}>() nones = Mul(all, m) c = Equal(wide, nones) r = Where(c, all, wide)
        x = Expand(query, r) g = Concat<axis = 1>(x, h) y = ReduceMax<keepdims = 0>(g, one)""",
    "columns": """p, q = Split<axis = 1, num_outputs = 2>(both) b = Constant<value = int64[2] {0, 1}>()
        t = Constant<value = int64[2] {9223372036854775807, 3}>() a = Constant<value = int64[2] {0, 1}>() r =
        Slice(both, b, t, a)
        y = Concat<axis = 1>(q, p, r)""",
    "one-hot": """z = Constant<value = int64 {5}>() i = Mod(ids, z) v = Constant<value = float[2] {0, 1}>() o =
        OneHot(i, z, v)
        x = ReduceSum<keepdims = 0>(o, one) y = Concat<axis = 1>(x, both)""",
    "heads": """s = Constant<value = int64[4] {0, 0, 2, 2}>() a = Reshape(h, s) q = Transpose<perm = [0, 2, 1, 3]>(a)
        k = Transpose<perm = [0, 2, 3, 1]>(a) g = MatMul(q, k) p = Softmax<axis = -1>(g) c = MatMul(p, q)
        r = Transpose<perm = [0, 2, 1, 3]>(c) t = Constant<value = int64[2] {0, 12}>() y = Reshape(r, t)""",
    "one item of each history": """
        m = Constant<value = int64 {3}>() k = Mod(id, m) q = Constant<value = int64 {-1}>() v = Unsqueeze(places,
        one) p = Add(k, q) u = Unsqueeze(p, one) j = Concat<axis = -1>(v, u) x = GatherND(h, j) y = Add(x, both)""",
    "two items of each history": """
        m = Constant<value = int64 {3}>() k = Mod(ids, m) v = Unsqueeze(places, one) p = Max(v, k) q = Shape(p) b =
        Expand(v, q) f = Unsqueeze(b, two) u = Unsqueeze(k, two) j = Concat<axis = -1>(f, u) x = GatherND(h, j) z =
        ReduceMean<keepdims = 0>(x, one) y = Add(z, both)""",
    "one number of each item": """
        m = Constant<value = int64 {4}>() k = Mod(ids, m) v = Unsqueeze(places, one) c = Constant<value = int64[1,
        3] {0, 1, 2}>() q = Max(v, c) p = Shape(q) a = Expand(v, p) b = Expand(c, p) f = Unsqueeze(a, two) g =
        Unsqueeze(b, two) u = Unsqueeze(k, two) j = Concat<axis = 2>(f, g, u) x = GatherND(h, j) z =
        ReduceSum<keepdims = 1>(x, one) y = Add(z, both)""",
    "a mask read by places": """
        z = Constant<value = int64 {0}>() n = Greater(ids, z) a = Constant<value = int64[2] {1, 2}>() v =
        Unsqueeze(places, a) c = Constant<value = int64[1, 1, 3] {0, 1, 2}>() q = Max(v, c) p = Shape(q) b =
        Expand(v, p) g = Expand(c, p) l = Constant<value = int64[1] {-1}>() f = Unsqueeze(b, l) u = Unsqueeze(g, l)
        j = Concat<axis = -1>(f, u) x = GatherND(n, j) w8 = Cast<to = 1>(x) p3 = Transpose<perm = [0, 2, 1]>(w8) k =
        Mul(h, p3) y = ReduceSum<keepdims = 0>(k, one)""",
    "an item put into each history": """
        m = Constant<value = int64 {3}>() k = Mod(id, m) v = Unsqueeze(places, one) u = Unsqueeze(k, one) j =
        Concat<axis = 1>(v, u) x = ScatterND(h, j, e) a = Shape(places) b = Constant<value = int64[1] {7}>() g =
        Expand(b, a) l = ScatterND(ids, j, g) c = Gather(w, l) q = Add(x, c) z = ReduceSum<keepdims = 0>(q, one) y =
        Add(z, both)""",
    "elements put into each sample": """m = Constant<value = int64 {3}>() k = Mod(ids, m) f = Cast<to = 1>(ids)
        x = ScatterElements<axis = 1, reduction = "add">(both, k, f) y = Add(x, both)""",
    "loop over the history": """
        a = Transpose<perm = [1, 0, 2]>(h) nought = Constant<value = int64 {0}>() e1, e2, outs = Loop(twice,
        goes_on, nought, both) <body = b (int64 j, bool cin, int64 k, float[n, 4] state) => (bool cout, int64 k2,
        float[n, 4] next, float[n, 4] out) { l = Constant<value = int64 {1}>() k2 = Add(k, l) p = Less(j, k2) cout =
        And(cin, p) x = Gather(a, k) q = MatMul(state, m44) r = Add(q, x) next = Tanh(r) out = Identity(next) }>
        stacked = ReduceSum<keepdims = 0>(outs, az) y = Add(stacked, e2)""",
    "scan of the history": """a = Constant<value = int64[1] {0}>()
        e2, outs = Scan<num_scan_inputs = 2, scan_input_axes = [1, 0], body = b (float[n, 4] state, float[n, 4] x,
        float[4] z) => (float[n, 4] next, float[n, 2] out)
        { q = MatMul(state, m44) r = Add(q, x) u = Add(r, z) next = Tanh(u) b2 = Constant<value = int64[1] {2}>()
        out = Slice(next, az, b2, one) }>(both, h, m34)
        p = Transpose<perm = [1, 0, 2]>(outs) s = Constant<value = int64[2] {-1, 6}>() f = Reshape(p, s)
        y = Concat<axis = 1>(f, e2)""",
    "history back to front": """m = Constant<value = int64 {3}>() k = Mod(id, m) g = ReverseSequence<batch_axis = 0,
        time_axis = 1>(h, k) i = Constant<value = int64 {0}>() x = Gather<axis = 1>(g, i) y = Add(x, both)""",
    "one of the history": """i = Constant<value = int64 {-1}>() x = Gather<axis = 1>(h, i) y = Add(x, both)""",
}


def constants() -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(5)
    rows = table()
    rows[0], rows[1], rows[998], rows[999] = 0, 1e-20, -500, 500
    made = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    integers = {"ax": [1], "one": [1], "two": [2], "az": [0]}
    return {
        "w": rows,
        "ones": np.ones(4, np.float32),
        "zeros": np.zeros(4, np.float32),
        **made,
        **{name: np.array(values) for name, values in integers.items()},
    }


SHAPES = {
    "m44": (4, 4),
    "small": (50, 4),
    "small3": (3, 1, 1),
    "query": (1, 1, 4),
    "cw": (4, 4, 3),
    "lw": (1, 16, 4),
    "lr": (1, 16, 4),
    "gw": (1, 12, 4),
    "gr": (1, 12, 4),
    "rw": (1, 4, 4),
    "rr": (1, 4, 4),
    "m34": (3, 4),
}


LATER = {
    "attention within a history": (
        True,
        """f = Constant<value = int64[4] {0, 0, 2, 2}>() r = Reshape(h, f) t = Transpose<perm = [0, 2, 1, 3]>(r)
        c = ReduceMean(h, two) q = RotaryEmbedding(t, c, c) b = Cast<to = 9>(ids) i = Unsqueeze(b, one)
        l = Unsqueeze(b, two) m = And(i, l) v = Unsqueeze(m, one) a = Attention(q, t, t, v)
        x = ReduceMean<keepdims = 0>(a, two) z = Constant<value = int64[2] {0, 4}>() y = Reshape(x, z)""",
    ),
    "attention of packed heads": (
        True,
        """a = Attention<q_num_heads = 2, kv_num_heads = 2, is_causal = 1>(h, h, h)
        y = ReduceMean<keepdims = 0>(a, one)""",
    ),
    "attention over the batch": (
        False,
        """u = Unsqueeze(both, az) a = Attention<q_num_heads = 2, kv_num_heads = 2>(u, u, u)
        y = Squeeze(a, az)""",
    ),
    "rotation by angles of the first sample, which are seldom others": (
        False,
        """f = Constant<value = int64[4] {0, 2, 1, 2}>() t = Reshape(both, f) l = Constant<value = float {90000}>()
        c = Greater(d, l) r = Cast<to = 1>(c) a = Slice(r, az, one, one) i = Slice(ids, az, one, one) p = Sub(i, i)
        q = RotaryEmbedding(t, a, a, p) z = Constant<value = int64[2] {0, 4}>() x = Reshape(q, z) y = Add(x, both)""",
    ),
    "rotation by angles of each sample": (
        True,
        """f = Constant<value = int64[4] {0, 2, 1, 2}>() t = Reshape(both, f) s = Slice(d, az, one, one)
        a = Unsqueeze(s, one) q = RotaryEmbedding(t, a, a) z = Constant<value = int64[2] {0, 4}>() y = Reshape(q, z)""",
    ),
}
"""Networks of a later opset, and whether they keep samples apart."""


def write(path: Path, body: str, opset: int = 18) -> None:
    """A model file of such a body."""
    domains = f'"" : {opset}, "ai.onnx.ml" : 3, "com.microsoft" : 1'
    before = " ".join([COMMON, *[PLACES] * ("places" in body), *[TWICE] * ("goes_on" in body)])
    text = f"<ir_version: 8, opset_import: [{domains}]> {HEAD} {{ {before} {body} }}"
    model = onnx.parser.parse_model(text)
    read = {name for node in model.graph.node for name in node.input} | {
        name for node in model.graph.node for a in node.attribute for inner in a.g.node for name in inner.input
    }
    for name, array in constants().items():
        if name in read:
            model.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.save(model, path)


def requests() -> list[Arrays]:
    """Requests of which each would change the others' answers: wide, extreme, negative and zero values."""
    rng = np.random.default_rng(3)
    made: list[Arrays] = []
    for num_samples, scale in ((1, 1), (2, 0), (3, -7), (1, 1e5), (40, 1), (2, 60), (1, -1e4), (5, 1)):
        keys = rng.integers(2, 998, (num_samples, 4))
        made.append(
            {
                "id": keys[:, 0],
                "d": (scale * rng.random((num_samples, 4))).astype(np.float32),
                "ids": keys[:, 1:],
            }
        )
    made[0]["id"][0], made[1]["id"][0], made[2]["id"][0] = 999, 998, 0
    made[4]["ids"][0] = [999, 998, -1]
    return made


def answers(version_dir: Path, original: Path) -> tuple[bool, list[tuple[Any, NDArray[Any]]]]:
    """Whether requests are joined; and for each request, its answer in the batch and its answer alone."""
    asked = requests()
    expected = [run_network(original, inputs)["y"] for inputs in asked]
    with InferenceSession.open(version_dir) as session:
        found = session.run_many([Request(inputs) for inputs in asked])
        return session.spec.joinable, list(zip(found, expected, strict=True))


def assert_right(pairs: list[tuple[Any, NDArray[Any]]]) -> None:
    """Each answer is that of the request alone."""
    for found, expected in pairs:
        assert not isinstance(found, Exception), found
        np.testing.assert_allclose(found["y"], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_sample_that_looks_at_others_is_answered_alone(name: str, tmp_path: Path) -> None:
    """By whatever operator it does, and however seldom that matters."""
    write(tmp_path / "model.onnx", HOSTILE[name])

    report = import_onnx(tmp_path / "model.onnx", tmp_path / "repository", "m")

    joins, pairs = answers(report.version_dir, tmp_path / "model.onnx")
    assert not joins
    if name not in NOISY:
        assert_right(pairs)
    assert any("requests are served one by one" in note for note in report.notes)


@pytest.mark.parametrize("name", SOUND)
def test_what_recommenders_do_is_joined(name: str, tmp_path: Path) -> None:
    """Independence of samples is proved, and joined requests are answered as they are alone."""
    write(tmp_path / "model.onnx", SOUND[name])

    report = import_onnx(tmp_path / "model.onnx", tmp_path / "repository", "m")

    joins, pairs = answers(report.version_dir, tmp_path / "model.onnx")
    assert joins, report.notes
    assert_right(pairs)


@pytest.mark.parametrize("name", LATER)
def test_operators_of_later_opsets(name: str, tmp_path: Path) -> None:
    is_sound, body = LATER[name]
    write(tmp_path / "model.onnx", body, opset=23)

    report = import_onnx(tmp_path / "model.onnx", tmp_path / "repository", "m")

    joins, pairs = answers(report.version_dir, tmp_path / "model.onnx")
    assert joins == is_sound, report.notes
    assert_right(pairs)


def test_running_statistics_change_no_other_constant(tmp_path: Path) -> None:
    """ONNX Runtime writes those of one feature over an initializer that it shares with equal constants."""
    text = """g (int64[n] id, float[n, 1] x) => (float[n, 4] y) {
        e = Gather(w, id)
        scaled = Mul(e, two)
        normal, mean, var = BatchNormalization<training_mode = 1>(x, one, half, old_mean, old_var)
        y = Add(scaled, normal)
    }"""
    constants = {name: np.array([value], np.float32) for name, value in (("one", 1), ("half", 0.5), ("old_mean", 3))}
    constants |= {"two": np.array([2], np.float32), "old_var": np.array([2], np.float32), "w": table()}
    onnx.save(model_of(text, constants, opset=17), tmp_path / "model.onnx")
    report = import_onnx(tmp_path / "model.onnx", tmp_path / "repository", "m")
    inputs: Arrays = {"id": np.arange(6), "x": np.linspace(-3, 8, 6, dtype=np.float32)[:, None]}
    x = inputs["x"].astype(np.float64)
    wanted = 2 * constants["w"][:6] + (x - x.mean()) / np.sqrt(x.var() + 1e-5) + 0.5
    with InferenceSession.open(report.version_dir) as session:
        for _ in range(4):
            np.testing.assert_allclose(session.run(inputs)["y"], wanted, rtol=0, atol=1e-5)
