"""`import paceline` stays light, and its public names are exact."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import paceline

PUBLIC = [
    "LLM", "Choice", "Completion", "EngineConfig", "PacelineError", "SamplingParams", "Structured",
    "Timings", "TokenLogprob", "Usage", "__version__",
]  # fmt: skip


def run(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return result.stdout


def test_all_is_exact_and_every_name_resolves():
    assert paceline.__all__ == PUBLIC
    assert [name for name in PUBLIC if not hasattr(paceline, name)] == []
    assert dir(paceline) == sorted(PUBLIC)


def test_import_takes_less_than_a_third_of_a_second():
    code = "import time; t = time.perf_counter(); import paceline; print(time.perf_counter() - t)"
    assert min(float(run(code)) for _ in range(3)) < 0.3


def test_import_brings_in_no_heavy_module():
    code = "import sys, paceline; print(*sys.modules)"
    heavy = {"numpy", "tokenizers", "fastapi", "typer", "rich", "jinja2", "paceline._native"}
    assert heavy.isdisjoint(run(code).split())


def test_the_command_line_imports_neither_server_nor_numpy():
    loaded = set(run("import sys, paceline.cli.main; print(*sys.modules)").split())
    assert loaded.isdisjoint({"numpy", "tokenizers", "fastapi", "uvicorn", "jinja2"})


def test_what_runs_one_prompt_brings_in_no_measuring():
    code = "import sys, paceline.engine.build, paceline.llm, paceline.cli.run; print(*sys.modules)"
    loaded = set(run(code).split())
    assert loaded.isdisjoint({"paceline.measure.recorder", "paceline.server.app", "fastapi"})


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Engine"):
        getattr(paceline, "Engine")  # noqa: B009  (a plain attribute would be a useless statement)


def test_all_tests_can_be_collected_without_the_packages_of_clients_and_oracles():
    optional = {"openai", "anthropic", "litellm", "langchain_openai", "llm", "schemathesis",
                "lm_eval", "guidellm", "torch", "transformers"}  # fmt: skip
    for path in Path(__file__).parents[1].rglob("*.py"):
        for line in ast.parse(path.read_text()).body:
            names = [alias.name for alias in line.names] if isinstance(line, ast.Import) else []
            if isinstance(line, ast.ImportFrom) and not line.level:
                names = [line.module or ""]
            assert optional.isdisjoint(name.split(".")[0] for name in names), path
