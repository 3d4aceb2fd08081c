"""`jaxspec plan` through the command's own entry point."""

import json

import pytest

from jaxspec.model.checkpoint.conversion import convert, plan_conversion
from jaxspec.model.checkpoint.sources import open_source
from jaxspec.serve.cli.app import main
from jaxspec.serve.cli.options import byte_count
from tests.support.kimi_configs import K26, K26_DRAFTER
from tests.support.published import write_byte_tokenizer, write_model

SIZES = {
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "torch_dtype": "float32",
}
TARGET = SIZES | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 3, "tie_word_embeddings": True}
DRAFTER = SIZES | {
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 1,
    "num_target_layers": 3,
    "block_size": 4,
    "dflash_config": {"mask_token_id": 0, "target_layer_ids": [0, 1]},
}


@pytest.fixture
def run(capsys):
    def call(*arguments):
        with pytest.raises(SystemExit) as caught:
            main(["plan", *map(str, arguments)])
        return caught.value.code or 0, *capsys.readouterr()

    return call


def config_only(path, config):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_k26_on_eight_cards(run, tmp_path):
    target, drafter = config_only(tmp_path / "t", K26), config_only(tmp_path / "d", K26_DRAFTER)
    code, out, err = run(
        "--target", target, "--drafter", drafter, "--devices", 8, "--device-memory", "96GB", "--max-context", 262144
    )
    assert (code, err) == (1, "")
    for line in (
        "8 × 96.00 GB, of each 92% for weights and caches: 88.32 GB",
        "│ target                           │ 76.18 GB │   594.21 GB │",
        "│ drafter                          │  0.87 GB │     6.96 GB │",
        "cache that fits: 153,616 tokens (11.27 GB); a request may reach 153,616 of the models' 262,144",
        "│ 1 (plain step) │             8.0 │  6.03 GB │  3.37 │    1.00 │                 │",
        "│ 16             │           109.8 │ 24.95 GB │ 13.94 │    4.14 │            4.33 │",
        "a drafter's pass reads 1.16 GB with the output head: 0.65 ms",
        "a context of 32,768 tokens adds 2.30 GB: 1.29 ms",
        "plain decoding: at most 297 tokens/s, in that context 215",
        "does not fit: memory: the target's weights of 76.18 GB a device, the drafter's 0.87 GB and a cache of 262,144",
    ):
        assert line in out


def test_a_config_alone_and_a_converted_checkpoint_give_one_plan(run, tmp_path):
    source = write_model(tmp_path / "source", TARGET, scale=0.3)
    write_byte_tokenizer(source, {})
    plan = plan_conversion(open_source(source))
    convert(open_source(source), plan, tmp_path / "converted")
    drafter = config_only(tmp_path / "drafter", DRAFTER)
    alone = config_only(tmp_path / "alone", TARGET)
    options = ("--drafter", drafter, "--device-memory", "1GB", "--device-bandwidth", "2GiB", "--json")
    code, expected, _ = run("--target", tmp_path / "converted", *options)
    assert code == 0
    assert json.loads(expected)["target"]["bytes"] == plan.nbytes
    assert json.loads(expected)["device_bandwidth"] == 2**31
    assert [entry["rows"] for entry in json.loads(expected)["passes"]] == [1, 8, 16, 32]
    assert run("--target", alone, *options)[1] == expected
    code, out, _ = run("--target", alone, "--device-memory", "100KB")
    assert code == 1
    assert out.rstrip().endswith("fit; use more devices, a smaller max_context or cache_tokens, or shard_cache")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--device-memory", "96"), "--device-memory: found '96', expected a number with KB, MB, GB, TB or KiB"),
        (("--device-memory", "9" * 400 + "TB"), "--device-memory: found '999"),
        (("--device-memory", "0GB"), "--device-memory, --device-bandwidth: found 0, expected more"),
        (("--max-context", "129"), "--max-context: found 129, expected at most the models' 128 tokens"),
        (("--memory-fraction", "1.5"), "EngineConfig.memory_fraction: found 1.5, expected 0.01 to 1.0"),
        (("--shard-cache", "sequence"), "EngineConfig.shard_cache: found 'sequence', but a llama target's cache"),
        (("--shard-cache", "x"), "EngineConfig.shard_cache: found 'x', expected 'sequence' or None"),
        (("--expert-layout", "x"), "EngineConfig.expert_layout: found 'x', expected 'tensor' or 'expert'"),
        (("--drafter", "TARGET"), "found a target (llama), expected a drafter"),
        (("--target", "EMPTY"), "found neither jaxspec.json nor config.json, expected a checkpoint's folder"),
        (("--target", "BAD"), "config.json: not JSON"),
    ],
)
def test_bad_input_is_one_line(run, tmp_path, options, message):
    folders = {
        "TARGET": config_only(tmp_path / "target", TARGET),
        "EMPTY": tmp_path,
        "BAD": config_only(tmp_path / "bad", {}),
    }
    (folders["BAD"] / "config.json").write_text("{")
    given = {"--target": folders["TARGET"], "--device-memory": "1GB"} | {
        options[0]: folders.get(options[1], options[1])
    }
    code, out, err = run(*(word for pair in given.items() for word in pair))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert message in err


def test_sizes():
    assert byte_count("--x", "80GiB") == 80 * 2**30
    assert byte_count("--x", "1.79TB") == 1_790_000_000_000
