"""Several models in one server: their names, their memory, and totals that outlast an engine."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.cli.serve_models import Wanted, open_models, read_aliases
from paceline.config import EngineConfig
from paceline.engine.speculation.stats import SpecStats
from paceline.engine.stats import NO_ENGINE, EngineStats
from paceline.errors import PacelineError, ParameterError
from paceline.server.admission import Limits
from paceline.server.meters import CallMeters
from paceline.server.metrics import Metrics, exposition
from paceline.server.models.needs import plan_needs
from tests.tiny import random_model, write_gguf
from tests.tiny_bert import write_bert

MIB = 2**20


# ---- names ----


def test_a_model_has_the_names_that_it_is_given():
    models = ["smollm2-135m", "qwen2.5-coder-0.5b"]
    given = ["small=smollm2-135m", "gpt-4o=qwen2.5-coder-0.5b", "tiny=smollm2-135m"]
    assert read_aliases(models, given) == {models[0]: ("small", "tiny"), models[1]: ("gpt-4o",)}
    assert read_aliases(models, []) == {models[0]: (), models[1]: ()}


def test_an_alias_names_a_file_by_its_path_or_by_its_name(tmp_path):
    path = tmp_path / "own.gguf"
    path.touch()
    for target in ("own", str(path)):
        assert read_aliases([str(path)], [f"mine={target}"]) == {str(path): ("mine",)}


@pytest.mark.parametrize(
    ("alias", "said"),
    [
        ("x", "write NAME=MODEL"), ("=a", "write NAME=MODEL"), ("x=", "write NAME=MODEL"),
        ("x=c", "one of a, b"), ("a=b", "'a' is taken"), ("b=b", "'b' is taken"),
    ],
)  # fmt: skip
def test_an_alias_that_means_nothing_or_two_things_is_refused(alias, said):
    with pytest.raises(ParameterError, match=said):
        read_aliases(["a", "b"], [alias])


def test_a_name_is_given_once(tmp_path):
    with pytest.raises(ParameterError, match="'x' is taken"):
        read_aliases(["a", "b"], ["x=a", "x=b"])
    (tmp_path / "a").mkdir()
    for folder in (tmp_path, tmp_path / "a"):
        (folder / "own.gguf").touch()
    for models in (["a", "a"], [str(tmp_path / "own.gguf"), str(tmp_path / "a" / "own.gguf")]):
        with pytest.raises(ParameterError, match="rename a file"):
            read_aliases(models, [])


@pytest.mark.parametrize(
    ("models", "options", "said"),
    [
        (["small"], {"memory": "4G"}, "--model-memory is for several models"),
        (["small", "large"], {"chat_template": "x.jinja"}, "--chat-template is of one model"),
        (["small", "large"], {"config": EngineConfig(kv_tier="disk:path=x,size=1G")}, "--kv-tier"),
        (["small", "large"], {"memory": "lots"}, "'lots' is no size"),
        (["small", "large"], {"memory": "1M"}, "raise --model-memory"),
        (["small", "large"], {"config": EngineConfig(speculate="often")}, "speculate is 'often'"),
        (["small", "large"], {"weights": "q8_0"}, "--weights is for models that embed"),
        (["small"], {"weights": "q8_0"}, "--weights is for models that embed"),
        (["small", "encoder"], {"memory": "1M"}, "raise --model-memory"),
        (["encoder", "small"], {"pooling": "first"}, "pooling"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_together_is_refused_before_anything_is_loaded(
    paths, models, options, said
):
    given = {str(paths[name]): () for name in models}
    defaults = {"config": EngineConfig(), "memory": None, "chat_template": None, "pooling": None,
                "weights": "file"}  # fmt: skip
    wanted = Wanted(models=given, limits=Limits(), num_tenants=1, **{**defaults, **options})
    with pytest.raises(PacelineError, match=said):
        open_models(wanted)


# ---- memory ----


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("needs")
    long = {"max_position_embeddings": 2**17}
    return {
        "small": write_gguf(random_model(**long), folder / "small.gguf"),
        "large": write_gguf(random_model(hidden=256, inner=1024, **long), folder / "large.gguf"),
        "encoder": write_bert(folder / "encoder"),
    }


def needs_of(paths, config, memory_bytes):
    two = {name: paths[name] for name in ("small", "large")}
    return plan_needs(two, config, memory_bytes=memory_bytes)


def test_models_share_what_the_weights_of_all_leave(paths):
    needs = needs_of(paths, EngineConfig(), 64 * MIB)
    weights = sum(need.weight_bytes for need in needs.values())
    share = (64 * MIB - weights) / 2 / 2  # half of it is for KV pools, divided by two models
    for need in needs.values():
        assert 0.98 * share < need.kv_bytes <= share
    assert sum(need.num_bytes for need in needs.values()) < 64 * MIB
    [alone] = plan_needs({"small": paths["small"]}, EngineConfig(), memory_bytes=64 * MIB).values()
    assert alone.kv_bytes > 1.8 * needs["small"].kv_bytes


def test_where_not_all_weights_fit_each_shares_what_its_own_leave(paths):
    weights = {n: need.weight_bytes for n, need in
               needs_of(paths, EngineConfig(), 64 * MIB).items()}  # fmt: skip
    memory = weights["large"] + MIB // 4
    assert sum(weights.values()) > memory
    needs = needs_of(paths, EngineConfig(), memory)
    assert needs["large"].kv_bytes <= MIB // 16
    assert needs["small"].num_bytes < memory


def test_an_encoder_takes_its_weights_and_the_cache_of_a_step(paths):
    three = {name: paths[name] for name in ("small", "encoder", "large")}
    needs = plan_needs(three, EngineConfig(), memory_bytes=64 * MIB)
    encoder = needs.pop("encoder")
    assert encoder.max_model_len == 50  # its positions
    weights = encoder.num_bytes + sum(need.weight_bytes for need in needs.values())
    share = (64 * MIB - weights) / 2 / 2  # of the two that write
    for need in needs.values():
        assert 0.98 * share < need.kv_bytes <= share
    shorter = plan_needs(three, EngineConfig(max_model_len=20), memory_bytes=64 * MIB)
    assert shorter["encoder"].max_model_len == 20


def test_kv_memory_is_each_models(paths):
    config = EngineConfig(kv_memory_bytes=8 * MIB)
    needs = needs_of(paths, config, 64 * MIB)
    assert all(8 * MIB - 2**16 < need.kv_bytes <= 8 * MIB for need in needs.values())


def test_a_model_that_cannot_fit_even_alone_is_refused_by_name(paths):
    for config in (EngineConfig(kv_memory_bytes=80 * MIB), EngineConfig(max_model_len=2**17)):
        with pytest.raises(ParameterError, match=r"small, of whose weights.*raise --model-memory"):
            needs_of(paths, config, 32 * MIB)


# ---- totals ----


def stats(**fields):
    named = dict.fromkeys(EngineStats.__struct_fields__, 1) | {"speculation": None}
    return EngineStats(**named | fields)


def test_totals_are_added_and_states_are_not():
    sums = stats(num_steps=5, num_running=3).after(stats(num_steps=2, num_running=9))
    assert (sums.num_steps, sums.num_generated_tokens, sums.num_running) == (7, 2, 3)
    gone = NO_ENGINE.after(stats(num_steps=2))
    assert (gone.num_steps, gone.num_blocks, gone.kv_use) == (2, 0, 0.0)


def test_totals_of_speculation_are_added():
    first, second = SpecStats.empty(), SpecStats.empty()
    first.count([1, 2, 3], 2)
    first.count_step(1, 3, 0.5)
    second.count([1], 1)
    second.count_step(1, 3, 0.25)
    sums = second.after(first)
    assert (sums.num_drafts, sums.num_drafted, sums.num_accepted) == (2, 4, 3)
    assert (sums.drafted_at[:3], sums.accepted_at[:3]) == ([2, 1, 1], [2, 1, 0])
    assert (sums.draft_s, sums.steps) == (0.75, {"1+3": 2})
    assert stats().after(stats(speculation=first)).speculation is first


class Source:
    def __init__(self, num_tokens):
        self._num_tokens = num_tokens

    def stats(self):
        return stats(num_generated_tokens=self._num_tokens)


def test_all_samples_of_a_family_stand_together():
    models = [
        Metrics(Source(num), None, CallMeters(), model=name) for name, num in (("a", 3), ("b", 4))
    ]
    text = exposition(models).decode()
    kinds = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(kinds) == len(set(kinds))
    [family] = [
        f for f in text_string_to_metric_families(text) if f.name == "vllm:generation_tokens"
    ]
    values = {sample.labels["model_name"]: sample.value for sample in family.samples}
    assert values == {"a": 3, "b": 4}
