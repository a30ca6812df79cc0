"""The `course` command: the command line of the library. `course COMMAND --help` explains each command."""

import importlib.metadata
import io
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from course.cli import torchrun
from course.cli.bench import bench
from course.cli.data import data
from course.cli.options import KEYS, SETTINGS, Overrides, Preset, numbers, say_next
from course.utils.errors import CourseError, is_out_of_memory

app = typer.Typer(help="Deep Learning at Scale: from one GPU to model parallelism.", no_args_is_help=True,
                  pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]})
app.add_typer(data, name="data")
app.add_typer(bench, name="bench")
cluster = typer.Typer(help="Run a real Slurm with several nodes on this machine, to try scripts and jobs.", no_args_is_help=True)
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
    """Train a model, or resume the run of this name. Also under torchrun and srun.

    Exit status 75 means that a signal stopped the run: everything is saved, and the same command resumes it.
    Under torchrun the status is 0, because torchrun takes 75 for a failure.
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
           thorough: Annotated[bool, typer.Option("--thorough", help="use settings that reveal more mistakes: dropout, clipping, "
                                                  "uneven batches, a moving average, Adam, an overflow. Takes several times as "
                                                  "long")] = False) -> None:
    """Compare a layout (parallel.tp=2 ...) with one process, parameter by parameter. It starts CPU ranks, or use torchrun."""
    from course.training import verify as comparison

    raise typer.Exit(0 if comparison.main(preset, settings or [], thorough) else 1)


@app.command(no_args_is_help=True)
def plan(preset: Preset,
         settings: Annotated[list[str] | None, typer.Argument(metavar=KEYS, help="settings to keep fixed, such as parallel.tp=2 "
                                                              "precision=fp8 train.global_batch=512; others are chosen")] = None,
         *, gpus: Annotated[int, typer.Option(show_default=False, help="number of GPUs; required")] = 0,
         hardware: Annotated[str,
                             typer.Option(help="required: v100-16, a100-80, h20, h100-80, h200, b200 ... "
                                          "(course/planner/hardware.yaml), or your own YAML file: `base: h100-80` and the values "
                                          "that differ")] = "",
         top: Annotated[int, typer.Option(min=1, help="number of layouts to show")] = 10,
         tokens: Annotated[float, typer.Option(help="also print time and GPU-hours for this many tokens, such as 300e9")] = 0,
         samples: Annotated[float, typer.Option(help="the same in samples, for models other than GPT")] = 0,
         precisions: Annotated[str, typer.Option(help="formats to choose from, such as bf16,fp8. Default: the preset's")] = "",
         layout: Annotated[int, typer.Option(help="number of the layout that --launch, --tokens and --samples use")] = 1,
         launch: Annotated[bool, typer.Option("--launch", help="print only the command that starts it (torchrun on a node, "
                                              "sbatch on several)")] = False,
         free: Annotated[float, typer.Option(help="fraction of each GPU's memory to keep free, as a margin")] = 0.05,
         out: Annotated[Path | None, typer.Option(help="also write all layouts to this JSON file")] = None) -> None:
    """Predict the fastest layouts of a model that fit in GPU memory: course plan gpt-7b --gpus 64 --hardware h100-80.

    Each line splits the GPUs into pp x dp x cp x tp, with the best micro-batch, schedule and recomputation for this split.
    The command builds and runs nothing, so it also works for GPUs that you do not have.
    """
    if missing := [name for name, value in (("--gpus", gpus), ("--hardware", hardware)) if not value]:
        example = shlex.join([preset, *(settings or []), "--gpus", str(gpus or 8), "--hardware", hardware or "h100-80"])
        raise CourseError(f"course plan needs {' and '.join(missing)}, for example: course plan {example}")
    from course.cli import plan

    plan.main(preset, settings or [], gpus, hardware, top, tokens, samples, [word for word in precisions.split(",") if word],
                  layout, launch, out, free)
    if not launch:
        say_next(f"course {shlex.join(sys.argv[1:])} --launch")


@app.command(context_settings=SETTINGS, no_args_is_help=True)
def profile(preset: Annotated[str, typer.Argument(help="a name from `course presets`, a YAML file, a trace (.json.gz) or a "
                                                       "memory snapshot (.pickle)")],
            settings: Overrides = None) -> None:
    """Show where a step's time goes: forward, backward, communication, waiting for data, idle.

    It records profile.steps=3 steps after the first profile.after=10. Under torchrun and srun every rank writes a trace.
    A memory snapshot, which profile.memory=true writes on a GPU, says which lines hold memory at its peak.
    """
    from course.training import profile_run as profiling

    profiling.main(preset, settings or [])
    if not preset.endswith((".json", ".gz", ".pickle")):
        other = "train.recompute=full" if "compile=true" in (settings or []) else "compile=true"
        say_next(f"course profile {shlex.join([preset, *(settings or []), other])}")


@app.command(no_args_is_help=True)
def evaluate(run: Annotated[Path, typer.Argument(help="the folder of a run, such as runs/vit-demo/default")],
             split: Annotated[str, typer.Option(help="train, valid or test years")] = "test",
             samples: Annotated[int, typer.Option(min=1, help="number of forecasts to average over")] = 64,
             animate: Annotated[bool, typer.Option(help="also draw forecast.gif, with the truth beside the forecast")] = False,
             ema: Annotated[bool, typer.Option(help="use the moving average of the weights (optim.ema)")] = False) -> None:
    """Compare forecast errors over five days with persistence and climatology, and draw pictures."""
    from course.data.weather.layout import SPLITS
    from course.inference import forecast_scores as evaluation

    if split not in SPLITS:
        raise CourseError(f"--split {split} is unknown: use one of {', '.join(SPLITS)}")
    evaluation.score_run(run, split, samples, animate, ema)
    say_next(f"course evaluate {shlex.quote(str(run))} --split {split} --animate" if not animate else
             f"tensorboard --logdir {shlex.quote(str(run / 'tensorboard'))}")


@app.command(no_args_is_help=True)
def generate(run: Annotated[Path, typer.Argument(help="the folder of a DiT's run, such as runs/dit-digits/default")],
             labels: Annotated[str, typer.Option(help="class labels, such as 0,1,2. Default: the first ten")] = "",
             each: Annotated[int, typer.Option(min=1, help="number of samples per label")] = 8,
             guidance: Annotated[float | None, typer.Option(help="guidance scale; 1: none. Default: 4 if trained for it")]
             = None,
             channels: Annotated[int, typer.Option(help="guide only this many first channels; 0: all")] = 0,
             steps: Annotated[int, typer.Option(help="number of steps of the sampler")] = 50,
             sampler: Annotated[str, typer.Option(help="ddim or euler; auto: the one that fits the model's objective")] = "auto",
             eta: Annotated[float, typer.Option(min=0, max=1, help="amount of fresh noise in ddim; 1: as much as DDPM")] = 0.0,
             seed: Annotated[int, typer.Option(help="seed of the samples")] = 0,
             batch: Annotated[int, typer.Option(min=1, help="number of samples computed at once")] = 64,
             ema: Annotated[bool | None, typer.Option(help="use the weights' moving average. Default: if there is one")] = None,
             vae: Annotated[str, typer.Option(help="name or folder of the VAE that decodes latents (diffusers)")] = "") -> None:
    """Draw samples from a trained DiT. RUN/samples gets a labeled picture, and the latents as .npy."""
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
           prompt: Annotated[str, typer.Option(help="the text to continue; an end token in it ends a document")] = "def ",
           count: Annotated[int, typer.Option(min=1, help="number of tokens to write")] = 100,
           temperature: Annotated[float, typer.Option(min=0, help="below 1: prefer probable tokens; 0: the most probable")] = 0.8,
           top_k: Annotated[int, typer.Option(min=0, help="draw from this many most probable tokens; 0: from all")] = 50,
           seed: Annotated[int, typer.Option(help="seed of the texts")] = 0,
           samples: Annotated[int, typer.Option(min=1, help="number of texts")] = 1,
           tokenizer: Annotated[Path | None, typer.Option(help="a tokenizer.json. Default: RUN's, or the one in its data.path")]
           = None) -> None:
    """Let a trained GPT write text, up to `--count` tokens or the end of the text."""
    from course.inference import sample_text as sampling

    sampling.sample_run(run, prompt, count, temperature, top_k, seed, samples, tokenizer=tokenizer)
    say_next(f"course sample {shlex.quote(str(run))} --seed {seed + 1} --temperature {0.5 if temperature != 0.5 else 1}")


@app.command(no_args_is_help=True)
def reshard(run: Annotated[Path, typer.Argument(help="the folder of a run, such as runs/vit-demo/default")],
            settings: Annotated[list[str] | None, typer.Argument(metavar=KEYS, help="the layout: keys of parallel, such as "
                                                                 "parallel.tp=4 parallel.dp=2 parallel.zero=1")] = None,
            name: Annotated[str, typer.Option(help="name of the new run, beside the old one")] = "resharded") -> None:
    """Rewrite a run's newest checkpoint for another layout, so that each rank finds its part in one file.

    A run can resume in any layout without this command. It runs in one process, on any machine, and holds one tensor at a time.
    """
    from course.convert import reshard as resharding

    resharding.main(run, settings or [], name)


@app.command(no_args_is_help=True)
def convert(source: Annotated[Path, typer.Argument(help="the folder of a run, a Hugging Face folder, a DiT's file, or a state "
                                                        "dict of Transformer Engine's layers")],
            target: Annotated[Path, typer.Argument(help="the folder of a run, such as runs/gpt/mine, another folder, or for dit "
                                                        "and te a .safetensors file")],
            settings: Annotated[list[str] | None, typer.Argument(metavar=KEYS, help="settings of the new run, such as "
                                                                 "precision=fp8 parallel.tp=2")] = None,
            to: Annotated[str, typer.Option(help="hf (GPT-2, Llama, Mixtral, Qwen3, Qwen3-MoE), dit or te. Default: the one "
                                            "that fits the model")] = "",
            like: Annotated[str, typer.Option(help="the preset with the settings of the run, and with the model settings that "
                                              "the file lacks")] = "",
            qkv: Annotated[str, typer.Option(help="rows of te's fused projection: interleaved, stacked or separate. Default: as "
                                             "the file says, or interleaved")] = "",
            ema: Annotated[bool, typer.Option(help="write the moving average of the weights (optim.ema)")] = False,
            shard: Annotated[float, typer.Option(min=0.001, help="largest size of a written file, in GB")] = 4.0) -> None:
    """Convert another library's weights to a run, or a run's weights to another library's files. Also under torchrun and srun.

    Examples: course convert gpt2/ runs/gpt/mine; course convert runs/gpt/mine out --to hf.
    It keeps one tensor in memory at a time, and unpickles nothing. For te it rebuilds FP8 scales, by a pass without an update.
    """
    from course.convert import command

    command.main(source, target, settings or [], to, like, qkv, ema, int(shard * 2**30))


@app.command()
def presets(name: Annotated[str, typer.Argument(help="a preset whose settings to show")] = "") -> None:
    """List the presets of `course train`: parameters, memory on one GPU, data, and purpose."""
    from course.cli import presets

    presets.main(name)


@app.command()
def settings(section: Annotated[str, typer.Argument(help="a section, such as train or model.gpt. Default: all")] = "") -> None:
    """List every setting: its default, its allowed values, and what it does."""
    from course.cli import settings

    settings.main(section)


@app.command()
def doctor(need: Annotated[str, typer.Option(help="features that must work, such as fp8,dali: otherwise fail")] = "",
           nccl: Annotated[Path | None, typer.Option(help="the output of a run with NCCL_DEBUG=INFO: say why NCCL did not start")]
           = None) -> None:
    """Show what this machine has: versions, GPUs, precisions, and how to fix what does not work."""
    from course.cli import doctor as examination
    from course.cli import nccl_log

    if nccl:
        raise typer.Exit(nccl_log.main(nccl))
    raise typer.Exit(examination.main(need))


@app.command()
def check(file: Annotated[Path, typer.Argument(help="a saved notebook, or a script in percent format")],
          exercise: Annotated[list[str] | None, typer.Option(help="check only this exercise; can be repeated")] = None,
          seed: Annotated[int | None, typer.Option(help="seed of an earlier check. Default: a new one")] = None,
          trust: Annotated[bool, typer.Option("--trust", help="run another person's notebook even without isolation")] = False,
          list_ranks: Annotated[bool, typer.Option("--list-ranks", hidden=True)] = False,
          on_ranks: Annotated[Path | None, typer.Option(hidden=True)] = None,
          result: Annotated[Path | None, typer.Option(hidden=True)] = None) -> None:
    """Check the exercises of a lesson's notebook, as `check("name")` does in the notebook. On real ranks: submit/check.sh.

    If the machine cannot isolate code, the command refuses a notebook from outside the notebooks folder of your course.
    """
    from course.lab.checks import own_notebooks, render
    from course.lab.checks.exercise import find
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
        print(f"wrote {on_cluster.write_result(file, result, verdicts)}: hand it in with the notebook, and do not change the "
              "notebook any more")
        return
    raise typer.Exit(0 if all(verdict.passed for verdict in verdicts if not find(verdict.exercise).open) else 1)


OfCluster = Annotated[Path | None, typer.Option(help="folder for its files. Default: your own folder in the temporary folder")]


@cluster.command("start")
def start_cluster(folder: OfCluster = None,
                  nodes: Annotated[int, typer.Option(min=1, help="number of nodes")] = 2,
                  cpus: Annotated[int, typer.Option(min=1, help="CPUs per node; can be more than the machine has")] = 8,
                  gpus: Annotated[int, typer.Option(min=0, help="simulated GPUs per node: Slurm assigns them, programs see none")]
                  = 0,
                  partition: Annotated[str, typer.Option(envvar="SBATCH_PARTITION", help="name, as in a site's profile")]
                  = "course") -> None:
    """Start Slurm here. With eval "$(course cluster start)", sbatch, squeue and scontrol in this shell use it."""
    from course.lab.slurm import local_cluster as starter

    starter.start_command(folder or starter.default_folder(), nodes, cpus, gpus, partition)


@cluster.command("stop")
def stop_cluster(folder: OfCluster = None,
                 force: Annotated[bool, typer.Option("--force", "-f", help="also stop running and waiting jobs")] = False
                 ) -> None:
    """Stop Slurm and remove its files. If jobs run or wait, the command lists them and stops nothing."""
    from course.lab.slurm import local_cluster as starter

    starter.stop_command(folder or starter.default_folder(), force)


@app.command("lint-sbatch", context_settings={"ignore_unknown_options": True})
def lint_sbatch(file: Annotated[Path, typer.Argument(help="a batch script")],
                options: Annotated[list[str] | None, typer.Argument(metavar="[OPTION]...", help="further options of sbatch, "
                                                                    "such as --nodes=2")] = None) -> None:
    """Find mistakes in a batch script before it waits in a queue, and explain them. Exit status 1 if there are any."""
    from course.lab.slurm import lint

    raise typer.Exit(0 if lint.main(file, options or []) else 1)


@lessons.command("copy")
def copy_lessons(folder: Annotated[Path, typer.Argument(help="your working folder, such as my-course")]) -> None:
    """Copy the blank lessons to FOLDER/notebooks and the cluster scripts to FOLDER/submit. Existing files stay as they are.

    The lessons keep their data and runs in FOLDER too.
    """
    from course.lab.authoring import lessons as maker

    maker.copy(folder)


@lessons.command()
def build(names: Annotated[list[str] | None, typer.Argument(help="lessons, such as 01. Default: all")] = None,
          check: Annotated[bool, typer.Option("--check", help="only report stale notebooks and leaked answers")] = False,
          force: Annotated[bool, typer.Option("--force", help="execute lessons that are up to date too")] = False) -> None:
    """Write notebooks/ and the executed solutions/ from the masters solutions/NN_name.py."""
    from course.lab.authoring import lessons as maker

    if check:
        found = maker.verify(names or [])
        print("\n".join(found) or "all notebooks are up to date, and no answer leaks")
        raise typer.Exit(1 if found else 0)
    maker.build(names or [], force=force)


@lessons.command()
def slides(names: Annotated[list[str] | None, typer.Argument(help="lessons, such as 01. Default: all")] = None,
           out: Annotated[Path, typer.Option(help="the folder for NN_name.html")] = Path("slides"),
           reveal: Annotated[str, typer.Option(help="address or folder of reveal.js. Default: on the network")] = "") -> None:
    """Write lessons as slides for teaching: their statements and figures, without code; answers to questions as speaker notes."""
    from course.lab.authoring import slides as maker

    maker.write(names or [], out, reveal)


@app.command()
def grade(folder: Annotated[Path, typer.Argument(help="submissions, as a learning platform gives them")],
          out: Annotated[Path, typer.Option(help="folder for gradebook.csv, junit.xml and feedback/")] = Path("grades"),
          lesson: Annotated[list[str] | None, typer.Option(help="grade only this lesson, such as 01; can be repeated")] = None,
          jobs: Annotated[int, typer.Option(min=0, help="learners graded at once; 0: one per two cores")] = 0,
          seed: Annotated[int | None, typer.Option(help="seed of the hidden inputs. Default: that in --out, or new")] = None,
          trust: Annotated[bool, typer.Option("--trust", help="run answers even without isolation")] = False) -> None:
    """Grade a folder of learners' notebooks with hidden variants of the checks.

    A second run with the same --out continues where the first one stopped, grades new notebooks, and keeps earlier grades.
    """
    import signal

    from course.lab.grading import grade as grading

    signal.signal(signal.SIGTERM, signal.default_int_handler)           # the end of a job stops it as cleanly as Ctrl-C
    grading.main(folder, out, lesson or [], jobs, seed, trust)


@app.command()
def release(out: Annotated[Path, typer.Option(help="the folder to write; it must not exist yet")],
            hide_answers: Annotated[bool, typer.Option(help="also blank exercises' answers in the library")] = False) -> None:
    """Write the course for learners: with blank notebooks, and without solutions."""
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
        if "TORCHELASTIC_RUN_ID" in os.environ:
            torchrun.exit_with(last_words(error))
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
