"""Workloads and arrivals: what is sent, and when."""

import gzip
import itertools
import json
import random
import statistics

import pytest

from paceline.bench.arrivals import Gamma, Ramp, build_arrivals
from paceline.bench.lengths import (
    CHAT_PROMPT_CHARS,
    from_percentiles,
    parse_length,
)
from paceline.bench.objective import check_classes, parse_objectives
from paceline.bench.prose import Prose
from paceline.bench.units import parse_duration
from paceline.bench.workloads import NAMES, build_workload
from paceline.errors import ParameterError

NAN = float("nan")


def write_lines(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def specs(tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("It was a day. " * 2000)
    talk = write_lines(tmp_path / "talk.jsonl", {"messages": [{"role": "user", "content": "Hi"}]})
    tasks = write_lines(tmp_path / "tasks.jsonl", {"prompt": "def f():"})
    trace = write_lines(
        tmp_path / "trace.jsonl",
        {"timestamp": 1000, "input_length": 20, "output_length": 4},
        {"timestamp": 3500, "input_length": 10, "output_length": 6},
    )
    given = {
        "text": f"text:file={book},input=50", "conversations": f"conversations:file={talk}",
        "code": f"code:file={tasks}", "trace": f"trace:file={trace}",
    }  # fmt: skip
    return {name: given.get(name, name) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_gives_the_same_requests_in_any_order(specs, name):
    first, second = build_workload(specs[name]), build_workload(specs[name])
    made = [first.conversation("7", idx) for idx in range(6)]
    assert [second.conversation("7", idx) for idx in (5, 4, 3, 2, 1, 0)][::-1] == made
    assert all(c.turns and c.turns[0].messages for c in made)


@pytest.mark.parametrize("name", ["synthetic", "chat", "rag", "shared-prefix", "tools"])
def test_another_seed_gives_other_requests(specs, name):
    workload = build_workload(specs[name])
    assert workload.conversation("1", 0) != workload.conversation("2", 0)


def content(conversation, message=0, turn=0):
    return conversation.turns[turn].messages[message]["content"]


def test_synthetic_lengths_are_those_asked_for():
    workload = build_workload("synthetic:input=100-200,output=30")
    sizes = [len(content(workload.conversation("0", i)).split()) for i in range(50)]
    assert 100 <= min(sizes) < 125
    assert 175 < max(sizes) <= 200
    assert workload.conversation("0", 0).turns[0].max_tokens == 30


def test_a_tokenizer_makes_lengths_exact():
    def count(text):  # long words are two tokens
        return sum(1 + (len(word) > 6) for word in text.split())

    prose = Prose(count_tokens=count)
    assert [count(prose.text(random.Random(n), n)) for n in (5, 17, 400)] == [5, 17, 400]


def test_chat_lengths_have_the_measured_percentiles():
    draw = from_percentiles(CHAT_PROMPT_CHARS, high=10**6)
    rng = random.Random(0)
    sample = sorted(draw(rng) for _ in range(20_000))
    for share, measured in zip((0.1, 0.5, 0.9, 0.99), CHAT_PROMPT_CHARS, strict=True):
        assert sample[int(share * len(sample))] == pytest.approx(measured, rel=0.1)


def test_chat_history_holds_replies_of_our_own_so_that_all_servers_see_the_same():
    workload = build_workload("chat:turns=3,max_input=50,max_output=40")
    turns = workload.conversation("0", 1).turns
    assert len(turns) == 3
    assert all(turn.reply for turn in turns)
    longest = build_workload("chat:turns=real,max_context=300").conversation("0", 2).turns
    tokens = sum(len(content_.split()) for turn in longest[1:] for content_ in
                 (turn.messages[0]["content"], turn.reply))  # fmt: skip
    assert tokens <= 300


def test_families_share_their_prefix_and_nothing_else():
    workload = build_workload("shared-prefix:families=2,prefix=50,input=20")
    made = [workload.conversation("0", idx) for idx in range(20)]
    assert len({content(c) for c in made}) == 2
    assert len({content(c, message=1) for c in made}) == 20


def test_mixed_has_two_classes_in_their_share():
    workload = build_workload("mixed:share=0.25,long=1000")
    kinds = [workload.conversation("0", idx).kind for idx in range(400)]
    assert set(kinds) == {"chat", "long"}
    assert kinds.count("long") == pytest.approx(100, abs=25)


def test_a_conversation_file_is_split_where_the_assistant_spoke(tmp_path):
    messages = [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"},
    ]  # fmt: skip
    sharegpt = [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]
    file = write_lines(
        tmp_path / "f.jsonl",
        {"messages": messages, "max_tokens": 9, "class": "vip", "tools": [1]},
        {"conversations": sharegpt},
    )
    workload = build_workload(f"conversations:file={file},output=5")
    made = {c.kind: c for c in (workload.conversation("0", idx) for idx in range(2))}
    first, second = made["vip"].turns
    assert ([m["role"] for m in first.messages], first.reply) == (["system", "user"], "b")
    assert (second.messages[0]["content"], second.reply, second.max_tokens) == ("c", None, 9)
    assert first.fields == {"tools": [1]}
    assert (made["chat"].turns[0].reply, made["chat"].turns[0].max_tokens) == ("y", 5)


def test_a_trace_gives_times_and_lengths(specs, tmp_path):
    path = specs["trace"].split("=")[1]
    assert list(build_arrivals(f"replay:file={path},speed=2", None).times("0")) == [0.0, 1.25]
    turn = build_workload(specs["trace"]).conversation("0", 1).turns[0]
    assert (len(turn.messages[0]["content"].split()), turn.max_tokens) == (10, 6)
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,12,3\n"
        "2023-11-16 18:17:04.4799600,5,2\n"
    )
    assert list(build_arrivals(f"replay:file={azure}", None).times("0")) == pytest.approx([0, 0.5])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nonsense", "no workload is called 'nonsense'.*synthetic"),
        ("chat:wrong=1", "chat has no option 'wrong': its options are"),
        ("synthetic:input=9-3", "no length"),
        ("synthetic:input=lognormal:a:b", "no length"),
        ("conversations", "needs file=FILE.jsonl"),
        ("text:file=/nonexistent", "/nonexistent cannot be read"),
        ("mixed:share=2", "share is 2.0"),
        ("rag:input=0", "no length"),
    ],
)
def test_a_bad_spec_is_refused_by_name(spec, message):
    with pytest.raises(ParameterError, match=message):
        build_workload(spec)


def test_a_broken_file_is_refused_with_its_line(tmp_path):
    file = write_lines(tmp_path / "f.jsonl", {"messages": [{"role": "user", "content": "a"}]}, {})
    with pytest.raises(ParameterError, match=r"f\.jsonl:2 is no conversation"):
        build_workload(f"conversations:file={file}")


def test_lognormal_lengths_have_the_median_given():
    draw, rng = parse_length("lognormal:400:0.8"), random.Random(0)
    assert statistics.median(draw(rng) for _ in range(4000)) == pytest.approx(400, rel=0.1)


def gaps(arrivals, count=20_000):
    times = list(itertools.islice(arrivals.times("3"), count))
    return [b - a for a, b in itertools.pairwise(times)]


@pytest.mark.parametrize(("shape", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_gamma_arrivals_have_the_rate_and_the_burstiness(shape, variation):
    between = gaps(Gamma(5.0, shape))
    mean = statistics.mean(between)
    assert mean == pytest.approx(0.2, rel=0.06)
    assert statistics.stdev(between) / mean == pytest.approx(variation, rel=0.06)


def test_a_ramp_has_the_rate_it_should_at_each_time():
    ramp = Ramp(2.0, 10.0, 100.0)
    times = [
        t for n in range(20) for t in itertools.takewhile(lambda t: t < 200, ramp.times(str(n)))
    ]
    for begin, end, expected in ((0, 50, 200), (50, 100, 400), (100, 200, 1000)):
        assert sum(begin <= t < end for t in times) / 20 == pytest.approx(expected, rel=0.05)


def test_arrivals_are_the_same_for_the_same_seed_and_refuse_nonsense():
    poisson = build_arrivals("poisson", 3.0)
    assert list(itertools.islice(poisson.times("a"), 9)) == list(
        itertools.islice(poisson.times("a"), 9)
    )
    assert list(itertools.islice(build_arrivals("constant", 4.0).times("a"), 3)) == [0, 0.25, 0.5]
    for spec, rate, message in (
        ("poisson", None, "needs --rate"), ("weekly", 1.0, "no arrival is called"),
        ("gamma:shape=0", 1.0, "above 0"), ("replay", None, "needs file="),
    ):  # fmt: skip
        with pytest.raises(ParameterError, match=message):
            build_arrivals(spec, rate)


def test_durations_are_read_and_refused():
    assert [parse_duration(t) for t in ("300ms", "5s", "2m", "1.5h")] == [0.3, 5, 120, 5400]
    for text in ("5", "-1s", "ms", "1e3s", ""):
        with pytest.raises(ParameterError, match="no duration"):
            parse_duration(text)
    for text in ("1001h", "9" * 400 + "s"):
        with pytest.raises(ParameterError, match="longer than 1000 h"):
            parse_duration(text)


@pytest.mark.parametrize("name", NAMES)
def test_a_workload_names_the_classes_of_its_requests(specs, name):
    workload = build_workload(specs[name])
    found = {workload.conversation("7", idx).kind for idx in range(100)}
    assert found == set(workload.kinds)


def test_an_objective_for_a_class_that_the_workload_lacks_is_refused():
    kinds = build_workload("mixed").kinds
    check_classes(parse_objectives(["ttft=1s", "long:e2e=20s"]), kinds)
    with pytest.raises(ParameterError, match=r"'lang', which.*chat, long"):
        check_classes(parse_objectives(["lang:e2e=20s"]), kinds)


def test_objectives_hold_by_class_and_metric():
    objectives = parse_objectives(["ttft=300ms,tpot=50ms", "long:e2e=20s"])
    good = {"ttft": 0.3, "tpot": 0.05, "e2e": 99.0, "itl": 1.0}
    assert objectives.is_met("chat", good, is_at_once=False)
    assert not objectives.is_met("chat", {**good, "ttft": 0.301}, is_at_once=False)
    assert not objectives.is_met("long", good, is_at_once=False)
    assert objectives.is_met("chat", {**good, "tpot": NAN}, is_at_once=False)  # one token
    assert not objectives.is_met("chat", {**good, "tpot": NAN}, is_at_once=True)
    assert not objectives.is_met(
        "chat", {**good, "ttft": NAN}, is_at_once=False
    )  # no token, no first token


@pytest.mark.parametrize("spec", [
    "ttft", "ttft=1", "speed=3ms", ":ttft=1s", "a:b", "ttft=1s,ttft=2s", "ttft=0s",
])  # fmt: skip
def test_a_bad_objective_is_refused(spec):
    with pytest.raises(ParameterError):
        parse_objectives([spec])


@pytest.mark.parametrize(
    "spec", ["10000001", "1-10000001", "lognormal:10000001:1", "lognormal:nan:1", "9" * 5000]
)
def test_a_length_beyond_any_context_is_refused(spec):
    with pytest.raises(ParameterError, match="is no length of 1 to 10000000"):
        parse_length(spec)


def test_lognormal_lengths_end_at_the_bound():
    draw, rng = parse_length("lognormal:9000000:4"), random.Random(0)
    assert max(draw(rng) for _ in range(200)) == 10_000_000


BROKEN_GZIP = bytearray(gzip.compress(b'{"prompt":"x"}\n' * 50))
BROKEN_GZIP[15] ^= 0xFF
CONTENTLESS = b'{"messages":[{"role":"user"}]}'
DEEP = b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize(
    ("name", "data", "spec", "what"),
    [
        ("a.jsonl", CONTENTLESS, "conversations", "role 'user' has no content"),
        ("a.jsonl", DEEP, "conversations", "cannot be read as JSON lines"),
        ("a.jsonl", b'{"messages":[{"role":"user","content":"a"}],"max_tokens":-5}',
         "conversations", "max_tokens is -5"),
        ("a.jsonl", b'{"messages":[{"role":"user","content":"a"}],"max_tokens":1e308}',
         "conversations", "max_tokens is 1e"),
        ("a.gz", bytes(BROKEN_GZIP), "code", "cannot be read as JSON lines"),
        ("a.gz", gzip.compress(b'{"prompt":"x"}')[:20], "code", "cannot be read as JSON lines"),
        ("a.jsonl", b'{"at_s":0,"input_length":1e308}', "trace", "input_length is 1e"),
        ("a.jsonl", b'{"at_s":0,"input_length":2000000000}', "trace", "input_length is 2000000000"),
        ("a.jsonl", b'{"at_s":0,"output_length":-1}', "trace", "output_length is -1"),
        ("a.jsonl", b'{"at_s":"nan"}', "trace", "a time is nan"),
        ("a.csv", b"at_s\ninf\n", "trace", "a time is inf"),
        ("a.jsonl", DEEP, "trace", "cannot be read as a trace"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_sent_is_refused_with_its_name(tmp_path, name, data, spec, what):
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ParameterError, match=what) as found:
        build_workload(f"{spec}:file={path}")
    assert str(path) in str(found.value)


def test_an_assistant_that_calls_a_tool_needs_no_content(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"messages":[{"role":"user","content":"a"},{"role":"assistant"}]}')
    (turn,) = build_workload(f"conversations:file={path}").conversation("0", 0).turns
    assert turn.reply == ""


def test_a_scale_beyond_all_lengths_gives_the_longest():
    (turn,) = build_workload("chat:scale=1e308,max_output=9").conversation("0", 0).turns
    assert turn.max_tokens == 9


@pytest.mark.parametrize("shape", ["1e308", "1e-308"])
def test_a_shape_that_draws_no_gaps_is_refused(shape):
    with pytest.raises(ParameterError, match=f"shape is {shape[:2]}.*: it must be from"):
        build_arrivals(f"gamma:shape={shape}", 1.0)
