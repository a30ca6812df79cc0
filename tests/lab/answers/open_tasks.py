"""Answers to open tasks in other words than the library's: right ones, from a loop to an optimized one, with the levels that each
reaches and words of the hint for the next one, and wrong ones."""

LOOP = '''
import torch
import torch.distributed as dist

def run_schedule(passes, chunks, forward, axis, shape):
    """Everything is kept, and each message has a header."""
    last, inputs, outputs, losses, handles = axis.size * chunks - 1, {}, {}, [], []

    def receive(stage, kind):
        header = torch.empty(len(shape), dtype=torch.int64)
        dist.recv(header, axis.ranks[stage % axis.size], axis.group, 2 + (kind == "B"))
        tensor = torch.empty(*header.tolist(), dtype=torch.float64)
        dist.recv(tensor, axis.ranks[stage % axis.size], axis.group, kind == "B")
        return tensor

    def send(tensor, stage, kind):
        for part, tag in ((torch.tensor(tensor.shape), 2), (tensor.contiguous(), 0)):
            handles.append((dist.isend(part, axis.ranks[stage % axis.size], axis.group, tag + (kind == "B")), part))

    for work in passes:
        stage, name = work.chunk * axis.size + axis.rank, (work.chunk, work.micro)
        if work.kind == "F":
            x = receive(stage - 1, "F").requires_grad_() if stage > 0 else None
            inputs[name], outputs[name] = x, forward(*name, x)
            if stage < last:
                send(outputs[name].detach(), stage + 1, "F")
            else:
                losses.append(outputs[name].detach())
        else:
            grad = receive(stage + 1, "B") if stage < last else None
            torch.autograd.backward(outputs[name], grad)
            if stage > 0:
                send(inputs[name].grad, stage - 1, "B")
    [handle.wait() for handle, _ in handles]
    return losses
'''

POPPED = '''
import torch
import torch.distributed as dist
from course.parallel.pipeline_parallel.schedules import after, before

def run_schedule(passes, chunks, forward, axis, shape):
    """Each message is received when it is needed."""
    losses, kept, leaving = [], {}, []
    for work in passes:
        needs, to = (which(work, axis.rank, axis.size, chunks) for which in (before, after))
        tag, given = "FB".index(work.kind), None
        if needs:
            given = torch.zeros(tuple(shape), dtype=torch.double)
            dist.recv(given, axis.ranks[needs[0]], group=axis.group, tag=tag)
        if work.kind == "F":
            x = given if given is None else given.requires_grad_(True)
            y = forward(work.chunk, work.micro, x)
            kept[work] = x, y
            if to is None:
                losses.append(y.detach().clone())
            message = y.detach()
        else:
            x, y = kept.pop(type(work)("F", work.chunk, work.micro))
            y.backward(gradient=given)
            message = x.grad if x is not None else None
        if to is not None:
            leaving.append((message, dist.isend(message, axis.ranks[to], group=axis.group, tag=tag)))
    for message, handle in leaving:
        handle.wait()
    return losses
'''

AHEAD = '''
import torch
import torch.distributed as dist
from course.parallel.pipeline_parallel.schedules import after, before

class Mail:
    """Receives are posted a pass early, and sends leave by themselves."""
    def __init__(self, axis, chunks, shape):
        self.axis, self.chunks, self.shape, self.sent = axis, chunks, shape, []

    def post(self, work):
        source = before(work, self.axis.rank, self.axis.size, self.chunks)
        if source is None:
            return None, None
        buffer = torch.empty(*self.shape, dtype=torch.float64)
        return dist.irecv(buffer, self.axis.ranks[source[0]], self.axis.group, tag=self.tag(work)), buffer

    def send(self, work, tensor):
        to = after(work, self.axis.rank, self.axis.size, self.chunks)
        if to is not None:
            tensor = tensor.contiguous()
            self.sent.append((dist.isend(tensor, self.axis.ranks[to], self.axis.group, tag=self.tag(work)), tensor))

    def tag(self, work):
        return 1 if work.kind == "B" else 0

def run_schedule(passes, chunks, forward, axis, shape):
    mail, kept, losses = Mail(axis, chunks, shape), {}, []
    coming = mail.post(passes[0])
    for number, work in enumerate(passes):
        handle, buffer = coming
        if number + 1 < len(passes):
            coming = mail.post(passes[number + 1])
        if handle is not None:
            handle.wait()
        key = work.chunk, work.micro
        if work.kind == "F":
            x = None if buffer is None else buffer.requires_grad_()
            out = forward(*key, x)
            kept[key] = x, out
            if out.ndim:
                mail.send(work, out.detach())
            else:
                losses.append(out.detach())
        else:
            x, out = kept.pop(key)
            torch.autograd.backward([out], [buffer])
            if x is not None:
                mail.send(work, x.grad)
    for handle, _ in mail.sent:
        handle.wait()
    return losses
'''

REPLICATED = '''
import torch
import torch.distributed as dist
from torch.nn import functional as F
from course.parallel import mappings

class Whole(torch.autograd.Function):
    """All ranks' tokens; what follows is the same on every rank, so the gradient is cut."""
    @staticmethod
    def forward(ctx, x, axis, tokens):
        ctx.axis = axis
        return mappings.gather(x, 1, axis, tokens)

    @staticmethod
    def backward(ctx, grad):
        return mappings.shard(grad, 1, ctx.axis).contiguous(), None, None

class Own(torch.autograd.Function):
    """This rank's tokens; the gradient is put together."""
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis, ctx.tokens = axis, x.shape[1]
        return mappings.shard(x, 1, axis).clone()

    @staticmethod
    def backward(ctx, grad):
        return mappings.gather(grad.contiguous(), 1, ctx.axis, ctx.tokens), None

def parallel_block(x, weights, head_dim, axis, tokens):
    """Tensor parallel only: every rank has all tokens between the linears."""
    w = weights
    x = Whole.apply(x, axis, tokens)
    y = mappings.copy(F.layer_norm(x, (x.shape[-1],), w["norm1.weight"], w["norm1.bias"]), axis)
    q, k, v = (y @ w["qkv.weight"].T + w["qkv.bias"]).chunk(3, -1)
    q, k, v = (part.unflatten(-1, (-1, head_dim)).transpose(1, 2) for part in (q, k, v))
    y = torch.softmax(q @ k.transpose(-1, -2) / head_dim ** 0.5, -1) @ v
    x = x + mappings.reduce(y.transpose(1, 2).flatten(2) @ w["out.weight"].T, axis) + w["out.bias"]
    y = mappings.copy(F.layer_norm(x, (x.shape[-1],), w["norm2.weight"], w["norm2.bias"]), axis)
    y = F.gelu(y @ w["up.weight"].T + w["up.bias"])
    return Own.apply(x + mappings.reduce(y @ w["down.weight"].T, axis) + w["down.bias"], axis)
'''

GATHERED_FIRST = '''
from torch.nn import functional as F
from course.parallel import mappings

def parallel_block(x, weights, head_dim, axis, tokens):
    """Few bytes, but the norms run on all tokens."""
    w = {name: mappings.copy(weight, axis) if weight.dim() == 1 and name[:2] not in ("qk", "up") else weight
         for name, weight in weights.items()}

    def attention(y):
        qkv = F.linear(y, w["qkv.weight"], w["qkv.bias"])
        b, t, width = qkv.shape
        q, k, v = qkv.reshape(b, t, 3, width // 3 // head_dim, head_dim).permute(2, 0, 3, 1, 4)
        return F.linear(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, width // 3), w["out.weight"])

    def mlp(y):
        return F.linear(F.gelu(F.linear(y, w["up.weight"], w["up.bias"])), w["down.weight"])

    for norm, part, bias in (("norm1", attention, "out.bias"), ("norm2", mlp, "down.bias")):
        y = mappings.gather(x, 1, axis, tokens)
        y = F.layer_norm(y, y.shape[-1:], w[f"{norm}.weight"], w[f"{norm}.bias"])
        x = x + (mappings.scatter(part(y), 1, axis) + w[bias])
    return x
'''

FLAT = '''
import torch
from torch.nn import functional as F
from course.parallel import mappings

NAMES = ("norm1.weight", "norm1.bias", "out.bias", "norm2.weight", "norm2.bias", "down.bias")

def parallel_block(x, weights, head_dim, axis, tokens):
    """One all-reduce for the gradients of all small weights; attention by hand."""
    small = mappings.copy(torch.cat([weights[name] for name in NAMES]), axis).split(x.shape[-1])
    gain1, shift1, out_bias, gain2, shift2, down_bias = small

    def norm(x, gain, shift):
        return mappings.gather(F.layer_norm(x, x.shape[-1:]) * gain + shift, 1, axis, tokens)

    y = norm(x, gain1, shift1)
    q, k, v = torch.einsum("btd,fd->btf", y, weights["qkv.weight"]).add(weights["qkv.bias"]).chunk(3, -1)
    q, k, v = (part.unflatten(-1, (-1, head_dim)) for part in (q, k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * head_dim ** -0.5
    y = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)
    x = x + (mappings.scatter(y @ weights["out.weight"].t(), 1, axis) + out_bias)
    y = F.gelu(norm(x, gain2, shift2) @ weights["up.weight"].t() + weights["up.bias"])
    return x + (mappings.scatter(y @ weights["down.weight"].t(), 1, axis) + down_bias)
'''

UNSHARDED = '''
import torch
import torch.distributed as dist

class ShardedAdam:
    """One parameter after the other, with the whole state on every rank."""
    def __init__(self, parameters, lr, axis):
        self.parameters, self.axis = list(parameters), axis
        self.adam = torch.optim.Adam(self.parameters, lr=lr)

    def step(self):
        for p in self.parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad.clone()
            dist.all_reduce(p.grad, group=self.axis.group)
            p.grad /= self.axis.size
        self.adam.step()
'''

OWN_SHARE = '''
import torch
import torch.distributed as dist

class ShardedAdam:
    """The state is shared out, but the gradients are summed whole."""
    def __init__(self, parameters, lr, axis):
        self.parameters, self.lr, self.axis, self.t = list(parameters), lr, axis, 0
        n = sum(p.numel() for p in self.parameters)
        self.length = (n + axis.size - 1) // axis.size
        self.m = torch.zeros(self.length, dtype=torch.float64)
        self.v = torch.zeros(self.length, dtype=torch.float64)

    def step(self):
        with torch.no_grad():
            self.t += 1
            flat = torch.zeros(2, self.length * self.axis.size, dtype=torch.float64)
            place = 0
            for p in self.parameters:
                flat[0, place:place + p.numel()] = p.reshape(-1)
                if p.grad is not None:
                    flat[1, place:place + p.numel()] = p.grad.reshape(-1)
                place += p.numel()
            dist.all_reduce(flat[1], group=self.axis.group)
            w, g = flat.view(2, self.axis.size, -1)[:, self.axis.rank]
            g = g / self.axis.size
            self.m = 0.9 * self.m + 0.1 * g
            self.v = 0.999 * self.v + 0.001 * g * g
            w = w - self.lr * (self.m / (1 - 0.9**self.t)) / ((self.v / (1 - 0.999**self.t)).sqrt() + 1e-8)
            pieces = [torch.empty_like(w) for _ in range(self.axis.size)]
            dist.all_gather(pieces, w, group=self.axis.group)
            whole, place = torch.cat(pieces), 0
            for p in self.parameters:
                p.copy_(whole[place:place + p.numel()].view(p.shape))
                place += p.numel()
'''

VIEWS = '''
import torch
import torch.distributed as dist

class ShardedAdam:
    """The parameters become views of one flat tensor, of which a rank updates its piece in place."""
    def __init__(self, parameters, lr, axis):
        self.parameters, self.axis = list(parameters), axis
        sizes = [p.numel() for p in self.parameters]
        self.flat = torch.zeros(sum(sizes) + -sum(sizes) % axis.size, dtype=torch.float64)
        self.views = []
        for p, part in zip(self.parameters, self.flat[:sum(sizes)].split(sizes)):
            part.copy_(p.detach().flatten())
            p.data = part.view_as(p)
        self.mine = self.flat.tensor_split(axis.size)[axis.rank]
        self.adam = torch.optim.Adam([self.mine], lr=lr)

    def step(self):
        grads = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in self.parameters]
        grads.append(torch.zeros(self.flat.numel() - sum(g.numel() for g in grads), dtype=torch.float64))
        self.mine.grad = torch.empty_like(self.mine)
        dist.reduce_scatter_tensor(self.mine.grad, torch.cat(grads), group=self.axis.group)
        self.mine.grad /= self.axis.size
        self.adam.step()
        self.mine.grad = None
        dist.all_gather_into_tensor(self.flat, self.mine.clone(), group=self.axis.group)
'''

AFTERWARDS = '''
import torch
import torch.distributed as dist

class DataParallel:
    """All gradients in one all-reduce, after the last backward pass."""
    def __init__(self, parameters, axis, bucket_bytes):
        self.parameters, self.axis = [p for p in parameters if p.requires_grad], axis

    def backward(self, loss, last=True):
        loss.backward()
        if last:
            for p in self.parameters:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
            flat = torch.cat([p.grad.reshape(-1) for p in self.parameters])
            dist.all_reduce(flat, group=self.axis.group)
            flat = flat / self.axis.size
            for p in self.parameters:
                p.grad.copy_(flat[:p.numel()].view_as(p))
                flat = flat[p.numel():]
'''

ONE_BY_ONE = '''
import torch
import torch.distributed as dist

class DataParallel:
    """Each gradient travels alone, from the last parameter to the first."""
    def __init__(self, parameters, axis, bucket_bytes):
        self.axis = axis
        self.queue = [p for p in parameters if p.requires_grad][::-1]
        for place, p in enumerate(self.queue):
            p.register_post_accumulate_grad_hook(lambda p, place=place: self.hear(place))

    def hear(self, place):
        self.there[place] = True
        while self.last and len(self.works) < len(self.queue) and self.there[len(self.works)]:
            self.send()

    def send(self):
        p = self.queue[len(self.works)]
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        self.works.append(dist.all_reduce(p.grad, op=dist.ReduceOp.SUM, group=self.axis.group, async_op=True))

    def backward(self, loss, last=True):
        self.last, self.works, self.there = last, [], [False] * len(self.queue)
        loss.backward()
        while last and len(self.works) < len(self.queue):
            self.send()
        for work, p in zip(self.works, self.queue):
            work.wait()
            p.grad.div_(self.axis.size)
'''

IN_PLACE = '''
import torch
import torch.distributed as dist

class Bucket:
    def __init__(self, parameters):
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
        pieces = self.flat.split([p.numel() for p in parameters])
        self.views = {p: piece.view(p.shape) for p, piece in zip(parameters, pieces)}

    def take(self, p):
        view = self.views[p]
        if p.grad is None:
            view.zero_()
        elif p.grad is not view:
            view.copy_(p.grad)
        p.grad = view

class DataParallel:
    """Buckets live from step to step. Each gradient moves into its bucket when it comes."""
    def __init__(self, parameters, axis, bucket_bytes):
        self.axis, self.buckets, self.home, held = axis, [], {}, []
        for p in [p for p in parameters if p.requires_grad][::-1]:
            if held and sum(q.numel() for q in held) + p.numel() > bucket_bytes // 8:
                self.buckets.append(Bucket(held))
                held = []
            held.append(p)
            p.register_post_accumulate_grad_hook(self.ready)
        self.buckets.append(Bucket(held))
        self.home = {p: bucket for bucket in self.buckets for p in bucket.views}
        self.last = False

    def ready(self, p):
        self.home[p].take(p)
        if self.last:
            self.counts[self.home[p]] -= 1
            self.start(lambda bucket: self.counts[bucket] == 0)

    def start(self, may):
        while len(self.works) < len(self.buckets) and may(self.buckets[len(self.works)]):
            bucket = self.buckets[len(self.works)]
            for p in bucket.views:
                bucket.take(p)
            self.works.append(dist.all_reduce(bucket.flat.div_(self.axis.size), group=self.axis.group, async_op=True))

    def backward(self, loss, last=True):
        self.last, self.works, self.counts = last, [], {bucket: len(bucket.views) for bucket in self.buckets}
        loss.backward()
        if last:
            self.start(lambda bucket: True)
            for work in self.works:
                work.wait()
'''

GATHERED = '''
import torch
import torch.distributed as dist
from course.parallel import mappings

class CausalAttention(torch.autograd.Function):
    """All keys and values on every rank."""
    @staticmethod
    def forward(ctx, q, k, v, axis, lengths):
        k, v = (mappings.all_gather(x, 2, axis, sum(lengths)) for x in (k, v))
        place = torch.arange(sum(lengths))
        ctx.mine = slice(sum(lengths[:axis.rank]), sum(lengths[:axis.rank + 1]))
        hidden = place > place[ctx.mine, None]
        p = torch.softmax((q @ k.transpose(2, 3) / q.shape[3]**0.5).masked_fill(hidden, -torch.inf), 3)
        ctx.save_for_backward(q, k, v, p)
        ctx.axis = axis
        return p @ v

    @staticmethod
    def backward(ctx, g):
        q, k, v, p = ctx.saved_tensors
        dp = g @ v.transpose(2, 3)
        ds = p * (dp - (p * dp).sum(3, keepdim=True)) / q.shape[3]**0.5
        both = torch.stack([ds.transpose(2, 3) @ q, p.transpose(2, 3) @ g])
        dist.all_reduce(both, group=ctx.axis.group)
        dk, dv = both[:, :, :, ctx.mine]
        return ds @ k, dk.clone(), dv.clone(), None, None
'''

CLOSED = '''
import torch
import torch.distributed as dist

def shift(x, length, axis):
    """What the rank on the left has, while mine goes to the right."""
    coming = x.new_empty(*x.shape[:3], length, x.shape[4])
    sending = dist.isend(x, axis.ranks[(axis.rank + 1) % axis.size], axis.group)
    dist.recv(coming, axis.ranks[axis.rank - 1], axis.group)
    sending.wait()
    return coming

class CausalAttention(torch.autograd.Function):
    """A whole ring: also ranks that need nothing pass everything on, and gradients go round with their keys."""
    @staticmethod
    def scores(q, k, own):
        s = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
        return s.masked_fill(torch.ones(s.shape[2:], dtype=torch.bool).triu(1), float("-inf")) if own else s

    @staticmethod
    def forward(ctx, q, k, v, axis, lengths):
        pair, total, top, out = torch.stack([k, v]), 0, -torch.inf, 0
        for turn in range(axis.size):
            source = (axis.rank - turn) % axis.size
            if source <= axis.rank:
                s = CausalAttention.scores(q, pair[0], turn == 0)
                new = s.amax(-1, keepdim=True).clamp(min=top)
                old = (top - new).exp() if turn else 0
                total, out = total * old + (s - new).exp().sum(-1, keepdim=True), out * old + (s - new).exp() @ pair[1]
                top = new
            pair = shift(pair, lengths[source - 1], axis)
        ctx.save_for_backward(q, k, v, out / total, top + total.log())
        ctx.axis, ctx.lengths = axis, lengths
        return out / total

    @staticmethod
    def backward(ctx, g):
        q, k, v, out, lse = ctx.saved_tensors
        axis, lengths, pair, dq = ctx.axis, ctx.lengths, torch.stack([k, v]), 0
        grads = torch.zeros_like(pair)
        for turn in range(axis.size):
            source = (axis.rank - turn) % axis.size
            if source <= axis.rank:
                p = (CausalAttention.scores(q, pair[0], turn == 0) - lse).exp()
                ds = p * (g @ pair[1].mT - (g * out).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
                dq = dq + ds @ pair[0]
                grads[0] += ds.mT @ q
                grads[1] += p.mT @ g
            pair, grads = (shift(x, lengths[source - 1], axis) for x in (pair, grads))
        return dq, grads[0], grads[1], None, None
'''

DIRECT = '''
import torch
import torch.distributed as dist

class CausalAttention(torch.autograd.Function):
    """Each rank sends its keys and values straight to all ranks after it."""
    @staticmethod
    def blocks(q, k, v, axis, lengths):
        """(source, keys, values, scores); the next ones arrive meanwhile."""
        pair = torch.stack([k, v])
        sending = [dist.isend(pair, axis.ranks[rank], axis.group) for rank in range(axis.rank + 1, axis.size)]
        for source in reversed(range(axis.rank + 1)):
            if source:
                coming = torch.empty(2, *k.shape[:2], lengths[source - 1], k.shape[3], dtype=k.dtype)
                handle = dist.irecv(coming, axis.ranks[source - 1], axis.group)
            scores = q @ pair[0].mT / q.shape[3] ** 0.5
            if source == axis.rank:
                places = torch.arange(q.shape[2])
                scores = torch.where(places[:, None] >= places, scores, -torch.inf)
            yield source, *pair, scores
            if source:
                handle.wait()
                pair = coming
        for handle in sending:
            handle.wait()

    @staticmethod
    def forward(ctx, q, k, v, axis, lengths):
        out, lse = None, None
        for source, keys, values, scores in CausalAttention.blocks(q, k, v, axis, lengths):
            part, new = scores.softmax(-1) @ values, scores.logsumexp(-1, keepdim=True)
            if out is None:
                out, lse = part, new
            else:
                share = torch.sigmoid(new - lse)
                out, lse = out + share * (part - out), torch.logaddexp(lse, new)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.where = axis, lengths
        return out

    @staticmethod
    def backward(ctx, g):
        q, k, v, out, lse = ctx.saved_tensors
        axis, lengths = ctx.where
        delta, dq, leaving = (g * out).sum(-1, keepdim=True), torch.zeros_like(q), []
        for source, keys, values, scores in CausalAttention.blocks(q, k, v, axis, lengths):
            p = torch.exp(scores - lse)
            ds = p * (g @ values.mT - delta) / q.shape[3] ** 0.5
            dq += ds @ keys
            grads = torch.stack([ds.mT @ q, p.mT @ g])
            if source == axis.rank:
                mine = grads
            else:
                leaving.append((dist.isend(grads, axis.ranks[source], axis.group), grads))
        for rank in range(axis.rank + 1, axis.size):
            more = torch.empty_like(mine)
            dist.recv(more, axis.ranks[rank], axis.group)
            mine = mine + more
        for handle, _ in leaving:
            handle.wait()
        return dq, *mine, None, None
'''

RIGHT: dict[str, str] = {}
ALL = ("correct", "byte budget", "memory budget", "overlapped")
SCORED = [
    ("data-parallel", AFTERWARDS, ("correct", "byte budget"), "a second copy of all gradients"),
    ("data-parallel", ONE_BY_ONE, ("correct", "memory budget", "overlapped"), "pays the latency"),
    ("data-parallel", IN_PLACE, ("correct", "byte budget", "memory budget", "overlapped"), ""),
    ("causal-attention", GATHERED, ("correct",), "more is sent than later ranks need"),
    ("causal-attention", CLOSED, ("correct", "memory budget"), "more is sent than later ranks need"),
    ("causal-attention", DIRECT, ALL, ""),
    ("run-schedule", LOOP, ("correct",), "activations live longer"),
    ("run-schedule", POPPED, ("correct", "byte budget", "memory budget"), "a receive is posted only"),
    ("run-schedule", AHEAD, ALL, ""),
    ("parallel-block", REPLICATED, ("correct",), "more is sent than the block needs"),
    ("parallel-block", GATHERED_FIRST, ("correct", "byte budget"), "the norm runs on all tokens"),
    ("parallel-block", FLAT, ("correct", "byte budget", "memory budget"), ""),
    ("sharded-adam", UNSHARDED, ("correct", "byte budget"), "keeps more than the parameters"),
    ("sharded-adam", OWN_SHARE, ("correct", "memory budget"), "a reduce-scatter sends half"),
    ("sharded-adam", VIEWS, ("correct", "byte budget", "memory budget"), ""),
]

WRONG = [
    ("causal-attention", GATHERED.replace("        dist.all_reduce(both, group=ctx.axis.group)\n", ""), ""),
    ("causal-attention", DIRECT.replace("            if source == axis.rank:\n                places", "            if True:\n"
                                        "                places")
     .replace("places[:, None] >= places,", "places[:, None] >= torch.arange(scores.shape[3]),"), ""),
    ("data-parallel", IN_PLACE.replace("            view.zero_()\n", "            pass\n"), ""),
    ("data-parallel", ONE_BY_ONE.replace("        self.there[place] = True\n",
                                         "        self.there[place] = True\n"
                                         "        self.queue[place].grad.div_(self.axis.size)\n")
     .replace("            p.grad.div_(self.axis.size)\n", ""), ""),
    ("data-parallel", AFTERWARDS.replace("], axis\n", "], axis\n        from torch import nn\n"
                                         "        nn.parallel.DistributedDataParallel(nn.ParameterList(self.parameters))\n"),
     "write it with hooks"),
]
