import dataclasses
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course import config
from course.models import GPTConfig, build_model, gpt
from course.models.layers import apply_rope, rope_cos_sin
from course.parallel import initialize_serial, serial_placements
from course.utils.errors import CourseError

CONFIG = GPTConfig(vocab=37, context=11, dim=24, depth=2, heads=3, mlp_ratio=2.0)


class Alive(TorchDispatchMode):
    """The most bytes, of tensors made inside the block, that are in memory at a time."""

    def __enter__(self):
        self.now = self.peak = 0
        self.seen = weakref.WeakSet()
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            memory = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if memory is not None and memory not in self.seen:
                self.seen.add(memory)
                self.count(memory.nbytes())
                weakref.finalize(memory, self.count, -memory.nbytes())
        return out

    def count(self, size):
        self.now += size
        self.peak = max(self.peak, self.now)


def make(**changes):
    return initialize_serial(build_model(dataclasses.replace(CONFIG, **changes), 1), 1, torch.device("cpu"), torch.float64)


def batch(n=2, length=12):
    tokens = torch.randint(37, (n, length), generator=torch.Generator().manual_seed(0))
    return {"tokens": tokens, "sample": torch.arange(n)}


def prepared(model, b):
    return model.prepare(b, torch.tensor(0))


def by_hand(model, tokens):
    """The same formulas, written once more with nothing of the model but its weights."""
    w = dict(model.named_parameters(remove_duplicate=False))
    T = tokens.shape[1]
    h = w["embed.token.weight"][tokens] + w["embed.pos"][:, :T]
    future = torch.arange(T)[None] > torch.arange(T)[:, None]
    for i in range(2):
        n = F.layer_norm(h, (24,), w[f"blocks.{i}.norm1.weight"], w[f"blocks.{i}.norm1.bias"])
        q, k, v = (n @ w[f"blocks.{i}.attn.qkv.weight"].T + w[f"blocks.{i}.attn.qkv.bias"]).split(24, -1)
        heads = []
        for s in (slice(0, 8), slice(8, 16), slice(16, 24)):
            scores = (q[..., s] @ k[..., s].transpose(1, 2) / math.sqrt(8)).masked_fill(future, -math.inf)
            heads.append(torch.softmax(scores, -1) @ v[..., s])
        h = h + torch.cat(heads, -1) @ w[f"blocks.{i}.attn.out.weight"].T + w[f"blocks.{i}.attn.out.bias"]
        n = F.layer_norm(h, (24,), w[f"blocks.{i}.norm2.weight"], w[f"blocks.{i}.norm2.bias"])
        up = F.gelu(n @ w[f"blocks.{i}.mlp.up.weight"].T + w[f"blocks.{i}.mlp.up.bias"])
        h = h + up @ w[f"blocks.{i}.mlp.down.weight"].T + w[f"blocks.{i}.mlp.down.bias"]
    return F.layer_norm(h, (24,), w["head.norm.weight"], w["head.norm.bias"]) @ w["head.proj.weight"].T


def shaken(**changes):
    """A model in which no bias or gain is trivial."""
    model = make(**changes)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(p.numel()))
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("length", [12, 8])
def test_logits_equal_the_formulas_written_again(tied, length):
    model, b = shaken(tied=tied), batch(length=length)
    torch.testing.assert_close(model.eval()(prepared(model, b)), by_hand(model, b["tokens"][:, :-1]), rtol=1e-10, atol=1e-10)


def test_grouped_heads_share_keys_and_values():
    """Four query heads on two heads of keys and values are those of four in which heads 0 and 1, and 2 and 3, are the same."""
    few, many = shaken(heads=4, kv_heads=2, position="rotary"), shaken(heads=4, position="rotary")
    w, full = dict(few.named_parameters()), dict(many.named_parameters())
    with torch.no_grad():
        for name, p in full.items():
            if "attn.qkv" in name:                  # rows (queries of a group + 2, kv_heads, head_dim) -> (3, heads, head_dim)
                q, kv = w[name].unflatten(0, (4, 2, 6)).split(2)
                p.copy_(torch.stack([q.transpose(0, 1).flatten(0, 1), *(x.repeat_interleave(2, 0) for x in kv)]).flatten(0, 2))
            else:
                p.copy_(w[name])
    ready = prepared(few, batch())
    torch.testing.assert_close(few.eval()(ready), many.eval()(ready), rtol=1e-12, atol=1e-12)


def test_rotary_positions_matter_by_their_distance_alone():
    """By hand for heads of two numbers: turned by 3 and by 5, a query and a key meet as if turned by 0 and by 2."""
    q, k = torch.randn(2, 1, 1, 1, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    angle = rope_cos_sin(torch.tensor([0, 2, 3, 5]), 2, 10_000.0, torch.float64)    # (2, 4, 1)
    at = [angle[:, i:i + 1] for i in range(4)]
    far, near = ((apply_rope(q, at[i]) * apply_rope(k, at[i + 1])).sum().item() for i in (2, 0))
    assert far == pytest.approx(near)
    c, s, (a, b) = math.cos(2), math.sin(2), k.flatten().tolist()
    assert apply_rope(k, at[1]).flatten().tolist() == pytest.approx([a * c - b * s, b * c + a * s])
    assert rope_cos_sin(torch.tensor([7]), 4, 100.0, torch.float32)[1, 0, 1].item() == pytest.approx(math.sin(0.7))


@pytest.mark.parametrize(("changes", "formula"), [
    ({"mlp": "gelu_tanh"}, lambda u: u * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))),
    ({"mlp": "swiglu", "mlp_width": 20}, lambda u: u[..., :20] * u[..., :20].sigmoid() * u[..., 20:])])
def test_kinds_of_mlps(changes, formula):
    mlp = shaken(**changes).blocks["0"].mlp
    x = torch.randn(3, 24, dtype=torch.float64)
    expected = formula(x @ mlp.up.weight.T + mlp.up.bias) @ mlp.down.weight.T + mlp.down.bias
    torch.testing.assert_close(mlp(x), expected, rtol=1e-12, atol=1e-12)


def test_later_tokens_change_nothing_before_them():
    model, b = shaken().eval(), batch()
    other = {**b, "tokens": b["tokens"].clone()}
    other["tokens"][:, 6] = (b["tokens"][:, 6] + 1) % 37
    gap = (model(prepared(model, b)) - model(prepared(model, other))).abs().amax((0, 2))
    assert (gap[:6] == 0).all() and (gap[6:] > 1e-6).all()


def test_loss_is_the_sum_over_tokens_and_padding_weighs_nothing():
    model, b = shaken(), batch(3)
    b["sample"][2] = -1
    ready = prepared(model, b)
    ready["target"] = ready["target"].clone()
    ready["target"][0, -2:] = -1
    total, weight = model.loss(model(ready), ready)
    logp = model.eval()(ready).log_softmax(-1)
    expected = -sum(logp[i, t, b["tokens"][i, t + 1]] for i, T in ((0, 9), (1, 11)) for t in range(T))
    assert total.item() == pytest.approx(expected.item(), rel=1e-12) and weight.item() == 20
    assert model.loss.weight(ready).tolist() == [9, 11, 0]


def test_the_loss_of_bf16_logits_is_taken_in_float32():
    model, b = make(), batch()
    ready = prepared(model, b)
    assert model.loss.cross_entropy(model.eval()(ready).bfloat16(), ready["target"]).dtype == torch.float32


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunk", [1, 7, 22, 100])
def test_the_loss_in_chunks_is_the_loss(chunk, tied):
    """Its value and every gradient, with padding, chunks that do not divide the tokens, and one that is larger than all."""
    found = []
    for size in (0, chunk):
        model, b = shaken(loss_chunk=size, tied=tied), batch(3)
        b["sample"][2] = -1
        ready = prepared(model, b)
        output = model(ready)
        assert output.shape == (() if size else (3, 11, 37))
        total, weight = model.loss(output, ready)
        (total / weight).backward()
        found.append((total, weight, *(p.grad for p in model.parameters())))
    for plain, chunked in zip(*found, strict=True):
        torch.testing.assert_close(chunked, plain, rtol=1e-12, atol=1e-14)


def test_the_loss_in_chunks_rounds_as_the_loss_does_in_bf16():
    """Gradients are those of bf16 logits, up to the format's rounding of each; the weight's are added up in float32."""
    found = []
    for size in (0, 8):
        model, b = shaken(loss_chunk=size).float(), batch(3)
        ready = prepared(model, b)
        with torch.autocast("cpu", torch.bfloat16):
            output = model(ready)
        model.loss(output, ready)[0].backward()
        found.append([p.grad for p in model.parameters()])
        assert all(grad.dtype == torch.float32 for grad in found[-1])
    for plain, chunked in zip(*found, strict=True):
        assert (chunked - plain).norm() < 2**-7 * plain.norm()


def test_the_loss_in_chunks_of_a_rank_without_tokens_is_nothing():
    """As of 3 tokens over 4 context-parallel ranks; in evaluation, too."""
    x, weight = torch.zeros(0, 8, requires_grad=True), torch.ones(5, 8, requires_grad=True)
    given = x, weight, torch.zeros(0, dtype=torch.int64), torch.zeros(0), gpt.CrossEntropy(), 4, gpt.Chunk()
    total = gpt.chunked_loss(*given)
    total.backward()
    assert total == 0 and x.grad.shape == (0, 8) and not weight.grad.any()
    with torch.no_grad():
        assert gpt.chunked_loss(*given) == 0


def test_a_second_backward_pass_through_chunks_is_an_error():
    """And no wrong number: the first has scaled the gradient where it lies."""
    model, b = shaken(loss_chunk=7), batch(3)
    ready = prepared(model, b)
    total, _ = model.loss(model(ready), ready)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        total.backward()


@pytest.mark.parametrize("chunk", [0, 64])
def test_no_more_than_a_chunks_logits_are_in_memory(chunk):
    """512 tokens of 2000 logits, which are 4 MB in float32 and half a MB a chunk: twice that, the logits and their gradient."""
    model = make(vocab=2000, context=128, loss_chunk=chunk, depth=1).float()
    ready = prepared(model, model.example(4, torch.device("cpu")))
    rest = 1.2 * 2**20                              # activations of a small block, the head's weight and its gradient
    with Alive() as alive:
        model.loss(model(ready), ready)[0].backward()
    logits = 4 * 2000 * (chunk or 512)
    assert 2 * logits <= alive.peak <= 2 * logits + rest if chunk else alive.peak >= 3 * logits


def test_a_compiled_head_saves_no_logits_either():
    """The partitioner of torch.compile chooses what backward finds, as few bytes as it can; no breaks in a chunk."""
    found, saved = [], []
    for compiled in (False, True):
        model = shaken(loss_chunk=50, vocab=200, context=64)
        ready = prepared(model, model.example(2, torch.device("cpu")))
        if compiled:
            model.head.of_chunk.compile(backend="aot_eager_decomp_partition", fullgraph=True)
        head = torch.compile(model.head, backend="aot_eager_decomp_partition") if compiled else model.head
        x = torch.randn(2, 64, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.shape), t)[1], lambda t: t):
            total = head(x, ready)
        total.backward()
        found.append((total, x.grad, model.head.proj.weight.grad))
    assert saved and all(shape[-1] != 200 for shape in saved)
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-14)


def test_a_tied_weight_is_one_parameter_with_both_gradients():
    model, b = shaken(), batch()
    weight = model.embed.token.weight
    assert weight is model.head.proj.weight and serial_placements(model)[weight].name == "embed.token.weight"
    assert sum(p is weight for p in model.parameters()) == 1
    model.loss(model(prepared(model, b)), prepared(model, b))[0].backward()
    used = torch.zeros(37, dtype=torch.bool).index_fill(0, b["tokens"][:, :-1].flatten(), True)
    apart = shaken(tied=False)
    with torch.no_grad():
        for name, p in apart.named_parameters():
            p.copy_(dict(model.named_parameters(remove_duplicate=False))[name])
    apart.loss(apart(prepared(apart, b)), prepared(apart, b))[0].backward()
    assert (apart.embed.token.weight.grad[used] != 0).any(1).all() and (apart.embed.token.weight.grad[~used] == 0).all()
    torch.testing.assert_close(weight.grad, apart.embed.token.weight.grad + apart.head.proj.weight.grad, rtol=1e-12, atol=1e-12)


def test_weights_start_as_gpt2s():
    model = make(dim=96, depth=3)
    w = dict(model.named_parameters())
    for name, std in (("embed.token.weight", 0.02), ("embed.pos", 0.02), ("blocks.1.attn.qkv.weight", 0.02),
                      ("blocks.1.attn.out.weight", 0.02 / 6**0.5), ("blocks.2.mlp.down.weight", 0.02 / 6**0.5)):
        assert w[name].std().item() == pytest.approx(std, rel=0.1)
    assert (w["head.norm.weight"] == 1).all() and (w["blocks.0.attn.out.bias"] == 0).all()


def test_gpt2_has_the_size_of_gpt2():
    assert sum(p.numel() for p in build_model(GPTConfig(vocab=50257)).parameters()) == 124_439_808


@pytest.mark.parametrize(("preset", "count"), [
    ("124m", 124_475_904), ("350m", 354_871_296), ("774m", 774_090_240), ("1.3b", 1_315_819_520), ("2.7b", 2_651_673_600),
    ("7b", 6_658_596_864)])
def test_presets_have_the_sizes_that_they_are_called_by(preset, count):
    c = config.load(f"gpt-{preset}").model
    assert sum(p.numel() for p in build_model(c).parameters()) == count


def test_dropout_is_off_in_evaluation():
    model = make(dropout=0.5)
    assert "keys" in prepared(model, batch()) and "keys" not in prepared(model.eval(), batch())


def test_too_long_a_sample_is_a_sentence():
    with pytest.raises(CourseError, match=r"12 tokens is longer than model.context=11"):
        prepared(make(), batch(length=13))


def test_example_has_the_shapes_of_a_batch():
    made = build_model(CONFIG).example(50, torch.device("cpu"))
    assert made["tokens"].shape == (50, 12) and made["sample"].tolist() == list(range(50))
    assert made["tokens"].unique().tolist() == list(range(37))
