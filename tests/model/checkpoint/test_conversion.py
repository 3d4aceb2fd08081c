"""Published checkpoints converted and loaded again: every weight, every refusal, the kill, the memory."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from safetensors.numpy import save_file
from typer.testing import CliRunner

from jaxspec.model.checkpoint.conversion import convert, is_converted, plan_conversion
from jaxspec.model.checkpoint.loading import load_drafter, load_target, open_checkpoint
from jaxspec.model.checkpoint.sources import open_source
from jaxspec.model.families.config import ModelConfig, read_model_config
from jaxspec.sharding.checkpoint.manifest import MANIFEST, read_manifest, seal
from jaxspec.sharding.mesh import make_mesh
from scripts.convert_checkpoint import app

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
DRAFTER = SIZES | {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "num_target_layers": 3,
    "dflash_config": {"block_size": 4, "mask_token_id": 95, "target_layer_ids": [0, 1]},
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 3,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
MODELS = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig),
    "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config),
}


def hugging_face(folder: Path, family: str = "llama", shard: str = "5GB", **settings: Any) -> dict[str, np.ndarray]:
    """Saves a tiny random model as transformers does; returns its weights, those of q/k norms random too."""
    model_class, config_class = MODELS[family]
    torch.manual_seed(0)
    model = model_class(config_class(**SIZES, **settings))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(folder, max_shard_size=shard)
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def drafter_weights(prefix: str = "") -> dict[str, np.ndarray]:
    """The tensors of the published DFlash layout, in bfloat16."""
    hidden, inner, heads, kv_heads = 32, 48, 4 * 16, 2 * 16
    shapes: dict[str, tuple[int, ...]] = {"fc": (hidden, 2 * hidden), "hidden_norm": (hidden,), "norm": (hidden,)}
    for layer in ("layers.0", "layers.1"):
        shapes |= {
            f"{layer}.input_layernorm": (hidden,),
            f"{layer}.post_attention_layernorm": (hidden,),
            f"{layer}.self_attn.q_proj": (heads, hidden),
            f"{layer}.self_attn.k_proj": (kv_heads, hidden),
            f"{layer}.self_attn.v_proj": (kv_heads, hidden),
            f"{layer}.self_attn.o_proj": (hidden, heads),
            f"{layer}.self_attn.q_norm": (16,),
            f"{layer}.self_attn.k_norm": (16,),
            f"{layer}.mlp.gate_proj": (inner, hidden),
            f"{layer}.mlp.up_proj": (inner, hidden),
            f"{layer}.mlp.down_proj": (hidden, inner),
        }
    rng = np.random.default_rng(1)
    return {
        f"{prefix}{name}.weight": rng.standard_normal(shape).astype(ml_dtypes.bfloat16)
        for name, shape in shapes.items()
    }


def save_drafter(folder: Path, prefix: str = "", **settings: Any) -> dict[str, np.ndarray]:
    folder.mkdir()
    weights = drafter_weights(prefix)
    (folder / "config.json").write_text(json.dumps(DRAFTER | settings))
    save_file(weights, folder / "model.safetensors")
    return weights


def converted(source: Path, output: Path, dtype: str | None = None, **options: Any) -> Path:
    opened = open_source(source)
    convert(opened, plan_conversion(opened, dtype=dtype, **options), output)
    return output


def weights_of(module: nnx.Module) -> dict[str, jax.Array]:
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {".".join(map(str, path)): leaf.get_value() for path, leaf in flat}


def target_config() -> ModelConfig:
    return read_model_config(SIZES | LLAMA)


@pytest.mark.parametrize(
    ("family", "tied", "shard"),
    [("llama", True, "5GB"), ("llama", False, "20KB"), ("qwen3", True, "20KB"), ("qwen3", False, "5GB")],
)
def test_every_weight_of_a_hugging_face_folder(tmp_path, family, tied, shard):
    theirs = hugging_face(tmp_path / "source", family, shard, tie_word_embeddings=tied)
    assert (tmp_path / "source" / "model.safetensors.index.json").exists() == (shard == "20KB")
    output = converted(tmp_path / "source", tmp_path / "model", max_part_bytes=10_000)  # Cuts the embedding.
    assert any(slab.shape != slab.tensor.shape for part in read_manifest(output).parts for slab in part.slabs)
    for devices in (1, 8):
        ours = weights_of(load_target(output, make_mesh(devices)))
        assert len(ours) == len(theirs) - tied
        for name, array in ours.items():
            expected = theirs[name if name.startswith("lm_head") else f"model.{name}"]
            assert array.dtype == jnp.float32
            np.testing.assert_array_equal(np.asarray(array), expected, err_msg=name)
            for piece in array.addressable_shards:
                np.testing.assert_array_equal(np.asarray(piece.data), expected[piece.index], err_msg=name)
    # 96 rows of vocabulary and 48 of MLP divide by 8; 4 heads do not.
    split = {name.removesuffix(".weight") for name, array in ours.items() if not array.is_fully_replicated}
    assert {"embed_tokens", "layers.0.mlp.gate_proj", "layers.0.mlp.down_proj"} <= split
    assert not {"layers.0.self_attn.q_proj", "norm"} & split
    assert open_checkpoint(output).family == family


@pytest.mark.parametrize("prefix", ["", "model."])
def test_every_weight_of_a_drafter(tmp_path, prefix):
    theirs = save_drafter(tmp_path / "source", prefix)
    output = converted(tmp_path / "source", tmp_path / "drafter")
    assert open_checkpoint(output).kind == "drafter"
    for devices in (1, 4):
        ours = weights_of(load_drafter(output, make_mesh(devices), target_config()))
        assert {prefix + name for name in ours} == set(theirs)
        for name, array in ours.items():
            assert array.dtype == jnp.bfloat16
            np.testing.assert_array_equal(np.asarray(array), theirs[prefix + name], err_msg=name)


def test_dtypes(tmp_path):
    theirs = save_drafter(tmp_path / "source")["fc.weight"]
    stored = converted(tmp_path / "source", tmp_path / "f32", dtype="float32")
    assert open_checkpoint(stored).dtype == "float32"
    for asked, expected in ((None, jnp.float32), ("float16", jnp.float16), (jnp.bfloat16, jnp.bfloat16)):
        fc = load_drafter(stored, make_mesh(1), target_config(), asked).fc.weight[...]
        assert fc.dtype == expected
        np.testing.assert_array_equal(np.asarray(fc), theirs.astype(np.float32).astype(expected))
    weights = drafter_weights()
    weights["fc.weight"][3, 5] = 1e6
    save_file(weights, tmp_path / "source" / "model.safetensors")
    with pytest.raises(ValueError, match=r"fc\.weight has values beyond float16's range"):
        converted(tmp_path / "source", tmp_path / "f16", dtype="float16")
    with pytest.raises(ValueError, match="dtype: found 'int8', expected one of float32, bfloat16, float16"):
        converted(tmp_path / "source", tmp_path / "i8", dtype="int8")


def test_the_real_model(smollm2_checkpoint, smollm2_gguf):
    source = open_source(smollm2_gguf)
    assert plan_conversion(source).dtype == "bfloat16"
    target = load_target(smollm2_checkpoint, make_mesh(1))
    ours = weights_of(target)
    assert sum(array.size for array in ours.values()) == 134_515_008
    for name in ("layers.11.self_attn.q_proj.weight", "layers.29.self_attn.k_proj.weight", "norm.weight"):
        np.testing.assert_array_equal(np.asarray(ours[name]), source.read(f"model.{name}"))
    rows = source.read("model.embed_tokens.weight", 40_000, 41_000)
    np.testing.assert_array_equal(np.asarray(ours["embed_tokens.weight"])[40_000:41_000], rows)
    assert (open_checkpoint(smollm2_checkpoint).tokenizer_folder / "tokenizer.json").is_file()


def test_derived_and_tied_tensors_are_left_out_with_a_note(tmp_path):
    weights = hugging_face(tmp_path / "source", tie_word_embeddings=True)
    weights = {name: np.ascontiguousarray(array) for name, array in weights.items()}
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    save_file(weights, tmp_path / "source" / "model.safetensors")
    plan = plan_conversion(open_source(tmp_path / "source"))
    assert plan.notes == (
        "lm_head.weight: left out, tied to the embedding",
        "model.layers.0.self_attn.rotary_emb.inv_freq: left out, it follows from the config",
    )
    assert not {"lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"} & {
        name for recipe in plan.recipes.values() for name in recipe.names
    }


def without(name: str):
    return lambda weights: {n: array for n, array in weights.items() if n != name}


def having(name: str, array: np.ndarray):
    return lambda weights: weights | {name: array}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (without("layers.1.mlp.up_proj.weight"), r"missing layers\.1\.mlp\.up_proj\.weight$"),
        (having("layers.0.self_attn.q_proj.bias", np.ones(64)), r"unmapped layers\.0\.self_attn\.q_proj\.bias$"),
        (
            having("fc.weight", np.ones((32, 96), "f4")),
            r"misshapen fc\.weight \(found \[32, 96\], expected \[32, 64\]\)$",
        ),
        (having("norm.weight", np.ones(32, "i1")), r"unsupported dtype norm\.weight \(found I8, exp"),
        (lambda weights: {"a": np.ones(2, "f4")}, r"missing fc\.weight, .* and 13 more; unmapped a$"),
    ],
    ids=["missing", "unmapped", "misshapen", "dtype", "everything"],
)
def test_tensors_that_do_not_match_stop_it_before_anything_is_written(tmp_path, edit, message):
    weights = save_drafter(tmp_path / "source")
    save_file(edit(weights), tmp_path / "source" / "model.safetensors")
    result = command(tmp_path / "source", tmp_path / "out")
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    with pytest.raises(ValueError, match=message):
        converted(tmp_path / "source", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, r"DFlash 2\) is not supported"),
        ({"architectures": ["MambaForCausalLM"]}, "architectures: found 'MambaForCausalLM', expected one of .*Llama"),
        ({"architectures": None}, r"architectures: found '\(none\)'"),
        ({"architectures": "DFlashDraftModel"}, "architectures: found 'DFlashDraftModel', expected a list of names"),
        ({"attention_bias": True}, "attention_bias: found True"),
    ],
)
def test_unsupported_configs_are_refused_by_name(tmp_path, settings, message):
    save_drafter(tmp_path / "source", **settings)
    with pytest.raises(ValueError, match=message) as caught:
        plan_conversion(open_source(tmp_path / "source"))
    assert "\n" not in str(caught.value)


def test_a_checkpoint_of_the_wrong_kind_or_target(tmp_path):
    save_drafter(tmp_path / "source")
    output = converted(tmp_path / "source", tmp_path / "drafter")
    with pytest.raises(ValueError, match=r"found a drafter \(dflash\), expected a target"):
        load_target(output, make_mesh(1))
    with pytest.raises(ValueError, match="found a drafter .*, expected a target"):
        plan_conversion(open_source(tmp_path / "source"), kind="target")
    other = read_model_config(SIZES | LLAMA | {"vocab_size": 97})
    with pytest.raises(ValueError, match="drafter vocab_size: found 96, but the target has 97"):
        load_drafter(output, make_mesh(1), other)


def test_weights_that_do_not_match_the_config_are_refused(tmp_path):
    save_drafter(tmp_path / "source")
    output = converted(tmp_path / "source", tmp_path / "drafter")
    original = (output / MANIFEST).read_text()
    for key, value, message in (
        ("intermediate_size", 64, r"tensor layers\.0\.mlp\.down_proj\.weight: found \[32, 48\], expected \[32, 64\]"),
        ("num_hidden_layers", 3, r"tensor layers\.2\.\S+: found nothing, expected"),
        ("num_hidden_layers", 1, r"tensor layers\.1\.\S+: found \[\d.*\], expected no such tensor"),
    ):
        table = json.loads(original)
        table["config"][key] = value
        (output / MANIFEST).write_text(json.dumps(table | {"sha256": seal(table)}))
        with pytest.raises(ValueError, match=message):
            load_drafter(output, make_mesh(1), target_config())


def resealed(output: Path, **changes: Any) -> None:
    """Rewrites a manifest as its writer would have written it with other content."""
    table = json.loads((output / MANIFEST).read_text()) | changes
    (output / MANIFEST).write_text(json.dumps(table | {"sha256": seal(table)}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": ["llama"]}, r"manifest family: found \['llama'\], expected one of"),
        ({"kind": "target"}, "manifest kind: found 'target', expected drafter"),
        ({"dtype": "int8"}, "manifest dtype: found 'int8', expected float32 or bfloat16 or float16"),
        ({"dtype": {}}, "manifest dtype: found {}, expected float32"),
        ({"config": 5}, "manifest config: found int, expected an object"),
        ({"config": DRAFTER | {"num_key_value_heads": 3}}, "config.json num_key_value_heads: found 3, expected a div"),
    ],
)
def test_a_manifest_with_other_content_is_refused_by_name(tmp_path, changes, message):
    save_drafter(tmp_path / "source")
    output = converted(tmp_path / "source", tmp_path / "drafter")
    resealed(output, **changes)
    with pytest.raises(ValueError, match=message) as caught:
        open_checkpoint(output)
    assert "\n" not in str(caught.value)


def test_a_config_changed_after_conversion_is_refused(tmp_path):
    save_drafter(tmp_path / "source")
    output = converted(tmp_path / "source", tmp_path / "drafter")
    text = (output / MANIFEST).read_text()
    for before, after in (('"rope_theta": 10000.0', '"rope_theta": 20000.0'), ('"block_size": 4', '"block_size": 5')):
        assert text.count(before) == 1
        (output / MANIFEST).write_text(text.replace(before, after))
        with pytest.raises(ValueError, match="damaged or of another version: sha256: .*convert it again"):
            open_checkpoint(output)


def test_a_manifest_that_names_no_source_is_not_the_conversion_of_one(tmp_path):
    save_drafter(tmp_path / "source")
    output = converted(tmp_path / "source", tmp_path / "drafter")
    source = open_source(tmp_path / "source")
    plan = plan_conversion(source)
    assert is_converted(output, source, plan)
    resealed(output, source="here")
    assert not is_converted(output, source, plan)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_that_are_no_numbers_are_refused_by_name(tmp_path, value, dtype):
    weights = save_drafter(tmp_path / "source")
    weights["layers.1.mlp.up_proj.weight"][40, 3] = value
    save_file(weights, tmp_path / "source" / "model.safetensors")
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight has NaN or infinite values"):
        converted(tmp_path / "source", tmp_path / "out", dtype=dtype)
    assert not (tmp_path / "out").exists()


BYTE_LEVEL = {
    "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
}
TEMPLATED = {"tokenizer.json": json.dumps(BYTE_LEVEL), "tokenizer_config.json": '{"chat_template": "{% if %}"}'}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer.model": "x"}, r"found tokenizer\.model, expected a tokenizer\.json"),
        ({"vocab.json": "{}", "merges.txt": ""}, r"found vocab\.json, expected a tokenizer\.json"),
        ({"tokenizer.json": "{}"}, r"source: tokenizer\.json: not a readable tokenizer"),
        ({"tokenizer.json": json.dumps(BYTE_LEVEL | {"decoder": None})}, r"only ByteLevel is supported"),
        (TEMPLATED, "chat template"),
    ],
    ids=["sentencepiece", "slow", "unreadable", "decoder", "template"],
)
def test_a_tokenizer_that_is_not_read_stops_it_before_anything_is_written(tmp_path, files, message):
    hugging_face(tmp_path / "source")
    for name, text in files.items():
        (tmp_path / "source" / name).write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        plan_conversion(open_source(tmp_path / "source"))
    assert str(caught.value).startswith(f"{tmp_path / 'source'}: ")
    result = command(tmp_path / "source", tmp_path / "out")
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_tokenizer_that_is_read_is_copied(tmp_path):
    hugging_face(tmp_path / "source")
    (tmp_path / "source" / "tokenizer.json").write_text(json.dumps(BYTE_LEVEL))
    (tmp_path / "source" / "tokenizer.model").write_text("x")  # Beside a tokenizer.json it does no harm.
    output = converted(tmp_path / "source", tmp_path / "out")
    assert json.loads((output / "tokenizer" / "tokenizer.json").read_text()) == BYTE_LEVEL
    assert not (output / "tokenizer" / "tokenizer.model").exists()


# The command.


def command(source: Path, output: Path, *options: str):
    return CliRunner().invoke(app, ["--source", str(source), "--output", str(output), *options])


def test_dry_run_prints_the_plan_and_writes_nothing(tmp_path):
    save_drafter(tmp_path / "source", "model.")
    result = command(tmp_path / "source", tmp_path / "out", "--dry-run")
    assert result.exit_code == 0
    assert "drafter (dflash), 25 tensors" in result.stdout
    assert "model.fc.weight -> fc.weight  [32, 64]  part fc" in result.stdout
    report = json.loads(command(tmp_path / "source", tmp_path / "out", "--dry-run", "--json").stdout)
    assert (report["dry_run"], report["tensors"], report["dtype"]) == (True, 25, "bfloat16")
    assert report["bytes"] == sum(array.nbytes for array in drafter_weights().values())
    assert {row["source"] for row in report["mapping"]} == set(drafter_weights("model."))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_the_command_converts_verifies_and_copies_the_tokenizer(tmp_path):
    save_drafter(tmp_path / "source")
    (tmp_path / "source" / "tokenizer.json").write_text('{"a": 1}')
    result = command(tmp_path / "source", tmp_path / "out", "--verify", "--json", "--kind", "drafter")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["verified"]
    assert report["parts"] == len([line for line in result.stderr.splitlines() if line.startswith("verifying")])
    assert (tmp_path / "out" / "tokenizer" / "tokenizer.json").read_text() == '{"a": 1}'
    # Again: in the way, already there, replaced.
    assert "already exists" in command(tmp_path / "source", tmp_path / "out").stderr
    assert command(tmp_path / "source", tmp_path / "out", "--resume", "--verify").exit_code == 0
    again = command(tmp_path / "source", tmp_path / "out", "--resume", "--dtype", "float32")
    assert (again.exit_code, "already exists" in again.stderr) == (2, True)
    assert command(tmp_path / "source", tmp_path / "out", "--overwrite", "--dtype", "float32").exit_code == 0
    assert open_checkpoint(tmp_path / "out").dtype == "float32"


@pytest.mark.parametrize("options", [["--dtype", "int4"], ["--kind", "teacher"], ["--kind", "target"]])
def test_bad_options_are_one_line(tmp_path, options):
    save_drafter(tmp_path / "source")
    result = command(tmp_path / "source", tmp_path / "out", *options)
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stderr.startswith("error: ")


def test_the_source_is_never_overwritten(tmp_path):
    save_drafter(tmp_path / "source")
    for output in (tmp_path / "source", tmp_path):
        result = command(tmp_path / "source", output, "--overwrite")
        assert "holds the source" in result.stderr
    assert (tmp_path / "source" / "model.safetensors").exists()


def test_the_script(tmp_path):
    """As a user runs it: the exit code, one line on stderr, no traceback."""
    script = Path(__file__).parents[3] / "scripts" / "convert_checkpoint.py"
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00\x01")
    run = subprocess.run(
        [sys.executable, script, "--source", tmp_path / "cut.gguf", "--output", tmp_path / "out"],
        env=os.environ | {"PYTHONPATH": str(script.parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert run.stdout == ""
    assert len(run.stderr.strip().splitlines()) == 1
    assert "cut.gguf: truncated or not a GGUF file" in run.stderr


# The kill and the memory, each in a process of its own.

KILLED = """
import os, signal, sys
from pathlib import Path
from jaxspec.model.checkpoint.conversion import convert, plan_conversion
from jaxspec.model.checkpoint.sources import open_source

source = open_source(Path(sys.argv[1]))
read, left = source.read, int(sys.argv[3])

def dying_read(*place):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return read(*place)

source.read = dying_read
convert(source, plan_conversion(source), Path(sys.argv[2]), resume=True)
"""


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[3])
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": root, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_killed_run_resumes_to_the_same_digests(tmp_path):
    hugging_face(tmp_path / "source")
    straight = read_manifest(converted(tmp_path / "source", tmp_path / "straight"))
    for reads in (3, 17):  # Each run gets further than the one before, and dies in the middle of a part.
        run = python(KILLED, tmp_path / "source", tmp_path / "out", reads)
        assert run.returncode == -signal.SIGKILL, run.stderr
        assert not (tmp_path / "out").exists()
        with pytest.raises(ValueError, match="unfinished"):
            load_target(tmp_path / "out", make_mesh(1))
    journal = (tmp_path / "out.partial" / "journal.jsonl").read_text().splitlines()
    assert 1 < len(journal) < 1 + len(straight.parts)
    assert "continue with --resume" in command(tmp_path / "source", tmp_path / "out").stderr
    result = command(tmp_path / "source", tmp_path / "out", "--resume", "--verify")
    assert result.exit_code == 0, result.stderr
    assert read_manifest(tmp_path / "out") == straight
    assert not (tmp_path / "out.partial").exists()


def test_a_changed_source_does_not_resume(tmp_path):
    hugging_face(tmp_path / "source")
    assert python(KILLED, tmp_path / "source", tmp_path / "out", 5).returncode == -signal.SIGKILL
    hugging_face(tmp_path / "source", tie_word_embeddings=True)
    result = command(tmp_path / "source", tmp_path / "out", "--resume")
    assert (result.exit_code, "source has changed" in result.stderr) == (2, True)
    assert command(tmp_path / "source", tmp_path / "out", "--overwrite").exit_code == 0


MEMORY = """
import sys, threading, time
from pathlib import Path

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

peak = 0
def sample():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.005)

threading.Thread(target=sample, daemon=True).start()
from jaxspec.model.checkpoint.conversion import convert, plan_conversion
from jaxspec.model.checkpoint.sources import open_source
source = open_source(Path(sys.argv[1]))
convert(source, plan_conversion(source, dtype="bfloat16"), Path(sys.argv[2]))
print(peak)
"""


def sparse_checkpoint(folder: Path, config: dict[str, Any]) -> int:
    """A float32 checkpoint of zeros that takes no room on the disk; returns its bytes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shapes = {"model.embed_tokens": [config["vocab_size"], hidden], "model.norm": [hidden]}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        square = [hidden, hidden]
        shapes |= {f"{prefix}self_attn.{name}_proj": square for name in "qkvo"}
        shapes |= {f"{prefix}{name}layernorm": [hidden] for name in ("input_", "post_attention_")}
        shapes |= {f"{prefix}mlp.{name}_proj": [inner, hidden] for name in ("gate", "up")}
        shapes |= {f"{prefix}mlp.down_proj": [hidden, inner]}
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * int(np.prod(shape))
        header[f"{name}.weight"] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return end


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_stays_within_two_gigabytes(tmp_path):
    """A 2.6 GB source with a 2.1 GB embedding, 1.3 GB to write: the embedding alone does not fit."""
    config = SIZES | {
        "architectures": ["LlamaForCausalLM"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "tie_word_embeddings": True,
        "vocab_size": 128_000,
        "hidden_size": 4096,
        "intermediate_size": 4096,
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
    }
    assert sparse_checkpoint(tmp_path / "source", config) > 2.5e9
    run = python(MEMORY, tmp_path / "source", tmp_path / "out")
    assert run.returncode == 0, run.stderr
    peak = int(run.stdout)
    assert 0.3e9 < peak < 2.0e9, f"peak of {peak / 1e9:.2f} GB"
    assert max(part.nbytes for part in read_manifest(tmp_path / "out").parts) <= 512e6
