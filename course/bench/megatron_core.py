"""megatron-core's transformer layers, for comparison: with PyTorch's attention, and with Transformer Engine's modules, as
users of Megatron-LM run them.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from course.parallel import World


class Attention(nn.Module):
    """PyTorch's fused attention, instead of megatron-core's matmuls and softmax: 3 x (T, B, h, d) -> (T, B, h·d)."""

    def __init__(self, *_: Any, **__: Any):
        super().__init__()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))            # 3 x (B, h, T, d)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)


def layers(world: World, size: tuple[int, int, int], samples: int, tokens: int, engine: bool) -> Callable[[], object]:
    """Forward and backward of a causal stack of size (width, depth, heads) in bf16, tensor parallel over all ranks.

    engine: use Transformer Engine's modules. Raises whatever importing megatron-core or Transformer Engine raises.
    """
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_config import TransformerConfig

    width, depth, heads = size
    parallel = engine and world.size > 1             # sequence parallel: its norms need Transformer Engine or Apex
    n, gpu = world.size, world.device.type == "cuda"
    if not dist.is_initialized():                    # one rank, without a process group yet
        dist.init_process_group("nccl" if gpu else "gloo", rank=0, world_size=1, store=dist.HashStore())
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(n)
    if gpu:
        tensor_parallel.random.model_parallel_cuda_manual_seed(0)
    settings = TransformerConfig(
        num_layers=depth, hidden_size=width, num_attention_heads=heads, tensor_model_parallel_size=n, sequence_parallel=parallel,
        bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, attention_dropout=0.0, hidden_dropout=0.0,
        bias_activation_fusion=gpu, bias_dropout_fusion=gpu, use_cpu_initialization=not gpu)
    if engine:
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    else:
        spec = gpt_layer_specs.get_gpt_layer_local_spec()
        inner = spec.submodules.self_attention
        inner.submodules = replace(inner.submodules, core_attention=Attention)
    model: Any = TransformerBlock(settings, spec).to(world.device, torch.bfloat16)      # PyTorch's norms ignore `params_dtype`
    x = torch.randn(tokens // n if parallel else tokens, samples, width, device=world.device, dtype=torch.bfloat16)
    x.requires_grad_()
    grad = torch.randn_like(x)

    def run() -> None:
        model(x, attention_mask=None).backward(grad)
        model.zero_grad()
        x.grad = None

    return run
