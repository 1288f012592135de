"""HugeCTR's graph JSON: a data layer, embedding layers, then dense layers in the order they run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

from inference_session.errors import ModelFormatError, UnsupportedModelError
from inference_session.importers.hugectr import values
from inference_session.importers.hugectr.json_file import FieldPath, JsonFile, read_json, shown

MAX_LAYERS = 10_000
MAX_ELEMENTS = 1 << 24
"""Elements of one sample in any one tensor. Far above real models; a file asking for more is damaged or hostile."""

EMBEDDING_LAYERS = frozenset({
    "DistributedSlotSparseEmbeddingHash", "HybridSparseEmbedding", "LocalizedSlotSparseEmbeddingHash",
    "LocalizedSlotSparseEmbeddingOneHot",
})  # fmt: skip
LOSS_LAYERS = frozenset({"BinaryCrossEntropyLoss", "CrossEntropyLoss", "MultiCrossEntropyLoss"})

Combiner = Literal["sum", "mean"]


@dataclass(frozen=True)
class Label:
    """What the model was trained to predict."""

    name: str
    dim: int


@dataclass(frozen=True)
class Embedding:
    """An embedding layer: `slot_num` bags of keys per sample become a tensor [samples, slot_num, embedding_dim]."""

    name: str
    """Its tensor, by which dense layers call it."""
    slot_num: int
    embedding_dim: int
    combiner: Combiner
    table: str
    """The table's name, which several layers may have; by default the layer's own."""


@dataclass(frozen=True)
class Layer:
    """One element of `layers`, and access to its parameters; errors name layer, line and field."""

    file: JsonFile
    position: int
    parameters: Mapping[str, Any]
    type: str
    bottoms: tuple[str, ...]
    tops: tuple[str, ...]

    def __str__(self) -> str:
        top = f" (top {self.tops[0]!r})" if self.tops else ""
        return f"layer {self.position} {self.type}{top}"

    def has(self, *field: str) -> bool:
        """Whether the parameter exists."""
        return self._find(field) is not None

    def whole(self, *field: str, low: int = 1, default: int | None = None) -> int:
        """A whole number from `low`; without a default it is required."""
        return cast(int, self._read(values.whole(low, MAX_ELEMENTS), field, default))

    def number(self, *field: str, low: float = -values.FLOAT32_MAX, default: float | None = None) -> float:
        """A float32 from `low`; without a default it is required."""
        return cast(float, self._read(values.number(low, values.FLOAT32_MAX), field, default))

    def wholes(self, *field: str, low: int = 0) -> tuple[int, ...]:
        """A list of whole numbers from `low`."""
        each = _no_text(values.whole(low, MAX_ELEMENTS))
        return cast("tuple[int, ...]", self._read(values.list_of(each), field, None))

    def ranges(self, *field: str) -> tuple[tuple[int, ...], ...]:
        """A list of lists of whole numbers from 0."""
        pair = values.list_of(_no_text(values.whole(0, MAX_ELEMENTS)))
        return cast("tuple[tuple[int, ...], ...]", self._read(values.list_of(pair), field, None))

    def fail(self, message: str, *field: str) -> NoReturn:
        """Raise the error of a graph that violates its format."""
        self.file.fail(("layers", self.position, *field), f"{self}: {message}")

    def refuse(self, message: str) -> NoReturn:
        """Raise the error of a graph that is well-formed, but cannot be served."""
        line = self.file.line_of(("layers", self.position))
        raise UnsupportedModelError(f"{self.file.path}:{line}: {self}: {message}")

    def _find(self, field: tuple[str, ...]) -> Any:
        value: Any = self.parameters
        for depth, name in enumerate(field):
            if value is None:
                return None
            if not isinstance(value, dict):
                self.fail(f"expected an object, found {shown(value)}", *field[:depth])
            value = value.get(name)
        return value

    def _read(self, read: values.Reader[Any], field: tuple[str, ...], default: Any) -> Any:
        raw = self._find(field)
        if raw is None and default is not None:
            return default
        if raw is None:
            self.fail("required, but missing", *field)
        try:
            return _no_text(read)(raw)
        except ValueError as error:
            self.fail(f"found {shown(raw)}; {error}", *field)


@dataclass(frozen=True)
class Graph:
    """The whole file, checked: names are unique, every bottom is made before it is used."""

    file: JsonFile
    dense_name: str
    dense_dim: int
    labels: tuple[Label, ...]
    embeddings: tuple[Embedding, ...]
    """In the order of the file."""
    layers: tuple[Layer, ...]
    """Dense and loss layers in the order they run."""

    @property
    def tables(self) -> tuple[Embedding, ...]:
        """By table the first layer that reads it, in the order of the sparse files."""
        first: dict[str, Embedding] = {}
        for embedding in self.embeddings:
            first.setdefault(embedding.table, embedding)
        return tuple(first.values())


def read_graph(path: Path) -> Graph:
    """Read and check a graph JSON; ModelFormatError names file, line, layer and field."""
    return parse_graph(read_json(path, ModelFormatError))


def parse_graph(file: JsonFile) -> Graph:
    """Check a graph JSON that was read; its error type names file, line, layer and field."""
    return _Reader(file).read()


class _Reader:
    def __init__(self, file: JsonFile) -> None:
        self._file = file
        layers = file.document.get("layers")
        if not isinstance(layers, list) or not layers:
            file.fail(("layers",), f"expected a list of layers, found {shown(layers)}")
        if len(layers) > MAX_LAYERS:
            file.fail(("layers",), f"{len(layers)} layers; at most {MAX_LAYERS} are allowed")
        self._layers = tuple(self._layer(position, raw) for position, raw in enumerate(layers))

    def read(self) -> Graph:
        data = self._layers[0]
        if data.type != "Data":
            data.fail("the first layer must be of type 'Data'", "type")
        num_embeddings = 0
        for layer in self._layers[1:]:
            if layer.type not in EMBEDDING_LAYERS:
                break
            num_embeddings += 1
        slots = self._slots(data)
        graph = Graph(
            file=self._file,
            dense_name=self._name(("layers", 0, "dense"), data.parameters.get("dense")),
            dense_dim=data.whole("dense", "dense_dim", low=0),
            labels=self._labels(data),
            embeddings=tuple(self._embedding(layer, slots) for layer in self._layers[1 : 1 + num_embeddings]),
            layers=self._layers[1 + num_embeddings :],
        )
        _check_names(graph)
        return graph

    def _layer(self, position: int, raw: Any) -> Layer:
        at: FieldPath = ("layers", position)
        if not isinstance(raw, dict):
            self._file.fail(at, f"expected an object, found {shown(raw)}")
        kind = raw.get("type")
        return Layer(
            file=self._file,
            position=position,
            parameters=raw,
            type=self._names((*at, "type"), kind if isinstance(kind, str) else None)[0],
            bottoms=self._names((*at, "bottom"), raw.get("bottom", [])),
            tops=self._names((*at, "top"), raw.get("top", [])),
        )

    def _names(self, at: FieldPath, raw: Any) -> tuple[str, ...]:
        try:
            names = values.list_of(values.text)([raw] if isinstance(raw, str) else raw)
        except ValueError:
            names = ("",)
        if not all(names):
            self._file.fail(at, f"layer {at[1]}: expected a name or a list of names, found {shown(raw)}")
        return names

    def _name(self, at: FieldPath, owner: Any) -> str:
        """The single name in field `top` of an object."""
        name = owner.get("top") if isinstance(owner, dict) else None
        return self._names((*at, "top"), name if isinstance(name, str) else None)[0]

    def _labels(self, data: Layer) -> tuple[Label, ...]:
        """One label, or several: then `top` and `label_dim` are lists (HugeCTR 3.9 and later)."""
        raw = data.parameters.get("label")
        tops = raw.get("top") if isinstance(raw, dict) else None
        if not isinstance(tops, list):
            return (Label(self._name(("layers", 0, "label"), raw), data.whole("label", "label_dim")),)
        dims = data.wholes("label", "label_dim")
        names = self._names(("layers", 0, "label", "top"), tops)
        if len(dims) != len(names) or 0 in dims or not names:
            data.fail(
                f"{len(names)} names, but the dimensions {list(dims)}; each name needs one of at least 1",
                "label",
                "label_dim",
            )
        return tuple(Label(name, dim) for name, dim in zip(names, dims, strict=True))

    def _slots(self, data: Layer) -> dict[str, int]:
        """The number of slots of each sparse input."""
        raw = data.parameters.get("sparse", [])
        if not isinstance(raw, list):
            data.fail(f"expected a list, found {shown(raw)}", "sparse")
        slots: dict[str, int] = {}
        for position, item in enumerate(raw):
            at: FieldPath = ("layers", 0, "sparse", position)
            if not isinstance(item, dict):
                self._file.fail(at, f"expected an object, found {shown(item)}")
            name = self._name(at, item)
            if name in slots:
                self._file.fail((*at, "top"), f"the name {name!r} is used twice")
            slots[name] = self._slot_num(at, item)
        return slots

    def _slot_num(self, at: FieldPath, item: Mapping[str, Any]) -> int:
        try:
            slot_num: int = _no_text(values.whole(1, MAX_ELEMENTS))(item.get("slot_num"))
        except ValueError as error:
            self._file.fail((*at, "slot_num"), f"found {shown(item.get('slot_num'))}; {error}")
        per_slot = item.get("nnz_per_slot")
        if isinstance(per_slot, list) and len(per_slot) not in (1, slot_num):
            self._file.fail(
                (*at, "nnz_per_slot"), f"{len(per_slot)} values for {slot_num} slots; give one for all, or one for each"
            )
        return slot_num

    def _embedding(self, layer: Layer, slots: Mapping[str, int]) -> Embedding:
        if len(layer.bottoms) != 1 or layer.bottoms[0] not in slots:
            known = ", ".join(map(repr, slots)) or "none"
            layer.fail(f"found {list(layer.bottoms)}; it must be one of the sparse inputs: {known}", "bottom")
        if len(layer.tops) != 1:
            layer.fail(f"expected one name, found {list(layer.tops)}", "top")
        embedding_dim = layer.whole("sparse_embedding_hparam", "embedding_vec_size")
        slot_num = slots[layer.bottoms[0]]
        if slot_num * embedding_dim > MAX_ELEMENTS:
            layer.fail(
                f"{slot_num} slots of {embedding_dim} elements are too many; at most {MAX_ELEMENTS} "
                "elements are allowed"
            )
        combiner = layer.parameters["sparse_embedding_hparam"].get("combiner")
        if combiner not in ("sum", "mean"):
            layer.fail(f"found {shown(combiner)}; allowed: 'sum', 'mean'", "sparse_embedding_hparam", "combiner")
        table = layer.parameters["sparse_embedding_hparam"].get("table", layer.tops[0])
        if not isinstance(table, str) or not table:
            layer.fail(f"found {shown(table)}; expected a name", "sparse_embedding_hparam", "table")
        return Embedding(layer.tops[0], slot_num, embedding_dim, combiner, table)


def _no_text(read: values.Reader[Any]) -> values.Reader[Any]:
    """A graph holds numbers as numbers, unlike ps.json."""

    def strict(value: Any) -> Any:
        if isinstance(value, str):
            value = None
        return read(value)

    return strict


def _check_names(graph: Graph) -> None:
    """Every name is made once, and made before it is used; layers that share a table agree on its width."""
    labels = {label.name for label in graph.labels}
    made = {graph.dense_name, *labels}
    if len(made) != 1 + len(graph.labels):
        graph.file.fail(("layers", 0), "the label and the dense input need different names")
    dims = {table.table: table.embedding_dim for table in graph.tables}
    for position, embedding in enumerate(graph.embeddings, start=1):
        if embedding.name in made:
            graph.file.fail(("layers", position, "top"), f"the name {embedding.name!r} is used twice")
        made.add(embedding.name)
        if embedding.embedding_dim != dims[embedding.table]:
            graph.file.fail(
                ("layers", position, "sparse_embedding_hparam", "embedding_vec_size"),
                f"found {embedding.embedding_dim}; a layer before has {dims[embedding.table]} for the same table "
                f"{embedding.table!r}",
            )
    for layer in graph.layers:
        _check_layer_names(layer, made, labels)


def _check_layer_names(layer: Layer, made: set[str], labels: set[str]) -> None:
    """Check what a layer reads, of what was `made` before, and add what it makes."""
    is_loss = layer.type in LOSS_LAYERS
    if layer.type in EMBEDDING_LAYERS:
        layer.fail("embedding layers must follow the data layer directly", "type")
    for name in layer.bottoms:
        if name not in made or (name in labels and not is_loss):
            layer.fail(f"no layer before this one produces {name!r}", "bottom")
    for name in () if is_loss else layer.tops:
        if name in made:
            layer.fail(f"the name {name!r} is used twice", "top")
        made.add(name)
