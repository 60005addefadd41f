"""Chooser: from the logits of a step to the tokens that its sequences get."""

from __future__ import annotations

import logging
from collections.abc import Callable

from paceline.backends.base import F32
from paceline.engine.live import LiveRequests
from paceline.engine.masks import Masks
from paceline.engine.recorder import Recorder
from paceline.engine.sampler import Sampler, token_logprob
from paceline.engine.scheduler import Schedule, Scheduler
from paceline.engine.sequence import Sequence, State
from paceline.engine.speculation.verify import follow
from paceline.errors import ParameterError

log = logging.getLogger(__name__)


class Chooser:
    """Chooses and commits the tokens of a step: those of known rows, then those along drafts.

    All on the engine's thread, after the forward of a step for which `masks` were begun.
    """

    def __init__(
        self,
        *,
        sampler: Sampler,
        masks: Masks,
        requests: LiveRequests,
        scheduler: Scheduler,
        recorder: Recorder,
        clock: Callable[[], int],
    ) -> None:
        self.num_generated = 0  # tokens
        self._sampler = sampler
        self._masks = masks
        self._requests = requests
        self._scheduler = scheduler
        self._recorder = recorder
        self._clock = clock

    def choose(self, schedule: Schedule, seqs: list[Sequence], rows: list[int], logits: F32) -> int:
        """Give `seqs`, whose `rows` of logits were computed, their tokens.

        Returns when their first ones were chosen, in ns.
        """
        self._score(schedule, logits)
        for seq, n in schedule.chunks:
            seq.num_computed += n if seq.draft is None else n - len(seq.draft.tokens)
        if any(seq.siblings for seq in seqs):
            seqs, rows = self._fork(seqs, rows)
        masks, mask_rows = self._masks.wait(seqs, rows)
        if masks is not None:
            self._recorder.masked(self._clock())
        ids, details = self._sampler.sample(
            logits, rows, [seq.sampler for seq in seqs], masks, mask_rows
        )
        sampled_ns = self._clock()
        self._recorder.sampled(seqs, sampled_ns)
        following = follow(seqs, rows, ids) if schedule.num_drafted else []
        self._commit(seqs, ids, details, sampled_ns)
        self._verify(logits, following)
        return sampled_ns

    def _score(self, schedule: Schedule, logits: F32) -> None:
        """Keep the log-probabilities of the prompts that want them; their rows are the last."""
        wanted = [(seq, seq.unscored(n)) for seq, n in schedule.chunks if not seq.is_scored]
        row = len(logits) - sum(len(positions) for _, positions in wanted)
        for seq, positions in wanted:
            rows = list(range(row, row + len(positions)))
            row += len(positions)
            token_ids = [seq.token_ids[p + 1] for p in positions]
            num_top = seq.request.params.prompt_logprobs
            assert seq.scores is not None
            assert num_top is not None
            seq.scores += self._sampler.score(logits, rows, token_ids, num_top)

    def _verify(self, logits: F32, following: list[tuple[Sequence, int]]) -> None:
        """Choose the tokens after those that drafts foresaw, from the drafts' rows."""
        while following := [pair for pair in following if pair[0].state is State.RUNNING]:
            seqs, rows = [seq for seq, _ in following], [row for _, row in following]
            begin_ns = self._clock()
            self._masks.begin(seqs, rows)
            masks, mask_rows = self._masks.wait(seqs, rows)
            ids, details = self._sampler.sample(
                logits, rows, [seq.sampler for seq in seqs], masks, mask_rows
            )
            now_ns = self._clock()
            self._recorder.verified(seqs, begin_ns, now_ns)
            following = follow(seqs, rows, ids)
            self._commit(seqs, ids, details, now_ns)

    def _fork(self, seqs: list[Sequence], rows: list[int]) -> tuple[list[Sequence], list[int]]:
        """Return the sequences that sample in this step and their logit rows.

        The first token of every choice of a request comes from the row of its first choice.
        """
        forked: list[Sequence] = []
        forked_rows: list[int] = []
        for seq, row in zip(seqs, rows, strict=True):
            siblings, seq.siblings = seq.siblings, []
            for child in siblings:
                self._scheduler.fork(seq, child)
                self._recorder.fork(seq, child)
            forked += (seq, *siblings)
            forked_rows += [row] * (1 + len(siblings))
        return forked, forked_rows

    def _commit(
        self,
        seqs: list[Sequence],
        ids: list[int],
        details: list[tuple[float, int, list[tuple[int, float]]] | None],
        now_ns: int,
    ) -> None:
        for seq, token_id, detail in zip(seqs, ids, details, strict=True):
            if seq.state is State.FINISHED:  # its sink failed on another choice
                continue
            if token_id < 0:
                self._requests.fail_to_choose(seq, token_id)
                continue
            if seq.request.params.max_tokens == 0:
                seq.finish_reason = "length"
                self._requests.end(seq)
                continue
            try:
                text = seq.append_token(token_id, now_ns)
            except ParameterError as error:  # the request asks for more than can be done
                log.info("request %s: %s", seq.request.id, error)
                self._requests.fail(seq, str(error), error.param)
                continue
            except Exception as error:
                log.exception("request %s: token %d failed", seq.request.id, token_id)
                self._requests.fail(seq, f"token {token_id} failed: {error}")
                continue
            self.num_generated += 1
            if text and not seq.first_text_ns:
                seq.first_text_ns = self._clock()
                self._recorder.first_text(seq, seq.first_text_ns)
            logprobs = () if detail is None else (token_logprob(token_id, detail),)
            self._requests.deliver(seq, token_id, text, logprobs)
