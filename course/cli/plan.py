"""`course plan`: print a plan as a table, how long a training takes, and the command that starts it."""

import math
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from course import config as configuration
from course.cli.presets import sizes
from course.config import Config, schema
from course.config.context_choice import context_method
from course.models import GPTConfig
from course.planner import flops, host_overhead, kernel_efficiency, why_infeasible
from course.planner import hardware as hardware_presets
from course.planner.search import Layout, Plan, as_plain, find_layouts
from course.planner.search_space import FREE, KEYS, settings
from course.utils.atomic_files import write_json
from course.utils.errors import CourseError
from course.utils.tables import print_table

HIDDEN = 0.03                                       # parts below this share of a step are not named
LIMIT = 0.1                                         # a part above this share of a step limits it
OWN_CPUS = 4                                        # of a rank, besides its loader's: for the step's threads, backward's, NCCL's
LABELS = {"data": "data-parallel"}                   # of parts of a step: "data" alone would read as data loading
WIDTH = 132                                         # of the table, if there is no terminal
ROOMY = 112                                         # from this width on, the table also says where the time goes


def main(preset: str, overrides: Sequence[str], gpus: int, hardware: str, top: int = 10, tokens: float = 0, samples: float = 0,
         precisions: Sequence[str] = (), layout: int = 1, launch: bool = False, out: Path | None = None, free: float = FREE
         ) -> None:
    """Search, and print the plan, or with `launch` only the command of layout number `layout`. out: a JSON file for all results.

    free: the share of a GPU's memory that layouts leave free.
    """
    if out and out.is_dir():
        raise CourseError(f"--out {out} is a folder: name a file in it, such as {out / 'plan.json'}")
    config = configuration.load(preset, overrides)
    count = whole_run(config, tokens, samples)
    plan = find_layouts(config, hardware_presets.load(hardware), gpus, fixed(overrides), precisions, free, max(top, layout))
    if not 1 <= layout <= len(plan.layouts):
        raise CourseError(f"--layout {layout}: the layouts that fit are numbered 1 to {len(plan.layouts)}")
    chosen = plan.layouts[layout - 1]
    if out:
        contents = as_plain(plan) | {"command": command(preset, overrides, plan, chosen),
                                  "kernels": kernel_efficiency.source(plan.hardware),
                                 "host": host_overhead.source(plan.hardware)}
        if count:
            contents["training"] = training(plan, chosen, count)
        write_json(out, contents)
        print(f"wrote {out}", file=sys.stderr if launch else sys.stdout)             # with --launch a shell may read the output
    if line := partly(plan):
        print(line, file=sys.stderr if launch else sys.stdout)
    if launch:
        print(command(preset, overrides, plan, chosen))
        return
    show(plan, top)
    if count:
        print(duration(plan, chosen, layout, count))


def fixed(overrides: Iterable[str]) -> list[str]:
    """The keys that a user fixes. parallel.dp=0 means what the other axes leave, so it fixes nothing."""
    sections, keys = schema.parse(overrides), []
    for key in KEYS:
        section, _, name = key.rpartition(".")
        values = sections.get(section) or {} if section else sections
        if name in values and (key, values[name]) != ("parallel.dp", 0):
            keys.append(key)
    return keys


def whole_run(config: Config, tokens: float, samples: float) -> float:
    """The number of samples in the whole training; 0 if the user gives none."""
    if tokens and not isinstance(config.model, GPTConfig):
        raise CourseError(f"--tokens {tokens:g}: a {config.model.kind} is trained on samples, of {config.model.tokens} tokens "
                          "each: use --samples")
    if tokens and samples:
        raise CourseError("--tokens and --samples both set the length of training: give one of them")
    if not 0 <= tokens < math.inf or not 0 <= samples < math.inf:
        raise CourseError(f"--tokens {tokens:g} --samples {samples:g}: give a number above 0, such as --tokens 300e9")
    return tokens / config.model.context if isinstance(config.model, GPTConfig) and tokens else samples


# ---- the table

def show(plan: Plan, top: int) -> None:
    """Print a plan: the question, the fastest layouts, and why others are not among them."""
    h, c = plan.hardware, plan.config
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    print(f"{c.preset}, {c.train.global_batch} samples a step, on {plan.gpus} x {h.name}, {h.memory / 1e9:.1f} GB each; "
          f"{network(plan)}.\nTimes: {kernel_efficiency.source(h)}; {host_overhead.source(h)}.")
    roomy = console.width >= ROOMY                   # else omit whole columns rather than cut numbers
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1 if roomy else 0))
    rate = "tokens/s" if isinstance(c.model, GPTConfig) else "samples/s"
    for head in ("", "pp", "dp", "cp", "tp", "micro-\nbatch", "ms", "MFU", "GB", "free", rate):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("with", overflow="fold")
    if roomy:
        table.add_column("where the time goes, %", overflow="fold")
    for number, layout in enumerate(plan.layouts[:top], 1):
        t, p = layout.time, layout.config.parallel
        table.add_row(str(number), *(str(size) for size in (p.pp, p.dp, p.cp, p.tp, layout.config.train.micro_batch)),
                      f"{t.step * 1e3:,.0f}", f"{t.mfu:.0%}", f"{layout.memory.total / 1e9:.1f}",
                      f"{1 - layout.memory.total / h.memory:.0%}", short(speed(plan, layout)),
                      describe(layout.config, plan.config), *([parts(layout)] if roomy else []))
    print_table(table, console)
    for line in rest_of(plan, top):
        print(line)
    if plan.asked.free:
        print(f"Each layout leaves {plan.asked.free:.0%} of a GPU's memory free at least (--free).")
    for line in (*reasons(plan), *bottleneck(plan), *masked(plan), *active(plan)):
        print(line)


def rest_of(plan: Plan, top: int) -> list[str]:
    """How many layouts the table does not show."""
    more = len(plan.layouts) - top
    lines = [f"{more:,} more layout{'s fit' if more > 1 else ' fits'} (--top)."] if more > 0 else []
    if plan.slower:
        lines.append(f"{plan.slower:,} more layouts are slower than these, by their blocks alone: they were not looked at.")
    return lines


def bottleneck(plan: Plan) -> list[str]:
    """What limits the fastest layout besides its arithmetic, if anything does: the largest of these parts."""
    time, data = plan.layouts[0].time, plan.layouts[0].config.data
    seconds = {"GPUs wait for the host's launches": time.launch, "kernels wait for the GPU's memory": time.memory,
               "GPUs wait for one another's messages": time.tensor + time.context + time.dispatch + time.data + time.send,
               "ranks of the pipeline wait for others": time.bubble,
               f"GPUs wait for data.loader={data.loader} with data.workers={data.workers}": time.loading}
    what = max(seconds, key=seconds.__getitem__)
    return [f"What limits layout 1: {what} during {seconds[what] / time.step:.0%} of a step."
            ] if seconds[what] > LIMIT * time.step else []


def masked(plan: Plan) -> list[str]:
    """A note on the MFU of long causal samples."""
    m = plan.config.model
    if not isinstance(m, GPTConfig):
        return []
    half = 6 * m.depth * m.context**2 * m.attention_width / flops.step(m, 1)        # half of 12·T²·H per block, with backward
    return [f"MFU counts causal attention whole, as is usual: {half:.0%} of its FLOPs are masked, and kernels leave them out."
            ] if half > LIMIT else []


def active(plan: Plan) -> list[str]:
    """A note on the parameters of a model with experts, and on the assumed imbalance."""
    c = plan.config
    if not flops.idle_parameters(c.model):
        return []
    spread = any(layout.config.parallel.ep > 1 for layout in plan.layouts)
    every, used = sizes(c)
    return [f"A token uses {used} of {every} parameters."
            + f" Fullest experts' rank: {c.parallel.imbalance:g} x the mean rows (parallel.imbalance)." * spread]


def network(plan: Plan) -> str:
    """The levels of the network that the GPUs' messages pass."""
    spans = []
    for link in plan.hardware.links:
        if link.span == 1 < plan.gpus:              # one GPU of each node is used
            continue
        spans.append(f"{link.name} ({link.bandwidth / 1e9:.4g} GB/s a GPU)" + (f" joins {link.span}" if link.span else ""))
        if not link.span or link.span >= plan.gpus:
            break
    return ", then ".join(spans)


def partly(plan: Plan) -> str:
    """A note that the GPUs do not fill their nodes, and how many would; "" if they do."""
    node, used = plan.asked.machine.links[0].span, plan.hardware.links[0].span
    if used == node:
        return ""
    fewer = plan.gpus // node * node
    return (f"{plan.gpus} GPUs do not fill nodes of {node}: predicted and started as {plan.gpus // used} nodes with {used} each, "
            f"since a job has equally many on all; {fewer} or {fewer + node} would fill them.")


def speed(plan: Plan, layout: Layout) -> float:
    """Tokens per second for a GPT, samples per second for others."""
    m = plan.config.model
    return layout.time.samples_per_s * (m.context if isinstance(m, GPTConfig) else 1)


def short(number: float) -> str:
    """Three digits and a unit."""
    for size, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def describe(config: Config, base: Config) -> str:
    """A layout's options besides its axes, in few words."""
    p = config.parallel
    words: list[str] = []
    if config.precision != base.precision:
        words.append(config.precision)
    if p.tp > 1 and p.sp:
        words.append("sp" if p.overlap == "none" else f"sp, {p.overlap} overlap")
    if p.cp > 1:
        words.append(context_method(config))
    if p.pp > 1 and p.schedule != "1f1b":
        words.append(p.schedule + (f" x {p.chunks}" if p.chunks > 1 else ""))
    if p.zero and p.dp * p.cp > 1:
        words.append(f"ZeRO-{p.zero}" + f" over {p.shard}" * (p.shard > 0))
    if p.ep > 1:
        words.append(f"experts over {p.ep}" + ", gathered" * (p.dispatch == "gather"))
    if p.bucket_mb != base.parallel.bucket_mb and p.dp * p.cp > 1:
        words.append(f"{p.bucket_mb:g} MiB a bucket")
    if config.train.recompute != "none":
        words.append(f"recompute {config.train.recompute}")
    if p.order != base.parallel.order:
        words.append(p.order)
    return ", ".join(words)


def parts(layout: Layout) -> str:
    """The larger parts of a step, in percent."""
    step = layout.time.step
    large = sorted((-seconds / step, name) for name, seconds in layout.time.parts.items() if seconds >= HIDDEN * step)
    return " ".join(f"{LABELS.get(name, name)} {-share * 100:.0f}" for share, name in large)


def reasons(plan: Plan) -> list[str]:
    """Why other layouts are not in the list: what the nearest misfit needs, and what the library refuses."""
    lines = []
    if plan.misfits:
        count = len(plan.misfits)
        lines.append(f"{count:,} layout{'s do' if count > 1 else ' does'} not fit in any variant: "
                     + why_infeasible.nearest(plan.asked, plan.misfits) + ".")
    if plan.refused:
        kinds: dict[str, tuple[str, int]] = {}      # sentence without its numbers -> an example, and how many
        for sentence, count in plan.refused.items():
            kind = re.sub(r"\d+", "", sentence)
            example, before = kinds.get(kind, (sentence.partition(": ")[0], 0))
            kinds[kind] = example, before + count
        examples = [example + f" (and {count - 1} like it)" * (count > 1)
                   for example, count in sorted(kinds.values(), key=lambda kind: -kind[1])]
        lines.append(f"Refused ({sum(plan.refused.values())}): " + "; ".join(examples))
    return lines


# ---- a whole training

def training(plan: Plan, layout: Layout, samples: float) -> dict[str, float]:
    """Steps, days and GPU-hours for this many samples, at the predicted rate and without interruptions."""
    steps = math.ceil(samples / plan.config.train.global_batch)
    seconds = steps * layout.time.step
    return {"samples": samples, "steps": steps, "days": seconds / 86400, "gpu_hours": seconds * plan.gpus / 3600}


def duration(plan: Plan, layout: Layout, number: int, samples: float) -> str:
    """`training` as a sentence."""
    total, m = training(plan, layout, samples), plan.config.model
    what = (f"{short(samples * m.context)} tokens" if isinstance(m, GPTConfig) else f"{short(samples)} samples")
    hours = 24 * total["days"]
    time = f"{total['days']:,.1f} days" if hours >= 48 else f"{hours:,.1f} hours" if hours >= 1 else f"{60 * hours:,.1f} minutes"
    return (f"{what} are {total['steps']:,} step{'s' * (total['steps'] != 1)}: {time}, "
            f"{total['gpu_hours']:,.0f} GPU-hours in layout {number}, if nothing interrupts it.")


# ---- the command

def command(preset: str, overrides: Sequence[str], plan: Plan, layout: Layout) -> str:
    """The shell command that starts training in this layout: `course train` on one GPU, torchrun on a node, sbatch on several.

    The settings are the user's own, and those that the search chose and that differ from them.
    """
    words = [preset, *overrides, *settings(layout.config, plan.config)]
    node = plan.hardware.links[0].span or plan.gpus
    if plan.gpus == 1:
        return shlex.join(["course", "train", *words])
    if plan.gpus <= node:
        return shlex.join(["torchrun", "--standalone", f"--nproc-per-node={plan.gpus}", "-m", "course.cli", "train", *words])
    cpus = OWN_CPUS + layout.config.data.workers                        # Slurm gives a task one CPU unless it is asked for more
    return shlex.join(["sbatch", f"--nodes={plan.gpus // node}", f"--ntasks-per-node={node}", f"--gpus-per-node={node}",
                       f"--cpus-per-task={cpus}", "submit/train.sh", *words])
