"""Which pooling a model's folder asks for, and what is refused."""

import json

import pytest

from paceline.embedding.pooling import choose_pooling
from paceline.errors import ModelFormatError, ParameterError, UnsupportedModelError


def write_folder(path, *, pooling=None, modules=None):
    if pooling is not None:
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if modules is not None:
        steps = [{"type": f"sentence_transformers.models.{name}"} for name in modules]
        (path / "modules.json").write_text(json.dumps(steps))
    return path


@pytest.mark.parametrize(
    ("mode", "pooling"),
    [("mean_tokens", "mean"), ("cls_token", "first"), ("lasttoken", "last")],
)
def test_the_folder_of_a_sentence_transformer_is_obeyed(tmp_path, mode, pooling):
    modes = {f"pooling_mode_{name}": name == mode for name in ("mean_tokens", "cls_token", mode)}
    modules = ["Transformer", "Pooling", "Normalize"]
    folder = write_folder(
        tmp_path, pooling={"word_embedding_dimension": 8, **modes}, modules=modules
    )
    assert choose_pooling(None, folder, is_causal=False) == pooling
    assert choose_pooling("last", folder, is_causal=False) == "last"


def test_it_is_mean_where_nothing_is_said(tmp_path):
    assert choose_pooling(None, tmp_path, is_causal=True) == "mean"
    assert choose_pooling(None, tmp_path / "model.gguf", is_causal=True) == "mean"


@pytest.mark.parametrize(
    "pooling",
    [{}, {"pooling_mode_max_tokens": True},
     {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}],
)  # fmt: skip
def test_other_poolings_are_refused_by_name(tmp_path, pooling):
    with pytest.raises(UnsupportedModelError, match="is not supported"):
        choose_pooling(None, write_folder(tmp_path, pooling=pooling), is_causal=False)


def test_a_step_that_is_not_done_is_refused(tmp_path):
    folder = write_folder(tmp_path, modules=["Transformer", "Pooling", "Dense"])
    with pytest.raises(UnsupportedModelError, match=r"models\.Dense"):
        choose_pooling(None, folder, is_causal=False)


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "modules.json").write_text("{")
    with pytest.raises(ModelFormatError, match=r"modules\.json"):
        choose_pooling(None, tmp_path, is_causal=False)


def test_an_unknown_pooling_and_a_decoders_first_token_are_refused(tmp_path):
    with pytest.raises(ParameterError, match="'cls': choose one of mean, last, first"):
        choose_pooling("cls", tmp_path, is_causal=False)
    with pytest.raises(ParameterError, match="choose mean or last"):
        choose_pooling("first", tmp_path, is_causal=True)
