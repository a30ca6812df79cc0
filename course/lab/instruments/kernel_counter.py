"""Count what a function launches: PyTorch's operators, graphs that Dynamo records, kernels that Inductor generates.

Counts need no GPU. On a GPU, an operator that computes is one kernel, sometimes two or three. Views and empty tensors are none.
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
# calls in code that Inductor generated: its own kernels, in C++ or Triton, and library operators
CALLS = re.compile(r"^\s*(?:\w+ = )?(?:(cpp_fused_\w+?)\(|(triton_\w+)\.run\(|extern_kernels\.(\w+)\(|"
                   r"torch\.ops\.aten\.(\w+?)(?:\.\w+)?\()", re.MULTILINE)


class Operators(TorchDispatchMode):
    """Within this context, `names` collects the operators that compute something, in order: "addmm", "gelu"."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if not func.is_view and name not in NO_KERNEL:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def operators(function: Callable[[], Any]) -> list[str]:
    """The operators that a function calls, in order, including its backward pass, without views."""
    with Operators() as seen:
        function()
    return seen.names


def graphs(function: Callable[..., Any], *calls: Sequence[Any], modules: Sequence[nn.Module] = ()) -> list[list[str]]:
    """The operations of each graph that Dynamo records while `function` is called with these arguments, call after call.

    modules: compile these in place instead of the function. Earlier compilations are discarded. It needs no C++ compiler:
    graphs are recorded and then run by PyTorch.
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
                module._compiled_call_impl = None    # undo .compile()
    return operations


@contextmanager
def fresh_compilation() -> Iterator[None]:
    """Start and end with nothing compiled, and silence Dynamo's warnings, which would clutter a cell's output."""
    torch._dynamo.reset()
    set_logs(dynamo=50, inductor=50)                 # logging.CRITICAL
    try:
        yield
    finally:
        set_logs()
        torch._dynamo.reset()


def generated(function: Callable[[], Any]) -> list[list[str]]:
    """The fused kernels and library calls in the code that Inductor generates for a compiled function, per graph.

    Call it before the function runs for the first time, because it compiles only once. Needs a compiler.
    """
    from torch._inductor.utils import run_and_get_code

    _, codes = run_and_get_code(function)
    return [called_kernels(code) for code in codes]


def called_kernels(code: str) -> list[str]:
    """The names of the kernels and operators that generated code calls, in order."""
    body = code.rpartition("def call(")[2]           # the kernels themselves come before it
    return [next(filter(None, groups)) for groups in CALLS.findall(body)]


def compiler() -> str:
    """The C++ compiler that Inductor uses on the CPU, such as "g++"; "" if there is none."""
    from torch._inductor import cpp_builder, exc

    try:
        return cpp_builder.get_cpp_compiler()
    except (exc.InductorError, RuntimeError, OSError):
        return ""


def format_counts(counts: Mapping[str, int]) -> str:
    """Format counts, the largest first: "4 x addmm, 2 x native_layer_norm"."""
    return ", ".join(f"{count} x {name}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))
