"""CUDA graphs without a GPU: the operations of a block of code on a tape, with the tensors that they read and write.

A CUDA graph is a list of kernel launches with the addresses that the kernels read and write. A tape is a list of PyTorch's
operations with the tensors that they read and write. What follows from that is the same for both:

    addresses           an operation writes, in every replay, into the tensors that it wrote into when it was recorded
    capturing           computes nothing: afterwards everything is as it was, and what was recorded has no value yet
    Python              does not run in a replay: what it decided in the capture is decided for good
    values              cannot be looked at in a capture (.item(), `if` on a tensor), for they are not there yet
    PyTorch's generator moves on with every replay; a generator of one's own is refused (a GPU wants it registered)

    graph = Graph()                 # torch.cuda.CUDAGraph()
    with capturing(graph):          # with torch.cuda.graph(graph):
        loss = step(batch)
    graph.replay()

What differs. A replay of the tape still calls PyTorch once for each operation: it saves the Python of the model and autograd, not
the launches. A tape keeps every tensor that it makes; a CUDA graph's memory pool hands the memory of those no longer in use to
others. A tape is stricter about `torch.tensor(3.0)`, which a GPU refuses with device="cuda" alone. Code that is compiled, other
threads and collectives are not for it.
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

ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")  # memory, and nothing to compute
READING_FUNCTIONS = {Tensor.tolist: ".tolist()", Tensor.numpy: ".numpy()", Tensor.cpu: ".cpu()", Tensor.__array__: "NumPy"}


@dataclass(frozen=True)
class Call:
    """One operation: what is called with what, and the new tensors that it made."""

    operation: Any                                   # a torch._ops.OpOverload, such as aten.mm.default
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    new_tensors: dict[int, Tensor]                   # by its place among what is returned, in memory of their own

    @property
    def name(self) -> str:
        """Such as `mm`; in place, `add_`."""
        return str(self.operation.overloadpacket.__name__)

    def repeat(self) -> None:
        """Do the same once more, to the same tensors."""
        results = tree_leaves(self.operation(*self.arguments, **self.keywords))
        for place, old in self.new_tensors.items():
            old.copy_(results[place])

    def fast_repeat(self) -> Callable[..., Any]:
        """`repeat` in its quickest form: PyTorch's own variant that writes into given tensors, where there is one."""
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
    """Names and types of an operation's arguments, those aside that it writes results into."""
    return [(argument.name, str(argument.type)) for argument in operation._schema.arguments if not argument.is_out]


class Graph:
    """A tape: filled by `capturing`, played by `replay`."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.operations: list[Callable[..., Any]] = []     # the same, ready to be called

    def replay(self) -> None:
        """Do everything again that is on the tape, on what lies now where it was read."""
        if not self.calls:
            raise CourseError("there is nothing to replay: capture something first, `with capturing(graph):`")
        with torch.inference_mode():                 # without autograd, which has done its part in the capture
            for again in self.operations:
                again()

    @property
    def bytes(self) -> int:
        """Of all tensors that the tape made, and keeps as long as it lives."""
        return sum(tensor.untyped_storage().nbytes() for call in self.calls for tensor in call.new_tensors.values())


@contextmanager
def capturing(graph: "Graph | torch.cuda.CUDAGraph") -> Iterator[None]:
    """What happens inside the block goes into the graph instead of happening.

    Raises `CourseError` on a tape, and a GPU `RuntimeError`, for what cannot be captured.
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
    """Sees every operation below autograd, of forward pass, backward pass and optimizer alike."""

    def __init__(self, graph: Graph):
        super().__init__()
        self.graph = graph
        self.own_memory: set[int] = set()                   # memory that was made on the tape
        self.overwritten: list[tuple[Tensor, Tensor]] = []            # what was written over, and the values that it had

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
        """Give everything its values back; what the tape made gets NaN, for it has not been computed."""
        with torch.no_grad():
            for tensor, values in reversed(self.overwritten):
                tensor.copy_(values)
            for call in self.graph.calls:
                for tensor in call.new_tensors.values():
                    if tensor.is_floating_point():
                        tensor.fill_(torch.nan)


class RefuseReading(TorchFunctionMode):
    """Refuses ways of reading a tensor that are no operations."""

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if function in READING_FUNCTIONS:
            raise CourseError(f"{READING_FUNCTIONS[function]} reads values in a capture, where they are not there yet: compute "
                              "with tensors, and read after a replay")
        return function(*args, **(kwargs or {}))


def check_capturable(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A `CourseError` for what no graph can hold."""
    name, tags = operation.overloadpacket.__name__, operation.tags
    if torch.Tag.data_dependent_output in tags:
        what = "an `if`, a float(), an index or .item()" if name == "_local_scalar_dense" else f"torch.{name}"
        raise CourseError(f"Python looked at the value of a tensor ({what}) in a capture, where it is not there yet: compute "
                          "both outcomes and choose with torch.where, or read after a replay")
    masked = any(tensor.dtype in (torch.bool, torch.uint8) for tensor in find_tensors(args[1:]))
    if torch.Tag.dynamic_output_shape in tags and (masked or name != "index"):
        raise CourseError(f"the shape of the result of {name} depends on values, and in a graph every shape is decided: keep all "
                          "elements, and give those that do not count the weight 0")
    if name == "lift_fresh":
        raise CourseError("torch.tensor(...) copies from the host's memory, which a graph does not hold on to: make it before "
                          "the capture, or fill on the device, torch.full((), ...)")
    if kwargs.get("generator") is not None:
        raise CourseError("a generator of your own does not move on with replays: draw from PyTorch's, or compute random numbers "
                          "from a counter that is a tensor")


def written_tensors(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that an operation writes into."""
    arguments = operation._schema.arguments
    values = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    return [tensor for argument in arguments if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in find_tensors(values.get(argument.name))]


def find_tensors(values: Any) -> list[Tensor]:
    """Those among nested values."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def storage_id(tensor: Tensor) -> int:
    """Names the piece of memory that a tensor lies in, with all its views."""
    return int(tensor.untyped_storage()._cdata)


def new_graph(device: torch.device) -> "Graph | torch.cuda.CUDAGraph":
    """A CUDA graph for a GPU, a tape for a CPU."""
    return torch.cuda.CUDAGraph() if device.type == "cuda" else Graph()


def warming(device: torch.device) -> AbstractContextManager[None]:
    """For steps before a capture: on a GPU on a stream of their own, as the capture will be; on a CPU there are no streams."""
    return side_stream(device) if device.type == "cuda" else nullcontext()


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """On a stream of its own, after all that is under way, and before all that comes."""
    current, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)
