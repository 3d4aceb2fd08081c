"""`jaxspec generate` through the command's own entry point, on tiny random models."""

import io
import json
import shutil
import sys
from pathlib import Path

import pytest

from jaxspec.config import EngineConfig, SamplingParams
from jaxspec.engine.engine import Engine
from jaxspec.serve.cli.app import main
from jaxspec.serve.cli.demo_model import converted
from tests.support.published import write_byte_tokenizer, write_model

CONTEXT = 128
SIZES = {
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": CONTEXT,
}
TARGET = SIZES | {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 3,
    "tie_word_embeddings": True,
    "eos_token_id": 257,
}
DRAFTER = SIZES | {
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 1,
    "num_target_layers": 3,
    "block_size": 4,
    "dflash_config": {"mask_token_id": 0, "target_layer_ids": [0, 1]},
}
TEMPLATE = "{% for m in messages %}<s>{{ m.role[0] }}:{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    target = write_model(root / "target", TARGET, scale=0.3)
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    write_byte_tokenizer(target, settings)
    other = write_model(root / "other", DRAFTER | {"hidden_size": 64}, scale=0.3)
    return {
        "target": converted(target, root),
        "drafter": converted(write_model(root / "drafter", DRAFTER, scale=0.3), root),
        "other": converted(other, root),
        "published": target,
    }


@pytest.fixture
def run(folders, capsys):
    """Runs `jaxspec generate` on the target; returns exit code, stdout and stderr."""

    def run(*arguments: object, target: Path = folders["target"]):
        with pytest.raises(SystemExit) as exit_:
            main(["generate", "--target", str(target), *map(str, arguments)])
        return exit_.value.code or 0, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def engine(folders):
    return Engine.from_checkpoints(folders["target"], config=EngineConfig(slots=1))


def test_streams_the_engines_answer(run, engine):
    ids = engine.tokenizer.encode("<s>u:Hello")
    (expected,) = engine.generate([ids], SamplingParams(temperature=0, max_tokens=30))
    code, out, err = run("--prompt", "Hello", "--max-tokens", 30)
    assert (code, out) == (0, engine.tokenizer.decode(expected.tokens) + "\n")
    stages = ["loading target", "compiling", "ready", f"{len(expected.tokens)} tokens", "tokens/s", "τ 1.00"]
    assert [err.index(stage) for stage in stages] == sorted(err.index(stage) for stage in stages)
    assert "float32" in err
    assert "replicated axes" in err


def test_text_comes_in_pieces(run, monkeypatch):
    pieces = []
    real = sys.stdout.write
    monkeypatch.setattr(sys.stdout, "write", lambda text: (pieces.append(text), real(text))[1])
    _, out, _ = run("--prompt", "Hello", "--max-tokens", 30)
    assert "".join(pieces) == out
    assert len(pieces) > 10


def test_speculation_changes_speed_not_text(run, folders):
    plain = run("--prompt", "Hello", "--max-tokens", 30, "--budget", 0)
    code, out, err = run("--prompt", "Hello", "--max-tokens", 30, "--drafter", folders["drafter"], "--budget", 6)
    assert (code, out) == (0, plain[1])
    assert "loading drafter" in err
    assert "N=6, K=16, L=3" in err
    assert len(err.strip().split("accepted by depth: ")[1].split()) == 3


def test_json_is_one_object(run, engine, folders):
    options = ["--prompt", "Hi", "--system", "Be", "--max-tokens", 20, "--temperature", 1, "--seed", 7, "--json"]
    code, out, _ = run(*options, "--drafter", folders["drafter"], "--budget", 6, "--top-k-cap", 2)
    answer = json.loads(out)
    assert code == 0
    assert answer["text"] == engine.tokenizer.decode(answer["tokens"])
    assert answer["prompt_tokens"] == len(engine.tokenizer.encode("<s>s:Be<s>u:Hi"))
    assert {key: answer[key] for key in ("budget", "top_k_cap", "temperature", "seed")} == {
        "budget": 6,
        "top_k_cap": 2,
        "temperature": 1.0,
        "seed": 7,
    }
    assert answer["tau"] == len(answer["tokens"]) / answer["rounds"]
    assert len(answer["acceptance_by_depth"]) == 3
    assert json.loads(run(*options)[1])["tokens"] == answer["tokens"]
    assert json.loads(run(*options, "--seed", 8)[1])["tokens"] != answer["tokens"]


def test_a_drawn_seed_is_told(run):
    options = ["--prompt", "Hi", "--max-tokens", 12, "--temperature", 1, "--json"]
    first = json.loads(run(*options)[1])
    assert json.loads(run(*options, "--seed", first["seed"])[1])["tokens"] == first["tokens"]


def test_prompt_from_standard_input(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("<s>u:Hello\n"))
    assert run("--raw", "--max-tokens", 8)[1] == run("--prompt", "Hello", "--max-tokens", 8)[1]


def test_interrupt_ends_politely(run, monkeypatch):
    whole = run("--prompt", "Hello", "--max-tokens", 30)[1]
    real, steps = Engine.step, []

    def step(self):
        steps.append(1)
        if len(steps) > 8:
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(Engine, "step", step)
    code, out, err = run("--prompt", "Hello", "--max-tokens", 30)
    assert code == 130
    assert 1 < len(out.strip()) < len(whole)
    assert whole.startswith(out.removesuffix("\n").removesuffix("\ufffd"))
    assert "tokens (interrupted)" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", -1], "budget: found -1, expected 0 to 1024"),
        (["--budget", 1025], "budget: found 1025, expected 0 to 1024"),
        (["--budget", "x"], "'--budget'"),
        (["--top-k-cap", 0], "top_k_cap: found 0, expected 1 to 1024"),
        (["--drafter", "DRAFTER", "--top-k-cap", 300], "top_k_cap: found 300, expected at most the vocabulary's 258"),
        (["--temperature", -0.5], "temperature: found -0.5, expected 0.0 to 100.0"),
        (["--temperature", "nan"], "temperature: found nan, expected 0.0 to 100.0"),
        (["--top-p", 0], "top_p: found 0.0, expected 1e-06 to 1.0"),
        (["--max-tokens", 0], "max_tokens: found 0, expected 1 to"),
        (["--seed", -1], "seed: found -1, expected 0 to"),
        (["--devices", 9], "devices: found 9, expected 1 to 8"),
        (["--devices", 0], "devices: found 0, expected 1 to"),
        (["--prompt", ""], "prompt: found 0 characters, expected at least 1"),
        (["--prompt", "x" * CONTEXT], f"prompt: found {CONTEXT + 3} tokens, expected at most {CONTEXT - 1}"),
        (["--raw", "--system", "x"], "--system: found with --raw"),
        (["--drafter", "OTHER"], "drafter hidden_size: found 64, but the target has 32"),
        (["--drafter", "TARGET"], "found a target (llama), expected a drafter"),
        (["--drafter", "/nowhere"], "/nowhere: no jaxspec.json"),
        (["--target", "/nowhere"], "/nowhere: no jaxspec.json"),
        (["--target", "DRAFTER"], "found a drafter (dflash), expected a target"),
        (["--target", "PUBLISHED"], "no jaxspec.json, so not a converted checkpoint"),
        (["--nonsense"], "No such option: --nonsense"),
    ],
)
def test_bad_input_is_one_line(run, folders, arguments, message):
    named = [folders.get(str(argument).lower(), argument) for argument in arguments]
    code, out, err = run("--prompt", "Hello", *named)
    assert (code, out) == (2, "")
    line = err.splitlines()[-1]
    assert line.startswith("error: ")
    assert message in line
    assert "Traceback" not in err
    assert err.count("error: ") == 1


def test_empty_standard_input_is_refused(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    assert run()[::2] == (
        2,
        "error: prompt: found 0 characters, expected at least 1; give --prompt or standard input\n",
    )


def largest_file(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def truncated_manifest(folder: Path) -> None:
    path = folder / "jaxspec.json"
    path.write_text(path.read_text()[:-20])


def truncated_weights(folder: Path) -> None:
    path = largest_file(folder / "params")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def altered_weights(folder: Path) -> None:
    path = largest_file(folder / "params")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def missing_weights(folder: Path) -> None:
    shutil.rmtree(next((folder / "params").iterdir()))


def broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer" / "tokenizer.json").write_text("{")


def broken_template(folder: Path) -> None:
    path = folder / "tokenizer" / "tokenizer_config.json"
    path.write_text(path.read_text().replace("endfor", "endwhile"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncated_manifest, "jaxspec.json: damaged"),
        (truncated_weights, "params"),
        (altered_weights, "params"),
        (missing_weights, "params"),
        (broken_tokenizer, "tokenizer.json: not a readable tokenizer"),
        (broken_template, "chat template: "),
    ],
)
def test_damaged_checkpoints_are_refused(run, folders, tmp_path, damage, message):
    folder = tmp_path / "damaged"
    shutil.copytree(folders["target"], folder)
    damage(folder)
    code, out, err = run("--prompt", "Hello", target=folder)
    assert (code, out) == (2, "")
    line = err.splitlines()[-1]
    assert line.startswith("error: ")
    assert message in line
    assert "Traceback" not in err


@pytest.mark.parametrize("option", ["--prompt", "--system"])
def test_text_that_is_no_utf8_is_refused(run, option):
    arguments = {"--prompt": "Hello", "--system": "Be brief."} | {option: "a\udcff"}
    code, out, err = run(*(word for pair in arguments.items() for word in pair))
    assert (code, out) == (2, "")
    assert "expected UTF-8 text" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", {"chat_template": 5}),
        ("tokenizer_config.json", {"chat_template": TEMPLATE, "eos_token": 7}),
        ("generation_config.json", {"eos_token_id": "x"}),
        ("generation_config.json", {"eos_token_id": [[1]]}),
        ("generation_config.json", {"eos_token_id": -5}),
    ],
)
def test_odd_tokenizer_files_are_refused(run, folders, tmp_path, file, content):
    folder = tmp_path / "odd"
    shutil.copytree(folders["target"], folder)
    (folder / "tokenizer" / file).write_text(json.dumps(content))
    code, out, err = run("--prompt", "Hello", target=folder)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in err


def test_a_drafter_of_another_tokenizer_is_refused(run, folders, tmp_path):
    drafter = tmp_path / "drafter"
    shutil.copytree(folders["drafter"], drafter)
    shutil.rmtree(drafter / "tokenizer", ignore_errors=True)
    shutil.copytree(folders["target"] / "tokenizer", drafter / "tokenizer")
    assert run("--prompt", "Hello", "--drafter", drafter, "--max-tokens", 2)[0] == 0
    path = drafter / "tokenizer" / "tokenizer.json"
    path.write_text(
        path.read_text().replace('"a":', '"swapped":').replace('"b":', '"a":').replace('"swapped":', '"b":')
    )
    code, out, err = run("--prompt", "Hello", "--drafter", drafter)
    assert (code, out) == (2, "")
    assert "drafter tokenizer: found fingerprint" in err.splitlines()[-1]
