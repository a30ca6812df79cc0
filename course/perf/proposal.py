"""What `course plan` says: a plan as a table, how long a training takes, and the command that starts it."""

import json
import math
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from course import config as configuration
from course import schema
from course.config import Config
from course.errors import CourseError
from course.files import atomic
from course.models import GPTConfig
from course.perf import flops, host, kernels, memory, steptime
from course.perf import hardware as hardware_presets
from course.perf.layouts import divisors, refusal, unable
from course.perf.misfits import Misfit
from course.perf.plan import Layout, Plan, as_plain, quickest, search
from course.perf.variants import FREE, KEYS, changed, get, plain, settings

HIDDEN = 0.03                                       # the share of a step below which a part is not named
LIMIT = 0.1                                         # the share of a step, or of its rate, from which on something limits it
GAIN = 0.03                                         # the share from which on another request or one more change is named
OWN_CPUS = 4                                        # of a rank beside its loader's: the step's threads, backward's, NCCL's
COMPILED: tuple[dict[str, Any], ...] = ({"compile": True}, {"compile": True, "stream": "narrow"},
                                        {"compile": True, "kernels": "hand"},
                                        {"compile": True, "stream": "narrow", "kernels": "hand"})
GRAPHS: tuple[dict[str, Any], ...] = ({"graphs": True}, *({**change, "graphs": True} for change in COMPILED))
PEAKS = (169, 152)                                  # whose memory was measured here, and of them within 5% of what is predicted
LABELS = {"data": "data-parallel"}                   # of parts of a step: alone it would be read as the loading of data
WIDTH = 132                                         # of the table, where no terminal says


def main(preset: str, overrides: Sequence[str], gpus: int, hardware: str, top: int = 10, tokens: float = 0, samples: float = 0,
         precisions: Sequence[str] = (), layout: int = 1, launch: bool = False, out: Path | None = None, free: float = FREE
         ) -> None:
    """Search, and print the plan, or with `launch` the command for its n-th layout alone. out: a JSON file that gets all.

    free: the share of a GPU's memory that layouts leave.
    """
    if out and out.is_dir():
        raise CourseError(f"--out {out} is a folder: name a file in it, such as {out / 'plan.json'}")
    config = configuration.load(preset, overrides)
    count = whole_run(config, tokens, samples)
    plan = search(config, hardware_presets.load(hardware), gpus, fixed(overrides), precisions, free, max(top, layout))
    if not 1 <= layout <= len(plan.layouts):
        raise CourseError(f"--layout {layout}: the layouts that fit are numbered 1 to {len(plan.layouts)}")
    chosen = plan.layouts[layout - 1]
    if out:
        found = as_plain(plan) | {"command": command(preset, overrides, plan, chosen), "kernels": kernels.source(plan.hardware),
                                 "host": host.source(plan.hardware)}
        if count:
            found["training"] = training(plan, chosen, count)
        with atomic(out) as temporary:
            temporary.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {out}", file=sys.stderr if launch else sys.stdout)             # with --launch a shell may read the output
    if line := partly(plan):
        print(line, file=sys.stderr if launch else sys.stdout)
    if launch:
        print(command(preset, overrides, plan, chosen))
        return
    show(plan, top)
    if count:
        print(duration(plan, chosen, layout, count))
    print(f"Start one with the same command and, after it: --launch --layout {layout}")


def fixed(overrides: Iterable[str]) -> list[str]:
    """The keys that a user fixes; parallel.dp=0, what the other axes leave, fixes nothing."""
    given, found = schema.parse(overrides), []
    for key in KEYS:
        section, _, name = key.rpartition(".")
        values = given.get(section) or {} if section else given
        if name in values and (key, values[name]) != ("parallel.dp", 0):
            found.append(key)
    return found


def whole_run(config: Config, tokens: float, samples: float) -> float:
    """The samples of the training that is asked about; 0 if none is."""
    if tokens and not isinstance(config.model, GPTConfig):
        raise CourseError(f"--tokens {tokens:g}: a {config.model.kind} is trained on samples, of {config.model.tokens} tokens "
                          "each: use --samples")
    if tokens and samples:
        raise CourseError("--tokens and --samples say the same: give one of them")
    if not 0 <= tokens < math.inf or not 0 <= samples < math.inf:
        raise CourseError(f"--tokens {tokens:g} --samples {samples:g}: a training has some, such as --tokens 300e9")
    return tokens / config.model.context if isinstance(config.model, GPTConfig) and tokens else samples


# ---- the table

def show(plan: Plan, top: int) -> None:
    """Print a plan: what was asked, the fastest layouts, and why others are not among them."""
    h, c = plan.hardware, plan.config
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    print(f"{c.preset}, {c.train.global_batch} samples a step, on {plan.gpus} x {h.name}, {h.memory / 1e9:.1f} GB each; "
          f"{network(plan)}.\nTimes: {kernels.source(h)}; {host.source(h)}.")
    table = Table(box=SIMPLE, pad_edge=False)
    rate = "tokens/s" if isinstance(c.model, GPTConfig) else "samples/s"
    for head in ("", "pp", "dp", "cp", "tp", "micro-\nbatch", "ms", "MFU", "GB", "free", rate):
        table.add_column(head, justify="right")
    table.add_column("with", overflow="fold")
    table.add_column("where the time goes, %", overflow="fold")
    for number, one in enumerate(plan.layouts[:top], 1):
        t, p = one.time, one.config.parallel
        table.add_row(str(number), *(str(size) for size in (p.pp, p.dp, p.cp, p.tp, one.config.train.micro_batch)),
                      f"{t.step * 1e3:,.0f}", f"{t.mfu:.0%}", f"{one.memory.total / 1e9:.1f}",
                      f"{1 - one.memory.total / h.memory:.0%}", short(speed(plan, one)), how(one.config, plan.config), parts(one))
    console.print(table)
    for line in rest_of(plan, top):
        print(line)
    if plan.asked.free:
        print(f"Each layout leaves {plan.asked.free:.0%} of a GPU's memory free at least (--free): of {PEAKS[0]} measured peaks, "
              f"of steps and of held-out lists, {PEAKS[1]} are within 5% of what is predicted.")
    for line in (*reasons(plan), *limits(plan), *masked(plan)):
        print(line)


def rest_of(plan: Plan, top: int) -> list[str]:
    """How many layouts there are that the table does not show."""
    more = len(plan.layouts) - top
    lines = [f"{more:,} more layout{'s fit' if more > 1 else ' fits'} (--top)."] if more > 0 else []
    if plan.slower:
        lines.append(f"{plan.slower:,} more layouts are slower than these, by their blocks alone: they were not looked at.")
    return lines


def limits(plan: Plan) -> list[str]:
    """What holds the fastest layout back that no layout can change: the host, the loader, the global batch."""
    first, lines = plan.layouts[0], []
    if first.time.launch > LIMIT * first.time.step:
        lines.append(f"The GPUs wait for the host's launches during {first.time.launch / first.time.step:.0%} of a step"
                     + cured(plan, first, [*COMPILED, *GRAPHS]))
        lines += unpiped(plan)
    elif (cure := cured(plan, first, COMPILED)) != ".":
        lines.append(f"Kernels that memory limits take {first.time.memory / first.time.step:.0%} of a step" + cure)
    if first.time.loading > LIMIT * first.time.step:
        d = first.config.data
        lines.append(f"Loading is the limit: layout 1 waits for data.loader={d.loader} with data.workers={d.workers} during "
                     f"{first.time.loading / first.time.step:.0%} of a step"
                     + cured(plan, first, [{"data.workers": 2 * max(1, d.workers)}, {"data.loader": "threads"}])
                     + " course bench loaders measures them.")
    return lines + fewer(plan) + batches(plan)


def fewer(plan: Plan) -> list[str]:
    """Fewer GPUs that would take less time for a step, if there are any: numbers that divide little have slow layouts."""
    now, node = plan.layouts[0].time, plan.asked.machine.links[0].span or plan.gpus
    whole = [d for d in divisors(plan.config.train.global_batch) if d < plan.gpus and (d <= node or d % node == 0)]
    counts = {2 ** ((plan.gpus - 1).bit_length() - 1), whole[-1]} if plan.gpus > 1 else set()
    for count in sorted(counts, reverse=True):
        at_peak = now.flops * plan.gpus / count / now.peak              # seconds
        one = quickest(plan, gpus=count) if at_peak < now.step else None
        if one and one.time.step < now.step * (1 - GAIN):
            return [f"Fewer GPUs would be faster: {count:,} of them would take {one.time.step * 1e3:,.0f} ms."]
    return []


def batches(plan: Plan) -> list[str]:
    """Whether the global batch is a limit, and what would help: a batch near it that more layouts divide, or twice as many
    samples."""
    first, batch = plan.layouts[0], plan.config.train.global_batch
    dp, rate = first.config.parallel.dp, first.time.samples_per_s
    largest = f"dp={dp} is as large as it lets dp be on {plan.gpus} GPUs" if dp == math.gcd(plan.gpus, batch) < plan.gpus else ""
    near = (one.time for number in near_batches(batch, plan.gpus) if (one := quickest(plan, batch=number)))
    good = next((time for time in near if time.samples_per_s > rate * (1 + GAIN)), None)
    twice = steptime.predict(changed(first.config, {"train.global_batch": 2 * batch}), plan.hardware, plan.gpus)
    gain = (good or twice).samples_per_s / rate - 1
    if not largest and not good and gain <= LIMIT:
        return []
    more = f"with twice as many samples a step layout 1 would make {gain:.0%} more a second" if gain >= 0.01 else ""
    if good:
        more = f"train.global_batch={good.samples} would take {good.step * 1e3:,.0f} ms, {gain:.0%} more samples a second"
    return [f"The global batch of {batch} is a limit: {', and '.join(filter(None, (largest, more)))}. Another "
            "train.global_batch also changes what is learned (lesson 08)."]


def near_batches(batch: int, gpus: int) -> list[int]:
    """The multiples next to a batch, the nearer one first, of the largest divisor of the GPUs that is not larger, if that does
    not divide it: so dp can be large."""
    d = max(d for d in divisors(gpus) if d <= batch)
    return sorted([d * (batch // d), d * (batch // d + 1)], key=lambda one: abs(one - batch)) if batch % d else []


def cured(plan: Plan, layout: Layout, changes: Sequence[dict[str, Any]]) -> str:
    """": compile=true would make it 19 ms instead of 23.", with the change that is predicted to help most; "." if none does."""
    now = layout.time.step
    step, words = helped(plan, layout, changes, now)
    return f": {words} would make it {step * 1e3:,.0f} ms instead of {now * 1e3:,.0f}." if words else "."


def unpiped(plan: Plan) -> list[str]:
    """Where the fastest layout is a pipeline, which no graph captures: one without that a graph makes faster, if there is any."""
    first, lines = plan.layouts[0], list[str]()
    step, _ = helped(plan, first, COMPILED, first.time.step)
    for number, layout in enumerate(plan.layouts, 1):
        if first.config.parallel.pp > 1 == layout.config.parallel.pp:
            step, words = helped(plan, layout, GRAPHS, step)
            if words:
                lines = [f"No graph captures a pipeline: layout {number}, which is none, would take {step * 1e3:,.0f} ms with "
                         f"{words}; ask with that for its best variant."]
    return lines


def helped(plan: Plan, layout: Layout, changes: Sequence[dict[str, Any]], now: float) -> tuple[float, str]:
    """(seconds of a step, "compile=true") with the change that is predicted to help most, if it fits; (now, "") if none helps by
    more than `LIMIT`. What changes more than another has to gain more than `GAIN` by that.
    """
    most, words = now * (1 - LIMIT), ""
    for change in changes:
        config = changed(layout.config, change)
        possible = not refusal(config) and not unable(config, plan.hardware) and memory.fits(config, plan.room)
        if config != layout.config and possible:
            step = steptime.predict(config, plan.hardware, plan.gpus).step
            if step < most:
                now, most = step, step * (1 - GAIN)
                words = " ".join(f"{key}={plain(value)}" for key, value in change.items() if value != get(layout.config, key))
    return now, words


def masked(plan: Plan) -> list[str]:
    """What is to be known of the MFU of long causal samples."""
    m = plan.config.model
    if not isinstance(m, GPTConfig):
        return []
    half = 6 * m.depth * m.context**2 * m.dim / flops.step(m, 1)        # of 12·T²·D a block, with the backward pass
    return [f"MFU counts causal attention whole, as is usual: {half:.0%} of its FLOPs are masked, and kernels leave them out."
            ] if half > LIMIT else []


def network(plan: Plan) -> str:
    """The levels that the GPUs' messages go through."""
    spans = []
    for link in plan.hardware.links:
        if link.span == 1 < plan.gpus:              # one GPU of each node is used
            continue
        spans.append(f"{link.name} ({link.bandwidth / 1e9:.4g} GB/s a GPU)" + (f" joins {link.span}" if link.span else ""))
        if not link.span or link.span >= plan.gpus:
            break
    return ", then ".join(spans)


def partly(plan: Plan) -> str:
    """That the GPUs do not fill their nodes, and how many would; "" where they do."""
    node, used = plan.asked.machine.links[0].span, plan.hardware.links[0].span
    if used == node:
        return ""
    fewer = plan.gpus // node * node
    return (f"{plan.gpus} GPUs do not fill nodes of {node}: predicted and started as {plan.gpus // used} nodes with {used} each, "
            f"since a job has equally many on all; {fewer} or {fewer + node} would fill them.")


def speed(plan: Plan, layout: Layout) -> float:
    """Tokens a second of a GPT, samples a second of others."""
    m = plan.config.model
    return layout.time.samples_per_s * (m.context if isinstance(m, GPTConfig) else 1)


def short(number: float) -> str:
    """Three digits and a unit."""
    for size, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def how(config: Config, base: Config) -> str:
    """What a layout has beside its axes, in few words."""
    p = config.parallel
    words: list[str] = []
    if config.precision != base.precision:
        words.append(config.precision)
    if p.tp > 1 and p.sp:
        words.append("sp" if p.overlap == "none" else f"sp, {p.overlap} overlap")
    if p.cp > 1:
        words.append(p.context)
    if p.pp > 1 and p.schedule != "1f1b":
        words.append(p.schedule + (f" x {p.chunks}" if p.chunks > 1 else ""))
    if p.zero and p.dp * p.cp > 1:
        words.append("ZeRO-1")
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
    """Why other layouts are not in the list: what of their memory is the most, and what the library would refuse."""
    lines = []
    for term in dict.fromkeys(one.term for one in plan.misfits):
        told: dict[str, Misfit] = {}
        for one in (one for one in plan.misfits if one.term == term):   # the nearest first: it stands for its kind
            told.setdefault(" ".join(f"{axis}={one.sizes[axis]}" for axis in ("tp", "pp", "cp")), one)
        count = sum(one.term == term for one in plan.misfits)
        some = [f"{axes}: {one.needs / 1e9:.0f} GB of {plan.room / 1e9:.0f}, of which {term} {one.bytes / 1e9:.0f}"
                + (f" ({one.cure} would fit)" if one.cure else "") for axes, one in list(told.items())[:4]]
        more = f"; {len(told) - 4} more kinds" if len(told) > 4 else ""
        lines.append(f"Do not fit in any variant, mostly for {term} ({count}): " + "; ".join(some) + more)
    if plan.refused:
        kinds: dict[str, tuple[str, int]] = {}      # by the sentence without its numbers: one of them, and how many
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
    """Steps, days and GPU-hours that so many samples take, at the predicted rate and without interruptions."""
    steps = math.ceil(samples / plan.config.train.global_batch)
    seconds = steps * layout.time.step
    return {"samples": samples, "steps": steps, "days": seconds / 86400, "gpu_hours": seconds * plan.gpus / 3600}


def duration(plan: Plan, layout: Layout, number: int, samples: float) -> str:
    """The same in a sentence."""
    found, m = training(plan, layout, samples), plan.config.model
    what = (f"{short(samples * m.context)} tokens" if isinstance(m, GPTConfig) else f"{short(samples)} samples")
    hours = 24 * found["days"]
    time = f"{found['days']:,.1f} days" if hours >= 48 else f"{hours:,.1f} hours" if hours >= 1 else f"{60 * hours:,.1f} minutes"
    return (f"{what} are {found['steps']:,} step{'s' * (found['steps'] != 1)}: {time}, "
            f"{found['gpu_hours']:,.0f} GPU-hours in layout {number}, if nothing interrupts it.")


# ---- the command

def command(preset: str, overrides: Sequence[str], plan: Plan, layout: Layout) -> str:
    """What starts a training in this layout, for a shell: `course train` on one GPU, torchrun on a node, sbatch on several.

    The settings are the user's own and those that the search chose and that differ from them.
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
