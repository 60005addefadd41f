"""Law 1: a row's logits are the same bits however the work is cut, mixed, shared out or drafted."""

import numpy as np
import pytest

from paceline.backends.native import NativeBackend
from paceline.plan.passes import shorten_head
from tests.numerics.program_cases import Runner, Shape, decoder, random_tokens, random_weights

SHAPES = {
    "llama": Shape(),
    "window and softcap": Shape(windows=(20, 0), softcap=2.0, heads=4, kv_heads=1, head_dim=40),
    "bias": Shape(windows=(0, 20), heads=6, bias=True),
    "qk-norm": Shape(qk_norm=True, head_dim=64, bias=True, heads=8),
}
LENGTHS = (150, 67, 5, 1)


FORMATS = (("f32", "f16"), ("q8_0", "f16"), ("f32", "bf16"), ("f32", "int8"), ("f32", "fp8"),
           ("f32", "k8v4"), ("f32", "int4"))  # fmt: skip
MODELS = [(name, *formats) for name in SHAPES for formats in FORMATS]


@pytest.fixture(scope="module", params=MODELS, ids=str)
def model(request):
    name, fmt, kv_dtype = request.param
    shape = SHAPES[name]
    plan = decoder(shape)
    weights = random_weights(plan, shape, fmt)
    rng = np.random.default_rng(5)
    prompts = [random_tokens(rng, n, shape.vocab) for n in LENGTHS]
    runner = Runner.load(NativeBackend(1), plan, weights, kv_dtype=kv_dtype)
    alone = [runner.step([(i, tokens)])[i] for i, tokens in enumerate(prompts)]
    return plan, weights, prompts, alone, kv_dtype


def random_schedule(rng, prompts):
    """Steps of random chunks until every prompt is through."""
    done = [0] * len(prompts)
    while any(d < len(p) for d, p in zip(done, prompts, strict=True)):
        waiting = [i for i, p in enumerate(prompts) if done[i] < len(p)]
        chosen = rng.permutation([i for i in waiting if rng.random() < 0.7] or waiting[:1])
        step = []
        for i in (int(i) for i in chosen):
            n = min(int(rng.choice([1, 2, 7, 16, 33, 64, 100])), len(prompts[i]) - done[i])
            step.append((i, prompts[i][done[i] : done[i] + n]))
            done[i] += n
        yield step


def same_bits(got, want):
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("block_size", [16, 48, 64])
def test_random_ragged_schedules_give_the_bits_of_the_run_alone(model, threads, block_size):
    plan, weights, prompts, alone, kv_dtype = model
    runner = Runner.load(
        NativeBackend(threads),
        plan,
        weights,
        block_size=block_size,
        seed=block_size,
        kv_dtype=kv_dtype,
    )
    rng = np.random.default_rng(threads * 100 + block_size)
    for _ in range(3):
        parts = {i: [] for i in range(len(prompts))}
        for step in random_schedule(rng, prompts):
            for seq, logits in runner.step(step).items():
                parts[seq].append(logits)
        for i, want in enumerate(alone):
            same_bits(np.concatenate(parts[i]), want)
            runner.restart(i)


@pytest.mark.parametrize("num_ids", [1, 16, 23, 96])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_shortened_head_gives_the_bits_of_the_whole_one(model, threads, num_ids):
    plan, weights, prompts, alone, kv_dtype = model
    short = shorten_head(plan, num_ids)
    runner = Runner.load(NativeBackend(threads), short, weights, kv_dtype=kv_dtype)
    for i, tokens in enumerate(prompts):
        same_bits(runner.step([(i, tokens)])[i], np.ascontiguousarray(alone[i][:, :num_ids]))


def random_tree(rng, n):
    """Parents (-1: the context), each before its child."""
    return [int(rng.integers(-1, i)) if rng.random() < 0.6 else i - 1 for i in range(n)]


def path_of(node, parents):
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


@pytest.mark.parametrize("context", [1, 30, 63, 64, 100])
@pytest.mark.parametrize("size", [1, 9, 64])
def test_tree_node_gives_the_bits_of_its_token_in_a_chain(model, context, size):
    plan, weights, prompts, _, kv_dtype = model
    rng = np.random.default_rng(context + size)
    runner = Runner.load(NativeBackend(2), plan, weights, kv_dtype=kv_dtype)
    prompt = prompts[0][:context]
    runner.step([(0, prompt)])
    parents = random_tree(rng, size)
    tokens = random_tokens(rng, size, 101)
    paths = [path_of(i, parents) for i in range(size)]
    masks = [sum(1 << j for j in path) for path in paths]
    runner.step([(1, prompts[1][:40])])  # a neighbour in the same step is causal
    got = runner.step(
        [(1, prompts[1][40:45]), (0, tokens)], trees={0: ([len(p) - 1 for p in paths], masks)}
    )[0]
    for node in {0, size // 2, size - 1}:
        runner.restart(2)
        chain = [tokens[j] for j in paths[node]]
        want = runner.step([(2, prompt + chain)])[2][-1]
        same_bits(got[node], want)


LONG = 1300  # three segments of attention


@pytest.fixture(
    scope="module",
    params=[
        ((0, 0), "f16"),
        ((0, 0), "bf16"),
        *(((600, 0), dtype) for dtype in ("f16", "bf16", "int8", "fp8", "k8v4", "int4")),
    ],
    ids=lambda param: f"{'window' if any(param[0]) else 'full'}, {param[1]}",
)
def long_model(request):
    windows, kv_dtype = request.param
    shape = Shape(windows=windows, heads=6, kv_heads=1, head_dim=40)
    plan = decoder(shape)
    weights = random_weights(plan, shape)
    tokens = random_tokens(np.random.default_rng(6), LONG, shape.vocab)
    options = {"max_len": 1408, "max_tokens": LONG, "kv_dtype": kv_dtype}
    alone = Runner.load(NativeBackend(1), plan, weights, **options)
    return plan, weights, tokens, alone.step([(0, tokens)])[0], options


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("context", [511, 512, 700, 1024, 1290])
def test_a_long_context_shared_by_threads_gives_the_bits_of_one_thread(
    long_model, threads, context
):
    plan, weights, tokens, alone, options = long_model
    runner = Runner.load(NativeBackend(threads), plan, weights, **options)
    runner.step([(0, tokens[:context])])
    for at in (context, context + 1, context + 2):  # the split's counters are used again
        short = (1, tokens[: at - context + 1])
        runner.restart(1)
        same_bits(runner.step([(0, tokens[at : at + 1]), short])[0][0], alone[at])
    rest = tokens[context + 3 : context + 10]
    same_bits(runner.step([(0, rest)])[0], alone[context + 3 : context + 3 + len(rest)])


@pytest.mark.parametrize("context", [500, 511, 512, 1020])
def test_a_tree_that_crosses_a_segment_gives_the_bits_of_chains(long_model, context):
    plan, weights, tokens, _, options = long_model
    runner = Runner.load(NativeBackend(2), plan, weights, **options)
    runner.step([(0, tokens[:context])])
    runner.step([(2, tokens[:context])])
    parents = random_tree(np.random.default_rng(context), 40)
    paths = [path_of(i, parents) for i in range(40)]
    masks = [sum(1 << j for j in path) for path in paths]
    drafted = tokens[-40:]
    trees = {0: ([len(p) - 1 for p in paths], masks)}
    got = runner.step([(0, drafted)], trees=trees)[0]
    for node in (0, 20, max(range(40), key=lambda i: len(paths[i]))):
        runner.restart(2)
        chain = [drafted[j] for j in paths[node]]
        want = runner.step([(2, tokens[:context] + chain)])[2][-1]
        same_bits(got[node], want)


def test_profiling_changes_no_bits_and_counts_every_op(model):
    plan, weights, prompts, alone, kv_dtype = model
    backend = NativeBackend(2)
    runner = Runner.load(backend, plan, weights, kv_dtype=kv_dtype)
    backend.set_profiling(True)
    same_bits(runner.step([(0, prompts[0])])[0], alone[0])
    seconds = backend.profile()
    assert {"embed", "linear", "attend", "rope_store"} <= seconds.keys()
    assert 0 < sum(seconds.values()) < 10
