"""The base of both kinds of hash embeddings: rows by keys, on one rank or several, that learn in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Literal, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from hotrow.training.checks import whole
from hotrow.training.hash_embeddings.arguments import (
    MAX_UINT32,
    check_of_torch,
    initial_rows,
    is_whole_type,
    key_type,
    one_of,
    padding_key,
    row_optimizer,
)
from hotrow.training.hash_embeddings.backward import ONE_THREAD, PendingGradients, find_backward
from hotrow.training.hash_embeddings.key_exchange import KeyExchange, MessageExchange
from hotrow.training.hash_embeddings.key_index import (
    HEADER,
    awaited_most,
    distinct,
    distinct_by_owner,
    message_size_for,
    owners,
)
from hotrow.training.hash_embeddings.look_up import LookupResult
from hotrow.training.hash_embeddings.optimizers import SGD, RowOptimizer
from hotrow.training.hash_embeddings.peer_memory import PeerExchange, peer_memory
from hotrow.training.hash_embeddings.rows import HashRows, Rows
from hotrow.training.ranks import place_in_group
from hotrow.training.row_access import gather
from inference_session.errors import ConfigurationError

_OPTIMIZER = "optimizer."
"""Begins the names of what the optimizer keeps, in checkpoints."""
_MESSAGE_SIZES: WeakKeyDictionary[HashTable, int] = WeakKeyDictionary()
"""Numbers in each message of a table's next look-up, the same on all ranks. Not in the table: one rank may copy it."""


class HashTable(nn.Module):
    """The common part of `HashEmbedding` and `HashEmbeddingBag`: rows by keys."""

    _is_shared = _is_left_out = False
    _learns = True
    _dtype = torch.float32
    """Of the vectors that a look-up answers."""

    def __init__(
        self,
        embedding_dim: int,
        optimizer: RowOptimizer | None = None,
        initializer: Callable[[Tensor], Any] = nn.init.normal_,
        *,
        key_dtype: Any = torch.int64,
        padding_idx: int | None = None,
        max_rows: int | None = None,
        max_age: int | None = None,
        evict_by: Literal["age", "count"] = "age",
        gradients: Literal["sum", "mean"] | None = None,
        grad_scaler: Any = None,
        device: Any = None,
        **of_torch: Any,
    ) -> None:
        """Create an embedding without rows.

        Args:
            embedding_dim: elements of a vector.
            optimizer: `SGD`, `Adagrad`, `Adam` of this package, or another `RowOptimizer`; Adagrad() if None.
            initializer: fills a tensor in place, as those of torch.nn.init. It is called once, on [4096,
                embedding_dim]: each element of a new vector is one of the same column there, picked by the key.
            key_dtype: int64 or uint32, what keys are; tensors of other integers are converted if they fit.
            padding_idx: a key without a row: it gets zeros, is never learned, and does not count in bags.
            max_rows: the most rows on all ranks; beyond it, rows are evicted, some at a time.
            max_age: rows that training last read this many steps ago, or up to an eighth more, are evicted.
            evict_by: whether `max_rows` evicts the least recently read rows ("age"), or the least often read ("count").
            gradients: whether those of several ranks are summed or averaged. None: averaged in a model that
                DistributedDataParallel wraps, which averages those of all other weights; otherwise summed.
            grad_scaler: the torch.amp.GradScaler that scales the loss: gradients are unscaled, infinite ones left out.
            device: of the rows; torch's default device if None. `to` moves them as well.
            of_torch: arguments of torch's embeddings are taken if they change nothing, such as `sparse`.

        Raises:
            ConfigurationError: an argument is not allowed.
        """
        super().__init__()
        check_of_torch(type(self).__name__, of_torch)
        self.embedding_dim, self.key_dtype = whole("embedding_dim", embedding_dim), key_type(key_dtype)
        self.optimizer, self.padding_idx = row_optimizer(optimizer), padding_key(padding_idx, self.key_dtype)
        self.max_rows = None if max_rows is None else whole("max_rows", max_rows)
        self.max_age = None if max_age is None else whole("max_age", max_age)
        self.evict_by = one_of("evict_by", evict_by, ("age", "count"))
        self.gradients = one_of("gradients", gradients, ("sum", "mean", None))
        self.grad_scaler = grad_scaler
        place = _usable(torch.get_default_device() if device is None else torch.device(device))
        counts_use = max_rows is not None or max_age is not None
        self._rows = HashRows(initial_rows(initializer, embedding_dim), self.optimizer, place, counts_use=counts_use)

    # Rows in bulk

    def __len__(self) -> int:
        """Keys that have a row on this rank."""
        return self._rows.num_rows

    def __bool__(self) -> bool:
        """True also without rows, since this is a module."""
        return True

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self._rows.device

    @property
    def vector_dtype(self) -> torch.dtype:
        """Of the vectors that a look-up answers; rows are float32."""
        return self._dtype

    @property
    def steps(self) -> int:
        """Steps of training that are complete; may be set."""
        return self._rows.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._rows.steps = whole("steps", steps, 0)

    def rows(self) -> Rows:
        """The rows that this rank holds, in no order. The tensors are the live ones, and change with training."""
        return self._rows.all()

    def put(self, rows: Rows) -> None:
        """Add rows, or overwrite them. Rows that another rank owns are left out, so all ranks may be given all rows.

        That of `padding_idx` is left out too.

        Raises:
            ConfigurationError: the tensors do not fit each other or the embedding.
        """
        self._check_rows(rows)
        if place_in_group().size > 1:
            rows = rows.chosen(self.owns(rows.keys))
        self._rows.put(rows if self.padding_idx is None else rows.chosen(rows.keys != self.padding_idx))

    def clear(self) -> None:
        """Remove all rows of this rank."""
        self._rows.clear()

    def numbered_vectors(self) -> Tensor:
        """float32 [rows + 1, embedding_dim]: row 0 is zeros, then come those of `rows`."""
        return self._rows.vectors[: len(self) + 1]

    def vectors_of(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Which keys, int64 [n], have a row on this rank: bool [n], and the vectors of those."""
        rows = self._rows.find(keys.to(self.device))
        return rows != 0, gather(self._rows.vectors, rows[rows != 0])

    def initial_vectors(self, keys: Tensor) -> Tensor:
        """What rows of these keys, int64 [n], begin with: float32 [n, embedding_dim]."""
        return self._rows.initial_vectors(keys)

    def owns(self, keys: Tensor) -> Tensor:
        """Whether the rows of keys, int64 [n], belong to this rank: bool [n]."""
        rank, num_ranks = place_in_group()
        return owners(keys, num_ranks) == rank

    def listen(self, listener: Callable[[Tensor, Tensor], None]) -> RemovableHandle:
        """Call back with keys that training reads, and with keys that lose their rows, on their rank; int64 [n]."""
        handle = RemovableHandle(self._rows.listeners)
        self._rows.listeners[handle.id] = listener
        return handle

    # Look-ups

    def checked(self, keys: Tensor) -> Tensor:
        """Keys as int64 [n], on the device of the rows.

        Raises:
            ConfigurationError: they are no integers, or outside of `key_dtype`; or torch.export traces the model.
        """
        if torch.compiler.is_exporting():
            raise ConfigurationError(
                "torch.export cannot trace a hash embedding, whose rows grow; training.export exports the whole model"
            )
        if not isinstance(keys, Tensor) or not is_whole_type(keys.dtype):
            found = keys.dtype if isinstance(keys, Tensor) else type(keys).__name__
            raise ConfigurationError(f"keys are {found}; give a tensor of {self.key_dtype} or smaller integers")
        widened = keys.detach().to(self.device, torch.int64).reshape(-1).contiguous()
        if self.key_dtype is torch.uint32 and keys.dtype.is_signed and len(widened):
            low, high = (int(key) for key in widened.aminmax())
            if low < 0 or high > MAX_UINT32:
                raise ConfigurationError(
                    f"keys from {low} to {high} are not uint32; make the embedding's key_dtype int64"
                )
        return widened

    def look_up(self, keys: Tensor) -> LookupResult:
        """Rows for `checked` keys, int64 [n]; all ranks call it."""
        num_ranks = place_in_group().size
        if num_ranks == 1:
            found, places = distinct(keys)
            with ONE_THREAD:
                rows = self._rows_of(found)
                return LookupResult(self._rows.vectors, rows, len(found), places, self._learner(rows, found))
        return self._look_up_by_messages(keys, num_ranks) or self._look_up_by_counts(keys, num_ranks)

    def _look_up_by_messages(self, keys: Tensor, num_ranks: int) -> LookupResult | None:
        """None if a message has too few slots, which all ranks find alike. Slots without a key have row 0."""
        size = _MESSAGE_SIZES.setdefault(self, message_size_for(0))
        exchange = self._exchange(keys, num_ranks, size)
        self._share_initial()
        with ONE_THREAD:
            rows, wait_for_most = self._rows_of_requested(exchange.messages, size)
            try:
                answers = exchange.answers(self._rows.vectors, rows)  # a GPU sends them while the host waits
            finally:
                most = wait_for_most()
            wanted = message_size_for(most)
            if most > size - HEADER or 2 * wanted < size:
                _MESSAGE_SIZES[self] = wanted
            if most > size - HEADER:
                return None
            if self.training:
                self._rows.note_use(rows, exchange.messages)
            scale = self._scale(num_ranks)
            learn = self._learner(rows, exchange.messages, scale)
        send = self._sender(exchange, rows, learn, scale)
        return LookupResult(answers, None, len(exchange.messages), exchange.places, send, exchange.new_sums)

    def _exchange(self, keys: Tensor, num_ranks: int, message_size: int) -> MessageExchange:
        num_slots, dim = num_ranks * message_size, self.embedding_dim
        memory = peer_memory(num_slots, num_slots * dim, self.device)
        if memory is None:
            return MessageExchange(keys, num_ranks, message_size)
        return PeerExchange(memory, keys, num_ranks, message_size, dim)

    def _look_up_by_counts(self, keys: Tensor, num_ranks: int) -> LookupResult:
        """Waits once more: ranks first tell each other how many keys they request."""
        found, places, counts = distinct_by_owner(keys, num_ranks)
        exchange = KeyExchange(counts)
        received = exchange.to_owners(found[: exchange.num_keys])
        with ONE_THREAD:
            rows = self._rows_of(received)
            learn, vectors = self._learner(rows, received, self._scale(num_ranks)), self._rows.vectors

        def send(gradients: Tensor) -> None:
            learn(exchange.to_owners(gradients))

        return LookupResult(exchange.back(gather(vectors, rows)), None, exchange.num_keys, places, send)

    def _sender(
        self, exchange: MessageExchange, rows: Tensor, learn: Callable[[Tensor], None], scale: float
    ) -> Callable[[Tensor], None]:
        """Takes the gradients of a look-up's slots."""
        generation, current_backward = self._rows.generation, find_backward(self, learns=self._is_learning)

        def send(gradients: Tensor) -> None:
            is_sum_of_steps = type(self.optimizer) is SGD and not self._is_scaled()
            if isinstance(exchange, PeerExchange) and is_sum_of_steps and generation == self._rows.generation:
                with ONE_THREAD:
                    exchange.learn(self._rows.vectors, rows, -self.optimizer.lr * scale)
                current_backward()  # at its end, a step is counted
            else:
                learn(exchange.gradients(gradients, rows))

        return send

    def _scale(self, num_ranks: int) -> float:
        return 1 / num_ranks if self._is_averaged() else 1.0

    def _rows_of_requested(self, messages: Tensor, message_size: int) -> tuple[Tensor, Callable[[], int]]:
        """The rows of the slots of messages; and what waits for the most keys of any, and has to be called next."""
        if not self.training:  # finds rows also for slots of no key, which nobody reads
            most = awaited_most(messages, message_size)
            return self._rows.find(messages), most
        with torch.inference_mode(False):
            return self._rows.find_or_add_requested(messages, message_size, self.padding_idx)

    def _rows_of(self, keys: Tensor) -> Tensor:
        if not self.training:
            return self._rows.find(keys)
        with torch.inference_mode(False):  # rows that are made there could never be changed
            if self.padding_idx is None:
                return self._rows.find_or_add(keys)
            rows = torch.zeros_like(keys)
            is_key = keys != self.padding_idx
            rows[is_key] = self._rows.find_or_add(keys[is_key])
        return rows

    def _share_initial(self) -> None:
        """New rows are the same on any number of ranks, also if these were seeded differently."""
        if self.training and not self._is_shared:
            dist.broadcast(self._rows.initial, 0)
            self._is_shared = True

    def _is_averaged(self) -> bool:
        if self.gradients is not None:
            return self.gradients == "mean"
        return getattr(DistributedDataParallel, "_active_ddp_module", None) is not None

    # Learning

    def requires_grad_(self, requires_grad: bool = True) -> HashTable:
        """Whether rows learn. A model's own `requires_grad_` does not reach them: they are no parameters."""
        self._learns = requires_grad
        return super().requires_grad_(requires_grad)

    def _anchor(self) -> Tensor:
        """What autograd takes for the rows, which it does not know."""
        return torch.zeros((), requires_grad=self._is_learning)

    @property
    def _is_learning(self) -> bool:
        return self.training and self._learns

    def _learner(self, rows: Tensor, keys: Tensor, scale: float = 1.0) -> Callable[[Tensor], None]:
        """Takes the gradients of rows that were just found, and multiplies them in place."""
        generation, current_backward = self._rows.generation, find_backward(self, learns=self._is_learning)

        def learn(gradients: Tensor) -> None:
            if scale != 1:
                gradients.mul_(scale)
            current_backward().gradients.append(PendingGradients(rows, gradients, keys, generation))

        return learn

    def learn(self, learning: Sequence[PendingGradients]) -> None:
        """Apply the optimizer to what one backward found; autograd calls it."""
        rows = [
            item.rows if item.generation == self._rows.generation else self._rows.find(item.keys).mul_(item.rows != 0)
            for item in learning
        ]
        self._rows.steps += 1
        if rows:
            # Several ranks may request the same row; each rank requests each row of a look-up once.
            are_distinct = len(rows) == 1 and place_in_group().size == 1
            found = self._unscaled(_joined(rows), _joined([item.gradients for item in learning]))
            self._rows.learn(*found, are_distinct=are_distinct)
        if self.max_age is not None and self.steps % max(1, self.max_age // 8) == 0:
            self.evict(unused_for=self.max_age)
        if self.max_rows is not None:
            rank, num_ranks = place_in_group()
            self._keep_to((self.max_rows + num_ranks - 1 - rank) // num_ranks)  # together `max_rows`

    def _is_scaled(self) -> bool:
        return self.grad_scaler is not None and self.grad_scaler.is_enabled()

    def _unscaled(self, rows: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
        if not self._is_scaled():
            return rows, gradients
        gradients = gradients / self.grad_scaler.get_scale()
        is_finite = gradients.isfinite().all(1)
        return rows[is_finite], gradients[is_finite]

    def evict(self, *, unused_for: int | None = None, used_less_than: int | None = None) -> int:
        """Remove the rows of this rank that meet all given conditions; returns how many. For use between steps.

        Args:
            unused_for: training last read them more than this many steps ago.
            used_less_than: training has read them less often.

        Raises:
            ConfigurationError: use is not counted, as neither max_rows nor max_age is given.
        """
        if not self._rows.counts_use:
            raise ConfigurationError("rows record their last use only with max_rows or max_age; set one of them")
        gone = self._rows.seldom_used(unused_for, used_less_than)
        if len(gone):
            self._rows.remove(gone)
        return len(gone)

    def _keep_to(self, max_rows: int) -> None:
        if len(self) <= max_rows:
            return
        num_gone = len(self) - (max_rows - max_rows // 16)  # some more, so that this is done seldom
        self._rows.remove(self._rows.least_used(num_gone, by_age=self.evict_by == "age"))

    # Of nn.Module

    def _apply(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> HashTable:
        """Rows go to the device that the module goes to; they stay float32, and their vectors get its type."""
        moved = function(torch.empty(0, device=self.device, dtype=self._dtype))
        _usable(moved.device)
        if moved.device.type == "cpu" and moved.is_shared():
            raise ConfigurationError(
                "share_memory: processes would train copies of a hash embedding, whose rows grow; use "
                "DistributedDataParallel"
            )
        if moved.device != self.device:
            self._rows = self._rows.to(moved.device)
        self._dtype = moved.dtype
        super()._apply(function, recurse)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """A copy of the rows of this rank."""
        if self._is_left_out:
            return
        for name, tensor in self.tensors().items():
            destination[prefix + name] = tensor.clone()

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that a checkpoint holds of this rank, by name; live ones. `load` reads them back."""
        rows = self._rows.all()
        return {
            "keys": rows.keys,
            "vectors": rows.vectors,
            **{f"{_OPTIMIZER}{name}": tensor for name, tensor in rows.states.items()},
            **rows.use(),
            "steps": torch.tensor(self.steps),
            "lr": torch.tensor(self.optimizer.lr, dtype=torch.float64),
            "initial": self._rows.initial,
        }

    def load(self, *parts: Mapping[str, Tensor]) -> None:
        """Replace all rows by those that `tensors` returned on any number of ranks; this rank keeps those that it owns.

        Raises:
            ConfigurationError: a tensor is missing, or does not fit.
        """
        for part in parts:
            self._rows_in(part)
        self.clear()
        for part in parts:
            self.load_part(part)

    def load_part(self, part: Mapping[str, Tensor]) -> None:
        """Add the rows that `tensors` returned on one rank, if this rank owns them.

        Raises:
            ConfigurationError: a tensor is missing, or does not fit.
        """
        rows = self._rows_in(part)
        self.steps, self.optimizer.lr = int(part["steps"]), float(part["lr"])
        self._rows.initial.copy_(part["initial"])
        self.put(rows)

    def _rows_in(self, part: Mapping[str, Tensor]) -> Rows:
        """The rows that `tensors` returned, checked, as is the rest of it."""
        missing = {*self.tensors()} - {*part, "last_used", "times_used"}
        if missing:
            raise ConfigurationError(f"the state of a hash embedding lacks {', '.join(sorted(missing))}")
        for name in ("steps", "lr"):
            if not isinstance(part[name], Tensor) or part[name].numel() != 1 or not part[name] >= 0:
                raise ConfigurationError(
                    f"{name} in the state of a hash embedding is {part[name]!r}, expected a number"
                )
        states = {name.removeprefix(_OPTIMIZER): tensor for name, tensor in part.items() if name.startswith(_OPTIMIZER)}
        if part["initial"].shape != self._rows.initial.shape:
            found = part["initial"].shape[1]
            raise ConfigurationError(f"the saved vectors have {found} elements, expected {self.embedding_dim}")
        rows = Rows(part["keys"], part["vectors"], states, part.get("last_used"), part.get("times_used"))
        self._check_rows(rows)
        return rows

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if self._is_left_out:
            return
        part = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
        known = {*self.tensors(), *(f"{_OPTIMIZER}{name}" for name in self.optimizer.states())}
        unexpected_keys += [prefix + name for name in part if name not in known]
        missing = [prefix + name for name in known if name not in part]
        missing_keys += missing
        if missing:
            return
        try:
            self.load(part)
        except ConfigurationError as error:
            error_msgs.append(f"{prefix.rstrip('.')}: {error}")

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise ConfigurationError(
            "torch.nn.DataParallel would let several threads change the rows; use DistributedDataParallel, one process "
            "for each GPU"
        )

    def extra_repr(self) -> str:
        """Shown within the model."""
        return f"{self.embedding_dim}, rows={len(self)}, optimizer={self.optimizer}, key_dtype={self.key_dtype}"

    def _check_rows(self, rows: Rows) -> None:
        for name, tensor in {"keys": rows.keys, **rows.use()}.items():
            if tensor.dtype is not torch.int64 or tuple(tensor.shape) != (len(rows.vectors),):
                found = f"{tensor.dtype} of shape {list(tensor.shape)}"
                raise ConfigurationError(f"{name} are {found}, expected torch.int64 of shape [{len(rows.vectors)}]")
        self.checked(rows.keys)
        shape = (len(rows.keys), self.embedding_dim)
        for name, tensor in {"vectors": rows.vectors, **rows.states}.items():
            if tuple(tensor.shape) != shape:
                raise ConfigurationError(f"{name} have shape {list(tensor.shape)}, expected {list(shape)}")
        unknown = {*rows.states} - {*self.optimizer.states()}
        if unknown:
            kind = type(self.optimizer).__name__
            raise ConfigurationError(f"{kind} has no state {', '.join(sorted(unknown))}; give those of this optimizer")


def _usable(device: torch.device) -> torch.device:
    if device.type == "meta":
        raise ConfigurationError("a hash embedding cannot be on the device 'meta'; create it on the CPU or a GPU")
    return device


def eagerly(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Leave a look-up out of torch.compile, and out of torch's modes of Python, such as that of a default device.

    Such a mode is asked about each call, which takes longer than most of the calls.
    """

    @torch._disable_dynamo
    @wraps(forward)
    def plain(*arguments: Any, **options: Any) -> Tensor:
        with torch._C.DisableTorchFunction():
            return forward(*arguments, **options)

    return plain


@contextmanager
def without_rows(model: nn.Module) -> Iterator[None]:
    """Let state_dict and load_state_dict of a model leave out its hash embeddings."""
    tables = [module for module in model.modules() if isinstance(module, HashTable)]
    for table in tables:
        table._is_left_out = True
    try:
        yield
    finally:
        for table in tables:
            table._is_left_out = False


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
