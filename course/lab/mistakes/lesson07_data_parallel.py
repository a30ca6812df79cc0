"""Known wrong answers of lesson 07."""

from course.lab.checks.exercise import Mistake

EARLY = ("a bucket is sent before its gradients are there: its all-reduce needs a ready bucket *and* a free network, so the "
         "later of the two times counts")
RECEIVE = ("irecv returns before the data has arrived: keep what it returns, and wait for it before you add or copy `coming`")
ROUNDED = ("with numel // n numbers in each of n pieces, the remainder is never added. If there are fewer numbers than ranks, "
           "all pieces are empty. tensor_split(n) distributes the remainder too")
ROUNDS = ("look at both rounds. In the first, a rank *adds* what arrives to its own numbers. The second begins with the piece "
          "that is complete by then: its index is the right neighbor's position")
SECOND = ("this is right only for two ranks, where there are only two pieces. In the second round too, a rank passes on what "
          "arrived one step earlier: begin with the complete piece, and count in the same direction")

MISTAKES = {
    "ring-all-reduce": (
        Mistake("adds all the way round", "pieces[at - 1].copy_(coming)", "pieces[at - 1].add_(coming)",
                "in the second round, complete sums arrive: they replace the rank's own numbers, so copy them instead of adding"),
        Mistake("only half the way", "range(2 * (axis.size - 1))", "range(axis.size - 1)",
                "after n - 1 steps each rank has the complete sum of one piece: pass these sums on in n - 1 more steps"),
        Mistake("the wrong way", "at = (axis.rank - step) % axis.size", "at = (axis.rank + step) % axis.size",
                "a rank sends in each step what it received one step earlier. The pieces move to the right, so count down"),
        Mistake("the second round from the first piece", "at = (axis.rank - step) % axis.size",
                "at = (axis.rank - step % (axis.size - 1)) % axis.size",
                ROUNDS),
        Mistake("its input overwritten", "total = x.clone()", "total = x",
                "it writes into x, which the caller still needs: begin with a copy"),
        Mistake("a step too many in each round", "axis.size - 1", "axis.size",
                "n - 1 steps complete the sums, and n - 1 more bring them to all ranks. In one more step, a rank's own piece "
                "comes back"),
        Mistake("the mean", "return total", "return total / axis.size",
                "an all-reduce returns the sum: a caller that wants the mean divides"),
        Mistake("everything every time", "    for step in range(2 * (axis.size - 1)):",
                "    passing = x.clone()\n    for step in range(axis.size - 1):\n        coming = torch.empty_like(x)\n"
                "        works = [dist.isend(passing, right, axis.group), dist.irecv(coming, left, axis.group)]\n"
                "        for work in works:\n            work.wait()\n        total += coming\n        passing = coming\n"
                "    for step in range(0):",
                "a rank sends more than necessary, for example the whole tensor in each step: cut it into n pieces, and send "
                "one piece a step"),
        Mistake("a collective", "    for step in range(2 * (axis.size - 1)):",
                "    dist.all_reduce(total, group=axis.group)\n    for step in range(0):",
                "the sum is right, but dist.all_reduce computed it: use isend and irecv"),
        Mistake("each sends first",
                "for work in [dist.isend(pieces[at], right, axis.group), dist.irecv(coming, left, axis.group)]:\n"
                "            work.wait()",
                "dist.send(pieces[at].contiguous(), right, axis.group)\n        dist.recv(coming, left, axis.group)",
                "every rank waits in its send until its neighbor receives: start both, then wait for both", silent=True,
                waits=True),
        Mistake("positions for ranks", "axis.ranks[(axis.rank + 1) % axis.size], axis.ranks[axis.rank - 1]",
                "(axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size",
                "isend and irecv take ranks, axis.ranks[...], not positions along the axis", silent=True, waits=True),
        Mistake("never waited for",
                "for work in [dist.isend(pieces[at], right, axis.group), dist.irecv(coming, left, axis.group)]:\n"
                "            work.wait()",
                "dist.isend(pieces[at], right, axis.group)\n        dist.irecv(coming, left, axis.group).wait()",
                "keep what isend returns, and wait for it too: without a wait, the message may never leave"),
        Mistake("receives never waited for",
                "for work in [dist.isend(pieces[at], right, axis.group), dist.irecv(coming, left, axis.group)]:\n"
                "            work.wait()",
                "dist.irecv(coming, left, axis.group)\n        dist.isend(pieces[at], right, axis.group).wait()", RECEIVE),
        Mistake("nothing waited for",
                "for work in [dist.isend(pieces[at], right, axis.group), dist.irecv(coming, left, axis.group)]:\n"
                "            work.wait()",
                "dist.isend(pieces[at], right, axis.group)\n        dist.irecv(coming, left, axis.group)",
                "isend and irecv return at once. Keep what both return. Call wait() on it before you use `coming` and before "
                "you write into the piece that you send"),
        Mistake("waited for at the end", "    for step in range(2 * (axis.size - 1)):",
                "    works = []\n    for step in range(2 * (axis.size - 1)):\n        at = (axis.rank - step) % axis.size\n"
                "        coming = torch.empty_like(pieces[at - 1])\n"
                "        works += [dist.isend(pieces[at], right, axis.group), dist.irecv(coming, left, axis.group)]\n"
                "        if step < axis.size - 1:\n            pieces[at - 1].add_(coming)\n        else:\n"
                "            pieces[at - 1].copy_(coming)\n    for work in works:\n        work.wait()\n    for step in "
                "range(0):",
                RECEIVE),
        Mistake("pieces rounded down", "pieces = total.view(-1).tensor_split(axis.size)",
                "flat, each = total.view(-1), total.numel() // axis.size\n"
                "    pieces = [flat[i * each:(i + 1) * each] for i in range(axis.size)]", ROUNDED),
        Mistake("fewer pieces than ranks", "total.view(-1).tensor_split(axis.size)", "total.view(-1).chunk(axis.size)",
                "there are fewer pieces than ranks. `chunk` and `split` may return fewer than n pieces. tensor_split(n) always "
                "returns n, some of them empty", stops="IndexError"),
        Mistake("a second round that counts up", "at = (axis.rank - step) % axis.size",
                "at = (axis.rank - step if step < axis.size - 1 else axis.rank + step - axis.size + 2) % axis.size", SECOND),
        Mistake("a second round from the left piece", "at = (axis.rank - step) % axis.size",
                "at = (axis.rank - step - (2 if step >= axis.size - 1 else 0)) % axis.size", SECOND),
        Mistake("over its own", "pieces[at - 1].add_(coming)", "pieces[at - 1].copy_(coming)",
                ROUNDS),
        Mistake("as large as what leaves", "torch.empty_like(pieces[at - 1])", "torch.empty_like(pieces[at])",
                "pieces differ in size: receive into a tensor as large as the piece that *arrives*, not as the one that you "
                "send", stops="ranks"),
        Mistake("along a chain", "    for step in range(2 * (axis.size - 1)):",
                "    n, rank = axis.size, axis.rank\n    if rank > 0:\n        coming = torch.empty_like(x)\n"
                "        dist.recv(coming, left, axis.group)\n        total += coming\n"
                "    if rank < n - 1:\n        dist.send(total, right, axis.group)\n"
                "    if rank != n - 1:\n        dist.recv(total, left, axis.group)\n"
                "    if rank != n - 2:\n        dist.send(total, right, axis.group)\n    for step in range(0):",
                "the whole tensor moves along a chain and back, while all other ranks wait: cut it into n pieces, so that each "
                "rank sends one of them in every step"),
        Mistake("to the left", "    for step in range(2 * (axis.size - 1)):",
                "    for step in range(2 * (axis.size - 1)):\n        at = (axis.rank + step) % axis.size\n"
                "        home = pieces[(at + 1) % axis.size]\n        coming = torch.empty_like(home)\n"
                "        for work in [dist.isend(pieces[at], left, axis.group), dist.irecv(coming, right, axis.group)]:\n"
                "            work.wait()\n        home.copy_(home + coming if step < axis.size - 1 else coming)\n    for step "
                "in range(0):",
                "the sum is right, but the ring runs the other way: send to the right, axis.ranks[(axis.rank + 1) % "
                "axis.size], and receive from the left"),
        Mistake("no ring", "    for step in range(2 * (axis.size - 1)):",
                "    others = [(axis.rank + i) % axis.size for i in range(1, axis.size)]\n"
                "    for there, here in zip(others, others[::-1]):\n        coming = torch.empty_like(pieces[axis.rank])\n"
                "        works = [dist.isend(pieces[there], axis.ranks[there], axis.group),\n"
                "                 dist.irecv(coming, axis.ranks[here], axis.group)]\n"
                "        for work in works:\n            work.wait()\n        pieces[axis.rank].add_(coming)\n"
                "    for there, here in zip(others, others[::-1]):\n        coming = torch.empty_like(pieces[here])\n"
                "        works = [dist.isend(pieces[axis.rank], axis.ranks[there], axis.group),\n"
                "                 dist.irecv(coming, axis.ranks[here], axis.group)]\n"
                "        for work in works:\n            work.wait()\n        pieces[here].copy_(coming)\n"
                "    for step in range(0):",
                "the number of bytes is right, but every rank sends to all others: in a ring, a rank talks only to its two "
                "neighbors"),
        Mistake("rows for numbers", "total.view(-1).tensor_split", "total.tensor_split",
                "tensor_split cuts along the first dim, here into unequal pieces: flatten the tensor first with .view(-1)"),
    ),
    "average-gradients": (
        Mistake("a missing all-reduce", "dist.all_reduce(flat, group=axis.group)", "pass",
                "each rank still has the gradients of its own samples only: sum them over the axis first with an all-reduce"),
        Mistake("a sum for a mean", "flat /= axis.size", "pass",
                "after the all-reduce the gradients are sums over the ranks: divide by axis.size"),
        Mistake("not copied back", "gradient.copy_(averaged)", "pass",
                "the averages are computed, but the parameters keep their own gradients: copy them back into p.grad"),
        Mistake("divided twice", "flat /= axis.size", "flat /= axis.size**2",
                "the gradients are too small by a factor of the number of ranks: divide once"),
        Mistake("one after another", "flat = _flatten_dense_tensors(gradients)",
                "for gradient in gradients:\n        dist.all_reduce(gradient, group=axis.group)\n        gradient /= axis.size\n"
                "    return\n    flat = _flatten_dense_tensors(gradients)",
                "the means are right, but each gradient has its own all-reduce and pays the latency again: concatenate all "
                "gradients, and all-reduce them once"),
        Mistake("everything gathered", "    dist.all_reduce(flat, group=axis.group)\n",
                "    everyone = [flat.clone() for _ in range(axis.size)]\n"
                "    dist.all_gather(everyone, flat, group=axis.group)\n    flat = sum(everyone)\n",
                "the means are right, but each rank receives the gradients of all others, (n - 1) times their size. An "
                "all-reduce sends at most twice their size, for any number of ranks"),
        Mistake("through one rank", "    dist.all_reduce(flat, group=axis.group)\n",
                "    dist.reduce(flat, axis.ranks[0], group=axis.group)\n    dist.broadcast(flat, axis.ranks[0], "
                "group=axis.group)\n",
                "these are two collectives, and one rank is the bottleneck of both: use one all-reduce"),
        Mistake("gone through twice", "flat = _flatten_dense_tensors(gradients)",
                "flat = _flatten_dense_tensors(gradients)\n    gradients = [p.grad for p in parameters if p.grad is not None]",
                "`parameters` may be a generator, as model.parameters() is, and a generator yields nothing the second time: go "
                "through it once, and keep a list of the gradients"),
        Mistake("zeros for a missing one", "gradients = [p.grad for p in parameters if p.grad is not None]",
                "parameters = list(parameters)\n    for p in parameters:\n        if p.grad is None:\n"
                "            p.grad = p.detach() * 0\n    gradients = [p.grad for p in parameters]",
                "a parameter whose grad is None took no part in this step: leave it out, otherwise the optimizer moves it"),
        Mistake("the world's size", "flat /= axis.size", "flat /= dist.get_world_size()",
                "the axis has fewer ranks than there are processes: divide by axis.size"),
        Mistake("the world's sum", "dist.all_reduce(flat, group=axis.group)", "dist.all_reduce(flat)",
                "without a group, all processes are summed, those along other axes too: pass group=axis.group"),
        Mistake("in float32", "flat = _flatten_dense_tensors(gradients)",
                "flat = _flatten_dense_tensors([gradient.float() for gradient in gradients])",
                "nearly right, but the conversion loses digits: keep the dtype of the gradients"),
        Mistake("an axis of one", "if axis.size == 1:\n        return", "pass",
                "an axis of one rank has nothing to average, and a single process may have no group: return before the "
                "collective"),
        Mistake("one rank never arrives", "flat = _flatten",
                "if axis.rank == axis.size - 1:\n        return\n    flat = _flatten",
                "every rank of the axis has to call the collective", silent=True),
    ),
    "in-buckets": (
        Mistake("elements for bytes", "parameter.nbytes", "parameter.numel()",
                "the size is in bytes: a float32 element has 4, a float64 element has 8. nbytes counts them"),
        Mistake("one too many", "full + parameter.nbytes > size", "full > size",
                "check before you add: a bucket that is not full may still have no room for this parameter"),
        Mistake("never empty again", "buckets.append([])\n            full = 0.0", "buckets.append([])",
                "a new bucket is empty: count its bytes from zero again"),
        Mistake("formats mixed", " or parameter.dtype != buckets[-1][0].dtype", "",
                "one tensor cannot hold both float32 and float64: begin a new bucket where the dtype changes"),
        Mistake("a large one left out", "    for parameter in parameters:",
                "    for parameter in [p for p in parameters if p.nbytes <= size]:",
                "a parameter larger than a bucket still needs its gradient averaged: it gets a bucket of its own"),
        Mistake("no room for the last", "full + parameter.nbytes > size", "full + parameter.nbytes >= size",
                "a bucket holds up to `size` bytes: a parameter that fills it to the last byte still goes in"),
        Mistake("an empty one first", "buckets: list[list[nn.Parameter]] = []", "buckets: list[list[nn.Parameter]] = [[]]",
                "if the first parameter is larger than a bucket, this leaves an empty bucket before it", stops="IndexError"),
        Mistake("the last one lost", "return buckets", "return buckets[:-1]",
                "the last bucket may not be full, but it has to be sent too: keep it when the parameters end"),
        Mistake("an empty one for no parameters", "return buckets", "return buckets or [[]]",
                "without parameters there is nothing to send: return an empty list"),
        Mistake("each alone", "full + parameter.nbytes > size", "True",
                "every parameter has its own bucket, so there are as many messages as parameters: fill a bucket first"),
        Mistake("sorted by format", "    for parameter in parameters:",
                "    kinds = list(dict.fromkeys(parameter.dtype for parameter in parameters))\n"
                "    for parameter in sorted(parameters, key=lambda parameter: kinds.index(parameter.dtype)):",
                "only neighbors share a bucket: a parameter of another dtype begins a new bucket, and the order stays. This "
                "joins parameters that are not neighbors, so their bucket waits for the last of them"),
        Mistake("a bucket kept open for each format", "    for parameter in parameters:",
                "    there = {}\n    for parameter in parameters:\n        bucket, full = there.get(parameter.dtype, (None, 0))\n"
                "        if bucket is None or full + parameter.nbytes > size:\n            bucket, full = [], 0\n"
                "            buckets.append(bucket)\n        bucket.append(parameter)\n"
                "        there[parameter.dtype] = bucket, full + parameter.nbytes\n    for parameter in ():",
                "only neighbors share a bucket: when the dtype changes, the previous bucket is closed for good. An open bucket "
                "gets parameters that are not neighbors, and then waits for the last of them"),
        Mistake("wherever there is room", "    for parameter in parameters:",
                "    for parameter in parameters:\n        room = [bucket for bucket in buckets if bucket[0].dtype == "
                "parameter.dtype"
                " and\n                sum(other.nbytes for other in bucket) + parameter.nbytes <= size]\n"
                "        if room:\n            room[0].append(parameter)\n        else:\n            "
                "buckets.append([parameter])\n"
                "    for parameter in ():",
                "only the last bucket takes parameters, so the order stays. A parameter that fills a gap in an earlier bucket "
                "makes that bucket wait for a late gradient"),
        Mistake("four bytes each", "parameter.nbytes", "4 * parameter.numel()",
                "not every element has 4 bytes: float64 has 8. nbytes counts them, as numel() * element_size() does"),
        Mistake("megabytes", "parameter.nbytes > size", "parameter.nbytes > size * 2**20",
                "`size` is already in bytes, not in megabytes"),
        Mistake("closed when full", "full + parameter.nbytes > size", "full >= size",
                "check before you add: a bucket that is not full may still have no room for this parameter"),
        Mistake("the other way round", "for parameter in parameters", "for parameter in reversed(parameters)",
                "keep the given order: the caller has put the last layers first"),
        Mistake("by size", "for parameter in parameters", "for parameter in sorted(parameters, key=lambda one: one.nbytes)",
                "keep the given order: gradients become ready in this order, and a bucket is sent when its last gradient is "
                "ready"),
        Mistake("the format of the first bucket", "buckets[-1][0].dtype", "buckets[0][0].dtype",
                "compare with the last bucket, which is being filled, not with the first"),
        Mistake("still full after another format", "            full = 0.0\n",
                "            full = 0.0 if full + parameter.nbytes > size else full\n",
                "a new bucket is empty, also if a new dtype began it: count its bytes from zero again"),
        Mistake("room for elements", "full + parameter.nbytes", "full + parameter.numel()",
                "count the size of a parameter in bytes too: nbytes, not numel()"),
    ),
    "overlap": (
        Mistake("too early", " and not any(ddp.early[ddp.started].waiting)", "",
                "a bucket's all-reduce starts before all of its gradients are there: start it when no gradient is waiting"),
        Mistake("every pass", "bucket.waiting[index] -= 1", "bucket.waiting[index] = 0",
                "with micro-batches, a gradient is complete only after the last of them: count the passes down"),
        Mistake("when the first parameter comes", "while ddp.started", "while index == 0 and ddp.started",
                "which gradient of a bucket comes last is not fixed: start the bucket when none of them is waiting any more"),
        Mistake("after backward", "while ddp.started", "while False and ddp.started",
                "the result is right, but nothing is sent until backward is over: start each bucket as soon as it is complete"),
        Mistake("an empty bucket", "bucket.take(index)", "pass",
                "the bucket never gets its gradients: bucket.take(index) moves a gradient in"),
        Mistake("not waited", "bucket.work.wait()", "pass",
                "the sum may not be there yet: wait for bucket.work before you use bucket.flat"),
        Mistake("a sum for a mean", "divide_by_size(bucket.flat, axis)", "pass",
                "after the all-reduce, a bucket holds sums over the ranks: divide by axis.size after the wait"),
        Mistake("waited at once", "async_op=True)", "async_op=True)\n    bucket.work.wait()",
                "the backward pass stops until the all-reduce is over: do not wait here, finish_mean does"),
        Mistake("the world's sum", "group=axis.group, ", "",
                "without a group, all processes are summed, those along other axes too: pass group=axis.group"),
        Mistake("gathered, not added",
                "bucket.work = dist.all_reduce(bucket.flat, mean_op(bucket.flat), group=axis.group, async_op=True)",
                "parts = [bucket.flat.new_empty(bucket.flat.shape) for _ in range(axis.size)]\n"
                "    bucket.work = dist.all_gather(parts, bucket.flat, group=axis.group, async_op=True)",
                "an all-gather brings the other ranks' gradients here and adds nothing up: all-reduce `bucket.flat`"),
        Mistake("not at the same time",
                "bucket.work = dist.all_reduce(bucket.flat, mean_op(bucket.flat), group=axis.group, async_op=True)",
                "dist.all_reduce(bucket.flat, mean_op(bucket.flat), group=axis.group)\n"
                "    bucket.work = __import__('types').SimpleNamespace(wait=lambda: None)",
                "without async_op=True, dist.all_reduce returns only when the sum is there, and the backward pass waits"),
        Mistake("divided by the world's size", "divide_by_size(bucket.flat, axis)", "bucket.flat.div_(dist.get_world_size())",
                "the axis has fewer ranks than there are processes: for a mean over the axis, divide by axis.size"),
        Mistake("all with the last",
                "while ddp.started < len(ddp.early) and not any(ddp.early[ddp.started].waiting):\n"
                "        ddp.start(ddp.early[ddp.started])\n        ddp.started += 1",
                "if not any(any(each.waiting) for each in ddp.early):\n        for each in ddp.early:\n"
                "            ddp.start(each)\n            ddp.started += 1",
                "all buckets wait for the last gradient, and by then no backward pass is left to hide them: start a bucket as "
                "soon as it and those before it are complete"),
        Mistake("one at a time", "while ddp.started", "if ddp.started",
                "if gradients arrive out of order, several buckets may be complete at once: continue while the next one is "
                "complete"),
        Mistake("gathered at the same time",
                "bucket.work = dist.all_reduce(bucket.flat, mean_op(bucket.flat), group=axis.group, async_op=True)",
                "parts = [bucket.flat.clone() for _ in range(axis.size)]\n"
                "    under_way = dist.all_gather(parts, bucket.flat, group=axis.group, async_op=True)\n"
                "    bucket.work = __import__('types').SimpleNamespace(\n"
                "        wait=lambda: (under_way.wait(), bucket.flat.copy_(sum(parts))))",
                "another collective than an all-reduce is called. An all-gather brings every rank the buckets of all others, "
                "(n - 1) times the size. A reduce-scatter or a reduce needs a second call, which waits for the first. Start an "
                "all-reduce, which sends at most twice the size"),
        Mistake("reduced to one rank",
                "bucket.work = dist.all_reduce(bucket.flat, mean_op(bucket.flat), group=axis.group, async_op=True)",
                "bucket.work = dist.reduce(bucket.flat, axis.ranks[0], group=axis.group, async_op=True)",
                "a reduce brings the sum to one rank only, but every rank needs it: use all_reduce"),
        Mistake("divided twice", "divide_by_size(bucket.flat, axis)",
                "divide_by_size(bucket.flat, axis)\n    divide_by_size(bucket.flat, axis)",
                "the gradients are too small by a factor of the number of ranks: divide once, before or after the all-reduce"),
        Mistake("a copy is sent", "dist.all_reduce(bucket.flat,", "dist.all_reduce(bucket.flat.clone(),",
                "the sum goes into a copy that nobody reads: all-reduce bucket.flat itself, because every `parameter.grad` is "
                "a view of it"),
        Mistake("the last one of a bucket", "while ddp.started < len(ddp.early) and not any(ddp.early[ddp.started].waiting):",
                "if index == len(bucket.waiting) - 1 and not bucket.waiting[index]:",
                "the last parameter's gradient need not arrive last, and this bucket need not be the next one: test what is "
                "waiting, not the index", silent=True),
        Mistake("whose turn it is not", "while ddp.started < len(ddp.early) and not any(ddp.early[ddp.started].waiting):",
                "if not any(bucket.waiting):",
                "this bucket is complete, but the code starts the next bucket in order, which may not be complete: test "
                "ddp.early[ddp.started], not `bucket`"),
        Mistake("started again and again", "        ddp.started += 1\n", "",
                "increase ddp.started after you start a bucket: otherwise the same bucket stays the next "
                "one forever", silent=True,
                waits=True),
        Mistake("in the order of arrival", "while ddp.started < len(ddp.early) and not any(ddp.early[ddp.started].waiting):\n"
                "        ddp.start(ddp.early[ddp.started])", "if not any(bucket.waiting):\n        ddp.start(bucket)",
                "all ranks must start the buckets in the same order, whichever is complete first", silent=True),
    ),
    "collective-times": (
        Mistake("all at once", "begin = max(at, free)", "begin = at",
                "an all-reduce begins while the previous one still runs: they run one after another"),
        Mistake("before it is ready", "begin = max(at, free)", "begin = free",
                EARLY),
        Mistake("its own seconds after the last began", "begin = max(at, free)",
                "begin = max(at, (times[-1][0] if times else 0.0) + lasts)",
                "the network is free when the previous all-reduce has lasted *its* seconds, not those of this one"),
        Mistake("never idle", "begin = max(at, free)", "begin = free if times else at",
                "the network may be idle when a bucket becomes ready: take the later of the two times for every bucket"),
        Mistake("one after the other", "begin = max(at, free)", "begin = at + free",
                "the next all-reduce waits until the bucket is ready and the network is free: take the later time, not the sum"),
        Mistake("after backward", "begin = max(at, free)", "begin = max(*ready, free)",
                "every all-reduce waits until the last bucket is ready: this is the naive way, without overlap"),
        Mistake("no time at all", "free = begin + lasts", "free = begin",
                "an all-reduce takes its `seconds`: the network is free when it ends"),
        Mistake("sorted", "zip(ready, seconds, strict=True)", "sorted(zip(ready, seconds, strict=True))",
                "all-reduces run in the order of the buckets: a bucket that is ready early still waits for those before it"),
        Mistake("how long it takes", "times.append((begin, free))", "times.append((begin, lasts))",
                "the second number is the time at which the all-reduce ends, not its duration"),
        Mistake("late", "times.append((begin, free))", "times.append((at, free))",
                "the first number is the time at which the all-reduce begins: that may be later than the time at which its "
                "bucket was ready"),
        Mistake("from when the one before was ready", "free = begin + lasts", "free = at + lasts",
                "the network is free when the previous all-reduce has *ended*, and that one may have begun later than its "
                "bucket was ready: add `seconds` to its begin, not to `ready`"),
        Mistake("waiting from when the one before was ready", "free = begin + lasts\n        times.append((begin, free))",
                "free = at + lasts\n        times.append((begin, begin + lasts))",
                "the network is free when the previous all-reduce has *ended*, and that one may have begun later than its "
                "bucket was ready: add `seconds` to its begin, not to `ready`"),
        Mistake("the earlier of both", "max(at, free)", "min(at, free)",
                EARLY),
        Mistake("from the last bucket on", "zip(ready, seconds, strict=True)", "list(zip(ready, seconds, strict=True))[::-1]",
                "bucket 0 goes first: the list is already in the order of sending"),
        Mistake("who is ready goes first", "    for at, lasts in zip(ready, seconds, strict=True):\n",
                "    times = [None] * len(ready)\n    for i in sorted(range(len(ready)), key=lambda i: ready[i]):\n"
                "        begin = max(ready[i], free)\n        free = begin + seconds[i]\n        times[i] = begin, free\n"
                "    return times\n    for at, lasts in zip(ready, seconds, strict=True):\n",
                "all-reduces run in the order of the buckets: a bucket that is ready early still waits for those before it"),
        Mistake("begins with backward", "begin = max(at, free)", "begin = max(at, free) if times else 0.0",
                "the first all-reduce has to wait too, until the first bucket is ready"),
        Mistake("begins when the one before was ready", "begin = max(at, free)",
                "begin = max(at, ready[len(times) - 1] if times else 0.0)",
                "it is not enough that the previous bucket was ready: its all-reduce has to end before the next one begins"),
    ),
}
