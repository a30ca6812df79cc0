"""What `parallel.context=auto` takes: how attention works over context-parallel ranks."""

from typing import TYPE_CHECKING, Literal

from course.models import GPTConfig, ModelConfig
from course.ops.number_formats import LOW_PRECISION

if TYPE_CHECKING:
    from course.config import Config, Parallel

Method = Literal["gather", "ring", "all_to_all"]


def context_method(config: "Config") -> Method:
    """How attention works across cp: parallel.context, or what `auto` takes."""
    return config.parallel.context if config.parallel.context != "auto" else context_choice(config)[0]


def context_choice(config: "Config") -> tuple[Method, str]:
    """(what parallel.context=auto takes, why). It depends on the configuration alone, so all ranks choose alike.

    Measured on H200s (bench/results/cp_h200.json and context_steps_2xh200.json). Causal attention: all_to_all is the fastest of
    the three wherever it can share out the heads. Else a ring, since gather cannot use the fastest kernels and takes 1.08 to
    1.62 times as long. Attention to all tokens: over two ranks gather is the fastest, by 3 to 5% of a step beside all_to_all,
    with as many bytes in fewer collectives. Over four ranks it sends more, and all_to_all is up to 10% faster; a ring takes 1.03
    to 1.29 times as long as gather. In the performance model the choice is at most 8% slower than the best while the GPU is busy.
    """
    m, p = config.model, config.parallel
    if efficient_refuses_groups(config):
        return "ring", "only a ring takes attention=efficient with grouped heads"
    return shared_heads(m, p)


def shared_heads(m: ModelConfig, p: "Parallel") -> tuple[Method, str]:
    """`context_choice` by heads and mask alone."""
    heads, causal = m.groups // p.tp, isinstance(m, GPTConfig)
    sees = f"attention {'is causal' if causal else 'sees all tokens'}"
    what = f"the {heads} {'key-value ' * (m.groups != m.heads)}heads of a rank"
    if p.cp == 2 and not causal:
        return "gather", f"parallel.cp=2, and {sees}"
    if heads and heads % p.cp == 0:
        return "all_to_all", f"parallel.cp={p.cp} divides {what}"
    return "ring" if causal else "gather", f"parallel.cp={p.cp} does not divide {what}, and {sees}"


def efficient_refuses_groups(config: "Config") -> bool:
    """Whether attention=efficient meets grouped heads in 16 bits."""
    m = config.model
    return (config.attention == "efficient" and isinstance(m, GPTConfig) and m.groups != m.heads
            and config.precision in LOW_PRECISION)


def attention_leaves_graph(config: "Config") -> bool:
    """Whether torch.compile breaks a block's graph at attention: it cannot build the causal mask over gathered keys."""
    return config.parallel.cp > 1 and context_method(config) == "gather" and isinstance(config.model, GPTConfig)
