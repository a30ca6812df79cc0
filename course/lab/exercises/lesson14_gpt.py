"""Lesson 14: a loss in chunks, a vocabulary over ranks, and Megatron's token files.

`LossInChunks` and `document` are the answers to the exercises written inside a cell of the lesson.
"""

import mmap
import tempfile
from contextlib import chdir
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.flop_counter import FlopCounterMode

from course import config
from course.data.text import indexed_files
from course.data.text.indexed_files import Index
from course.lab.checks import random_inputs, return_values, tiny_training
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.checks.return_values import InvalidReturn
from course.lab.exercises.lesson10_tensor_parallel import MORE
from course.lab.instruments.bytes_sent import Traffic, collectives, piece_bytes, within_budget
from course.lab.instruments.tensor_memory import MemoryMeter
from course.lab.sandbox.limits import Limits
from course.parallel import build_mesh, join, mappings
from course.parallel.mesh import Axis
from course.parallel.tensor_parallel import vocabulary
from course.training import assemble
from course.utils.errors import CourseError

QUICK = Limits(seconds=60)
RANKS = Limits(seconds=150)                          # of which four have to start, on two cores perhaps
TINY = ["model.vocab=32", "model.context=8", "model.dim=16", "model.depth=1", "model.heads=4", "model.loss_chunk=5",
        "train.global_batch=3", "optim.name=sgd", "optim.momentum=0", "optim.lr=0.5", "optim.schedule=constant", "optim.warmup=0",
        "optim.clip=0", "precision=fp64", "parallel.data=naive", "parallel.overlap=none", "train.device=cpu"]
JOINED = {"cat": 0.5, "stack": 0.5}                  # how a tensor that is too large was made, where it was not computed at once
CHUNKS, SUMS = 10, 4                                 # tensors at a time: of a chunk's logits' size, of that of a gradient
FLOAT32 = 1e-5                                       # a few roundings of float32, in which the loss of 16-bit logits is taken


class LossInChunks(Function):
    """The sum of the tokens' cross-entropies, from features and output matrix, `size` tokens at a time.

    `LossInChunks.apply(x, weight, target, size)`: (N, D), (V, D), (N,) -> (). It keeps only the gradients of x and
    of weight for the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor, size: int) -> Tensor:
        """The loss; also compute the gradients here, chunk by chunk, while the logits are in memory."""
        total, of_x, of_weight = x.new_zeros(()), [], torch.zeros_like(weight)
        for rows, aims in zip(x.split(size), target.split(size), strict=True):
            column = aims[:, None]                                          # (n, 1)
            log = (rows @ weight.T).log_softmax(-1)                         # (n, V)
            total = total - log.gather(-1, column).sum()
            grad = log.exp().scatter_add(-1, column, -torch.ones_like(log[:, :1]))      # (n, V)
            of_x.append(grad @ weight)                                      # (n, D)
            of_weight += grad.T @ rows                                      # (V, D)
        ctx.save_for_backward(torch.cat(of_x), of_weight)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """The gradients of x and weight, from the gradient of the loss, a scalar."""
        of_x, of_weight = ctx.saved_tensors
        return of_x * grad, of_weight * grad, None, None


def draw_tokens(seed: int, hidden: bool) -> Tensors:
    """Features of tokens, a map to logits, targets, sizes of chunks, and the gradient of the loss.

    Chunks are many and small, so that what is kept of each adds up to far more than one of them needs.
    """
    generator = random_inputs.generator(seed)
    tokens, width, vocab = (420, 5, 130) if hidden else (400, 4, 110)
    return {"x": torch.randn(tokens, width, generator=generator, dtype=torch.float64),
            "weight": 2 * torch.randn(vocab, width, generator=generator, dtype=torch.float64),
            "target": torch.randint(vocab, (tokens,), generator=generator),
            "sizes": torch.tensor([30, 16, 4 if hidden else 3, tokens]),
            "grad": 0.5 + torch.rand((), generator=generator, dtype=torch.float64)}


def run_loss_in_chunks(inputs: Tensors) -> Tensors:
    """Loss and gradients with chunks of several sizes, and of large logits; the largest tensor, all at a time; what is left."""
    found: dict[str, list[Tensor]] = {"loss": [], "x": [], "weight": []}
    sparing, passing, light, early, kept = [], [], [], [], []
    for size in inputs["sizes"].tolist():
        x, weight = (inputs[name].clone().requires_grad_() for name in ("x", "weight"))
        target = inputs["target"].clone()
        with Traffic() as made, MemoryMeter() as meter:
            loss = LossInChunks.apply(x, weight, target, size)
            return_values.tensor(loss, "forward", (), torch.float64)
            passing.append(float(meter.peak <= 8 * (CHUNKS * size * len(weight) + SUMS * (x.numel() + weight.numel()))))
            light.append(float(meter.now <= 8 * (x.numel() + weight.numel() + 2 * len(x))))
            with FlopCounterMode(display=False) as counter:
                loss.backward(inputs["grad"])
            early.append(float(counter.get_total_flops() == 0))
        for name, tensor in (("loss", loss.detach()), ("x", gradient_of(x)), ("weight", gradient_of(weight))):
            found[name].append(tensor)
        kept.append(float(all(inputs[name].equal(given) for name, given in zip(("x", "weight", "target"), (x, weight, target),
                                                                               strict=True))))
        sparing.append(1.0 if made.largest <= max(size * len(weight), x.numel(), weight.numel()) else JOINED.get(made.by, 0.0))
    large = LossInChunks.apply(1e4 * inputs["x"], inputs["weight"], inputs["target"], int(inputs["sizes"][0]))
    return {name: torch.stack(each) for name, each in found.items()} | {
        "large": large.detach().nan_to_num(torch.inf, torch.inf), "sparing": torch.tensor(sparing).amin(),
        "passing": torch.tensor(passing), "light": torch.tensor(light).amin(), "early": torch.tensor(early).amin(),
        "kept": torch.tensor(kept).amin()}


def gradient_of(x: Tensor) -> Tensor:
    """A tensor's gradient, zeros where it has none."""
    return torch.zeros_like(x) if x.grad is None else x.grad


def draw_vocabulary(seed: int, hidden: bool) -> Tensors:
    """Tokens of a vocabulary that two ranks and four can share, some of every rank's, with rows, logits and gradients."""
    generator = random_inputs.generator(seed)
    vocab, shape = (24, (3, 9)) if hidden else (16, (2, 8))
    tokens = torch.randint(vocab, shape, generator=generator)
    tokens[0, :8] = torch.arange(8) * vocab // 8 + torch.randint(vocab // 8, (8,), generator=generator)

    normal = partial(random_inputs.normal, generator)
    return {"tokens": tokens, "rows": normal(vocab, 6), "grad": normal(*shape, 6), "logits": 3 * normal(*shape, vocab),
            "losses": normal(*shape), "text": torch.randint(32, (2, 3, 9), generator=generator),
            "seed": torch.tensor(random_inputs.number(seed))}


def my_axes() -> tuple[Axis, Axis]:
    """A tensor-parallel axis of two ranks, of which four ranks have two, that have to be named; and the axis along these."""
    world = join("cpu")
    mesh = build_mesh(config.Parallel(dp=world.size // 2, tp=2), world)
    return mesh.tp, mesh.dp


def train_on(inputs: Tensors, *overrides: str) -> Tensors:
    """Two steps of the library's training on all ranks as one tensor-parallel axis: losses, and this rank's weights."""
    c = config.load("gpt-demo", [*TINY, f"parallel.tp={dist.get_world_size()}", f"train.seed={int(inputs['seed'])}", *overrides])
    training = assemble.assemble(c, build_mesh(c.parallel, join("cpu")))
    losses = [training.step({"tokens": tokens, "sample": torch.arange(3)})[0] for tokens in inputs["text"]]
    training.gradients.wait_parameters()
    return {"trained": torch.stack(losses).detach(), "weights": tiny_training.flat_parameters(training.model)}


def run_vocabulary_embedding(inputs: Tensors) -> Tensors:
    """The vectors of drawn tokens, the gradient of this rank's rows, and models trained without and with sequence parallelism."""
    (axis, _), tokens = my_axes(), inputs["tokens"].clone()
    module = vocabulary.VocabularyEmbedding(embedding_of(mappings.shard(inputs["rows"], 0, axis)), axis)
    vectors = return_values.tensor(module(tokens), "VocabularyEmbedding.forward", tuple(inputs["grad"].shape), torch.float64)
    if vectors.requires_grad:
        vectors.backward(inputs["grad"])
    found = {"vectors": vectors.detach(), "gradient": gradient_of(module.weight),
             "kept": torch.tensor(float(tokens.equal(inputs["tokens"]))), "sent": bytes_of_few_lookups(inputs)}
    sequence = {f"sp_{name}": value for name, value in train_on(inputs, "parallel.sp=true").items()}
    return found | train_on(inputs) | sequence


def embedding_of(rows: Tensor) -> nn.Embedding:
    """An embedding of this rank's rows of the vocabulary, (V / tp, D)."""
    return nn.Embedding.from_pretrained(rows.clone(), freeze=False)


def bytes_of_few_lookups(inputs: Tensors) -> Tensor:
    """Whether the vectors of a few tokens cost the bytes of these and no more, over all ranks, forward and backward."""
    world, tokens = join("cpu"), inputs["tokens"][:, :2]
    axis = build_mesh(config.Parallel(tp=world.size), world).tp
    module = vocabulary.VocabularyEmbedding(embedding_of(mappings.shard(inputs["rows"], 0, axis)), axis)
    with Traffic() as forward:
        vectors = module(tokens)
    with Traffic() as backward:
        if vectors.requires_grad:
            vectors.sum().backward()
    return within_budget((forward, 2 * piece_bytes(vectors, -1, axis.size)), (backward, 0))


def run_vocabulary_loss(inputs: Tensors) -> Tensors:
    """Losses and gradients of drawn logits, of large ones and of 16-bit ones; numbers that are exchanged; a model trained."""
    (axis, groups), target = my_axes(), inputs["tokens"]

    def loss(logits: Tensor) -> tuple[Tensor, Tensor, bool]:
        logits = logits.roll(groups.rank, 0)         # another group has other ones, and so other maxima
        mine = mappings.shard(logits, -1, axis).detach().clone().requires_grad_()
        before = mine.detach().clone()
        values = vocabulary.VocabularyCrossEntropy(axis)(mine, target)
        kind = torch.promote_types(logits.dtype, torch.float32)
        return_values.tensor(values, "losses_and_softmax", tuple(target.shape), kind, " as the losses")
        if values.requires_grad:
            values.backward(inputs["losses"].to(kind))
        return values.detach(), gradient_of(mine), torch.equal(mine.detach(), before)

    (values, gradient, kept), calls = collectives(lambda: loss(inputs["logits"]))
    large, of_large, _ = loss(1e4 * inputs["logits"])
    narrow = torch.stack([loss(inputs["logits"].to(kind))[0] for kind in (torch.bfloat16, torch.float16)])
    numbers = sum(call.bytes for call in calls) / 8 / target.numel()
    thrifty = 1.0 if numbers <= 3 else 0.5 if numbers < inputs["logits"].shape[-1] / 2 else 0.0     # a few more, or whole logits
    return {"values": values, "gradient": gradient, "large": torch.cat([large, of_large.flatten(1)], 1), "narrow": narrow,
            "numbers": torch.tensor(thrifty), "kept": torch.tensor(float(kept)), **train_on(inputs)}


def draw_files(seed: int, hidden: bool) -> Tensors:
    """Token files: the code of the kind of number, the bytes a sequence at the end, lengths, documents, tokens."""
    rng = np.random.default_rng(seed)
    found: Tensors = {}
    for number, code in enumerate((4, 8, 1, 5, 3) if hidden else (4, 8, 5)):
        lengths = rng.integers(0, 12, rng.integers(9, 12) + 4 * hidden)
        lengths[[0, -1]] = 5, 7                                         # not all empty
        cuts = np.sort(rng.integers(1, len(lengths), rng.integers(3, 6)))
        cuts = np.sort([*cuts, cuts[1], len(lengths)])                  # documents of nothing: in the middle, and the last one
        most = np.iinfo(indexed_files.DTYPES[code]).max
        tokens = rng.integers(min(most, 2**31) // 2, min(most, 2**31), lengths.sum())
        found |= {f"{name}{number}": torch.from_numpy(np.asarray(value, np.int64)) for name, value in (
            ("code", [code, number % 2]), ("lengths", lengths), ("documents", [0, *cuts, len(lengths)]), ("tokens", tokens))}
    return found


def bytes_of(inputs: Tensors, number: int) -> tuple[bytes, bytes]:
    """The .idx and the .bin of a drawn file; every second one has a byte a sequence more at the end, as multimodal data has."""
    (code, extra), lengths, documents, tokens = (inputs[f"{name}{number}"].numpy() for name in
                                                 ("code", "lengths", "documents", "tokens"))
    kind = np.dtype(indexed_files.DTYPES[int(code)]).newbyteorder("<")
    pointers = (np.cumsum(lengths) - lengths) * kind.itemsize
    head = indexed_files.HEADER.pack(indexed_files.MAGIC, indexed_files.VERSION, int(code), len(lengths), len(documents))
    index = head + lengths.astype("<i4").tobytes() + pointers.astype("<i8").tobytes() + documents.astype("<i8").tobytes()
    return index + bytes(len(lengths)) * int(extra), tokens.astype(kind).tobytes()


def run_read_index(inputs: Tensors) -> Tensors:
    """What is read of every drawn file, and which of its damaged copies are refused."""
    found: dict[str, list[Any]] = {name: [] for name in ("kind", "lengths", "pointers", "documents", "tokens", "mapped",
                                                      "refused")}
    with tempfile.TemporaryDirectory() as folder, chdir(folder):        # whose name is in no message, which is compared
        for number in range(sum(name.startswith("code") for name in inputs)):
            index, tokens = bytes_of(inputs, number)
            prefix = Path(f"text{number}")
            prefix.with_suffix(".idx").write_bytes(index)
            prefix.with_suffix(".bin").write_bytes(tokens)
            read = parts(indexed_files.read_index(prefix.with_suffix(".idx")))
            found["mapped"] += [float(mapped(part)) for part in read[1:]]
            found["kind"] += [ord(read.dtype.kind), read.dtype.itemsize]
            for name in ("lengths", "pointers", "documents"):
                found[name] += getattr(read, name).tolist()
            found["tokens"] += all_tokens(prefix)
            found["refused"] += [float(refused(Path("damaged.idx"), raw)) for raw in damaged(index)]
            found["refused"].append(float(refused(Path("absent.idx"), None)))
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in found.items()}


def all_tokens(prefix: Path) -> list[int]:
    """The tokens of all documents, -1 after each; -2 where the library refuses the index, -3 where it cannot work with it."""
    try:
        documents = indexed_files.Documents(prefix)
        return [token for i in range(len(documents)) for token in (*documents[i].tolist(), -1)]
    except CourseError:
        return [-2]
    except Exception:                                # a wrong index may lead anywhere
        return [-3]


def parts(value: Any) -> Index:
    """The index that was returned, its parts as NumPy has them."""
    if not isinstance(value, tuple) or len(value) != 4:
        raise InvalidReturn(f"`read_index` returned {return_values.describe_value(value)}; expected an `Index`",
                                return_values.choose_cure(value, "return Index(dtype, lengths, pointers, documents)"))
    try:
        return Index(np.dtype(value[0]), *map(np.asarray, value[1:]))               # a view, if it is an array
    except TypeError:
        raise InvalidReturn(f"`read_index` returned {return_values.describe_value(value[0])} as the dtype; one of NumPy's is "
                            "wanted",
                                "np.dtype(DTYPES[code])") from None


def mapped(array: np.ndarray) -> bool:
    """Whether an array lies in a file that is mapped into memory."""
    memory: Any = array
    while memory is not None and not isinstance(memory, mmap.mmap):
        memory = memory.obj if isinstance(memory, memoryview) else getattr(memory, "base", None)
    return memory is not None


def damaged(index: bytes) -> list[bytes]:
    """Copies of a good .idx that are none: of another format, another version, fractions, cut off, and too long."""
    def changed(at: int, value: int) -> bytes:
        return index[:at] + bytes([value]) + index[at + 1:]

    return [changed(0, ord("X")), changed(9, 2), changed(17, 6), index[:20], index[:-3], index + bytes(5)]


def refused(path: Path, raw: bytes | None) -> bool:
    """Whether a file with these bytes (None: no file) gets a `CourseError`."""
    if raw is not None:
        path.write_bytes(raw)
    try:
        indexed_files.read_index(path)
    except CourseError:
        return True
    except Exception:                                # an error of another kind tells nobody what to do
        return False
    return False


def document(index: Index, tokens: np.ndarray, i: int) -> np.ndarray:
    """The tokens of document i, (n,). `tokens` is the whole .bin."""
    first, last = index.documents[i:i + 2]
    start = index.pointers[first] // index.dtype.itemsize if first < last else 0
    return tokens[start:start + index.lengths[first:last].sum()]


def run_one_document(inputs: Tensors) -> Tensors:
    """All documents of the drawn files, -1 after each, and how many tokens each has."""
    found: list[float] = []
    sizes: list[float] = []
    for number in range(sum(name.startswith("code") for name in inputs)):
        lengths, documents, tokens = (inputs[f"{name}{number}"].numpy() for name in ("lengths", "documents", "tokens"))
        kind = np.dtype(indexed_files.DTYPES[int(inputs[f"code{number}"][0])])
        pointers = (np.cumsum(lengths) - lengths) * kind.itemsize
        index = Index(kind, lengths.astype("i4"), pointers, documents)
        for i in range(len(documents) - 1):
            each = document(index, tokens.astype(kind), i)
            if not isinstance(each, np.ndarray) or each.dtype.kind not in "iu":
                told = f"an array of {each.dtype}" if isinstance(each, np.ndarray) else return_values.describe_value(each)
                raise InvalidReturn(f"`document` returned {told}; expected an array of whole numbers, a part of `tokens`",
                                        return_values.choose_cure(each, "return tokens[start:stop]"))
            found += [*each.astype(float).tolist(), -1.0]
            sizes.append(len(each))
    return {"sizes": torch.tensor(sizes, dtype=torch.float64), "documents": torch.tensor(found, dtype=torch.float64)}


def documents_asked(inputs: Tensors) -> dict[str, list[str]]:
    """Each document by its number and its sequences, and each of its tokens."""
    sizes, tokens = [], []
    for number in range(sum(name.startswith("code") for name in inputs)):
        lengths, documents = (inputs[f"{name}{number}"].tolist() for name in ("lengths", "documents"))
        for i, (first, last) in enumerate(pairwise(documents)):
            what = f"document {i} of file {number}, of the sequences {first} to {last} (that one not)"
            sizes.append(f"len of {what},")
            tokens += [f"token {place} of {what}," for place in range(sum(lengths[first:last]) + 1)]
    return {"sizes": sizes, "documents": tokens}


EXERCISES = [
    Exercise("loss-in-chunks", "14", (f"{__name__}.LossInChunks",), draw_tokens, run_loss_in_chunks, {
        "loss": "the loss is the sum of the tokens' cross-entropies, for any size of chunks",
        "x": "the gradient of x is right",
        "weight": "the gradient of weight is right",
        "large": "logits of 10,000 and more do not overflow",
        "sparing": "no tensor is larger than the logits of a chunk",
        "passing": "it frees what it makes for a chunk: memory never exceeds what a few chunks need",
        "light": "it keeps only the two gradients for the backward pass",
        "early": "the gradients are ready then: the backward pass multiplies no matrices",
        "kept": "it does not change x, weight and target"},
        flags={"sparing": "a tensor is larger than the logits of a chunk, x and weight",
               "passing": "with many small chunks it does: something of each chunk stays",
               "light": "more is alive after the forward pass than the gradients of x and weight",
               "early": "it does", "kept": "it changes some numbers"}, limits=QUICK, points=2),
    Exercise("vocabulary-embedding", "14",
             ("course.parallel.tensor_parallel.vocabulary.own", "course.parallel.tensor_parallel.vocabulary.VocabularyEmbedding"),
             draw_vocabulary, run_vocabulary_embedding, {
        "vectors": "every rank gets the vectors of all tokens",
        "gradient": "a rank's rows get the gradients of their tokens, added up",
        "kept": "it does not change the tokens",
        "sent": "for a few tokens, ranks send only what the sum of their vectors takes, and nothing backward",
        "trained": "the library trains a GPT with them: the losses of two steps are those of one process",
        "weights": "and so are the weights",
        "sp_trained": "with sequence parallelism, the losses are right",
        "sp_weights": "and so are the weights"},
        flags={"kept": "it changes some numbers", "sent": MORE}, sizes=(2, 4), limits=RANKS, points=2),
    Exercise("vocabulary-loss", "14",
             ("course.parallel.tensor_parallel.vocabulary.losses_and_softmax",
              "course.parallel.tensor_parallel.vocabulary.minus_target"),
             draw_vocabulary, run_vocabulary_loss, {
        "values": "every rank gets the losses of all tokens",
        "gradient": "the gradient of its columns of the logits is right",
        "large": "logits of 10,000 and more do not overflow",
        "narrow": "it computes the loss of 16-bit logits in float32",
        "numbers": "ranks exchange no more than three numbers a token",
        "kept": "it does not change the logits",
        "trained": "the library trains a GPT with it: the losses of two steps are those of one process",
        "weights": "and so are the weights"},
        flags={"numbers": "they exchange more", "kept": "it changes them"}, tolerance=FLOAT32,
        sizes=(2, 4), limits=RANKS, points=3),
    Exercise("read-index", "14", ("course.data.text.indexed_files.read_index",), draw_files, run_read_index, {
        "kind": "the dtype is the one in the header",
        "lengths": "the lengths are right",
        "pointers": "the pointers are right",
        "documents": "the documents are right, even if the file goes on after them",
        "tokens": "the library reads every document with it",
        "mapped": "lengths, pointers and documents are views of the mapped file",
        "refused": "it refuses damaged files with a `CourseError`"},
        flags={"mapped": "one of them was read or copied",
               "refused": "it read one as if it were whole, or raised an error that does not help a user: "
                          "`check_header` refuses them all"}, limits=QUICK, points=2),
    Exercise("one-document", "14", (f"{__name__}.document",), draw_files, run_one_document, {
        "sizes": "every document has as many tokens as its sequences have together",
        "documents": "and they are its own, for one sequence, several or none"}, cases=documents_asked, limits=QUICK),
]
