"""The tables of recorded numbers in docs/results.md and README, and the names for expressions in pages.

A table is data: columns with a header, a format and a function, and rows with the arguments of these functions. docs/results.md
is page.md, beside this file, with tables and numbers filled in. Expressions may use, for example,

    value("gpt_h200", "124M: bf16", "mfu")          a number in a file
    column("fp8", "over bf16")                    a column of a table
    cell("vit", "bf16", "samples/s")                a cell of a table
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from statistics import mean, median
from typing import Any

from course.bench import published_steps, recorded_steps
from course.bench.results import FOLDER, fill, load, value
from course.planner import peak_memory
from course.utils.errors import CourseError

Words = tuple[Any, ...]


@dataclass(frozen=True)
class Column:
    """A column. of: takes a row's words and returns the number, or None if there is none."""

    header: str
    form: str                                        # Python format, such as .1f or .0%; "" for text
    of: Callable[..., Any]


@dataclass(frozen=True)
class Table:
    """A table. rows: label -> words, the arguments of each column's function."""

    columns: Sequence[Column]
    rows: dict[str, Words]


def page() -> str:
    """The text of docs/results.md. Raises `CourseError` for an unknown table or a wrong expression."""
    lines = (FOLDER / "page.md").read_text(encoding="utf-8")
    paragraphs = re.sub(r"(?<=\S)\n *(?=[^\s|#-])", " ", lines)          # one line per paragraph: no number starts a line
    return re.sub(r"\{table: ([\w-]+)\}", lambda found: markdown(table(found[1])), fill(paragraphs, globals()))


def table(name: str) -> Table:
    """The table with this name. Raises `CourseError` if there is none."""
    if name not in TABLES:
        raise CourseError(f"there is no table {name}; there are {', '.join(TABLES)}")
    return TABLES[name]


def markdown(table: Table) -> str:
    """Format a table as Markdown, with a dash for missing numbers and without columns that have none."""
    cells = [[column.of(*words) for words in table.rows.values()] for column in table.columns]
    kept = [number for number, values in enumerate(cells) if any(value is not None for value in values)]
    columns = [table.columns[number] for number in kept]
    lines = [" | ".join(["|", *(column.header for column in columns)]), "|---" * (len(columns) + 1)]
    for place, label in enumerate(table.rows):
        numbers = [(table.columns[number].form, cells[number][place]) for number in kept]
        lines.append(" | ".join([f"| {label}", *("–" if number is None else format(number, form) for form, number in numbers)]))
    return "\n".join(f"{line} |".replace("--- |", "---|") for line in lines)


def column(name: str, header: str, rows: str = "") -> list[Any]:
    """A column of a table, for the rows whose label contains `rows`. Raises `CourseError` if there are none."""
    found = [one.of(*words) for one in table(name).columns if one.header == header
             for label, words in table(name).rows.items() if rows in label]
    if not found:
        raise CourseError(f"the table {name} has no column {header!r} with rows {rows!r}")
    return [number for number in found if number is not None]


def cell(name: str, label: str, header: str) -> Any:
    """A cell of a table. Raises `CourseError` if it has no such row or column."""
    rows = table(name).rows
    found = [one.of(*rows[label]) for one in table(name).columns if one.header == header and label in rows]
    if not found:
        raise CourseError(f"the table {name} has no row {label!r} with a column {header!r}")
    return found[0]


# ---- derived numbers ----

NARROW, TRITON = "compiled, narrow stream", "compiled, narrow stream, Triton kernels, in a graph"
PLAIN, SEQUENCE, HAND = ("course",), ("course, sequence parallel",), ("course, Triton kernels",)           # names of layers
CORE, ENGINE = ("megatron-core",), ("megatron-core, Transformer Engine",)


def speed(file: str, label: str) -> float:
    """Thousand tokens/s for a GPT, images/s for a DiT."""
    return float(value(file, label, "tokens_per_s") / 1e3 if file == "gpt_h200" else value(file, label, "samples_per_s"))


def only(key: str) -> str:
    """The common value of a key in all files of NVIDIA GPUs. Raises `CourseError` if they differ."""
    files = [load(path.stem) for path in FOLDER.glob("*.json")]
    found = {str(file[key]).partition("+")[0] for file in files if "NVIDIA" in file.get("hardware", "")}
    if len(found) != 1:
        raise CourseError(f"recorded results differ in {key}: {', '.join(sorted(found))}")
    return found.pop()


def gelu_gain(_: str, model: str) -> float | None:
    """The share of a step that fusing GELU's gradient into the matmul before it saves; None if not measured."""
    ms = {row["gelu"]: row["ms"] for row in load("gelu_h200")["rows"] if row["configuration"] == f"{model}: bf16, {TRITON}"}
    return 1 - ms["in the matmul"] / ms["apart"] if ms else None


def matmul_gain(_: str, model: str) -> float:
    """The share of a step that the fastest algorithm for each matmul saves, as the mean of alternating runs."""
    rows = [row for row in load("products_h200")["steps"] if row["configuration"] == f"{model}: bf16, {TRITON}"]
    return 1 - mean(row["ms"] for row in rows if row["chosen"]) / mean(row["ms"] for row in rows if not row["chosen"])


def small_gap(file: str, run: str) -> float | None:
    """The gap between a small ViT's loss and bf16's; None if not measured."""
    gaps: dict[str, float] = load(file)["gap"]
    return gaps.get(run)


def large_gap(run: str, model: str) -> float | None:
    """The gap between a large model's loss and bf16's, None if not measured; without a run, the spread of bf16's seeds."""
    if not run:
        return float(load("alignment_h200")["models"][model]["spread"])
    models = [load(f"alignment_{name}")["models"].get(model, {}) for name in ("h200", "cp_h200")]
    return next((found["gap"][run] for found in models if run in found.get("gap", {})), None)


def loader(kind: str, workers: str) -> float | None:
    """Pairs/s of a loader; without a kind, of the page cache."""
    found = load("loaders_h200")
    rates: dict[str, float] = found["loaders"][kind] if kind else found["page cache to memory"]
    return rates.get(workers)


def attention(kernel: str, head_dim: int, causal: bool, who: str, tokens: int = 4096) -> float:
    """TFLOP/s of attention, "forward" or "backward", by flash, cuDNN, library or lesson."""
    found = [row["tflops"] for row in load("flash_attention_h200")["rows"] if (
        row["kernel"], row.get("head_dim"), row.get("causal"), row["who"], row.get("tokens")) == (
            kernel, head_dim, causal, who, tokens) and (who != "lesson" or row.get("best"))]
    if len(found) != 1:
        raise CourseError(f"flash_attention_h200.json has {len(found)} rows {kernel}, {who}, heads of {head_dim}: one is needed")
    return float(found[0])


def kernel_speed(kernel: str, width: int, who: str) -> float | None:
    """GB/s of a kernel of lesson 19 on 65,536 rows of this width, by lesson, PyTorch, compiled or library."""
    return next((float(row["gb_per_s"]) for row in load("triton_kernels_h200")["rows"] if (
        row["kernel"], row["rows"], row["columns"], row["who"]) == (kernel, 65536, width, who)), None)


def kernel_shares(who: str) -> list[float]:
    """The speed of the lesson's kernels over someone's, at both widths."""
    pairs = [(kernel_speed(kernel, width, "lesson"), kernel_speed(kernel, width, who)) for kernel, width in product(
        KERNELS, (1152, 4096))]
    return [mine / theirs for mine, theirs in pairs if mine and theirs]


def attention_shares(kernel: str, who: str) -> list[float]:
    """The speed of the lesson's attention over someone's, at every shape that was measured."""
    shapes = product((64, 128), (False, True), (4096, 16384))
    return [attention(kernel, D, causal, "lesson", T) / attention(kernel, D, causal, who, T) for D, causal, T in shapes]


def with_buffers(gpus: int, model: str) -> float:
    """GB of a step with symmetric memory, plus its four batch-sized buffers, which PyTorch does not count."""
    label, file = f"{model}, Triton kernels, through memory, in a graph", f"sp_{gpus}xh200"
    return float(value(file, label, "memory_gb") + 4e-3 * value(file, label, "sample_mb") * int(model.split()[-2]))


def layers(gpus: str, ours: Sequence[str], theirs: Sequence[str]) -> list[float]:
    """For each case, the time of the fastest of `ours` over that of the fastest of `theirs`."""
    cases: dict[str, dict[str, float]] = {}
    for row in load(f"grid_{gpus}h200")["rows"]:
        if row["case"].endswith("layers"):
            cases.setdefault(row["case"], {})[row["by"]] = row["ms"]
    fastest = [[min((ms[by] for by in names if by in ms), default=None) for names in (ours, theirs)] for ms in cases.values()]
    return [one / other for one, other in fastest if one and other]


def span(numbers: Sequence[float]) -> str | None:
    """The range of the numbers in percent; None if there are none."""
    return f"{min(numbers):.0%} to {max(numbers):.0%}" if numbers else None


def comparisons(file: str) -> list[dict[str, Any]]:
    """All comparisons in a parity file, from all its parts."""
    parts = [part if isinstance(part, list) else part["rows"] for part in load(file).values() if isinstance(part, list | dict)]
    return [row for part in parts for row in part]


def wrong(row: dict[str, Any]) -> bool:
    """Whether a comparison found a parameter that differs by more than rounding."""
    return bool(row.get("wrong")) or row["gap"] > row["bound"]


@cache
def today(kind: str) -> tuple[list[float], list[float]]:
    """(time errors, memory errors) of the current code's predictions, for recorded rows or published measurements.

    An error is predicted over measured, minus 1."""
    if kind != "recorded":
        return [published_steps.error(case) for case in published_steps.CASES
                if (case.group == published_steps.MEGATRON) == (kind == "megatron")], []
    steps = recorded_steps.steps()
    whole = [step for step in steps if step.kind == "step"]
    return [step.error for step in steps], [peak_memory.predict(one.config).allocated / 1e9 / one.memory_gb - 1 for one in whole]


def errors(file: str, gpus: str = "") -> tuple[list[float], list[float]]:
    """(time errors, memory errors) of predictions recorded before the measurement. Memory peaks include the first step."""
    if file in ("recorded", "megatron", "others"):
        return today(file)
    rows = [row for row in load(file)["rows"] if "ms" in row and row["name"].startswith(gpus)]
    return ([row["predicted_ms"] / row["ms"] - 1 for row in rows],
            [row["predicted_gb"] / max(row["memory_gb"], row["first_gb"]) - 1 for row in rows if "first_gb" in row])


# ---- kinds of columns ----

def at(header: str, form: str, file: str, label: str, field: str, **where: Any) -> Column:
    """A column of recorded numbers. The row's words replace {0}, {1}, ... in file name and label."""
    return Column(header, form, lambda *words: value(file.format(*words), label.format(*words), field, **where))


def fsdp_prediction(field: str, case: str) -> float | None:
    """What the planner predicts of a row of `course bench fsdp`: nothing of PyTorch's."""
    return None if "fully" in case else value(FSDP, case, field)


def if_recorded(file: str, label: str, field: str) -> Any:
    """A field of the row with this label; None if it was not measured."""
    return next((row.get(field) for row in load(file)["rows"] if row.get("configuration", row.get("case")) == label), None)


def of_experts(gpus: int, field: str, case: str) -> float | None:
    """A number of a row of `course bench experts`; None if there is no such row."""
    return next((row[field] for row in load("experts_h200")["rows"] if (row["gpus"], row["case"]) == (gpus, case)), None)


def context_loss_gap(model: str = "") -> float:
    """The largest relative difference of a loss over two GPUs from that of the same step on one. model: how its cases begin."""
    rows = [row for row in load("context_steps_2xh200")["rows"] if row["gpus"] == 2 and row["case"].startswith(model)]
    pairs = [(found, wanted) for row in rows for found, wanted in zip(
        row["losses"], value("context_steps_2xh200", row["case"], "losses", gpus=1, graphs=row["graphs"]), strict=True)]
    return max(abs(found / wanted - 1) for found, wanted in pairs)


def fed(header: str, form: str, of: Callable[..., Any], *more: Any) -> Column:
    """A column whose function takes the row's words and `more`."""
    return Column(header, form, lambda *words: of(*words, *more))


def beside(gpus: int, field: str, form: str) -> list[Column]:
    """Two columns, the course's number and PyTorch's. Row: file, our case, their case, other fields of the row."""
    def of(which: int) -> Callable[..., Any]:
        return lambda file, *cases: value(file, cases[which], field, gpus=gpus, **cases[2])

    return [Column(f"{gpus} GPUs: {field}", form, of(0)), Column(f"{gpus} GPUs: PyTorch's {field}", form, of(1))]


def share(gpus: int) -> Column:
    """The course's time over PyTorch's, for the rows of `beside`."""
    ours, theirs = beside(gpus, "ms", "")
    return Column(f"{gpus} GPUs: ours / PyTorch's", ".0%", lambda *words: ours.of(*words) / theirs.of(*words))


def grid(header: str, theirs: Sequence[str], ours: Sequence[str] = ()) -> Column:
    """The range of our layers' times over megatron-core's. A row gives the GPUs, and `ours` unless the column does."""
    return Column(header, "", lambda gpus, chosen: span(layers(gpus, ours or chosen, theirs)))


def off(header: str, which: int, how: Callable[[list[float]], float]) -> Column:
    """A summary of the absolute errors of a row's predicted times (which=0) or peaks (1). how: median or max."""
    def of(*words: str) -> float | None:
        found = [abs(error) for error in errors(*words)[which]]
        return how(found) if found else None
    return Column(header, ".1%", of)


def shown(which: int) -> Callable[..., str]:
    """A number of README's table. Row: file, our case, their case, field, format, other fields of the row, name."""
    def of(file: str, ours: str, theirs: str, field: str, form: str, where: dict[str, Any], _: str) -> str:
        number = value(file, (ours, theirs)[which], field, **where)
        return format(number / 1e3 if field == "tokens_per_s" else number, form)
    return of


# ---- the tables ----

MODELS = {"GPT 124M": ("gpt_h200", "124M"), "GPT 350M": ("gpt_h200", "350M"), "GPT 1.3B": ("gpt_h200", "1.3B"),
          "DiT-XL/2, 256 px": ("dit_h200", "256 px"), "DiT-XL/2, 512 px": ("dit_h200", "512 px")}
BATCHES = ("DiT-XL/2, 256 px, 32 samples", "GPT 124M, 32 samples", "GPT 350M, 16 samples", "DiT-XL/2, 512 px, 16 samples",
           "GPT 1.3B, 4 samples")
ALIGNED = ("gpt-1.3b", "GPT 1.3B"), ("dit-xl", "DiT-XL/2, 256 px"), ("dit-xl-512", "DiT-XL/2, 512 px")
FOUR: dict[str, Any] = {"gpus": 4}
SP = "{1}, Triton kernels, "
THROUGH, WITHOUT, BY_NCCL = (f"{SP}{way}in a graph" for way in ("through memory, ", "no sequence parallelism, ", ""))

KERNELS = {"copy": "copy", "fused-gelu": "bias and GELU", "row-softmax": "softmax", "add-norm": "sum and LayerNorm",
           "add-norm-backward": "its backward pass"}
FSDP = "fsdp_2xh200"
TABLES = {
    "readme": Table([Column("this course", "", shown(0)), Column("alternative", "", shown(1)),
                     Column("the alternative is", "", lambda *words: words[-1])], {
        "GPT 124M, bf16, thousand tokens/s": ("gpt_h200", f"124M: bf16, {TRITON}", "124M: Hugging Face's GPT-2, bf16, compiled",
                                              "tokens_per_s", ".0f", {}, "Hugging Face's GPT-2, compiled"),
        "GPT 1.3B, FP8, thousand tokens/s": ("gpt_h200", f"1.3B: fp8, {TRITON}", "1.3B: fp8 by Transformer Engine",
                                             "tokens_per_s", ".1f", {}, "Transformer Engine"),
        "DiT-XL/2, 256 px, bf16, images/s": ("dit_h200", f"256 px: bf16, {TRITON}", f"256 px: bf16, {NARROW}",
                                     "samples_per_s", ".0f", {}, "PyTorch's compiler"),
        "DiT-XL/2, 256 px, FP8, images/s": ("dit_h200", f"256 px: fp8, {TRITON}", "256 px: fp8 by Transformer Engine",
                                    "samples_per_s", ".0f", {}, "Transformer Engine"),
        "8 tensor-parallel layers, symmetric memory, 4 GPUs, ms": (
            "tp_h200", "symmetric, compiled", "DTensor sequence parallel, compiled", "ms", ".1f", FOUR, "DTensor"),
        "attention over 64k tokens by all-to-all, 4 GPUs, ms": (
            "cp_h200", "64k causal all_to_all", "64k causal PyTorch context_parallel", "ms", ".1f", FOUR,
            "PyTorch's `context_parallel`"),
        "idle time of an interleaved pipeline, 4 GPUs": (
            "pp_h200", "interleaved", "PyTorch Interleaved1F1B", "bubble", ".1%", FOUR, "PyTorch's schedule")}),
    "vit": Table([at("samples/s", ".1f", "vit_h200", "{0}", "samples_per_s"), at("GB", ".1f", "vit_h200", "{0}", "memory_gb"),
                  at("MFU", ".0%", "vit_h200", "{0}", "mfu"), at("first step, s", ".0f", "vit_h200", "{0}", "first_s")], {
        "TF32, the training process reads HDF5": ("tf32, read by the training process",),
        "TF32": ("tf32, on the device",),
        "bf16": ("bf16, on the device",),
        "bf16, compiled": ("bf16, compiled",),
        "bf16, compiled, `stream=narrow`": (f"bf16, {NARROW}",),
        "bf16, compiled, `stream=narrow`, `kernels=triton`": (f"bf16, {NARROW}, Triton kernels",),
        "bf16, compiled, `graphs=true`": ("bf16, compiled, in a graph",),
        "bf16, compiled, `attention=flash`": ("bf16, compiled, flash attention",),
        "bf16, compiled, DataLoader, 8 processes": ("bf16, compiled, 8 loader processes",),
        "bf16, compiled, `data.loader=threads`": ("bf16, compiled, threads",),
        "bf16, compiled, `data.loader=dali`": ("bf16, compiled, DALI",),
        "FP8, compiled": ("fp8, compiled",),
        "width 1024: bf16, compiled, `stream=narrow`": (f"width 1024: bf16, {NARROW}",),
        "width 1024: the same, `kernels=triton`": (f"width 1024: bf16, {NARROW}, Triton kernels",),
        "width 1024: FP8, compiled, `stream=narrow`": (f"width 1024: fp8, {NARROW}",),
        "width 1024: FP8, the same, `kernels=triton`": (f"width 1024: fp8, {NARROW}, Triton kernels",),
        "width 1024: FP8 by Transformer Engine": ("width 1024: fp8 by Transformer Engine",),
        "one small sample: bf16": ("one sample: eager",),
        "one small sample: compiled": ("one sample: compiled",),
        "one small sample: `graphs=true`": ("one sample: in a graph",),
        "one small sample: compiled, `graphs=true`": ("one sample: compiled, in a graph",)}),
    "bf16": Table([Column("compiler's kernels", ".0f", lambda file, model: speed(file, f"{model}: bf16, {NARROW}")),
                   Column("Triton kernels, CUDA graph", ".0f", lambda file, model: speed(file, f"{model}: bf16, {TRITON}")),
                   Column("times as fast", ".2f", lambda file, model: value(file, f"{model}: bf16, {NARROW}")
                          / value(file, f"{model}: bf16, {TRITON}")),
                   at("GB", ".1f", "{0}", f"{{1}}: bf16, {TRITON}", "memory_gb"),
                   at("MFU", ".0%", "{0}", f"{{1}}: bf16, {TRITON}", "mfu")], dict(MODELS)),
    "fp8": Table([Column("compiler's kernels", ".0f", lambda file, model: speed(file, f"{model}: fp8, {NARROW}")),
                  Column("Triton kernels, CUDA graph", ".0f", lambda file, model: speed(file, f"{model}: fp8, {TRITON}")),
                  Column("Transformer Engine", ".0f", lambda file, model: speed(file, f"{model}: fp8 by Transformer Engine")),
                  Column("over bf16", ".2f", lambda file, model: value(file, f"{model}: bf16, {TRITON}")
                         / value(file, f"{model}: fp8, {TRITON}")),
                  Column("over Transformer Engine", ".2f", lambda file, model: value(
                      file, f"{model}: fp8 by Transformer Engine") / value(file, f"{model}: fp8, {TRITON}")),
                  at("GB", ".1f", "{0}", f"{{1}}: fp8, {TRITON}", "memory_gb"),
                  at("Transformer Engine's GB", ".1f", "{0}", "{1}: fp8 by Transformer Engine", "memory_gb")],
                 {name: words for name, words in MODELS.items() if name not in ("GPT 124M", "GPT 350M")}),
    "memory": Table([at("tokens/s", ",.0f", "gpt_h200", f"124M: bf16, {NARROW}, {{0}}", "tokens_per_s"),
                     at("GB", ".1f", "gpt_h200", f"124M: bf16, {NARROW}, {{0}}", "memory_gb")], {
        "Triton kernels": ("Triton kernels, in a graph",),
        "Triton kernels, two micro-batches": ("Triton kernels, in a graph, two micro-batches",),
        "Triton kernels, `train.recompute=selective`": ("selective recomputation, Triton kernels, in a graph",),
        "compiler's kernels, `train.recompute=selective`": ("selective recomputation",),
        "compiler's kernels, `train.recompute=full`": ("full recomputation",)}),
    "one-sample": Table([at("ms", ".2f", "gpt_h200", "124M, one sample: {0}", "ms"),
                         at("kernels", ".0f", "gpt_h200", "124M, one sample: {0}", "kernels"),
                         at("J", ".2f", "gpt_h200", "124M, one sample: {0}", "joules_per_sample")], {
        "Triton kernels, in a graph": (f"bf16, {TRITON}",), "compiler's kernels, in a graph": (f"bf16, {NARROW}, in a graph",),
        "compiler's kernels": (f"bf16, {NARROW}",), "Hugging Face's GPT-2, compiled": ("Hugging Face's GPT-2, bf16, compiled",)}),
    "context-steps": Table([at(header, ".1f", "context_steps_2xh200", "{0}", "ms", gpus=gpus, context=method, graphs=graphs)
                            for header, gpus, method, graphs in (
                                ("1 GPU", 1, "", True), ("gather", 2, "gather", True), ("ring", 2, "ring", True),
                                ("all-to-all", 2, "all_to_all", True), ("1 GPU, no graph", 1, "", False),
                                ("gather, no graph", 2, "gather", False))], {case: (case,) for case in (
                "DiT-XL/2, 256 px, 32 samples", "DiT-XL/2, 512 px, 16 samples", "GPT 350M, 2 x 8,192 tokens",
                "weather ViT, 8 samples")}),
    "power": Table([at("MHz", ".0f", "{0}", "{1}", "clock_mhz"), at("W", ".0f", "{0}", "{1}", "power_w"),
                    fed("J/sample", ".3g", if_recorded, "joules_per_sample")], {
        "weather ViT, bf16, compiler's kernels": ("vit_h200", "bf16, compiled"),
        "weather ViT, width 1024, bf16, compiler's kernels": ("vit_h200", f"width 1024: bf16, {NARROW}"),
        "weather ViT, width 1024, FP8, compiler's kernels": ("vit_h200", f"width 1024: fp8, {NARROW}"),
        **{f"{name}, bf16, Triton kernels": (file, f"{model}: bf16, {TRITON}") for name, (file, model) in MODELS.items()},
        "GPT 350M, FP8, Triton kernels": ("gpt_h200", f"350M: fp8, {TRITON}"),
        "GPT 1.3B, FP8, Triton kernels": ("gpt_h200", f"1.3B: fp8, {TRITON}"),
        "GPT 1.3B, bf16, compiler's kernels": ("gpt_h200", f"1.3B: bf16, {NARROW}"),
        "GPT-2 of 1.3B by Hugging Face, bf16, compiled": ("gpt_h200", "1.3B: Hugging Face's GPT-2, bf16, compiled")}),
    "kernels": Table([fed(name, ".0f", kernel_speed, who) for name, who in (
        ("lesson 19", "lesson"), ("PyTorch", "PyTorch"), ("torch.compile", "compiled"), ("`kernels=triton`", "library"))], {
        f"{words}, width {width}": (kernel, width) for kernel, words in KERNELS.items() for width in (1152, 4096)}),
    "attention": Table([*(fed(name, ".0f", attention, who) for name, who in (
        ("lesson 19", "lesson"), ("PyTorch's flash", "flash"), ("cuDNN", "cuDNN"), ("`kernels=triton`", "library"))),
        *(Column(f"lesson 19 / {who}", ".2f", lambda kernel, D, causal, who=who: (
            attention(kernel, D, causal, "lesson") / attention(kernel, D, causal, who))) for who in ("flash", "cuDNN"))], {
        f"{kernel}, heads of {D}{', causal' * causal}": (kernel, D, causal)
        for kernel, D, causal in product(("forward", "backward"), (64, 128), (False, True))}),
    "not_kept": Table([Column(name, ".1%", lambda gain, words=words: gain(*words)) for name, words in MODELS.items()], {
        "GELU's gradient inside the matmul before it": (gelu_gain,),
        "the fastest cuBLASLt algorithm for each matmul": (matmul_gain,)}),
    "formats": Table([Column("CPU", ".1%", lambda run: small_gap("curves_cpu", run)),
                      Column("H200", ".1%", lambda run: small_gap("curves_h200", run))], {
        "fp32": ("fp32",), "TF32": ("tf32",), "fp16": ("fp16",),
        "native FP8, delayed scales": ("native fp8, delayed",), "native FP8, current scales": ("native fp8, current",),
        "Transformer Engine, delayed scales": ("TE, delayed",), "Transformer Engine, current scales": ("TE, current",),
        "Transformer Engine, scales by block": ("TE, block",),
        "a mistake: gradients in E4M3": ("native fp8, gradients in E4M3",),
        "a mistake: scales of the first step": ("native fp8, scales frozen",)}),
    "alignment": Table([fed(name, ".2%", large_gap, model) for model, name in ALIGNED], {
        "bf16, other seeds: their spread": ("",), "bf16, flash attention": ("bf16, flash attention",),
        "bf16, tokens over 2 GPUs": ("bf16, cp=2",),
        "native FP8, delayed, maximum of 1024 steps": ("fp8 delayed, 1024 max",),
        "native FP8, delayed, last step": ("fp8 delayed, 1 most_recent",), "native FP8, current": ("fp8 current",),
        "Transformer Engine, delayed": ("fp8 Transformer Engine",), "scales of the first step": ("fp8 frozen scales",)}),
    "loaders": Table([fed(f"{count} worker{'s' * (count != '1')}", ".0f", loader, count) for count in ("1", "8", "12", "16")], {
        "`native` (PyTorch's DataLoader)": ("native",), "`threads`": ("threads",), "`dali`": ("dali",),
        "`dali_numpy`": ("dali_numpy",), "plain copy from the page cache": ("",)}),
    "layouts": Table([*beside(4, "ms", ".1f"), share(4), *beside(2, "ms", ".1f"), share(2)], {
        "tensor and sequence parallel; DTensor": ("tp_h200", "symmetric", "DTensor sequence parallel", {}),
        "the same, both compiled": ("tp_h200", "symmetric, compiled", "DTensor sequence parallel, compiled", {}),
        "causal attention, ring": ("cp_h200", "64k causal ring", "64k causal PyTorch context_parallel", {}),
        "causal attention, all-to-all": ("cp_h200", "64k causal all_to_all", "64k causal PyTorch context_parallel", {}),
        "full attention, all-to-all": ("cp_h200", "64k full all_to_all", "64k full PyTorch context_parallel", {}),
        "data parallel, buckets; DDP": ("dp_h200", "bucketed", "ddp", {"bucket_mb": 25}),
        "data parallel, both compiled": ("dp_h200", "bucketed, compiled", "ddp, compiled", {"bucket_mb": 100}),
        "pipeline, 1F1B": ("pp_h200", "1f1b", "PyTorch 1F1B", {}),
        "pipeline, interleaved": ("pp_h200", "interleaved", "PyTorch Interleaved1F1B", {}),
        "ZeRO-1, whole steps; ZeroRedundancyOptimizer": ("zero_h200", "ZeRO-1, 16-bit copies", "ZeroRedundancyOptimizer", {})}),
    "fsdp": Table([at("ms", ".1f", FSDP, "{0}", "ms"),
                   Column("ms, predicted", ".1f", partial(fsdp_prediction, "predicted_ms")),
                   at("GB", ".1f", FSDP, "{0}", "memory_gb"),
                   Column("GB, predicted", ".1f", partial(fsdp_prediction, "predicted_gb")),
                   Column("exposed communication, ms", ".1f", partial(if_recorded, FSDP, field="exposed_ms"))], {
        "ZeRO-1": ("ZeRO-1",), "ZeRO-2": ("ZeRO-2",), "ZeRO-3": ("ZeRO-3",),
        "ZeRO-3, `reduce_in=matmul`": ("ZeRO-3, gradients in bf16",),
        "ZeRO-3, `reshard_after=step`": ("ZeRO-3, weights kept for the step",),
        "ZeRO-3, two micro-batches": ("ZeRO-3, two micro-batches",), "ZeRO-3, recomputed": ("ZeRO-3, recomputed",),
        "ZeRO-3, in a graph": ("ZeRO-3, in a graph",), "ZeRO-3, FP8": ("ZeRO-3, FP8",),
        "ZeRO-3, FP8, in a graph": ("ZeRO-3, FP8, in a graph",),
        "`fully_shard`, float32 gradients": ("fully_shard, gradients in float32",),
        "`fully_shard`, bf16 gradients": ("fully_shard, gradients in bfloat16",)}),
    "experts": Table([Column(f"{gpus} GPU{'s' * (gpus > 1)}: {header}", ".1f", partial(of_experts, gpus, field))
                      for gpus, (header, field) in product((1, 2), (("ms", "ms"), ("GB", "memory_gb")))], {
        "dense, same number of active parameters": ("dense, as many active parameters",),
        "dense, in a graph": ("dense, in a graph",), "experts": ("experts",),
        "experts in plain PyTorch": ("experts in plain PyTorch",), "experts, `dispatch=gather`": ("experts, gathered",),
        "experts, in a graph (`gather`)": ("experts, in a graph",)}),
    "bubbles": Table([column for gpus in (4, 2) for column in (
        *beside(gpus, "bubble", ".1%"), at(f"{gpus} GPUs: theory", ".1%", "{0}", "{1}", "theory", gpus=gpus))], {
        "1F1B": ("pp_h200", "1f1b", "PyTorch 1F1B", {}),
        "interleaved, two chunks": ("pp_h200", "interleaved", "PyTorch Interleaved1F1B", {})}),
    "tp_vit": Table([at(f"{gpus} GPUs: {header}", ".1f", "tp_vit_h200", f"{{0}}, {how}", field, gpus=gpus)
                     for gpus, (header, how, field) in product((4, 2), (("compiled, ms", "compiled", "ms"), (
                         "in a graph, ms", "in a graph", "ms"), ("GB", "in a graph", "memory_gb")))], {
        "no sequence parallelism": ("plain",), "sequence parallelism": ("sequence",),
        "sequence parallelism, overlapped": ("overlap",)}),
    "sp": Table([at("none, ms", ".1f", "sp_{0}xh200", WITHOUT, "ms"), at("NCCL, ms", ".1f", "sp_{0}xh200", BY_NCCL, "ms"),
                 at("symmetric, ms", ".1f", "sp_{0}xh200", THROUGH, "ms"),
                 at("none, GB", ".1f", "sp_{0}xh200", WITHOUT, "memory_gb"), Column("symmetric, GB", ".1f", with_buffers)],
                {f"{gpus} GPUs: {model}": (gpus, model) for gpus in (4, 2) for model in BATCHES}),
    "megatron": Table([Column("cases", "d", lambda gpus, _: len(layers(gpus, PLAIN, CORE))),
                       grid("ours / its own", CORE, PLAIN), grid("ours / Transformer Engine's", ENGINE),
                       grid("our Triton kernels / Transformer Engine's", ENGINE, HAND),
                       grid("our fastest / its fastest", CORE + ENGINE, PLAIN + SEQUENCE + HAND)], {
        "1 GPU": ("", PLAIN), "2 GPUs": ("2x", SEQUENCE), "4 GPUs": ("4x", SEQUENCE)}),
    "parity": Table([Column("comparisons", "d", lambda file: len(comparisons(file))),
                     Column("layouts", "d", lambda file: len({row["layout"] for row in comparisons(file)})),
                     Column("wrong", "d", lambda file: sum(map(wrong, comparisons(file)))),
                     Column("worst in float64", ".0e", lambda file: max(
                         row["gap"] for row in comparisons(file) if row["precision"] == "fp64"))], {
        "2 H200s": ("parity_2xh200",), "4 H200s": ("parity_h200",),
        "2 H100s": ("parity_2xh100",), "4 H100s": ("parity_4xh100",)}),
    "predictions": Table([Column("cases", "d", lambda *words: len(errors(*words)[0])), off("time: median", 0, median),
                          off("time: worst", 0, max), off("memory: median", 1, median), off("memory: worst", 1, max)], {
        **{f"held-out list {number}, {gpus} GPU{'s' * (gpus > 1)}": (f"heldout_{number}_h200", f"{gpus}-")
           for number, gpus in ((3, 1), (3, 2), (4, 1), (4, 2), (4, 4), (5, 2))},
        "layouts for GPT 1.3B, 2 GPUs": ("planned_2xh200", "gpt-1.3b"),
        "layouts for DiT-XL/2, 2 GPUs": ("planned_2xh200", "dit-xl"),
        "by today's code: recorded steps": ("recorded",), "by today's code: Megatron-LM's V100 table": ("megatron",),
        "by today's code: others' steps on A100, H20 and H100": ("others",)}),
}
