"""What a function starts, counted: PyTorch's operators one by one, graphs that Dynamo records, kernels that Inductor writes.

Counts need no GPU. An operator that computes is one kernel there, in some cases two or three; views and empty memory are none.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._logging import set_logs
from torch.utils._python_dispatch import TorchDispatchMode

NO_KERNEL = ("profiler", "empty", "_unsafe_view", "detach", "_local_scalar_dense", "is_pinned", "new_empty", "empty_like",
             "empty_strided", "alias", "_record_function_enter_new", "_record_function_exit")
# what the code calls that Inductor wrote: kernels of its own, in C++ or Triton, and operators that are libraries'
CALLS = re.compile(r"^\s*(?:\w+ = )?(?:(cpp_fused_\w+?)\(|(triton_\w+)\.run\(|extern_kernels\.(\w+)\(|"
                   r"torch\.ops\.aten\.(\w+?)(?:\.\w+)?\()", re.MULTILINE)


class Operators(TorchDispatchMode):
    """Inside, `names` collects the operators that compute something, in order: "addmm", "gelu"."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if not func.is_view and name not in NO_KERNEL:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def operators(function: Callable[[], Any]) -> list[str]:
    """The operators that a function starts one after another, those of its backward pass too; views are left out."""
    with Operators() as seen:
        function()
    return seen.names


def graphs(function: Callable[..., Any], *calls: Sequence[Any], modules: Sequence[nn.Module] = ()) -> list[list[str]]:
    """The operations of each graph that Dynamo records while `function` is called with these arguments, call after call.

    modules: these are compiled, each in its place, rather than the function. Whatever was compiled before is forgotten.
    Needs no compiler: graphs are recorded and then run by PyTorch.
    """
    operations: list[list[str]] = []

    def record(graph: torch.fx.GraphModule, _: Sequence[Tensor]) -> Callable[..., Any]:
        operations.append([getattr(node.target, "__name__", str(node.target)) for node in graph.graph.nodes
                      if node.op in ("call_function", "call_method", "call_module")])
        return graph.forward

    with fresh_compilation():
        for module in modules:
            module.compile(backend=record)
        run = function if modules else torch.compile(function, backend=record)
        try:
            for arguments in calls or [()]:
                run(*arguments)
        finally:
            for module in modules:
                module._compiled_call_impl = None    # as it was
    return operations


@contextmanager
def fresh_compilation() -> Iterator[None]:
    """Begin and end with nothing compiled, and without Dynamo's warnings, which stand in the way of what a cell shows."""
    torch._dynamo.reset()
    set_logs(dynamo=50, inductor=50)                 # logging.CRITICAL
    try:
        yield
    finally:
        set_logs()
        torch._dynamo.reset()


def generated(function: Callable[[], Any]) -> list[list[str]]:
    """What the code that Inductor writes for a compiled function starts, graph by graph: fused kernels and library calls.

    Call it before anything else calls the function: what is compiled is compiled once. Needs a compiler.
    """
    from torch._inductor.utils import run_and_get_code

    _, codes = run_and_get_code(function)
    return [called_kernels(code) for code in codes]


def called_kernels(code: str) -> list[str]:
    """The names of what generated code calls, in order."""
    body = code.rpartition("def call(")[2]           # what stands before are the kernels themselves
    return [next(filter(None, groups)) for groups in CALLS.findall(body)]


def compiler() -> str:
    """The compiler of C++ that Inductor uses on the CPU, such as "g++"; "" where there is none."""
    from torch._inductor import cpp_builder, exc

    try:
        return cpp_builder.get_cpp_compiler()
    except (exc.InductorError, RuntimeError, OSError):
        return ""


def format_counts(counts: Mapping[str, int]) -> str:
    """Names with how often they occur, the most frequent first: "4 x addmm, 2 x native_layer_norm"."""
    return ", ".join(f"{count} x {name}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))
