"""LiveRequests: the requests that have unfinished choices; who hears of them, and how they end."""

from __future__ import annotations

import logging
from collections.abc import Callable

from msgspec import Struct

from paceline.engine.masks import Masks
from paceline.engine.recorder import Recorder
from paceline.engine.sampler import NONE_ALLOWED, describe_failure, forbidding_param
from paceline.engine.sequence import Sequence, State
from paceline.types import Delta, FinishReason, Request, TokenLogprob

log = logging.getLogger(__name__)
Sink = Callable[[Delta], None]


class Live(Struct):
    """A request that has unfinished choices."""

    request: Request
    sink: Sink
    sequences: list[Sequence]


class LiveRequests:
    """Sends the deltas of live requests and ends their choices. All on the engine's thread.

    `remove` takes a choice that ends out of the schedule; `on_gone` hears the id of a request of
    which nothing is left. A sink that raises ends its request.
    """

    def __init__(
        self,
        *,
        recorder: Recorder,
        masks: Masks,
        clock: Callable[[], int],
        remove: Callable[[Sequence], None],
        on_gone: Callable[[str], None],
    ) -> None:
        self._recorder = recorder
        self._masks = masks
        self._clock = clock
        self._remove = remove
        self._on_gone = on_gone
        self._live: dict[str, Live] = {}

    def add(self, live: Live) -> None:
        self._live[live.request.id] = live

    def get(self, request_id: str) -> Live | None:
        return self._live.get(request_id)

    def sequences(self) -> list[Sequence]:
        return [seq for live in self._live.values() for seq in live.sequences]

    def deliver(
        self, seq: Sequence, token_id: int, text: str, logprobs: tuple[TokenLogprob, ...]
    ) -> None:
        """Tell of the token that `seq` has just got, and of its end if that was one."""
        if seq.finish_reason is not None:
            self._end(seq, text=text, token_ids=(token_id,), logprobs=logprobs)
            return
        delta = Delta(
            request_id=seq.request.id,
            index=seq.index,
            text=text,
            token_ids=(token_id,),
            logprobs=logprobs,
            prompt_logprobs=seq.take_scores(),
        )
        self._send(self._live[seq.request.id], delta)

    def end(self, seq: Sequence) -> None:
        """Tell of the end of a choice of no tokens. Precondition: `finish_reason` is set."""
        self._end(seq)

    def fail_to_choose(self, seq: Sequence, token_id: int) -> None:
        """End a sequence for which the sampler had no token."""
        param = None
        if token_id == NONE_ALLOWED:
            is_ours = seq.grammar is not None and self._masks.is_dead_end(seq.grammar)
            param = None if is_ours else forbidding_param(seq.request.params)
        message = describe_failure(token_id)
        log.log(
            logging.ERROR if param is None else logging.INFO, "request %s: %s",
            seq.request.id, message,
        )  # fmt: skip
        self._finish((seq, *seq.siblings), "error", message, param)

    def fail(self, seq: Sequence, message: str, param: str | None = None) -> None:
        """End a sequence, and the siblings that wait for it, with an error.

        `param` is the parameter that asked for it, None if it is not the request's doing.
        """
        self._finish((seq, *seq.siblings), "error", message, param)

    def fail_all(self, message: str) -> None:
        for live in list(self._live.values()):
            self._finish(tuple(live.sequences), "error", message)

    def abort(self, request_id: str) -> None:
        live = self._live.get(request_id)
        if live is not None:
            self._finish(tuple(live.sequences), "abort")

    def abort_all(self) -> None:
        for request_id in list(self._live):
            self.abort(request_id)

    def _finish(
        self,
        seqs: tuple[Sequence, ...],
        reason: FinishReason,
        message: str | None = None,
        param: str | None = None,
    ) -> None:
        for seq in seqs:
            if seq.state is not State.FINISHED:
                seq.finish_reason, seq.stop_reason = reason, None
                self._end(seq, error=message, error_param=param)

    def _end(
        self,
        seq: Sequence,
        *,
        text: str = "",
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        error: str | None = None,
        error_param: str | None = None,
    ) -> None:
        """Free what a choice holds, then tell its sink. Precondition: `finish_reason` is set."""
        live = self._live[seq.request.id]
        self._remove(seq)
        live.sequences.remove(seq)
        if not live.sequences:
            self._forget(live)
        now_ns = self._clock()
        self._recorder.close(seq, now_ns)
        delta = Delta(
            request_id=seq.request.id,
            index=seq.index,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=() if error is not None else seq.take_scores(),
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
            error=error,
            error_param=error_param,
            usage=seq.usage(),
            timings=seq.timings(now_ns),
            ledger=seq.ledger,
        )
        self._send(live, delta)

    def _send(self, live: Live, delta: Delta) -> None:
        try:
            live.sink(delta)
        except Exception:
            log.exception("request %s: its sink failed, the request ends", live.request.id)
            for seq in live.sequences:
                self._remove(seq)
            live.sequences.clear()
            self._forget(live)

    def _forget(self, live: Live) -> None:
        if self._live.pop(live.request.id, None) is not None:
            self._on_gone(live.request.id)
