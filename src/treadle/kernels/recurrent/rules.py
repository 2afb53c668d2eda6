"""Update rules of a state, for a token or a block of tokens: Mamba-2, and the gated delta rule."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import Ty, f32
from treadle.kernels.recurrent.scan import Scan, ScanBlock, ScanItem, Token
from treadle.kernels.spec import Frame


@dataclass(frozen=True)
class Mamba2(Scan):
    """Mamba-2 (Dao and Gu, 2024): ``s = decay s + key (dt value)^T``; out ``query s + d value``."""

    op: ClassVar[str] = "mamba2"

    @property
    def needs(self) -> set[str]:
        return self.args.required | {"d"}

    def skip(self, k: Builder, frame: Frame, here: ScanItem) -> Val:
        return k.load(frame.d + here.head * 4, f32)

    def _token(
        self, k: Builder, frame: Frame, here: ScanItem, ty: Ty, token: Token, out: Val
    ) -> None:
        columns = range(0, self.tile, ty.lanes)
        x = [k.load(token.value + 4 * j, ty) for j in columns]
        dt = k.splat(token.first, ty)
        seen = self._step(k, here, ty, token, [v * dt for v in x])
        d = k.splat(self.skip(k, frame, here), ty)
        for j, v, y in zip(columns, x, seen, strict=True):
            k.store(out + 4 * j, k.fma(v, d, y))

    def _block(self, k: Builder, isa: Isa, frame: Frame, here: ScanItem, block: ScanBlock) -> None:
        tokens = block.tokens
        ty = block.ty
        weights = self._among(k, isa, block, [token.query for token in tokens], 1)
        d = k.splat(self.skip(k, frame, here), ty)
        for at in range(0, self.tile, block.n * ty.lanes):
            columns = [4 * (at + j * ty.lanes) for j in range(block.n)]
            x = [[k.load(token.value + j, ty) for j in columns] for token in tokens]
            new = [
                [v * k.splat(token.first, ty) for v in vectors]
                for token, vectors in zip(tokens, x, strict=True)
            ]
            seen = self._times_state(k, here, block, at, [token.query for token in tokens])
            for t, out in enumerate(block.out):
                for j, (column, y) in enumerate(zip(columns, seen[t], strict=True)):
                    y = k.fma(x[t][j], d, y * k.splat(block.decays[t][0], ty))
                    for weight, vectors in zip(weights[t], new, strict=False):
                        y = k.fma(vectors[j], weight, y)
                    k.store(out + column, y)
            self._update_state(k, here, block, at, new)

    def _token_ref(self, s: np.ndarray, token: Token, d: Any) -> tuple[np.ndarray, np.ndarray]:
        new = (token.first * token.value)[:, None]
        s = s * token.decay[:, :, None] + token.key[:, :, None] * new
        skip = d[: self.n_head].astype(np.float64)[:, None] * token.value
        return s, np.einsum("hn,hnp->hp", token.query, s) + skip


@dataclass(frozen=True)
class Delta(Scan):
    """Gated delta rule (Yang and others, 2024): ``s = decay s + key (beta (value - key decay
    s))^T``; out ``query s``. Head h uses keys of group ``h % n_group``; if ``grouped``, adjacent
    heads share a group.
    """

    op: ClassVar[str] = "delta"
    grouped: bool = False

    def group_of(self, head: Any) -> Any:
        return super().group_of(head) if self.grouped else head % self.n_group

    def _token(
        self, k: Builder, frame: Frame, here: ScanItem, ty: Ty, token: Token, out: Val
    ) -> None:
        columns = range(0, self.tile, ty.lanes)
        known = [k.var(k.zero(ty)) for _ in columns]
        beta = k.splat(token.first, ty)
        keep = k.splat(token.decay, ty)
        source = here.source.v
        with k.loop(self.n_state) as n:
            row = source + n * here.pitch
            b = k.splat(k.load(token.key + n * 4, f32), ty)
            for j, y in zip(columns, known, strict=True):
                y.v = k.fma(k.load(row + 4 * j, ty), b, y.v)
        add = [
            (k.load(token.value + 4 * j, ty) - y.v * keep) * beta
            for j, y in zip(columns, known, strict=True)
        ]
        for j, sees in zip(columns, self._step(k, here, ty, token, add), strict=True):
            k.store(out + 4 * j, sees)

    def _block(self, k: Builder, isa: Isa, frame: Frame, here: ScanItem, block: ScanBlock) -> None:
        tokens = block.tokens
        ty = block.ty
        keys = [t.key for t in tokens]
        queries = [t.query for t in tokens]
        known_by = self._among(k, isa, block, keys, 0)
        seen_by = self._among(k, isa, block, queries, 1)
        for at in range(0, self.tile, block.n * ty.lanes):
            columns = [4 * (at + j * ty.lanes) for j in range(block.n)]
            both = self._times_state(k, here, block, at, [*keys, *queries])
            self._update_state(
                k, here, block, at, self._answer(k, block, columns, both, known_by, seen_by)
            )

    def _answer(
        self,
        k: Builder,
        block: ScanBlock,
        columns: list[int],
        both: list[list[Val]],
        known_by: list[list[Val]],
        seen_by: list[list[Val]],
    ) -> list[list[Val]]:
        """Store each token's outputs in the byte offsets ``columns``, and return each token's
        update of the state, ``[t][j]`` for token t and column vector j. ``both``: products of the
        keys, then of the queries, with the state before the block. ``known_by`` and ``seen_by``:
        weights of earlier updates for each token's key and query (``_among``). If ``block.decays``
        is empty, ``both`` includes the decays already.
        """
        known = both[: self.block]
        seen = both[self.block :]
        new: list[list[Val]] = []
        for t, token in enumerate(block.tokens):
            beta = k.splat(token.first, block.ty)
            keep = k.splat(block.decays[t][0], block.ty) if block.decays else None
            new.append([])
            for j, column in enumerate(columns):
                there = known[t][j]
                y = seen[t][j]
                value = k.load(token.value + column, block.ty)
                left = value - (there if keep is None else there * keep)
                y = y if keep is None else y * keep
                for weight, vectors in zip(known_by[t], new, strict=False):
                    left = left - vectors[j] * weight
                new[t].append(left * beta)
                for weight, vectors in zip(seen_by[t], new, strict=True):
                    y = k.fma(vectors[j], weight, y)
                k.store(block.out[t] + column, y)
        return new

    def _token_ref(self, s: np.ndarray, token: Token, d: Any) -> tuple[np.ndarray, np.ndarray]:
        s = s * token.decay[:, :, None]
        add = token.first * (token.value - np.einsum("hn,hnp->hp", token.key, s))
        s = s + token.key[:, :, None] * add[:, None]
        return s, np.einsum("hn,hnp->hp", token.query, s)
