"""How fast a training run goes, and what share of the device it reaches."""

import time

import jax

from jaxspec.model.families.config import DFlashConfig, ModelConfig
from jaxspec.training.loss import Tally
from jaxspec.training.run_config import RunConfig

# Dense bf16 rates in FLOP/s, for the share of the peak that a run reaches.
PEAK_RATES = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA A100-SXM4-80GB": 312e12}


def step_flops(target: ModelConfig, drafter: DFlashConfig, run: RunConfig, length: int) -> float:
    """Floating-point operations of one step as the algorithm needs them: recomputed logits do not count.

    The target goes forward through the layers up to the last tap; the drafter forward and backward; the frozen head
    forward and backward to its input.
    """

    def layer(config: ModelConfig | DFlashConfig) -> int:
        heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
        return config.hidden_size * (heads * config.head_dim + 3 * config.intermediate_size)

    sequence, rows = run.batch * length, run.batch * run.anchors * drafter.block_size
    tapped = max(drafter.target_layer_ids) + 1
    width = target.num_attention_heads * target.head_dim
    forward = 2 * sequence * tapped * (layer(target) + 2 * length * width)
    context = len(drafter.target_layer_ids) * drafter.hidden_size**2
    context += drafter.num_hidden_layers * drafter.hidden_size * 2 * drafter.num_key_value_heads * drafter.head_dim
    scores = 2 * (length + drafter.block_size) * drafter.num_attention_heads * drafter.head_dim
    drafting = 6 * (sequence * context + rows * drafter.num_hidden_layers * (layer(drafter) + scores))
    head = 4 * rows * drafter.depth / drafter.block_size * target.hidden_size * target.vocab_size
    return forward + drafting + head


class Meter:
    """Adds up steps between two records, with the time they took."""

    def __init__(self, target: ModelConfig, drafter: DFlashConfig, run: RunConfig):
        self._target, self._drafter, self._run = target, drafter, run
        self._peak = PEAK_RATES.get(jax.devices()[0].device_kind)
        self._total: Tally | None = None
        self.restart()

    def restart(self) -> None:
        """Sets the clock, the tokens and the operations to zero."""
        self._since, self._tokens, self._flops = time.perf_counter(), 0, 0.0

    def add(self, length: int, tally: Tally) -> None:
        """Adds a step of sequences of `length` tokens."""
        self._total = tally if self._total is None else self._total + tally
        self._tokens += self._run.batch * length
        self._flops += step_flops(self._target, self._drafter, self._run, length)

    def take(self) -> Tally:
        """Hands over the sums since the last record, and begins new ones."""
        assert self._total is not None
        total, self._total = self._total, None
        return total

    def read(self) -> dict[str, float]:
        """Tokens and TFLOP a second since the restart, and the share of the device's peak where that is known."""
        seconds = time.perf_counter() - self._since
        figures = {"tokens_per_second": round(self._tokens / seconds), "tflops": round(self._flops / seconds / 1e12, 2)}
        if self._peak:
            figures["mfu"] = round(self._flops / seconds / self._peak, 4)
        return figures
