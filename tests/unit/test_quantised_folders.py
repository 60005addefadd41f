"""Folders that others quantised: the blocks are what the published formulas say, or a refusal."""

from __future__ import annotations

import json

import numpy as np
import pytest

from paceline.errors import ModelFormatError, PacelineError, UnsupportedModelError
from paceline.quantize.source import open_source
from paceline.weights.checkpoint import open_checkpoint
from paceline.weights.tensor import dequantize
from tests.quantised import (
    Codes,
    awq,
    gptq,
    linears,
    packed,
    plain_fp8,
    plain_int8,
    quantise,
    write_quantised,
)
from tests.tiny import random_model

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
MODULE = "model.layers.0.mlp.down_proj"


def tiny(family="llama", **options):
    return random_model(
        family, hidden=128, inner=256, heads=4, kv_heads=2, head_dim=32, layers=1, **options
    )


def compressed(fmt="pack-quantized", activations=None, **weights):
    args = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", **weights}
    group = {"targets": ["Linear"], "weights": args, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors", "format": fmt, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "quantization_status": "compressed",
    }  # fmt: skip


def load(folder, model, config, pack, **write):
    """The tensors of the written folder, and the codes of each linear."""
    made: dict[str, Codes] = {}

    def parts(name, weight):
        made[name], stored = pack(weight)
        return stored

    write_quantised(model, folder, config, parts, **write)
    return open_checkpoint(folder).tensors, made


def check(tensors, made, fmt):
    """Every linear is in `fmt` and has the published values: all of them, or but for a minimum.

    A minimum has up to 15 or 19 digits where f16 has 11. What it loses all weights of the group
    lose, and nothing else: the lesser loss of counting from the lowest code and from the highest.
    """
    for name, codes in made.items():
        tensor, want = tensors[f"{name}.weight"], codes.weight()
        assert tensor.format == fmt
        assert tensor.num_bytes == tensor.data.nbytes
        got = dequantize(tensor)
        if "m_" in fmt or fmt == "q4_1":
            loss = lost_by_minimums(codes)
            np.testing.assert_allclose(np.abs(got - want), loss[:, codes.groups], rtol=0, atol=1e-8)
            exact = np.isin(codes.zeros, [0, 1, 2, 4, 7, 8, 11, 13, 14, 15])[:, codes.groups]
            if codes.bits == 4:
                assert exact.any()
                np.testing.assert_array_equal(got[exact], want[exact])
        else:
            np.testing.assert_array_equal(got, want)


def lost_by_minimums(codes):
    top, offset = (255, 128) if codes.bits == 8 else (15, 0)
    minimums = [(start - codes.zeros) * codes.scales for start in (offset, top - offset)]
    return np.min([np.abs(m.astype(np.float16).astype(np.float64) - m) for m in minimums], axis=0)


@pytest.mark.parametrize(("group", "fmt"), [(32, "q4_1"), (64, "i4m_g64"), (128, "i4m_g128")])
def test_awq_in_the_gemm_layout_becomes_blocks_with_a_minimum(tmp_path, group, fmt):
    def pack(weight):
        q = quantise(weight, group=group, symmetric=False)
        return q, awq(q)

    tensors, made = load(tmp_path, tiny(), AWQ | {"group_size": group}, pack)
    check(tensors, made, fmt)


def test_awq_with_all_zero_points_in_the_middle_needs_no_minimum_and_is_exact(tmp_path):
    def pack(weight):
        q = quantise(weight, group=-1)
        return q, awq(q)

    tensors, made = load(tmp_path, tiny(), AWQ | {"group_size": -1}, pack)
    check(tensors, made, "i4_g128")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 64, 128, -1])
def test_gptq_in_both_formats_is_what_its_formula_says(tmp_path, bits, version, symmetric, group):
    def pack(weight):
        q = quantise(weight, bits, group, symmetric=symmetric)
        return q, gptq(q, version=version)

    config = GPTQ | {"bits": bits, "group_size": group, "sym": symmetric}
    config |= {"checkpoint_format": "gptq_v2"} if version == 2 else {}
    tensors, made = load(tmp_path, tiny(), config, pack)
    width = 128 if group == -1 else group
    small = {(4, True): "q4_0", (4, False): "q4_1", (8, True): "q8_0", (8, False): "i8m_g32"}
    suffix = "" if symmetric else "m"
    fmt = small[bits, symmetric] if width == 32 else f"i{bits}{suffix}_g{width}"
    check(tensors, made, fmt)


def test_gptq_without_g_idx_counts_its_groups(tmp_path):
    def pack(weight):
        q = quantise(weight, group=64)
        return q, gptq(q, g_idx=False)

    tensors, made = load(tmp_path, tiny(), GPTQ | {"group_size": 64}, pack)
    check(tensors, made, "i4_g64")


def test_a_stored_zero_of_all_ones_is_zero_in_the_first_gptq_format(tmp_path):
    def pack(weight):
        q = quantise(np.abs(weight), group=64, symmetric=False)
        assert not q.zeros.all()
        return q, gptq(q)

    tensors, made = load(tmp_path, tiny(), GPTQ | {"group_size": 64, "sym": False}, pack)
    check(tensors, made, "i4m_g64")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_act_order_puts_the_columns_of_a_group_together(tmp_path, bits, symmetric):
    def pack(weight):
        q = quantise(weight, bits, 64, symmetric=symmetric, act_order=5)
        return q, gptq(q)

    config = GPTQ | {"bits": bits, "group_size": 64, "sym": symmetric, "desc_act": True}
    tensors, made = load(tmp_path, tiny(), config, pack)
    check(tensors, made, f"i{bits}{'' if symmetric else 'm'}_g64")
    assert sorted(tensors[f"{MODULE}.weight"].column_order) == list(range(256))


def test_each_linear_may_have_its_own_bits_and_group_where_the_config_is_dynamic(tmp_path):
    def pack(weight):
        wide = weight.shape[1] == 256
        q = quantise(weight, 8 if wide else 4, 128 if wide else 32)
        return q, gptq(q)

    config = GPTQ | {"dynamic": {r"+:.*down_proj": {"bits": 8, "group_size": 128}}}
    tensors, made = load(tmp_path, tiny(), config, pack)
    check(tensors, {MODULE: made.pop(MODULE)}, "i8_g128")
    check(tensors, made, "q4_0")


@pytest.mark.parametrize("zeros", [None, "packed", "plain"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("strategy", "group"), [("group", 128), ("group", 32), ("channel", -1)])
def test_packed_compressed_tensors_are_what_their_formula_says(
    tmp_path, zeros, bits, strategy, group
):
    def pack(weight):
        q = quantise(weight, bits, group, symmetric=zeros is None, scales="BF16")
        return q, packed(q, zeros=zeros)

    size = {"group_size": group} if group > 0 else {}
    config = compressed(num_bits=bits, strategy=strategy, symmetric=zeros is None, **size)
    tensors, made = load(tmp_path, tiny("qwen2"), config, pack)
    small = {(4, True): "q4_0", (4, False): "q4_1", (8, True): "q8_0", (8, False): "i8m_g32"}
    suffix = "" if zeros is None else "m"
    fmt = small[bits, zeros is None] if group == 32 else f"i{bits}{suffix}_g128"
    check(tensors, made, fmt)


def test_packed_weights_in_activation_order_are_put_together(tmp_path):
    def pack(weight):
        q = quantise(weight, 4, 32, act_order=2, scales="BF16")
        return q, packed(q, g_idx=True)

    config = compressed(group_size=32, actorder="group")
    tensors, made = load(tmp_path, tiny("qwen3"), config, pack)
    check(tensors, made, "q4_0")


@pytest.mark.parametrize("zeros", [False, True])
def test_w8a8_with_a_scale_a_row_keeps_its_codes(tmp_path, zeros):
    def pack(weight):
        q = quantise(weight, 8, -1, symmetric=not zeros, scales="BF16")
        return q, plain_int8(q, zeros=zeros)

    activations = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    config = compressed(
        "int-quantized", activations, num_bits=8, strategy="channel", symmetric=not zeros
    )
    tensors, made = load(tmp_path, tiny(), config, pack)
    check(tensors, made, "i8m_g128" if zeros else "i8_g128")


@pytest.mark.parametrize(
    ("strategy", "block", "fmt"),
    [
        ("channel", (1, 1 << 20), "f8_g128"),
        ("tensor", (1 << 20, 1 << 20), "f8_g128"),
        ("block", (64, 32), "f8_g32"),
        ("group", (1, 64), "f8_g64"),
    ],
)
def test_fp8_of_compressed_tensors_keeps_its_codes_and_scales(tmp_path, strategy, block, fmt):
    dense = {}

    def parts(name, weight):
        stored, dense[name] = plain_fp8(weight, block)
        if strategy == "tensor":
            kind, scale = stored["weight_scale"]
            stored["weight_scale"] = (kind, scale.reshape(()))
        return stored

    sizes = {"block": {"block_structure": [64, 32]}, "group": {"group_size": 64}}
    args = {"num_bits": 8, "type": "float", "strategy": strategy, **sizes.get(strategy, {})}
    write_quantised(tiny(), tmp_path, compressed("float-quantized", **args), parts)
    tensors = open_checkpoint(tmp_path).tensors
    for name, want in dense.items():
        assert tensors[f"{name}.weight"].format == fmt
        np.testing.assert_array_equal(dequantize(tensors[f"{name}.weight"]), want)


def test_fp8_in_blocks_of_128_rounds_its_f32_scales_to_f16_and_nothing_else(tmp_path):
    dense = {}

    def parts(name, weight):
        stored, dense[name] = plain_fp8(weight, (128, 128), "weight_scale_inv", "F32")
        return stored

    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    write_quantised(tiny("qwen3"), tmp_path, config, parts)
    tensors = open_checkpoint(tmp_path).tensors
    for name, want in dense.items():
        got = dequantize(tensors[f"{name}.weight"])
        assert (np.abs(got - want) <= np.abs(want) * 2.0**-11).all()
        assert (np.abs(got - want) > 0).any()


def test_a_scheme_is_chosen_by_name_before_class_and_ignored_linears_stay_as_they_are(tmp_path):
    def parts(name, weight):
        if name.endswith("o_proj"):
            return {"weight": ("F32", weight.astype("<f4"))}
        if name.endswith("down_proj"):
            return plain_int8(quantise(weight, 8, -1, scales="BF16"))
        return packed(quantise(weight, 4, 64, scales="BF16"))

    config = compressed(group_size=64)
    config["format"] = "mixed-precision"
    config["ignore"] += ["re:.*o_proj"]
    config["config_groups"]["group_1"] = {
        "targets": ["re:.*down_proj$"], "format": "int-quantized",
        "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    }  # fmt: skip
    write_quantised(tiny(), tmp_path, config, parts)
    formats = {name: t.format for name, t in open_checkpoint(tmp_path).tensors.items()}
    assert formats[f"{MODULE}.weight"] == "i8_g128"
    assert formats["model.layers.0.self_attn.o_proj.weight"] == "f32"
    assert formats["model.layers.0.mlp.up_proj.weight"] == "i4_g64"


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text"])
def test_every_family_is_read_from_shards_with_its_biases_and_a_tied_head(tmp_path, family):
    def pack(weight):
        q = quantise(weight, group=64)
        return q, gptq(q)

    model = tiny(family, tie_word_embeddings=True)
    tensors, made = load(tmp_path, model, GPTQ | {"group_size": 64}, pack, shards=3)
    check(tensors, made, "i4_g64")
    assert ("model.layers.0.self_attn.q_proj.bias" in tensors) == (family == "qwen2")
    for name in set(tensors) - {f"{name}.weight" for name in made}:
        offset = 1.0 if family == "gemma3_text" and name.endswith("norm.weight") else 0.0
        np.testing.assert_array_equal(
            dequantize(tensors[name]), (model.tensors[name] + np.float32(offset))
        )


def test_a_quantised_head_is_read_too(tmp_path):
    model = tiny(vocab_size=512)
    q = quantise(model.tensors["lm_head.weight"], group=64)
    head = {f"lm_head.{part}": stored for part, stored in gptq(q).items()}
    model = model.without("lm_head.weight")
    write_quantised(
        model, tmp_path, GPTQ | {"group_size": 64, "lm_head": True},
        lambda name, w: gptq(quantise(w, group=64)), extra=head,
    )  # fmt: skip
    np.testing.assert_array_equal(
        dequantize(open_checkpoint(tmp_path).tensors["lm_head.weight"]), q.weight()
    )


def test_bf16_scales_below_f16_are_rounded_and_said(tmp_path, caplog):
    def parts(name, weight):
        q = quantise(weight * 1e-7, group=64, scales="BF16")
        return packed(q)

    write_quantised(tiny(), tmp_path, compressed(group_size=64), parts)
    with caplog.at_level("WARNING"):
        dequantize(open_checkpoint(tmp_path).tensors[f"{MODULE}.weight"])
    assert f"{MODULE}.weight_packed: f16 keeps" in caplog.text


def test_a_scale_beyond_f16_is_refused_by_name_when_the_weight_is_made(tmp_path):
    def parts(name, weight):
        q = quantise(weight * 1e7, group=64, scales="BF16")
        return packed(q)

    write_quantised(tiny(), tmp_path, compressed(group_size=64), parts)
    tensor = open_checkpoint(tmp_path).tensors[f"{MODULE}.weight"]
    with pytest.raises(UnsupportedModelError, match=rf"{MODULE}.\w+ has a scale or min.*65504"):
        dequantize(tensor)


# ---- refusals ----


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes.*float weights"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "hqq"}, "'hqq'.*awq, gptq, compressed-tensors, fp8 are read"),
        ({"quant_method": "mxfp4"}, "'mxfp4'"),
        ({"quant_method": "exl2"}, "'exl2'"),
        ({"bits": 4}, "an unnamed method"),
        (AWQ | {"version": "gemv"}, "AWQ in the layout 'gemv'.*gemm"),
        (AWQ | {"version": "gemv_fast"}, "'gemv_fast'"),
        ({"quant_method": "awq", "bits": 4, "checkpoint_format": "llm-awq"}, "'llm-awq'"),
        (AWQ | {"bits": 8}, "AWQ of 8 bits"),
        (AWQ | {"group_size": 0}, "group_size is 0"),
        (GPTQ | {"bits": 3}, "GPTQ of 3 bits.*4 and 8"),
        (GPTQ | {"bits": 2}, "GPTQ of 2 bits"),
        (GPTQ | {"checkpoint_format": "marlin"}, "GPTQ in the format 'marlin'.*gptq_v2"),
        (GPTQ | {"is_marlin_format": True}, "'marlin'"),
        (GPTQ | {"group_size": "128"}, "group_size is '128'"),
        (compressed("nvfp4-pack-quantized"), "'nvfp4-pack-quantized'"),
        (compressed("marlin-24"), "'marlin-24'"),
        (compressed(num_bits=3), "int weights of 3 bits"),
        (compressed(type="float"), "float weights of 4 bits"),
        (compressed(strategy="tensor_group"), "strategy 'tensor_group'"),
        (compressed(activations={"num_bits": 4}), "activations of 4 bits"),
        (compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24"),
        (compressed() | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "FP8 as 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
    ],
)
def test_what_is_not_read_is_refused_by_its_name(tmp_path, config, match):
    write_quantised(tiny(), tmp_path, config, lambda name, w: gptq(quantise(w)))
    with pytest.raises((UnsupportedModelError, ModelFormatError), match=match):
        open_checkpoint(tmp_path)


def test_groups_that_no_block_holds_are_refused_with_the_tensor(tmp_path):
    config = GPTQ | {"group_size": 16}
    write_quantised(tiny(), tmp_path, config, lambda name, w: gptq(quantise(w, group=16)))
    with pytest.raises(UnsupportedModelError, match=r"q_proj\.qweight .* in groups of 16: mult"):
        open_checkpoint(tmp_path)


def test_quantised_tensors_without_a_config_are_refused_with_the_remedy(tmp_path):
    write_quantised(tiny(), tmp_path, None, lambda name, w: gptq(quantise(w)))
    with pytest.raises(ModelFormatError, match="no quantization_config: copy it from"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_a_bias_that_the_family_has_no_place_for_must_be_zero(tmp_path, value):
    bias = {f"{MODULE}.bias": ("F16", np.full(128, value, np.float16))}
    write_quantised(tiny(), tmp_path, GPTQ, lambda name, w: gptq(quantise(w)), extra=bias)
    if value:
        with pytest.raises(UnsupportedModelError, match=rf"{MODULE}.bias is not zero"):
            open_checkpoint(tmp_path)
    else:
        assert f"{MODULE}.bias" not in open_checkpoint(tmp_path).tensors


def test_quantize_does_not_take_what_others_quantised(tmp_path):
    write_quantised(tiny(), tmp_path, GPTQ, lambda name, w: gptq(quantise(w)))
    with pytest.raises(UnsupportedModelError, match="quantised with gptq already"):
        open_source(tmp_path)


# ---- damage ----


def spoil(parts, part, change):
    dtype, array = parts[part]
    parts[part] = change(dtype, array)
    return parts


DAMAGE = {
    "cut words": ("qweight", lambda d, a: (d, a[:-1])),
    "words of another dtype": ("qweight", lambda d, a: ("I64", a.astype(np.int64))),
    "float words": ("qweight", lambda d, a: ("F32", a.astype(np.float32))),
    "words in one dimension": ("qweight", lambda d, a: (d, a.ravel())),
    "fewer scales": ("scales", lambda d, a: (d, a[:-1])),
    "scales of fewer outputs": ("scales", lambda d, a: (d, a[:, :-8])),
    "scales of another dtype": ("scales", lambda d, a: ("I32", a.astype(np.int32))),
    "fewer zeros": ("qzeros", lambda d, a: (d, a[:, :-1])),
    "zeros of another dtype": ("qzeros", lambda d, a: ("F16", a.view(np.float16))),
    "short g_idx": ("g_idx", lambda d, a: (d, a[:-1])),
    "g_idx below 0": ("g_idx", lambda d, a: (d, a - 1)),
    "g_idx beyond the scales": ("g_idx", lambda d, a: (d, a + 1)),
    "g_idx of another dtype": ("g_idx", lambda d, a: ("I64", a.astype(np.int64))),
}


@pytest.mark.parametrize(
    ("method", "name"),
    [(m, n) for m in ("gptq", "awq") for n in DAMAGE if m == "gptq" or "g_idx" not in n],
)
def test_damaged_parts_are_refused_by_the_name_of_a_tensor(tmp_path, method, name):
    part, change = DAMAGE[name]
    pack, config = (gptq, GPTQ) if method == "gptq" else (awq, AWQ)

    def parts(module, weight):
        made = pack(quantise(weight, symmetric=False))
        return spoil(made, part, change) if module == MODULE else made

    write_quantised(tiny(), tmp_path, config, parts)
    with pytest.raises(PacelineError, match=MODULE):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("method", "part"),
    [
        ("gptq", "scales"), ("gptq", "qzeros"), ("awq", "scales"), ("awq", "qzeros"),
        ("packed", "weight_scale"), ("packed", "weight_zero_point"), ("int8", "weight_scale"),
        ("fp8", "weight_scale_inv"),
    ],
)  # fmt: skip
def test_a_missing_part_is_named(tmp_path, method, part):
    packers = {
        "gptq": (GPTQ, lambda w: gptq(quantise(w, symmetric=False))),
        "awq": (AWQ, lambda w: awq(quantise(w, symmetric=False))),
        "packed": (
            compressed(group_size=32, symmetric=False),
            lambda w: packed(quantise(w, symmetric=False), zeros="packed"),
        ),
        "int8": (
            compressed("int-quantized", num_bits=8, strategy="channel"),
            lambda w: plain_int8(quantise(w, 8, -1)),
        ),
        "fp8": (
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            lambda w: plain_fp8(w, (128, 128), "weight_scale_inv", "F32")[0],
        ),
    }
    config, pack = packers[method]

    def parts(module, weight):
        made = pack(weight)
        if module == MODULE:
            del made[part]
        return made

    write_quantised(tiny(), tmp_path, config, parts)
    with pytest.raises(ModelFormatError, match=rf"{MODULE}.{part} is missing"):
        open_checkpoint(tmp_path)


def test_a_cut_file_is_refused(tmp_path):
    write_quantised(tiny(), tmp_path, GPTQ, lambda name, w: gptq(quantise(w)))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelFormatError, match="is cut"):
        open_checkpoint(tmp_path)


def test_any_tensor_replaced_by_noise_of_any_kind_is_refused_or_read_never_a_crash(tmp_path):
    rng = np.random.default_rng(0)
    dtypes = {"I32": np.int32, "I8": np.int8, "F16": np.float16, "F32": np.float32, "U8": np.uint8}
    model = tiny()
    refused = 0
    for i in range(24):
        folder = tmp_path / str(i)
        victim = rng.choice(linears(model))
        dtype = rng.choice(list(dtypes))
        shape = tuple(int(n) for n in rng.integers(1, 40, rng.integers(1, 4)))
        noise = rng.integers(0, 100, shape).astype(dtypes[dtype])
        kind = ("gptq", "awq", "packed")[i % 3]
        config = {"gptq": GPTQ, "awq": AWQ, "packed": compressed(group_size=32)}[kind]
        pack = {"gptq": gptq, "awq": awq, "packed": packed}[kind]

        def parts(module, weight, pack=pack, victim=victim, dtype=dtype, noise=noise):
            made = pack(quantise(weight))
            if module == victim:
                made[rng.choice(list(made))] = (str(dtype), noise)
            return made

        write_quantised(model, folder, config, parts)
        try:
            tensors = open_checkpoint(folder).tensors
            for name in linears(model):
                dequantize(tensors[f"{name}.weight"])
        except PacelineError:
            refused += 1
    assert refused == 24


def test_opening_reads_no_codes(tmp_path):
    write_quantised(tiny(), tmp_path, GPTQ, lambda name, w: gptq(quantise(w)))
    for name in linears(tiny()):
        assert callable(open_checkpoint(tmp_path).tensors[f"{name}.weight"].stored)


def test_config_json_without_a_table_of_quantisation_is_a_float_model(tmp_path):
    write_quantised(tiny(), tmp_path, {}, lambda name, w: {"weight": ("F32", w.astype("<f4"))})
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"] == {}
    assert open_checkpoint(tmp_path).tensors[f"{MODULE}.weight"].format == "f32"
