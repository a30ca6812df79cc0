"""Answers to exercises of lesson 17 that are not the library's own."""

RIGHT = {
    "block-flops": '''
def block_flops(tokens, dim, hidden, kv_dim, causal):
    """Matmul by matmul, (m, k) @ (k, n)."""
    def matmul(m, k, n):
        return 2 * m * k * n

    linears = 0
    for k, n in [(dim, dim), (dim, kv_dim), (dim, kv_dim), (dim, dim), (dim, hidden), (hidden, dim)]:
        linears += matmul(tokens, k, n) + matmul(tokens, n, k) + matmul(n, tokens, k)
    scores = matmul(tokens, dim, tokens)
    attention = sum(scores for _ in ("QK", "PV", "QK again", "dP", "dV", "dQ", "dK"))
    if causal:
        attention = attention / 2
    return [linears, attention]
''',
    "activation-bytes": '''
import torch

def activation_bytes(tokens, dim, hidden, tp, sp):
    kept = {"norm 1": (dim, 4, False), "normed 1": (dim, 2, False), "q": (dim, 2, True), "k": (dim, 2, True), "v": (dim, 2, True),
            "answer": (dim, 2, True), "norm 2": (dim, 4, False), "normed 2": (dim, 2, False), "up": (hidden, 2, True),
            "gelu": (hidden, 2, True)}
    total = torch.tensor(0.0, dtype=torch.float64)
    for numbers, each, inside in kept.values():
        total += tokens * numbers * each / (tp if inside or sp else 1)
    return total
''',
    "all-reduce-seconds": '''
def all_reduce_seconds(size, ranks, latency, bandwidth):
    """Step by step."""
    seconds = 0
    for _ in ("reduce-scatter", "all-gather"):
        for _ in range(ranks - 1):
            seconds += latency + (size / ranks) / bandwidth
    return seconds
''',
    "pipeline-seconds": '''
def pipeline_seconds(stages, micros, chunks):
    most = 0
    for seconds in stages:
        most = seconds if seconds > most else most
    once = sum(stages) / chunks
    return once + (micros - 1 / chunks) * most
''',
    "step-seconds": '''
def block_flops(T, D, M, K, causal):
    return 6 * T * (2 * D * D + 2 * D * K + 2 * D * M), 14 * T * T * D / (2 if causal else 1)

def step_seconds(run, rates):
    """Without the other exercises' functions, but for one; micro-batch by micro-batch."""
    n, tp = run.samples * run.tokens, run.tp
    a, b = block_flops(run.tokens, run.dim, run.hidden, run.dim, run.causal)
    ring = 2 * (tp - 1) * (rates.latency + 2 * n * run.dim / tp / rates.bandwidth)
    layer = run.samples * a / tp / rates.matmul + run.samples * b / tp / rates.attention + run.moved / rates.memory + 4 * ring
    head = 6 * n * run.dim * run.vocab / tp / rates.matmul
    middle, last = run.depth // run.pp * layer, run.depth // run.pp * layer + head
    seconds = (run.pp - 1) * middle
    for _ in range(run.micros):
        seconds += last
    return seconds + run.update / rates.memory
''',
}

WRONG = [
    ("block-flops", RIGHT["block-flops"].replace('"QK again", ', ""), "keeps no scores"),
    ("block-flops", RIGHT["block-flops"].replace("(dim, kv_dim), (dim, kv_dim)", "(dim, dim), (dim, dim)"), "kv_dim features"),
    ("block-flops", RIGHT["block-flops"].replace(" + matmul(n, tokens, k)", ""), "a linear map's backward pass has two matmuls"),
    ("block-flops", "def block_flops(*a):\n    return 6.0 * 1024 * 12 * 2048**2, 7.0 * 1024**2 * 2048\n", ""),
    ("activation-bytes", RIGHT["activation-bytes"].replace("if inside or sp else 1", ""), "with tp only (sp=False)"),
    ("activation-bytes", RIGHT["activation-bytes"].replace('"gelu": (hidden, 2, True)', ""), "kept twice"),
    ("activation-bytes", RIGHT["activation-bytes"].replace("(dim, 4, False)", "(dim, 2, False)"), "4 bytes a number"),
    ("all-reduce-seconds", RIGHT["all-reduce-seconds"].replace(', "all-gather"', ","), "an all-gather has to follow"),
    ("all-reduce-seconds", RIGHT["all-reduce-seconds"].replace("(size / ranks)", "size"), "one piece"),
    ("all-reduce-seconds", RIGHT["all-reduce-seconds"].replace("range(ranks - 1)", "range(ranks)"), "n - 1 others"),
    ("pipeline-seconds", RIGHT["pipeline-seconds"].replace("return once", "once = 0\n    return once").replace(
        "micros - 1 / chunks", "micros"), "also waits"),
    ("pipeline-seconds", "def pipeline_seconds(stages, micros, chunks):\n"
     "    return (micros + (len(stages) - 1) / chunks) * max(stages)\n", "ranks differ"),
    ("pipeline-seconds", RIGHT["pipeline-seconds"].replace("once = sum(stages) / chunks", "once = sum(stages)").replace(
        "1 / chunks", "1"), "so is the bubble"),
    ("step-seconds", RIGHT["step-seconds"].replace("4 * ring", "2 * ring"), "a block has two all-reduces in the forward pass"),
    ("step-seconds", RIGHT["step-seconds"].replace(" + run.update / rates.memory", ""), "the optimizer moves `update` bytes"),
    ("step-seconds", RIGHT["step-seconds"].replace("run.samples * a / tp", "run.samples * a").replace(
        "run.samples * b / tp", "run.samples * b"), "a rank computes 1/tp"),
]
