"""Every layout trains as one process does: after several steps all losses and parameters are equal, in float64 with SGD."""

import dataclasses
import math
from typing import Any

import pytest
import torch

from course.parallel.placement import Box
from course.ranks.notebook_ranks import ranks

SMALL = ["model.grid=[8,16]", "model.channels=3", "model.patch=4", "model.dim=16", "model.depth=5", "model.heads=4",
         "model.residual=false", "data.source=mock", "optim.name=sgd", "optim.lr=0.1", "optim.warmup=2", "optim.clip=0",
         "precision=fp64", "train.device=cpu", "train.global_batch=8", "train.steps=4"]
# grouped heads: two of keys and values, for two queries each; and an MLP whose width is no multiple of the model's
LLAMA = ["model.kv_heads=2", "model.norm=rms", "model.mlp=swiglu", "model.mlp_width=24", "model.position=rotary",
         "model.bias=false", "model.tied=false", "model.loss_chunk=20"]
# fine-grained experts in one of two blocks, heads that are wider together than the model, normed queries and keys
QWEN = [*LLAMA, "model.head_dim=6", "model.qk_norm=true", "model.experts=4", "model.expert_width=8", "model.moe_every=2",
        "model.norm_topk=false"]
# each model's preset, and what makes it small: 11 tokens and 9 patches divide by nothing
MODELS = {"vit": ("vit-demo", SMALL),
          "gpt": ("gpt-demo", ["model.vocab=24", "model.context=11", *SMALL[3:6], *SMALL[7:]]),
          "llama": ("gpt-demo", ["model.vocab=24", "model.context=11", *SMALL[3:6], *SMALL[7:], *LLAMA]),
          "qwen": ("gpt-demo", ["model.vocab=24", "model.context=11", *SMALL[3:6], *SMALL[7:], *QWEN]),
          "moe": ("gpt-moe-demo", ["model.vocab=24", "model.context=11", *SMALL[3:6], *SMALL[7:], "model.experts=4",
                                   "model.expert_width=12", "model.moe_every=2", "model.balance_loss=0.1", "model.z_loss=0.01"]),
          "dit": ("dit-demo", ["model.latent=[3,6,6]", "model.classes=4", *SMALL[3:6], *SMALL[7:]])}
Pieces = dict[str, list[tuple[Box, torch.Tensor]]]


def draw(kind: str, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A loader's batch of 8 samples."""
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    if kind in ("gpt", "llama", "qwen", "moe"):
        return {"tokens": torch.randint(24, (8, 12), generator=generator)}
    if kind == "dit":
        return {"latent": normal(8, 3, 6, 6), "label": torch.randint(4, (8,), generator=generator)}
    return {name: normal(8, 3, 8, 16) for name in ("input", "target")}


def train(overrides: list[str], kind: str = "vit") -> tuple[list[float], list[float], Pieces]:
    """Three steps in a layout: losses, gradient norms, and every parameter's piece with its box."""
    from unittest import mock

    from course import config
    from course.data import order
    from course.parallel import build_mesh, join
    from course.training.assemble import assemble

    preset, small = MODELS[kind]
    c = config.load(preset, [*small, *overrides])
    mesh = build_mesh(c.parallel, join("cpu"))
    with mock.patch("course.models.DiT.init_plan", lambda model: {"*": 0.2}):       # its zeros let few gradients through
        training = assemble(c, mesh)
    generator, mine = torch.Generator().manual_seed(1), order.my_slice(8, mesh.dp.size, mesh.dp.rank)
    losses, norms = [], []
    for number in range(3):
        batch = draw(kind, generator)
        batch["sample"] = torch.arange(8) + 8 * number
        loss, norm = training.step({name: tensor[mine] for name, tensor in batch.items()})
        for axis in (mesh.dp, mesh.pp):
            if axis.size > 1:
                torch.distributed.all_reduce(loss, group=axis.group)
        losses.append(loss.item())
        norms.append(norm.item())
    training.gradients.wait_parameters()
    pieces: Pieces = {}
    masters = training.gradients.full_master_weights()
    for p in training.model.parameters():
        where = training.layout.placements[p]
        pieces.setdefault(where.name, []).append((where.box, masters.get(p, p).detach().reshape([b - a for a, b in where.box])))
    return losses, norms, pieces


SERIAL: dict[tuple[str, ...], tuple] = {}


def serial(extra: tuple[str, ...], kind: str = "vit") -> tuple:
    """The serial run, once for each setting."""
    if (kind, *extra) not in SERIAL:
        SERIAL[kind, *extra], = ranks(1)(train, list(extra), kind)
    return SERIAL[kind, *extra]


def assert_equal_to_serial(size: int, layout: list[str], extra: tuple[str, ...] = (), kind: str = "vit") -> None:
    """Losses, gradient norms and every element of every parameter, on every rank that has it; and together they are whole."""
    losses, norms, whole = serial(extra, kind)
    covered = {name: torch.zeros_like(pieces[0][1], dtype=torch.bool) for name, pieces in whole.items()}
    for rank, (own_losses, own_norms, pieces) in enumerate(ranks(size)(train, [*layout, *extra], kind)):
        assert own_losses == pytest.approx(losses, rel=1e-12), f"rank {rank}: losses"
        assert own_norms == pytest.approx(norms, rel=1e-6), f"rank {rank}: gradient norms"         # reported in float32
        for name, parts in pieces.items():
            for box, part in parts:
                here = tuple(slice(start, stop) for start, stop in box)
                error = (part - whole[name][0][1][here]).abs().max().item()
                assert error < 1e-12, f"rank {rank}: {name} differs by {error:.1e}"
                covered[name][here] = True
    assert all(seen.all() for seen in covered.values())


FSDP = "course.parallel.data_parallel.fsdp"
ZEROS = "zero=true bucket_mb=0.01"
INTERLEAVED = "schedule=interleaved chunks=2 micro=2"
TWO = ["dp=2 bucket_mb=0.01", "dp=2 data=naive", "dp=2 data=ddp", f"dp=2 {ZEROS}", "dp=2 zero=2", "dp=2 zero=3",
       "dp=2 zero=3 reshard_after=step", "cp=2 zero=3",
       "tp=2", "tp=2 sp=true", "tp=2 sp=true overlap=none", "cp=2 context=gather", "cp=2 context=ring", "cp=2 context=all_to_all",
       "cp=2 context=auto", "pp=2 schedule=gpipe micro=3", "pp=2 schedule=1f1b micro=1", f"pp=2 {INTERLEAVED}"]
ALONE = ["dp=4 bucket_mb=0.01", f"dp=4 {ZEROS}", "dp=4 zero=3", "dp=4 zero=3 shard=2", "dp=4 zero=2 shard=2",
         "dp=4 zero=3 shard=1", "dp=2 zero=3 reshard_after=backward", "cp=3 zero=3 micro=1",
         "cp=3 context=auto micro=1",
         "tp=4", "tp=4 sp=true", "cp=4 context=gather", "cp=4 context=ring",
         "cp=4 context=all_to_all", "pp=4 schedule=gpipe micro=1", "pp=4 schedule=1f1b micro=1"]
PAIRS = ["dp=2 tp=2", "dp=2 tp=2 sp=true", "dp=2 cp=2", f"dp=2 cp=2 {ZEROS}", "dp=2 pp=2 micro=1", f"dp=2 pp=2 {INTERLEAVED}",
         "cp=2 tp=2", "cp=2 tp=2 sp=true", "cp=2 tp=2 sp=true context=all_to_all", "cp=2 tp=2 sp=true context=gather",
         "pp=2 tp=2 micro=2", "pp=2 tp=2 sp=true micro=2", "pp=2 cp=2 micro=2", f"pp=2 cp=2 {INTERLEAVED}",
         "dp=2 tp=2 order=pp-tp-cp-dp", "pp=2 cp=2 micro=2 order=cp-dp-tp-pp", "cp=2 tp=2 sp=true order=tp-cp-dp-pp"]
SHARDED = [f"dp=2 {more}{stage}" for more in ("cp=2 ", "tp=2 sp=true ", "pp=2 micro=1 ") for stage in ("zero=2", "zero=3")] + [
    "dp=2 cp=2 zero=3 shard=2", "cp=2 tp=2 sp=true zero=3 order=tp-cp-dp-pp", "cp=2 pp=2 micro=2 zero=3 reshard_after=backward",
    f"dp=2 pp=2 zero=3 reshard_after=step {INTERLEAVED}", f"dp=2 pp=2 zero=3 {INTERLEAVED}",
    "dp=2 pp=2 zero=3 schedule=gpipe micro=3",
    "dp=2 cp=2 tp=2 sp=true zero=3 shard=2", "dp=4 cp=2 zero=3 shard=4 order=pp-cp-dp-tp",
    "pp=2 dp=2 tp=2 sp=true zero=3 micro=2",
    f"pp=2 dp=2 cp=2 zero=3 shard=2 {INTERLEAVED}", f"pp=2 dp=2 cp=2 tp=2 sp=true zero=3 {INTERLEAVED}"]
EIGHT = [f"dp=2 cp=2 tp=2 sp=true {ZEROS}", "pp=2 dp=2 tp=2 sp=true micro=2", f"pp=2 dp=2 cp=2 {ZEROS} {INTERLEAVED}",
         "pp=2 cp=2 tp=2 sp=true schedule=gpipe micro=2 order=cp-pp-tp-dp", "pp=2 cp=2 tp=2 sp=true context=all_to_all micro=2"]
ALL = f"pp=2 dp=2 cp=2 tp=2 sp=true {ZEROS} {INTERLEAVED}"           # sixteen ranks
LARGE = [EIGHT[1], EIGHT[3], ALL]                    # for further models, with all extras at once: they take most of the time
# clipping is apart: it would hide a gradient of the wrong scale
EXTRAS = {"clipping": ("optim.clip=0.05",), "accumulation": ("train.micro_batch=3",),
          "dropout": ("model.dropout=0.2", "model.drop_path=0.2"),
          "recompute": ("train.recompute=full", "model.dropout=0.2", "model.drop_path=0.2"),
          "selective recompute": ("train.recompute=selective", "model.dropout=0.2", "model.drop_path=0.2")}
MIXED = ["dp=2 bucket_mb=0.01", f"dp=2 {ZEROS}", "dp=2 zero=3", "dp=2 tp=2 sp=true zero=2", "dp=2 data=ddp",
         "tp=2 sp=true", "cp=2 context=ring", f"pp=2 {INTERLEAVED}",
         "dp=2 tp=2 sp=true", "cp=2 tp=2 sp=true", "pp=2 cp=2 micro=2"]


def layout(spec: str) -> tuple[int, list[str]]:
    """How many ranks "pp=2 tp=2 micro=1" needs, and its settings."""
    values = dict(part.split("=") for part in spec.split())
    if "cp" in values:
        values.setdefault("context", "ring")        # auto never takes it for these models: their heads can be shared out
    size = math.prod(int(values.get(axis, 1)) for axis in ("pp", "dp", "cp", "tp"))
    return size, [f"train.micro_batch={value}" if key == "micro" else f"parallel.{key}={value}" for key, value in values.items()]


def slow(cases: list[str]) -> list[Any]:
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize("spec", [*TWO, *slow([*ALONE, *PAIRS, *SHARDED, *EIGHT, ALL])])
def test_parity(spec):
    assert_equal_to_serial(*layout(spec))


@pytest.mark.slow
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("spec", MIXED)
def test_parity_with(spec, extra):
    if extra == "accumulation" and "micro" in spec:
        pytest.skip("this layout has micro-batches anyway")
    assert_equal_to_serial(*layout(spec), EXTRAS[extra])


@pytest.mark.parametrize(("kind", "spec", "extra"), [
    *(pytest.param("dit", spec, ("model.objective=flow",), marks=pytest.mark.slow) for spec in ("cp=2 tp=2 sp=true", EIGHT[1])),
    *(pytest.param(kind, spec, extra, marks=[] if spec == "tp=2 sp=true" and not extra else pytest.mark.slow)
    for kind, extras in (("gpt", [(), ("model.tied=false", "model.dropout=0.2", "train.recompute=full", "model.loss_chunk=0")]),
                         ("dit", [()]))
    for spec in (f"dp=2 {ZEROS}", "dp=2 zero=3", "dp=2 pp=2 micro=2 zero=3", "dp=2 cp=2 tp=2 sp=true zero=3 shard=2", "tp=2",
                 "tp=2 sp=true", "cp=2 context=gather", "cp=2 context=ring", "cp=2 context=all_to_all", "cp=2 tp=2 sp=true",
                 "pp=2 micro=2", f"pp=2 {INTERLEAVED}", "pp=2 tp=2 micro=2", "cp=4 context=ring",
                 "pp=4 micro=1", *LARGE) for extra in (extras[-1:] if spec in LARGE else extras))])
def test_parity_of_other_models(kind, spec, extra):
    assert_equal_to_serial(*layout(spec), extra, kind)


@pytest.mark.parametrize(("spec", "extra"), [
    pytest.param(spec, extra, marks=[] if spec == "tp=2 sp=true" and not extra else pytest.mark.slow)
    for spec in (f"dp=2 {ZEROS}", "dp=2 tp=2 sp=true zero=3", "tp=2", "tp=2 sp=true", "tp=2 sp=true overlap=none",
                 "cp=2 context=gather", "cp=2 context=ring",
                 "cp=2 context=all_to_all", "cp=2 tp=2 sp=true", "cp=2 tp=2 sp=true context=gather", "pp=2 micro=2",
                 "pp=2 tp=2 micro=2", "cp=4 context=ring", *LARGE)
    for extra in ((), ("model.dropout=0.2", "train.recompute=full", "model.bias=true")) if extra or spec not in LARGE])
def test_parity_of_llama(spec, extra):
    assert_equal_to_serial(*layout(spec), extra, "llama")


@pytest.mark.parametrize(("spec", "extra"), [
    *(pytest.param(spec, (), marks=[] if spec == "tp=2" else pytest.mark.slow)
      for spec in ("tp=2", "dp=2 tp=2 ep=2", "cp=2 tp=2 sp=true", "cp=2 context=all_to_all", "cp=2 context=gather",
                   f"pp=2 tp=2 {INTERLEAVED}", f"dp=2 tp=2 ep=2 {ZEROS}", "dp=2 tp=2 sp=true ep=2 zero=3")),
    *(pytest.param("dp=2 tp=2 zero=2", (f"train.recompute={how}",), marks=pytest.mark.slow) for how in ("full", "selective"))])
def test_parity_of_qwen(spec, extra):
    """The norms of heads have partial gradients with tp, with sequence parallelism and without."""
    assert_equal_to_serial(*layout(spec), extra, "qwen")


@pytest.mark.parametrize(("kind", "spec"), [
    pytest.param(kind, spec, marks=[] if spec == "tp=2 sp=true" and kind == "dit" else pytest.mark.slow)
    for kind in ("vit", "gpt", "dit")
    for spec in ("tp=2 sp=true", "tp=2 sp=true overlap=none", "pp=2 tp=2 micro=2", "cp=2 tp=2 sp=true", EIGHT[0])])
def test_parity_of_fused_steps(kind, spec):
    """What blocks do between matmuls by hand, in a layout, against one process that does it by PyTorch. Through tanh GELU is in
    the matmul after it."""
    size, settings = layout(spec)
    assert_equal_to_serial(size, [*settings, "kernels=triton"], ("model.mlp=gelu_tanh",) if kind == "gpt" else (), kind)


def swapped(tokens: Any, device: torch.device) -> tuple[torch.Tensor, ...]:
    """A zigzag in which each rank has its back piece first."""
    pieces = torch.arange(tokens.seq_len + -tokens.seq_len % (2 * tokens.cp.size), device=device).chunk(2 * tokens.cp.size)
    return tuple(torch.cat([pieces[-1 - rank], pieces[rank]]) for rank in range(tokens.cp.size))


def average_over_dp_alone(model: Any, layout: Any, *settings: Any) -> Any:
    """What averages gradients, with context parallelism forgotten."""
    from course.parallel import build_gradient_sync

    for parameter, where in layout.placements.items():
        layout.placements[parameter] = dataclasses.replace(where, average_over=layout.mesh.dp)
    return build_gradient_sync(model, layout, *settings)


def more_of(function: str, change: Any) -> Any:
    """A method of `FlatParameters`, called with what a change makes of its tensor."""
    from course.parallel.data_parallel.fsdp import FlatParameters

    method = getattr(FlatParameters, function)
    return lambda flat, tensor: [method(flat, x) for x in change(tensor)]


# what is broken, by what, and a layout that must notice
MUTATIONS = {
    "no all-reduce after a row linear": ("course.parallel.mappings.reduce", lambda x, axis: x, "tp=2", "vit"),
    "no all-reduce before a column linear": ("course.parallel.mappings.copy", lambda x, axis: x, "tp=2", "vit"),
    "a sum for the mean of gradients": ("course.parallel.data_parallel.gradients.divide_by_size", lambda x, axis: None, "dp=2",
                                        "vit"),
    "a sum for ZeRO's mean": ("course.parallel.data_parallel.zero1.divide_by_size", lambda x, axis: None, "dp=2 zero=true",
                              "vit"),
    "cp forgotten in the average": ("course.training.assemble.build_gradient_sync", average_over_dp_alone, "cp=2", "vit"),
    "cp forgotten in a pipeline's average": ("course.training.assemble.build_gradient_sync", average_over_dp_alone,
                                             "pp=2 cp=2 micro=2",
                                             "vit"),
    "norms see their own tokens alone": ("course.parallel.data_parallel.gradients.add_partial_gradients", lambda *_: None,
                                         "tp=2 sp=true",
                                         "vit"),
    "tied weights of two stages not added": ("course.parallel.data_parallel.gradients.add_partial_gradients",
                                             lambda *_: None,
                                             "pp=2 micro=2", "gpt"),
    "norms of heads see their own heads alone": ("course.parallel.data_parallel.gradients.add_partial_gradients",
                                                 lambda *_: None, "tp=2", "qwen"),
    "norms see their own tokens alone, in buckets": ("course.parallel.data_parallel.gradients.reduce_partial", lambda bucket,
                                                     parts: None,
                                                     "tp=2 dp=2 sp=true", "vit"),
    "the same with ZeRO-1": ("course.parallel.data_parallel.gradients.reduce_partial", lambda bucket, parts: None,
                             "tp=2 dp=2 sp=true zero=true", "vit"),
    "a sum for FSDP's mean": (f"{FSDP}.divide_by_size", lambda x, axis: None, "dp=2 zero=3", "vit"),
    "old weights after the optimizer's step": (f"{FSDP}.FlatParameters.forget", lambda flat: None, "dp=2 zero=2", "vit"),
    "the same when they are freed once a step": (f"{FSDP}.FlatParameters.free", lambda flat: None,
                                                 "dp=2 zero=3 reshard_after=step", "vit"),
    "a share that begins one number early": (f"{FSDP}.FlatParameters.add", more_of("add", lambda x: [x.roll(1)]), "dp=2 zero=3",
                                             "vit"),
    "a gradient that is reduced twice": (f"{FSDP}.FlatParameters.add", more_of("add", lambda x: [x, x]), "dp=2 zero=2", "vit"),
    "a micro-batch that is not added": (f"{FSDP}.FlatParameters.add", lambda flat, x: setattr(flat, "gradient", x),
                                        "dp=2 zero=3 micro=2", "vit"),
    "copies of a share that are not averaged": (f"{FSDP}.FlatParameters.start_average", lambda flat: None, "dp=4 zero=3 shard=2",
                                                "vit"),
    "norms see their own tokens alone, with FSDP": (f"{FSDP}.add_partial_gradients", lambda *_: None,
                                                    "tp=2 dp=2 sp=true zero=3", "vit"),
    "tied weights of two stages not added, with FSDP": (f"{FSDP}.add_partial_gradients", lambda *_: None,
                                                        "pp=2 dp=2 micro=2 zero=3", "gpt"),
    "a zigzag in the wrong order": ("course.parallel.token_split.SplitTokens.order", swapped, "cp=2 context=ring",
                                    "gpt"),
    "blocks of a ring not merged": ("course.parallel.context_parallel.ring_attention.merge", lambda out, lse, new_out,
                                    new_lse: None, "cp=2 context=ring",
                                    "vit"),
}


@pytest.mark.parametrize("name", [name if size == 2 else pytest.param(name, marks=pytest.mark.slow)
                                  for name, (_, _, spec, _) in MUTATIONS.items() for size in [layout(spec)[0]]])
def test_parity_notices(name):
    """The test itself can fail: each of these mistakes changes some parameter."""
    target, replacement, spec, kind = MUTATIONS[name]
    assert largest_error({target: replacement}, spec, kind) > 1e-6


def largest_error(mistakes: dict[str, Any], spec: str, kind: str, extra: tuple[str, ...] = ()) -> float:
    """How much a parameter in a layout differs at most from the serial one. mistakes: what is replaced there -> by what."""
    def wrong(overrides: list[str]) -> Any:
        from contextlib import ExitStack
        from unittest import mock

        with ExitStack() as stack:
            for target, replacement in mistakes.items():
                stack.enter_context(mock.patch(target, replacement))
            return train(overrides, kind)

    size, overrides = layout(spec)
    *_, whole = serial(extra, kind)
    return max((part - whole[name][0][1][tuple(slice(a, b) for a, b in box)]).abs().max().item()
               for _, _, pieces in ranks(size)(wrong, [*overrides, *extra])
               for name, parts in pieces.items() for box, part in parts)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["data=naive", "zero=true"])
def test_both_ends_of_a_pipeline_have_the_same_bits_of_a_tied_weight(way):
    """Three ranks add up in an order that depends on where in a message a number lies, and the ends send other messages."""
    size, overrides = layout(f"pp=2 cp=3 micro=1 {way}")
    found = ranks(size)(train, [*overrides, "precision=fp32"], "gpt")
    first, *others = [parts[0][1] for _, _, pieces in found for name, parts in pieces.items() if name == "embed.token.weight"]
    assert len(others) == 5 and all(torch.equal(first, other) for other in others)


def test_indivisible_heads_are_a_sentence():
    from course.ranks.notebook_ranks import RankError

    with pytest.raises(RankError, match=r"parallel.tp=2 does not divide the 3 heads or features of blocks.0.attn.qkv"):
        ranks(2)(train, ["parallel.tp=2", "model.heads=3", "model.dim=18"])


def run(overrides: list[str]) -> None:
    """`course train` on the ranks that there are."""
    from course import config
    from course.training import trainer as training

    training.main(config.load("vit-demo", [*SMALL, "train.eval_every=0", "log.every=1", "log.tensorboard=false", *overrides]))


OTHERS = {"tp": ["parallel.tp=2", "parallel.sp=true"], "pp": ["parallel.pp=2", "train.micro_batch=4"],
          "fsdp": ["parallel.zero=3"], "zero": ["parallel.zero=true", "parallel.bucket_mb=0.01"]}


@pytest.mark.parametrize(("name", "optimizer"), [("fsdp", "adam"), *(
    pytest.param(name, optimizer, marks=pytest.mark.slow) for name in OTHERS for optimizer in ("adam", "muon")
    if (name, optimizer) != ("fsdp", "adam"))])
def test_a_run_goes_on_in_another_layout(name, optimizer, tmp_path):
    """Two steps in a layout and two in one process, or the other way round: the losses are those of the undisturbed run."""
    from course.training.run_log import read_metrics

    def losses(name: str, *parts: tuple[int, list[str]]) -> list[float]:
        for size, overrides in parts:
            ranks(size)(run, [f"log.dir={tmp_path}", f"log.name={name}", "optim.schedule=constant",
                              f"optim.name={optimizer}", "optim.lr=0.001", *overrides])
        return [record["loss"] for record in read_metrics(tmp_path / "vit-demo" / name / "metrics.jsonl")]

    whole = losses("whole", (1, []))
    assert len(whole) == 4
    assert losses("apart", (2, ["train.steps=2", *OTHERS[name]]), (1, [])) == pytest.approx(whole, rel=1e-9)
    assert losses("together", (1, ["train.steps=2"]), (2, OTHERS[name])) == pytest.approx(whole, rel=1e-9)
