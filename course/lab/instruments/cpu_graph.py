"""Emulate CUDA graphs without a GPU: record a block's operations on a tape, with the tensors that they read and write.

A CUDA graph is a list of kernel launches with the addresses that the kernels read and write. A tape is a list of PyTorch
operations with the tensors that they read and write. So both behave in the same way:

    addresses           in every replay, an operation writes into the same tensors as during the capture
    capturing           computes nothing: afterwards old tensors are unchanged, and new ones have no values yet
    Python              does not run in a replay: its decisions during the capture are final
    values              cannot be read in a capture (.item(), `if` on a tensor), because they do not exist yet
    PyTorch's generator advances with every replay; other generators are refused (a GPU requires them to be registered)

    graph = Graph()                 # torch.cuda.CUDAGraph()
    with capturing(graph):          # with torch.cuda.graph(graph):
        loss = step(batch)
    graph.replay()

Differences: replaying a tape still calls PyTorch once per operation. It saves the model's Python and autograd, not the launches.
A tape keeps every tensor that it creates; a CUDA graph's memory pool reuses the memory of unused ones.
A tape always refuses `torch.tensor(3.0)`, a GPU only with device="cuda".
Tapes do not support compiled code, other threads or collectives.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course.utils.errors import CourseError

ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")  # only allocate, compute nothing
READING_FUNCTIONS = {Tensor.tolist: ".tolist()", Tensor.numpy: ".numpy()", Tensor.cpu: ".cpu()", Tensor.__array__: "NumPy",
                     Tensor.__dlpack__: "DLPack", Tensor.__repr__: "print"}


@dataclass(frozen=True)
class Call:
    """One recorded operation: its arguments and the new tensors that it created."""

    operation: Any                                   # a torch._ops.OpOverload, such as aten.mm.default
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    new_tensors: dict[int, Tensor]                   # position among the results -> tensor that is not a view

    @property
    def name(self) -> str:
        """The operation's name, such as `mm` or, in place, `add_`."""
        return str(self.operation.overloadpacket.__name__)

    def repeat(self) -> None:
        """Run the operation again, into the same tensors."""
        results = tree_leaves(self.operation(*self.arguments, **self.keywords))
        for place, old in self.new_tensors.items():
            old.copy_(results[place])

    def fast_repeat(self) -> Callable[..., Any]:
        """A faster `repeat`: PyTorch's out= variant, which writes into given tensors, if there is one."""
        if not self.new_tensors:
            return partial(self.operation, *self.arguments, **self.keywords)
        packet, wanted = self.operation.overloadpacket, signature(self.operation)
        for other in (getattr(packet, name) for name in packet.overloads()):
            targets = [argument.name for argument in other._schema.arguments if argument.is_out]
            if len(targets) == len(self.new_tensors) and signature(other) == wanted:
                return partial(other, *self.arguments, **self.keywords,
                               **dict(zip(targets, self.new_tensors.values(), strict=True)))
        return self.repeat


def signature(operation: Any) -> list[tuple[str, str]]:
    """(name, type) of an operation's arguments, without out= arguments."""
    return [(argument.name, str(argument.type)) for argument in operation._schema.arguments if not argument.is_out]


class Graph:
    """A tape: `capturing` records it, `replay` plays it."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.operations: list[Callable[..., Any]] = []     # the same, ready to call

    def replay(self) -> None:
        """Run all recorded operations again, on the current contents of their inputs."""
        if not self.calls:
            raise CourseError("there is nothing to replay: capture something first, `with capturing(graph):`")
        with torch.inference_mode():                 # autograd already ran during the capture
            for again in self.operations:
                again()

    @property
    def bytes(self) -> int:
        """Bytes of all tensors that the tape created, and keeps as long as it exists."""
        return sum(tensor.untyped_storage().nbytes() for call in self.calls for tensor in call.new_tensors.values())


@contextmanager
def capturing(graph: "Graph | torch.cuda.CUDAGraph") -> Iterator[None]:
    """Record the operations inside the block into the graph instead of running them.

    For what cannot be captured, a tape raises `CourseError`, and a GPU `RuntimeError`.
    """
    if not isinstance(graph, Graph):
        with torch.cuda.graph(graph):
            yield
        return
    graph.calls, drawn, recorder = [], torch.get_rng_state(), Recorder(graph)
    try:
        with RefuseReading(), recorder:
            yield
        graph.operations = [call.fast_repeat() for call in graph.calls]
    except BaseException:
        graph.calls = []
        raise
    finally:
        recorder.undo()
        torch.set_rng_state(drawn)


class Recorder(TorchDispatchMode):
    """Sees every operation below autograd: of the forward pass, the backward pass and the optimizer."""

    def __init__(self, graph: Graph):
        super().__init__()
        self.graph = graph
        self.own_memory: set[int] = set()                   # memory that the tape allocated
        self.overwritten: list[tuple[Tensor, Tensor]] = []            # overwritten tensors, and the values that they had

    def __torch_dispatch__(self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        check_capturable(operation, args, kwargs)
        for tensor in written_tensors(operation, args, kwargs):
            if storage_id(tensor) not in self.own_memory:
                self.overwritten.append((tensor.detach(), tensor.detach().clone()))
        returned = operation(*args, **kwargs)
        inputs = {storage_id(tensor) for tensor in find_tensors((args, kwargs))}
        outputs = {place: leaf.detach() for place, leaf in enumerate(tree_leaves(returned))
                if isinstance(leaf, Tensor) and storage_id(leaf) not in inputs}      # others are views, or written in place
        self.own_memory |= {storage_id(tensor) for tensor in outputs.values()}
        call = Call(operation, args, kwargs, outputs)
        if (outputs or operation._schema.is_mutable) and call.name not in ALLOCATIONS:
            self.graph.calls.append(call)
        return returned

    def undo(self) -> None:
        """Restore overwritten values. What the tape allocated gets NaN, because nothing has computed it."""
        with torch.no_grad():
            for tensor, values in reversed(self.overwritten):
                tensor.copy_(values)
            for call in self.graph.calls:
                for tensor in call.new_tensors.values():
                    if tensor.is_floating_point():
                        tensor.fill_(torch.nan)


class RefuseReading(TorchFunctionMode):
    """Refuses functions that read a tensor's values without an operation."""

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if function in READING_FUNCTIONS:
            raise CourseError(f"{READING_FUNCTIONS[function]} reads values in a capture, where they are not there yet: compute "
                              "with tensors, and read after a replay")
        return function(*args, **(kwargs or {}))


def reads_value(operation: Any) -> bool:
    """Whether the host gets a value of a tensor from this operation."""
    return torch.Tag.data_dependent_output in operation.tags


def has_dynamic_shape(operation: Any, args: tuple[Any, ...]) -> bool:
    """Whether the shape of an operation's result depends on values, so that the host has to wait for them."""
    masked = any(tensor.dtype in (torch.bool, torch.uint8) for tensor in find_tensors(args[1:]))
    return torch.Tag.dynamic_output_shape in operation.tags and (masked or operation.overloadpacket.__name__ != "index")


def check_capturable(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise `CourseError` for operations that no graph can contain."""
    name = operation.overloadpacket.__name__
    if reads_value(operation):
        what = "an `if`, a float(), an index or .item()" if name == "_local_scalar_dense" else f"torch.{name}"
        raise CourseError(f"Python looked at the value of a tensor ({what}) during a capture, before it has been computed: "
                          "compute both outcomes and choose with torch.where, or read after a replay")
    if has_dynamic_shape(operation, args):
        raise CourseError(f"the shape of the result of {name} depends on values, and in a graph every shape is fixed: keep all "
                          "elements, and give weight 0 to those that do not count")
    if name == "lift_fresh":
        raise CourseError("torch.tensor(...) copies from the host's memory, which a graph does not hold on to: make it before "
                          "the capture, or fill on the device, torch.full((), ...)")
    if kwargs.get("generator") is not None:
        raise CourseError("your own generator does not advance with replays: draw from PyTorch's, or compute random numbers "
                          "from a counter that is a tensor")


def written_tensors(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that an operation writes into."""
    arguments = operation._schema.arguments
    values = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    return [tensor for argument in arguments if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in find_tensors(values.get(argument.name))]


def find_tensors(values: Any) -> list[Tensor]:
    """The tensors among nested values."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def storage_id(tensor: Tensor) -> int:
    """An ID of a tensor's storage, which its views share."""
    return int(tensor.untyped_storage()._cdata)


def new_graph(device: torch.device) -> "Graph | torch.cuda.CUDAGraph":
    """A CUDA graph for a GPU, a tape for a CPU."""
    return torch.cuda.CUDAGraph() if device.type == "cuda" else Graph()


def warming(device: torch.device) -> AbstractContextManager[None]:
    """A context for warm-up steps before a capture: a side stream on a GPU, as in the capture; nothing on a CPU."""
    return side_stream(device) if device.type == "cuda" else nullcontext()


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Run the block on a separate stream, after all earlier work and before all later work of the current stream."""
    current, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)
