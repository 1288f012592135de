"""Runs the original model on generated inputs, to find out what its declaration does not say.

Does the first dimension count samples? Do samples of a batch influence one another? How many columns does an output
have? ONNX Runtime answers; where the model accepts no generated input, the declared shapes are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper

from inference_session.errors import UnsupportedModelError
from inference_session.importers.onnx.types import ValueType
from inference_session.importers.report import shortened
from inference_session.model_spec import NamedArrays

Dimensions = tuple[tuple[str, int], ...]
"""Inputs, each with an axis."""

_INNER_SIZE = 3
_CLUSTER = 64
_BOUNDS = (1_000_000, 1000, 100, 10, 2, 1)
_SCALAR_BOUND = 100
"""Numbers that stand alone tend to count iterations or results."""
PRIME_SIZES = (11, 13)
"""Numbers of samples of which no size in a model is a multiple by chance, not of both."""
_TOLERANCE = 1e-5
_HALF_TOLERANCE = 4e-3
"""Four steps of half precision."""
_REACHES = ((0.0, 1.0), (-3.0, 3.0), (0.0, 0.0), (-1000.0, 1000.0), (-1e6, 0.0))
"""Floats that samples are held against each other with: a branch may be taken for some of them only."""
_JOINED_SIZES = ((2, 3), (1, 1), (3, 1), (1, 8), (16, 16), (2, 40))
"""Sizes of two requests that are joined; several pairs, because a dependence may show under some values only."""


@dataclass(frozen=True)
class Recipe:
    """How to make up inputs that a model accepts."""

    inputs: Mapping[str, ValueType]
    rows: Mapping[str, int]
    """For inputs that are keys as they stand, the rows of the smallest table they read."""
    bound: int
    """Other integers are below this."""
    ascending: bool
    """Whether integers ascend along the last dimension, from 0, as offsets do."""
    reach: tuple[float, float] = (0.0, 1.0)
    """What floats are between."""

    def arrays(self, seed: int, sizes: Mapping[str, int], inner: int = _INNER_SIZE) -> NamedArrays:
        """One set of inputs; `sizes` and `inner` are the first and the other dimensions that the model leaves open."""
        random = np.random.default_rng(seed)
        in_front = {name: kind.dims[0] for name, kind in self.inputs.items() if kind.dims}
        named = {dim: sizes[name] for name, dim in in_front.items() if isinstance(dim, str)}
        return {
            # NumPy gives scalars for shape [], which ONNX Runtime does not take.
            name: np.asarray(self._array(random, name, kind, _shape(kind, sizes[name], inner, named)))
            for name, kind in self.inputs.items()
        }

    def _array(self, random: np.random.Generator, name: str, kind: ValueType, shape: tuple[int, ...]) -> NDArray[Any]:
        if kind.elem_type == TensorProto.STRING:
            return random.integers(0, 10, shape).astype(str).astype(object)
        dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
        if dtype.kind == "b":
            return random.integers(0, 2, shape).astype(bool)
        if dtype.kind not in "iu":
            with np.errstate(over="ignore"):  # the farthest are infinite in float16
                return random.uniform(*self.reach, shape).astype(dtype)
        others = self.bound if shape else min(self.bound, _SCALAR_BOUND)
        bound = min(self.rows.get(name, others), int(np.iinfo(dtype).max))
        values = _clustered(random, bound, shape)
        if self.ascending and shape and name not in self.rows:
            values = np.sort(values)
            values[..., :1] = 0
        return values.astype(dtype)


def _clustered(random: np.random.Generator, bound: int, shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Integers below a bound, from its beginning, middle and end: so few pages of a mapped table are read."""
    begins = random.choice([0, bound // 2, max(bound - _CLUSTER, 0)], shape)
    return np.minimum(begins + random.integers(0, _CLUSTER, shape), bound - 1)


def _first_symbol(name: str, kind: ValueType) -> str:
    return str(kind.dims[0]) if kind.dims and kind.dims[0] else name


def _shape(kind: ValueType, size: int, inner: int, named: Mapping[str, int]) -> tuple[int, ...]:
    """Open sizes are `size` in front and `inner` behind, except those that have the name of one in front."""
    dims = kind.dims or ()
    behind = [dim if isinstance(dim, int) else named.get(dim or "", inner) for dim in dims[1:]]
    return (*(dim if isinstance(dim, int) else size for dim in dims[:1]), *behind)


@dataclass(frozen=True)
class Findings:
    """The findings about the original model."""

    batched: bool
    joinable: bool
    shapes: tuple[tuple[int, ...], ...] | None
    """Shapes of the outputs, -1 where a size varies; None where the model could not be run."""
    inferred_shapes: tuple[tuple[int, ...], ...] = ()
    """Where the model could not be run: the shapes that ONNX Runtime infers. Empty ones are of scalars, or unknown."""
    served_shapes: tuple[tuple[int, ...], ...] | None = None
    """The same, where other values of what stands alone, and the zeros with which a session warms up, are tried too."""
    num_rows: tuple[tuple[int, ...], ...] | None = None
    """The first size of each output in each run; nothing for scalars. None where the model could not be run."""
    notes: tuple[str, ...] = ()
    feeds: tuple[NamedArrays, ...] = ()
    """Inputs that the model accepts."""
    primes: tuple[NamedArrays, ...] = ()
    """Inputs that the model accepts, of PRIME_SIZES samples each; none where it is not joinable."""
    equal_sizes: tuple[Dimensions, ...] = ()
    """Groups of dimensions that bear one symbol, and that the model does not accept with different sizes."""
    recipe: Recipe | None = None
    """How to make up more such inputs; None where none was found."""


@dataclass(frozen=True)
class Prober:
    """Runs a model on generated inputs."""

    network: Any
    """An ONNX Runtime session."""
    inputs: Mapping[str, ValueType]
    rows: Mapping[str, int]

    def run(self, arrays: NamedArrays) -> list[NDArray[Any]] | None:
        """All outputs in their order, or None where the model does not take these inputs, by name."""
        try:
            results: list[NDArray[Any]] = self.network.run(None, arrays)
        except Exception:  # noqa: BLE001  ONNX Runtime raises any type that its operators raise; each means "not these"
            return None
        return results

    def find(self, *, trusts_symbols: bool = False) -> Findings:
        """Try everything. Exporters give one symbol also to sizes that differ, such as those of keys and of offsets.

        Args:
            trusts_symbols: if all inputs have the same symbol in front, it is the number of samples, although the model
                mixes samples and takes inputs of different numbers of them.
        """
        recipe = self._recipe()
        if recipe is None:
            return self._declared()
        batched = self._may_be_batched() and not self._takes_unequal(recipe) and self._follows_samples(recipe)
        feeds = tuple(self._feeds(recipe))
        runs = [self._shapes_of(arrays) for arrays in feeds]
        switched = tuple(self._switched(feeds))
        others = [self._shapes_of(arrays) for arrays in (*switched, self._zeros(recipe))]
        shapes, served_shapes = self._shapes(runs), self._shapes([*runs, *filter(None, others)])
        num_rows = tuple(tuple(size for shape in of_one for size in shape[:1]) for of_one in zip(*runs, strict=True))
        joinable = batched and self._is_joinable(recipe)
        if batched and not joinable and not trusts_symbols:
            batched = not self._takes_unequal(recipe, self.inputs)
        equal_sizes = tuple(group for group in self._symbols(batched) if self._must_be_equal(group, feeds))
        notes = self._notes(batched, joinable)
        primes = tuple(self._primes(recipe)) if joinable else ()
        return Findings(
            batched, joinable, shapes, (), served_shapes, num_rows, notes, feeds, primes, equal_sizes, recipe
        )

    def _declared(self) -> Findings:
        """What follows from the model's declared inputs and outputs alone."""
        note = (
            "the original could not be run on generated inputs, so the imported model is not verified against it; "
            f"for two samples ONNX Runtime says: {self._refusal()}"
        )
        batched = self._may_be_batched() and len(self._first_symbols()) == 1 and not self._declares_fixed_output()
        return Findings(batched, batched, None, self._inferred_shapes(), notes=(note,))

    def _may_be_batched(self) -> bool:
        """Whether the declared inputs may have one row for each sample, and nothing else as large as their number."""
        in_front = [kind.dims[0] if kind.dims else 0 for kind in self.inputs.values()]
        behind = {dim for kind in self.inputs.values() for dim in (kind.dims or ())[1:]}
        counts_elsewhere = behind.intersection(dim for dim in in_front if isinstance(dim, str))
        return bool(in_front) and not any(isinstance(dim, int) for dim in in_front) and not counts_elsewhere

    def _inferred_shapes(self) -> tuple[tuple[int, ...], ...]:
        shapes = (output.shape for output in self.network.get_outputs())
        return tuple(tuple(size if isinstance(size, int) else -1 for size in shape) for shape in shapes)

    def _declares_fixed_output(self) -> bool:
        """Whether an output, as declared, cannot have a row for each sample."""
        return any(isinstance(dim, int) for value in self.network.get_outputs() for dim in value.shape[:1])

    def _primes(self, recipe: Recipe) -> Iterator[NamedArrays]:
        for size in PRIME_SIZES:
            arrays = recipe.arrays(size, self._sizes(size))
            if self.run(arrays) is not None:
                yield arrays

    def _recipe(self) -> Recipe | None:
        return next(filter(self._suits, self._recipes()), None)

    def _recipes(self) -> Iterator[Recipe]:
        """Recipes that test most come first; the last have only small keys, as these may index small tables too."""
        for keys_too, bound, ascending in product((False, True), _BOUNDS, (False, True)):
            rows = {name: min(num, bound) for name, num in self.rows.items()} if keys_too else self.rows
            yield Recipe(self.inputs, rows, bound, ascending)

    def _suits(self, recipe: Recipe) -> bool:
        # Many samples, so that keys beyond a small table in the network are sure to occur; few first, because
        # numbers that the model takes for lengths make it fill much memory before it fails.
        return all(self.run(recipe.arrays(seed, self._sizes(n))) is not None for seed, n in ((1, 2), (0, 100)))

    def _refusal(self) -> str:
        """ONNX Runtime's error for two samples of the smallest keys. It names a size that an export has fixed."""
        *_, recipe = self._recipes()
        try:
            self.network.run(None, recipe.arrays(1, self._sizes(2)))
        except Exception as error:  # noqa: BLE001  as in `run`
            return " ".join(str(error).split())
        return "nothing; it fails for larger keys or more samples"

    def _sizes(self, size: int) -> dict[str, int]:
        return dict.fromkeys(self.inputs, size)

    def _takes_unequal(self, recipe: Recipe, groups: Iterable[str] | None = None) -> bool:
        """Whether inputs may differ in their first dimension, which then does not count samples.

        A list of keys and the lengths of its parts fit together under some values only: longer lists than parts, or
        parts of no length, do. `groups`: to which group each input belongs, where not to that of its symbol.
        """
        symbols = list(groups or (_first_symbol(name, kind) for name, kind in self.inputs.items()))
        distinct = list(dict.fromkeys(symbols))
        if len(distinct) < 2:
            return False
        larger = {symbol: 2 + i for i, symbol in enumerate(distinct)}
        smaller = {symbol: 1 + len(distinct) - i for i, symbol in enumerate(distinct)}
        unequal = [dict(zip(self.inputs, map(sizes.__getitem__, symbols), strict=True)) for sizes in (larger, smaller)]
        return any(
            self.run(replace(recipe, bound=bound).arrays(2, sizes)) is not None
            for bound, sizes in product((recipe.bound, 1), unequal)
        )

    def _first_symbols(self) -> set[str]:
        """The symbols of the inputs' first dimensions; an input without one counts under its own name."""
        return {_first_symbol(name, kind) for name, kind in self.inputs.items()}

    def _follows_samples(self, recipe: Recipe) -> bool:
        for size in (2, 5):
            outputs = self.run(recipe.arrays(size, self._sizes(size)))
            if outputs is None or any(output.shape[:1] != (size,) for output in outputs):
                return False
        return True

    def _feeds(self, recipe: Recipe) -> Iterator[NamedArrays]:
        for seed, (size, inner) in enumerate(((3, 3), (2, 2), (5, 3), (1, 4))):
            arrays = recipe.arrays(seed, self._sizes(size), inner)
            if self.run(arrays) is not None:
                yield arrays

    def _switched(self, feeds: Sequence[NamedArrays]) -> Iterator[NamedArrays]:
        """The same with other values of what stands alone: a branch may be taken for some of them only."""
        for number, arrays in enumerate(feeds):
            switches = self._switches(number)
            if switches and self.run(switched := {**arrays, **switches}) is not None:
                yield switched

    def _switches(self, number: int) -> NamedArrays:
        """For whole numbers that stand alone, this one; for flags, its bits."""
        alone = [(name, kind) for name, kind in self.inputs.items() if kind.dims == ()]
        flags = [name for name, kind in alone if kind.elem_type == TensorProto.BOOL]
        numbers = [(name, kind) for name, kind in alone if kind.elem_type in (TensorProto.INT64, TensorProto.INT32)]
        return {
            **{name: np.array(bool(number >> position & 1)) for position, name in enumerate(flags)},
            **{name: np.array(number, helper.tensor_dtype_to_np_dtype(kind.elem_type)) for name, kind in numbers},
        }

    def _zeros(self, recipe: Recipe) -> NamedArrays:
        """The inputs with which a session warms up."""
        arrays = recipe.arrays(0, self._sizes(1), inner=1)
        return {
            name: np.full(array.shape, "" if array.dtype == object else 0, array.dtype)
            for name, array in arrays.items()
        }

    def _is_joinable(self, recipe: Recipe) -> bool:
        """Whether joined requests get the same answers as single ones, as far as trials show."""
        tried = [(recipe, sizes, seed) for seed, sizes in enumerate(_JOINED_SIZES)]
        others = product(_REACHES[1:], _JOINED_SIZES[:4])
        tried += [(replace(recipe, reach=reach), sizes, 100 + seed) for seed, (reach, sizes) in enumerate(others)]
        return all(self._joins(*case) for case in tried)

    def _joins(self, recipe: Recipe, sizes: tuple[int, int], seed: int) -> bool:
        first, second = (recipe.arrays(2 * seed + i, self._sizes(size)) for i, size in enumerate(sizes))
        both = {name: np.concatenate([first[name], second[name]]) for name in first}
        part, other, whole = self.run(first), self.run(second), self.run(both)
        if whole is None or part is None or other is None:
            return recipe.reach != _REACHES[0] and (part is None or other is None)  # the model rejects such values
        tolerance = _TOLERANCE * max(1.0, *map(abs, recipe.reach))
        return all(
            a.shape[1:] == b.shape[1:] and close(together, np.concatenate([a, b]), tolerance)
            for a, b, together in zip(part, other, whole, strict=True)
        )

    def _symbols(self, batched: bool) -> Iterator[Dimensions]:
        """The dimensions that share a symbol, except those that count the samples of a batched model."""
        found: dict[str, list[tuple[str, int]]] = {}
        for name, kind in self.inputs.items():
            for axis, dim in enumerate(kind.dims or ()):
                if isinstance(dim, str) and (axis or not batched):
                    found.setdefault(dim, []).append((name, axis))
        return (tuple(group) for group in found.values() if len(group) > 1)

    def _must_be_equal(self, group: Dimensions, feeds: tuple[NamedArrays, ...]) -> bool:
        """Whether the model fails when any one of them is larger than the others; one of 1 may be stretched."""
        sizes = [{arrays[name].shape[axis] for name, axis in group} for arrays in feeds]
        telling = next((a for a, found in zip(feeds, sizes, strict=True) if len(found) == 1 and min(found) > 1), None)
        if telling is None:
            return False
        for name, axis in group:
            array = telling[name]
            grown = np.concatenate([array, array.take([-1], axis)], axis)
            if self.run({**telling, name: grown}) is not None:
                return False
        return True

    def _shapes_of(self, arrays: NamedArrays) -> list[tuple[int, ...]]:
        """The shapes of all outputs; none where the model does not accept the inputs."""
        return [output.shape for output in self.run(arrays) or ()]

    def _shapes(self, runs: Sequence[Sequence[tuple[int, ...]]]) -> tuple[tuple[int, ...], ...]:
        """The shape of each output in all of these runs."""
        for value, shapes in zip(self.network.get_outputs(), zip(*runs, strict=True), strict=False):
            ranks = sorted({*map(len, shapes)})
            if len(ranks) > 1:
                raise UnsupportedModelError(
                    f"output {value.name!r} has {' or '.join(map(str, ranks))} dimensions, depending on the"
                    " inputs, as Squeeze without axes makes it; give Squeeze its axes (in PyTorch, a dim to squeeze)"
                )
        return tuple(tuple(_common(sizes) for sizes in zip(*shapes, strict=True)) for shapes in zip(*runs, strict=True))

    def _notes(self, batched: bool, joinable: bool) -> tuple[str, ...]:
        fixed = [repr(name) for name, kind in self.inputs.items() if kind.dims and isinstance(kind.dims[0], int)]
        if not batched and fixed:
            way_out = "if it counts samples, export the model with an open one (in PyTorch by dynamic_shapes)"
            place = f"the first dimension of {shortened(fixed)}"
            return (f"{place} has a fixed size; requests are served one by one; {way_out}",)
        if not batched:
            place = "the first dimension of some input or output is not the number of samples"
            way_out = "where ids come with offsets or lengths, give each sample a row of them, filled up"
            return (f"{place}; requests are served one by one; {way_out}",)
        if not joinable:
            return ("an answer depends on the other samples of its batch; requests are served one by one",)
        return ()


def _common(sizes: tuple[int, ...]) -> int:
    return sizes[0] if len(set(sizes)) == 1 else -1


def close(found: NDArray[Any], expected: NDArray[Any], tolerance: float, *, in_half: bool = False) -> bool:
    """Whether two outputs are the same: numbers within a tolerance, absolute and relative, all else exactly.

    Half precision, of the outputs or of what they are computed from (`in_half`), may differ by a few of its steps:
    ONNX Runtime itself rounds to it more or less often. What is near 0 may be the sum of terms like the largest output.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if found.dtype.kind != "f":
        return bool(np.array_equal(found, expected))
    largest = 1.0
    if in_half or found.dtype == np.float16:
        tolerance = max(tolerance, _HALF_TOLERANCE)
        largest = float(np.abs(expected).max(initial=1.0, where=np.isfinite(expected)))
    with np.errstate(over="ignore"):  # of the largest floats
        return bool(np.allclose(found, expected, rtol=tolerance, atol=tolerance * largest, equal_nan=True))
