"""Full KV pages in files: a prefix cache that outlives the process and can be shared by several.

A file holds one page of one pool, as ``session_file.py`` writes tensors (a safetensors file of
one)::

    __metadata__   format, version, treadle; model, kv, page; chain, variant; sha256.NAME
    kv_global      U8 [1, bytes]

Its name is ``CHAIN-VARIANT.POOL.page``. CHAIN is a digest of all tokens up to the page's end,
computed from the previous page's digest and the page's tokens. VARIANT is a digest of all that
determines the bytes: the model, the type of keys and values, the layout, the kernels. No token is
in a file or in its name.

A file is valid if its header equals, byte for byte, the one that would be written for its data.
Anything else is a miss.
"""

from __future__ import annotations

import hashlib
import time
import weakref
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from treadle.errors import NoRoomError, UnsupportedError
from treadle.kernels.run_state import PAGE
from treadle.kvcache.disk.folder import N_CHAIN, N_VARIANT, Folder
from treadle.kvcache.disk.session_file import BYTES, SessionTensor, build_header, session_metadata
from treadle.kvcache.page_pool import FREED, Pool
from treadle.kvcache.prefix_tree import PageNode

if TYPE_CHECKING:
    from treadle.engine.engine import Engine
    from treadle.kvcache.cache import Sequence

FORMAT = "treadle page"
VERSION = "1"
AT_ONCE = 16  # pages per call: about as many tokens as one run
LAST_S = 30.0  # time to finish writing when the model is closed
DEEPER_NS = 1000  # time-of-use offset per page, so that later pages of a chain are removed first


class PageStore:
    """The page files of one engine's cache, in ``folder``, at most ``n_bytes`` in all.

    All methods except ``close`` are called under the engine's lock. Raises FileError for a folder
    that cannot be used, UnsupportedError for a model whose layers keep a state.
    """

    def __init__(self, engine: Engine, folder: Path, n_bytes: int) -> None:
        if engine.cache.states:
            what = "its layers keep a recurrent state, which page files cannot store"
            raise UnsupportedError(f"{engine.gguf.path}: {what}: leave out cache_dir (--cache-dir)")
        self.cache = engine.cache
        # A pool without layers only counts tokens.
        self._pools = [pool for pool in self.cache.pools if pool.layers]
        self._whole = [pool for pool in self._pools if not pool.window]
        self._windows = [pool for pool in self._pools if pool.window]
        more = {"variant": hashlib.sha256(_variant(engine).encode()).hexdigest()}
        self._about = session_metadata(engine, FORMAT, VERSION) | more
        # All metadata, the treadle version included, determines the name.
        known = "\0".join(f"{key}={value}" for key, value in sorted(self._about.items()))
        self._variant = hashlib.sha256(known.encode()).hexdigest()[:N_VARIANT]
        self._sizes = {
            pool: len(self._header(pool, "", b"")) + pool.cell_bytes for pool in self._pools
        }
        self.n_damaged = 0
        self.miss_reason = ""  # why the last ``fetch`` gave nothing although a file exists
        self.folder = Folder(folder, n_bytes)
        weakref.finalize(self, self.folder.close)  # also at interpreter exit
        self._names: frozenset[str] = frozenset()
        self._foreign: set[str] = set()

    # -- names and contents ---------------------------------------------------------------------

    def chain(self, node: PageNode) -> bytes:
        """Return the digest of all tokens up to the end of a node's page."""
        unnamed = []
        while not node.chain and node.parent is not None:
            unnamed.append(node)
            node = node.parent
        chain = node.chain
        for node in reversed(unnamed):
            chain = node.chain = self._link(chain, node.ids)
        return chain

    def _link(self, chain: bytes, ids: Seq[int]) -> bytes:
        """Return the digest of all tokens up to a page's end: of ``chain``, the digest up to its
        start, and of its tokens ``ids``.
        """
        return hashlib.sha256(chain + self.cache.media.portable(ids)).digest()

    def _name(self, chain: bytes, pool: Pool) -> str:
        return f"{chain.hex()[:N_CHAIN]}-{self._variant}.{pool.const.name}.page"

    def _header(self, pool: Pool, chain: str, data: bytes) -> bytes:
        """Return the header of a page file, with a digest of ``data``, the page's bytes; its length
        does not depend on these. ``chain``: the digest of all tokens up to the page's end, in
        hexadecimal.
        """
        size = pool.cell_bytes
        tensor = SessionTensor(BYTES, [1, size], size, lambda: [np.frombuffer(data, np.uint8)])
        return build_header(self._about | {"chain": f"{chain:64}"}, {pool.const.name: tensor})

    def _read(self, chain: bytes, pool: Pool) -> np.ndarray | None:
        """Return the bytes of a page of ``pool``, uint8 ``[cell_bytes]``, or None if there is no
        valid file. Removes a damaged one. ``chain``: the digest of all tokens up to the page's end.
        """
        name = self._name(chain, pool)
        raw = self.folder.read(name, self._sizes[pool])
        if raw is None:
            return None
        n_head = len(raw) - pool.cell_bytes
        data = raw[n_head:]
        if self._header(pool, chain.hex(), data) != raw[:n_head]:
            self.n_damaged += 1
            self.miss_reason = "damaged"
            self.folder.remove(name)
            return None
        return np.frombuffer(data, np.uint8)

    # -- writing -----------------------------------------------------------------------------------

    def queue_pages(self, node: PageNode, depth: int, began_ns: int, wait_s: float = 0.0) -> int:
        """Queue a node's pages for writing, except those that have files. ``depth``: the node's
        page index in a sequence begun at ``began_ns``; ``wait_s``: seconds to wait for a full
        queue. Return the bytes of these files.

        The pages are copied here and written by another thread. If the disk is too slow they are
        skipped; ``save`` tries again.
        """
        n_bytes = 0
        for pool in self._pools:
            page = node.pages[pool.index]
            chain = self.chain(node)
            name = self._name(chain, pool)
            if page == FREED or self.folder.has(name, self._sizes[pool]):
                continue
            data = pool.read(page).tobytes()
            n_bytes = n_bytes + self._sizes[pool]
            head = partial(self._header, pool, chain.hex())
            self.folder.enqueue(name, data, head, began_ns - depth * DEEPER_NS, wait_s=wait_s)
        return n_bytes

    def mark_used(self, seq: Sequence, start: int = 0) -> None:
        """Set the times of use of a sequence's page files, from page ``start`` on, to when it was
        last looked up.
        """
        if not start:
            seq.began_ns = time.time_ns()
        self.folder.touch(
            (self._name(self.chain(node), pool), seq.began_ns - depth * DEEPER_NS)
            for depth, node in enumerate(seq.nodes[start:], start)
            for pool in self._pools
            if seq.pages[pool.index][depth] != FREED
        )

    def save(self, timeout_s: float = LAST_S) -> None:
        """Queue the tree's pages that have no file, newest first, up to the size limit and for at
        most ``timeout_s`` seconds.
        """
        until = time.monotonic() + timeout_s
        now = time.time_ns()
        left = self.folder.bound
        roots = self.cache.tree.roots.values()
        waiting = [(node, 0) for root in roots for node in root.next.values()]
        while waiting and left > 0 and (seconds := until - time.monotonic()) > 0:
            node, depth = waiting.pop()
            left -= self.queue_pages(node, depth, now, wait_s=seconds)
            waiting += ((child, depth + 1) for child in node.next.values())

    def close(self) -> None:
        """Wait at most LAST_S seconds for queued files to be written, and end the thread.
        Idempotent.
        """
        self.folder.close(LAST_S)

    # -- reading -----------------------------------------------------------------------------------

    def fetch(self, seq: Sequence, ids: Seq[int]) -> int:
        """Extend ``seq`` by the pages of ``ids`` that files have, at most AT_ONCE; at least the
        last id is left to compute. Return the number of tokens added; if 0, ``miss_reason`` may
        have the reason.
        """
        cache = self.cache
        self.miss_reason = ""
        start, rest = divmod(len(seq.ids), PAGE)
        most = min(start + AT_ONCE, (len(ids) - 1) // PAGE)
        behind = seq.nodes[start - 1] if start else cache.tree.root_of(seq.lora)
        chains = [self.chain(behind)]
        for p in range(start, most):
            chains.append(self._link(chains[-1], ids[p * PAGE : (p + 1) * PAGE]))
        end, found = self._find(start, chains[1:])
        if end == start:
            return 0
        held = len(seq.ids)
        if rest:  # a partial page of its own is replaced by the whole page
            if cache.truncation_length(seq, start * PAGE) < start * PAGE:
                return 0
            cache.truncate(seq, start * PAGE)
        first = [pool.first_seen(end * PAGE) for pool in cache.pools]
        try:
            cache.extend(seq, ids[start * PAGE : end * PAGE], first)
        except NoRoomError:
            self.miss_reason = "room"
            return 0
        for (p, pool), data in found.items():
            if p >= first[pool.index]:
                pool.write(seq.pages[pool.index][p], data)
        cache.commit(seq)
        self.mark_used(seq, start)
        return end * PAGE - held

    def _find(
        self, start: int, chains: Seq[bytes]
    ) -> tuple[int, dict[tuple[int, Pool], np.ndarray]]:
        """Return the end of the longest usable run of pages from page ``start`` on, and the data of
        its pages by (page, pool). ``chains``: the digests of the pages. Pages before a window may
        be missing.
        """
        found: dict[tuple[int, Pool], np.ndarray] = {}

        def has(p: int, pool: Pool) -> bool:
            if (p, pool) not in found:
                data = self._read(chains[p - start], pool)
                if data is None:
                    return False
                found[p, pool] = data
            return True

        end = start
        while end < start + len(chains) and all(has(end, pool) for pool in self._whole):
            end += 1
        while end > start:
            lacking = (
                p
                for pool in self._windows
                for p in range(max(start, pool.first_seen(end * PAGE)), end)
                if not has(p, pool)
            )
            if (p := next(lacking, None)) is None:
                break
            end = p
        return end, {(p, pool): data for (p, pool), data in found.items() if p < end}

    def is_foreign(self, parent: PageNode, ids: Seq[int]) -> bool:
        """Return whether the folder had, at its last scan, a page of these tokens after ``parent``
        that another model, KV type or version of treadle wrote.
        """
        if self.folder.names is not self._names:
            self._names = self.folder.names
            own = f"-{self._variant}."
            self._foreign = {name[:N_CHAIN] for name in self._names if own not in name}
        return (
            bool(self._foreign)
            and self._link(self.chain(parent), ids).hex()[:N_CHAIN] in self._foreign
        )


def _variant(engine: Engine) -> str:
    return f"{engine.device.variant}\0deterministic={engine.deterministic}"
