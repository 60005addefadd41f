"""The native backend: lowers a plan and runs it in one call of the native program a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline import _native
from paceline.backends.base import F32, KVSpec, StepInput, StepLimits, StepOutput
from paceline.backends.evening import evening
from paceline.backends.reference import rope_table
from paceline.cpu import resolve_num_threads
from paceline.errors import BackendError
from paceline.plan.arena import Arena, assign_slots, root_id
from paceline.plan.passes import column_orders, lower
from paceline.plan.plan import Op, Plan, RopeTable, Value, sole_output
from paceline.weights.repack import PackedTensor, pack_all, warn_not_finite
from paceline.weights.tensor import QTensor, dequantize

LINE = 64  # bytes of a cache line: rows begin on one
ACTS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
INDICES = {"token": 0, "position": 1, "zero": 2}
# Constants that an op passes on to its kernel under their own name.
KERNEL_ATTRS = (
    "heads", "kv_heads", "head_dim", "layer", "window", "eps", "scale", "softcap",
    "is_causal",
)  # fmt: skip


class NativeBackend:
    """Runs plans on the CPU, `num_threads` wide (None: what affinity mask and cgroup quota allow).

    `isa` forces one kernel table. `cache_path` is a file that keeps the packed weights of the
    source that `fingerprint` identifies, so that the next start maps them. `activations` is what
    linears over quantised weights read: q8, or f32, exact and slower.
    """

    def __init__(
        self,
        num_threads: int | None = None,
        isa: str | None = None,
        cache_path: Path | None = None,
        fingerprint: str = "",
        activations: str = "q8",
    ) -> None:
        self.num_threads, self.num_threads_reason = resolve_num_threads(num_threads)
        self._isa = isa
        self._cache_path = cache_path
        self._fingerprint = fingerprint
        self._activations = activations
        self._program: Any = None

    @property
    def isa(self) -> str:
        """Name of the kernels that run."""
        return str(self._loaded().isa)

    def load(
        self, plan: Plan, weights: Mapping[str, QTensor], *, kv: KVSpec, limits: StepLimits
    ) -> None:
        self.close()
        formats = {name: weights[name].format for op in plan.ops for name in op.weights}
        orders = column_orders({name: weights[name] for name in formats})
        self.plan = lower(plan, formats, activations=self._activations, orders=orders)
        readers = [op for op in self.plan.ops if op.name in ("embed", "linear")]
        matrices = [name for op in readers for name in op.weights]
        packed = pack_all(
            weights,
            list(dict.fromkeys(matrices)),
            cache_path=self._cache_path,
            fingerprint=self._fingerprint,
            num_threads=self.num_threads,
        )
        try:
            self._program = _Builder(self.plan, weights, packed, kv, limits).build(
                self.num_threads, self._isa
            )
        except MemoryError as error:
            raise BackendError(
                f"no memory for {kv.num_blocks} KV blocks and the activations: lower --kv-memory"
            ) from error
        except ValueError as error:
            raise BackendError(f"the native backend cannot run this plan: {error}") from error

    def forward(self, step: StepInput) -> StepOutput:
        """Raises ValueError, before anything runs, for an array or index that does not fit."""
        program = self._loaded()
        logits = program.forward(
            step.tokens, step.positions, step.slots, step.seqs, step.block_tables,
            step.logit_rows, step.tree,
        )  # fmt: skip
        return StepOutput(logits, program.forward_end_ns)

    def copy_blocks(self, src: Sequence[int], dst: Sequence[int]) -> None:
        self._loaded().copy_blocks(list(src), list(dst))

    def copy_slots(self, src: Sequence[int], dst: Sequence[int]) -> None:
        self._loaded().copy_slots(list(src), list(dst))

    def read_blocks(self, blocks: Sequence[int]) -> npt.NDArray[np.uint8]:
        program = self._loaded()
        data = np.empty((len(blocks), program.block_bytes), np.uint8)
        program.read_blocks(list(blocks), data)
        return data

    def write_blocks(self, blocks: Sequence[int], data: npt.NDArray[np.uint8]) -> None:
        self._loaded().write_blocks(list(blocks), data)

    def set_profiling(self, on: bool) -> None:
        """Time every op from now on; costs about 50 ns an op."""
        self._loaded().set_profiling(on)

    def op_seconds(self) -> list[float]:
        """Seconds spent in each op of `plan`, in its order, while profiling was on."""
        return list(self._loaded().op_seconds())

    def profile(self) -> dict[str, float]:
        """The same, summed over each kind of op."""
        seconds: dict[str, float] = defaultdict(float)
        for op, spent in zip(self.plan.ops, self.op_seconds(), strict=True):
            seconds[op.name] += spent
        return dict(seconds)

    def close(self) -> None:
        """Free the KV cache, the activations and the threads; views of logits keep theirs alive."""
        self._program = None

    def _loaded(self) -> Any:
        if self._program is None:
            raise BackendError("the native backend has no plan: call load first")
        return self._program


def activation_bytes(
    plan: Plan, formats: Mapping[str, str], *, kv: KVSpec, limits: StepLimits
) -> int:
    """Return the bytes of the buffers that steps of `plan` share, for weights in `formats`."""
    builder = _Builder(lower(plan, formats), {}, {}, kv, limits)
    return sum(builder.slot_bytes)


class _Builder:
    """Puts a lowered plan into a native Program."""

    def __init__(
        self,
        plan: Plan,
        weights: Mapping[str, QTensor],
        packed: Mapping[str, PackedTensor],
        kv: KVSpec,
        limits: StepLimits,
    ) -> None:
        self._plan, self._weights, self._packed = plan, weights, packed
        self._kv, self._limits = kv, limits
        learned = [op.attrs["num_rows"] for op in plan.ops if op.attrs.get("index") == "position"]
        self._num_positions = min([limits.max_blocks_per_seq * kv.block_size, *learned])
        self._logits = sole_output(plan)
        self._arena: Arena = assign_slots(plan, self._num_bytes)
        self._roots = {op.out.id: op.out for op in plan.ops}
        self._vectors: dict[str, F32] = {}
        self._rope: dict[RopeTable, F32] = {}

    @property
    def slot_bytes(self) -> list[int]:
        """Bytes of each slot of the arena."""
        return list(self._arena.slot_bytes)

    def build(self, num_threads: int, isa: str | None) -> Any:
        limits, kv, plan = self._limits, self._kv, self._plan
        stores = [op.attrs for op in plan.ops if op.name == "rope_store"]
        shapes = {(a["kv_heads"], a["head_dim"]) for a in stores}
        if len(shapes) != 1:
            raise BackendError("the native backend needs attention of one KV shape in all layers")
        embed = next(op for op in plan.ops if op.attrs.get("index") == "token")
        program = _native.Program(
            num_threads=num_threads,
            isa=isa,
            limits=(
                limits.max_tokens,
                limits.max_logit_rows,
                limits.max_seqs,
                limits.max_blocks_per_seq,
            ),
            kv=(
                1 + max(a["layer"] for a in stores),
                kv.num_blocks,
                kv.block_size,
                *shapes.pop(),
                kv.dtype,
            ),
            bounds=(self._packed[embed.weights[0]].rows, self._num_positions),
            slot_bytes=self.slot_bytes,
        )
        for op in plan.ops:
            inputs = [self._place(value) for value in op.inputs]
            program.add_op(op.name, self._place(op.out), inputs, **self._attrs(op))
        program.set_output(self._place(self._logits))
        return program

    def _attrs(self, op: Op) -> dict[str, Any]:
        a = op.attrs
        attrs: dict[str, Any] = {name: a[name] for name in KERNEL_ATTRS if name in a}
        attrs["logit_rows"] = op.out.rows == "logits"
        if op.name == "embed":
            attrs["index"] = INDICES[a["index"]]
        if op.name in ("embed", "linear"):
            biases, splits = a.get("biases", (None,)), a.get("splits", (None,))
            segments = zip(op.weights, biases, splits, strict=True)
            attrs["weights"] = [self._segment(*segment) for segment in segments]
        elif op.name in ("rms_norm", "layer_norm"):
            attrs["norms"] = [self._vector(name) for name in op.weights]
        elif op.name == "rope_store":
            attrs["norms"] = [None if name is None else self._vector(name) for name in a["norms"]]
            if a["rope"] is not None:
                attrs["rope_table"] = self._rope_table(a["rope"])
            even = evening(op, self._weights, self._kv.dtype)
            if even is not None:
                factors = np.ldexp(np.float32(1), [even.e, -even.e])
                attrs["evening"] = np.stack([factors[0], even.shift, factors[1]])
        elif op.name == "gather":
            attrs["column_order"] = np.frombuffer(a["order"], np.int32)
        elif op.name == "gated_act":
            attrs["act"] = ACTS[a["act"]]
        elif op.name == "scale":
            attrs["scale"] = a["factor"]
        elif op.name == "softcap":
            attrs["softcap"] = a["cap"]
        return attrs

    def _segment(self, name: str, bias: str | None, num_rows: int | None) -> tuple[Any, ...]:
        """The first `num_rows` rows of a weight, None: all; what follows is never read."""
        p = self._packed[name]
        panel_bytes = _native.packed_panel_bytes(p.format, p.k)
        vector = None if bias is None else self._vector(bias)
        return p.data, panel_bytes, p.rows if num_rows is None else num_rows, p.k, p.format, vector

    def _vector(self, name: str) -> F32:
        if name not in self._vectors:
            self._vectors[name] = np.ascontiguousarray(dequantize(self._weights[name]))
            if not np.isfinite(self._vectors[name]).all():
                warn_not_finite([name])
        return self._vectors[name]

    def _rope_table(self, rope: RopeTable) -> F32:
        if rope not in self._rope:
            self._rope[rope] = rope_table(rope, self._num_positions)
        return self._rope[rope]

    def _stride(self, value: Value) -> int:
        """Bytes from row to row; the logits are handed out and so have no padding."""
        if value.format == "q8":
            return int(_native.q8_row_bytes(value.cols))
        row = value.cols * 4
        return row if value.id == root_id(self._logits) else -(-row // LINE) * LINE

    def _num_bytes(self, value: Value) -> int:
        limits = self._limits
        rows = limits.max_logit_rows if value.rows == "logits" else limits.max_tokens
        return rows * self._stride(value)

    def _place(self, value: Value) -> tuple[int, int, int, int, bool]:
        root = self._roots[root_id(value)]
        slot = self._arena.slot_of[root.id]
        return slot, value.offset * 4, self._stride(root), value.cols, value.format == "q8"
