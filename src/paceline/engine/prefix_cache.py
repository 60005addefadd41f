"""PrefixCache: which KV blocks hold the beginning of a sequence already.

A block is known by a hash of its tokens and of the block before it (chains.py). Worked example,
blocks of 4: after "abcdefgh" has run, "abcdefxy" takes block "abcd" as it is and copies the rows
"ef" out of the block "efgh".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable
from collections.abc import Sequence as Seq
from itertools import islice
from typing import TYPE_CHECKING

from msgspec import Struct

from paceline.config import EngineConfig
from paceline.engine.block_pool import BlockPool, EngineIntegrityError
from paceline.engine.chains import TOKEN_BYTES, Chain, digest, pack
from paceline.engine.pins import Pins

if TYPE_CHECKING:
    from paceline.backends.base import Backend
    from paceline.engine.kv_tier import U8, KVTier
    from paceline.engine.sequence import Sequence

# Blocks that a sequence ahead must be about to compute before another waits for them. Waiting
# costs a step of its own, which reads all weights: about as long as some ten tokens take.
MIN_COMING = 2
_MAX_SIBLINGS = 16  # blocks with one parent and one first token that are tried
_FLUSH_S = 3.0  # for the tier to take what is cached when the engine stops


class Match(Struct, frozen=True):
    """`num_tokens` tokens are known: of `blocks`, of stored blocks, and rows of the block `source`.

    `is_coming`: a sequence ahead is computing enough of what is missing to wait for it.
    """

    blocks: list[int]
    num_tokens: int
    num_stored: int = 0  # blocks to be restored from the tier
    source: int | None = None
    is_coming: bool = False
    lookup_ns: int = 0


class _Entry(Struct, frozen=True):
    """The tokens in a block. `hash` is None where they do not fill it."""

    parent: bytes
    packed: bytes
    hash: bytes | None


class PrefixCache:
    """Finds, publishes and forgets blocks by the tokens in them.

    - Only computed tokens are published: whole blocks as they fill up, the last block of a
      sequence, which is not full, when it lets go of it. A published block is never written again.
    - A sequence that shares more with one ahead of it than is computed yet waits for that one, as
      long as it runs and moves on from step to step.
    - `identity` names all that the bits of a block depend on besides its tokens. A tenant's salt
      starts other chains, so tenants find nothing of each other's.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        identity: str = "",
        tier: KVTier | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.num_queried = 0  # tokens looked up
        self.num_hit = 0  # and found
        self.pins = Pins(pool, block_size=block_size)
        self._pool = pool
        self._tier = tier
        self._block_size = block_size
        self._identity = digest(identity.encode())
        self._clock = clock
        self._entries: dict[int, _Entry] = {}
        self._by_hash: dict[bytes, int] = {}
        # (hash of the block before, first token) -> blocks, the latest entered or found last
        self._children: dict[tuple[bytes, bytes], dict[int, None]] = {}
        self._promises: dict[bytes, Sequence] = {}  # hash of a block -> who will compute it
        self._ahead: set[int] = set()  # numbers of those placed in this step that move on
        pool.on_evict = self._forget

    # ---- the steps of a sequence's life ----

    def begin_step(self, running: Iterable[Sequence]) -> None:
        """Publish what the last step computed."""
        self._ahead.clear()
        for seq in running:
            if seq.num_computed // self._block_size > self._chain(seq).num_published:
                self.publish(seq)

    def placed(self, seq: Sequence) -> None:
        """`seq` runs in this step: those behind it may wait for it while it moves on."""
        chain = self._chain(seq)
        if chain.num_promised > chain.num_published and seq.num_computed > chain.num_seen:
            self._ahead.add(seq.number)
        chain.num_seen = seq.num_computed

    def match(self, seq: Sequence, now_ns: int) -> Match:
        """Return what is known of the tokens of a waiting sequence, all but the last.

        The last is always computed, for its logits. `now_ns` is when the step's planning began.
        """
        begin_ns = self._clock()
        chain = self._chain(seq)
        size, limit = self._block_size, len(seq.token_ids) - 1
        blocks: list[int] = []
        for i in range(limit // size):
            block = self._by_hash.get(self._hash(seq, i))
            if block is None or self._entries[block].packed != chain.packed[i]:
                break
            blocks.append(block)
        is_coming = self._is_coming(seq, len(blocks))
        num_stored = 0
        if self._tier is not None and not is_coming:
            keys = [self._hash(seq, i) for i in range(len(blocks), limit // size)]
            num_stored = self._tier.num_worth_restoring(keys, size)
        num_blocks = len(blocks) + num_stored
        if is_coming or (num_stored and self._is_coming(seq, num_blocks)):
            chain.waits_since_ns = chain.waits_since_ns or now_ns
            return Match([], 0, is_coming=True)
        chain.ended_waits_ns = chain.waited_until(now_ns)
        chain.waits_since_ns = 0
        num_tokens = num_blocks * size
        rest = pack(seq.token_ids[num_tokens : min(num_tokens + size, limit)])
        source, num_rows = self._closest(chain.parent(num_blocks), rest)
        lookup_ns = self._clock() - begin_ns
        return Match(blocks, num_tokens + num_rows, num_stored, source, lookup_ns=lookup_ns)

    def restore(self, seq: Sequence, match: Match) -> tuple[Match, U8]:
        """Read the stored blocks of `match`, [number, bytes]; return the match that this leaves.

        They are written to the pool before the step runs, and published after it.
        """
        chain, tier = self._chain(seq), self._tier
        assert tier is not None
        begin_ns = self._clock()
        first, end = len(match.blocks), len(match.blocks) + match.num_stored
        data = tier.load(chain.hashes[first:end], chain.packed[first:end])
        chain.lookup_ns += self._clock() - begin_ns
        if len(data) == match.num_stored:
            return match, data
        num_tokens = (first + len(data)) * self._block_size
        return Match(match.blocks, num_tokens, len(data), lookup_ns=match.lookup_ns), data

    def admitted(self, seq: Sequence, match: Match) -> None:
        """`seq` runs now, with `match` in its table: promise the rest of its full blocks."""
        chain = self._chain(seq)
        chain.num_published = len(match.blocks)
        chain.num_promised = len(seq.token_ids) // self._block_size
        chain.num_seen = -1
        chain.lookup_ns += match.lookup_ns
        for i in range(chain.num_published, chain.num_promised):
            self._promises.setdefault(self._hash(seq, i), seq)
        if chain.num_found < 0:
            chain.num_found = len(match.blocks) + match.num_stored
        if seq.num_cached is None:
            seq.num_cached = min(match.num_tokens, seq.num_prompt)
            self.num_queried += seq.num_prompt
            self.num_hit += seq.num_cached

    def forked(self, parent: Sequence, child: Sequence) -> None:
        """`child` shares the table of `parent`, which has computed exactly its prompt."""
        child.chain = self._chain(parent).fork()

    def publish(self, seq: Sequence) -> None:
        """Enter the full blocks that `seq` has computed; of two equal blocks it keeps the first."""
        chain, table = self._chain(seq), seq.block_table
        for i in range(chain.num_published, seq.num_computed // self._block_size):
            key = self._hash(seq, i)
            if self._promises.get(key) is seq:
                del self._promises[key]
            known = self._by_hash.get(key)
            if known is None:
                self._enter(table[i], _Entry(chain.parent(i), chain.packed[i], key))
            elif known != table[i]:
                self._pool.share([known])
                self._pool.release([table[i]])
                table[i] = known
                seq.table_epoch += 1
            chain.num_published = i + 1

    def leaving(self, seq: Sequence) -> None:
        """`seq` is about to let go of its blocks: keep what it has computed, promise no more."""
        chain = self._chain(seq)
        if seq.finish_reason == "error":
            self._retract(seq)
        else:
            self.publish(seq)
            self._publish_tail(seq)
        if seq.request.pin and seq.finish_reason in ("stop", "length"):
            self.pins.hold(seq.request.pin, seq.block_table[: seq.num_prompt // self._block_size])
        for key in chain.hashes[chain.num_published : chain.num_promised]:
            if self._promises.get(key) is seq:
                del self._promises[key]
        chain.num_published = chain.num_promised = 0

    def _retract(self, seq: Sequence) -> None:
        """Forget what `seq`, which failed, has computed: it may be what made it fail.

        Of a failed step nobody knows what was written, and numbers that overflowed lie in the
        blocks of earlier steps, too. What a pin holds was part of an answer that went well.
        """
        chain, pinned = self._chain(seq), self.pins.blocks()
        for block in seq.block_table[chain.num_found : chain.num_published]:
            if block in self._entries and block not in pinned:
                self._drop(block)
                self._pool.unkeep(block)

    def _publish_tail(self, seq: Sequence) -> None:
        idx, num_rows = divmod(seq.num_computed, self._block_size)
        if not num_rows or self._pool.is_shared(seq.block_table[idx]):
            return
        parent = self._chain(seq).parent(idx)
        packed = pack(seq.token_ids[seq.num_computed - num_rows : seq.num_computed])
        if self._closest(parent, packed)[1] < num_rows:
            self._enter(seq.block_table[idx], _Entry(parent, packed, None))

    def weigh_pin(
        self, token_ids: Seq[int], cache_salt: str, names: Container[str] | None = None
    ) -> tuple[int, int]:
        """Return the tokens that the pins `names` hold, or all, and what one of a prompt would add.

        Whole blocks, each once however many hold it. May be called from any thread.
        """
        held, size = self.pins.blocks(names), self._block_size
        chain, num_blocks = self._new_chain(cache_salt), len(token_ids) // size
        num_known = 0
        while num_known < num_blocks:
            if self._by_hash.get(chain.hash(token_ids, num_known)) not in held:
                break
            num_known += 1
        return len(held) * size, (num_blocks - num_known) * size

    # ---- looking up ----

    def _chain(self, seq: Sequence) -> Chain:
        if seq.chain is None:
            seq.chain = self._new_chain(seq.request.cache_salt)
        return seq.chain

    def _new_chain(self, cache_salt: str) -> Chain:
        salt = cache_salt.encode(errors="surrogatepass")
        return Chain(digest(self._identity + salt), self._block_size)

    def _hash(self, seq: Sequence, block_idx: int) -> bytes:
        """Return the hash of a full block of `seq`, and of all before it."""
        return self._chain(seq).hash(seq.token_ids, block_idx)

    def _is_coming(self, seq: Sequence, num_known: int) -> bool:
        """Say whether the next MIN_COMING blocks of `seq` are about to be computed."""
        end = num_known + MIN_COMING
        if not self._ahead or end > len(seq.token_ids) // self._block_size:
            return False
        for i in range(num_known, end):
            other = self._promises.get(self._hash(seq, i))
            if other is None or other.number not in self._ahead:
                return False
        return True

    def _closest(self, parent: bytes, packed: bytes) -> tuple[int | None, int]:
        """Return the block after `parent` that begins most like `packed`, and the equal tokens.

        The latest that were entered or found are tried first.
        """
        best, best_rows = None, 0
        siblings = self._children.get((parent, packed[:TOKEN_BYTES]), {})
        for block in islice(reversed(siblings), _MAX_SIBLINGS):
            num_rows = _num_equal(self._entries[block].packed, packed)
            if num_rows > best_rows:
                best, best_rows = block, num_rows
        if best is not None:
            siblings[best] = siblings.pop(best)
        return best, best_rows

    # ---- the books ----

    def _enter(self, block: int, entry: _Entry) -> None:
        self._entries[block] = entry
        if entry.hash is not None:
            self._by_hash[entry.hash] = block
        key = (entry.parent, entry.packed[:TOKEN_BYTES])
        self._children.setdefault(key, {})[block] = None
        self._pool.keep(block)

    def _forget(self, block: int) -> None:
        entry = self._drop(block)
        if entry.hash is not None and self._tier is not None:
            self._tier.store(block, entry.hash, entry.packed)

    def _drop(self, block: int) -> _Entry:
        entry = self._entries.pop(block)
        if entry.hash is not None:
            del self._by_hash[entry.hash]
        key = (entry.parent, entry.packed[:TOKEN_BYTES])
        siblings = self._children[key]
        del siblings[block]
        if not siblings:
            del self._children[key]
        return entry

    def figures(self) -> dict[str, int]:
        """Return the counts that EngineStats has of the cache."""
        tier = self._tier
        return {
            "num_prefix_queried": self.num_queried,
            "num_prefix_hit": self.num_hit,
            "num_blocks_stored": 0 if tier is None else tier.num_stored,
            "num_blocks_restored": 0 if tier is None else tier.num_restored,
        }

    def observe(self, num_tokens: int, forward_s: float) -> None:
        """Learn what a step cost."""
        if self._tier is not None:
            self._tier.observe(num_tokens, forward_s)

    def close(self) -> None:
        """Let the tier keep what is cached: what was pinned, then the latest used. Idempotent."""
        tier = self._tier
        if tier is None or tier.is_closed:
            return
        self.pins.drop_all()  # nothing evicts what is pinned, so the tier has not got it yet
        deadline = time.monotonic() + _FLUSH_S
        for block in self._pool.latest_cached() if tier.is_lasting else ():
            entry, left_s = self._entries[block], deadline - time.monotonic()
            if entry.hash is not None and (
                left_s <= 0 or not tier.keep(block, entry.hash, entry.packed, wait_s=left_s)
            ):
                break
        tier.close(max(deadline - time.monotonic(), 0.1))

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Raise EngineIntegrityError unless entries, kept blocks and promises agree."""
        if set(self._entries) != self._pool.kept:
            raise EngineIntegrityError("the cache's entries are not the blocks that are kept")
        full = {block for block, entry in self._entries.items() if entry.hash is not None}
        if full != set(self._by_hash.values()) or len(full) != len(self._by_hash):
            raise EngineIntegrityError("a full block is not found by its hash")
        known = [block for siblings in self._children.values() for block in siblings]
        if sorted(known) != sorted(self._entries):
            raise EngineIntegrityError("a block is not found by the block before it")
        if not {seq.number for seq in self._promises.values()} <= {seq.number for seq in running}:
            raise EngineIntegrityError("a sequence that does not run has promised a block")
        for seq in running:
            num_full = seq.num_computed // self._block_size
            for block in self._entries.keys() & set(seq.block_table[num_full:]):
                raise EngineIntegrityError(f"sequence {seq.number} may write to block {block}")


def open_cache(
    config: EngineConfig,
    pool: BlockPool,
    backend: Backend,
    *,
    identity: str,
    clock: Callable[[], int],
) -> PrefixCache | None:
    """Return the cache that `config` asks for, with its tier, or None."""
    if not config.prefix_cache:
        return None
    tier = None
    if config.kv_tier is not None:
        from paceline.engine.kv_tier import open_tier

        tier = open_tier(config.kv_tier, backend)
    return PrefixCache(
        pool, block_size=config.block_size, identity=identity, tier=tier, clock=clock
    )


def _num_equal(a: bytes, b: bytes) -> int:
    """Return how many leading tokens are equal."""
    pairs = zip(memoryview(a).cast("i"), memoryview(b).cast("i"), strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)) // TOKEN_BYTES)
