"""Costs: what steps cost and what they must, as far as a run and this machine tell."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from paceline.config import EngineConfig
from paceline.cpu import default_num_threads
from paceline.engine.known_costs import Points, known_points
from paceline.errors import ParameterError
from paceline.explain.causes import Finding
from paceline.explain.facts import ServerFacts, StepFacts
from paceline.measure.ceilings import Ceilings, MachineCeilings, find_ceilings
from paceline.measure.floors import ModelCosts, chunk_work, decode_work, floor_s, model_costs
from paceline.measure.step_table import StepTable, read_step_table

if TYPE_CHECKING:
    from paceline.weights.checkpoint import Checkpoint

_MANY = 256  # tokens of a step whose cost is nearly all theirs
_OFTEN = 3  # steps of a size: fewer say little of what it costs


class StepCosts(Struct, frozen=True, kw_only=True):
    """A step takes about `base_s`, `token_s` a token of a prompt and `row_s` a row that decodes.

    Its Python is included. With a table of the model on this machine, its costs times `scale`,
    and `python_s`, instead: lines through the steps that ran say little of steps of another size.
    Where guesses are checked a sequence that decodes has `rows_per_seq` rows.
    """

    base_s: float
    token_s: float
    row_s: float
    rows_per_seq: float = 1.0
    python_s: float = 0.0  # of a step: what is not its forward
    num_sizes: int = 0  # that ran often enough to tell what they cost
    table: StepTable | None = None
    scale: float = 1.0

    @property
    def known(self) -> Points:
        """What an engine on this machine knows of its steps before the first one."""
        return () if self.table is None else known_points(self.table).prefill

    @property
    def are_guesses(self) -> bool:
        """Whether steps of other sizes than ran are priced by a line through one or two points."""
        return self.table is None and self.num_sizes <= 2

    def seconds(self, num_decode: float, num_prefill: int, mean_keys: float | None = None) -> float:
        """Return the cost of a step: of so many sequences that decode, and tokens of prompts.

        `mean_keys` are those that a token attends to, None where the sequences have just begun.
        Only a table tells what they cost.
        """
        rows = num_decode * self.rows_per_seq
        if self.table is None:
            return self.base_s + num_prefill * self.token_s + rows * self.row_s
        return self.python_s + self.scale * table_seconds(self.table, rows, num_prefill, mean_keys)

    def as_long_as(self, steps: Sequence[StepFacts]) -> StepCosts:
        """Return the same costs, made dearer or cheaper alike so that all these steps take as long
        as they did: medians leave out the stalls of a busy machine, and who queues does not.
        """
        plain_s = sum(
            self.seconds(step.num_decode / self.rows_per_seq, step.num_prefill, step.mean_keys)
            for step in steps
        )
        if not plain_s:
            return self
        factor = sum(step.duration_s for step in steps) / plain_s
        return replace(
            self, base_s=factor * self.base_s, token_s=factor * self.token_s,
            row_s=factor * self.row_s, python_s=factor * self.python_s, scale=factor * self.scale,
        )  # fmt: skip


def table_seconds(
    table: StepTable, num_rows: float, num_prefill: int, mean_keys: float | None = None
) -> float:
    """Return what the table says of a step's forward.

    Rows that decode beside a prompt are computed as more tokens of it, and then need logits: such
    a step is bound by its multiply-adds, not by the weights that a step without a prompt reads.
    """
    if not num_prefill:
        context = 0.0 if mean_keys is None else mean_keys - 1
        return table.seconds(num_rows, context, kind="decode")
    num_tokens = num_rows + num_prefill
    context = 0.0 if mean_keys is None else mean_keys - _keys_within(table, num_tokens)
    tokens_s = max(table.seconds(num_tokens, context), table.seconds(1))
    if not num_rows:
        return tokens_s
    with_logits_s = table.seconds(num_rows + 1, kind="decode")
    return tokens_s + max(with_logits_s - table.seconds(num_rows + 1), 0.0)


def _keys_within(table: StepTable, num_tokens: float) -> float:
    """Return the keys among themselves that the table's tokens of one prompt attend to.

    Tokens of several prompts attend to fewer: their context counts as less than none.
    """
    largest = max(curve.points[-1][0] for curve in table.curves if curve.kind == "prefill")
    return (min(num_tokens, largest) + 1) / 2


def scaled_costs(table: StepTable, steps: Sequence[StepFacts]) -> StepCosts:
    """Return the table's costs, scaled by what the forwards that ran took beside it."""
    ratios = [
        step.forward_s / table_seconds(table, step.num_decode, step.num_prefill, step.mean_keys)
        for step in steps
    ]
    scale = statistics.median(ratios) if ratios else 1.0
    one_s, many_s = (scale * table.seconds(n) for n in (1, _MANY))
    token_s = max((many_s - one_s) / (_MANY - 1), 0.0)
    return StepCosts(
        base_s=max(one_s - token_s, 0.0), token_s=token_s, row_s=token_s,
        rows_per_seq=_rows_per_seq(steps), python_s=_python_s(steps), table=table, scale=scale,
    )  # fmt: skip


def _python_s(steps: Sequence[StepFacts]) -> float:
    spent = [max(step.duration_s - step.forward_s, 0.0) for step in steps]
    return statistics.median(spent) if spent else 0.0


def fit_steps(steps: Sequence[StepFacts]) -> StepCosts | None:
    """Return the plane through the steps that ran; None where they are all of one size.

    Through the medians of the sizes, so that a stall bends it little, by the least relative
    error: small steps, the ones whose base counts, are fitted as well as large ones. Rows that
    decode have a cost of their own where steps without a prompt have three sizes: between one row
    and two lies little but noise.
    """
    by_size: dict[tuple[int, int], list[StepFacts]] = defaultdict(list)
    for step in steps:
        by_size[step.num_decode.bit_length(), step.num_prefill.bit_length()].append(step)
    if len(by_size) < 2:
        return None
    rows, weights = [], []
    for size in by_size.values():
        decode = statistics.mean(step.num_decode for step in size)
        prefill = statistics.mean(step.num_prefill for step in size)
        seconds = statistics.median(step.duration_s for step in size)
        rows.append((1.0, prefill, decode))
        weights.append(math.sqrt(len(size)) / max(seconds, 1e-9))
    counts = np.array(rows) if sum(not p for _, p in by_size) > 2 else _as_tokens(rows)
    weight = np.array(weights)
    wanted = np.array([math.sqrt(len(size)) for size in by_size.values()])
    base_s, token_s, *row_s = _least_squares(counts * weight[:, None], wanted)
    return StepCosts(
        base_s=base_s, token_s=token_s, row_s=row_s[0] if row_s else token_s,
        rows_per_seq=_rows_per_seq(steps), python_s=min(_python_s(steps), base_s),
        num_sizes=sum(len(size) >= _OFTEN for size in by_size.values()),
    )  # fmt: skip


def _as_tokens(rows: Sequence[tuple[float, float, float]]) -> npt.NDArray[np.float64]:
    return np.array([(one, prefill + decode) for one, prefill, decode in rows])


def _least_squares(rows: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64]) -> list[float]:
    """Return the factors of the columns that fit best among those that are not negative.

    The best has some factors at zero and is the plain solution in the others, so trying all
    choices of three columns finds it.
    """
    num_columns = rows.shape[1]
    best, least = [0.0] * num_columns, math.inf
    for count in range(1, num_columns + 1):
        for columns in itertools.combinations(range(num_columns), count):
            found = np.linalg.lstsq(rows[:, columns], wanted, rcond=None)[0]
            error = float(np.sum((rows[:, columns] @ found - wanted) ** 2))
            if found.min() >= 0 and error < least * (1 - 1e-9):
                least, best = error, [0.0] * num_columns
                for column, factor in zip(columns, found, strict=True):
                    best[column] = float(factor)
    return best


def _rows_per_seq(steps: Sequence[StepFacts]) -> float:
    num_rows = sum(step.num_decode for step in steps)
    num_plain = num_rows - sum(step.num_guesses for step in steps)
    return num_rows / num_plain if num_plain else 1.0


class Machine(Struct, frozen=True, kw_only=True):
    """The machine under the server, where that is this one, and the model's needs."""

    ceilings: MachineCeilings
    costs: ModelCosts
    num_threads: int  # of the server, or of this machine
    table: StepTable | None  # where `paceline roofline` has measured it

    def at(self, num_threads: int) -> Ceilings | None:
        return self.ceilings.at(num_threads)

    def floor_ms(self, finding: Finding) -> float:
        """Return the least that the call of a percentile could take, alone on the machine."""
        ceilings = self.at(self.num_threads)
        assert ceilings is not None
        if finding.metric == "ttft":
            cached = round(finding.cached_tokens)
            computed = max(round(finding.prompt_tokens) - cached, 1)
            work = chunk_work(
                self.costs, num_seqs=1, num_tokens=computed, context=cached, num_logit_rows=1
            )
        else:
            work = decode_work(self.costs, num_streams=1, context=round(finding.context_tokens))
        return floor_s(work, ceilings) * 1e3


def this_machine_with(checkpoint: Checkpoint, server: ServerFacts | None) -> Machine:
    """Return the machine that this process runs on, with the needs of a local model.

    Raises ParameterError for another model than the one that the server has.
    """
    found = weight_bytes(checkpoint)
    if server is not None and found != server.weight_bytes:
        raise ParameterError(
            f"{checkpoint.path} has {found} bytes of weights, the server's {server.model} has "
            f"{server.weight_bytes}: name the same model"
        )
    usual = EngineConfig()
    kv_dtype = usual.kv_dtype if server is None else server.kv_dtype
    num_threads = default_num_threads()[0] if server is None else server.num_threads
    block_size = usual.block_size if server is None else server.block_size
    return Machine(
        ceilings=find_ceilings(num_threads),
        costs=model_costs(checkpoint, kv_dtype),
        num_threads=num_threads,
        table=read_step_table(
            checkpoint.path, num_threads=num_threads, kv_dtype=kv_dtype, block_size=block_size
        ),
    )


def weight_bytes(checkpoint: Checkpoint) -> int:
    return sum(tensor.num_bytes for tensor in checkpoint.tensors.values())
