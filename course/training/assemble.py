"""Build a run's model, optimizer and step from its configuration: an ordered list of surgeries on the serial model."""

from dataclasses import dataclass, replace
from functools import partial

import torch

from course.config import Config
from course.config.context_choice import context_method
from course.fp8 import native, transformer_engine
from course.models import Model, build_model
from course.ops import attention
from course.ops.number_formats import cast_residual_stream, parameter_dtype, set_matmul_precision, working_dtype
from course.ops.packed_attention import supports_precision
from course.parallel import Layout, Mesh, build_gradient_sync, initialize, parallelize
from course.parallel.data_parallel.gradients import GradientSync
from course.parallel.expert_parallel.experts import LoadBalance
from course.parallel.initialize import initial_values
from course.training import fuse_blocks
from course.training.activation_checkpointing import checkpoint_activations
from course.training.compile import compile_parts, compile_within, compiled_inside
from course.training.cuda_graph import graphed
from course.training.optimizer import build_optimizer
from course.training.step import Progress, Step, build_compute, train_step


@dataclass(frozen=True)
class Training:
    """A model in its layout, and what trains it."""

    config: Config
    layout: Layout
    model: Model
    gradients: GradientSync
    optimizer: torch.optim.Optimizer
    progress: Progress
    step: Step
    scaling: native.Scaling                             # of native FP8; empty without it

    @property
    def mesh(self) -> Mesh:
        """The mesh of the layout."""
        return self.layout.mesh


def assemble(config: Config, mesh: Mesh, noise: float = 0.0) -> Training:
    """Build the serial model, cut it for the mesh, give each rank its part of the weights, and put the step around it.

    noise: the standard deviation of weights that would start at zero.

    The order matters. The number format comes before the cut, because a cut linear keeps its product. Values come after the cut,
    so that a rank draws only its own part. Transformer Engine comes after the values, because its modules take the parameters as
    they are. Fused operators come before anything wraps the blocks, and compilation comes last, except within checkpoints.
    """
    set_matmul_precision(config.precision)
    attention.set_attention_backend(config.attention, config.model.head_width, config.precision, mesh.world.device)
    model = build_model(config.model, config.train.seed)
    scaling = native.convert(model, config, mesh)
    parallel = replace(config.parallel, context=context_method(config))
    layout = parallelize(model, mesh, parallel)
    native.prepare(model, layout, scaling)
    seed, device, sharded = config.train.seed, mesh.world.device, config.parallel.zero == 3
    initialize(model, layout.placements, seed, device, parameter_dtype(config.precision), noise, later=sharded)
    transformer_engine.convert(model, config, mesh)
    if config.stream == "narrow":
        cast_residual_stream(model, config.precision)
    if config.kernels == "triton":
        fuse_blocks.check_device(mesh.world.device)
        packed = config.attention == "default" and supports_precision(config.precision, mesh.world.device)
        fuse_blocks.fuse_blocks(model, packed, config.model.tokens)
    within = compiled_inside(config)
    if within:
        compile_within(model)
    checkpoint_activations(model, config.train.recompute)
    if config.compile:
        compile_parts(layout.stages, config.attention, not within)
    progress = Progress.start(config, mesh.world.device)
    draw = partial(initial_values, model, seed=seed, device=device, noise=noise) if sharded else None
    gradients = build_gradient_sync(model, layout, config.parallel, working_dtype(config.precision), config.masters, draw)
    optimizer = build_optimizer(gradients.optimizer_parameters, progress.lr, config, gradients.copies, layout)
    LoadBalance(model, layout, optimizer)
    compute = build_compute(gradients.trained(model), progress, config, layout)
    step = train_step(compute, model, gradients, optimizer, progress, config, layout, scaling)
    if config.graphs:
        step = graphed(step, gradients, mesh)
    return Training(config, layout, model, gradients, optimizer, progress, step, scaling)
