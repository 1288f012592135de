"""Ranking networks in PyTorch, as users write them, for tests with the graphs of both exporters."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

NUM_ROWS, DIM, NUM_CLICKS = 1200, 16, 12
NUM_USER, NUM_ITEM = 6, 3


def mlp(widths: list[int], activation: type[nn.Module] = nn.ReLU, *, norm: bool = False) -> nn.Sequential:
    """Linear layers with activations between them."""
    layers: list[nn.Module] = []
    for i, (width, units) in enumerate(pairwise(widths)):
        layers.append(nn.Linear(width, units))
        if i < len(widths) - 2:
            layers += [nn.BatchNorm1d(units), activation()] if norm else [activation()]
    return nn.Sequential(*layers)


class Ranker(nn.Module):
    """Keys of a user, [n, 6], of clicks, [n, 12], and of an item, [n, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(NUM_ROWS, DIM), nn.Embedding(NUM_ROWS, DIM)

    def forward(self, user: Tensor, clicks: Tensor, item: Tensor) -> Tensor:
        """Scores, [n, 1]."""
        return torch.sigmoid(self.rank(self.users(user), self.items(clicks), self.items(item), clicks))

    def rank(self, u: Tensor, h: Tensor, t: Tensor, clicks: Tensor) -> Tensor:
        """Logits, of vectors [n, keys, DIM]."""
        raise NotImplementedError


class Din(Ranker):
    """Attention by an MLP over (t, h, t - h, t * h), with a mask."""

    def __init__(self, activation: type[nn.Module] = nn.Sigmoid, *, softmax: bool = False, masks: bool = True) -> None:
        super().__init__()
        self.attention = mlp([4 * DIM, 24, 10, 1], activation)
        self.top = mlp([(NUM_USER + 2) * DIM, 32, 16, 1], nn.PReLU)
        self.softmax, self.masks = softmax, masks

    def rank(self, u: Tensor, h: Tensor, t: Tensor, clicks: Tensor) -> Tensor:
        """As in the paper."""
        query = t.mean(1)
        keys = query.unsqueeze(1).expand(-1, h.shape[1], -1)
        scores = self.attention(torch.cat([keys, h, keys - h, keys * h], dim=-1))
        if self.softmax:
            if self.masks:
                scores = scores.masked_fill((clicks == 0).unsqueeze(-1), -1e9)
            scores = torch.softmax(scores, dim=1)
        elif self.masks:
            scores = scores * (clicks != 0).unsqueeze(-1).float()
        interest = torch.bmm(scores.transpose(1, 2), h).squeeze(1) if self.softmax else (scores * h).sum(1)
        return self.top(torch.cat([u.flatten(1), interest, query], dim=1))


class DinRepeat(Din):
    """The same, with repeat instead of expand, and view instead of flatten."""

    def rank(self, u: Tensor, h: Tensor, t: Tensor, clicks: Tensor) -> Tensor:
        """As DeepCTR-Torch writes it."""
        query = t.sum(dim=1, keepdim=True)
        keys = query.repeat(1, NUM_CLICKS, 1)
        scores = self.attention(torch.cat([keys, h, keys - h, keys * h], dim=-1))
        weights = torch.where((clicks != 0).unsqueeze(1), scores.transpose(2, 1), torch.zeros(1))
        interest = torch.matmul(weights, h)
        return self.top(torch.cat([u.reshape(-1, NUM_USER * DIM), interest.view(-1, DIM), query.squeeze(1)], dim=1))


class Dien(Ranker):
    """Inner-product attention with a bilinear form, and an attention-weighted sum."""

    def __init__(self) -> None:
        super().__init__()
        self.form = nn.Linear(DIM, DIM, bias=False)
        self.top = mlp([(NUM_USER + 2) * DIM, 32, 16, 1], nn.ReLU, norm=True)

    def rank(self, u: Tensor, h: Tensor, t: Tensor, clicks: Tensor) -> Tensor:
        """Interest evolution without its GRU."""
        query = t.mean(1)
        scores = torch.einsum("ntd,nd->nt", self.form(h), query)
        scores = scores.masked_fill(clicks == 0, -1e9)
        interest = torch.einsum("nt,ntd->nd", torch.softmax(scores, -1), h)
        return self.top(torch.cat([u.flatten(1), interest, query], dim=1))


class Mmoe(Ranker):
    """Experts mixed by a gate per task."""

    def __init__(self, *, bmm: bool = False) -> None:
        super().__init__()
        width = (NUM_USER + NUM_ITEM + 1) * DIM
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 24), nn.ReLU(), nn.Linear(24, 12)) for _ in range(4)
        )
        self.gates = nn.ModuleList(nn.Linear(width, 4) for _ in range(2))
        self.towers = nn.ModuleList(mlp([12, 8, 1]) for _ in range(2))
        self.bmm = bmm

    def rank(self, u: Tensor, h: Tensor, t: Tensor, clicks: Tensor) -> Tensor:
        """Two tasks."""
        x = torch.cat([u.flatten(1), h.mean(1), t.flatten(1)], dim=1)
        experts = torch.stack([expert(x) for expert in self.experts], dim=1)
        logits = []
        for gate, tower in zip(self.gates, self.towers, strict=True):
            weights = torch.softmax(gate(x), dim=-1)
            if self.bmm:
                mixed = torch.bmm(weights.unsqueeze(1), experts).squeeze(1)
            else:
                mixed = (weights.unsqueeze(-1) * experts).sum(1)
            logits.append(tower(mixed))
        return torch.cat(logits, dim=1)


class Ple(Ranker):
    """One level of progressive layered extraction: own and shared experts."""

    def __init__(self) -> None:
        super().__init__()
        width = (NUM_USER + NUM_ITEM + 1) * DIM
        self.own = nn.ModuleList(nn.ModuleList(mlp([width, 24, 12]) for _ in range(2)) for _ in range(2))
        self.shared = nn.ModuleList(mlp([width, 24, 12]) for _ in range(2))
        self.gates = nn.ModuleList(nn.Sequential(nn.Linear(width, 4), nn.Softmax(dim=1)) for _ in range(2))
        self.towers = nn.ModuleList(mlp([12, 8, 1]) for _ in range(2))

    def rank(self, u: Tensor, h: Tensor, t: Tensor, clicks: Tensor) -> Tensor:
        """Two tasks."""
        x = torch.cat([u.flatten(1), h.sum(1) / NUM_CLICKS, t.flatten(1)], dim=1)
        shared = [expert(x) for expert in self.shared]
        logits = []
        for own, gate, tower in zip(self.own, self.gates, self.towers, strict=True):
            experts = torch.stack([*(expert(x) for expert in own), *shared], dim=2)
            mixed = torch.matmul(experts, gate(x).unsqueeze(2)).squeeze(2)
            logits.append(tower(mixed))
        return torch.cat(logits, dim=1)


class Dcn(Ranker):
    """DCN-v2, with full or low-rank matrices."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        width = (NUM_USER + NUM_ITEM) * DIM
        self.narrow = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(2)) if rank else None
        self.cross = nn.ModuleList(nn.Linear(rank or width, width) for _ in range(2))
        self.deep = mlp([width, 64, 32], nn.ReLU, norm=True)
        self.top = nn.Linear(width + 32, 1)

    def rank(self, u: Tensor, h: Tensor, t: Tensor, clicks: Tensor) -> Tensor:
        """Cross and deep side by side."""
        first = x = torch.cat([u, t], dim=1).flatten(1)
        for i, layer in enumerate(self.cross):
            x = first * layer(self.narrow[i](x) if self.narrow is not None else x) + x
        return self.top(torch.cat([x, self.deep(first)], dim=-1))


class Dlrm(Ranker):
    """All pairs of vectors."""

    def __init__(self) -> None:
        super().__init__()
        total = NUM_USER + NUM_ITEM
        self.top = mlp([total * (total - 1) // 2 + DIM, 32, 16, 1])
        rows, columns = torch.tril_indices(total, total, offset=-1)
        self.register_buffer("rows", rows)
        self.register_buffer("columns", columns)

    def rank(self, u: Tensor, h: Tensor, t: Tensor, clicks: Tensor) -> Tensor:
        """Dot products below the diagonal."""
        x = torch.cat([u, t], dim=1)
        pairs = torch.bmm(x, x.transpose(1, 2))
        return self.top(torch.cat([u[:, 0], pairs[:, self.rows, self.columns]], dim=1))


class TwoTowers(Ranker):
    """A tower each, cosine and product, and an MLP over both."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = mlp([(NUM_USER + 1) * DIM, 32, 16]), mlp([NUM_ITEM * DIM, 32, 16])
        self.top = mlp([48 + 1, 32, 1], nn.LeakyReLU)

    def rank(self, u: Tensor, h: Tensor, t: Tensor, clicks: Tensor) -> Tensor:
        """Both towers are normalised."""
        a = nn.functional.normalize(self.user(torch.cat([u.flatten(1), h.mean(1)], 1)), dim=1)
        b = nn.functional.normalize(self.item(t.flatten(1)), dim=1)
        return self.top(torch.cat([a, b, a * b, (a * b).sum(1, keepdim=True)], dim=1))


class Transformer(Ranker):
    """nn.TransformerEncoderLayer over the clicks, and nn.MultiheadAttention of the item to them."""

    def __init__(self, *, encoder: bool = True, batch_first: bool = True) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(DIM, 4, 32, batch_first=batch_first) if encoder else None
        self.attention = nn.MultiheadAttention(DIM, 4, batch_first=batch_first)
        self.top = mlp([(NUM_USER + 2) * DIM, 32, 1], nn.GELU)
        self.batch_first = batch_first

    def rank(self, u: Tensor, h: Tensor, t: Tensor, clicks: Tensor) -> Tensor:
        """The item is the query."""
        query = t.mean(1)
        if not self.batch_first:
            h = h.transpose(0, 1)
        keys = self.encoder(h) if self.encoder is not None else h
        question = query.unsqueeze(1) if self.batch_first else query.unsqueeze(0)
        found, _ = self.attention(question, keys, keys, need_weights=False)
        interest = found.squeeze(1) if self.batch_first else found.squeeze(0)
        return self.top(torch.cat([u.flatten(1), interest, query], dim=1))


class ItemInSequence(Ranker):
    """The item is appended to the clicks, and both attend to each other: BST."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(DIM, 2, 32, batch_first=True)
        self.top = mlp([(NUM_USER + 1) * DIM, 32, 1])

    def rank(self, u: Tensor, h: Tensor, t: Tensor, clicks: Tensor) -> Tensor:
        """No part of the sequence depends on the context alone."""
        sequence = self.encoder(torch.cat([h, t.mean(1, keepdim=True)], dim=1))
        return self.top(torch.cat([u.flatten(1), sequence[:, -1]], dim=1))


class XDeepFm(Ranker):
    """A compressed interaction network."""

    def __init__(self) -> None:
        super().__init__()
        total = NUM_USER + NUM_ITEM
        self.first, self.second = nn.Conv1d(total * total, 8, 1), nn.Conv1d(8 * total, 6, 1)
        self.deep = mlp([total * DIM, 32, 16])
        self.top = nn.Linear(8 + 6 + 16, 1)

    def rank(self, u: Tensor, h: Tensor, t: Tensor, clicks: Tensor) -> Tensor:
        """Outer products of all fields, column by column."""
        x = torch.cat([u, t], dim=1)
        z = torch.einsum("nhd,nmd->nhmd", x, x).reshape(-1, x.shape[1] * x.shape[1], DIM)
        one = torch.relu(self.first(z))
        z = torch.einsum("nhd,nmd->nhmd", one, x).reshape(-1, 8 * x.shape[1], DIM)
        two = torch.relu(self.second(z))
        return self.top(torch.cat([one.sum(-1), two.sum(-1), self.deep(x.flatten(1))], dim=1))


class DeepFm(Ranker):
    """A factorisation machine in parallel with a deep network with BatchNorm."""

    def __init__(self, *, deep: bool = True) -> None:
        super().__init__()
        self.linear_users, self.linear_items = nn.Embedding(NUM_ROWS, 1), nn.Embedding(NUM_ROWS, 1)
        self.deep = mlp([(NUM_USER + NUM_ITEM) * DIM, 32, 16, 1], nn.ReLU, norm=True) if deep else None

    def forward(self, user: Tensor, clicks: Tensor, item: Tensor) -> Tensor:
        """First order, second order, deep."""
        x = torch.cat([self.users(user), self.items(item)], dim=1)
        linear = self.linear_users(user).sum(1) + self.linear_items(item).sum(1)
        second = 0.5 * (x.sum(1).pow(2) - x.pow(2).sum(1)).sum(1, keepdim=True)
        total = linear + second + self.items(clicks).mean((1, 2)).unsqueeze(1)
        return torch.sigmoid(total + self.deep(x.flatten(1)) if self.deep is not None else total)


RANKERS: dict[str, Any] = {
    "DIN": Din,
    "DIN, softmax": lambda: Din(nn.PReLU, softmax=True),
    "DIN, ReLU, no mask": lambda: Din(nn.ReLU, masks=False),
    "DIN, repeat": DinRepeat,
    "DIEN without GRU": Dien,
    "MMoE": Mmoe,
    "MMoE, bmm": lambda: Mmoe(bmm=True),
    "PLE": Ple,
    "DCN-v2": Dcn,
    "DCN-v2, low rank": lambda: Dcn(8),
    "DLRM": Dlrm,
    "two towers": TwoTowers,
    "TransformerEncoderLayer": Transformer,
    "MultiheadAttention": lambda: Transformer(encoder=False),
    "TransformerEncoderLayer, steps first": lambda: Transformer(batch_first=False),
    "BST": ItemInSequence,
    "xDeepFM": XDeepFm,
    "FM": lambda: DeepFm(deep=False),
    "DeepFM": DeepFm,
}
