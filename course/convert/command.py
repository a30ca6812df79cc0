"""`course convert SOURCE TARGET`: convert the files of another library to a run of ours, and back.

    course convert gpt2/ runs/gpt/mine                              a Hugging Face folder -> a run, at step 0
    course convert DiT-XL-2-256x256.pt runs/dit/theirs              facebookresearch/DiT's names -> a run
    course convert te.safetensors runs/gpt/mine --like gpt-124m     Transformer Engine's layers -> a run of a preset's model
    course convert runs/gpt/mine out --to hf                        and back: hf, dit or te

The files show which library SOURCE comes from. What they do not say of the model, such as a DiT's objective, comes from the
preset of --like. In files that we wrote, the header says everything. A folder's tokenizer is copied in both directions.

Under torchrun and srun each rank writes its part: of a run, what it owns in the layout of the settings (parallel.tp=2 ...); of a
folder, its share of the files. A single process writes for all ranks of a layout.

Weights are read and written one at a time, so the largest tensor bounds memory. A foreign pickled file is mapped into memory, and
nothing in it is executed. Optimizer states are not converted: other libraries' files have none.

The exception is `rebuild`, which recomputes FP8's scales: it needs the whole model.
"""

import json
import shlex
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from course import config
from course.checkpoint import checkpoint
from course.checkpoint.shards import Shard, read_box, write_shards
from course.config import Config, Parallel, schema, validation
from course.convert import dit, huggingface, reshard, transformer_engine, weight_files
from course.convert.rules import Rule, Source, entries, fill
from course.data import train_loader
from course.data.hdf5_storage import first_line
from course.data.text import bpe, end_tokens
from course.inference import sample_text
from course.inference.forecast_scores import read_config
from course.models import DiTConfig, GPTConfig, build_model, family_of
from course.ops.number_formats import parameter_dtype
from course.parallel import Axis, Mesh, Placement, World, build_mesh, join, joined, serial_placements
from course.parallel.agree import run_on_all
from course.training.assemble import assemble
from course.training.step import Progress
from course.utils.atomic_files import flush, remove
from course.utils.errors import CourseError

KINDS = {"hf": "gpt", "dit": "dit", "te": "vit or gpt"}             # target -> the kind that a run's model must have
WORDS = "tokenizer.json"                                            # of the tokenizers package, in runs and in others' folders
DEFAULT = {"gpt": "gpt-124m", "vit": "vit-base", "dit": "dit-xl"}     # the preset that gives a run its other settings


def main(source: Path, target: Path, settings: Iterable[str] = (), to: str = "", like: str = "", rows: str = "",
         average: bool = False, shard: int = weight_files.SHARD) -> None:
    """Run `convert` on all ranks that torchrun or srun started."""
    with joined("cpu") as world:
        convert(world, source, target, settings, to, like, rows, average, shard)


def convert(world: World, source: Path, target: Path, settings: Iterable[str] = (), to: str = "", like: str = "",
            rows: str = "", average: bool = False, shard: int = weight_files.SHARD) -> None:
    """Convert SOURCE to a run, or from one if it is a run. Raises `CourseError` if a file or the model does not fit.

    rows: one of transformer_engine.ROWS; empty: as the file says, and the first of them when writing.
    """
    if rows and rows not in transformer_engine.ROWS:
        raise CourseError(f"--qkv {rows}: the rows of Transformer Engine's fused projection are "
                          f"{', '.join(transformer_engine.ROWS)}")
    if not source.exists():
        raise CourseError(f"there is no {source}: give the folder of a run, or a file or folder of another library's weights; "
                          f"`hf download NAME --local-dir {source}` gets one from the Hub, such as openai-community/gpt2")
    say = print if world.rank == 0 else lambda text: None
    mesh = build_mesh(Parallel(), world)             # all ranks, as dp
    if (source / "config.yaml").is_file():
        from_run(source, target, list(settings), to, rows or transformer_engine.ROWS[0], average, shard, mesh.all, say)
    else:
        to_run(source, target, list(settings), to, like, rows, mesh.all, say)


# ---- to a run ----

def to_run(path: Path, run: Path, given: list[str], to: str, like: str, rows: str, everyone: Axis,
           say: Callable[[str], None]) -> None:
    """Make the folder of a run at step 0, to train on, generate or sample from."""
    if to:
        raise CourseError(f"{path} is not the folder of a run (it has no config.yaml), so it becomes one: leave out --to {to}")
    if run.exists():
        raise CourseError(f"{run} exists already: choose another folder, or move it away")
    kind = kind_of(path)
    source, settings = opened(kind, path, run, given, like, rows)
    size = reshard.ranks_of(settings)
    if everyone.size > 1:
        mesh, size = build_mesh(settings.parallel, join("cpu")), everyone.size          # dp=0 takes the remaining ranks
        mine = [(everyone.rank, reshard.owned_in(settings, mesh))]
    else:
        mine = [(rank, reshard.owned(settings, rank, size)) for rank in range(size)]
    words = tokenizer_of(path) if isinstance(settings.model, GPTConfig) else ""
    last = end_tokens.of_hub(path, its(words), settings.model) if kind == "hf" else []
    partial = run.with_name(f".{run.name}.partial")
    run_on_all(everyone, lambda: remove(partial) if everyone.rank == 0 else None)
    source.check(placed.name for placed in serial(settings))
    histories = rebuild(settings, source, everyone) if kind == "te" and delayed(settings) else {}
    progress: dict[str, Any] = {**Progress.start(settings, torch.device("cpu")).state(), "samples": 0}
    final = partial / "checkpoints" / f"step_{progress['step']:06d}"
    folder = checkpoint.temporary(final)

    def read(piece: Shard) -> Tensor:
        return histories[piece.name] if piece.name in histories else source.part(piece.name, piece.where).to(piece.dtype)

    def write(rank: int, owned: list[Placement]) -> dict[str, Any]:
        wanted = pieces(settings, owned, histories if rank == 0 else {})
        return write_shards(folder, rank, wanted, map(read, wanted))

    def publish() -> None:
        checkpoint.publish(final, [entry for part in written for entry in part], progress, schema.as_plain(settings))
        config.save(settings, partial / "config.yaml")
        if words:
            (partial / WORDS).write_text(words, encoding="utf-8")
        end_tokens.write_note(partial, last)
        partial.rename(run)
        flush(run.parent)

    try:
        written = run_on_all(everyone, lambda: [write(rank, owned) for rank, owned in mine])
        run_on_all(everyone, lambda: publish() if everyone.rank == 0 else None)
    finally:
        clear(partial, everyone)
    say(f"wrote {run}, a {settings.model.kind} of {sum(torch.Size(p.global_shape).numel() for p in serial(settings)) / 1e6:.2f} "
        f"million parameters at step 0, for {size} rank{'s' * (size > 1)}"
        + (f", with the scales of {len(histories)} FP8 matmuls rebuilt" if histories else ""))
    if source.note:
        say(source.note)
    for line in next_steps(run, settings, bool(words)):
        say(line)


def next_steps(run: Path, settings: Config, words: bool) -> list[str]:
    """The commands that make sense with the run now, one a line. words: it has a tokenizer."""
    name, go_on = shlex.quote(str(run)), reshard.go_on(run, settings, 0)
    if settings.data.source == "files" and Path(settings.data.path).exists():
        commands = [f"train it on the data in {settings.data.path}: {go_on}"]
    elif settings.data.source == "files":
        commands = [f"train it, on data like those that it was trained on: {go_on} data.path=FOLDER"]
    else:
        commands = [f"train it (without the last two settings on random samples): {go_on} data.source=files data.path=FOLDER"]
    if isinstance(settings.model, DiTConfig):
        commands.append(f"draw samples: course generate {name}")
    if isinstance(settings.model, GPTConfig):
        commands.append(f"let it write: course sample {name}" if words else
                     f"let it write (no tokenizer came with its weights): course sample {name} --tokenizer FILE")
    return commands


def tokenizer_of(folder: Path) -> str:
    """The text of a folder's tokenizer.json, or of one made from its vocab.json and merges.txt; "" if it has neither."""
    if (folder / WORDS).is_file():
        return text_of(folder / WORDS)
    vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
    if not (vocabulary.is_file() and merges.is_file()):
        return ""
    return str(bpe.gpt2(vocabulary, merges).to_str(pretty=True))


def text_of(file: Path) -> str:
    """The text of a tokenizer file. Raises `CourseError` if it is not text."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CourseError(f"{file} cannot be read as text ({first_line(error)}): download it again, or move it away and give "
                          "`course sample` another") from error


def clear(partial: Path, everyone: Axis) -> None:
    """Remove what a failed conversion has written; a successful one leaves nothing under this name."""
    if everyone.rank == 0:
        remove(partial)


def kind_of(path: Path) -> str:
    """The library that wrote these files: `hf`, `dit` or `te`. A DiT's config.json, if there is one, names no model_type."""
    config = path / "config.json"
    if config.is_file() and "model_type" in weight_files.read_json(config):
        return "hf"
    names = list(weight_files.Weights(path))
    if any(".self_attention." in name for name in names):
        return "te"
    if any(name.startswith("x_embedder.") for name in names):
        return "dit"
    if config.is_file():
        return "hf"
    raise CourseError(f"{path} has neither a config.json (Hugging Face), nor names of Transformer Engine's layers "
                      "(self_attention.), nor of facebookresearch/DiT (x_embedder.): convert it with the library that wrote it")


def opened(kind: str, path: Path, run: Path, given: list[str], like: str, rows: str) -> tuple[Source, Config]:
    """The weights, and the run's configuration: a preset's, with the model of the file and the settings given."""
    values_given = schema.parse(given)
    base = config.load(like) if like else None
    known: Any = base.model if base else None        # used where the file does not say
    source: Source | None = None
    if kind == "te":
        tensors = weight_files.Weights(path)
        model = weight_files.model_in(path, tensors.about()) or (known and transformer_engine.completed(known, tensors.says()))
        if model is None:
            raise CourseError(f"{path} has weights alone, and does not say of which model: give --like PRESET, and settings such "
                              "as model.depth=12")
    elif known and known.kind != KINDS[kind]:
        raise other_kind(path, like, known.kind, KINDS[kind])
    else:
        mine = values if isinstance(values := values_given.get("model"), dict) else {}          # `build` reports mistakes in it
        source = huggingface.source(path, known) if kind == "hf" else dit.source(path, mine, like=known)
        model = source.c
    if known and known.kind != model.kind:
        raise other_kind(path, like, known.kind, model.kind)
    base = base or config.load(DEFAULT[model.kind])
    folder, preset = reshard.place_of(run)
    log = replace(base.log, dir=folder, name=run.name)
    plain = schema.merge(schema.as_plain(replace(base, preset=preset, model=model, log=log)), values_given)
    settings = validation.check(schema.build(Config, plain, "course convert"))
    if source:
        settings = padded(source, settings)
    return source or transformer_engine.source(path, settings.model, rows), settings


def padded(source: Source, settings: Config) -> Config:
    """The settings, with the file's number of tokens noted if the user asks for a larger vocabulary. The source adopts that
    vocabulary, and refuses any other difference from the file."""
    c: Any = settings.model
    if isinstance(c, GPTConfig) and c.vocab > source.c.vocab and not c.vocab_used:
        c = replace(c, vocab_used=source.c.words)
    if c != source.c:
        source.says = "you asked for"
    if isinstance(c, GPTConfig):
        source.c = replace(source.c, vocab=c.vocab, vocab_used=c.vocab_used)
    return replace(settings, model=c)


def other_kind(path: Path, like: str, theirs: str, ours: str) -> CourseError:
    """The error for a preset of another kind of model than the file's."""
    return CourseError(f"--like {like}: that preset is of a {theirs}, and {path} has the weights of a {ours}; name a preset of a "
                       f"{ours}, such as {DEFAULT[ours]}")


def serial(settings: Config) -> list[Placement]:
    """The placements of all parameters of the serial model."""
    return list(serial_placements(build_model(settings.model)).values())


def pieces(settings: Config, owned: list[Placement], more: dict[str, Tensor]) -> list[Shard]:
    """The pieces that a rank writes: its parts of the parameters, and the tensors of `more`, which belong to none."""
    return [*(Shard(where.name, where, parameter_dtype(settings.precision)) for where in owned),
            *(Shard(name, where, tensor.dtype) for name, tensor, where in checkpoint.whole_tensors(more))]


def delayed(settings: Config) -> bool:
    """Whether training uses our own FP8 layers with delayed scaling."""
    return settings.precision == "fp8" and settings.fp8.by == "native" and settings.fp8.recipe == "delayed"


def rebuild(settings: Config, source: Source, everyone: Axis) -> dict[str, Tensor]:
    """The amax histories that the run's first step would note, by the name of each FP8 matmul, from one pass without an update.

    Forward is not enough: gradients have scales too. Without a history these would be 1, and a mean loss's gradients would
    vanish below E5M2's smallest number. The pass takes the first global batch of the run's data, or the model's random example
    if there are no data. As in every first step, matmuls without scales run in bf16, so the recorded amaxes are exact.
    """
    alone = everyone.size == 1
    layout = replace(settings.parallel, pp=1, dp=1, cp=1, tp=1, sp=False, zero=0, chunks=1, schedule="1f1b") if alone else \
        settings.parallel
    settings = replace(settings, parallel=layout, compile=False, graphs=False, kernels="pytorch", attention="default",
                       train=replace(settings.train, device="cpu"))     # without what is written for GPUs
    mesh = build_mesh(settings.parallel, join("cpu"))
    training = assemble(settings, mesh)
    fill([*training.model.parameters(), *training.gradients.optimizer_parameters], training.layout.placements, source)
    batch = training.model.prepare(first_batch(training.model, settings, mesh), training.progress.step)
    compute_once(training, batch)
    return training.scaling.state()


def compute_once(training: Any, batch: dict[str, Tensor]) -> None:
    """Run forward and backward and update the FP8 matmuls' amax histories; the weights stay."""
    from course.training.step import build_compute

    training.gradients.begin(validation.num_microbatches(len(batch["sample"]), training.config.train.micro_batch))
    model = training.gradients.trained(training.model)
    build_compute(model, training.progress, training.config, training.layout)(batch)
    training.gradients.finish()
    training.gradients.clear()
    training.scaling.update(torch.zeros(()))


def first_batch(model: Any, settings: Config, mesh: Mesh) -> dict[str, Tensor]:
    """This rank's part of the first global batch of the run's data, or of the model's example if that data is missing."""
    missing = settings.data.source == "files" and not Path(settings.data.path).is_dir()
    if missing:
        settings = replace(settings, data=replace(settings.data, source="mock"))
    batches = train_loader(settings, mesh.dp, mesh.world.device, 0, model.example)
    try:
        return next(batches)
    finally:
        batches.close()


# ---- from a run ----

class Plan(NamedTuple):
    """How to write a run's weights for another library."""

    what: str                                        # the output, described for the user
    c: Any                                           # the model's configuration
    rule: Callable[[str], Rule]
    about: dict[str, str]                            # the header of each file
    extra: dict[str, Tensor]                         # tensors that are not made from ours


def from_run(run: Path, target: Path, given: list[str], to: str, rows: str, average: bool, shard: int, everyone: Axis,
             say: Callable[[str], None]) -> None:
    """Write a run's newest weights, or their moving average, in another library's format."""
    if given:
        raise CourseError(f"{given[0]}: the settings of a run that is converted are its own; leave it out")
    settings = read_config(run)
    plan = plan_of(settings, run, to, rows)
    if target.exists():
        raise CourseError(f"{target} exists already: choose another name, or move it away")
    if target.suffix in (".pt", ".pth", ".bin"):
        raise CourseError(f"{target}: weights are written as .safetensors, never pickled; choose that ending, or a folder")
    newest = checkpoint.newest(run / "checkpoints", say, everyone)
    if newest is None:
        raise CourseError(f"{run} has no checkpoint yet: let it train to its first one")
    folder, index = newest
    kind = ".ema" if average else ""
    ours = {name: (getattr(torch, index["tensors"].get(name + kind, {"dtype": "float32"})["dtype"]), tuple(p.shape))
            for name, p in build_model(settings.model).named_parameters()}
    if missing := next((name + kind for name in ours if name + kind not in index["tensors"]), ""):
        raise CourseError(f"{folder} lacks {missing}: " + ("train with optim.ema=0.9999 for a moving average" if average
                                                           else "it is of another model than the run's config.yaml"))
    single = target.suffix == ".safetensors"
    if single and (to or default_of(settings)) == "hf":
        raise CourseError(f"{target}: without a config.json beside them, Hugging Face's weights say too little: give the name of "
                          "a folder, in which both will be")
    listed = [*entries(plan.c, plan.rule, ours),
              *(weight_files.Entry(name, x.dtype, tuple(x.shape), name, 0) for name, x in plan.extra.items())]
    files = weight_files.divide(listed, 2**63 if single else shard)

    def make(name: str) -> Any:
        if name in plan.extra:
            return plan.extra[name],
        shape = index["tensors"][name + kind]["shape"]
        whole = read_box(folder, index, name + kind, tuple((0, n) for n in shape))
        return plan.rule(name)[0].theirs(plan.c, whole.reshape(ours[name][1]))

    words, last = its_tokenizer(run, settings)
    partial = target.with_name(f".{target.name}.partial")

    def write() -> None:
        for name, part in list(files.items())[everyone.rank::everyone.size]:
            weight_files.write_file(partial / name, part, make, plan.about)

    def publish() -> None:
        if single:
            (partial / weight_files.FILES[0]).rename(target)
            partial.rmdir()
        else:
            for name, text in (beside(plan, to or default_of(settings), listed[0].dtype, files, last) | words).items():
                (partial / name).write_text(text, encoding="utf-8")
            partial.rename(target)
        flush(target.parent)

    run_on_all(everyone, lambda: remove(partial) if everyone.rank == 0 else None)
    try:
        run_on_all(everyone, write)
        run_on_all(everyone, lambda: publish() if everyone.rank == 0 else None)
    finally:
        clear(partial, everyone)
    written_as = f"file {plan.what}" if single else f"folder {plan.what}, not a run"
    say(f"wrote {target}, a {written_as}: {len(listed)} tensors of step "
        f"{index['state']['step']}" + ("" if single else f" in {len(files)} file{'s' * (len(files) > 1)}")
        + (f", and {WORDS}" if not single and words else ""))


def its(words: str) -> Tokenizer | None:
    """The tokenizer that a text describes; None if there is none."""
    try:
        return Tokenizer.from_str(words) if words else None
    except Exception:                                # the package has no exception type of its own; sampling reports it
        return None


def its_tokenizer(run: Path, settings: Config) -> tuple[dict[str, str], list[int]]:
    """A GPT run's tokenizer as files of a Hugging Face folder (none if there is none), and its end tokens."""
    if not isinstance(settings.model, GPTConfig):
        return {}, []
    # random samples have no tokenizer
    places = sample_text.tokenizer_files(run, settings)[:2 if settings.data.source == "files" else 1]
    there = next((file for file in places if file.is_file()), None)
    last = end_tokens.of_run(run, settings)
    if there is None:
        return {}, last
    words = text_of(there)
    tokenizer = its(words)
    last = last or (end_tokens.in_vocabulary(end_tokens.of_tokenizer(tokenizer), settings.model) if tokenizer else [])
    about = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if last and tokenizer and (token := tokenizer.id_to_token(last[0])):
        about["eos_token"] = token
    return {WORDS: words, "tokenizer_config.json": json.dumps(about, indent=1) + "\n"}, last


def default_of(settings: Config) -> str:
    """The library that a model is converted to by default."""
    return {"gpt": "hf", "dit": "dit", "vit": "te"}[family_of(settings.model)]


def plan_of(settings: Config, run: Path, to: str, rows: str) -> Plan:
    """How to write a run's weights for a library. Raises `CourseError` if that library has no such model."""
    c, to = settings.model, to or default_of(settings)
    if to not in KINDS:
        raise CourseError(f"--to {to}: it is one of {', '.join(KINDS)}")
    if c.kind != family_of(c):
        raise CourseError(f"{run} is of a {c.kind}, a model of your own, which other libraries do not have: write its "
                          "weights with a rule of your own, as course/convert/dit.py does")
    if to != "te" and c.kind != KINDS[to]:
        raise CourseError(f"{run} is of a {c.kind}, and --to {to} is for a {KINDS[to]}: choose --to {default_of(settings)}")
    if isinstance(c, DiTConfig):
        what = "of weights with the names of facebookresearch/DiT"
        return Plan(what, c, lambda ours: dit.rule(c, ours), weight_files.about(c), {"pos_embed": dit.positions(c).float()})
    if to == "te":
        transformer_engine.check_model(c)
        what = f"of Transformer Engine's layers, their rows {rows}"
        return Plan(what, c, lambda ours: transformer_engine.rule(ours, rows), transformer_engine.about(c, rows), {})
    assert isinstance(c, GPTConfig)
    kind = huggingface.kind_of(c)
    return Plan(f"of a Hugging Face {kind}", c, lambda ours: huggingface.rule(c, ours), weight_files.about(c), {})


def beside(plan: Plan, to: str, dtype: torch.dtype, files: dict[str, list[weight_files.Entry]], last: list[int]) -> dict[str,
                                                                                                                         str]:
    """The texts beside a folder's weight files, by name. last: the tokens that end a text."""
    if to == "hf":
        return huggingface.beside(plan.c, dtype, files, last)
    return {f"{weight_files.FILES[0]}.index.json": json.dumps(weight_files.index_of(files), indent=1)} if len(files) > 1 else {}
