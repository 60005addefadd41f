"""Engine: the step loop. Requests go in by `submit`, deltas come out through their sinks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Container
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from paceline.backends.base import Backend
from paceline.config import EngineConfig
from paceline.engine.block_pool import BlockPool
from paceline.engine.checks import check_books, check_grammar, check_ids, check_length, check_pin
from paceline.engine.choices import ChoiceMaker, Tokenizer
from paceline.engine.chooser import Chooser
from paceline.engine.known_costs import KnownCosts
from paceline.engine.live import Live, LiveRequests, Sink
from paceline.engine.masks import Masks
from paceline.engine.pins import Unpin
from paceline.engine.prefix_cache import open_cache
from paceline.engine.recorder import NoRecorder, Recorder
from paceline.engine.sampler import Sampler
from paceline.engine.scheduler import Schedule, Scheduler
from paceline.engine.sequence import Sequence
from paceline.engine.speculation.base import Pace, Proposer
from paceline.engine.speculation.verify import root_rows
from paceline.engine.stats import EngineStats, StepStats
from paceline.engine.step import StepBuilder, step_limits
from paceline.errors import PacelineError, ParameterError
from paceline.policies.base import load_policy
from paceline.types import Request

if TYPE_CHECKING:
    from paceline.engine.speculation.forced import Forcing
    from paceline.engine.speculation.rows import DraftRows
    from paceline.engine.speculation.speculator import Speculator

log = logging.getLogger(__name__)
_NO_COSTS = KnownCosts()


class Engine:
    """Runs requests on a loaded backend.

    `submit`, `abort` and `stats` may be called from any thread. Everything else happens on one
    thread: the engine's own between `start` and `stop`, or the caller of `step`. An exception in
    a step fails the sequences of that step only. The engine's own thread enters `turns` around
    each step.
    """

    def __init__(
        self,
        *,
        backend: Backend,
        tokenizer: Tokenizer,
        config: EngineConfig,
        max_model_len: int,
        num_blocks: int,
        vocab_size: int,
        eos_ids: tuple[int, ...],
        recorder: Recorder | None = None,
        proposer: Proposer | None = None,
        pace: Pace | None = None,
        costs: KnownCosts = _NO_COSTS,
        clock: Callable[[], int] = time.monotonic_ns,
        identity: str = "",
        turns: AbstractContextManager[int] | None = None,
    ) -> None:
        self.last_step = StepStats()
        self.max_model_len = max_model_len
        self._backend = backend
        self._config = config
        self._clock = clock
        self._recorder = recorder or NoRecorder()
        self._num_pool_tokens = num_blocks * config.block_size
        self._vocab_size = min(vocab_size, tokenizer.vocab_size)
        self._num_model_ids = vocab_size
        known_eos_ids = frozenset(i for i in eos_ids if 0 <= i < self._vocab_size)
        self._pool = BlockPool(num_blocks)
        self._cache = open_cache(config, self._pool, backend, identity=identity, clock=clock)
        self._scheduler = Scheduler(
            policy=load_policy(config.policy),
            pool=self._pool,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_tokens=config.max_batched_tokens,
            cache=self._cache,
        )
        for num_tokens, seconds in costs.prefill:
            self._scheduler.policy.observe(num_tokens, seconds)
        limits = step_limits(config, max_model_len, num_blocks)
        self._builder = StepBuilder(limits, config.block_size)
        sampler = Sampler(self._vocab_size, sorted(known_eos_ids), tokenizer)
        self._masks = Masks(vocab_size=self._vocab_size, max_rows=limits.max_logit_rows)
        self._maker = ChoiceMaker(
            tokenizer=tokenizer,
            sampler=sampler,
            eos_ids=known_eos_ids,
            seed=config.seed,
            max_len=min(max_model_len, self._num_pool_tokens),
        )
        self._is_drafting = True
        self._speculator: Speculator | None = None
        if proposer is not None:
            from paceline.engine.speculation.speculator import create_speculator

            self._speculator = create_speculator(
                proposer, pace, self._draft_rows(), clock, costs.verify
            )
        self._forcing: Forcing | None = None  # from the first structure on
        self._requests = LiveRequests(
            recorder=self._recorder,
            masks=self._masks,
            clock=clock,
            remove=self._remove,
            on_gone=self._free_id,
        )
        self._chooser = Chooser(
            sampler=sampler,
            masks=self._masks,
            requests=self._requests,
            scheduler=self._scheduler,
            recorder=self._recorder,
            clock=clock,
        )
        self._turns = nullcontext(0) if turns is None else turns
        self._turn_ns = 0  # how long the turn of the step was waited for
        self._num_steps = 0
        self._wakeup = threading.Condition()  # guards all below
        self._num_requests = self._num_sequences = 0
        self._inbox: list[Live | Unpin | str] = []  # submissions, pins to drop, ids to abort
        self._ids: set[str] = set()
        self._is_stopping = False
        self._thread: threading.Thread | None = None

    def check(self, request: Request) -> None:
        """Raise ParameterError or PromptTooLongError if the engine cannot run `request`."""
        params = request.params
        check_grammar(request)
        check_pin(request, self._cache)
        check_length(
            request, max_model_len=self.max_model_len, num_pool_tokens=self._num_pool_tokens
        )
        # A token of the head's padding has no text and no log-probability.
        num_ids = self._num_model_ids if params.prompt_logprobs is None else self._vocab_size
        check_ids(request.prompt_token_ids, param="prompt", num_ids=num_ids)
        check_ids(params.logit_bias, param="logit_bias", num_ids=self._vocab_size)
        check_ids(params.stop_token_ids, param="stop_token_ids", num_ids=self._vocab_size)

    def submit(self, request: Request, sink: Sink) -> None:
        """Queue `request`; `sink` gets its deltas on the engine's thread.

        Raises what `check` raises. A sink that raises ends its request.
        """
        self.check(request)
        with self._wakeup:
            self._require_open()
            if request.id in self._ids:
                raise ParameterError(
                    f"a request with id {request.id!r} is running: choose another id", param="id"
                )
            self._ids.add(request.id)
            self._num_requests += 1
            request_number, first_number = self._num_requests, self._num_sequences
            self._num_sequences += request.params.n
        try:
            sequences = self._maker.choices(
                request,
                request_number=request_number,
                first_number=first_number,
                arrival_ns=request.arrival_ns or self._clock(),
            )
            # One for all: until the prompt is computed the choices have the same time.
            ledger = self._recorder.open(sequences[0].arrival_ns, self._clock())
            for seq in sequences:
                seq.ledger = ledger
            with self._wakeup:
                self._require_open()
                self._inbox.append(Live(request, sink, sequences))
                self._wakeup.notify()
        except BaseException:
            self._ids.discard(request.id)
            raise

    def _require_open(self) -> None:
        if self._is_stopping:
            raise PacelineError("the engine has stopped: start another one")

    def abort(self, request_id: str) -> None:
        """End all choices of a request before the next step; unknown and ended ids are ignored."""
        with self._wakeup:
            self._inbox.append(request_id)
            self._wakeup.notify()

    def pins(self) -> dict[str, int]:
        """Return how many prompt tokens each pin holds."""
        return {} if self._cache is None else self._cache.pins.tokens()

    def weigh_pin(
        self, token_ids: Seq[int], cache_salt: str, names: Container[str]
    ) -> tuple[int, int]:
        """Return the tokens that the pins `names` hold, and what one of a prompt would add."""
        if self._cache is None:
            return 0, 0
        return self._cache.weigh_pin(token_ids, cache_salt, names)

    def unpin(self, name: str) -> None:
        """Let a pin go before the next step; unknown names are ignored."""
        with self._wakeup:
            self._inbox.append(Unpin(name))
            self._wakeup.notify()

    def running(self, request_id: str) -> list[Sequence]:
        """Return the choices of a request that have not ended, to be read and not touched.

        The engine goes on with them meanwhile; one that ends in this moment may be missing.
        """
        with self._wakeup:
            queued = [item for item in self._inbox if isinstance(item, Live)]
        live = next((item for item in queued if item.request.id == request_id), None)
        live = live or self._requests.get(request_id)
        return [] if live is None else list(live.sequences)

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting) + len(self._inbox),
            num_free_blocks=self._pool.num_free,
            num_live_blocks=self._pool.num_live,
            num_cached_blocks=self._pool.num_cached,
            num_blocks=self._pool.num_blocks,
            num_preemptions=self._scheduler.num_preemptions,
            num_steps=self._num_steps,
            num_generated_tokens=self._chooser.num_generated,
            num_forced_tokens=0 if self._forcing is None else self._forcing.num_tokens,
            speculation=None if self._speculator is None else self._speculator.stats,
            **({} if self._cache is None else self._cache.figures()),
        )

    def start(self) -> None:
        """Run the step loop on a thread of its own until `stop`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
            self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Abort what is unfinished, end the thread, free the weights and the KV cache.

        A running step is waited for; nothing is freed under one that outlasts the time. Idempotent.
        """
        with self._wakeup:
            self._is_stopping = True
            self._wakeup.notify()
        if self._thread is None:
            self._abort_all()
        else:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                log.warning("the engine's step did not end within %.1f s", timeout_s)
                return
        self._masks.close()
        if self._speculator is not None:
            self._speculator.close()
        if self._cache is not None:
            self._cache.close()
        self._backend.close()

    def step(self) -> bool:
        """Run one step; return False if there was nothing to run."""
        if self._turn_ns:
            self._recorder.turned(self._clock(), self._turn_ns)
        if self._inbox:
            self._read_inbox()
        start_ns = self._clock()
        schedule = self._scheduler.schedule(start_ns)
        schedule.turn_ns = self._turn_ns
        if not schedule.chunks:
            return False
        try:
            self._run(schedule)
        except Exception as error:
            log.exception("a step of %d sequences failed", len(schedule.chunks))
            for seq, _ in schedule.chunks:
                self._requests.fail(seq, f"the engine failed in this request's step: {error}")
        return True

    def limit_to(self, request_ids: Container[str] | None, *, drafts: bool) -> None:
        """From the next step on let only these requests move on, all if None, with drafts or not.

        The others keep their blocks and stand still. It is for the caller of `step` that compares
        two ways of running on one engine. Precondition: there are blocks for all.
        """
        self._scheduler.only, self._is_drafting = request_ids, drafts

    def check_integrity(self) -> None:
        """Raise EngineIntegrityError unless the books close. Call it between two steps."""
        check_books(
            self._scheduler,
            self._pool,
            self._requests.sequences(),
            block_size=self._config.block_size,
            max_num_seqs=self._config.max_num_seqs,
        )

    def _loop(self) -> None:
        while True:
            with self._wakeup:
                while not (self._inbox or self._scheduler.has_work or self._is_stopping):
                    self._wakeup.wait()
                if self._is_stopping:
                    break
            try:
                with self._turns as self._turn_ns:
                    self.step()
            except Exception as error:
                log.exception("the engine failed between steps")
                self._requests.fail_all(f"the engine failed: {error}")
        self._abort_all()

    def _read_inbox(self) -> None:
        with self._wakeup:
            inbox, self._inbox = self._inbox, []
        for item in inbox:
            if isinstance(item, str):
                self._requests.abort(item)
            elif isinstance(item, Live):
                self._requests.add(item)
                self._scheduler.add(item.sequences[0])
                if item.request.grammar is not None and self._forcing is None:
                    self._forcing = self._new_forcing()
            elif self._cache is not None:
                self._cache.pins.drop(item.name)

    def _draft_rows(self) -> DraftRows:
        from paceline.engine.speculation.rows import DraftRows

        return DraftRows(self._pool, self._config, self._backend.copy_slots)

    def _new_forcing(self) -> Forcing:
        from paceline.engine.speculation.forced import Forcing

        return Forcing(self._draft_rows(), self._scheduler.policy, self._clock)

    def _run(self, schedule: Schedule) -> None:
        clock, recorder = self._clock, self._recorder
        speculator = self._speculator if self._is_drafting else None
        forcing = self._forcing
        if forcing is not None:
            forcing.extend(schedule)
        if speculator is not None:
            speculator.extend(schedule)
        scheduled_ns = clock()
        if schedule.copy_src:
            self._backend.copy_blocks(schedule.copy_src, schedule.copy_dst)
        for blocks, data in schedule.writes:
            self._backend.write_blocks(blocks, data)
        step, seqs = self._builder.build(schedule.chunks)
        rows = root_rows(seqs) if schedule.num_drafted else list(range(len(seqs)))
        self._masks.begin(seqs, rows)
        built_ns = clock()
        output = self._backend.forward(step)
        forward_ns = clock()
        recorder.ran(
            schedule,
            scheduled_ns=scheduled_ns,
            built_ns=built_ns,
            work_ns=min(max(output.end_ns, built_ns), forward_ns) if output.end_ns else forward_ns,
            forward_ns=forward_ns,
        )
        sampled_ns = self._chooser.choose(schedule, seqs, rows, output.logits)
        if forcing is not None:
            forcing.settle()
        if speculator is not None:
            speculator.settle(schedule, (clock() - schedule.start_ns - schedule.draft_ns) / 1e9)
        end_ns = clock()
        recorder.committed(end_ns)
        self._num_steps += 1
        self._scheduler.observe(schedule.num_tokens, (forward_ns - built_ns) / 1e9)
        self.last_step = StepStats.of(
            schedule, scheduled_ns, built_ns, forward_ns, sampled_ns, end_ns
        )

    def _remove(self, seq: Sequence) -> None:
        self._scheduler.remove(seq)
        if self._speculator is not None:
            self._speculator.release(seq)

    def _free_id(self, request_id: str) -> None:
        with self._wakeup:
            self._ids.discard(request_id)

    def _abort_all(self) -> None:
        self._read_inbox()
        self._requests.abort_all()
