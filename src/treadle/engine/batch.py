"""Inputs of one run, in one block of memory that the compiled steps read.

A batch mixes prompt chunks and single decoding tokens of any number of sequences. Each part says
for how many of its last tokens logits are needed.

Hot path: between two tokens no other Python code of treadle runs, and the weights have just evicted
the CPU caches. So each plan's block is allocated once, and a batch is written into it through
memoryviews: numpy takes twice as long to store one number.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from math import prod
from struct import Struct
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.base.fast_classes import NamedTuple
from treadle.kernels.run_state import (
    EACH,
    ITEM,
    LINE,
    LORA,
    LORA_ROWS,
    MEDIA,
    MEDIA_HEAD,
    MERGE,
    PAGE,
    PART,
    PART_PAGES,
    SAMPLED,
    SPLIT,
    AsyncMask,
    LogitsQuery,
    numbered,
    round_up,
    run_offset,
)
from treadle.models.config import MediaTraits

if TYPE_CHECKING:
    from treadle.kvcache.cache import EncodedKeys, KVCache, Sequence
    from treadle.kvcache.page_pool import Pool
    from treadle.kvcache.prefix_tree import Lora
    from treadle.models.switch import ControlTokens
    from treadle.plan.plan import Input, Plan, Storage

ROPE_ROWS = 64  # a rotation table grows by this many positions
NO_STATE = 0, 0
# Drafted ids of a sequence at most: with its last id, as many as the largest plan for few tokens.
MOST_DRAFTED = 7
NEVER = 1 << 62  # a position beyond all tokens
COUNTS = Struct("=4q")  # the head of RUN_STATE
COUNT = Struct("=q")
PART_RECORD, PAGES_RECORD, ITEM_RECORD, MERGE_RECORD, SAMPLED_RECORD, LORA_RECORD = (
    Struct(f"={dtype.itemsize // 8}q") for dtype in (PART, PART_PAGES, ITEM, MERGE, SAMPLED, LORA)
)


class BatchItem(NamedTuple):
    """One sequence's share of a batch. ``ids`` are appended to ``seq``; logits of the last
    ``n_outputs`` of them are computed, and their largest found by ``queries`` (the same for each
    output).

    second: in a model with token types, the position from which on tokens have the second type.
    """

    seq: Sequence
    ids: Seq[int]
    n_outputs: int = 1
    queries: tuple[LogitsQuery, ...] = ()
    second: int = NEVER


def merge_pooled_runs(
    pooled: Seq[np.ndarray], n: int, step: int, pooling: str, unit: bool
) -> np.ndarray:
    """Return the pooled vector f32 ``[1, n_embd]`` of a text of ``n`` tokens. ``pooled``: the
    vector of each of its runs, of ``step`` tokens each but the last; ``pooling``: "mean", "first"
    or "last"; ``unit``: scale to length 1.
    """
    rows = [row.astype(np.float64) for row in pooled]
    mean = np.average(rows, 0, [min(step, n - at) for at in range(0, n, step)])
    vector = {"mean": mean, "first": rows[0], "last": rows[-1]}[pooling]
    length = np.linalg.norm(vector) if unit else 1.0
    return np.asarray(vector / (length or 1.0), np.float32)


def group_texts(
    texts: Iterable[Seq[int]], max_tokens: int, max_texts: int
) -> Iterator[list[Seq[int]]]:
    """Group ``texts``, in order, into lists that fit one run of at most ``max_tokens`` tokens and
    ``max_texts`` texts; a longer text gets its own list.
    """
    batch: list[Seq[int]] = []
    for ids in texts:
        if batch and (sum(map(len, batch)) + len(ids) > max_tokens or len(batch) == max_texts):
            yield batch
            batch = []
        batch.append(ids)
    if batch:
        yield batch


class RopeTable:
    """Rotary cosines and sines by position, computed when first needed.

    ``inverse``: radians per position, [rope_dims / 2]. Results are multiplied by ``factor``, and by
    ``gains(positions)``, a factor for each position.
    """

    def __init__(
        self,
        inverse: np.ndarray,
        factor: float,
        n_ctx: int,
        gains: Callable[[np.ndarray], np.ndarray] = np.ones_like,
    ) -> None:
        self._inverse = inverse
        self._factor = np.float32(factor)
        self._gains = gains
        # the OS allocates memory on first write
        self._rows = np.empty((n_ctx, 2, len(inverse)), np.float32)
        self._filled = 0

    def table_up_to(self, n: int) -> np.ndarray:
        """Return the table f32 ``[n_ctx, 2, rope_dims / 2]`` (cosines, sines), of which at least
        the first ``n`` positions are filled. Angles are computed in f64.
        """
        if n > self._filled:
            start = self._filled
            self._filled = min(-(-n // ROPE_ROWS) * ROPE_ROWS, len(self._rows))
            positions = np.arange(start, self._filled)
            angles = positions[:, None] * self._inverse
            rows = np.stack([np.cos(angles), np.sin(angles)], 1)
            rows = rows * self._gains(positions)[:, None, None]
            self._rows[start : self._filled] = rows.astype(np.float32) * self._factor
        return self._rows


class Inputs:
    """The input block of a run (uint8), as numpy arrays by field of RUN_STATE: for the kernels'
    numpy references. ``inputs[field]`` is an integer: a count, or the byte offset of an array.
    """

    def __init__(self, block: np.ndarray) -> None:
        self.block = block

    def __getitem__(self, field: str) -> int:
        return int(self._array_at(run_offset(field), 1, "i8")[0])

    def _array_at(self, at: int, n: int, dtype: Any) -> np.ndarray:
        return self.block[at : at + n * np.dtype(dtype).itemsize].view(dtype)

    def _array(self, field: str, count: str, dtype: Any, width: int = 1) -> np.ndarray:
        return self._array_at(self[field], self[count] * width, dtype)

    @property
    def parts(self) -> np.ndarray:
        return self._array("parts", "n_parts", PART)

    def pages_of(self, pool: int) -> list[np.ndarray]:
        """Return an array for each sequence of the batch: its page numbers in pool number ``pool``,
        i64.
        """
        lists = self._array("part_pages", "n_parts", PART_PAGES).tolist()
        return [self._array_at(at + 8 * n * pool, n, "i8") for at, n in lists]

    @property
    def tokens(self) -> np.ndarray:
        return self._array("tokens", "n_tokens", "i4")

    @property
    def output_rows(self) -> np.ndarray:
        return self._array("output_rows", "n_outputs", "i4")

    def sampled(self, n_vocab: int) -> Iterator[tuple[int, np.ndarray | bool, bool, bool]]:
        """Yield for each query of samplers: its row of the logits; the allowed tokens, bool
        ``[n_vocab]``, or True for all; ``LogitsQuery.first``; ``LogitsQuery.total``.
        """
        for record in self._array("sampled", "n_sampled", SAMPLED):
            row, mask, first, total = map(int, record.tolist())
            allowed: np.ndarray | bool = True
            if mask:
                bits = self._array_at(mask, -(-n_vocab // 8), "u1")
                allowed = np.unpackbits(bits, count=n_vocab, bitorder="little").astype(bool)
            yield row, allowed, bool(first), bool(total)

    def rope(self, table: int, rope_dims: int) -> np.ndarray:
        """Return the cosines and sines of the batch's tokens, f32 ``[n_tokens, 2, rope_dims / 2]``.
        ``table``: index of the RoPE in ``Config.ropes``.
        """
        rows = self._array(numbered("rope", table), "n_tokens", "f4", rope_dims)
        return rows.reshape(-1, 2, rope_dims // 2)

    def kv_indices(self, pool: int) -> np.ndarray:
        return self._array(numbered("kv_indices", pool), "n_tokens", "i8")

    def attn_items(self, pool: int, *, few: bool = False) -> list[tuple[Any, np.ndarray]]:
        """Return the attention items of pool number ``pool``: for each its record (type ITEM), and
        the page numbers of its keys, i64. ``few``: the items of sequences with few tokens in the
        batch; else those of the others.
        """
        field = "attn_few" if few else "attn_items"
        name = numbered(field, pool)
        count = numbered(f"n_{field}", pool)
        made = []
        for i, item in enumerate(self._array(name, count, ITEM)):
            at = self[name] + i * ITEM.itemsize + int(item["pages"])
            made.append((item, self._array_at(at, -(-int(item["key_end"]) // PAGE), "i8")))
        return made

    @property
    def loras(self) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield the groups of rows with the same adapters: first row, number of rows, and the
        scales of each of its rows, f32, one per adapter. The array extends beyond these to the end
        of the block.
        """
        for i, record in enumerate(self._array("loras", "n_loras", LORA)):
            token, n, scales = record.tolist()
            at = self["loras"] + i * LORA.itemsize + scales
            yield token, n, self._array_at(at, (len(self.block) - at) // 4, "f4")

    def attn_merges(self, pool: int) -> np.ndarray:
        names = numbered("attn_merges", pool), numbered("n_attn_merges", pool)
        return self._array(*names, MERGE)


class RunInputs(Inputs):
    """The inputs of a plan's runs; ``lay_out`` rewrites them for each batch. The previous run is
    over by then; a late worker discards what it reads.
    """

    def __init__(
        self,
        plan: Plan,
        cache: KVCache,
        ropes: Seq[RopeTable],
        storage: Storage,
        traits: MediaTraits | None = None,
        control_tokens: ControlTokens | None = None,
    ) -> None:
        traits = traits or MediaTraits()
        media = plan.takes.get(MEDIA)  # in plans for batches with media
        own = [pool for pool in cache.pools if pool.layers]
        pools = [*own, *cache.cross]
        inputs = plan.inputs
        offsets = {}
        at = round_up(run_offset(numbered(EACH[0], max(len(pools), len(ropes)))), LINE)
        for field, given in inputs.items():
            offsets[field], at = at, round_up(at + given.n_bytes, LINE)
        self.memory = storage.memory(at, host=True)
        assert self.memory.bytes is not None
        super().__init__(self.memory.bytes)
        self.n_outputs = 0
        self.late: list[tuple[int, AsyncMask]] = []  # masks still being computed, and their offsets
        self._bytes = self.block.data
        self._words, self._ints = self._bytes.cast("q"), self._bytes.cast("i")
        self._pages, self._masks = offsets.pop("pages") // 8, offsets.pop("masks", 0)
        self._mask_bytes = 8 * inputs["masks"].shape[1] if self._masks else 0
        scales = offsets.pop("lora_scales", 0)
        for field, offset in offsets.items():
            self._words[run_offset(field) // 8] = offset
        self._tokens = offsets["tokens"] // 4
        self._outputs = offsets["output_rows"] // 4
        self._control_tokens = control_tokens
        self._loras = None
        if scales:
            self._loras = _Loras(self._bytes, offsets["loras"], scales, inputs, control_tokens)
        self._parts, self._sampled = offsets["parts"], offsets.get("sampled", 0)
        self._lists = offsets.get("part_pages")  # None: no kernel of the plan reads them
        self._ropes: list[tuple[RopeTable, np.ndarray]] = []
        for i, table in enumerate(ropes):
            given = inputs[field := numbered("rope", i)]
            rows = self._array_at(offsets[field], prod(given.shape), given.dtype)
            self._ropes.append((table, rows.reshape(given.shape)))
        self._all_pools = [
            _Pool(
                self._bytes,
                self._words,
                i,
                offsets,
                plan,
                pool,
                spans=media is not None and traits.spans_in(pool.window),
            )
            for i, pool in enumerate(pools)
        ]
        self._pools, self._cross = self._all_pools[: len(own)], self._all_pools[len(own) :]
        self._cache = cache
        self._components = [  # of positions, by rope table; empty: all are the same
            np.array(traits.component_of(rope.shape[2])) if traits.sections else np.empty(0, int)
            for _, rope in self._ropes
        ]
        # Rows of media for the plan's buffer, if the plan reads some
        # (``kernels/elementwise/media_rows.py``).
        self.media: np.ndarray | None = None
        if media is not None:
            self.media = np.zeros((plan.n_tokens, media.row_bytes // 4), np.float32)

    def _write_mask(self, at: int, mask: bytes) -> None:
        n = self._mask_bytes
        self._bytes[at : at + n] = mask[:n].ljust(n, b"\0")

    def write_late(self) -> None:
        """Wait for the masks that are still being computed, and write them."""
        for at, mask in self.late:
            self._write_mask(at, mask.wait())

    def lay_out(self, parts: Seq[BatchItem], starts: Seq[int]) -> None:
        """Write a batch. ``starts``: the tokens that each part's sequence had before it. The
        sequences are extended already, pages included.
        """
        row = 0
        first = self._tokens
        at_output = self._outputs
        at_part = self._parts
        at_pages = self._pages
        at_sampled = self._sampled
        at_mask = self._masks
        block = self._bytes
        words = self._words
        ints = self._ints
        pools = self._pools
        self.late.clear()
        for pool in self._all_pools:
            pool.n_items = pool.n_few = pool.n_merges = pool.n_partials = 0
        for (seq, part_ids, n_outputs, queries, second), start in zip(parts, starts, strict=True):
            ids = self._embedded(part_ids)
            n = len(ids)
            end = row + n
            n_held = start + n
            spans: list[tuple[int, int]] = []
            if self.media is not None:
                ids, spans = self._lay_out_media(ids, row, start)
            ints[first + row : first + end] = array("i", ids)
            if seq.shifts or self.media is not None:
                self._write_rotations(seq, part_ids, row, start)
            else:
                for table, rope in self._ropes:
                    rope[row:end] = table.table_up_to(n_held)[start:n_held]
            for pool, pages in zip(pools, seq.pages, strict=False):
                behind = at_pages + len(pages)
                words[at_pages:behind] = pages
                pool.add(pages, 8 * at_pages, row, start, n, spans)
                at_pages = behind
            if self._cross:
                at_pages = self._lay_out_cross(seq, at_pages, row, n)
            state, next_ = seq.slots or NO_STATE
            PART_RECORD.pack_into(block, at_part, row, n, start, state, next_, second)
            at_part += PART_RECORD.size
            for output in range(end - n_outputs, end):
                at_sampled, at_mask = self._write_queries(
                    queries, at_output - self._outputs, at_sampled, at_mask
                )
                ints[at_output] = output
                at_output += 1
            row = end
        self.n_outputs = at_output - self._outputs
        n_sampled = (at_sampled - self._sampled) // SAMPLED_RECORD.size
        COUNTS.pack_into(block, 0, row, self.n_outputs, len(parts), n_sampled)
        if self._loras is not None:
            self._loras.lay_out(parts, starts)
        if self._lists is not None:
            self._lay_out_lists(parts, self._lists)
        for pool in self._all_pools:
            at = pool.counts
            words[at] = pool.n_items
            words[at + 1] = pool.n_few
            words[at + 2] = pool.n_merges

    def _embedded(self, ids: Seq[int]) -> Seq[int]:
        """Return ``ids`` with each control token replaced by the token whose embedding the model
        reads.
        """
        return ids if self._control_tokens is None else self._control_tokens.substituted(ids)

    def _lay_out_lists(self, parts: Seq[BatchItem], at: int) -> None:
        """Write, from byte ``at`` on, where each part's page lists begin and how many pages one
        list has.
        """
        at_pages = self._pages
        for seq, *_ in parts:
            PAGES_RECORD.pack_into(self._bytes, at, 8 * at_pages, len(seq.pages[0]))
            at += PAGES_RECORD.size
            at_pages += sum(map(len, seq.pages))

    def lay_out_encoder(self, encoded: EncodedKeys) -> None:
        """Write the inputs of a run that stores an encoder's keys and values in the pages of
        ``encoded``; it has one row per key.
        """
        n = encoded.n_keys
        COUNTS.pack_into(self._bytes, 0, n, 0, 0, 0)
        for pool in self._all_pools:
            self._words[pool.counts : pool.counts + 3] = array("q", [0, 0, 0])
        for pool, pages in zip(self._cross, encoded.pages, strict=True):
            cells = array("q", (page * PAGE + i for page in pages for i in range(PAGE)))
            self._words[pool.slots : pool.slots + n] = cells[:n]

    def _lay_out_cross(self, seq: Sequence, at_pages: int, row: int, n: int) -> int:
        """Write the attention items of ``n`` tokens of ``seq``, from batch row ``row`` on, over the
        encoder's rows, and their page lists from word ``at_pages`` of the block on. Return the
        index of the word after these lists.
        """
        encoded = seq.encoded
        assert encoded is not None
        for pool, pages in zip(self._cross, encoded.pages, strict=True):
            behind = at_pages + len(pages)
            self._words[at_pages:behind] = pages
            pool.add_encoded(8 * at_pages, row, n, encoded.n_keys)
            at_pages = behind
        return at_pages

    def _write_queries(
        self, queries: Seq[LogitsQuery], index: int, at_sampled: int, at_mask: int
    ) -> tuple[int, int]:
        """Write the logits queries of output ``index``: their records from byte ``at_sampled`` on,
        their masks from byte ``at_mask`` on. Return the offsets of the next record and the next
        mask.
        """
        for mask, only, total in queries:
            where = 0
            if mask is not None:
                where = at_mask
                at_mask = at_mask + self._mask_bytes
                if isinstance(mask, bytes):
                    self._write_mask(where, mask)
                else:
                    self.late.append((where, mask))
            SAMPLED_RECORD.pack_into(self._bytes, at_sampled, index, where, only, total)
            at_sampled += SAMPLED_RECORD.size
        return at_sampled, at_mask

    def _lay_out_media(
        self, ids: Seq[int], row: int, start: int
    ) -> tuple[Seq[int], list[tuple[int, int]]]:
        """Write the rows of pictures and sounds among ``ids``, from batch row ``row`` on. Return
        ``ids`` with 0 in their places, and the bidirectional spans as index ranges of the sequence.
        ``start``: tokens of the sequence before ``ids``.
        """
        assert self.media is not None
        self.media[row : row + len(ids), 0] = 0.0
        if not self._cache.has_media(ids):
            return ids, []
        registry = self._cache.media
        plain = list(ids)
        for begin, end, entry, which in registry.runs_in(ids):
            assert entry.rows is not None
            rows = entry.rows[which : which + end - begin]
            at = self.media[row + begin : row + end]
            at[:, 0] = 1.0
            at[:, MEDIA_HEAD : MEDIA_HEAD + rows.shape[1]] = rows
            plain[begin:end] = [0] * (end - begin)
        return plain, registry.spans_in(ids, start)

    def _write_rotations(self, seq: Sequence, ids: Seq[int], row: int, start: int) -> None:
        """Write the cosines and sines of a part, ``ids`` in batch rows from ``row`` on, whose
        positions differ from its indices: it has pictures, or comes after some. ``start``: tokens
        of the sequence before ``ids``.
        """
        end = row + len(ids)
        if not self._cache.has_media(ids):
            first = start + (seq.shifts[-1][1] if seq.shifts else 0)
            for table, rope in self._ropes:
                rope[row:end] = table.table_up_to(first + len(ids))[first : first + len(ids)]
            return
        where = self._cache.media.positions(seq.shifts, ids, start)
        most = int(where.max()) + 1
        for (table, rope), components in zip(self._ropes, self._components, strict=True):
            rows = table.table_up_to(most)
            rope[row:end] = rows[where[0]]
            for component in (1, 2):
                pairs = np.flatnonzero(components == component)
                if len(pairs):
                    rope[row:end, :, pairs] = rows[where[component]][:, :, pairs]


class _Loras:
    """Writes the adapter records of a batch: groups of rows, and their scales. Rows without
    adapters get no record. A row's scales begin with those of the adapters within the model
    (Granite Switch), of which at most one is not 0.
    """

    def __init__(
        self,
        block: memoryview,
        records: int,
        scales: int,
        inputs: Mapping[str, Input],
        control_tokens: ControlTokens | None,
    ) -> None:
        self._block = block
        self._records = records
        self._scales = scales
        self._floats = block.cast("f")
        self._n_scales = inputs["lora_scales"].shape[1]
        self._control_tokens = control_tokens
        self._n_within = control_tokens.n if control_tokens else 0

    def lay_out(self, parts: Seq[BatchItem], starts: Seq[int]) -> None:
        """Write the records of a batch. ``starts``: the tokens that each part's sequence had before
        it.
        """
        row = 0
        at = self._records
        scales = self._scales
        for (seq, ids, *_), start in zip(parts, starts, strict=True):
            n = len(ids)
            runs: Iterable[tuple[int, int]] = ((start + n, 0),)
            if seq.marks and self._control_tokens is not None:
                runs = self._control_tokens.runs(seq.marks, start, start + n)
            first = row
            for stop, adapter in runs:
                end = row + stop - start
                if seq.lora or adapter:
                    self._write_scales(scales // 4, seq.lora, adapter)
                    for token in range(first, end, LORA_ROWS):
                        n_rows = min(LORA_ROWS, end - token)
                        LORA_RECORD.pack_into(self._block, at, token, n_rows, scales - at)
                        at += LORA_RECORD.size
                    scales += 4 * self._n_scales
                first = end
            row += n
        count = (at - self._records) // LORA_RECORD.size
        COUNT.pack_into(self._block, run_offset("n_loras"), count)

    def _write_scales(self, first: int, lora: Lora, adapter: int) -> None:
        """Write the scales of a group of rows from f32 index ``first`` on: 1 for ``adapter``, the
        number of an adapter within the model (0: none), then the scales of ``lora``.
        """
        for i in range(self._n_scales):
            self._floats[first + i] = 0.0
        if adapter:
            self._floats[first + adapter - 1] = 1.0
        for which, scale in lora:
            self._floats[first + self._n_within + which] = scale


class _Pool:
    """Writes the inputs of one KV pool: the place of each token's key and value, and the attention
    items.

    A sequence with few tokens in the batch has items of one query token and at most SPLIT keys; one
    with more has items of ``tile`` query tokens and all their keys.
    """

    def __init__(
        self,
        block: memoryview,
        words: memoryview,
        index: int,
        offsets: dict[str, int],
        plan: Plan,
        pool: Pool,
        *,
        spans: bool,
    ) -> None:
        self._bytes = block
        self._has_spans = spans
        self._words = words
        self.slots = offsets[numbered("kv_indices", index)] // 8
        self._items = offsets[numbered("attn_items", index)]
        self._few_items = offsets[numbered("attn_few", index)]
        self._merges = offsets[numbered("attn_merges", index)]
        self.counts = run_offset(numbered("n_attn_items", index)) // 8
        self._tile = plan.query_tile
        self._few = plan.few_tokens
        (n_items,) = plan.inputs[numbered("attn_few", index)].shape
        self._max_partials = n_items - plan.n_tokens
        self._window = pool.window
        self._chunk = pool.chunk
        self._causal = pool.causal
        self._lent = pool.is_borrowed
        self.n_items = self.n_few = self.n_merges = self.n_partials = 0

    def add(
        self,
        pages: array[int],
        table: int,
        token: int,
        start: int,
        n: int,
        spans: list[tuple[int, int]],
    ) -> None:
        """Add ``n`` tokens of one sequence, from position ``start`` on; they are the batch's rows
        from ``token`` on. ``pages``: the sequence's pages, which the block has at byte ``table``;
        ``spans``: ranges of positions whose tokens attend to each other in both directions.
        """
        if not self._has_spans:
            spans = []
        for position in range(start, start + n) if not self._lent else ():
            page = pages[position // PAGE]
            self._words[self.slots + token - start + position] = page * PAGE + position % PAGE
        if n <= self._few:
            self._add_few(table, token, start, n, spans)
            return
        end = start + n
        tile = self._tile
        window = self._window
        causal = self._causal
        block = self._bytes
        at = self._items + self.n_items * ITEM_RECORD.size
        chunk = self._chunk
        position = start
        while position < end:
            last = min(position + tile, end)
            begin = max(0, position - window + 1) if window else 0
            if chunk:  # no tile has queries of two chunks
                begin = position // chunk * chunk
                last = min(last, begin + chunk)
            sees = 0
            for first, stop in spans:  # no tile has queries inside and outside of a span
                if first <= position < stop:
                    last = min(last, stop)
                    sees = min(stop, end) - 1
                elif position < first:
                    last = min(last, first)
            ahead = min(end, last + window - 1) if window else end
            row = token - start + position
            seen = max(last, sees + 1) if causal else ahead
            seen = start if self._lent else seen
            ITEM_RECORD.pack_into(
                block, at, row, last - position, position, begin, seen, table - at, -1, sees
            )
            at = at + ITEM_RECORD.size
            position = last
        self.n_items = (at - self._items) // ITEM_RECORD.size

    def add_encoded(self, table: int, token: int, n: int, n_keys: int) -> None:
        """Add ``n`` tokens, the batch's rows from ``token`` on, that all attend to the ``n_keys``
        rows of an encoder. ``table``: byte of the block at which the list of their pages begins.
        """
        if n <= self._few:  # as the last of these rows, which see all
            self._add_few(table, token, n_keys - n, n, [])
            return
        tile = self._tile
        block = self._bytes
        for row in range(token, token + n, tile):
            at = self._items + self.n_items * ITEM_RECORD.size
            last = min(row + tile, token + n)
            ITEM_RECORD.pack_into(block, at, row, last - row, 0, 0, n_keys, table - at, -1, 0)
            self.n_items += 1

    def _add_few(
        self, table: int, token: int, start: int, n: int, spans: list[tuple[int, int]]
    ) -> None:
        """Add items of one query token each, whose keys are split at multiples of SPLIT; for a
        token with several splits, add a merge of their results. Arguments as in ``add``.
        """
        end = start + n
        window = self._window
        causal = self._causal
        block = self._bytes
        at = self._few_items + self.n_few * ITEM_RECORD.size
        chunk = self._chunk
        for position in range(start, end):
            begin = max(0, position - window + 1) if window else 0
            begin = position // chunk * chunk if chunk else begin
            row = token - start + position
            sees = next((min(b, end) - 1 for a, b in spans if a <= position < b), 0)
            seen = max(position, sees) + 1 if causal else end
            seen = start if self._lent else seen
            partial = -1
            cut = begin // SPLIT * SPLIT
            n_cuts = -(-(seen - cut) // SPLIT)
            if n_cuts > 1 and self.n_partials + n_cuts > self._max_partials:
                n_cuts = 1  # no partials left: keep the remaining keys whole
                cut = seen - SPLIT
            elif n_cuts > 1:
                partial = self.n_partials
                to = self._merges + self.n_merges * MERGE_RECORD.size
                MERGE_RECORD.pack_into(block, to, row, 1, partial, n_cuts)
                self.n_merges += 1
                self.n_partials += n_cuts
            for _ in range(n_cuts):
                cut += SPLIT
                stop = min(cut, seen)
                ITEM_RECORD.pack_into(
                    block, at, row, 1, position, begin, stop, table - at, partial, sees
                )
                at += ITEM_RECORD.size
                begin = stop
                partial = partial + 1
        self.n_few = (at - self._few_items) // ITEM_RECORD.size
