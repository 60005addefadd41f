"""Plan -> Plan rewrites that turn a family's plan into the program that runs.

Every pass keeps what the plan computes: the lowered plan run by `backends/reference.py` gives the
same logits, but for the rounding of activations to q8. Values are single-assignment, so an op may
move to any later place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from paceline.errors import UnsupportedModelError
from paceline.plan.arena import root_id
from paceline.plan.plan import Op, Plan, Value, sole_output
from paceline.weights.tensor import FLOAT_FORMATS, QTensor

I32 = npt.NDArray[np.int32]

MAX_MERGED = 3  # weights of one linear op
Q8_GROUP = 32
ROW_WISE = frozenset({
    "linear", "rms_norm", "layer_norm", "gated_act", "add", "scale", "softcap", "gather",
})  # fmt: skip


def lower(
    plan: Plan,
    formats: Mapping[str, str],
    *,
    activations: str = "q8",
    orders: Mapping[str, I32] | None = None,
) -> Plan:
    """Return the program for weights of these formats (tensor name -> format).

    `activations` is what linears over quantised weights read: q8, or f32 as all else. `orders` are
    the column orders of the weights that have one.
    """
    plan = fold_embed_scale(plan)
    plan = gather_columns(plan, orders or {})
    plan = merge_linears(plan, formats)
    plan = split_attention(plan)
    plan = fold_residual(plan)
    plan = select_early(plan)
    return insert_quantize(plan, formats) if activations == "q8" else plan


def column_orders(weights: Mapping[str, QTensor]) -> dict[str, I32]:
    """The column orders of the weights that have one, as `lower` takes them."""
    orders = {name: weights[name].column_order for name in weights}
    return {name: order for name, order in orders.items() if order is not None}


def gather_columns(plan: Plan, orders: Mapping[str, I32]) -> Plan:
    """A linear whose weight keeps its columns in another order reads its input in that order.

    Linears of one input and one order share the gather, and so can be merged.
    """
    gathered: dict[tuple[int, bytes], Value] = {}
    ops: list[Op] = []
    for op in plan.ops:
        if op.name == "linear" and op.weights[0] in orders:
            x, order = op.inputs[0], orders[op.weights[0]].tobytes()
            if (x.id, order) not in gathered:
                gathered[x.id, order] = plan.new_value(x.cols, x.rows)
                ops.append(Op("gather", gathered[x.id, order], (x,), (), {"order": order}))
            value = gathered[x.id, order]
            op = replace(op, inputs=(value,), attrs={**op.attrs, "order": order})
        ops.append(op)
    return plan.derive(ops)


def is_quantized(op: Op, formats: Mapping[str, str]) -> bool:
    """Whether a linear's weights are quantised, so that it reads q8 activations."""
    return formats[op.weights[0]] not in FLOAT_FORMATS


def shorten_head(plan: Plan, num_ids: int) -> Plan:
    """The logits of ids below `num_ids` alone: the head reads so many rows of its weight.

    A row of a weight knows nothing of the others, so these logits are those of the whole head.
    """
    producer = _producers(plan)
    op, cut = producer[sole_output(plan).id], []
    while op.name != "linear":  # a softcap, or a scale
        cut.append(op)
        op = producer[op.inputs[0].id]
    cut.append(replace(op, attrs={**op.attrs, "splits": (num_ids,)}))
    short = {op.out.id: replace(op, out=replace(op.out, cols=num_ids)) for op in cut}
    subst = {i: op.out for i, op in short.items()}
    return _substitute(plan, [short.get(op.out.id, op) for op in plan.ops], subst)


def merge_linears(plan: Plan, formats: Mapping[str, str]) -> Plan:
    """Linears of one input become one op; their outputs become views of its output.

    At most MAX_MERGED at a time, and only weights that read the same kind of activation.
    """
    groups: dict[tuple[int, bool], list[Op]] = {}
    for op in plan.ops:
        if op.name == "linear":
            groups.setdefault((op.inputs[0].id, is_quantized(op, formats)), []).append(op)
    merged: dict[int, Op] = {}  # id of an old output -> the new op, at the group's first output
    views: dict[int, Value] = {}
    for ops in groups.values():
        for begin in range(0, len(ops), MAX_MERGED):
            part = ops[begin : begin + MAX_MERGED]
            if len(part) > 1:
                op = _merged(plan, part)
                merged[part[0].out.id] = op
                views.update(_views(op.out, part))
    rewritten = []
    for op in plan.ops:
        if op.out.id in merged:
            rewritten.append(merged[op.out.id])
        elif op.out.id not in views:
            rewritten.append(op)
    return _substitute(plan, rewritten, views)


def _merged(plan: Plan, ops: list[Op]) -> Op:
    out = plan.new_value(sum(op.out.cols for op in ops), ops[0].out.rows)
    attrs = ops[0].attrs | {  # one input, so one column order
        "biases": tuple(bias for op in ops for bias in op.attrs["biases"]),
        "splits": tuple(op.out.cols for op in ops),
    }
    weights = tuple(name for op in ops for name in op.weights)
    return Op("linear", out, ops[0].inputs, weights, attrs)


def _views(parent: Value, ops: list[Op]) -> dict[int, Value]:
    views, offset = {}, 0
    for op in ops:
        views[op.out.id] = replace(op.out, parent=parent.id, offset=offset)
        offset += op.out.cols
    return views


def split_attention(plan: Plan) -> Plan:
    """`attention` becomes `rope_store` (q- and k-norm, rope, write K and V) and `attend`."""
    producer = _producers(plan)
    reads = _reads(plan)
    fused: set[int] = set()  # outputs of ops that rope_store does
    ops: list[Op] = []

    def unwrap(value: Value, name: str, heads: int) -> tuple[Value, Op | None]:
        """The input of the op `name` that makes `value`, where only rope_store reads its output."""
        op = producer.get(value.id)
        if op is None or op.name != name or op.attrs["heads"] != heads or reads[value.id] != 1:
            return value, None
        fused.add(value.id)
        return op.inputs[0], op

    for op in plan.ops:
        if op.name != "attention":
            ops.append(op)
            continue
        a = op.attrs
        q, q_rope = unwrap(op.inputs[0], "rope", a["heads"])
        k, k_rope = unwrap(op.inputs[1], "rope", a["kv_heads"])
        rope = q_rope.attrs["rope"] if q_rope else None
        if rope != (k_rope.attrs["rope"] if k_rope else None):
            raise UnsupportedModelError(
                f"layer {a['layer']} rotates its queries and keys differently: no kernel does that"
            )
        q, q_norm = unwrap(q, "rms_norm", a["heads"])
        k, k_norm = unwrap(k, "rms_norm", a["kv_heads"])
        norms = tuple(norm.weights[0] if norm else None for norm in (q_norm, k_norm))
        eps = {norm.attrs["eps"] for norm in (q_norm, k_norm) if norm}
        if len(eps) > 1:
            raise UnsupportedModelError(
                f"layer {a['layer']} norms its queries and keys differently: no kernel does that"
            )
        shape = {n: a[n] for n in ("layer", "heads", "kv_heads", "head_dim")}
        stored = plan.new_value(q.cols, q.rows)
        store_attrs = {
            **shape, "rope": rope, "norms": norms, "eps": max(eps, default=0.0),
            "key_bias": a["key_bias"],
        }  # fmt: skip
        weights = tuple(name for name in norms if name is not None)
        ops.append(Op("rope_store", stored, (q, k, op.inputs[2]), weights, store_attrs))
        attend_attrs = {n: a[n] for n in ("scale", "window", "softcap", "is_causal")}
        ops.append(Op("attend", op.out, (stored,), (), {**shape, **attend_attrs}))
    return plan.derive(op for op in ops if op.out.id not in fused)


def fold_residual(plan: Plan) -> Plan:
    """`add(x, linear(…))` and `add(x, rms_norm(…))` take x as a second input."""
    producer = _producers(plan)
    reads = _reads(plan)
    folded: set[int] = set()
    ops: list[Op] = []
    for op in plan.ops:
        if op.name == "add":
            op = _with_residual(op, producer, reads, folded) or op
        ops.append(op)
    return plan.derive(op for op in ops if op.out.id not in folded)


def _with_residual(
    add: Op, producer: Mapping[int, Op], reads: Mapping[int, int], folded: set[int]
) -> Op | None:
    for value, residual in (add.inputs, add.inputs[::-1]):
        op = producer.get(value.id)
        can_fold = op is not None and op.name in ("linear", "rms_norm") and len(op.inputs) == 1
        if op is not None and can_fold and reads[value.id] == 1:
            folded.add(value.id)
            return replace(op, out=add.out, inputs=(*op.inputs, residual))
    return None


def fold_embed_scale(plan: Plan) -> Plan:
    """`scale(embed(…))` becomes an embed that scales."""
    producer = _producers(plan)
    reads = _reads(plan)
    folded: set[int] = set()
    ops: list[Op] = []
    for op in plan.ops:
        source = producer.get(op.inputs[0].id) if op.name == "scale" else None
        if source is not None and source.name == "embed" and reads[source.out.id] == 1:
            folded.add(source.out.id)
            op = replace(source, out=op.out, attrs={**source.attrs, "scale": op.attrs["factor"]})
        ops.append(op)
    return plan.derive(op for op in ops if op.out.id not in folded)


def select_early(plan: Plan) -> Plan:
    """Rows that need no logits are dropped right after the last attention.

    Only where every op from there to the plan's one `select` works row by row and no other output
    needs all rows; else the plan is returned as it is.
    """
    last = max((i for i, op in enumerate(plan.ops) if op.name == "attend"), default=-1)
    tail = plan.ops[last + 1 :]
    selects = [op for op in tail if op.name == "select"]
    row_wise = all(op.name in ROW_WISE or op in selects for op in tail)
    if last < 0 or len(selects) != 1 or not row_wise:
        return plan
    if any(value.rows == "tokens" for value in plan.outputs.values()):
        return plan
    made = {op.out.id for op in tail}
    subst: dict[int, Value] = {}
    head = list(plan.ops[: last + 1])
    for value in (v for op in tail for v in op.inputs):
        if value.id in subst:
            continue
        if root_id(value) in made:
            subst[value.id] = replace(value, rows="logits")
        else:
            subst[value.id] = plan.new_value(value.cols, "logits")
            head.append(Op("select", subst[value.id], (value,)))
    for op in tail:
        subst.setdefault(op.out.id, replace(op.out, rows="logits"))
    dropped = selects[0]
    source = dropped.inputs[0]
    subst[dropped.out.id] = subst[source.id]
    rewritten = [
        replace(op, out=subst[op.out.id], inputs=tuple(_swap(v, subst) for v in op.inputs))
        for op in tail
        if op is not dropped
    ]
    outputs = {name: _swap(value, subst) for name, value in plan.outputs.items()}
    return plan.derive(head + rewritten, outputs)


def insert_quantize(plan: Plan, formats: Mapping[str, str]) -> Plan:
    """Linears over quantised weights read q8 values.

    The op before writes q8 itself where it can and all its readers want it; else a `quantize` is
    put between.
    """
    readers: dict[int, list[tuple[Op, int]]] = {}
    for op in plan.ops:
        for position, value in enumerate(op.inputs):
            readers.setdefault(root_id(value), []).append((op, position))
    outputs = {root_id(value) for value in plan.outputs.values()}
    subst: dict[int, Value] = {}  # values that are q8 from their birth
    quantized: dict[int, Value] = {}  # values with a q8 copy
    ops: list[Op] = []
    for op in plan.ops:
        inputs = tuple(_swap(value, subst) for value in op.inputs)
        if op.name == "linear" and is_quantized(op, formats) and inputs[0].format == "f32":
            x = inputs[0]
            if x.id not in quantized:
                quantized[x.id] = plan.new_value(x.cols, x.rows, format="q8")
                ops.append(Op("quantize", quantized[x.id], (x,)))
            inputs = (quantized[x.id], *inputs[1:])
        out, wants = op.out, readers.get(op.out.id, [])
        all_quantized = bool(wants) and all(
            r.name == "linear" and at == 0 and is_quantized(r, formats) for r, at in wants
        )
        if _can_write_q8(op) and all_quantized and out.id not in outputs:
            out = subst[out.id] = replace(out, format="q8")
        ops.append(replace(op, inputs=inputs, out=out))
    return plan.derive(ops)


def _can_write_q8(op: Op) -> bool:
    return op.name in ("rms_norm", "layer_norm", "gated_act") or (
        op.name == "attend" and op.attrs["head_dim"] % Q8_GROUP == 0
    )


def _producers(plan: Plan) -> dict[int, Op]:
    return {op.out.id: op for op in plan.ops}


def _reads(plan: Plan) -> Counter[int]:
    """How often each value is read: by ops, through views, and as an output."""
    values = [*(v for op in plan.ops for v in op.inputs), *plan.outputs.values()]
    return Counter(i for value in values for i in {value.id, root_id(value)})


def _swap(value: Value, subst: Mapping[int, Value]) -> Value:
    return subst.get(value.id, value)


def _substitute(plan: Plan, ops: list[Op], subst: Mapping[int, Value]) -> Plan:
    rewritten = [replace(op, inputs=tuple(_swap(v, subst) for v in op.inputs)) for op in ops]
    outputs = {name: _swap(value, subst) for name, value in plan.outputs.items()}
    return plan.derive(rewritten, outputs)
