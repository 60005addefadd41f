"""KV sizing and the reading of memory limits."""

from pathlib import Path

import pytest

from paceline.config import EngineConfig
from paceline.engine.memory import available_memory, format_bytes, kv_token_bytes, size_kv
from paceline.errors import ParameterError
from paceline.models.base import ModelConfig
from paceline.plan.plan import RopeTable

MIB = 2**20


def model(max_context: int = 512) -> ModelConfig:
    return ModelConfig(
        family="llama", vocab_size=300, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=16, intermediate_size=128, norm_eps=1e-6, max_context=max_context,
        rope=(RopeTable((1.0,)),) * 2, window=(0, 0), attention_scale=0.25, tie_embeddings=False,
    )  # fmt: skip


def test_a_token_takes_k_and_v_of_every_layer_and_kv_head():
    assert kv_token_bytes(model(), "f16") == 2 * 2 * 2 * 16 * 2
    assert kv_token_bytes(model(), "f32") == 2 * kv_token_bytes(model(), "bf16")
    assert kv_token_bytes(model(), "fp8") == kv_token_bytes(model(), "int8")
    assert kv_token_bytes(model(), "int8") == 2 * 2 * 2 * (16 + 2)  # a scale a token and head
    nibbles = 8 + 2 + 1 + 1  # for up to 32 columns a step and a base
    assert kv_token_bytes(model(), "k8v4") == 2 * 2 * (16 + 2 + nibbles)
    assert kv_token_bytes(model(), "int4") == 2 * 2 * 2 * nibbles


def test_the_default_pool_holds_no_more_than_the_sequences_can_fill():
    config = EngineConfig(max_num_seqs=4)
    size = size_kv(model(), config, weight_bytes=0, available_bytes=2**40)
    assert size.num_blocks * 16 == 4 * 512
    assert size.max_model_len == 512


def test_the_default_pool_takes_half_of_what_the_weights_leave():
    size = size_kv(model(2**20), EngineConfig(), weight_bytes=60 * MIB, available_bytes=100 * MIB)
    assert 20 * MIB - size.block_bytes < size.num_bytes <= 20 * MIB


def test_a_small_pool_shortens_the_default_context():
    config = EngineConfig(kv_memory_bytes=5 * 16 * 256)
    size = size_kv(model(), config, weight_bytes=0, available_bytes=MIB)
    assert (size.num_blocks, size.max_model_len) == (5, 80)


def test_a_pool_too_small_for_the_asked_context_is_refused_with_both_figures():
    config = EngineConfig(kv_memory_bytes=5 * 16 * 256, max_model_len=500)
    with pytest.raises(ParameterError, match=r"max_model_len is 500.*holds 80 tokens"):
        size_kv(model(), config, weight_bytes=0, available_bytes=MIB)


def test_kv_memory_beyond_free_memory_is_refused_with_both_figures():
    config = EngineConfig(kv_memory_bytes=50 * MIB)
    with pytest.raises(ParameterError, match=r"50\.0 MiB, but 30\.0 MiB are free"):
        size_kv(model(), config, weight_bytes=10 * MIB, available_bytes=40 * MIB)


def test_no_room_for_one_block_is_refused_with_both_figures():
    with pytest.raises(ParameterError, match=r"may take 50 B, one block of 16 tokens needs 4\.0"):
        size_kv(model(), EngineConfig(), weight_bytes=100, available_bytes=200)


def test_a_context_beyond_the_models_is_refused():
    with pytest.raises(ParameterError, match="513, the model's context is 512"):
        size_kv(model(), EngineConfig(max_model_len=513), weight_bytes=0, available_bytes=2**40)


def machine(root: Path, membership: str, files: dict[str, str]) -> tuple[Path, Path]:
    proc, cgroup = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    (proc / "self" / "cgroup").write_text(membership)
    for name, content in files.items():
        (cgroup / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroup / name).write_text(content)
    return proc, cgroup


def test_memory_without_limits_is_what_the_kernel_says_is_available(tmp_path):
    proc, cgroup = machine(tmp_path, "0::/\n", {"memory.max": "max\n"})
    assert available_memory(proc, cgroup) == 8000 * 1024


def test_the_limit_of_a_parent_group_binds(tmp_path):
    proc, cgroup = machine(
        tmp_path,
        "0::/outer/inner\n",
        {
            "outer/inner/memory.max": "max\n",
            "outer/memory.max": "5000000\n",
            "outer/memory.current": "3000000\n",
            "outer/memory.stat": "anon 1\ninactive_file 1000000\n",
        },
    )
    assert available_memory(proc, cgroup) == 5000000 - 3000000 + 1000000


def test_cgroup_v1_limits_bind_and_its_huge_number_means_none(tmp_path):
    files = {
        "memory/job/memory.limit_in_bytes": "4000000\n",
        "memory/job/memory.usage_in_bytes": "1000000\n",
        "memory/job/memory.stat": "total_inactive_file 500000\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    proc, cgroup = machine(tmp_path, "5:cpu:/job\n4:memory:/job\n", files)
    assert available_memory(proc, cgroup) == 3500000


def test_a_container_that_sees_only_its_own_group_finds_its_limit(tmp_path):
    files = {"memory.max": "2000000\n", "memory.current": "500000\n"}
    proc, cgroup = machine(tmp_path, "0::/system.slice/docker-abc.scope\n", files)
    assert available_memory(proc, cgroup) == 1500000


@pytest.mark.parametrize(
    ("count", "text"), [(12, "12 B"), (1536, "1.5 KiB"), (MIB, "1.0 MiB"), (3 * 2**30, "3.0 GiB")]
)
def test_sizes_are_written_in_powers_of_1024(count, text):
    assert format_bytes(count) == text
