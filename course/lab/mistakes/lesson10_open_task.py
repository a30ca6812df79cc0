"""Known wrong answers of lesson 10's open task, and correct ones that miss a level."""

from course.lab.checks.exercise import Mistake

NORMED = '''        y = F.layer_norm(x, x.shape[-1:], shared(f"{norm}.weight"), shared(f"{norm}.bias"))      # (B, t, D)
        return mappings.gather(y, 1, axis, tokens)                                               # (B, T, D)
'''
SHARED = "return mappings.copy(weights[name], axis)"
ATTENTION = 'mappings.scatter(F.linear(y, weights["out.weight"]), 1, axis)'
OUT = f'x + {ATTENTION} + shared("out.bias")'
DOWN = OUT.replace("out.", "down.")
BIAS = ("the row bias is added before the sum over the ranks, so it counts once for each rank: add it after `scatter`, to this "
        "rank's tokens")

MISTAKES = {
    "parallel-block": (
        Mistake("gradients of norms stay partial", SHARED, "return weights[name]",
                "norms and row biases see only this rank's tokens, so their gradients are parts: let `mappings.copy` add them up "
                "over the axis in the backward pass"),
        Mistake("gradients of norms alone stay partial", SHARED,
                'return weights[name] if "norm" in name else mappings.copy(weights[name], axis)',
                "the norms see only this rank's tokens, so their gradients are parts, as those of the row biases are: "
                "`mappings.copy(weight, axis)`"),
        Mistake("gradients of row biases alone stay partial", SHARED,
                'return mappings.copy(weights[name], axis) if "norm" in name else weights[name]',
                "a row bias is added to this rank's tokens only, so its gradient is a part, as those of the norms are: "
                "`mappings.copy(bias, axis)`"),
        Mistake("the bias before the sum", DOWN,
                'x + mappings.scatter(F.linear(y, weights["down.weight"], weights["down.bias"]), 1, axis)', BIAS),
        Mistake("the attention's bias before the sum", OUT,
                'x + mappings.scatter(F.linear(y, weights["out.weight"], weights["out.bias"]), 1, axis)', BIAS),
        Mistake("summed whole and then cut", ATTENTION,
                'mappings.shard(mappings.reduce(F.linear(y, weights["out.weight"]), axis), 1, axis)',
                "`reduce` followed by a slice has the right value, but the gradients of other ranks' tokens get lost on the way "
                "back: `scatter` sums and cuts, and gathers the gradients in its backward pass"),
        Mistake("no gather before the column linears", NORMED, NORMED.replace("mappings.gather(y, 1, axis, tokens)", "y"),
                "a column linear has only this rank's features, so its output must cover all tokens: gather them before it, also "
                "before the MLP", stops="RuntimeError"),
        Mistake("heads before q, k and v", "unflatten(-1, (3, -1, head_dim))",
                "unflatten(-1, (-1, 3, head_dim)).transpose(2, 3)",
                "the rows of a rank's qkv are (3, h, d): first q of all its heads, then k, then v"),
        Mistake("heads of all ranks", "unflatten(-1, (3, -1, head_dim))",
                "unflatten(-1, (3, x.shape[-1] // head_dim, head_dim))",
                "a rank has only its own heads: take their number from the shape of the weight (-1 in `unflatten`), not from D",
                stops="RuntimeError"),
        Mistake("the MLP reads the block's input", f'    x = {OUT}   # (B, t, D)\n    y = all_tokens(x, "norm2")',
                f'    before, x = x, {OUT}\n    y = all_tokens(before, "norm2")',
                "the second norm reads the residual stream after attention was added, not the block's input"),
        Mistake("causal attention", "F.scaled_dot_product_attention(q, k, v)",
                "F.scaled_dot_product_attention(q, k, v, is_causal=True)",
                "every token attends to all tokens here: leave out `is_causal`"),
        Mistake("small weights are sent twice", SHARED,
                "return mappings.reduce(mappings.copy(weights[name], axis) / axis.size, axis)",
                "it sends more than the block needs. Each gather or scatter of the activation is needed once forward and once "
                "backward, and each small weight needs one all-reduce, in the backward pass", by=("sent",)),
        Mistake("the norm after the gather", NORMED, '''        y = mappings.gather(x, 1, axis, tokens)
        return F.layer_norm(y, x.shape[-1:], shared(f"{norm}.weight"), shared(f"{norm}.bias"))
''', "the norm runs on all tokens of every rank and keeps them for the backward pass: apply it to this rank's tokens, and gather "
     "its output", by=("lean",)),
    ),
}
