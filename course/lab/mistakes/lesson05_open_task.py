"""Known wrong answers of lesson 05's open task, and correct ones that miss a level."""

from course.lab.checks.exercise import Mistake

ZERO = "    x = x.where(real, 0.0)\n"
ATTENTION = "    attended = F.scaled_dot_product_attention(q, k, v, real.mT[:, None])            # (B, h, T, d)\n"
FADE = "    fade = ((x.new_zeros(()) + step + 1) / WARM).clamp(max=1.0)\n"
QKV = """    qkv = F.linear(n, torch.cat([weights[name] for name in "qkv"])).unflatten(-1, (3, HEADS, -1))
    q, k, v = qkv.permute(2, 0, 3, 1, 4)                                # (B, h, T, d) each
"""
END = "    y = (x + more.where(open_gate, 0.0)).where(real, 0.0)\n"
LARGEST = "    return y, y.detach().abs().amax()"
PRODUCTS = """    more = F.linear(F.gelu(F.linear(n, weights["up"])), weights["down"])            # (B, T, D)
"""
EMPTY = ("a query of the padding has no key here: softmax of -inf alone is NaN, and the gradient of every weight with it. Mask "
         "keys only, (B, 1, 1, T), and set y to zero at the end")
NAN = ("what stands in the padding may be NaN, and 0 times NaN is NaN: give it zeros with `where` before anything is computed. A "
       "mask in the attention alone is too late")

MISTAKES = {
    "whole-block": (
        Mistake("zeros by a product", ZERO, "    x = x * real\n", NAN),
        Mistake("padding stays", ZERO, "", NAN),
        Mistake("no mask in the attention", ", real.mT[:, None])            # (B, h, T, d)", ")",
                "tokens also look at the padding of their sample: attention takes a mask, `attn_mask`, True where a key is real. "
                "Keys are the last dim of the scores, so it has the shape (B, 1, 1, T)"),
        Mistake("queries are masked too", ATTENTION,
                "    scores = q @ k.mT * q.shape[-1]**-0.5\n"
                "    both = (real & real.mT)[:, None]                            # (B, 1, T, T)\n"
                "    attended = scores.masked_fill(~both, -torch.inf).softmax(-1) @ v\n", EMPTY, by=("dx",)),
        Mistake("every gate is open", "more.where(open_gate, 0.0)", "more",
                "only tokens with an open gate go through the MLP: for the others nothing is added"),
        Mistake("the gate looks at the token before its norm", '(n * weights["gate"])', '(x * weights["gate"])',
                "the gate looks at the normed token, `n`, which also goes into the MLP: before the norm its sign may differ"),
        Mistake("the MLP replaces the token", END, "    y = more.where(open_gate, x).where(real, 0.0)\n",
                "where a gate is open, the MLP's output is added to the token: it does not replace it"),
        Mistake("one step less", "+ step + 1)", "+ step)",
                "attention fades in by (step + 1) / WARM: the first step has 1 / WARM"),
        Mistake("fades in for ever", ".clamp(max=1.0)", "",
                "after the warm-up attention counts fully, and not more: the factor is at most 1"),
        Mistake("padding comes out", END, "    y = x + more.where(open_gate, 0.0)\n",
                "queries in the padding get an answer from attention, too: set the padding of y to zero at the end"),
        Mistake("the largest with a gradient", ".detach().abs()", ".abs()",
                "the largest value is for a log: `detach` it, or training changes it", by=("free",)),
        Mistake("a number of Python", LARGEST, "    return y, torch.full((), y.detach().abs().max().item(), dtype=y.dtype)",
                "somewhere a value is asked for: `.item()`, `.tolist()`, `int()`, `any()` in an `if`. Keep a tensor of fixed "
                "shape that says the same", by=("values",)),
        Mistake("a mask as an index", PRODUCTS,
                "    chosen = n[real[..., 0]]\n    more = torch.zeros_like(n)\n    more[real[..., 0]] = F.linear(F.gelu(F.linear("
                'chosen, weights["up"])), weights["down"])\n',
                "`n[mask]` has as many rows as the mask is True: compute all tokens, and choose with `where`", by=("shapes",)),
        Mistake("an if on the step", FADE, "    fade = (step + 1) / WARM if step < WARM else 1.0\n",
                "`step` is a Python number. Dynamo notes on which side of an `if` it is, and compiles again on the other one: "
                "make it a tensor, and `clamp` that", by=("again",)),
        Mistake("scores that are kept", ATTENTION,
                "    scores = (q @ k.mT * q.shape[-1]**-0.5).masked_fill(~real.mT[:, None], -torch.inf)\n"
                "    attended = scores.softmax(-1) @ v\n",
                "the scores of all pairs of tokens are a tensor of their own, and two products: `F.scaled_dot_product_attention` "
                "is one kernel", by=("largest_tensor",)),
        Mistake("three products for q, k and v", QKV,
                "    q, k, v = (F.linear(n, weights[name]).unflatten(-1, (HEADS, -1)).transpose(1, 2) for name in 'qkv')\n",
                "q, k and v are products of the same tokens: with their weights in one matrix they are one product",
                by=("kernels",)),
    ),
}
