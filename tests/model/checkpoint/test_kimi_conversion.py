"""Checkpoints as Kimi's are published, INT4, FP8 and bfloat16: every weight, on every layout, and every refusal."""

import json
from collections import Counter
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jaxspec.model.checkpoint.conversion import convert, plan_conversion
from jaxspec.model.checkpoint.loading import load_target, open_checkpoint
from jaxspec.model.checkpoint.sources import open_source
from jaxspec.model.quantization.config import SCHEMES
from jaxspec.sharding.arithmetic import cdiv
from jaxspec.sharding.checkpoint.manifest import read_manifest, seal
from jaxspec.sharding.layout import Placement
from jaxspec.sharding.mesh import make_mesh

BF16 = ml_dtypes.bfloat16
LAYERS, EXPERTS, HIDDEN, INNER, DENSE = 2, 16, 160, 256, 48  # 16 experts: "10" sorts before "2".
Q_RANK, KV_RANK, NOPE, ROPE, VALUE, HEADS, VOCABULARY = 24, 40, 8, 4, 6, 8, 64
TEXT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": DENSE,
    "moe_intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "q_lora_rank": Q_RANK,
    "kv_lora_rank": KV_RANK,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": VALUE,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
LINEAR = {
    "self_attn.q_a_proj": (Q_RANK, HIDDEN),
    "self_attn.q_b_proj": (HEADS * (NOPE + ROPE), Q_RANK),
    "self_attn.kv_a_proj_with_mqa": (KV_RANK + ROPE, HIDDEN),
    "self_attn.kv_b_proj": (HEADS * (NOPE + VALUE), KV_RANK),
    "self_attn.o_proj": (HIDDEN, HEADS * VALUE),
}
NORMS = {
    "self_attn.q_a_layernorm": (Q_RANK,),
    "self_attn.kv_a_layernorm": (KV_RANK,),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}
EXPERT = "model.layers.1.mlp.experts.11.down_proj."
NORM = "model.layers.1.input_layernorm.weight"
Tensors = dict[str, np.ndarray]


def mlp(prefix: str, inner: int) -> dict[str, tuple[int, ...]]:
    sizes = {"gate_proj": (inner, HIDDEN), "up_proj": (inner, HIDDEN), "down_proj": (HIDDEN, inner)}
    return {f"{prefix}{name}": shape for name, shape in sizes.items()}


def published(scheme: str | None) -> Tensors:
    """Random tensors under the published flat names; "int4" and "fp8" as those files hold them."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(BF16)

    tensors: Tensors = {
        "model.embed_tokens.weight": normal(VOCABULARY, HIDDEN),
        "model.norm.weight": normal(HIDDEN),
        "lm_head.weight": normal(VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        linear = LINEAR | (mlp("mlp.", DENSE) if layer == 0 else mlp("mlp.shared_experts.", INNER))
        tensors |= {f"{prefix}{name}.weight": normal(*shape) for name, shape in NORMS.items()}
        if layer:
            tensors[f"{prefix}mlp.gate.weight"] = normal(EXPERTS, HIDDEN)
            tensors[f"{prefix}mlp.gate.e_score_correction_bias"] = rng.standard_normal(EXPERTS).astype(np.float32)
        experts = [mlp(f"mlp.experts.{expert}.", INNER) for expert in range(EXPERTS if layer else 0)]
        for name, (outputs, inputs) in {
            key: shape for group in (linear, *experts) for key, shape in group.items()
        }.items():
            name = f"{prefix}{name}.weight"
            if scheme == "int4" and ".experts." in name:
                tensors[f"{name}_packed"] = rng.integers(-(2**31), 2**31, (outputs, inputs // 8), dtype=np.int32)
                tensors[f"{name}_scale"] = normal(outputs, inputs // 32)
                tensors[f"{name}_shape"] = np.array([outputs, inputs], np.int32)
            elif scheme == "fp8":
                tensors[name] = rng.standard_normal((outputs, inputs)).astype(ml_dtypes.float8_e4m3fn)
                tensors[f"{name}_scale_inv"] = rng.random((cdiv(outputs, 128), cdiv(inputs, 128))).astype(np.float32)
            else:
                tensors[name] = normal(outputs, inputs)
    return tensors


def write(folder: Path, tensors: Tensors, scheme: str | None, wrapper: bool, **settings: Any) -> Path:
    """A folder of two shards, the second layer alone in the second one; in the wrapper with vision tensors."""
    text: dict[str, Any] = TEXT | settings
    if scheme:
        text["quantization_config"] = dict(SCHEMES[scheme].section)
    config = text
    if wrapper:
        tensors = {f"language_model.{name}": array for name, array in tensors.items()}
        tensors |= {"mm_projector.proj.0.bias": np.ones(3, BF16), "vision_tower.a": np.ones((2, 2), BF16)}
        names = ["KimiK25ForConditionalGeneration"]
        config = {"architectures": names, "model_type": "kimi_k25", "text_config": text, "tie_word_embeddings": False}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    shards = {name: f"model-0000{1 + ('layers.1.' in name)}-of-000002.safetensors" for name in tensors}
    for file in sorted(set(shards.values())):
        save_file({name: array for name, array in tensors.items() if shards[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    return folder


def dequantised(weight: np.ndarray, scale_inv: np.ndarray) -> np.ndarray:
    """Each scale spread over its block, the last ones cut."""
    spread = np.kron(scale_inv, np.ones((128, 128), np.float32))[: weight.shape[0], : weight.shape[1]]
    return weight.astype(np.float32) * spread


def expected(tensors: Tensors, name: str) -> np.ndarray:
    """What our weight called `name` should be, in float32 where it is not quantised."""
    theirs = name if name.startswith("lm_head") else f"model.{name}"
    if ".mlp.experts." in theirs:
        before, after = theirs.split(".experts.")
        return np.stack([tensors[f"{before}.experts.{expert}.{after}"] for expert in range(EXPERTS)])
    if tensors[theirs].dtype == ml_dtypes.float8_e4m3fn:
        return dequantised(tensors[theirs], tensors[f"{theirs}_scale_inv"])
    return tensors[theirs].astype(np.float32)


def converted(source: Path, output: Path, dtype: str | None = None) -> Path:
    opened = open_source(source)
    convert(opened, plan_conversion(opened, dtype=dtype, max_part_bytes=200_000), output)
    return output


@pytest.mark.parametrize(
    ("scheme", "wrapper", "dtype"),
    [
        ("int4", True, None),
        ("int4", False, "float32"),
        ("fp8", False, "float32"),
        ("fp8", True, None),
        (None, False, None),
    ],
)
def test_every_weight_on_every_layout(tmp_path, scheme, wrapper, dtype):
    tensors = published(scheme)
    output = converted(write(tmp_path / "source", tensors, scheme, wrapper), tmp_path / "model", dtype)
    checkpoint = open_checkpoint(output)
    assert (checkpoint.family, checkpoint.kind, checkpoint.dtype) == ("kimi", "target", dtype or "bfloat16")
    assert max(part.nbytes for part in checkpoint.manifest.parts) <= 200_000
    slabs = Counter(slab.tensor.name for part in checkpoint.manifest.parts for slab in part.slabs)
    stacks = [n for name, n in slabs.items() if ".experts." in name and not name.endswith(("scale", "scale_inv"))]
    assert len(stacks) == 3
    assert min(stacks) > 1, "every stack of experts is cut"
    layouts = [(1, Placement()), (8, Placement(experts="expert"))]
    layouts += [(2, Placement())] if scheme == "fp8" else [(8, Placement())]  # Two blocks of 128 inner units.
    for devices, placement in layouts:
        target = load_target(output, make_mesh(devices), placement=placement)
        flat = nnx.to_flat_state(nnx.state(target, nnx.Param))
        weights = {".".join(map(str, path)): leaf.get_value() for path, leaf in flat}
        for name, array in weights.items():
            values = expected(tensors, name)
            if values.dtype == np.float32 and not name.endswith(("e_score_correction_bias", "scale_inv")):
                values = values.astype(checkpoint.dtype)
            assert array.dtype == values.dtype, name
            for piece in array.addressable_shards:
                np.testing.assert_array_equal(np.asarray(piece.data), values[piece.index], err_msg=name)
        split = weights["layers.1.mlp.experts.down_proj.weight" + ("_packed" if scheme == "int4" else "")]
        assert split.addressable_shards[0].data.nbytes * devices == split.nbytes


def test_every_tensor_is_read_once_and_onwards(tmp_path):
    source = open_source(write(tmp_path / "source", published("int4"), "int4", wrapper=True))
    plan = plan_conversion(source, max_part_bytes=200_000)
    assert plan.notes == ("2 tensors from mm_projector.proj.0.bias on: left out, only text is read, no images",)
    place = {name: number for number, name in enumerate(source.tensors)}
    seen: list[str] = []
    read = source.read
    source.read = lambda name, *rows: (seen.append(name), read(name, *rows))[1]
    convert(source, plan, tmp_path / "out")
    assert len(seen) == len(set(seen))
    assert set(seen) == {name for name in place if "language_model" in name and not name.endswith("weight_shape")}
    holds = {}
    for part in plan.parts:
        for slab in part.slabs:
            recipe = plan.recipes[slab.tensor.name]
            names = recipe.names[slab.start : slab.stop] if recipe.stacked else recipe.names
            holds |= dict.fromkeys(names, part.name)
    runs = [(part, [place[name] for name in names]) for part, names in groupby(seen, key=holds.get)]
    assert [part for part, _ in runs] == [part.name for part in plan.parts], "part after part"
    assert [places[0] for _, places in runs] == sorted(places[0] for _, places in runs), "as the files go on"
    assert all(places == sorted(places) for _, places in runs)


def without(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def having(**changed: np.ndarray) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({EXPERT + name: array for name, array in changed.items()})


def poisoned(name: str, value: float) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[name] = tensors[name].copy()
        tensors[name][3, 1] = value

    return edit


@pytest.mark.parametrize(
    ("scheme", "edit", "message"),
    [
        ("int4", without(EXPERT + "weight_packed"), r"missing NAMEweight_packed$"),
        ("int4", without(EXPERT + "weight_scale"), r"missing NAMEweight_scale$"),
        ("int4", without(EXPERT + "weight_shape"), r"missing NAMEweight_shape$"),
        (
            "int4",
            having(weight_shape=np.array([160, 264], np.int32)),
            r"wrong NAMEweight_shape \(found \[160, 264\], exp",
        ),
        (
            "int4",
            having(weight_shape=np.array([160], np.int64)),
            r"misshapen NAMEweight_shape \(found \[1\], expected \[2",
        ),
        (
            "int4",
            having(weight_scale=np.ones((160, 7), BF16)),
            r"misshapen NAMEweight_scale \(found \[160, 7\], expected",
        ),
        (
            "int4",
            having(weight_scale=np.ones((160, 8), np.float16)),
            r"unsupported dtype NAMEweight_scale \(found float16, expected ",
        ),
        (
            "int4",
            having(weight_packed=np.ones((160, 32), np.float32)),
            r"unsupported dtype NAMEweight_packed \(found float32, expected ",
        ),
        (
            "int4",
            having(weight_packed=np.ones((160, 31), np.int32)),
            r"misshapen NAMEweight_packed \(found \[160, 31\], e",
        ),
        (
            "int4",
            having(weight_zero_point=np.ones((20, 8), np.int32)),
            r"zero points, .* symmetric: NAMEweight_zero_point$",
        ),
        ("int4", having(weight_g_idx=np.ones(256, np.int32)), r"unmapped NAMEweight_g_idx$"),
        ("int4", poisoned(EXPERT + "weight_scale", np.nan), r"NAMEweight_scale has NaN or infinite values"),
        ("fp8", without(EXPERT + "weight_scale_inv"), r"missing NAMEweight_scale_inv$"),
        ("fp8", without("model.layers.0.self_attn.o_proj.weight_scale_inv"), r"missing \S+o_proj\.weight_scale_inv$"),
        (
            "fp8",
            having(weight_scale_inv=np.ones((2, 3), np.float32)),
            r"misshapen NAMEweight_scale_inv \(found \[2, 3\], e",
        ),
        ("fp8", having(weight=np.ones((160, 256), BF16)), r"unsupported dtype NAMEweight \(found bfloat16, expected "),
        (
            "fp8",
            lambda tensors: tensors.update({NORM: tensors[NORM].astype(ml_dtypes.float8_e4m3fn)}),
            r"unsupported dtype \S+input_layernorm\.weight \(found float8_e4m3fn, expected ",
        ),
        ("fp8", poisoned(EXPERT + "weight", np.nan), r"NAMEweight has NaN or infinite values"),
        (
            "fp8",
            poisoned("model.layers.0.mlp.up_proj.weight", np.nan),
            r"mlp\.up_proj\.weight has NaN or infinite values",
        ),
        (
            None,
            having(weight=np.ones((160, 256), ml_dtypes.float8_e4m3fn)),
            r"unsupported dtype NAMEweight \(found float8_e4m3fn",
        ),
        (None, having(weight_scale_inv=np.ones((2, 2), np.float32)), r"unmapped NAMEweight_scale_inv$"),
    ],
)
def test_what_contradicts_the_config_is_named(tmp_path, scheme, edit, message):
    tensors = published(scheme)
    edit(tensors)
    source = write(tmp_path / "source", tensors, scheme, wrapper=True)
    with pytest.raises(ValueError, match=message.replace("NAME", f"language_model.{EXPERT}")) as caught:
        converted(source, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.partial").exists() == ("NaN" in message)


def test_layers_for_multi_token_prediction_are_left_out_if_the_config_has_them(tmp_path):
    tensors = published(None) | {"model.layers.2.eh_proj.weight": np.ones((2, 2), BF16)}
    source = write(tmp_path / "one", tensors, None, wrapper=False, num_nextn_predict_layers=1)
    notes = plan_conversion(open_source(source)).notes
    assert notes == (
        "1 tensors from model.layers.2.eh_proj.weight on: left out, layers for multi-token prediction are not used",
    )
    source = write(tmp_path / "none", tensors, None, wrapper=False)
    with pytest.raises(ValueError, match=r"unmapped model\.layers\.2\.eh_proj\.weight$"):
        plan_conversion(open_source(source))


def test_quantised_weights_are_never_cast(tmp_path):
    output = converted(write(tmp_path / "source", published("int4"), "int4", wrapper=False), tmp_path / "model")
    path = output / "jaxspec.json"
    table = json.loads(path.read_text())
    rows = {row["name"]: row for row in table["tensors"]}
    rows["layers.1.mlp.experts.up_proj.weight_packed"]["dtype"] = "float32"
    path.write_text(json.dumps(table | {"sha256": seal(table)}))
    with pytest.raises(
        ValueError, match=r"up_proj\.weight_packed: found \[16, 256, 20\], expected \[16, 256, 20\] of int32"
    ):
        load_target(output, make_mesh(1))
    assert read_manifest(output).tensors["norm.weight"].dtype == "bfloat16"
