"""Whether kernels that ran in the interpreter also compile for a GPU: Triton's front end translates them, without a GPU.

The front end finds what the interpreter accepts and a GPU does not, such as a number of the notebook inside a kernel. It takes
milliseconds a kernel. The later stages of the compiler are left out.
"""

import linecache
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from course.ops import triton_language

CAPABILITY = 90                                      # H100 and H200
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64", torch.bool: "i1",
         torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8"}
CONSTANT = "constexpr"
CURES = {                                            # words of the compiler's error -> what to do
    "Cannot access global variable":
    "a kernel knows its arguments, and no numbers of the notebook: compute the number inside the kernel, or pass it",
    "Loop-carried variable":
    "a variable of a loop keeps its number format and shape: add up in float32, and cast once, after the loop"}
OTHERWISE = "the interpreter accepts more than a GPU: look at the line that is named, and at Triton's grammar in the lesson"


class Launch(NamedTuple):
    """One launch of a kernel: the kernel, its arguments by name, and the launch options."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]


class DoesNotCompile(Exception):
    """A kernel that the interpreter runs and the compiler refuses: what the compiler said, with the line, and a cure or ""."""

    def __init__(self, text: str, cure: str):
        super().__init__(text)
        self.text, self.cure = text, cure


@contextmanager
def noted_launches() -> Iterator[list[Launch]]:
    """Inside the block kernels are interpreted, and each launch is noted."""
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []
    with triton_language.interpreted():
        run = JITFunction.run

        def noted_run(self: Any, *arguments: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
            run(self, *arguments, grid=grid, warmup=warmup, **options)
            named = {name: options.pop(name) for name in list(options) if name in self.arg_names}
            bound = self.signature.bind(*arguments, **named)
            bound.apply_defaults()
            launches.append(Launch(self, dict(bound.arguments), options))

        noted_run.interprets = True                  # type: ignore[attr-defined]
        JITFunction.run = noted_run
        try:
            yield launches
        finally:
            JITFunction.run = run


def compile_all(launches: Sequence[Launch]) -> None:
    """Translate each kernel once for each kind of arguments. Raises `DoesNotCompile` for the first one that fails."""
    done = set()
    for launch in launches:
        types, constants = signature(launch)
        kind = (id(launch.kernel), str(types), str(constants))
        if kind not in done:
            done.add(kind)
            translate(launch, types, constants)


def signature(launch: Launch) -> tuple[dict[str, Any], dict[tuple[int, ...], Any]]:
    """The types of a launch's arguments by name, and its constants by position. As on a GPU, an integer of 1 is a constant."""
    types, constants = dict[str, Any](), dict[tuple[int, ...], Any]()
    for place, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr:
            types[parameter.name], constants[(place,)] = CONSTANT, value
        elif isinstance(value, tuple):
            types[parameter.name] = tuple(map(type_name, value))
            constants |= {(place, i): each for i, each in enumerate(value) if type_name(each) == CONSTANT}
        else:
            types[parameter.name] = type_name(value)
            if type_name(value) == CONSTANT:
                constants[(place,)] = value
    return types, constants


def type_name(value: Any) -> str:
    """Triton's name for the type of an argument."""
    if isinstance(value, Tensor):
        return f"*{NAMES[value.dtype]}"
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return CONSTANT if value == 1 else "i32" if -2**31 <= value < 2**31 else "i64"
    return "fp32" if isinstance(value, float) else CONSTANT


def translate(launch: Launch, types: dict[str, Any], constants: dict[tuple[int, ...], Any]) -> None:
    """Let Triton's front end translate one kernel. Raises `DoesNotCompile`."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.compiler.errors import CompilationError

    target = GPUTarget("cuda", CAPABILITY, 32)
    backend = make_backend(target)
    options = backend.parse_options({name: value for name, value in launch.options.items() if value is not None})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(launch.kernel, types, constants)
    try:
        source.make_ir(target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)
    except CompilationError as error:
        raise describe(launch.kernel, error) from None
    except (AttributeError, TypeError):             # another version of Triton: what the interpreter found stands
        return


def describe(kernel: Any, error: Any) -> DoesNotCompile:
    """The compiler's error with the line of the cell at which it arose, also in a function that the kernel calls."""
    while type(error.__cause__) is type(error):
        error = error.__cause__
    said = str(error.error_message or error.__cause__ or "the compiler gives no reason")
    said = re.sub(r"^\w+\(['\"](.*)['\"]\)$", r"\1", said)              # an exception of Python as code
    said = said.partition(" from within @jit")[0]
    cure = next((cure for words, cure in CURES.items() if words in said), OTHERWISE)
    return DoesNotCompile(f"your kernel runs in the interpreter, but does not compile for a GPU: {said}"
                          f"{describe_line(kernel, error)}", cure)


def describe_line(kernel: Any, error: Any) -> str:
    """The line at which the compiler stopped, on a line of its own; "" if it is in no function that the kernel sees."""
    for function in kernel.fn.__globals__.values():
        if getattr(function, "src", None) == error.src and hasattr(error.node, "lineno"):
            file = function.fn.__code__.co_filename
            line = function.starting_line_number + function.raw_src.index(error.src.splitlines(True)[0]) + error.node.lineno - 1
            return f"\nline {line} of {file}: {linecache.getline(file, line).strip()}"
    return ""
