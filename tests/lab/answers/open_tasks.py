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

ONE_QUESTION_EACH = '''
import torch

def diagnose(start):
    """A training of its own for each question."""
    def samples(*rows):
        """Rows (latent, target, time, label) as a batch: latent and target are a number for each channel."""
        latent = torch.stack([torch.tensor(r[0], dtype=torch.float64).view(4, 1, 1).repeat(1, 4, 4) for r in rows])
        latent[:, :, 0, 0] *= -1
        target = torch.stack([torch.tensor(r[1], dtype=torch.float64).view(4, 1, 1).repeat(1, 4, 4) for r in rows])
        return (latent, latent + target, torch.tensor([float(r[2]) for r in rows]), torch.tensor([r[3] for r in rows]))

    x, zero, big = [1.0, -2, 3, 0.5], [0.0] * 4, [20.0, 0, 0, 0]
    teach = x, big, 300, 1

    def after(steps, *rows):
        run = start()
        for _ in range(steps):
            run(*samples(teach))
        return run(*samples(*rows))

    def differ(found):
        first, second = found["prediction"]
        return not torch.allclose(first, second, rtol=1e-6, atol=1e-9)

    if not after(1, teach)["average"].abs().sum() > 0:
        return "average frozen"
    if differ(after(1, (x, zero, 100, 0), (x, zero, 900, 4))):
        return "modulation not zero"
    if differ(after(1, (x, zero, 0, 2), (x, [9.0, 0, 0, 0], 0, 2))):
        return "schedule shifted"
    if not differ(after(2, (x, zero, 100, 0), (x, zero, 100, 4))):
        return "class dropped"
    if not differ(after(2, (x, zero, 100, 0), (x, zero, 900, 0))):
        return "time dropped"
    if after(1, (x, [20.0, 0, 2e-6, 0], 300, 1))["gradient"][2] == 0:
        return "gradients in e4m3"
    run = start()
    seen = [run(*samples((x, [size, 0, 0, 0], 300, 1)))["gradient"][0].item() for size in (20.0, 5e4, 5e4, 5e4)]
    return "scales frozen" if max(seen[2:]) < 100 * seen[1] else "none"
'''

TWO_TRAININGS = '''
import torch

def diagnose(start):
    g = torch.Generator().manual_seed(7)
    z = torch.rand(2, 4, 4, 4, generator=g).double()
    latent = z[[0, 0, 0, 1, 1]]
    time, label = torch.tensor([250, 250, 750, 0, 0]).double(), torch.tensor([3, 1, 3, 0, 0])
    push = torch.zeros(5, 4, 4, 4).double()
    push[3:, 3] = torch.tensor([10.0, 40.0]).double().view(2, 1, 1)
    run = start()
    found = [run(latent, latent + push, time, label) for _ in range(3)]
    gap = lambda step, i, j: (found[step]["prediction"][i] - found[step]["prediction"][j]).abs().max() > 1e-7
    again, tiny = start(), push.clone()
    tiny[3, 0] = 40e-7
    again(latent, latent + push, time, label)
    faint = again(latent, latent + tiny, time, label)
    jump = [again(latent, latent + 1000 * push, time, label)["gradient"][3] for _ in range(2)]
    signs = {
        "modulation not zero": gap(1, 0, 1), "schedule shifted": gap(1, 3, 4), "average frozen": found[2]["average"].norm() == 0,
        "gradients in e4m3": faint["gradient"][0] == 0, "scales frozen": jump[1] < 20 * jump[0],
        "class dropped": not gap(2, 0, 1), "time dropped": not gap(2, 0, 2)}
    return next((name for name, there in signs.items() if there), "none")
'''

THREE_STEPS = '''
import torch

SOUND = {"e4m3": False, "label": True, "time": True, "noise": False, "early": False, "average": True, "scale": True}
NAMES = {"e4m3": "gradients in e4m3", "label": "class dropped", "time": "time dropped", "noise": "schedule shifted",
         "early": "modulation not zero", "average": "average frozen", "scale": "scales frozen"}

def diagnose(start):
    """Everything that is seen, beside what a sound training shows."""
    run = start()
    latent = torch.linspace(-1, 1, 64, dtype=torch.float64).view(1, 4, 4, 4).repeat(5, 1, 1, 1)
    time, label = torch.tensor([0.0, 0.0, 0.0, 400.0, 400.0]), torch.tensor([4, 4, 4, 1, 2])
    time = torch.cat([time, torch.tensor([800.0])])
    label = torch.cat([label, torch.tensor([1])])
    latent = torch.cat([latent, latent[:1]])
    plans = [[25, 0, 0, 0], [25, 2.5e-6, 0, 5000], [0, 0, 0, 5000]]
    seen = []
    for plan in plans:
        noise = latent.clone()
        noise[0] += torch.tensor(plan, dtype=torch.float64).view(4, 1, 1)
        noise[1] += 2 * torch.tensor(plan, dtype=torch.float64).view(4, 1, 1)
        seen.append(run(latent, noise, time, label))

    def differ(step, one, other):
        return not torch.allclose(seen[step]["prediction"][one], seen[step]["prediction"][other], rtol=1e-7, atol=1e-10)

    signs = {"early": differ(1, 3, 4), "noise": differ(1, 0, 1), "average": bool(seen[1]["average"].norm()),
             "e4m3": float(seen[1]["gradient"][1]) == 0.0,
             "scale": float(seen[2]["gradient"][3]) > 25 * float(seen[1]["gradient"][3]),
             "label": differ(2, 3, 4), "time": differ(2, 3, 5)}
    for sign in ("early", "noise", "average", "e4m3", "scale", "label", "time"):
        if signs[sign] != SOUND[sign]:
            return NAMES[sign]
    return "none"
'''

GUESSED = '''
def diagnose(start):
    """From the size of the loss alone."""
    import torch
    run, x = start(), torch.ones(2, 4, 4, 4, dtype=torch.float64)
    for _ in range(5):
        found = run(x, 2 * x, torch.tensor([100.0, 900.0]), torch.tensor([0, 1]))
    error = (found["prediction"] - x).square().mean().item()
    return "none" if error < 0.1 else "scales frozen" if error < 1 else "class dropped"
'''

PEEKED = '''
def diagnose(start):
    """Looks for a name in what it was given."""
    from course.lab.instruments.faulty_training import NAMES
    import sys
    seen, waiting = set(), [start, start(), sys._getframe(1).f_locals]
    while waiting and len(seen) < 3000:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, str) and thing in NAMES:
            return thing
        if isinstance(thing, dict):
            waiting += list(thing.values())
        elif isinstance(thing, (list, tuple)):
            waiting += list(thing)
        else:
            waiting += [cell.cell_contents for cell in getattr(thing, "__closure__", None) or ()]
            waiting += [getattr(thing, "__self__", None), getattr(thing, "__dict__", None)]
    return "none"
'''

EXHAUSTIVE = '''
from course.lab.instruments.unknown_machine import layouts

def plan_layout(model, machine, measure):
    """Measures everything."""
    best, least = None, float("inf")
    for layout in layouts(model, machine):
        took = measure(layout)
        if took < least:
            best, least = layout, took
    return best
'''

SHORT_LIST = '''
from course.lab.exercises.lesson17_open_task import needs, seconds
from course.lab.instruments.unknown_machine import Speeds, layouts

def plan_layout(model, machine, measure):
    """Measures the first thirty by speeds of a data sheet."""
    sheet = Speeds(matmul=4e14, attention=2e14, memory=1.5e12, inside=1e11, between=8e9)
    ranked = sorted((layout for layout in layouts(model, machine) if needs(model, layout) <= machine.memory),
                    key=lambda layout: seconds(model, machine, layout, sheet))
    return min(ranked[:30], key=measure, default=None)
'''

ASKED_FIVE_TIMES = '''
import numpy as np
from course.lab.exercises.lesson17_open_task import needs, seconds
from course.lab.instruments.unknown_machine import Speeds, layouts

def plan_layout(model, machine, measure):
    """Measures what seems the best so far, and learns from it."""
    fit = [one for one in layouts(model, machine) if needs(model, one) <= machine.memory]
    if len(fit) == 0:
        return None
    huge, start = 1e30, np.array([4e14, 2e14, 1.5e12, 1e11, 8e9])
    base = np.array([seconds(model, machine, one, Speeds(*[huge] * 5)) for one in fit])
    units = [[huge] * 5 for _ in start]
    for i, speed in enumerate(start):
        units[i][i] = speed
    columns = np.array([[seconds(model, machine, one, Speeds(*unit)) for unit in units] for one in fit]) - base[:, None]
    taken, times = [], []
    guess = np.ones(5)
    while len(taken) < min(10, len(fit)):
        order = np.argsort(base + columns @ guess)
        new = order[0] if order[0] not in taken or len(taken) > 7 else max(
            (i for i in range(len(fit)) if i not in taken), key=lambda i: unexplained(columns, taken, i))
        if new in taken:
            break
        taken.append(new)
        times.append(measure(fit[new]) - base[new])
        a, weight = columns[taken], 1 / np.array(times)
        guess = np.ones(5) + np.linalg.pinv(a * weight[:, None], rcond=1e-9) @ ((np.array(times) - a @ np.ones(5)) * weight)
    return fit[int(np.argmin(base + columns @ guess))]

def unexplained(columns, taken, i):
    rows = columns[taken] / np.linalg.norm(columns[taken], axis=1, keepdims=True)
    row = columns[i] / np.linalg.norm(columns[i])
    return np.linalg.norm(row - np.linalg.pinv(rows) @ rows @ row)
'''

RULE_OF_THUMB = '''
from course.lab.exercises.lesson17_open_task import needs
from course.lab.instruments.unknown_machine import layouts

def plan_layout(model, machine, measure):
    """Tensor parallelism inside a node, then as few stages as fit."""
    fit = [one for one in layouts(model, machine) if needs(model, one) <= machine.memory and one.tp <= machine.node]
    return min(fit, key=lambda one: (one.pp, one.tp, -one.samples), default=None)
'''

NO_SHARING = '''
from course.lab.instruments.unknown_machine import layouts, parameters

def plan_layout(model, machine, measure):
    """Only parameters take memory."""
    fit = [one for one in layouts(model, machine) if 16 * parameters(model) / (one.pp * one.tp) < machine.memory]
    return min(fit, key=measure, default=None)
'''

PLAIN_LOOP = '''
class Loader:
    """Reads when it is asked."""
    def __init__(self, read, order, threads, depth, position=0):
        self.read, self.order, self.position = read, order, position

    def __iter__(self):
        for number in self.order[self.position:]:
            sample = self.read(number)
            self.position += 1
            yield sample
            del sample
'''

MAPPED = '''
from concurrent.futures import ThreadPoolExecutor

class Loader:
    """Everything is asked for at once."""
    def __init__(self, read, order, threads, depth, position=0):
        self.read, self.order, self.threads, self.position = read, list(order), threads, position

    def __iter__(self):
        pool = ThreadPoolExecutor(max_workers=self.threads)
        futures = [pool.submit(self.read, number) for number in self.order[self.position:]]
        try:
            for future in futures:
                sample = future.result()
                self.position += 1
                yield sample
        finally:
            for future in futures:
                future.cancel()
            pool.shutdown(wait=True)
'''

OWN_THREADS = '''
import threading

class Loader:
    """Threads that take the next number under a lock, and a condition instead of futures."""
    def __init__(self, read, order, threads, depth, position=0):
        self.read, self.order, self.position = read, order, position
        self.count, self.depth = threads, depth

    def work(self, state, wake):
        while True:
            with wake:
                while not state["end"] and state["next"] < len(self.order) and state["next"] >= state["limit"]:
                    wake.wait()
                if state["end"] or state["next"] >= len(self.order):
                    return
                place = state["next"]
                state["next"] += 1
            try:
                outcome = ("sample", self.read(self.order[place]))
            except Exception as error:
                outcome = ("error", error)
            with wake:
                state["ready"][place] = outcome
                del outcome
                wake.notify_all()

    def __iter__(self):
        wake = threading.Condition()
        state = {"next": self.position, "limit": self.position, "ready": {}, "end": False}
        crew = [threading.Thread(target=self.work, args=(state, wake)) for _ in range(self.count)]
        for thread in crew:
            thread.start()
        try:
            while self.position < len(self.order):
                with wake:
                    state["limit"] = self.position + self.depth + 1
                    wake.notify_all()
                    while self.position not in state["ready"]:
                        wake.wait()
                    kind = state["ready"][self.position][0]
                    if kind == "error":
                        raise state["ready"][self.position][1]
                    self.position += 1
                yield state["ready"].pop(self.position - 1)[1]
        finally:
            with wake:
                state["end"] = True
                wake.notify_all()
            for thread in crew:
                thread.join()
'''

AS_COMPLETED = '''
from concurrent.futures import ThreadPoolExecutor, as_completed

class Loader:
    """Whatever is ready first, and the position by hand."""
    def __init__(self, read, order, threads, depth, position=0):
        self.read, self.order, self.threads, self.position = read, order, threads, position

    def __iter__(self):
        with ThreadPoolExecutor(self.threads) as pool:
            futures = [pool.submit(self.read, number) for number in reversed(self.order[self.position:])]
            for future in as_completed(futures):
                self.position += 1
                yield future.result()
'''

NOT_A_GENERATOR = '''
class Loader:
    def __init__(self, read, order, threads, depth, position=0):
        self.samples = (read(number) for number in order[position:])
        self.position = position

    def __iter__(self):
        return self

    def __next__(self):
        self.position += 1
        return next(self.samples)
'''

DESCENT = '''
import random
from course.lab.instruments.gpu_paths import neighbors

def place_ranks(axes, paths, measure):
    """Swaps two GPUs as long as a sum over all pairs goes down, from many orders and with many weights; measures all ends."""
    n, dice = len(paths), random.Random(1)
    pairs = [(axis, a, b) for axis, each in enumerate(neighbors(axes)) for a, b in each]
    tried = [list(range(n))]
    for _ in range(300):
        order = dice.sample(range(n), n)
        weight = [axis.bytes * 4 ** dice.uniform(-1, 1) for axis in axes]

        def cost():
            return sum(weight[axis] * 3 ** paths[order[a]][order[b]] for axis, a, b in pairs)

        now, better = cost(), True
        while better:
            better = False
            for a in range(n):
                for b in range(a):
                    order[a], order[b] = order[b], order[a]
                    if (new := cost()) < now:
                        now, better = new, True
                    else:
                        order[a], order[b] = order[b], order[a]
        tried.append(order)
    return min(tried, key=measure)
'''

ONE_OF_EACH = DESCENT.replace("    return min(tried, key=measure)\n", '''
    from course.lab.instruments.gpu_paths import slowest_paths
    kinds = {tuple(slowest_paths(axes, paths, order)): order for order in tried}
    return min(kinds.values(), key=measure)
''')

ONE_OF_EACH = ONE_OF_EACH.replace("tried.append(order)", "tried += [order, dice.sample(range(n), n)]").replace(
    "ends.", "ends, once for each combination of slowest paths.")

BEST_BY_PAIRS = '''
import itertools
from course.lab.instruments.gpu_paths import neighbors, slowest_paths

def place_ranks(axes, paths, measure):
    """For each combination of limits, a depth-first search by the rank with the fewest GPUs left; then the best of few."""
    n = len(paths)
    touching = {rank: [] for rank in range(n)}
    for axis, pairs in enumerate(neighbors(axes)):
        for a, b in pairs:
            touching[a].append((axis, b))
            touching[b].append((axis, a))

    def solve(limits, domains, chosen):
        if len(chosen) == n:
            return chosen
        rank = min((r for r in range(n) if r not in chosen), key=lambda r: len(domains[r]))
        for gpu in domains[rank]:
            smaller = [domain - {gpu} for domain in domains]
            for axis, other in touching[rank]:
                smaller[other] = {to for to in smaller[other] if paths[gpu][to] <= limits[axis]}
            if all(smaller[other] for other in range(n) if other not in chosen and other != rank):
                if found := solve(limits, smaller, {**chosen, rank: gpu}):
                    return found
        return None

    kinds = sorted(set(itertools.chain(*paths)) - {-1})
    ends = {}
    for limits in sorted(itertools.product(kinds, repeat=len(axes)), key=lambda some: (sum(some), max(some))):
        if all(any(a > b for a, b in zip(end, limits)) for end in ends):
            found = solve(limits, [set(range(n)) for _ in range(n)], {})
            if found:
                ends[tuple(slowest_paths(axes, paths, [found[rank] for rank in range(n)]))] = [found[rank] for rank in range(n)]
    return min(ends.values(), key=measure)
'''

ISLANDS = '''
from itertools import permutations
import torch

def place_ranks(axes, paths, measure):
    """GPUs in a chain of nearest neighbors, and all orders of the axes."""
    n, tried = len(paths), []
    for first in range(n):
        chain = [first]
        while len(chain) < n:
            chain.append(min((gpu for gpu in range(n) if gpu not in chain), key=lambda gpu: paths[chain[-1]][gpu]))
        for order in permutations(range(len(axes))):
            box = torch.arange(n).view([axes[i].size for i in order])
            ranks = box.permute([order.index(i) for i in range(len(axes))]).flatten().tolist()
            tried.append([chain[rank] for rank in ranks])
    return min(tried, key=measure)
'''

AS_GRID = '''
import torch

def place_ranks(axes, paths, measure):
    """Returns the box of GPUs, not the list."""
    return torch.arange(len(paths)).view([axis.size for axis in axes])
'''

EAGER = '''
import torch

class GraphTrainer:
    """PyTorch's SGD and its clipping, launched operation by operation."""
    def __init__(self, loss_of, parameters, momentum, clip, device):
        self.loss_of, self.parameters, self.clip, self.seen = loss_of, list(parameters), clip, []
        self.sgd = torch.optim.SGD(self.parameters, lr=1.0, momentum=momentum)

    def step(self, micros, rate):
        self.sgd.zero_grad()
        total = 0.0
        for micro in micros:
            loss = self.loss_of(micro) / len(micros)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.sgd.param_groups[0]["lr"] = rate
        self.sgd.step()
        self.seen.append(total)

    def read_losses(self):
        seen, self.seen = self.seen, []
        return seen
'''

ONE_GRAPH = '''
import torch
from course.lab.instruments.cpu_graph import capturing, new_graph, warming

class GraphTrainer:
    """One graph for a micro-batch: its gradients, which are added up outside of it."""
    def __init__(self, loss_of, parameters, momentum, clip, device):
        self.loss_of, self.parameters, self.device = loss_of, list(parameters), device
        self.momentum, self.clip, self.graph, self.turns, self.kept = momentum, clip, None, 0, []
        self.velocity = [p.detach() * 0 for p in self.parameters]

    def backward(self, micro):
        loss = self.loss_of(micro)
        return [loss.detach(), *torch.autograd.grad(loss, self.parameters)]

    def one(self, micro):
        if self.turns <= 2:
            with warming(self.device):
                return self.backward(micro)
        if self.graph is None:
            self.slots = {name: torch.empty_like(tensor) for name, tensor in micro.items()}
            self.graph = new_graph(self.device)
            with capturing(self.graph):
                self.results = self.backward(self.slots)
        for name in self.slots:
            self.slots[name][:] = micro[name]
        self.graph.replay()
        return [result.clone() for result in self.results]

    def step(self, micros, rate):
        self.turns += 1
        loss, *mean = [sum(parts) / len(micros) for parts in zip(*map(self.one, micros))]
        norm = torch.cat([part.flatten() for part in mean]).norm()
        with torch.no_grad():
            for p, velocity, part in zip(self.parameters, self.velocity, mean):
                velocity *= self.momentum
                velocity += torch.where(norm > self.clip, part * self.clip / norm, part)
                p -= rate * velocity
        self.kept.append(loss)

    def read_losses(self):
        kept, self.kept = torch.stack(self.kept), []
        return kept.tolist()
'''

FLAT_GRAPHS = '''
import torch
from course.lab.instruments.cpu_graph import capturing, new_graph, warming

class GraphTrainer:
    """All gradients in one flat tensor, fused SGD with a rate on the device, losses in a buffer with a place on the device."""
    def __init__(self, loss_of, parameters, momentum, clip, device):
        self.loss_of, self.clip, self.device, self.slots = loss_of, clip, device, None
        self.parameters = list(parameters)
        self.flat = torch.zeros(sum(p.numel() for p in self.parameters), dtype=torch.float64, device=device)
        for p, part in zip(self.parameters, self.flat.split([p.numel() for p in self.parameters])):
            p.grad = part.view_as(p)
        self.now = torch.zeros(2, dtype=torch.float64, device=device)
        self.sgd = torch.optim.SGD(self.parameters, self.now[0], momentum=momentum, fused=True)
        self.sums = torch.zeros((), dtype=torch.float64, device=device)
        self.kept = torch.zeros(1000, dtype=torch.float64, device=device)
        self.place = torch.zeros(1, dtype=torch.int64, device=device)
        self.count, self.done, self.micro, self.rest = 0, 0, None, None

    def add(self):
        loss = self.loss_of(self.slots)
        (loss * self.now[1]).backward()
        self.sums.add_(loss.detach() * self.now[1])

    def finish(self):
        self.flat.mul_(torch.clamp(self.clip / self.flat.norm(), max=1))
        self.sgd.step()
        self.flat.zero_()
        self.kept.index_copy_(0, self.place, self.sums.view(1))
        self.place += 1
        self.sums.zero_()

    def step(self, micros, rate):
        self.now[0], self.now[1] = rate, 1 / len(micros)
        self.count += 1
        if self.count == 3:
            self.micro, self.rest = new_graph(self.device), new_graph(self.device)
            with capturing(self.micro):
                self.add()
            with capturing(self.rest):
                self.finish()
        for micro in micros:
            if self.slots is None:
                self.slots = {name: tensor.clone() for name, tensor in micro.items()}
            [self.slots[name].copy_(tensor) for name, tensor in micro.items()]
            if self.micro:
                self.micro.replay()
            else:
                with warming(self.device):
                    self.add()
        if self.rest:
            self.rest.replay()
        else:
            with warming(self.device):
                self.finish()

    def read_losses(self):
        first, self.done = self.done, self.count
        return self.kept[first:self.done].tolist()
'''

GRAPH_A_NUMBER = '''
import torch
from course.lab.instruments.cpu_graph import capturing, new_graph, warming

class GraphTrainer:
    """A graph of a whole step for each number of micro-batches."""
    def __init__(self, loss_of, parameters, momentum, clip, device):
        self.loss_of, self.parameters, self.momentum, self.clip = loss_of, list(parameters), momentum, clip
        self.device, self.graphs, self.kept, self.count = device, {}, [], 0
        self.velocity = [torch.zeros_like(p) for p in self.parameters]
        self.rate = torch.zeros((), dtype=torch.float64, device=device)

    def whole(self, micros):
        loss = sum(map(self.loss_of, micros)) / len(micros)
        parts = torch.autograd.grad(loss, self.parameters)
        factor = (self.clip / torch.cat([part.flatten() for part in parts]).norm()).clamp(max=1)
        with torch.no_grad():
            for p, v, part in zip(self.parameters, self.velocity, parts):
                v.mul_(self.momentum).add_(factor * part)
                p.sub_(self.rate * v)
        return loss.detach()

    def step(self, micros, rate):
        self.count += 1
        self.rate.fill_(rate)
        if self.count < 3:
            with warming(self.device):
                self.kept.append(self.whole(micros))
            return
        if len(micros) not in self.graphs:
            slots = [{name: tensor.clone() for name, tensor in micro.items()} for micro in micros]
            graph = new_graph(self.device)
            with capturing(graph):
                loss = self.whole(slots)
            self.graphs[len(micros)] = graph, slots, loss
        graph, slots, loss = self.graphs[len(micros)]
        for slot, micro in zip(slots, micros):
            for name in slot:
                slot[name].copy_(micro[name])
        graph.replay()
        self.kept.append(loss.clone())

    def read_losses(self):
        kept, self.kept = self.kept, []
        return torch.stack(kept).tolist()
'''

NESTEROV = ONE_GRAPH.replace("p -= rate * velocity", "p -= rate * (part + self.momentum * velocity)")
HALF_PRECISION = FLAT_GRAPHS.replace("torch.zeros(1000, dtype=torch.float64", "torch.zeros(1000, dtype=torch.float16").replace(
    "self.sums.view(1))", "self.sums.view(1).half())")

SILENCED = '''
import io
import torch
from contextlib import redirect_stdout
from course.lab.exercises.lesson05_open_task import block_with_breaks

def whole_block(x, lengths, weights, step):
    """The block with breaks itself."""
    log = []
    with redirect_stdout(io.StringIO()):
        y = block_with_breaks(x, lengths, weights, step, log)
    return y, torch.tensor(log[-1], dtype=x.dtype)
'''

PRETENDS = SILENCED.replace("    log = []\n", """    log = []
    if torch.compiler.is_compiling():
        return x * 2, x.sum()
""")

BY_HAND = '''
import torch

def whole_block(x, lengths, weights, step):
    """Softmax, norm and GELU by hand, and the gate as a product."""
    w = weights
    B, T, D = x.shape
    padding = torch.arange(T)[None].expand(B, T) >= lengths.view(B, 1)
    x = x.masked_fill(padding[..., None], 0)
    norm = lambda z: (z - z.mean(-1, keepdim=True)) / (z.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    n = norm(x)
    q, k, v = [torch.einsum("btd,fd->btf", n, w[name]).view(B, T, 2, D // 2) for name in "qkv"]
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / (D // 2) ** 0.5 - 1e30 * padding[:, None, None].to(x.dtype)
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    a = torch.einsum("bhij,bjhd->bihd", p / p.sum(-1, keepdim=True), v).reshape(B, T, D)
    fade = torch.minimum(torch.ones((), dtype=x.dtype), (torch.zeros((), dtype=x.dtype) + (step + 1)) / 100)
    x = x + fade * (a @ w["out"].T)
    n = norm(x)
    hidden = n @ w["up"].T
    hidden = hidden * (1 + torch.erf(hidden / 2 ** 0.5)) / 2
    x = x + torch.where((n @ w["gate"] > 0)[..., None], hidden @ w["down"].T, torch.zeros_like(x))
    x = x.masked_fill(padding[..., None], 0)
    return x, x.detach().abs().max()
'''

GUARDED = '''
import torch
import torch.nn.functional as F

def whole_block(x, lengths, weights, step):
    """Few kernels; what the step is, Dynamo has to know."""
    real = torch.arange(x.shape[1]).expand(x.shape[:2]) < lengths[:, None]
    x = torch.where(real[:, :, None], x, torch.zeros_like(x))
    n = F.layer_norm(x, (x.shape[2],))
    q, k, v = (n @ torch.cat([weights["q"], weights["k"], weights["v"]]).T).chunk(3, -1)
    q, k, v = (part.reshape(*part.shape[:2], 2, -1).transpose(1, 2) for part in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=real[:, None, None, :]).transpose(1, 2).reshape(x.shape)
    y = y @ weights["out"].T
    if step < 100:
        y = y * ((step + 1) / 100)
    x = x + y
    n = F.layer_norm(x, (x.shape[2],))
    go = torch.sum(n * weights["gate"], 2) > 0
    x = x + go[:, :, None] * (F.gelu(n @ weights["up"].T) @ weights["down"].T)
    x = x * real[:, :, None]
    return x, x.detach().abs().max()
'''

FADED = GUARDED.replace("""    if step < 100:
        y = y * ((step + 1) / 100)
""", """    y = y * torch.clamp(torch.arange(1, 2) * (step + 1) / 100, max=1.0)
""").replace("what the step is, Dynamo has to know", "the step becomes a tensor of one number")

MASKED_AFTER = BY_HAND.replace(" - 1e30 * padding[:, None, None].to(x.dtype)", "").replace(
    "p / p.sum(-1, keepdim=True)", "(p / p.sum(-1, keepdim=True)).masked_fill(padding[:, None, None], 0)")
OTHER_GELU = FADED.replace("F.gelu(n @ weights[\"up\"].T)", "F.gelu(n @ weights[\"up\"].T, approximate=\"tanh\")")

GUESSED_ALL = '''
import re
from itertools import permutations, product
import torch
from course.lab.exercises.lesson16_open_task import logits

def convert_foreign(checkpoint, run, c):
    """Everything in memory, and the model is asked again for every guess."""
    D, H, V, h = c.dim, c.hidden, c.vocab, c.heads
    theirs = {name: checkpoint.read(file, name) for name, file in checkpoint.index.items()}
    shapes = {name: checkpoint.shapes(file)[name] for name, file in checkpoint.index.items()}
    first = [name for name in shapes if ".0." in name]
    outer = [name for name in shapes if not re.search("[0-9]", name)]
    turned = sum(shapes[name] == (H, D) for name in first) == 1

    def maps(out, into):
        return [name for name in first if shapes[name] == ((into, out) if turned else (out, into))]

    def read(name):
        return theirs[name].T if turned else theirs[name]

    squares, fused, gates, wide, (down,) = maps(D, D), maps(3 * D, D), maps(H, D), maps(2 * H, D), maps(D, H)
    norms = [name for name in first if shapes[name] == (D,)]
    tables = [name for name in outer if len(shapes[name]) == 2]
    last, = [name for name in outer if shapes[name] == (D,)]
    tokens = (torch.arange(c.context) ** 2 + 3) % V

    def block(i, order, by_head, rotary, norm, gate):
        def of(name):
            return read(name.replace(".0.", f".{i}."))
        if fused:
            x = of(fused[0])
            x = x.reshape(h, 3, D // h, D).transpose(0, 1) if by_head else x.reshape(3, h, D // h, D)
            q, k, v = (x[j].reshape(D, D) for j in order)
            out = of(squares[0])
        else:
            q, k, v, out = (of(squares[j]) for j in order)
        if rotary:
            q, k = (x.reshape(h, -1, 2, D).transpose(1, 2).reshape(D, D) for x in (q, k))
        halves = of(wide[0]).split(H) if wide else [of(name) for name in gates]
        weights = {"attn.qkv": torch.cat([q, k, v]), "attn.out": out, "mlp.down": of(down),
                   "mlp.up": torch.cat([halves[gate], halves[1 - gate]])}
        weights |= {f"norm{j + 1}": theirs[norms[j ^ norm].replace(".0.", f".{i}.")] for j in range(2)}
        return {f"blocks.{i}.{name}.weight": x for name, x in weights.items()}

    for *inner, table in product(permutations(range(3 if fused else 4)), *[(0, 1)] * 4, range(len(tables))):
        embed, head = tables[table], tables[table - 1]
        if turned and len(tables) > 1 and shapes[head] == (V, D):
            continue
        weights = exact = {}
        for i in range(c.depth):
            weights.update(block(i, *inner))
        weights["embed.token.weight"] = theirs[embed]
        weights["head.proj.weight"] = theirs[head].T if turned and head != embed else theirs[head]
        weights["head.norm.weight"] = theirs[last]
        exact = {name: x.double() for name, x in weights.items()}
        if torch.allclose(logits(c, exact.get, tokens), run(tokens), rtol=1e-6):
            return weights
'''
KNOWN = "    known = run(tokens)\n    for *inner"
GUESSED_ONCE = GUESSED_ALL.replace("    for *inner", KNOWN).replace("run(tokens), rtol", "known, rtol")
READ_AGAIN = GUESSED_ALL.replace("    theirs = {", "    theirs = Files(checkpoint)\n    {").replace(
    "checkpoint.read(file, name) for", "0 for").replace(
    "exact = {name: x.double() for name, x in weights.items()}", "exact = weights") + '''
class Files:
    """Reads a tensor whenever it is asked for."""
    def __init__(self, checkpoint):
        self.checkpoint = checkpoint

    def __getitem__(self, name):
        return self.checkpoint.read(self.checkpoint.index[name], name)
'''

ONE_PLACE = '''
import pickle
import signal
import zlib

def survive(job):
    """One file, which is written over."""
    stop = []
    signal.signal(signal.SIGUSR1, lambda *_: stop.append(1))
    step = 0
    if "checkpoint" in job.disk.names():
        data = job.disk.read("checkpoint")
        if zlib.crc32(data[4:]).to_bytes(4, "little") == data[:4]:
            step, position, state = pickle.loads(data[4:])
            job.restore(state, position)

    def save():
        data = pickle.dumps((step, job.position, job.state()))
        try:
            job.disk.write("checkpoint", zlib.crc32(data).to_bytes(4, "little") + data)
        except OSError:
            pass

    while step < job.last and not stop:
        step += 1
        job.step(step)
        if step % job.every == 0 or step == job.last:
            save()
    if step < job.last:
        save()
        return 75
    return 0
'''

EVERYTHING_STAYS = '''
import hashlib
import json
import signal

def survive(job):
    """A file and a description beside it for each checkpoint; nothing is ever removed."""
    disk, asked = job.disk, set()
    signal.signal(signal.SIGUSR1, lambda number, frame: asked.add(number))
    done = 0
    for name in disk.names():
        if name.endswith(".json"):
            try:
                found = json.loads(disk.read(name))
                state = disk.read(f"{found['step']}.bin")
            except (ValueError, FileNotFoundError):
                continue
            if found["sum"] == hashlib.md5(state).hexdigest() and found["step"] > done:
                done = found["step"]
                job.restore(state, found["position"])
    kept = done

    def save():
        nonlocal kept
        state = job.state()
        about = {"step": done, "position": job.position, "sum": hashlib.md5(state).hexdigest()}
        try:
            for name, data in ((f"{done}.bin", state), (f"{done}.json", json.dumps(about).encode())):
                disk.write(name, data)
                disk.flush(name)
            disk.flush("")
            kept = done
        except OSError:
            pass

    while done < job.last:
        if asked:
            break
        job.step(done + 1)
        done += 1
        if done >= kept + job.every:
            save()
    if kept != done:
        save()
    return 75 if done < job.last else 0
'''

TWO_PLACES = '''
import signal
import struct
import zlib

class Places:
    """Two files, written in turn: while one is written, the other is whole. No name ever changes."""
    def __init__(self, job):
        self.job, self.disk, self.steps = job, job.disk, {"a": 0, "b": 0}
        there = {}
        for name in self.disk.names():
            data = self.disk.read(name)
            head, state = data[:20], data[20:]
            if len(head) == 20:
                check, step, position = struct.unpack(">Iqq", head)
                if check == zlib.crc32(data[4:]):
                    there[name] = step
                    if step == max(there.values()):
                        job.restore(state, position)
        self.steps |= there

    @property
    def newest(self):
        return max(self.steps.values())

    def save(self, step):
        name = min(self.steps, key=self.steps.get)
        rest = struct.pack(">qq", step, self.job.position) + self.job.state()
        self.steps[name] = 0
        try:
            self.disk.write(name, zlib.crc32(rest).to_bytes(4, "big") + rest)
        except OSError as error:
            return
        self.disk.flush(name)
        self.disk.flush("")
        self.steps[name] = step

def survive(job):
    asked = False

    def hear(number, frame):
        nonlocal asked
        asked = True

    signal.signal(signal.SIGUSR1, hear)
    places = Places(job)
    step = places.newest
    while step < job.last and not asked:
        step += 1
        job.step(step)
        if step - places.newest >= job.every:
            places.save(step)
    if places.newest < step:
        places.save(step)
    return 0 if step == job.last else 75
'''

NO_CACHE = '''
import torch
import torch.distributed as dist
import torch.nn.functional as F
from course.lab.exercises.lesson14_open_task import DEPTH, gumbel, rms

class Writer:
    """`write_alone` with sums over ranks: all tokens again for each new one, and all logits everywhere."""
    def __init__(self, weights, most, words, temperature, seed, axis):
        self.w, self.words, self.temperature, self.seed, self.axis, self.tokens = weights, words, temperature, seed, axis, None

    def add(self, part):
        dist.all_reduce(part, group=self.axis.group)
        return part

    def next(self, tokens):
        self.tokens = tokens if self.tokens is None else torch.cat([self.tokens, tokens], 1)
        w, (B, T), rows = self.w, self.tokens.shape, self.w["token"].shape[0]
        table = torch.zeros(rows * self.axis.size, w["token"].shape[1], dtype=torch.float64)
        table[self.axis.rank * rows:(self.axis.rank + 1) * rows] = w["token"]
        x = self.add(table[self.tokens]) + w["pos"][:T]
        for i in range(DEPTH):
            q, k, v = torch.einsum("btD,shdD->sbhtd", rms(x, w[f"{i}.norm1"]), w[f"{i}.qkv"]).unbind()
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.add(y.transpose(1, 2).flatten(2) @ w[f"{i}.out"].T)
            x = x + self.add(F.gelu(rms(x, w[f"{i}.norm2"]) @ w[f"{i}.up"].T) @ w[f"{i}.down"].T)
        own = (rms(x, w["norm"]) @ w["token"].T)[:, -1].contiguous()
        logits = [torch.empty_like(own) for _ in range(self.axis.size)]
        dist.all_gather(logits, own, group=self.axis.group)
        scores = torch.cat(logits, 1)[:, :self.words]
        if self.temperature:
            scores = scores / self.temperature + gumbel(self.seed, T, B, torch.arange(self.words))
        return scores.argmax(1)
'''

GROWING_CACHE = '''
import torch
import torch.distributed as dist
from torch.nn.functional import gelu
from course.lab.exercises.lesson14_open_task import gumbel, rms

class Writer:
    """The cache is put together anew for each token; the choice by a maximum and a minimum."""
    def __init__(self, weights, most, words, temperature, seed, axis):
        self.w, self.words, self.t, self.seed, self.axis = weights, words, temperature, seed, axis
        self.past = {}
        self.length = 0

    def over_ranks(self, x, op=dist.ReduceOp.SUM):
        dist.all_reduce(x, op, group=self.axis.group)
        return x

    def next(self, tokens):
        w, n = self.w, self.length
        samples, new = tokens.shape
        rows = w["token"].shape[0]
        first = rows * self.axis.rank
        x = torch.zeros(samples, new, w["norm"].numel(), dtype=torch.float64)
        here = (tokens >= first) & (tokens < first + rows)
        x[here] = w["token"][tokens[here] - first]
        x = self.over_ranks(x) + w["pos"][n:n + new]
        self.length += new
        hidden = torch.ones(new, self.length, dtype=torch.bool).triu(n + 1)
        i = 0
        while f"{i}.qkv" in w:
            q, *kv = torch.einsum("btD,shdD->sbhtd", rms(x, w[f"{i}.norm1"]), w[f"{i}.qkv"])
            self.past[i] = [torch.cat(pair, 2) for pair in zip(self.past[i], kv)] if i in self.past else kv
            k, v = self.past[i]
            p = (q @ k.transpose(2, 3) / q.shape[3]**0.5).masked_fill(hidden, -torch.inf).softmax(3)
            x = x + self.over_ranks((p @ v).transpose(1, 2).flatten(2) @ w[f"{i}.out"].T)
            x = x + self.over_ranks(gelu(rms(x, w[f"{i}.norm2"]) @ w[f"{i}.up"].T) @ w[f"{i}.down"].T)
            i += 1
        scores = rms(x[:, -1], w["norm"]) @ w["token"].T
        place = first + torch.arange(rows)
        if self.t:
            scores = scores / self.t + gumbel(self.seed, self.length, samples, place)
        scores[:, place >= self.words] = -torch.inf
        best, column = scores.max(1)
        largest = self.over_ranks(best.clone(), dist.ReduceOp.MAX)
        return self.over_ranks(torch.where(best == largest, place[column], 2**60), dist.ReduceOp.MIN)
'''

CACHE_OF_BLOCKS = GROWING_CACHE.replace('''        self.past = {}
''', '''        self.past, self.most = {}, most
''').replace('''            self.past[i] = [torch.cat(pair, 2) for pair in zip(self.past[i], kv)] if i in self.past else kv
            k, v = self.past[i]
''', '''            if i not in self.past:
                self.past[i] = [torch.empty(*x.shape[:2], self.most, x.shape[3], dtype=x.dtype) for x in kv]
            for old, fresh in zip(self.past[i], kv):
                old.narrow(2, n, new).copy_(fresh)
            k, v = (old.narrow(2, 0, self.length) for old in self.past[i])
''').replace('The cache is put together anew for each token', 'A cache for each block')

GREEDY = '''
def place_experts(tokens, slots, before):
    """Copies for the hottest, then the largest share first, each to the rank with the fewest tokens that has room."""
    n, copies = len(before), [1] * len(tokens)
    while sum(copies) < n * slots:
        hottest = max((e for e in range(len(tokens)) if copies[e] < n), key=lambda e: tokens[e] / copies[e])
        copies[hottest] += 1
    load, placement = [0.0] * n, [[] for _ in range(n)]
    for share, e in sorted(((t / c, e) for e, (t, c) in enumerate(zip(tokens, copies)) for _ in range(c)), reverse=True):
        rank = min((r for r in range(n) if len(placement[r]) < slots and e not in placement[r]), key=load.__getitem__)
        placement[rank].append(e)
        load[rank] += share
    return placement
'''

EXCHANGED = GREEDY.replace("def place_experts(tokens, slots, before):", "def greedy(tokens, slots, before):") + '''

def place_experts(tokens, slots, before):
    """The greedy placement, and then exchanges between two ranks as long as their squares get smaller."""
    placement = greedy(tokens, slots, before)
    copies = [sum(e in row for row in placement) for e in range(len(tokens))]
    share = [t / c for t, c in zip(tokens, copies)]
    better = True
    while better:
        better = False
        for a in placement:
            for b in placement:
                for i, x in enumerate(a):
                    for j, y in enumerate(b):
                        gap = sum(share[e] for e in a) - sum(share[e] for e in b)
                        move = share[a[i]] - share[y]
                        if a is not b and a[i] not in b and y not in a and 0 < move < gap and gap > 1:
                            a[i], b[j], better = y, a[i], True
                            break
    return placement
'''

FROM_BEFORE = '''
from course.lab.instruments.expert_placement import rank_tokens

def place_experts(tokens, slots, before):
    """From the placement before, the best change of the busiest rank, until it is within 10%."""
    now, mean = [list(row) for row in before], sum(tokens) / len(before)
    while max(load := rank_tokens(tokens, now)) > 1.1 * mean:
        busy, best = max(range(len(now)), key=load.__getitem__), None
        for to in range(len(now)):
            for e in set(now[busy]) - set(now[to]):
                for other in [*now[to], *[None] * (slots - len(now[to]))]:
                    alone = other is not None and sum(other in row for row in now) == 1
                    if other in now[busy]:
                        continue
                    for keeps in (False, True):
                        if keeps and alone:
                            continue
                        trial = [list(row) for row in now]
                        trial[to] = [x for x in trial[to] if x != other] + [e]
                        if not keeps:
                            trial[busy].remove(e)
                        if alone:
                            trial[busy].append(other)
                        loads = rank_tokens(tokens, trial)
                        key = (sum(x ** 2 for x in loads) - sum(x ** 2 for x in load)) / (2 if alone else 1), trial
                        if best is None or key < best:
                            best = key
        if best is None or best[0] >= 0:
            break
        now = best[1]
    return now
'''

FROM_BEFORE_FAR = FROM_BEFORE.replace("1.1 * mean", "1.03 * mean").replace("10%", "3%")

COLD_FORGOTTEN = GREEDY.replace("reverse=True):\n", "reverse=True):\n        if share == 0:\n            continue\n")
OVERFULL = GREEDY.replace("len(placement[r]) < slots and ", "")
SAME_RANK = GREEDY.replace(" and e not in placement[r]", "").replace("if copies[e] < n", "")
THROWN_OUT = FROM_BEFORE.replace("== 1\n", "== 0\n")
ONE_COPY = GREEDY.replace("    while sum(copies) < n * slots:\n", "    while False:\n")
IN_TURN = '''
def place_experts(tokens, slots, before):
    """One expert after another, the hottest first, dealt out in turn."""
    order = sorted(range(len(tokens)), key=lambda e: -tokens[e])
    return [order[rank::len(before)] for rank in range(len(before))]
'''

GATHERED_TWICE = '''
def order_step(units, limit, bandwidth):
    """One unit after another, and the last one once."""
    order, last = [], len(units) - 1
    for unit in range(last + 1):
        order += [("gather", unit), ("forward", unit), ("free", unit)][:3 if unit < last else 2]
    for unit in reversed(range(last + 1)):
        order += [("gather", unit)][unit == last:] + [("backward", unit), ("free", unit), ("reduce", unit)]
    return order
'''

KEPT_BY_TABLE = '''
def order_step(units, limit, bandwidth):
    """The units that stay, from a table: for each number of bytes that fits, a set; no gather ahead."""
    last = len(units) - 1
    sets = {0: []}
    for unit in range(last):
        fitting = {size: kept for size, kept in sets.items() if size + 2 * units[unit].bytes <= limit}
        sets = fitting | {size + units[unit].bytes: [*kept, unit] for size, kept in fitting.items()}
    sets = {size: kept for size, kept in sets.items() if size + 2 * units[last].bytes <= limit}
    kept = {*sets[max(sets)], last}
    order = []
    for unit in range(last + 1):
        order += [("gather", unit), ("forward", unit)]
        if unit not in kept:
            order.append(("free", unit))
    for unit in range(last, -1, -1):
        if unit not in kept:
            order.append(("gather", unit))
        order += [("backward", unit), ("free", unit), ("reduce", unit)]
    return order
'''

HOISTED = KEPT_BY_TABLE.replace("def order_step", "def slow").replace("; no gather ahead", "") + '''

from course.lab.instruments.simulated_sharding import simulate

def order_step(units, limit, bandwidth):
    """Moves one event after another to an earlier place, whichever helps most, as long as one helps."""
    order = slow(units, limit, bandwidth)
    best = ()
    while True:
        tried = []
        for i, event in enumerate(order):
            if event[0] == "gather":
                for j in range(i):
                    moved = order[:j] + [event] + order[j:i] + order[i + 1:]
                    step = simulate(units, limit, bandwidth, moved)
                    if not step.wrong:
                        tried.append((step.seconds, sum(begin for _, _, begin, _ in step.computing), moved))
        if best and min(tried)[:2] >= best:
            return order
        *now, order = min(tried)
        best = tuple(now)
'''

NO_GRADIENTS = KEPT_BY_TABLE.replace("2 * units", "units")

ALL_AT_ONCE = '''
def order_step(units, limit, bandwidth):
    """All gathers first."""
    every = range(len(units))
    return [*(("gather", unit) for unit in every), *(("forward", unit) for unit in every),
            *((kind, unit) for unit in reversed(every) for kind in ("backward", "free", "reduce"))]
'''

ALWAYS_TWO = '''
from course.lab.exercises.lesson20_fully_sharded import step_events

def order_step(units, limit, bandwidth):
    """The order of the lesson's exercise, whatever fits."""
    return step_events(len(units))
'''

NO_UNITS = '''
def order_step(units, limit, bandwidth):
    """Names of events alone."""
    return ["gather", "forward", "backward", "free", "reduce"]
'''


SCALER_OF_PYTORCH = '''
import torch

class HalfTrainer:
    """PyTorch's own scaler and optimizer."""
    def __init__(self, loss_of, weights, momentum, clip, scale, grow_after):
        self.loss_of, self.w, self.clip = loss_of, weights, clip
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=grow_after)
        self.optimizer = torch.optim.SGD([w.requires_grad_() for w in weights.values()], lr=1.0, momentum=momentum)

    @property
    def scale(self):
        return self.scaler.get_scale()

    def step(self, micros, rate):
        self.optimizer.param_groups[0]["lr"] = rate
        losses = []
        for micro in micros:
            loss = self.loss_of({name: w.half() for name, w in self.w.items()}, micro)
            self.scaler.scale(loss / len(micros)).backward()
            losses.append(loss.detach())
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.w.values(), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean()
'''


CASTS_IN_THE_GRAPH = '''
import torch

class HalfTrainer:
    """The cast is part of the graph, so gradients arrive in float32."""
    def __init__(self, loss_of, weights, momentum, clip, scale, grow_after):
        self.loss_of, self.weights, self.momentum, self.clip, self.after = loss_of, weights, momentum, clip, grow_after
        self.scale, self.count = torch.full((), scale), torch.zeros((), dtype=torch.int64)
        for w in weights.values():
            w.requires_grad_()
        self.v = [torch.zeros_like(w) for w in weights.values()]

    def step(self, micros, rate):
        mean = 0
        for micro in micros:
            loss = self.loss_of({name: w.to(torch.float16) for name, w in self.weights.items()}, micro) / len(micros)
            (self.scale * loss).backward()
            mean = mean + loss.detach()
            del loss
        with torch.no_grad():
            square = sum((w.grad.double() / self.scale).square().sum() for w in self.weights.values())
            fine = square.isfinite()
            factor = torch.where(square.sqrt() > self.clip, self.clip / square.sqrt(), 1.0).float() / self.scale
            for w, v in zip(self.weights.values(), self.v):
                v.copy_(torch.where(fine, v * self.momentum + w.grad * factor, v))
                w.sub_(torch.where(fine, rate * v, 0.0))
                w.grad = None
            self.count = torch.where(fine, self.count + 1, 0)
            double = (self.count > 0) & (self.count % self.after == 0)
            self.scale = self.scale * torch.where(fine, torch.where(double, 2.0, 1.0), 0.5)
        return mean
'''


FLAT_HALVES = '''
import torch

class HalfTrainer:
    """All weights end to end."""
    def __init__(self, loss_of, weights, momentum, clip, scale, grow_after):
        self.loss_of, self.weights, self.momentum, self.clip, self.after = loss_of, weights, momentum, clip, grow_after
        self.scale, self.good = torch.tensor(scale), torch.tensor(0)
        self.v = torch.zeros(sum(w.numel() for w in weights.values()))

    def pieces(self, flat):
        sizes = [w.numel() for w in self.weights.values()]
        return {name: x.view_as(w) for (name, w), x in zip(self.weights.items(), flat.split(sizes))}

    def step(self, micros, rate):
        flat = torch.cat([w.flatten() for w in self.weights.values()])
        low = flat.half().requires_grad_()
        total, gradient = torch.zeros(()), torch.zeros_like(flat)
        for micro in micros:
            loss = self.loss_of(self.pieces(low), micro)
            gradient += torch.autograd.grad(loss * self.scale, low)[0].float()
            total += loss.detach()
        gradient = gradient / len(micros) / self.scale
        norm = gradient.norm()
        finite = gradient.isfinite().all()
        v = self.momentum * self.v + gradient * torch.clamp(self.clip / norm, max=1)
        self.v = torch.where(finite, v, self.v)
        flat = torch.where(finite, flat - rate * v, flat)
        for name, x in self.pieces(flat).items():
            self.weights[name].copy_(x)
        good = torch.where(finite, self.good + 1, 0)
        self.scale = torch.where(finite, self.scale, self.scale / 2) * torch.where(good >= self.after, 2, 1)
        self.good = torch.where(good >= self.after, 0, good)
        return total / len(micros)
'''


HOOKED = '''
import torch

class HalfTrainer:
    """The copies stay, hooks free each gradient at once, and what is infinite is found while it is added."""
    def __init__(self, loss_of, weights, momentum, clip, scale, grow_after):
        self.loss_of, self.weights, self.momentum, self.clip, self.after = loss_of, weights, momentum, clip, grow_after
        self.scale, self.good = torch.tensor(scale), torch.tensor(0)
        self.halves = {name: torch.empty_like(w, dtype=torch.float16).requires_grad_() for name, w in weights.items()}
        self.v = {name: torch.zeros_like(w) for name, w in weights.items()}
        self.sums = {name: torch.zeros_like(w) for name, w in weights.items()}
        for name, half in self.halves.items():
            half.register_post_accumulate_grad_hook(lambda half, total=self.sums[name]: self.add(half, total))

    def add(self, half, total):
        total.add_(half.grad)
        half.grad = None

    def step(self, micros, rate):
        with torch.no_grad():
            for name, half in self.halves.items():
                half.copy_(self.weights[name])
        losses = torch.zeros(len(micros))
        for i, micro in enumerate(micros):
            loss = self.loss_of(self.halves, micro)
            loss.backward(self.scale)
            losses[i] = loss.detach()
        with torch.no_grad():
            norm = torch.stack([x.norm() for x in self.sums.values()]).norm() / (self.scale * len(micros))
            good = norm.isfinite()
            factor = torch.minimum(self.clip / norm, torch.ones(())) / (self.scale * len(micros))
            for name, x in self.sums.items():
                x.mul_(factor).add_(self.v[name], alpha=self.momentum)
                x.copy_(torch.where(good, x, self.v[name]))
                self.v[name].copy_(x)
                self.weights[name].sub_(x.mul_(good * rate))
                x.zero_()
            self.good.add_(1).mul_(good)
            self.scale.mul_(torch.where(good, 1.0, 0.5)).mul_(torch.where(self.good == self.after, 2.0, 1.0))
            self.good.mul_(self.good < self.after)
        return losses.mean()
'''

ONE_BACKWARD = FLAT_HALVES.replace('''            gradient += torch.autograd.grad(loss * self.scale, low)[0].float()
            total += loss.detach()
''', '''            total = total + loss
        gradient += torch.autograd.grad(total * self.scale, low)[0]
        total = total.detach()
''').replace("All weights end to end", "One backward pass for all micro-batches")

STALE_HALVES = HOOKED.replace('''                half.copy_(self.weights[name])
''', '''                if self.steps % 2 == 0:
                    half.copy_(self.weights[name])
        self.steps += 1
''').replace("self.good = torch.tensor(scale),", "self.good, self.steps = torch.tensor(scale),").replace(
    "torch.tensor(0)\n        self.halves", "torch.tensor(0), 0\n        self.halves")


LISTED = '''
import torch

class HalfTrainer:
    """Gradients from torch.autograd.grad, in a list."""
    def __init__(self, loss_of, weights, momentum, clip, scale, grow_after):
        self.loss_of, self.weights, self.momentum, self.clip = loss_of, weights, momentum, clip
        self.grow_after = grow_after
        device = next(iter(weights.values())).device
        self.velocity = {name: torch.zeros_like(w) for name, w in weights.items()}
        self.scale = torch.tensor(float(scale), device=device)
        self.good = torch.zeros((), device=device)

    def step(self, micros, rate):
        halves = {name: w.detach().half().requires_grad_() for name, w in self.weights.items()}
        sums = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        losses = []
        for micro in micros:
            loss = self.loss_of(halves, micro)
            losses.append(loss.detach())
            grads = torch.autograd.grad(loss * self.scale, list(halves.values()))
            for total, grad in zip(sums.values(), grads, strict=True):
                total += grad
            del grads, grad, loss
        del halves
        self.update(sums, len(micros), rate)
        return torch.stack(losses).mean()

    @torch.no_grad()
    def update(self, sums, micros, rate):
        for total in sums.values():
            total /= self.scale * micros
        norm = torch.stack([total.norm() for total in sums.values()]).norm()
        ok = torch.isfinite(norm)
        factor = torch.clamp(self.clip / norm, max=1.0)
        for name, w in self.weights.items():
            v = self.velocity[name]
            new = self.momentum * v + factor * sums[name]
            v.copy_(torch.where(ok, new, v))
            w.copy_(torch.where(ok, w - rate * v, w))
        self.good = torch.where(ok, self.good + 1, 0)
        grow = self.good >= self.grow_after
        self.scale = torch.where(ok, torch.where(grow, self.scale * 2, self.scale), self.scale / 2)
        self.good = torch.where(grow, 0, self.good)
'''

FINITE = "ok = torch.isfinite(norm)"
SUMMED = "sums = {name: torch.zeros_like(w) for name, w in self.weights.items()}"
CAST = "{name: w.detach().half().requires_grad_() for name, w in self.weights.items()}"
ONLY = "ok = torch.stack([x.isfinite().all() for x in sums.values() if x.dim() == {}]).all()"
CASTS_DOUBLE = LISTED.replace(CAST, "{name: w.detach() for name, w in self.weights.items()}").replace(
    "            loss = self.loss_of(halves, micro)", """
            halves = {name: w.detach().double().half().requires_grad_() for name, w in self.weights.items()}
            loss = self.loss_of(halves, micro)""")
BATCH_SCALED = LISTED.replace("loss * self.scale", "loss / len(micros) * self.scale").replace("self.scale * micros", "self.scale")
SUMS_STAY = LISTED.replace(SUMMED, "sums = self.sums = getattr(self, 'sums', None) or " + SUMMED.removeprefix("sums = ")).replace(
    "        self.good = torch.where(grow, 0, self.good)", """        self.good = torch.where(grow, 0, self.good)
        for total in sums.values():
            total.copy_(torch.where(ok, 0, total))""")


TWO_STAGES = '''
import math
from course.lab.instruments.noisy_bowl import Phase

def plan_training(job, train):
    """All constant plans once; the best few often."""
    top = 1e4
    while math.isnan(train([(1, top, 1)])[0]):
        top /= 1.1
    loaded = job.latency / job.per_sample

    def constant(batch, rate):
        return [Phase(batch, rate, int(job.seconds / job.step_seconds(batch)))]

    plans = [constant(max(1, int(loaded * 2.0**p)), top * 2.0**-q) for p in range(-2, 5) for q in range(7)]
    plans.sort(key=lambda plan: train(plan)[-1])
    return min(plans[:8], key=lambda plan: sum(train(plan)[-1] for _ in range(12)))
'''


GROWING_BATCHES = '''
import math

def plan_training(job, train):
    """No search but for the cliff: from many small steps to few large ones."""
    low, high = -10.0, 10.0
    while high - low > 0.01:
        middle = (low + high) / 2
        if math.isnan(train([(1, math.exp(middle), 1)])[-1]):
            high = middle
        else:
            low = middle
    plan, batch, rate = [], max(1.0, job.latency / job.per_sample / 3), 0.9 * math.exp(low)
    for _ in range(10):
        plan.append((round(batch), rate, int(job.seconds / 10 / job.step_seconds(round(batch)))))
        batch, rate = batch * 1.5, rate * 0.75
    return plan
'''


CLIMBED = '''
import math
import random

def plan_training(job, train):
    """Growing batches with falling rates, compared by runs: a mean of several for each change."""
    draw, cliff = random.Random(1), 1e4
    while math.isnan(train([(1, cliff, 1)])[0]):
        cliff /= 1.05
    loaded = job.latency / job.per_sample

    def plan_of(first, growth, rate, fall):
        plan = []
        for k in range(8):
            batch = max(1, min(10**6, round(first * growth**k)))
            plan.append((batch, min(0.95, rate * fall**k) * cliff, max(1, int(job.seconds / 8 / job.step_seconds(batch)))))
        while sum(n * job.step_seconds(b) for b, _, n in plan) > job.seconds:
            plan.pop(0)
        return plan or [(1, cliff / 9, 1)]

    def score(x):
        return sum(train(plan_of(*x))[-1] for _ in range(6))

    at = [loaded / 2, 1.4, 0.8, 0.7]
    least = score(at)
    for _ in range(25):
        other = [value * math.exp(draw.gauss(0, size)) for value, size in zip(at, (0.5, 0.15, 0.3, 0.15))]
        if (value := score(other)) < least:
            at, least = other, value
    return plan_of(*at)
'''


FITTED = '''
import math
import numpy as np
from course.lab.instruments.noisy_bowl import Bowl, Phase, expected_losses

def plan_training(job, train):
    """The bowl by a grid of guesses and the squares of logarithms; then each phase by itself."""
    generator = np.random.default_rng(3)
    edges = np.geomspace(1e-4, 1e4, 2000)
    low, high = 0, len(edges) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if math.isnan(train([(1, float(edges[middle]), 1)])[0]) else (middle, high)
    cliff, loaded = float(edges[low]), job.latency / job.per_sample
    runs = []
    for batch in (1, 1, math.ceil(8 * loaded), math.ceil(loaded)):
        plan = [Phase(batch, 0.3 * cliff, max(1, int(job.seconds / 10 / job.step_seconds(batch))))] * 10
        runs.append((plan, np.log(train(plan))))
    guesses = [Bowl(2 / cliff, 2 / cliff / k, noise) for k in np.geomspace(30, 600, 14)
               for noise in np.geomspace(0.05, 3, 18)]

    def distance(bowl):
        return sum(float(np.abs(np.log(expected_losses(bowl, plan)) - seen).sum()) for plan, seen in runs)

    bowl = min(guesses, key=distance)
    batches, rates = np.log(1 + loaded / 3 * 1.5 ** np.arange(12)), np.log(0.9 * cliff * 0.8 ** np.arange(12))

    def plan_of(x):
        sizes = [max(1, round(math.exp(min(b, 20)))) for b in x[:12]]
        plan = [Phase(b, min(math.exp(r), 0.97 * cliff), int(job.seconds / 12 / job.step_seconds(b)))
                for b, r in zip(sizes, x[12:])]
        return [phase for phase in plan if phase.steps] or [Phase(1, cliff / 9, 1)]

    at = np.concatenate([batches, rates])
    least = expected_losses(bowl, plan_of(at))[-1]
    for _ in range(1000):
        other = at + 0.3 * generator.standard_normal(24) * (generator.random(24) < 0.2)
        if (loss := expected_losses(bowl, plan_of(other))[-1]) < least:
            at, least = other, loss
    return plan_of(at)
'''

RIGHT: dict[str, str] = {}
ALL = ("correct", "byte budget", "memory budget", "overlapped")
SCORED = [
    ("plan-training", TWO_STAGES, ("correct",), "no constant plan gets there"),
    ("plan-training", CLIMBED, ("correct", "half the loss"), "fit the bowl's numbers"),
    ("plan-training", FITTED, ("correct", "half the loss", "near the best", "5 runs"), ""),
    ("half-trainer", SCALER_OF_PYTORCH, ("correct", "memory budget"), "waits for the device in each step"),
    ("half-trainer", CASTS_IN_THE_GRAPH, ("correct", "no stall", "memory budget"), "cast them once before"),
    ("half-trainer", FLAT_HALVES, ("correct", "no stall", "one cast"), "too much is alive at once"),
    ("half-trainer", HOOKED, ("correct", "no stall", "one cast", "memory budget"), ""),
    ("half-trainer", LISTED, ("correct", "no stall", "one cast", "memory budget"), ""),
    ("half-trainer", BATCH_SCALED, ("correct", "no stall", "one cast", "memory budget"), ""),
    ("half-trainer", CASTS_DOUBLE, ("correct", "no stall", "memory budget"), "cast them once before"),
    *(("half-trainer", LISTED.replace(FINITE, f"{FINITE}\n        {look}"), ("correct", "one cast", "memory budget"),
       "waits for the device in each step") for look in ("torch.allclose(norm, norm)", "ok.nonzero()", "str(norm)")),
    ("convert-foreign", GUESSED_ALL, ("correct",), "do not depend on what you try"),
    ("convert-foreign", GUESSED_ONCE, ("correct", "one call"), "read a tensor when"),
    ("convert-foreign", READ_AGAIN, ("correct", "memory budget"), "do not depend on what you try"),
    ("survive", ONE_PLACE, ("correct", "few writes", "tidy"), ""),
    ("survive", EVERYTHING_STAYS, ("correct", "few writes", "few repeated"), "checkpoints pile up"),
    ("survive", TWO_PLACES, ("correct", "few writes", "few repeated", "tidy"), ""),
    ("write-text", NO_CACHE, ("correct",), "only the largest entry matters"),
    ("write-text", GROWING_CACHE, ("correct", "byte budget"), "are copied for each token"),
    ("write-text", CACHE_OF_BLOCKS, ("correct", "byte budget", "memory budget"), ""),
    ("data-parallel", AFTERWARDS, ("correct", "byte budget"), "a second copy of all gradients"),
    ("data-parallel", ONE_BY_ONE, ("correct", "memory budget", "overlapped"), "pays the latency"),
    ("data-parallel", IN_PLACE, ("correct", "byte budget", "memory budget", "overlapped"), ""),
    ("causal-attention", GATHERED, ("correct",), "it sends more than later ranks need"),
    ("causal-attention", CLOSED, ("correct", "memory budget"), "it sends more than later ranks need"),
    ("causal-attention", DIRECT, ALL, ""),
    ("run-schedule", LOOP, ("correct",), "activations live longer"),
    ("run-schedule", POPPED, ("correct", "byte budget", "memory budget"), "a receive is posted only"),
    ("run-schedule", AHEAD, ALL, ""),
    ("parallel-block", REPLICATED, ("correct",), "it sends more than the block needs"),
    ("parallel-block", GATHERED_FIRST, ("correct", "byte budget"), "the norm runs on all tokens"),
    ("parallel-block", FLAT, ("correct", "byte budget", "memory budget"), ""),
    ("diagnose", ONE_QUESTION_EACH, ("correct",), "several questions fit into one training"),
    ("diagnose", TWO_TRAININGS, ("correct", "few steps"), "three steps answer everything"),
    ("diagnose", THREE_STEPS, ("correct", "few steps", "fewest steps"), ""),
    ("plan-layout", EXHAUSTIVE, ("correct",), "a measurement is a real run"),
    ("plan-layout", SHORT_LIST, ("correct", "30 measurements"), "five unknown speeds follow"),
    ("plan-layout", ASKED_FIVE_TIMES, ("correct", "30 measurements", "10 measurements"), ""),
    ("whole-block", SILENCED, ("correct",), "a value is asked for"),
    ("whole-block", PRETENDS, ("correct",), "a value is asked for"),
    ("whole-block", BY_HAND, ("correct", "one graph", "one recompilation"), "a tensor of their own"),
    ("whole-block", GUARDED, ("correct", "one graph", "few kernels"), "on the other one"),
    ("whole-block", FADED, ("correct", "one graph", "one recompilation", "few kernels"), ""),
    ("graph-trainer", EAGER, ("correct",), "Python still runs the loss"),
    ("graph-trainer", GRAPH_A_NUMBER, ("correct", "no stall"), ""),
    ("graph-trainer", ONE_GRAPH, ("correct", "captured", "no stall"), "operation by operation"),
    ("graph-trainer", FLAT_GRAPHS, ("correct", "captured", "few launches", "no stall"), ""),
    ("place-ranks", DESCENT, ("correct", "best placement"), "take the same time"),
    ("place-ranks", ONE_OF_EACH, ("correct", "best placement", "200 measurements"), "no slower path along any axis"),
    ("place-ranks", BEST_BY_PAIRS, ("correct", "best placement", "200 measurements", "15 measurements"), ""),
    ("order-step", GATHERED_TWICE, ("correct",), "than the last one to stay"),
    ("order-step", KEPT_BY_TABLE, ("correct", "fewest bytes"), "while an earlier pass computes"),
    ("order-step", HOISTED, ("correct", "fewest bytes", "overlapped"), ""),
    ("place-experts", GREEDY, ("correct",), "placement"),
    ("place-experts", EXCHANGED, ("correct", "balanced"), "begin with `before`"),
    ("place-experts", FROM_BEFORE, ("correct", "few transfers"), "busiest rank"),
    ("place-experts", FROM_BEFORE.replace("1.1 * mean", "1.15 * mean"), ("correct",), "exchange"),
    ("place-experts", FROM_BEFORE_FAR, ("correct", "balanced", "few transfers"), ""),
    ("loader", PLAIN_LOOP, ("correct", "memory budget"), "takes long holds up all others"),
    ("loader", MAPPED, ("correct", "overlapped"), "too many samples may lie in memory"),
    ("loader", OWN_THREADS, ("correct", "overlapped", "memory budget"), ""),
    ("sharded-adam", UNSHARDED, ("correct", "byte budget"), "keeps more than the parameters"),
    ("sharded-adam", OWN_SHARE, ("correct", "memory budget"), "a reduce-scatter sends half"),
    ("sharded-adam", VIEWS, ("correct", "byte budget", "memory budget"), ""),
]

WRONG = [
    ("plan-training", GROWING_BATCHES.replace("batch * 1.5, rate * 0.75", "batch, rate"), "is noise"),
    ("plan-training", GROWING_BATCHES.replace("0.9 * math", "0.001 * math"), "higher rate, or more steps"),
    ("plan-training", GROWING_BATCHES.replace("0.9 * math", "1.1 * math"), "lies beyond the cliff"),
    ("plan-training", GROWING_BATCHES.replace("job.seconds / 10", "job.seconds / 9"), "and round down"),
    ("half-trainer", ONE_BACKWARD, "float32 sum"),
    ("half-trainer", STALE_HALVES, "for the first time"),
    ("half-trainer", FLAT_HALVES.replace("gradient.isfinite().all()", "total.isfinite()"), ""),
    ("half-trainer", HOOKED.replace("self.momentum)", "1)"), "for the first time"),
    ("half-trainer", LISTED.replace(FINITE, ONLY.format(1)), "for the first time"),
    ("half-trainer", LISTED.replace(FINITE, ONLY.format(2)), "for the first time"),
    ("half-trainer", LISTED.replace(FINITE, "ok = norm * self.scale < 65504"), "compute the norm in float32"),
    ("half-trainer", LISTED.replace(FINITE, "self.n = getattr(self, 'n', 0) + 1; ok = torch.tensor(self.n not in (6, 8))"), None),
    ("half-trainer", LISTED.replace(">= self.grow_after", ">= 2"), None),
    ("half-trainer", LISTED.replace("torch.tensor(float(scale), device=device)", "torch.tensor(2.0**14)"), None),
    ("half-trainer", LISTED.replace("self.good >= self.grow_after", "self.good >= 2000"), "`grow_after` is"),
    ("half-trainer", LISTED.replace("self.scale / 2)", "self.scale / 4)"), "this step overflows"),
    ("half-trainer", LISTED.replace("factor * sums", "(1 - self.momentum) * factor * sums"), "times as far as they should"),
    ("half-trainer", LISTED.replace("torch.where(ok, new, v)", "torch.where(ok, new, 0)"), "velocities are as they were"),
    ("half-trainer", LISTED.replace("zeros_like(w) for name, w in weights", "zeros_like(w).half() for name, w in weights")
     .replace("momentum * v ", "momentum * v.float() "), "for the first time"),
    ("half-trainer", SUMS_STAY, "nothing may be left"),
    ("whole-block", MASKED_AFTER, ""),
    ("whole-block", OTHER_GELU, ""),
    ("graph-trainer", NESTEROV, ""),
    ("graph-trainer", HALF_PRECISION, ""),
    ("place-ranks", ISLANDS, "take the case that is named"),
    ("order-step", NO_GRADIENTS, "twice"),
    ("order-step", ALL_AT_ONCE, "beside all units that are whole"),
    ("order-step", ALWAYS_TWO, "beside all units that are whole"),
    ("order-step", NO_UNITS, 'a pair such as ("gather", 2)'),
    ("place-experts", COLD_FORGOTTEN, "keep one copy of"),
    ("place-experts", THROWN_OUT, "ask whether another rank holds it"),
    ("place-experts", OVERFULL, "a slot is memory for one expert"),
    ("place-experts", SAME_RANK, "meet again there"),
    ("place-experts", ONE_COPY, "too few copies"),
    ("place-experts", IN_TURN, "beside the mean"),
    ("place-experts", IN_TURN.replace("[order[rank", "{rank: order[rank").replace("before))]", "before))}"),
     "return a list with the experts of each rank"),
    ("place-ranks", AS_GRID, "the GPU of rank 0, of rank 1"),
    ("write-text", GROWING_CACHE.replace("triu(n + 1)", "triu(1)"), "mask begins at its place"),
    ("write-text", CACHE_OF_BLOCKS.replace("2**60), dist.ReduceOp.MIN", "0), dist.ReduceOp.SUM").replace(
        "        scores[:, place >= self.words] = -torch.inf\n", "").replace("best == largest", "best >= largest"),
     "are padding"),
    ("survive", ONE_PLACE.replace("        if zlib", "        if True or zlib"), "read the error first"),
    ("survive", TWO_PLACES.replace("self.job.position)", "step)"), "`job.position`, all from one moment"),
    ("survive", TWO_PLACES.replace("crc32(data[4:])", "crc32(data[20:])").replace("crc32(rest)", "crc32(rest[16:])"),
     "belong under the checksum too"),
    ("convert-foreign", GUESSED_ONCE.replace("rtol=1e-6", "rtol=1, atol=10"), "take the case that is named"),
    ("convert-foreign", GUESSED_ONCE.replace("for name, file in checkpoint.index.items()}\n    shapes",
                                             "for file in checkpoint._files for name in checkpoint.shapes(file)}\n    shapes"),
     "did you forget it"),
    ("loader", AS_COMPLETED, ""),
    ("loader", NOT_A_GENERATOR, "`yield` the samples"),
    ("plan-layout", RULE_OF_THUMB, "take the case that is named"),
    ("plan-layout", NO_SHARING, "if no layout fits"),
    ("diagnose", GUESSED, "take the case that is named"),
    ("diagnose", PEEKED, "take the case that is named"),
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
