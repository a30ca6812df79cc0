"""The `course` command: the command line of the library. `course COMMAND --help` explains each command."""

import importlib.metadata
import io
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from course.cli.bench import bench
from course.cli.data import data
from course.cli.options import KEYS, SETTINGS, Overrides, Preset, numbers, say_next
from course.utils.errors import CourseError, is_out_of_memory

app = typer.Typer(help="Deep Learning at Scale: from one GPU to model parallelism.", no_args_is_help=True,
                  pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]})
app.add_typer(data, name="data")
app.add_typer(bench, name="bench")
cluster = typer.Typer(help="A real Slurm of several nodes on this machine alone, to try scripts and jobs.", no_args_is_help=True)
app.add_typer(cluster, name="cluster")
lessons = typer.Typer(help="Get the lessons' notebooks, or build them.", no_args_is_help=True)
app.add_typer(lessons, name="lessons")


def tell_version(wanted: bool) -> None:
    """Print the version and exit, if asked."""
    if wanted:
        print(f"course {importlib.metadata.version('course')}")
        raise typer.Exit()


@app.callback()
def options(version: Annotated[bool, typer.Option("--version", callback=tell_version, is_eager=True,
                                                  help="Show the version and exit.")] = False) -> None:
    """Deep Learning at Scale: from one GPU to model parallelism."""


@app.command(context_settings=SETTINGS, no_args_is_help=True)
def train(preset: Preset, settings: Overrides = None) -> None:
    """Train a model, or go on where the run of this name stopped. Also under torchrun and srun.

    Exit status 75 says that a signal stopped it, all is saved, and the same command goes on. Under torchrun, which would take
    that for a failure, it is 0.
    """
    from course import config
    from course.models import family_of
    from course.parallel.mesh import by_torchrun
    from course.resilience.preemption import GO_ON
    from course.training import trainer as training

    asked = config.load(preset, settings or [])
    run, stopped = training.train(asked)
    look = {"vit": "evaluate", "gpt": "sample", "dit": "generate"}[family_of(asked.model)]
    if asked.data.source == "mock":                  # there is nothing to forecast, write or draw
        look = f"profile {shlex.join([preset, *(settings or [])])}"
    else:
        look = f"{look} {shlex.quote(str(run))}"
    say_next("" if stopped else f"course {look}")
    raise typer.Exit(GO_ON if stopped and not by_torchrun() else 0)


@app.command(context_settings=SETTINGS, no_args_is_help=True)
def verify(preset: Preset, settings: Overrides = None,
           thorough: Annotated[bool, typer.Option("--thorough", help="with settings that show more mistakes: dropout, clipping, "
                                                  "uneven batches, a moving average, Adam, an overflow; takes several times as "
                                                  "long")] = False) -> None:
    """Compare a layout (parallel.tp=2 ...) with one process, parameter by parameter. Starts CPU ranks itself, or use torchrun."""
    from course.training import verify as comparison

    raise typer.Exit(0 if comparison.main(preset, settings or [], thorough) else 1)


@app.command(no_args_is_help=True)
def plan(preset: Preset,
         settings: Annotated[list[str] | None, typer.Argument(metavar=KEYS, help="what is fixed, such as parallel.tp=2 "
                                                              "precision=fp8 train.global_batch=512; the rest is chosen")] = None,
         *, gpus: Annotated[int, typer.Option(help="how many")],
         hardware: Annotated[str,
                             typer.Option(help="v100-16, a100-80, h20, h100-80, h200, b200 ... (course/planner/hardware.yaml), "
                                          "or a YAML file of your own: `base: h100-80` and what differs")],
         top: Annotated[int, typer.Option(min=1, help="how many layouts to show")] = 10,
         tokens: Annotated[float, typer.Option(help="also say how long so many take, such as 300e9, and how many GPU-hours")] = 0,
         samples: Annotated[float, typer.Option(help="the same for what is not a GPT")] = 0,
         precisions: Annotated[str, typer.Option(help="formats to choose among, such as bf16,fp8; else the preset's")] = "",
         layout: Annotated[int, typer.Option(help="the layout that --launch, --tokens and --samples mean, by its number")] = 1,
         launch: Annotated[bool, typer.Option("--launch", help="print the command that starts it (torchrun on a node, sbatch on "
                                              "several), and nothing else")] = False,
         free: Annotated[float, typer.Option(help="share of each GPU's memory that stays free, since predictions err")] = 0.05,
         out: Annotated[Path | None, typer.Option(help="also write all layouts to this JSON file")] = None) -> None:
    """Predict the fastest layouts of a model on some GPUs that fit their memory: course plan gpt-7b --gpus 64 --hardware h100-80.

    Each line is a way to write the GPUs as pp x dp x cp x tp, with the best micro-batch, schedule, recomputation ... for it.
    Nothing is built or run, so it answers for GPUs that you do not have.
    """
    from course.cli import plan

    plan.main(preset, settings or [], gpus, hardware, top, tokens, samples, [word for word in precisions.split(",") if word],
                  layout, launch, out, free)
    if not launch:
        say_next(f"course {shlex.join(sys.argv[1:])} --launch")


@app.command(context_settings=SETTINGS, no_args_is_help=True)
def profile(preset: Annotated[str, typer.Argument(help="one of `course presets`, a YAML file's path, or a trace (.json.gz)")],
            settings: Overrides = None) -> None:
    """Where a step's time goes: forward, backward, communication, waiting for data, idle.

    Looks at profile.steps=3 steps after profile.after=10. Under torchrun and srun every rank leaves a trace.
    """
    from course.training import profile_run as profiling

    profiling.main(preset, settings or [])
    if not preset.endswith((".json", ".gz")):
        other = "train.recompute=full" if "compile=true" in (settings or []) else "compile=true"
        say_next(f"course profile {shlex.join([preset, *(settings or []), other])}")


@app.command(no_args_is_help=True)
def evaluate(run: Annotated[Path, typer.Argument(help="the folder of a run, such as runs/vit-demo/default")],
             split: Annotated[str, typer.Option(help="train, valid or test years")] = "test",
             samples: Annotated[int, typer.Option(min=1, help="how many forecasts to average over")] = 64,
             animate: Annotated[bool, typer.Option(help="also draw forecast.gif, truth beside forecast")] = False,
             ema: Annotated[bool, typer.Option(help="of the weights' moving average (optim.ema)")] = False) -> None:
    """Forecast errors for five days against persistence and climatology, with pictures."""
    from course.data.weather.layout import SPLITS
    from course.inference import forecast_scores as evaluation

    if split not in SPLITS:
        raise CourseError(f"--split {split}: it is one of {', '.join(SPLITS)}")
    evaluation.score_run(run, split, samples, animate, ema)
    say_next(f"course evaluate {shlex.quote(str(run))} --split {split} --animate" if not animate else
             f"tensorboard --logdir {shlex.quote(str(run / 'tensorboard'))}")


@app.command(no_args_is_help=True)
def generate(run: Annotated[Path, typer.Argument(help="the folder of a DiT's run, such as runs/dit-digits/default")],
             labels: Annotated[str, typer.Option(help="such as 0,1,2; else the first ten")] = "",
             each: Annotated[int, typer.Option(min=1, help="samples of each label")] = 8,
             guidance: Annotated[float | None, typer.Option(help="classifier-free guidance; 1: none; else 4, if it was trained")]
             = None,
             channels: Annotated[int, typer.Option(help="guide the first so many channels alone; 0: all")] = 0,
             steps: Annotated[int, typer.Option(help="of the sampler")] = 50,
             sampler: Annotated[str, typer.Option(help="ddim or euler; auto: what fits the model's objective")] = "auto",
             eta: Annotated[float, typer.Option(min=0, max=1, help="fresh noise of ddim; 1: as much as DDPM")] = 0.0,
             seed: Annotated[int, typer.Option(help="other seeds, other samples")] = 0,
             batch: Annotated[int, typer.Option(min=1, help="samples at a time")] = 64,
             ema: Annotated[bool | None, typer.Option(help="with the weights' moving average; else if there is one")] = None,
             vae: Annotated[str, typer.Option(help="name or folder of the VAE that decodes latents (diffusers)")] = "") -> None:
    """Draw samples of a trained DiT: a labelled picture, and the latents as .npy, in RUN/samples."""
    from course.config import schema
    from course.inference import sample_images
    from course.inference.diffusion_sampler import SamplerSettings

    values = {"sampler": sampler, "steps": steps, "guidance": guidance, "channels": channels, "eta": eta, "seed": seed,
              "batch": batch}
    wanted = numbers(labels, "--labels", least=0) if labels else []
    sample_images.sample_run(run, wanted, each, schema.build(SamplerSettings, values, "course generate"), ema, vae)
    say_next(f"course generate {shlex.quote(str(run))} --seed {seed + 1} --guidance {1 if guidance != 1 else 4}")


@app.command(no_args_is_help=True)
def sample(run: Annotated[Path, typer.Argument(help="the folder of a GPT's run, such as runs/gpt-python/default")],
           prompt: Annotated[str, typer.Option(help="the text to go on from; an end token in it ends a document")] = "def ",
           count: Annotated[int, typer.Option(min=1, help="tokens to write")] = 100,
           temperature: Annotated[float, typer.Option(min=0, help="below 1 prefers probable tokens; 0 takes the first")] = 0.8,
           top_k: Annotated[int, typer.Option(min=0, help="draw from this many of the most probable tokens; 0: from all")] = 50,
           seed: Annotated[int, typer.Option(help="other seeds, other texts")] = 0,
           samples: Annotated[int, typer.Option(min=1, help="how many texts")] = 1,
           tokenizer: Annotated[Path | None, typer.Option(help="a tokenizer.json; else RUN's, else that in its data.path")]
           = None) -> None:
    """Let a trained GPT write, up to `--count` tokens or the end of the text."""
    from course.inference import sample_text as sampling

    sampling.sample_run(run, prompt, count, temperature, top_k, seed, samples, tokenizer=tokenizer)
    say_next(f"course sample {shlex.quote(str(run))} --seed {seed + 1} --temperature {0.5 if temperature != 0.5 else 1}")


@app.command(no_args_is_help=True)
def reshard(run: Annotated[Path, typer.Argument(help="the folder of a run, such as runs/vit-demo/default")],
            settings: Annotated[list[str] | None, typer.Argument(metavar=KEYS, help="the layout: keys of parallel, such as "
                                                                 "parallel.tp=4 parallel.dp=2 parallel.zero=1")] = None,
            name: Annotated[str, typer.Option(help="of the new run, beside the old one")] = "resharded") -> None:
    """Write a run's newest checkpoint again, cut up for another layout: each rank will find its part in one file.

    Any layout goes on from any checkpoint without this. In one process, on any machine, one tensor in memory at a time.
    """
    from course.convert import reshard as resharding

    resharding.main(run, settings or [], name)


@app.command(no_args_is_help=True)
def convert(source: Annotated[Path, typer.Argument(help="the folder of a run; or a Hugging Face folder, a DiT's file, or a "
                                                        "state dict of Transformer Engine's layers")],
            target: Annotated[Path, typer.Argument(help="the folder of a run, such as runs/gpt/mine; or a folder, or (dit, "
                                                        "te) a file .safetensors")],
            settings: Annotated[list[str] | None, typer.Argument(metavar=KEYS, help="of the run that is made, such as "
                                                                 "precision=fp8 parallel.tp=2")] = None,
            to: Annotated[str, typer.Option(help="hf (GPT-2 or Llama), dit or te; else what fits the model")] = "",
            like: Annotated[str, typer.Option(help="the preset whose settings the run has, and what the file does not say of the "
                                              "model")] = "",
            qkv: Annotated[str, typer.Option(help="the rows of te's fused projection: interleaved, stacked or separate; else as "
                                             "the file says, or interleaved")] = "",
            ema: Annotated[bool, typer.Option(help="write the weights' moving average (optim.ema)")] = False,
            shard: Annotated[float, typer.Option(min=0.001, help="GB in a file of a folder that is written")] = 4.0) -> None:
    """Convert weights of another library to a run, or those of a run to another library's files. Also under torchrun and srun.

    course convert gpt2/ runs/gpt/mine; course convert runs/gpt/mine out --to hf.
    One tensor in memory at a time; nothing is ever unpickled. FP8's scales are rebuilt, of te alone, by a pass without an update.
    """
    from course.convert import command

    command.main(source, target, settings or [], to, like, qkv, ema, int(shard * 2**30))


@app.command()
def presets(name: Annotated[str, typer.Argument(help="one of them: show its settings")] = "") -> None:
    """The presets that `course train` knows: parameters, the memory that one GPU needs, the data, and what each is for."""
    from course.cli import presets

    presets.main(name)


@app.command()
def settings(section: Annotated[str, typer.Argument(help="such as train or model.gpt; else all")] = "") -> None:
    """Every setting: its default, what it may be, and what it does."""
    from course.cli import settings

    settings.main(section)


@app.command()
def doctor(need: Annotated[str, typer.Option(help="fail if one of these is missing, such as fp8,dali")] = "") -> None:
    """What this machine has: versions, GPUs, precisions, and the cure for what does not work."""
    from course.cli import doctor as examination

    raise typer.Exit(examination.main(need))


@app.command()
def check(file: Annotated[Path, typer.Argument(help="a saved notebook, or a script in percent format")],
          exercise: Annotated[list[str] | None, typer.Option(help="only this exercise; may be repeated")] = None,
          seed: Annotated[int | None, typer.Option(help="that of an earlier check; else drawn afresh")] = None,
          trust: Annotated[bool, typer.Option("--trust", help="run another's notebook even where nothing isolates it")] = False,
          list_ranks: Annotated[bool, typer.Option("--list-ranks", hidden=True)] = False,
          on_ranks: Annotated[Path | None, typer.Option(hidden=True)] = None,
          result: Annotated[Path | None, typer.Option(hidden=True)] = None) -> None:
    """Check the exercises of a lesson's notebook, as `check("name")` does inside it. On real ranks: submit/check.sh.

    Another's notebook is refused where nothing isolates it: one that is not in the notebooks folder of a course you work in.
    """
    from course.lab.checks import own_notebooks, render
    from course.lab.grading import submissions

    if protection := own_notebooks.describe_protection(file, trust, list_ranks or on_ranks is not None):
        print(protection, file=sys.stderr, flush=True)
    if list_ranks or on_ranks or result:             # the parts of submit/check.sh
        from course.lab.grading import on_cluster
    if list_ranks:
        print("\n".join(on_cluster.exercises_on_ranks(file)))
        return
    if on_ranks:
        on_cluster.check_on_ranks(file, (exercise or [""])[0], on_ranks)
        return
    alone = [e.name for e in submissions.exercises_of_lesson(submissions.lesson_of(file)) if max(e.sizes) == 1] if result else []
    verdicts = [] if result and not alone else submissions.check_file(
        file, alone or exercise or [], seed, lambda verdict: print(render.text(verdict, sys.stdout.isatty()), flush=True))
    if result:
        print(f"wrote {on_cluster.write_result(file, result, verdicts)}: hand it in with the notebook, which must not change any "
              "more")
        return
    raise typer.Exit(0 if all(verdict.passed for verdict in verdicts) else 1)


OfCluster = Annotated[Path | None, typer.Option(help="for its files; else one of yours under the temporary folder")]


@cluster.command("start")
def start_cluster(folder: OfCluster = None,
                  nodes: Annotated[int, typer.Option(min=1, help="how many nodes")] = 2,
                  cpus: Annotated[int, typer.Option(min=1, help="of each; may be more than the machine has")] = 8,
                  gpus: Annotated[int, typer.Option(min=0, help="of each, simulated: Slurm shares them out, no program sees one")]
                  = 0,
                  partition: Annotated[str, typer.Option(envvar="SBATCH_PARTITION", help="its name, as a site's profile has it")]
                  = "course") -> None:
    """Start Slurm here. eval "$(course cluster start)" also makes this shell's sbatch, squeue and scontrol mean it."""
    from course.lab.slurm import local_cluster as starter

    starter.start_command(folder or starter.default_folder(), nodes, cpus, gpus, partition)


@cluster.command("stop")
def stop_cluster(folder: OfCluster = None,
                 force: Annotated[bool, typer.Option("--force", "-f", help="also if jobs run or wait: they end with it")] = False
                 ) -> None:
    """End it and remove its files. While jobs run or wait it stays, and says which."""
    from course.lab.slurm import local_cluster as starter

    starter.stop_command(folder or starter.default_folder(), force)


@app.command("lint-sbatch", context_settings={"ignore_unknown_options": True})
def lint_sbatch(file: Annotated[Path, typer.Argument(help="a batch script")],
                options: Annotated[list[str] | None, typer.Argument(metavar="[OPTION]...", help="what else sbatch will be given, "
                                                                    "such as --nodes=2")] = None) -> None:
    """Say what is wrong with a batch script before it waits in a queue, and why. Exit status 1 if something is."""
    from course.lab.slurm import lint

    raise typer.Exit(0 if lint.main(file, options or []) else 1)


@lessons.command("copy")
def copy_lessons(folder: Annotated[Path, typer.Argument(help="where you want to work, such as my-course")]) -> None:
    """Put the lessons in FOLDER/notebooks, blank, and scripts for clusters in FOLDER/submit; nothing there is overwritten.

    Data and runs of the lessons will lie in FOLDER, too.
    """
    from course.lab.authoring import lessons as maker

    maker.copy(folder)


@lessons.command()
def build(names: Annotated[list[str] | None, typer.Argument(help="such as 01; all lessons if none is named")] = None,
          check: Annotated[bool, typer.Option("--check", help="only say what is stale or gives an answer away")] = False,
          force: Annotated[bool, typer.Option("--force", help="execute also what is up to date")] = False) -> None:
    """Make notebooks/ and the executed solutions/ from the masters solutions/NN_name.py."""
    from course.lab.authoring import lessons as maker

    if check:
        found = maker.verify(names or [])
        print("\n".join(found) or "all notebooks are up to date, and no answer leaks")
        raise typer.Exit(1 if found else 0)
    maker.build(names or [], force=force)


@app.command()
def grade(folder: Annotated[Path, typer.Argument(help="of submissions, as nbgrader, Canvas or Moodle lay them out")],
          out: Annotated[Path, typer.Option(help="for gradebook.csv, junit.xml, feedback/ and what is kept")] = Path("grades"),
          lesson: Annotated[list[str] | None, typer.Option(help="only this lesson, such as 01; may be repeated")] = None,
          jobs: Annotated[int, typer.Option(min=0, help="learners at a time; 0: one for each two cores")] = 0,
          seed: Annotated[int | None, typer.Option(help="of the hidden inputs; else that kept in --out, or drawn")] = None,
          trust: Annotated[bool, typer.Option("--trust", help="run answers even where nothing isolates them")] = False) -> None:
    """Grade a folder of learners' notebooks with hidden variants of the checks.

    Run again with the same --out, it goes on where it stopped, grades what is new, and keeps what it graded before.
    """
    import signal

    from course.lab.grading import grade as grading

    signal.signal(signal.SIGTERM, signal.default_int_handler)           # the end of a job stops it as cleanly as Ctrl-C
    grading.main(folder, out, lesson or [], jobs, seed, trust)


@app.command()
def release(out: Annotated[Path, typer.Option(help="a folder that does not exist yet")],
            hide_answers: Annotated[bool, typer.Option(help="blank what exercises ask for in the library, too")] = False) -> None:
    """Write what learners get: the course with blank notebooks, without solutions."""
    from course.lab.authoring import release as releasing

    releasing.main(out, hide_answers=hide_answers)


def main() -> None:
    r"""Run the command; a `CourseError` becomes one sentence and exit status 1. Characters that the terminal's locale lacks are
    printed as \u2713."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except CourseError as error:
        sys.exit(f"course: {last_words(error)}")
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        sys.exit(f"course: memory ran out ({last_line(error)}): take fewer samples at a time (train.micro_batch=1, --batch 1, "
                 "--samples 1), a smaller model, or more memory")


def last_line(error: BaseException) -> str:
    """The beginning of an exception's message."""
    return (str(error).splitlines() or [type(error).__name__])[0][:160]


def last_words(error: CourseError) -> str:
    """The sentence of an error, without the traceback in which a loader's worker process wraps it."""
    text = str(error).strip()
    last = text.splitlines()[-1] if text else ""
    wrapped = "course.utils.errors.CourseError: "
    return last.removeprefix(wrapped) if last.startswith(wrapped) else text


if __name__ == "__main__":
    main()
