"""A real `jaxspec serve` in a process of its own, and the tiny models that it serves."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from jaxspec.serve.cli.demo_model import converted
from tests.support.published import write_byte_tokenizer, write_model

CONTEXT, SLOTS, QUEUE = 1024, 2, 8
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
    "num_hidden_layers": 2,
    "tie_word_embeddings": True,
    "eos_token_id": 257,
}
DRAFTER = SIZES | {
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 1,
    "num_target_layers": 2,
    "block_size": 4,
    "dflash_config": {"mask_token_id": 0, "target_layer_ids": [0]},
}
TEMPLATE = "{% for m in messages %}<s>{{ m.role[0] }}:{{ m.content }}{{ m.mark }}{% endfor %}{{ tail }}"
SECONDS = 120


def tiny_models(root: Path) -> tuple[Path, Path]:
    """Folders of a converted target and its drafter, of random weights."""
    target = write_model(root / "target", TARGET, scale=0.3)
    write_byte_tokenizer(target, {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE})
    drafter = write_model(root / "drafter", DRAFTER, scale=0.3)
    return converted(target, root), converted(drafter, root)


class ServerProcess:
    """Starts `jaxspec serve` on a free port.

    Attributes:
      process: of the server.
      lines: of its stderr so far.
    """

    def __init__(self, *arguments: object, serving: bool = True):
        command = [sys.executable, "-m", "jaxspec", "serve", "--port", "0", *map(str, arguments)]
        # Less optimised programs compile in half the time, and are kept from run to run.
        cache = Path(__file__).resolve().parents[2] / ".cache" / "xla-tests"
        environment = os.environ | {
            "XLA_FLAGS": "",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        }
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        self.port = int(self.wait_for(r"listening on \S+ port (\d+)").group(1))
        if serving:
            self.wait_for(r" s  serving$")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def memory(self) -> int:
        """Anonymous resident bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"RssAnon:\s+(\d+) kB", status).group(1)) << 10

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first match in a line of stderr, waiting for it."""
        until = time.monotonic() + SECONDS
        seen = 0
        while time.monotonic() < until:
            while seen < len(self.lines):
                if match := re.search(pattern, self.lines[seen]):
                    return match
                seen += 1
            if self.process.poll() is not None and seen == len(self.lines):
                break
            time.sleep(0.01)
        raise AssertionError(f"no {pattern!r} in:\n" + "\n".join(self.lines))

    def terminate(self) -> int:
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(SECONDS)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.process.stderr.close()

    def _read(self) -> None:
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
