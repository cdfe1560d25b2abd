"""One more token for many rows at once: what is remembered of them, and the forward pass that reads it.

A group's prompt is kept once, however many siblings continue it, and is read once a step for all of them. The models
that nearly everybody trains share one forward pass, which stands here without what a decode step has no use for; any
other model runs its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from veritune.model.architectures import LayerWeights, rotary_of

STEP = 8
"""The cache grows by multiples of so many columns, as long as that many will be written."""


class CachedPrompts:
    """Keys and values of prompts, each kept once, and which of them every live row continues."""

    def __init__(self) -> None:
        self.allocation = 0
        """How many times what a step reads has been replaced by other memory."""
        self.prompt_keys: list[Tensor] = []
        """Of every layer, (prompts, heads, length, size) and contiguous."""
        self.prompt_values: list[Tensor] = []
        self.prompt_lengths = np.zeros(0, dtype=np.int64)
        """(S,) of the prompt in each slot."""
        self.prompt_of_row = np.zeros(0, dtype=np.int64)
        """(B,) the slot of each live row's prompt."""

    @property
    def live(self) -> int:
        return len(self.prompt_of_row)

    def admit(self, prefilled: Sequence[tuple[Tensor, Tensor]], lengths: Sequence[int], prompts: np.ndarray) -> None:
        """Take in prompts, keys and values (prompts, heads, length, size) a layer, and the rows that continue them.

        `prompts` (new rows,) says which of them each row continues. The first call brings the longest prompt of all.
        """
        self.prompt_of_row = np.concatenate([self.prompt_of_row, len(self.prompt_lengths) + prompts])
        for stored, new in ((self.prompt_keys, 0), (self.prompt_values, 1)):
            for layer, pair in enumerate(prefilled):
                if len(stored) == layer:
                    stored.append(pair[new].contiguous())
                    continue
                old = stored[layer][: len(self.prompt_lengths)]
                padding = (0, 0, 0, old.shape[2] - pair[new].shape[2])
                stored[layer] = torch.cat((old, functional.pad(pair[new], padding)))
        self.prompt_lengths = np.concatenate([self.prompt_lengths, np.asarray(lengths)])
        self.allocation += 1

    def release(self, finished: np.ndarray) -> None:
        """Forget the rows that `finished` (B,) marks, and the prompts that no row continues any more.

        The last that stay move into the rows of those that go, by `fill_gaps`.
        """
        self.prompt_of_row = close_gaps(self.prompt_of_row, finished)
        idle = np.bincount(self.prompt_of_row, minlength=len(self.prompt_lengths)) == 0
        if idle.any():
            sources, targets = fill_gaps(idle)
            _move((*self.prompt_keys, *self.prompt_values), sources, targets)
            self.prompt_lengths = close_gaps(self.prompt_lengths, idle)
            moved = np.arange(len(idle))
            moved[sources] = targets
            self.prompt_of_row = moved[self.prompt_of_row]


class Cache(CachedPrompts):
    """What each live row has generated beside it: of every layer (rows, heads, length, size), written in place.

    At a step all rows write the same column, whenever they were admitted: a key carries its position within itself,
    so the order of columns says nothing. The mask hides what a row has not written; it is zero or an older row's, since
    0 * NaN would be NaN. All is contiguous: a product over a view with gaps takes three times as long on a CPU.

    With `most_siblings`, the largest number that will continue a prompt, a step computes for every allocated row and
    prompt, finished ones too, and writes where a tensor says: shapes and addresses then stay what they are from one
    `allocation` to the next, as the steps that `graphs` replays need it.
    """

    def __init__(self, most_siblings: int = 0) -> None:
        super().__init__()
        self.most_siblings = most_siblings
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.first_columns = np.zeros(0, dtype=np.int64)
        """(B,) the first column that each live row writes."""
        self.column = -1
        """The column that the present step writes."""
        self.mask = torch.empty(0)
        """(B, 1, longest prompt + columns), 0 for the past of each row and -inf for the rest."""
        self.slots: Slots | None = None
        self.stale = False
        """Whether rows have come or gone since mask and slots were made."""
        self.column_index = torch.empty(0)
        """(1,) the present column, where shapes are fixed."""

    @property
    def rows(self) -> int:
        """Rows that a step computes: the live ones first."""
        return len(self.keys[0]) if self.most_siblings else self.live

    @property
    def prompts(self) -> int:
        """Prompts that a step reads: those that live rows continue first."""
        return len(self.prompt_keys[0]) if self.most_siblings else len(self.prompt_lengths)

    @property
    def width(self) -> int:
        return self.keys[0].shape[2] if self.keys else 0

    def admit(self, prefilled: Sequence[tuple[Tensor, Tensor]], lengths: Sequence[int], prompts: np.ndarray) -> None:
        self.first_columns = np.concatenate([self.first_columns, np.full(len(prompts), self.column + 1)])
        super().admit(prefilled, lengths, prompts)
        self.slots, self.stale = None, True

    def release(self, finished: np.ndarray) -> None:
        _move((*self.keys, *self.values), *fill_gaps(finished))
        self.first_columns = close_gaps(self.first_columns, finished)
        super().release(finished)
        self.stale = True

    def begin_step(self, rows: int, columns: int) -> None:
        """Have a column for every live row to write, in at least `rows` rows where that takes a new allocation.

        `columns` are the most that a row still writes, this one counted.
        """
        self.column += 1
        if self.most_siblings:
            rows = graph_size(rows)
        shrinks = self.most_siblings and self.keys and rows < len(self.keys[0])
        if self.column == self.width or self.live > len(self.keys[0]) or shrinks:
            self._grow(rows, columns)
        if self.most_siblings:
            self.column_index.fill_(self.column)
        if self.stale:
            self._assign_slots()
        else:  # the same rows as a step ago have one column more behind them
            self.mask[:, :, self.mask.shape[-1] - self.width + self.column] = 0

    def _assign_slots(self) -> None:
        slots = assign_slots(
            self.prompt_of_row, self.prompts, self.prompt_keys[0].device, self.most_siblings, self.rows
        )
        mask = self._mask()
        if self.most_siblings and self.slots is not None:
            self.slots.copy_(slots)
            self.mask.copy_(mask)
        else:
            self.slots, self.mask = slots, mask
        self.stale = False

    def _grow(self, rows: int, columns: int) -> None:
        """Allocate anew, for the columns that some live row has written and a block more, of `columns` at most."""
        first = int(self.first_columns.min())
        written = self.column - first
        width = written + block_of_columns(written, columns)
        for stored, prompts in ((self.keys, self.prompt_keys), (self.values, self.prompt_values)):
            for layer, prompt in enumerate(prompts):
                new = prompt.new_empty(rows, prompt.shape[1], width, prompt.shape[3])
                if written:
                    new[: self.live, :, :written] = stored[layer][: self.live, :, first : self.column]
                new[:, :, written:], new[self.live :] = 0, 0
                stored[layer : layer + 1] = [new]
                prompts[layer] = prompt[: len(self.prompt_lengths)]
        self.first_columns = self.first_columns - first
        self.column = written
        if self.most_siblings:
            self.column_index = torch.empty(1, dtype=torch.long, device=self.keys[0].device)
        self.allocation += 1
        self.slots, self.stale = None, True

    def _mask(self) -> Tensor:
        # A row that is no longer live sees the first prompt, so that its numbers, which nobody reads, stay finite.
        idle = self.rows - self.live
        prompt_of_row = np.concatenate([self.prompt_of_row, np.zeros(idle, dtype=np.int64)])
        first_columns = np.concatenate([self.first_columns, np.full(idle, self.width)])
        prompt = np.arange(self.prompt_keys[0].shape[2]) < self.prompt_lengths[prompt_of_row][:, None]
        columns = np.arange(self.width)
        own = (columns >= first_columns[:, None]) & (columns <= self.column)
        past = np.concatenate((prompt, own), axis=1)[:, None, :]
        mask = torch.from_numpy(np.where(past, np.float32(0), np.float32(-np.inf)))
        return mask.to(self.prompt_keys[0].device)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Keep the new key and value, each (B, heads, size), of every row."""
        if self.most_siblings:
            self.keys[layer].index_copy_(2, self.column_index, key[:, :, None])
            self.values[layer].index_copy_(2, self.column_index, value[:, :, None])
        else:  # on a CPU a sixth of the time
            self.keys[layer][: self.live, :, self.column] = key
            self.values[layer][: self.live, :, self.column] = value

    def attend(self, layer: int, query_and_key: Tensor, value: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Keep the newest keys and values; softmax attention of each row's query to its prompt and its own past.

        `query_and_key` (B, H + K, D) without their rotary positions, `value` (B, K, D), and `rotary` the cosine and the
        sine (B, 1, D), the latter negative in its first half. Returns (B, H * D).
        """
        # Su et al. 2021, https://arxiv.org/abs/2104.09864: the halves are exchanged, and the first changes its sign.
        cosine, sine = rotary
        size = value.shape[2]
        rotated = torch.addcmul(query_and_key * cosine, query_and_key.roll(size // 2, dims=-1), sine)
        query, key = rotated.split((rotated.shape[1] - value.shape[1], value.shape[1]), dim=1)
        self.write(layer, key, value)
        return self._mix(layer, query, size**-0.5)

    def _mix(self, layer: int, query: Tensor, scale: float) -> Tensor:
        """Attention of one query a row, (B, H, D), to what is kept: (B, H * D).

        The siblings of a group ask their prompt side by side, in one product. torch's fused attention takes two to
        three times as long as these products for a single query on a CPU.
        """
        assert self.slots is not None
        rows, prompts, slots = self.rows, self.prompts, self.slots
        prompt_keys, prompt_values = (t[layer][:prompts].flatten(0, 1) for t in (self.prompt_keys, self.prompt_values))
        own_keys, own_values = (t[layer][:rows].flatten(0, 1) for t in (self.keys, self.values))
        prompt_scores = slots.scatter(torch.bmm(slots.gather(query, prompt_keys.shape[0]), prompt_keys.mT))
        own_query = query.reshape(own_keys.shape[0], -1, query.shape[-1])
        own_scores = torch.bmm(own_query, own_keys.mT).view(rows, query.shape[1], -1)
        scores = torch.add(self.mask, torch.cat((prompt_scores, own_scores), dim=-1), alpha=scale)
        weights = scores.softmax(dim=-1).to(query.dtype)
        prompt_weights, own_weights = weights.split((prompt_keys.shape[1], self.width), dim=-1)
        attention_output = slots.scatter(torch.bmm(slots.gather(prompt_weights, prompt_keys.shape[0]), prompt_values))
        own_weights = own_weights.reshape(own_keys.shape[0], -1, self.width)
        return torch.baddbmm(attention_output.reshape(own_query.shape), own_weights, own_values).view(rows, -1)

    # What transformers asks of a cache, for the models that run their own forward pass

    def update(self, key: Tensor, value: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        self.write(layer, key[:, :, 0], value[:, :, 0])
        prompt_of_row = torch.from_numpy(self.prompt_of_row).to(key.device)
        prompt_key, prompt_value = self.prompt_keys[layer][prompt_of_row], self.prompt_values[layer][prompt_of_row]
        key, value = self.keys[layer][: self.live], self.values[layer][: self.live]
        return torch.cat((prompt_key, key), dim=2), torch.cat((prompt_value, value), dim=2)

    def get_seq_length(self, layer: int = 0) -> int:
        return self.mask.shape[-1] - 1


def block_of_columns(written: int, columns: int) -> int:
    """How many columns a cache that holds `written` grows by, where a row still writes `columns` at most.

    On average half of the new columns is read in vain at every step; copying the old ones costs three readings.
    """
    return min(STEP * max(1, math.ceil(math.sqrt(6 * written) / STEP)), columns)


def fill_gaps(gone: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How the last that stay move to the positions of those that `gone` (B,) marks: from where, and to where."""
    remaining = len(gone) - int(gone.sum())
    return remaining + np.flatnonzero(~gone[remaining:]), np.flatnonzero(gone[:remaining])


def close_gaps(values: np.ndarray, gone: np.ndarray) -> np.ndarray:
    """The `values` (B, …) of those that stay, at the positions that `fill_gaps` gives them."""
    sources, targets = fill_gaps(gone)
    values[targets] = values[sources]
    return values[: len(gone) - int(gone.sum())]


def _move(stored: Sequence[Tensor], sources: np.ndarray, targets: np.ndarray) -> None:
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        for tensor in stored:
            tensor[target] = tensor[source]


@dataclass(frozen=True)
class Slots:
    """Rows beside their siblings: P prompts, each with as many slots as the largest group has live rows."""

    prompts: int
    slots: int
    """Of each prompt."""
    row_of_slot: Tensor | None
    """(P * slots,), any row for an empty slot; None where the rows stand in order already."""
    slot_of_row: Tensor | None
    """(B,)"""

    def copy_(self, other: Slots) -> None:
        """Take over the values of other slots of the same shape."""
        for mine, its in ((self.row_of_slot, other.row_of_slot), (self.slot_of_row, other.slot_of_row)):
            assert mine is not None and its is not None
            mine.copy_(its)

    def gather(self, values: Tensor, products: int) -> Tensor:
        """(B, H, N) a row to (P * K, slots * H / K, N) a prompt and head of its keys; `products` is P * K."""
        gathered = values if self.row_of_slot is None else values.index_select(0, self.row_of_slot)
        apart = gathered.reshape(self.prompts, self.slots, products // self.prompts, -1, values.shape[-1])
        return apart.transpose(1, 2).reshape(products, -1, values.shape[-1])

    def scatter(self, gathered: Tensor) -> Tensor:
        """The way back: (P * K, slots * H / K, N) to (B, H, N)."""
        apart = gathered.view(self.prompts, gathered.shape[0] // self.prompts, self.slots, -1, gathered.shape[-1])
        values = apart.transpose(1, 2).reshape(self.prompts * self.slots, -1, gathered.shape[-1])
        return values if self.slot_of_row is None else values.index_select(0, self.slot_of_row)


def assign_slots(prompt_of_row: np.ndarray, count: int, device: torch.device, slots: int = 0, rows: int = 0) -> Slots:
    """A slot for each row beside those of its prompt, `prompt_of_row` (B,), of which there are `count`.

    With `slots`, no fewer than the largest group has rows, and `rows`, no fewer than B, these give the shapes.
    """
    sizes = np.bincount(prompt_of_row, minlength=count)
    order, fixed = np.argsort(prompt_of_row, kind="stable"), slots > 0
    slots = slots or int(sizes.max())
    among_siblings = np.arange(len(prompt_of_row)) - np.repeat(sizes.cumsum() - sizes, sizes)
    slot_of_row = np.zeros(max(rows, len(prompt_of_row)), dtype=np.int64)
    slot_of_row[order] = prompt_of_row[order] * slots + among_siblings
    if not fixed and count * slots == len(prompt_of_row) and (np.diff(slot_of_row) > 0).all():
        return Slots(count, slots, None, None)
    row_of_slot = np.zeros(count * slots, dtype=np.int64)
    row_of_slot[slot_of_row[: len(prompt_of_row)]] = np.arange(len(prompt_of_row))
    return Slots(count, slots, torch.from_numpy(row_of_slot).to(device), torch.from_numpy(slot_of_row).to(device))


def graph_size(rows: int) -> int:
    """The next of 8, 12, 16, 24, 32, … rows: few sizes, so that a step is seldom captured anew."""
    size = 8
    while size < rows:
        size = size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
    return size


class Layer(NamedTuple):
    """The parameters of one layer. Matrices are (in, out), and stand side by side where they read the same states: at
    few rows, products with them take a fifth less time than with the model's own, (out, in) and apart."""

    attention_norm: Tensor
    qkv_proj: Tensor
    """To queries, keys and values."""
    qkv_bias: Tensor | None
    heads: tuple[int, int]
    """Of queries, and of keys as of values."""
    head_norms: Tensor | None
    """For queries and keys, (H + K, D)."""
    o_proj: Tensor
    mlp_norm: Tensor
    gate_and_up: Tensor
    down: Tensor


def layers_for_decoding(layers: Sequence[LayerWeights]) -> list[Layer]:
    """What `decode` reads, copied from the parameters of a model."""
    return [_side_by_side(layer) for layer in layers]


def _side_by_side(layer: LayerWeights) -> Layer:
    attention, mlp = layer.attention, layer.mlp
    heads = len(attention.query) // layer.head_size, len(attention.key) // layer.head_size
    norms = [norm for norm in (attention.query_norm, attention.key_norm) if norm is not None]
    return Layer(
        attention.norm,
        _turned(attention.qkv_proj),
        attention.qkv_bias,
        heads,
        torch.cat([norm.expand(count, -1) for norm, count in zip(norms, heads, strict=True)]) if norms else None,
        _turned(attention.o_proj),
        mlp.norm,
        _turned(mlp.gate_and_up),
        _turned(mlp.down),
    )


def _turned(matrix: Tensor) -> Tensor:
    return matrix.T.contiguous()


def decode(model: Any, layers: Sequence[Layer] | None, cache: Cache, tokens: Tensor, positions: Tensor) -> Tensor:
    """Next-token logits (B, V) after `tokens` at `positions`, both (B,), which enter the cache.

    `layers` are the model's own, by `layers_for_decoding`; without them the model runs its own forward pass.
    """
    if layers is None:
        return model(
            input_ids=tokens[:, None],
            position_ids=positions[:, None],
            attention_mask=cache.mask[:, None].to(cache.keys[0].dtype),
            past_key_values=cache,
            use_cache=True,
        ).logits[:, -1]
    inner, epsilon = model.base_model, model.config.rms_norm_eps
    rows = tokens.shape[0]
    hidden = functional.embedding(tokens, inner.embed_tokens.weight)  # (B, E)
    rotary = rotary_of(model, hidden, positions[:, None])  # (B, 1, D) each
    size = rotary[0].shape[-1]
    for index, layer in enumerate(layers):
        states = functional.rms_norm(hidden, hidden.shape[-1:], layer.attention_norm, epsilon)
        bias = layer.qkv_bias
        vectors = states @ layer.qkv_proj if bias is None else bias.addmm(states, layer.qkv_proj)
        vectors, value = vectors.view(rows, -1, size).split((sum(layer.heads), layer.heads[1]), dim=1)
        if layer.head_norms is not None:
            vectors = functional.rms_norm(vectors, vectors.shape[-1:], None, epsilon) * layer.head_norms
        hidden = hidden.addmm(cache.attend(index, vectors, value, rotary), layer.o_proj)
        states = functional.rms_norm(hidden, hidden.shape[-1:], layer.mlp_norm, epsilon)
        gate, up = (states @ layer.gate_and_up).chunk(2, dim=-1)
        hidden = hidden.addmm(functional.silu(gate).mul_(up), layer.down)
    return model.get_output_embeddings()(functional.rms_norm(hidden, hidden.shape[-1:], inner.norm.weight, epsilon))
