"""Speculation against none: the same greedy texts on one engine, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field, structs

from paceline.bench.spec_prompts import PROMPTS
from paceline.engine.speculation.stats import SpecStats
from paceline.errors import ParameterError
from paceline.llm import new_request, stream
from paceline.types import SamplingParams

if TYPE_CHECKING:
    from paceline.engine.build import LoadedModel
    from paceline.measure.step_table import StepTable

_TURN = 8  # tokens of a sequence that one side decodes before it is the other's turn


class Run(Struct, frozen=True):
    """One batch: the seconds that it decoded, all prompts being read, and its tokens."""

    decode_s: float
    texts: tuple[tuple[int, ...], ...]
    num_steps: int
    context: int  # tokens before the middle of an answer, the mean over the batch


class Cell(Struct, eq=False):
    """What was measured of one workload at one batch size."""

    workload: str
    batch: int
    plain: list[Run] = field(default_factory=list)
    drafting: list[Run] = field(default_factory=list)
    num_drafts: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_expected: float = 0.0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    draft_s: float = 0.0
    steps: dict[str, int] = field(default_factory=dict)


def measure(
    loaded: LoadedModel,
    *,
    workloads: Sequence[str],
    batches: Sequence[int],
    num_tokens: int,
    num_rounds: int,
    table: StepTable | None = None,
    on_round: Callable[[str, int, int], None] = lambda workload, batch, idx: None,
) -> list[dict[str, Any]]:
    """Return a row for each workload and batch size, measured in turns of a few tokens.

    Both sides run on the one engine of `loaded`, over the same weights, caches and buffers: two
    engines of a process differ in the pages that they got, by as much as what is measured here.
    Without a proposer both sides are plain, and the rows show what the comparison itself is worth.
    `table` is what plain steps cost; without it no speed-up is predicted.
    """
    _check_room(loaded, workloads, max(batches), num_tokens)
    for drafts in (False, True):
        Batch(loaded, ["Hello"], 8, salt=f"warm-up {drafts}", drafts=drafts).run()
    rows = []
    for workload in workloads:
        for batch in batches:
            cell = Cell(workload, batch)
            for idx in range(num_rounds):
                on_round(workload, batch, idx + 1)
                before = _totals(loaded)
                _run_round(loaded, cell, idx, num_tokens)
                _count(cell, before, _totals(loaded))
            rows.append(_row(cell, table))
    return rows


def _run_round(loaded: LoadedModel, cell: Cell, idx: int, num_tokens: int) -> None:
    """Run one round of `cell`; the two sides take turns at being first."""
    prompts = _prompts(cell.workload, idx, cell.batch)
    sides = {False: cell.plain, True: cell.drafting}
    order = sorted(sides, reverse=bool(idx % 2))
    # What was answered in an earlier round, or by the other side, must not be what it guesses from.
    salt = f"{cell.workload} {cell.batch} {idx}"
    pair = [
        Batch(loaded, prompts, num_tokens, salt=f"{salt} {drafts}", drafts=drafts)
        for drafts in order
    ]
    for drafts, run in zip(order, run_in_turns(pair, _TURN * cell.batch), strict=True):
        sides[drafts].append(run)


def _prompts(workload: str, idx: int, batch: int) -> list[str]:
    known = PROMPTS[workload]
    return [known[i % len(known)] for i in range(idx, idx + batch)]


def _check_room(loaded: LoadedModel, workloads: Sequence[str], batch: int, num_tokens: int) -> None:
    """Raise ParameterError unless the KV cache holds both sides at once: the one waits in it."""
    size = loaded.config.block_size
    longest = max(len(_encode(loaded, text)) for name in workloads for text in PROMPTS[name])
    num_blocks = 2 * batch * -(-(longest + num_tokens) // size)
    if num_blocks > loaded.kv.num_blocks:
        raise ParameterError(
            f"a batch of {batch}, with drafts and without, takes {num_blocks * size} tokens of KV "
            f"cache, and there are {loaded.kv.num_blocks * size}: raise --kv-memory, or ask for a "
            "smaller --batch or --output"
        )


class Batch:
    """Prompts that an engine answers together, a little at a time, and the seconds it decodes.

    While it goes on, whatever else the engine was given stands still.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        prompts: Sequence[str],
        num_tokens: int,
        *,
        salt: str = "",
        drafts: bool = True,
    ) -> None:
        params = SamplingParams(temperature=0, max_tokens=num_tokens)
        requests = [
            structs.replace(new_request(_encode(loaded, prompt), params), cache_salt=salt)
            for prompt in prompts
        ]
        self._engine = loaded.engine
        self._drafts = drafts
        self._num_steps = 0
        self._num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        self._texts: dict[str, list[int]] = {request.id: [] for request in requests}
        self._num_waiting = len(requests)  # for their first token
        self._deltas = stream(loaded.engine, requests)
        self._decode_s = 0.0
        self.num_tokens = 0
        self.is_done = False

    def advance(self, num_tokens: int) -> None:
        """Go on until there are `num_tokens` in all; at least to where all have a first one."""
        self._engine.limit_to(self._texts, drafts=self._drafts)
        first_step = self._engine.stats().num_steps
        last_s = time.perf_counter()
        while self._num_waiting or self.num_tokens < num_tokens:
            delta = next(self._deltas, None)
            if delta is None:
                self.is_done = True
                break
            now_s = time.perf_counter()
            if not self._num_waiting:
                self._decode_s += now_s - last_s
            last_s = now_s
            text = self._texts[delta.request_id]
            self._num_waiting -= bool(delta.token_ids and not text)
            text += delta.token_ids
            self.num_tokens += len(delta.token_ids)
        self._num_steps += self._engine.stats().num_steps - first_step
        self._engine.limit_to(None, drafts=True)

    def run(self) -> Run:
        """Go on to the end, and return what was measured."""
        while not self.is_done:
            self.advance(self.num_tokens + 1)
        num_known = self._num_prompt_tokens + self.num_tokens // 2
        return Run(
            self._decode_s,
            tuple(map(tuple, self._texts.values())),
            self._num_steps,
            num_known // len(self._texts),
        )


def run_in_turns(batches: Sequence[Batch], num_tokens: int) -> list[Run]:
    """Run several batches of the same prompts, whichever is behind by `num_tokens` at a time.

    A machine that others use changes its speed within seconds: what is compared is measured in the
    same ones.
    """
    going = list(batches)
    while going:
        behind = min(going, key=lambda batch: batch.num_tokens)
        behind.advance(behind.num_tokens + num_tokens)
        going = [batch for batch in going if not batch.is_done]
    return [batch.run() for batch in batches]


def _encode(loaded: LoadedModel, prompt: str) -> list[int]:
    if loaded.template is None:
        return loaded.encode_prompt(prompt)
    return loaded.encode_chat([{"role": "user", "content": prompt}])


def _totals(loaded: LoadedModel) -> SpecStats:
    stats = loaded.engine.stats().speculation
    return SpecStats.empty() if stats is None else stats.copy()


def _count(cell: Cell, before: SpecStats, after: SpecStats) -> None:
    cell.num_drafts += after.num_drafts - before.num_drafts
    cell.num_drafted += after.num_drafted - before.num_drafted
    cell.num_accepted += after.num_accepted - before.num_accepted
    cell.num_expected += after.num_expected - before.num_expected
    cell.draft_s += after.draft_s - before.draft_s
    for size, count in after.steps.items():
        cell.steps[size] = cell.steps.get(size, 0) + count - before.steps.get(size, 0)
    num_positions = len(after.drafted_at)
    for total, name in ((cell.drafted_at, "drafted_at"), (cell.accepted_at, "accepted_at")):
        total.extend([0] * (num_positions - len(total)))
        for i, (a, b) in enumerate(zip(getattr(before, name), getattr(after, name), strict=True)):
            total[i] += b - a


def predict(cell: Cell, table: StepTable) -> float | None:
    """Return the speed-up that the steps saved promise at the costs of `table`.

    Steps of rows without and with drafts are priced by the table, the plain run as so many steps
    without drafts as it had; guesses cost what they took. Neither the machine's mood nor what comes
    on top of the forward is in it. None where no step ran.
    """
    context = sum(run.context for run in cell.plain) // max(len(cell.plain), 1)
    drafting_s = cell.draft_s
    num_steps = num_rows = 0
    for size, count in cell.steps.items():
        num_plain, num_drafted = map(int, size.split("+"))
        drafting_s += count * _step_s(table, num_plain, num_drafted, context)
        num_steps += count
        num_rows += count * num_plain
    if not num_steps or not drafting_s:
        return None
    # Each guess that was right is a row of a plain step that the drafting engine did without.
    num_plain_steps = num_steps * (num_rows + cell.num_accepted) / num_rows
    return num_plain_steps * _step_s(table, num_rows / num_steps, 0, context) / drafting_s


def _step_s(table: StepTable, num_plain: float, num_drafted: int, context: int) -> float:
    """Return what a step of so many sequences with so many guesses in all costs."""
    rows_s = [table.seconds(num_plain + n, context, kind="verify") for n in (num_drafted, 0)]
    return table.seconds(num_plain, context, kind="decode") + rows_s[0] - rows_s[1]


def _row(cell: Cell, table: StepTable | None = None) -> dict[str, Any]:
    ratios = [a.decode_s / b.decode_s for a, b in zip(cell.plain, cell.drafting, strict=True)]
    return {
        "workload": cell.workload,
        "batch": cell.batch,
        "rounds": len(ratios),
        "is_same_text": all(
            a.texts == b.texts for a, b in zip(cell.plain, cell.drafting, strict=True)
        ),
        "plain_tokens_per_s": _rate(cell.plain),
        "tokens_per_s": _rate(cell.drafting),
        "speed_up": {
            "median": statistics.median(ratios), "low": min(ratios), "high": max(ratios),
        },
        "predicted_speed_up": None if table is None else predict(cell, table),
        "steps_saved": 1 - sum(r.num_steps for r in cell.drafting) / sum(
            r.num_steps for r in cell.plain
        ),
        "num_drafts": cell.num_drafts,
        "num_drafted": cell.num_drafted,
        "num_accepted": cell.num_accepted,
        "num_expected": round(cell.num_expected, 1),
        "mean_accepted_length": cell.num_accepted / cell.num_drafts if cell.num_drafts else None,
        "acceptance_by_position": [
            round(right / drafted, 3)
            for right, drafted in zip(cell.accepted_at, cell.drafted_at, strict=True)
            if drafted
        ],
    }  # fmt: skip


def _rate(runs: Sequence[Run]) -> float:
    """Return the median tokens a second, over the batch; the first tokens are not decoded."""
    return statistics.median(
        sum(len(text) - 1 for text in run.texts) / run.decode_s for run in runs
    )
