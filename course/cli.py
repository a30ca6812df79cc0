"""The `course` command: a thin door to the functions of the library. `course COMMAND --help` explains each."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from course.errors import CourseError

KEYS = "[KEY=VALUE]..."
OF_A_RUN = "settings, such as train.steps=100: all stand, with their defaults, in course/config.py"
OF_WEATHER = ("path=FOLDER, grid=[LATITUDES,LONGITUDES], train=, valid= and test=NUMBER of yearly files, times=ENTRIES in each, "
              "six hours apart, seed=, truncation=WAVES (0: what the grid can show), device=cpu or cuda")
OF_ERA5 = ("path=FOLDER, grid=[LATITUDES,LONGITUDES], train=, valid= and test=YEARS such as 1979-2015, "
           "chunk=TIMES in memory at once")
OF_TOKENS = "path=FOLDER, vocab=TOKENS, valid= and test=PART of the files, such as 0.05"
OF_JSONL = ("files, and then: path=FOLDER, text=KEY of a line that holds the document, tokenizer=TOKENIZER.JSON or "
            "vocabulary=VOCAB.JSON merges=MERGES.TXT (GPT-2's), else vocab=TOKENS learned from sample=MEGABYTES of the input, "
            "end=TOKEN that closes a document, valid= and test=PART of the documents (0: none), jobs=PROCESSES")
Overrides = Annotated[list[str] | None, typer.Argument(metavar=KEYS, help=OF_A_RUN)]
OverridesOfWeather = Annotated[list[str] | None, typer.Argument(metavar=KEYS, help=OF_WEATHER)]
OverridesOfEra5 = Annotated[list[str] | None, typer.Argument(metavar=KEYS, help=OF_ERA5)]
OverridesOfTokens = Annotated[list[str] | None, typer.Argument(metavar=KEYS, help=OF_TOKENS)]
FilesAndOverrides = Annotated[list[str], typer.Argument(metavar=f"FILE... {KEYS}", help=OF_JSONL)]
Out = Annotated[Path | None, typer.Option(help="also write the numbers to this JSON file")]

app = typer.Typer(help="Deep Learning at Scale: from one GPU to model parallelism.", no_args_is_help=True,
                  pretty_exceptions_enable=False, add_completion=False)
data = typer.Typer(help="Make or convert data sets.", no_args_is_help=True)
app.add_typer(data, name="data")
bench = typer.Typer(help="Measure this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")
cluster = typer.Typer(help="A real Slurm of several nodes on this machine alone, to try scripts and jobs.", no_args_is_help=True)
app.add_typer(cluster, name="cluster")
lessons = typer.Typer(help="Get the lessons' notebooks, or build them.", no_args_is_help=True)
app.add_typer(lessons, name="lessons")


@app.command()
def train(preset: Annotated[str, typer.Argument(help="a preset, or the path of a YAML file")],
          settings: Overrides = None) -> None:
    """Train a model, or go on where the run of this name stopped. Also under torchrun and srun.

    Exit status 75 says that a signal stopped it, all is saved, and the same command goes on. Under torchrun, which would take
    that for a failure, it is 0.
    """
    from course import config
    from course import train as training
    from course.parallel.mesh import by_torchrun
    from course.stop import GO_ON

    _, stopped = training.train(config.load(preset, settings or []))
    raise typer.Exit(GO_ON if stopped and not by_torchrun() else 0)


@app.command()
def verify(preset: Annotated[str, typer.Argument(help="a preset, or the path of a YAML file")],
           settings: Overrides = None) -> None:
    """Compare a layout (parallel.tp=2 ...) with one process, parameter by parameter. Starts CPU ranks itself, or use torchrun."""
    from course import verify as comparison

    raise typer.Exit(0 if comparison.main(preset, settings or []) else 1)


@app.command()
def plan(preset: Annotated[str, typer.Argument(help="a preset, or the path of a YAML file")],
         settings: Annotated[list[str] | None, typer.Argument(metavar=KEYS, help="what is fixed, such as parallel.tp=2 "
                                                              "precision=fp8 train.global_batch=512; the rest is chosen")] = None,
         *, gpus: Annotated[int, typer.Option(help="how many")],
         hardware: Annotated[str, typer.Option(help="v100-16, a100-80, h20, h100-80, h200, b200 ... (course/perf/hardware.yaml), "
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
    from course.perf import proposal

    proposal.main(preset, settings or [], gpus, hardware, top, tokens, samples, [word for word in precisions.split(",") if word],
                  layout, launch, out, free)


@app.command()
def profile(preset: Annotated[str, typer.Argument(help="a preset, the path of a YAML file, or a trace (.json.gz)")],
            settings: Overrides = None) -> None:
    """Where a step's time goes: forward, backward, communication, waiting for data, idle.

    Looks at profile.steps=3 steps after profile.after=10. Under torchrun and srun every rank leaves a trace.
    """
    from course.perf import profile as profiling

    profiling.main(preset, settings or [])


@app.command()
def evaluate(run: Annotated[Path, typer.Argument(help="the folder of a run, such as runs/vit-demo/default")],
             split: Annotated[str, typer.Option(help="train, valid or test years")] = "test",
             samples: Annotated[int, typer.Option(min=1, help="how many forecasts to average over")] = 64,
             animate: Annotated[bool, typer.Option(help="also draw forecast.gif, truth beside forecast")] = False,
             ema: Annotated[bool, typer.Option(help="of the weights' moving average (optim.ema)")] = False) -> None:
    """Forecast errors for five days against persistence and climatology, with pictures."""
    from course import evaluate as evaluation
    from course.data.layout import SPLITS

    if split not in SPLITS:
        raise CourseError(f"--split {split}: it is one of {', '.join(SPLITS)}")
    evaluation.main(run, split, samples, animate, ema)


@app.command()
def generate(run: Annotated[Path, typer.Argument(help="the folder of a DiT's run, such as runs/dit-digits/default")],
             labels: Annotated[str, typer.Option(help="such as 0,1,2; else the first ten")] = "",
             each: Annotated[int, typer.Option(min=1, help="samples of each label")] = 8,
             guidance: Annotated[float, typer.Option(help="classifier-free guidance; 1: none")] = 4.0,
             channels: Annotated[int, typer.Option(help="guide the first so many channels alone; 0: all")] = 0,
             steps: Annotated[int, typer.Option(help="of the sampler")] = 50,
             sampler: Annotated[str, typer.Option(help="ddim or euler; auto: what fits the model's objective")] = "auto",
             eta: Annotated[float, typer.Option(min=0, max=1, help="fresh noise of ddim; 1: as much as DDPM")] = 0.0,
             seed: Annotated[int, typer.Option(help="other seeds, other samples")] = 0,
             batch: Annotated[int, typer.Option(min=1, help="samples at a time")] = 64,
             ema: Annotated[bool | None, typer.Option(help="with the weights' moving average; else if there is one")] = None,
             vae: Annotated[str, typer.Option(help="name or folder of the VAE that decodes latents (diffusers)")] = "") -> None:
    """Draw samples of a trained DiT: a labelled picture, and the latents as .npy, in RUN/samples."""
    from course import config, draw
    from course.sampling import Sampling

    values = {"sampler": sampler, "steps": steps, "guidance": guidance, "channels": channels, "eta": eta, "seed": seed,
              "batch": batch}
    wanted = numbers(labels, "--labels", least=0) if labels else []
    draw.main(run, wanted, each, config.build(Sampling, values, "course generate"), ema, vae)


@app.command()
def sample(run: Annotated[Path, typer.Argument(help="the folder of a GPT's run, such as runs/gpt-python/default")],
           prompt: Annotated[str, typer.Option(help="the text to go on from")] = "def ",
           count: Annotated[int, typer.Option(min=1, help="tokens to write")] = 100,
           temperature: Annotated[float, typer.Option(min=0, help="below 1 prefers probable tokens; 0 takes the first")] = 0.8,
           top_k: Annotated[int, typer.Option(min=0, help="draw from the so many most probable; 0: from all")] = 50,
           seed: Annotated[int, typer.Option(help="other seeds, other texts")] = 0,
           samples: Annotated[int, typer.Option(min=1, help="how many texts")] = 1,
           tokenizer: Annotated[Path | None, typer.Option(help="a tokenizer.json; else RUN's, else that in its data.path")]
           = None) -> None:
    """Let a trained GPT write."""
    from course import sample as sampling

    sampling.main(run, prompt, count, temperature, top_k, seed, samples, tokenizer=tokenizer)


@app.command()
def reshard(run: Annotated[Path, typer.Argument(help="the folder of a run, such as runs/vit-demo/default")],
            settings: Annotated[list[str] | None, typer.Argument(metavar=KEYS, help="the layout: keys of parallel, such as "
                                                                 "parallel.tp=4 parallel.dp=2 parallel.zero=true")] = None,
            name: Annotated[str, typer.Option(help="of the new run, beside the old one")] = "resharded") -> None:
    """Write a run's newest checkpoint again, cut up for another layout: each rank will find its part in one file.

    Any layout goes on from any checkpoint without this. In one process, on any machine, one tensor in memory at a time.
    """
    from course import reshard as resharding

    resharding.main(run, settings or [], name)


@app.command()
def convert(source: Annotated[Path, typer.Argument(help="the folder of a run; or a Hugging Face folder, a DiT's file, or a "
                                                        "state dict of Transformer Engine's layers")],
            target: Annotated[Path, typer.Argument(help="the folder of a run, such as runs/gpt/mine; or a folder, or a file "
                                                        ".safetensors")],
            settings: Annotated[list[str] | None, typer.Argument(metavar=KEYS, help="of the run that is made, such as "
                                                                 "precision=fp8 parallel.tp=2")] = None,
            to: Annotated[str, typer.Option(help="hf (GPT-2 or Llama), dit or te; else what fits the model")] = "",
            like: Annotated[str, typer.Option(help="the preset whose settings the run has, and what the file does not say "
                                                "of the model")] = "",
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
def presets() -> None:
    """The presets that `course train` knows: parameters, the memory that one GPU needs, the data, and what each is for."""
    from course.perf import catalogue

    catalogue.main()


@app.command()
def doctor(need: Annotated[str, typer.Option(help="fail if one of these is missing, such as fp8,dali")] = "") -> None:
    """What this machine has: versions, GPUs, precisions, and the cure for what does not work."""
    from course import doctor as examination

    raise typer.Exit(examination.main(need))


@data.command()
def weather(settings: OverridesOfWeather = None) -> None:
    """Simulate an atmosphere and write it in the layout of the ERA5 course data."""
    from course import config
    from course.data import weather as maker

    maker.make(config.build(maker.Weather, config.parse(settings or []), "course data weather"))


@data.command()
def era5(source: Annotated[str, typer.Argument(help="a .nc file, a glob or folder of them, or a .zarr store")],
         settings: OverridesOfEra5 = None) -> None:
    """Convert ERA5 in NetCDF or Zarr (names of WeatherBench2 or CDS)."""
    from course import config
    from course.data import era5 as converter

    values = {**config.parse(settings or []), "source": source}
    converter.convert(config.build(converter.Era5, values, "course data era5"))


@data.command()
def tokens(settings: OverridesOfTokens = None) -> None:
    """Make token files of the source text of Python's standard library, in seconds."""
    from course import config
    from course.data import corpus as maker

    maker.make(config.build(maker.Python, config.parse(settings or []), "course data tokens"))


@data.command()
def jsonl(arguments: FilesAndOverrides) -> None:
    """Make token files of text such as OpenWebText: JSON lines or archives of texts, plain, .gz, .xz or .zst.

    On all cores; the same command goes on after an interruption: finished parts of 8 MB of input are kept. Bad lines are counted,
    and left out.
    """
    from course import config
    from course.data import jsonl as maker

    files = [word for word in arguments if "=" not in word or Path(word).exists()]
    values = {**config.parse(word for word in arguments if word not in files), "files": files}
    maker.make(config.build(maker.Jsonl, values, "course data jsonl"))


@data.command()
def stats(path: Annotated[Path, typer.Argument(help="a folder laid out as data/README.md says")]) -> None:
    """Compute the statistics of the training years again."""
    from course.data import layout

    layout.write_statistics(path, layout.find_years(path, "train"))
    print(f"wrote {path}/stats")


@data.command("numpy")
def numpy_files(path: Annotated[Path, typer.Argument(help="a folder laid out as data/README.md says")]) -> None:
    """Write each state to a .npy file as well, for data.loader=dali_numpy."""
    from course.data import numpy_files as converter

    converter.convert(path)


@data.command()
def latents(folder: Annotated[Path, typer.Argument(help="of class folders: 0000, 0001 ... or any names, numbered in order")],
            out: Annotated[Path, typer.Option(help="the data folder to make, or to go on with")],
            scale: Annotated[float | None, typer.Option(help="what latents are multiplied with; 1 if they are already scaled",
                                                        show_default="the VAE's, 0.18215")] = None,
            valid: Annotated[int, typer.Option(min=0, help="each so manieth is for validation; 0: none")] = 50,
            samples: Annotated[int, typer.Option(min=1, help="in a shard")] = 4096,
            vae: Annotated[str, typer.Option(help="FOLDER holds pictures: name or folder of their VAE (diffusers)")] = "",
            pixels: Annotated[int, typer.Option(min=8, help="side of the pictures that the VAE gets")] = 256) -> None:
    """Pack latents (.npy, .pt), or pictures through a VAE, for a DiT. The same command goes on where it was interrupted."""
    from course.data import latents as maker

    maker.pack(folder, out, scale, valid, samples, vae, pixels)


@data.command()
def digits(out: Annotated[Path, typer.Option(help="the data folder to make")] = Path("data/digits"),
           latent: Annotated[str, typer.Option(help="channels, height, width; 4,32,32 for ImageNet's models")] = "1,8,8") -> None:
    """Make a DiT's data set of scikit-learn's 1797 handwritten digits, which a laptop learns in minutes."""
    from course.data import latents as maker

    shape = numbers(latent, "--latent")
    if len(shape) != 3:
        raise CourseError(f"--latent {latent}: it takes channels, height and width, such as 4,32,32")
    maker.make_digits(out, (shape[0], shape[1], shape[2]))


@bench.command()
def ceilings(device: Annotated[str, typer.Option(help="cpu or cuda")] = "",
             out: Out = None) -> None:
    """The most FLOP/s of a matrix multiplication and the most bytes/s of a copy that this machine reaches."""
    import json

    from course.perf import bench as measure

    found = measure.record_ceilings(measured_device(device))
    print(json.dumps(found, indent=1))
    record(found, out)


@bench.command("kernels")
def bench_kernels(out: Annotated[Path, typer.Option(help="the JSON file that gets the table")] = Path("kernels.json"),
                  small: Annotated[bool, typer.Option("--small", help="tiny sizes: only to see that it works")] = False,
                  device: Annotated[str, typer.Option(help="cpu or cuda")] = "") -> None:
    """What a performance model of this GPU is made of: matmuls, attention, memory, collectives; three minutes."""
    from course.perf import kernel_table as measure

    where = measured_device("cpu" if small and not device else device)
    if where.type == "cpu" and not small:
        raise CourseError("course bench kernels measures a GPU, and PyTorch sees none: --small tries it on the CPU")
    found = measure.main(where, small)
    record(found, out)
    print(f"wrote {out}, measured in {found['took_s']} s")


@bench.command("host")
def bench_host(out: Annotated[Path, typer.Option(help="the JSON file that gets the table")] = Path("host.json"),
               small: Annotated[bool, typer.Option("--small", help="three rows on the CPU: only to see that it works")] = False
               ) -> None:
    """What the host of this machine needs for a step while its GPU waits: by model, format, compiler, layout; four minutes."""
    from course.perf import host_table as measure

    found = measure.main(small)
    record(found, out)
    print(f"wrote {out}, measured in {found['took_s']} s")


@bench.command("loaders")
def bench_loaders(settings: Overrides = None,
                  small: Annotated[bool, typer.Option("--small", help="states of 32x64 points, in seconds anywhere")] = False,
                  loader: Annotated[list[str] | None, typer.Option(help="only this one; may be repeated")] = None,
                  workers: Annotated[str, typer.Option(help="processes or threads: 1,8; else 1,2,4 ... up to the cores")] = "",
                  seconds: Annotated[float, typer.Option(help="of each of the five laps whose median counts")] = 1.0,
                  device: Annotated[str, typer.Option(help="cpu or cuda")] = "",
                  out: Out = None) -> None:
    """Each loader's pairs per second, beside what reading and copying cost; data.path=FOLDER, else data is made."""
    from course.perf import loaders as measure

    counts = numbers(workers, "--workers") if workers else measure.doubling()
    record(measure.main(settings or [], small, loader or [], counts, seconds, measured_device(device)), out)


def numbers(text: str, option: str, least: int = 1) -> list[int]:
    """`1,2,4` as numbers of at least `least`."""
    found = [int(part) if part.strip().isdecimal() else -1 for part in text.split(",")]
    if min(found) < least:
        raise CourseError(f"{option} {text}: it takes whole numbers from {least}, such as 1,4,8")
    return found


def measured_device(name: str) -> Any:
    """The device that --device names; without it the GPU, if there is one."""
    import torch

    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def record(found: dict[str, Any], out: Path | None) -> None:
    """Write what was measured to a JSON file, if one is named."""
    import json

    from course.files import atomic

    if out:
        with atomic(out) as temporary:
            temporary.write_text(json.dumps(found, indent=1) + "\n")


MODELS = {"vit": "the weather ViT", "gpt": "GPT-2's architecture, 124M to 1.3B", "dit": "DiT-XL/2 at 256 and 512 pixels"}


def bench_model(kind: str, words: str) -> None:
    """Add `course bench KIND`."""
    def measure(rungs: Annotated[list[str] | None, typer.Argument(help="only these, such as 'bf16, compiled'")] = None,
                out: Annotated[Path, typer.Option(help="the JSON file that gets the rows")] = Path(f"{kind}.json"),
                small: Annotated[bool, typer.Option("--small", help="tiny, on the CPU, to see that it works")] = False) -> None:
        from course.perf import ladder

        ladder.main(kind, out, rungs or [], small)

    bench.command(kind, help="From a plain training loop to a fast one, rung by rung, on one GPU: samples/s, memory, seconds to "
                             f"the first step of {words}.")(measure)


for kind, words in MODELS.items():
    bench_model(kind, words)


LAYOUTS = {"tp": "Tensor and sequence parallelism on a stack of hidden 4096, and DTensor's.",
           "tp_vit": "Tensor parallel training of the weather ViT of width 1024.",
           "cp": "Context-parallel attention, and PyTorch's context_parallel.",
           "dp": "Data parallelism on the stack of GPT 350M, and PyTorch's DDP.",
           "pp": "Pipeline schedules, and torch.distributed.pipelining's.",
           "zero": "ZeRO-1, and ZeroRedundancyOptimizer.",
           "grid": "GPTs in layouts of dp x tp x pp, the cases of a Megatron-LM reproduction; the layers beside megatron-core's."}


def bench_layout(kind: str, words: str) -> None:
    """Add `course bench KIND`."""
    def measure(out: Annotated[Path, typer.Option(help="the JSON file that gets the rows")] = Path(f"{kind}.json"),
                small: Annotated[bool, typer.Option("--small", help="tiny, on CPU processes: only to see that it works")] = False,
                profile: Annotated[bool, typer.Option("--profile", help="also print where the GPU's time goes")] = False) -> None:
        from course.perf import parallel

        parallel.everywhere(kind, out, small, profile)

    bench.command(kind, help=f"{words} On 1, 2, 4 ... of this machine's GPUs, one after another.")(measure)


for kind, words in LAYOUTS.items():
    bench_layout(kind, words)


@app.command()
def check(file: Annotated[Path, typer.Argument(help="a saved notebook, or a script in percent format")],
          exercise: Annotated[list[str] | None, typer.Option(help="only this exercise; may be repeated")] = None,
          seed: Annotated[int | None, typer.Option(help="that of an earlier check; else drawn afresh")] = None,
          list_ranks: Annotated[bool, typer.Option("--list-ranks", hidden=True)] = False,
          on_ranks: Annotated[Path | None, typer.Option(hidden=True)] = None,
          result: Annotated[Path | None, typer.Option(hidden=True)] = None) -> None:
    """Check the exercises of a lesson's notebook, as `check("name")` does inside it. On real ranks: submit/check.sh."""
    from course.lab import present, submissions

    if list_ranks or on_ranks or result:             # the parts of submit/check.sh
        from course.lab import scale
    if list_ranks:
        print("\n".join(scale.with_ranks(file)))
        return
    if on_ranks:
        scale.on_ranks(file, (exercise or [""])[0], on_ranks)
        return
    alone = [e.name for e in submissions.of_lesson(submissions.lesson_of(file)) if max(e.sizes) == 1] if result else []
    verdicts = [] if result and not alone else submissions.check_file(
        file, alone or exercise or [], seed, lambda verdict: print(present.text(verdict, sys.stdout.isatty()), flush=True))
    if result:
        print(f"wrote {scale.finish(file, result, verdicts)}: hand it in with the notebook, which must not change any more")
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
    from course.lab import cluster as starter

    starter.begin(folder or starter.default_folder(), nodes, cpus, gpus, partition)


@cluster.command("stop")
def stop_cluster(folder: OfCluster = None,
                 force: Annotated[bool, typer.Option("--force", "-f", help="also if jobs run or wait: they end with it")] = False
                 ) -> None:
    """End it and remove its files. While jobs run or wait it stays, and says which."""
    from course.lab import cluster as starter

    starter.end(folder or starter.default_folder(), force)


@app.command("lint-sbatch", context_settings={"ignore_unknown_options": True})
def lint_sbatch(file: Annotated[Path, typer.Argument(help="a batch script")],
                options: Annotated[list[str] | None, typer.Argument(metavar="[OPTION]...", help="what else sbatch will be given, "
                                                                    "such as --nodes=2")] = None) -> None:
    """Say what is wrong with a batch script before it waits in a queue, and why. Exit status 1 if something is."""
    from course.lab import sbatch

    raise typer.Exit(0 if sbatch.main(file, options or []) else 1)


@lessons.command("copy")
def copy_lessons(folder: Annotated[Path, typer.Argument(help="where you want to work, such as my-course")]) -> None:
    """Put the lessons in FOLDER/notebooks, blank, and scripts for clusters in FOLDER/submit; nothing there is overwritten.

    Data and runs of the lessons will lie in FOLDER, too.
    """
    from course.lab import lessons as maker

    maker.copy(folder)


@lessons.command()
def build(names: Annotated[list[str] | None, typer.Argument(help="such as 01; all lessons if none is named")] = None,
          check: Annotated[bool, typer.Option("--check", help="only say what is stale or gives an answer away")] = False,
          force: Annotated[bool, typer.Option("--force", help="execute also what is up to date")] = False) -> None:
    """Make notebooks/ and the executed solutions/ from the masters solutions/NN_name.py."""
    from course.lab import lessons as maker

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
    from course.lab import grade as grading

    grading.main(folder, out, lesson or [], jobs, seed, trust)


@app.command()
def release(out: Annotated[Path, typer.Option(help="a folder that does not exist yet")]) -> None:
    """Write what learners get: the course with blank notebooks, without solutions."""
    from course.lab import release as releasing

    releasing.main(out)


def main() -> None:
    """Run the command; a `CourseError` becomes one sentence and exit status 1."""
    try:
        app()
    except CourseError as error:
        sys.exit(f"course: {last_words(error)}")


def last_words(error: CourseError) -> str:
    """The sentence itself: a loader's worker process wraps it in its traceback."""
    text = str(error).strip()
    last = text.splitlines()[-1] if text else ""
    return last.removeprefix("course.errors.CourseError: ") if last.startswith("course.errors.CourseError: ") else text


if __name__ == "__main__":
    main()
