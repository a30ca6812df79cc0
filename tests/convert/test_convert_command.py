"""`course convert`, there and back: with the logits of `transformers`, and of a plain reading of Transformer Engine's layers."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from course import config
from course.checkpoint import checkpoint
from course.config import schema
from course.convert import command, transformer_engine, weight_files
from course.fp8 import native
from course.inference.forecast_scores import load_model, read_config
from course.inference.kv_cache_decoding import generate
from course.models import GPTConfig, ViTConfig, build_model
from course.parallel import World, initialize_serial, join, serial_layout
from course.ranks.notebook_ranks import ranks
from course.utils.errors import CourseError
from tests.convert import test_convert_dit as dit_reference
from tests.convert import test_huggingface as hf

CPU = torch.device("cpu")
QUIET = ["train.device=cpu", "train.threads=1", "log.tensorboard=false", "log.every=1"]
GPT = ["model.vocab=64", "model.context=16", "model.dim=32", "model.depth=2", "model.heads=4"]
LLAMA = ["model.norm=rms", "model.mlp=swiglu", "model.position=rotary", "model.bias=false", "model.tied=false",
         "model.kv_heads=2", "model.mlp_width=48"]


def convert(*given, **more):
    command.convert(World(), *given, **more)


def model_of(run):
    settings = config.load(str(run / "config.yaml"), ["precision=fp32"])
    return load_model(run, settings, CPU)[0].eval()


def index_of(run):
    folder, = checkpoint.steps(run / "checkpoints")
    return folder, checkpoint.read_index(folder)


def weights_of(run):
    return {name: p.detach() for name, p in model_of(run).named_parameters()}


# ---- Hugging Face ----

@pytest.mark.parametrize("case", hf.CASES)
def test_hugging_face_there_and_back(case, tmp_path):
    theirs = hf.theirs(case)
    theirs.save_pretrained(tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "runs" / "gpt" / "mine", ["parallel.dp=1"])
    run = tmp_path / "runs" / "gpt" / "mine"
    torch.testing.assert_close(hf.logits(model_of(run), hf.TOKENS), hf.of_theirs(theirs, hf.TOKENS), rtol=1e-5, atol=1e-5)
    convert(run, tmp_path / "out", shard=10_000)
    assert len(list((tmp_path / "out").glob("model-0000?-of-*.safetensors"))) > 1
    back = hf.transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(hf.of_theirs(back, hf.TOKENS), hf.of_theirs(theirs, hf.TOKENS))
    convert(tmp_path / "out", tmp_path / "runs" / "gpt" / "again")
    first, again = weights_of(run), weights_of(tmp_path / "runs" / "gpt" / "again")
    assert first.keys() == again.keys() and all(torch.equal(first[name], again[name]) for name in first)


def odd(folder):
    """A GPT-2 of theirs of 257 tokens, a prime number as GPT-2's 50257 nearly is, all of whose logits are negative."""
    torch.manual_seed(0)
    model = hf.transformers.GPT2LMHeadModel(hf.transformers.GPT2Config(**(hf.GPT2 | {"vocab_size": 257})))
    with torch.no_grad():
        model.transformer.ln_f.bias += 3.0
        model.transformer.wte.weight -= 0.5
    model.save_pretrained(folder)
    return model.eval()


def on_ranks(run, overrides):
    """(logits, loss) of the run's model in a layout, on each of its ranks."""
    from course.parallel import build_mesh
    from course.training.assemble import assemble

    settings = config.load(str(run / "config.yaml"), ["precision=fp32", "train.device=cpu", "data.source=mock", *overrides])
    training = assemble(settings, build_mesh(settings.parallel, join("cpu")))
    model = training.model.eval()
    checkpoint.load(*index_of(run), model, training.layout)
    batch = model.prepare({"tokens": hf.TOKENS, "sample": torch.arange(2)}, torch.zeros((), dtype=torch.long))
    with torch.no_grad():
        output = model(batch)
        total, weight = model.loss(output, batch)
    return output, (total / weight).item()


@pytest.mark.slow
def test_an_odd_vocabulary_is_padded_so_that_ranks_can_share_it_out(tmp_path):
    theirs, run = odd(tmp_path / "in"), tmp_path / "runs" / "gpt" / "mine"
    with pytest.raises(CourseError, match=r"does not divide the vocabulary of 257 tokens: pad it, with model.vocab=258$"):
        convert(tmp_path / "in", run, ["parallel.tp=2"])
    convert(tmp_path / "in", run, ["parallel.tp=2", "model.vocab=258"])
    c = read_config(run).model
    assert (c.vocab, c.vocab_used, c.words) == (258, 257, 257)
    (first, loss), (second, _) = ranks(2)(on_ranks, run, ["parallel.tp=2"])
    expected = hf.of_theirs(theirs, hf.TOKENS)[:, :-1]
    assert expected.max() < -1                       # where a row of zeros would have nearly all of the probability
    torch.testing.assert_close(torch.cat([first, second], -1)[..., :257], expected, rtol=1e-5, atol=1e-5)
    true = F.cross_entropy(expected.flatten(0, 1), hf.TOKENS[:, 1:].flatten()).item()
    assert true < loss < true + 1 / 257
    model = model_of(run)
    with torch.no_grad():
        model.embed.token.weight[257] *= -1e3        # the most probable by far
        assert hf.logits(model, hf.TOKENS)[:, -1].argmax(-1).tolist() == [257, 257]
    for temperature in (0, 1):
        assert generate(model, hf.TOKENS[:, :4], 8, temperature).max() < 257


def test_padding_is_cut_off_on_the_way_back_and_made_again(tmp_path):
    theirs, runs = odd(tmp_path / "in"), tmp_path / "runs" / "gpt"
    convert(tmp_path / "in", runs / "mine", ["model.vocab=264"])
    convert(runs / "mine", tmp_path / "out")
    back = hf.transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert back.config.vocab_size == 257 and torch.equal(hf.of_theirs(back, hf.TOKENS), hf.of_theirs(theirs, hf.TOKENS))
    convert(tmp_path / "out", runs / "again")
    first, again = weights_of(runs / "mine"), weights_of(runs / "again")
    assert read_config(runs / "again").model == read_config(runs / "mine").model
    assert all(torch.equal(first[name], again[name]) for name in first)
    with pytest.raises(CourseError, match=r"embed.token.weight as \[257, 32\], and you asked for \[200, 32\]"):
        convert(tmp_path / "in", runs / "less", ["model.vocab=200"])
    with pytest.raises(CourseError, match=r"model.vocab_used=257 is more than model.vocab=200"):
        convert(tmp_path / "out", runs / "less", ["model.vocab=200"])


def on_a_rank(*given, **more):
    command.convert(join("cpu"), *given, **more)


@pytest.mark.parametrize("layout", ["tp=2", *(pytest.param(layout, marks=pytest.mark.slow)
                                              for layout in ("pp=2", "dp=2 zero=true", "dp=2 zero=3"))])
def test_two_ranks_write_what_one_process_writes_for_them(layout, tmp_path):
    hf.theirs("llama").save_pretrained(tmp_path / "in")
    keys = [f"parallel.{key}" for key in layout.split()]
    ranks(2)(on_a_rank, tmp_path / "in", tmp_path / "runs" / "gpt" / "two", keys)
    convert(tmp_path / "in", tmp_path / "runs" / "gpt" / "one", keys)
    two, one = (index_of(tmp_path / "runs" / "gpt" / name)[1] for name in ("two", "one"))
    assert two["tensors"] == one["tensors"] and two["files"] == one["files"] and len(one["files"]) == 2
    ranks(2)(on_a_rank, tmp_path / "runs" / "gpt" / "two", tmp_path / "out", shard=20_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    written = hf.transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(hf.of_theirs(written, hf.TOKENS), hf.of_theirs(hf.theirs("llama"), hf.TOKENS))


@pytest.mark.slow
def test_under_torchrun(tmp_path):
    hf.theirs("gpt2").save_pretrained(tmp_path / "in")
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "course.cli",
                    "convert", str(tmp_path / "in"), str(tmp_path / "runs" / "gpt" / "mine"), "parallel.tp=2"],
                   check=True, env=os.environ | {"PYTHONPATH": str(root)}, timeout=120)
    logits = hf.logits(model_of(tmp_path / "runs" / "gpt" / "mine"), hf.TOKENS)
    torch.testing.assert_close(logits, hf.of_theirs(hf.theirs("gpt2"), hf.TOKENS), rtol=1e-5, atol=1e-5)


def test_memory_is_bounded_by_the_largest_tensor(tmp_path):
    """Of what is made on the way: a tensor of theirs, ours, and the one before that is being let go of."""
    from course.lab.instruments.tensor_memory import MemoryMeter

    torch.manual_seed(0)
    big = hf.transformers.LlamaForCausalLM(hf.transformers.LlamaConfig(**hf.LLAMA | {"num_hidden_layers": 12, "vocab_size": 400}))
    big.save_pretrained(tmp_path / "in")
    largest, total = 400 * 32 * 4, sum(p.nbytes for p in big.parameters())
    for source, target in ((tmp_path / "in", tmp_path / "runs" / "gpt" / "big"), (tmp_path / "runs" / "gpt" / "big",
                                                                                  tmp_path / "out")):
        with MemoryMeter() as meter:
            convert(source, target)
        assert largest <= meter.peak <= 3 * largest < total / 2


# ---- DiT ----

def test_dit_there_and_back(tmp_path):
    state = {name: value.float() for name, value in dit_reference.state_of().items()}
    torch.save({"model": dit_reference.state_of(seed=1), "ema": state}, tmp_path / "theirs.pt")
    run = tmp_path / "runs" / "dit" / "converted"
    with pytest.raises(CourseError, match=r"no published DiT has width 24.*model\.heads=.*--like"):
        convert(tmp_path / "theirs.pt", run)
    convert(tmp_path / "theirs.pt", run, ["model.heads=3"])
    assert read_config(run).model.heads == 3 and index_of(run)[1]["state"]["step"] == 0
    exact = {name: x.double() for name, x in state.items()} | {"pos_embed": dit_reference.positions_there(dit_reference.CONFIG)}
    expected = dit_reference.theirs(exact, *dit_reference.inputs())[:, :3]
    found = dit_reference.ours({name: x.double() for name, x in weights_of(run).items()}, *dit_reference.inputs())
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    convert(run, tmp_path / "back.safetensors")
    back = load_file(tmp_path / "back.safetensors")
    assert back.keys() == state.keys() and torch.allclose(back["pos_embed"], state["pos_embed"].float())
    assert all(torch.equal(back[name], state[name]) for name in state if "final_layer.linear" not in name and name != "pos_embed")
    convert(tmp_path / "back.safetensors", tmp_path / "runs" / "dit" / "again", ["model.heads=3"])
    again = weights_of(tmp_path / "runs" / "dit" / "again")
    assert all(torch.equal(again[name], value) for name, value in weights_of(run).items())
    with pytest.raises(CourseError, match="exists already"):
        convert(tmp_path / "theirs.pt", run, ["model.heads=3"])


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "model.", "module._orig_mod.", "_orig_mod.module.",
                                     "model._orig_mod.", "model.module.", "net.model.", "_forward_module.model."])
@pytest.mark.parametrize("library", ["dit", "te", "hf", "llama"])
def test_what_wrappers_put_before_names_is_taken_off(library, wrapper, tmp_path):
    if library == "dit":
        state, how = {name: x.float() for name, x in dit_reference.state_of().items()}, {"settings": ["model.heads=3"]}
    else:
        run = fresh(tmp_path, "llama" if library == "llama" else "gpt")
        convert(run, tmp_path / "there", to="te" if library == "te" else "hf")
        state = load_file(tmp_path / "there" / "model.safetensors")
        how = {"settings": GPT, "like": "gpt-demo"} if library == "te" else {}
        (tmp_path / "there" / "model.safetensors").unlink()
    for name, names in {"plain": "", "wrapped": wrapper}.items():
        saved = {names + key: x for key, x in state.items()}
        if library in ("hf", "llama"):
            torch.save(saved, tmp_path / "there" / "pytorch_model.bin")
        else:
            torch.save({"state_dict": saved, "epoch": 3}, tmp_path / "one.pt")
        convert(tmp_path / ("there" if library in ("hf", "llama") else "one.pt"), tmp_path / "runs" / "x" / name, **how)
    plain, wrapped = (weights_of(tmp_path / "runs" / "x" / name) for name in ("plain", "wrapped"))
    assert plain.keys() == wrapped.keys() and all(torch.equal(wrapped[name], x) for name, x in plain.items())


def test_wrappers_within_names_are_taken_off_and_two_models_are_refused(tmp_path):
    state = {name: x.float() for name, x in dit_reference.state_of().items()}
    inside = {name.replace("blocks.0.", "blocks.0._orig_mod._checkpoint_wrapped_module."): x for name, x in state.items()}
    averaged = {f"module.{name}": x for name, x in inside.items()} | {"n_averaged": torch.tensor(3)}
    torch.save({"model": {}, "ema_model": averaged}, tmp_path / "averaged.pt")
    convert(tmp_path / "averaged.pt", tmp_path / "runs" / "x" / "averaged", ["model.heads=3"])
    expected = dit_reference.from_theirs(state, dit_reference.CONFIG)
    assert all(torch.equal(x, expected[name]) for name, x in weights_of(tmp_path / "runs" / "x" / "averaged").items())
    torch.save({f"{which}.{name}": x for which in ("student", "teacher") for name, x in state.items()}, tmp_path / "two.pt")
    with pytest.raises(CourseError, match=r"several models, whose names begin with 'student\.' and 'teacher\.': save"):
        convert(tmp_path / "two.pt", tmp_path / "runs" / "x" / "two", ["model.heads=3"])
    torch.save(state | {f"module.{name}": x for name, x in state.items()}, tmp_path / "twice.pt")
    with pytest.raises(CourseError, match="which are the same name without wrappers' prefixes"):
        convert(tmp_path / "twice.pt", tmp_path / "runs" / "x" / "two", ["model.heads=3"])


@pytest.mark.parametrize(("said", "expected"), [
    ({"num_classes": 6, "class_dropout_prob": 0.0, "num_heads": 3}, (6, 0.0, 3, "epsilon")),
    ({"class_dropout_prob": 0.0, "num_heads": 4}, (6, 0.0, 4, "epsilon")),
    ({"num_classes": 5, "class_dropout_prob": 0.25, "num_heads": 2}, (5, 0.25, 2, "epsilon")),
    ({"num_classes": 6, "num_heads": 3, "objective": "flow"}, (6, 0.0, 3, "flow")),
    ({"num_heads": 12, "prediction_type": "epsilon"}, (5, 0.1, 12, "epsilon"))])
@pytest.mark.parametrize("where", ["namespace", "dict", "nested", "header", "config.json"])
def test_what_a_checkpoint_says_of_itself_is_so(said, expected, where, tmp_path):
    """facebookresearch/DiT's table has a row for 'no class' only with class dropout; no shape shows the rest either."""
    state = {name: x.float() for name, x in dit_reference.state_of().items()}
    args = {"namespace": Namespace(lr=1e-4, **said), "dict": said, "nested": {"seed": 1, "net": Namespace(**said)}}
    source = tmp_path / "theirs.safetensors"
    if where == "header":
        save_file(state, source, {name: json.dumps(value) for name, value in said.items()})
    elif where == "config.json":
        source = tmp_path / "theirs"
        source.mkdir()
        save_file(state, source / "model.safetensors")
        (source / "config.json").write_text(json.dumps(said))
    else:
        source = tmp_path / "theirs.pt"
        torch.save({"model": state, "ema": state, "opt": {}, "args": args[where]}, source)
    run = tmp_path / "runs" / "dit" / "said"
    convert(source, run, like="dit-digits")         # a flow of other heads: what the file says comes first
    c = read_config(run).model
    objective = expected[3] if {"objective", "prediction_type"} & said.keys() else "flow"
    assert (c.classes, c.label_drop, c.heads, c.objective) == (*expected[:3], objective)
    rows = weights_of(run)["embed.label.weight"]
    assert len(rows) == c.classes + 1 and torch.equal(rows[:5], state["y_embedder.embedding_table.weight"][:5])
    convert(run, tmp_path / "back.safetensors")
    table = load_file(tmp_path / "back.safetensors")["y_embedder.embedding_table.weight"]
    assert torch.equal(table, state["y_embedder.embedding_table.weight"])
    convert(tmp_path / "back.safetensors", tmp_path / "runs" / "dit" / "again")
    assert read_config(tmp_path / "runs" / "dit" / "again").model == c


def test_what_nothing_says_of_classes_is_told_and_can_be_given(tmp_path):
    state, heard = {name: x.float() for name, x in dit_reference.state_of().items()}, []
    torch.save(state, tmp_path / "plain.pt")
    run = tmp_path / "runs" / "dit" / "assumed"
    with mock.patch("builtins.print", heard.append):
        convert(tmp_path / "plain.pt", run, ["model.heads=3"])
    assert read_config(run).model.classes == 5
    assert any("the last of 6 rows in their table is taken for 'no class'; if it is" in line for line in heard)
    for number, given in enumerate((["model.classes=6"], ["model.label_drop=0"], ["model.classes=6", "model.label_drop=0"])):
        convert(tmp_path / "plain.pt", tmp_path / "runs" / "dit" / f"{number}", ["model.heads=3", *given])
        c = read_config(tmp_path / "runs" / "dit" / f"{number}").model
        assert (c.classes, c.label_drop) == (6, 0)
    with pytest.raises(CourseError, match="the table of classes has 6 rows, which is not one for each of 9 classes"):
        convert(tmp_path / "plain.pt", tmp_path / "runs" / "dit" / "bad", ["model.heads=3", "model.classes=9"])


@pytest.mark.parametrize("said", [{"prediction": "velocity", "path_type": "Linear"}, {"predict_xstart": True},
                                  {"prediction_type": "v_prediction"}, {"noise_schedule": "squaredcos_cap_v2"}])
def test_a_model_that_learns_something_else_is_refused(said, tmp_path):
    state = {name: x.float() for name, x in dit_reference.state_of().items()}
    torch.save({"ema": state, "args": Namespace(num_heads=3, **said)}, tmp_path / "other.pt")
    with pytest.raises(CourseError, match=r"names the objective .*, and this library's DiT learns the noise"):
        convert(tmp_path / "other.pt", tmp_path / "runs" / "dit" / "other")
    convert(tmp_path / "other.pt", tmp_path / "runs" / "dit" / "other", ["model.objective=epsilon"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("back", [False, True])
def test_a_copy_in_16_bits_is_the_same_model(dtype, back, tmp_path):
    """Also one that went through 16 bits and back: what it has rounded is no other model's."""
    state = {name: (x.to(dtype).float() if back else x.to(dtype)) for name, x in dit_reference.state_of().items()}
    torch.save(state, tmp_path / "half.pt")
    convert(tmp_path / "half.pt", tmp_path / "runs" / "dit" / "half", ["model.heads=3"])
    expected = dit_reference.from_theirs({name: x.float() for name, x in state.items()}, dit_reference.CONFIG)
    assert all(torch.equal(x, expected[name]) for name, x in weights_of(tmp_path / "runs" / "dit" / "half").items())
    state["pos_embed"] = state["pos_embed"] * 1.02          # more than the rounding
    torch.save(state, tmp_path / "other.pt")
    with pytest.raises(CourseError, match="are not the fixed waves of DiT"):
        convert(tmp_path / "other.pt", tmp_path / "runs" / "dit" / "other", ["model.heads=3"])


def test_the_heads_that_a_checkpoint_of_layers_names_are_its_own(tmp_path):
    """Rows of the fused projection are by heads, which no shape shows: the preset's would mix them up."""
    run, again = fresh(tmp_path, "gpt", "model.heads=2"), tmp_path / "runs" / "x" / "said"
    convert(run, tmp_path / "te.safetensors", to="te")
    torch.save({"model": load_file(tmp_path / "te.safetensors"), "args": Namespace(num_attention_heads=2)}, tmp_path / "te.pt")
    convert(tmp_path / "te.pt", again, [setting for setting in GPT if "heads" not in setting], like="gpt-demo")
    assert read_config(again).model.heads == 2 != config.load("gpt-demo").model.heads
    assert all(torch.equal(x, weights_of(run)[name]) for name, x in weights_of(again).items())


@pytest.fixture
def flow(tmp_path):
    """A run of a DiT none of whose settings shapes show, and whose weights are random."""
    made = config.load("dit-digits", ["model.dim=24", "model.heads=3", "model.depth=1", "model.label_drop=0.2"])
    return fresh_run(tmp_path / "runs" / "dit" / "flow", made)


def test_a_dit_comes_back_as_the_model_that_it_was(flow, tmp_path):
    convert(flow, tmp_path / "dit.safetensors")
    state, here = load_file(tmp_path / "dit.safetensors"), flow.parent
    torch.save(state, tmp_path / "dit.pt")
    convert(tmp_path / "dit.safetensors", here / "again")
    assert read_config(here / "again").model == read_config(flow).model     # the file says all
    convert(flow, tmp_path / "folder")
    convert(tmp_path / "folder", here / "from folder")                  # what is larger than --shard has no other form
    assert all(torch.equal(weights_of(here / "from folder")[name], value) for name, value in weights_of(flow).items())
    with pytest.raises(CourseError, match="no published DiT has width 24"):
        convert(tmp_path / "dit.pt", here / "bad", like="dit-digits")       # that one's heads are of another width
    for setting in ("model=dit", "model.heads=three"):
        with pytest.raises(CourseError, match=f"course convert: {setting}: "):
            convert(tmp_path / "dit.safetensors", here / "bad", [setting])
    config.save(config.load("dit-digits", ["model.dim=24", "model.heads=3", "model.depth=7"]), tmp_path / "own.yaml")
    convert(tmp_path / "dit.pt", here / "liked", like=str(tmp_path / "own.yaml"))
    found = read_config(here / "liked").model
    assert (found.heads, found.objective, found.label_drop, found.depth) == (3, "flow", 0.1, 1)     # what a shape shows is so


def test_a_converted_dit_without_an_average_is_drawn_with_its_weights(flow, tmp_path):
    from course.inference import sample_images
    from course.inference.diffusion_sampler import SamplerSettings

    convert(flow, tmp_path / "dit.safetensors")
    convert(tmp_path / "dit.safetensors", flow.parent / "again", ["train.device=cpu"], like="dit-digits")
    assert read_config(flow.parent / "again").optim.ema
    assert sample_images.sample_run(flow.parent / "again", [1], 1, SamplerSettings(steps=2)).is_file()
    with pytest.raises(CourseError, match=r"no moving average.*--no-ema"):
        sample_images.sample_run(flow.parent / "again", [1], 1, SamplerSettings(steps=2), average=True)


def test_a_preset_of_another_kind_is_refused(flow, tmp_path):
    convert(flow, tmp_path / "dit.safetensors")
    hf.theirs("gpt2").save_pretrained(tmp_path / "in")
    convert(fresh(tmp_path, "gpt"), tmp_path / "te.safetensors", to="te")
    for source, like, words in (("dit.safetensors", "gpt-124m", "preset is of a gpt, and .* has the weights of a dit"),
                                ("in", "vit-base", "is of a vit, and .* weights of a gpt"),
                                ("te.safetensors", "vit-base", "is of a vit, and .* weights of a gpt")):
        with pytest.raises(CourseError, match=words):
            convert(tmp_path / source, tmp_path / "runs" / "x" / "bad", like=like)


# ---- what goes along, and what is said ----

@pytest.fixture
def spoken(tmp_path):
    """A Hugging Face folder with a tokenizer of a few words, as GPT-2's two files."""
    from course.data.text import bpe

    c = hf.transformers.GPT2Config(vocab_size=300, n_positions=32, n_embd=32, n_layer=1, n_head=2)
    hf.transformers.GPT2LMHeadModel(c).save_pretrained(tmp_path / "in")
    bpe.train(iter(["def add(a, b): return a + b"] * 9), 280).model.save(str(tmp_path / "in"))
    return tmp_path / "in"


def test_a_tokenizer_goes_along_and_back(spoken, tmp_path, capsys):
    from course.inference import sample_text

    run = tmp_path / "runs" / "gpt" / "mine"
    convert(spoken, run, ["train.device=cpu"])
    assert sample_text.sample_run(run, "def add", 3, 0, 0, 0, 1)[0].startswith("def add")
    convert(run, tmp_path / "out")
    words = hf.transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert words.decode(words("def add")["input_ids"]) == "def add"
    convert(tmp_path / "out", run.with_name("again"))
    assert (run.with_name("again") / "tokenizer.json").read_text() == (run / "tokenizer.json").read_text()
    said = capsys.readouterr().out
    assert f"wrote {tmp_path / 'out'}, a folder of a Hugging Face gpt2, not a run: " in said and f"course sample {run}\n" in said


def test_without_a_tokenizer_it_is_said_and_can_be_given(spoken, tmp_path, capsys):
    from course.inference import sample_text

    run = tmp_path / "runs" / "gpt" / "mine"
    convert(spoken, run)
    (run / "tokenizer.json").rename(tmp_path / "words.json")
    for name in ("vocab.json", "merges.txt"):
        (spoken / name).unlink()
    mute = run.with_name("mute")
    convert(spoken, mute, ["train.device=cpu"])
    assert f"course sample {mute} --tokenizer FILE" in capsys.readouterr().out
    with pytest.raises(CourseError, match=f"{mute} has no tokenizer: neither .* nor .*--tokenizer FILE"):
        sample_text.sample_run(mute, "def", 3, 0, 0, 0, 1)
    with pytest.raises(CourseError, match="there is no nowhere"):
        sample_text.sample_run(mute, "def", 3, 0, 0, 0, 1, tokenizer=Path("nowhere"))
    assert sample_text.sample_run(mute, "def", 3, 0, 0, 0, 1, tokenizer=tmp_path / "words.json")[0].startswith("def")
    Tokenizer(models.WordLevel({"def": 300, "?": 0}, "?")).save(str(tmp_path / "other.json"))
    with pytest.raises(CourseError, match="has token 300, and the model knows 300: the tokenizer is not its own"):
        sample_text.sample_run(mute, "def", 3, 0, 0, 0, 1, tokenizer=tmp_path / "other.json")


def test_the_command_that_is_said_trains_the_run(spoken, tmp_path, capsys):
    from course.training.trainer import main

    convert(spoken, tmp_path / "runs" / "gpt" / "mine", [*QUIET, "train.steps=1", "train.global_batch=2", "train.micro_batch=2"])
    line = next(line for line in capsys.readouterr().out.splitlines() if "course train" in line)
    words = line.partition(": course train ")[2].split()
    assert words[1:] == ["data.source=files", "data.path=FOLDER"]
    assert main(config.load(words[0])) == tmp_path / "runs" / "gpt" / "mine"
    assert "resuming" in capsys.readouterr().out


def test_a_run_named_alone_is_where_its_config_says(spoken, tmp_path, monkeypatch):
    from course.training.trainer import run_folder

    monkeypatch.chdir(tmp_path)
    convert(spoken, Path("mine"))
    assert run_folder(read_config(Path("mine"))) == tmp_path / "mine"


# ---- Transformer Engine ----

def layer(w, x, c, rows, causal):
    """What te.TransformerLayer computes, in plain operations over its names: (B, T, D) -> (B, T, D)."""
    def norm(part, x):
        if f"{part}.layer_norm_bias" not in w:
            return x * (x.square().mean(-1, keepdim=True) + c.norm_eps).rsqrt() * w[f"{part}.layer_norm_weight"]
        eps = getattr(c, "norm_eps", 1e-5)
        return F.layer_norm(x, x.shape[-1:], w[f"{part}.layer_norm_weight"], w[f"{part}.layer_norm_bias"], eps)

    def linear(x, name, dot="."):
        return F.linear(x, w[f"{name}{dot}weight"], w.get(f"{name}{dot}bias"))

    attention, (B, T, _), d = "self_attention.layernorm_qkv", x.shape, c.head_width
    g = getattr(c, "groups", c.heads)
    G = c.heads // g
    y = norm(attention, x)
    if rows == "separate":
        q, k, v = (linear(y, f"{attention}.{part}", "_").view(B, T, -1, d) for part in ("query", "key", "value"))
    elif rows == "stacked":                         # a view as (G + 2, g, d), split along its first dim, the heads flattened
        q, k, v = (part.reshape(B, T, -1, d) for part in linear(y, attention).view(B, T, G + 2, g, d).split([G, 1, 1], -3))
    else:
        q, k, v = (part.reshape(B, T, -1, d) for part in linear(y, attention).view(B, T, g, G + 2, d).split([G, 1, 1], -2))
    if getattr(c, "position", "") == "rotary":
        angle = torch.arange(T)[:, None].double() * c.rope_theta ** (-torch.arange(0, d, 2).double() / d)
        cos, sin = (torch.cat([f(angle)] * 2, -1)[:, None].to(x.dtype) for f in (torch.cos, torch.sin))
        q, k = (t * cos + torch.cat([-t[..., d // 2:], t[..., :d // 2]], -1) * sin for t in (q, k))
    k, v = (t.repeat_interleave(G, 2) for t in (k, v))                  # query i sees the keys of i // G
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / d**0.5
    if causal:
        scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
    x = x + linear(torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).flatten(2), "self_attention.proj")
    y = linear(norm("layernorm_mlp", x), "layernorm_mlp.fc1", "_")
    y = F.silu(y[..., :y.shape[-1] // 2]) * y[..., y.shape[-1] // 2:] if getattr(c, "mlp", "") == "swiglu" else F.gelu(
        y, approximate="tanh" if getattr(c, "mlp", "gelu") == "gelu_tanh" else "none")
    return x + linear(y, "layernorm_mlp.fc2", "_")


def blocks_of_ours(run, x):
    """The output of a run's blocks for random input."""
    model = model_of(run).double()
    c = model.c
    batch = {"seen": torch.arange(x.shape[1])[None]}
    if getattr(c, "position", "") == "rotary":
        from course.models.layers import rope_cos_sin

        batch["rope"] = rope_cos_sin(batch["seen"][0], c.head_width, c.rope_theta, torch.float64)
    for block in model.blocks.values():
        x = block(x, batch)
    return x.detach()


MODELS = {"gpt": ("gpt-demo", [*GPT, "model.mlp=gelu_tanh"]), "llama": ("gpt-demo", [*GPT, *LLAMA]),
          "grouped biased": ("gpt-demo", [*GPT, "model.kv_heads=1"]),
          "wide heads": ("gpt-demo", [*GPT, *LLAMA, "model.head_dim=12"]),
          "vit": ("vit-demo", ["model.grid=[8,16]", "model.channels=3", "model.patch=4", "model.dim=16", "model.depth=2",
                               "model.heads=2"])}


def fresh(tmp_path, name, *more):
    """A run, at step 0, of weights none of which is trivial."""
    preset, settings = MODELS[name]
    return fresh_run(tmp_path / "runs" / "x" / "first", config.load(preset, [*QUIET, *settings, *more]))


def fresh_run(run, made):
    """The same of any configuration."""
    model = initialize_serial(build_model(made.model), 0, CPU)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn(p.shape, generator=generator)
    state = {**command.Progress.start(made, CPU).state(), "samples": 0}
    checkpoint.save(run / "checkpoints", torch.optim.SGD(model.parameters()), state, schema.as_plain(made),
                    serial_layout(model))
    config.save(made, run / "config.yaml")
    return run


@pytest.mark.parametrize("rows", transformer_engine.ROWS)
@pytest.mark.parametrize("name", MODELS)
def test_layers_of_transformer_engine_compute_the_same_and_come_back(name, rows, tmp_path):
    run = fresh(tmp_path, name)
    c = read_config(run).model
    convert(run, tmp_path / "te.safetensors", to="te", rows=rows)
    state = load_file(tmp_path / "te.safetensors")
    assert ("blocks.0.self_attention.layernorm_qkv.query_weight" in state) == (rows == "separate")
    x = torch.randn(2, 7, c.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = x
    for i in range(c.depth):
        prefix = f"blocks.{i}."
        w = {key.removeprefix(prefix): value.double() for key, value in state.items() if key.startswith(prefix)}
        y = layer(w, y, c, rows, causal=name != "vit")
    torch.testing.assert_close(blocks_of_ours(run, x), y, rtol=1e-10, atol=1e-10)
    state["blocks.0.self_attention.core_attention._extra_state"] = torch.zeros(3, dtype=torch.uint8)
    save_file(state, tmp_path / "again.safetensors", transformer_engine.about(c, rows))
    convert(tmp_path / "again.safetensors", tmp_path / "runs" / "x" / "back", rows=rows)
    first, back = weights_of(run), weights_of(tmp_path / "runs" / "x" / "back")
    assert first.keys() == back.keys() and all(torch.equal(first[one], back[one]) for one in first)


def test_the_order_of_rows_is_in_the_file(tmp_path):
    run = fresh(tmp_path, "llama")
    for rows in transformer_engine.ROWS:
        convert(run, tmp_path / f"{rows}.safetensors", to="te", rows=rows)
        back = tmp_path / "runs" / "x" / rows
        convert(tmp_path / f"{rows}.safetensors", back)
        first, again = weights_of(run), weights_of(back)
        assert all(torch.equal(first[one], again[one]) for one in first)
        for other in set(transformer_engine.ROWS) - {rows}:
            with pytest.raises(CourseError, match=f"--qkv {other}: .* its rows are {rows}; leave out --qkv"):
                convert(tmp_path / f"{rows}.safetensors", tmp_path / "runs" / "x" / "bad", rows=other)


def test_a_header_that_is_no_model_is_a_sentence(tmp_path):
    convert(fresh(tmp_path, "gpt"), tmp_path / "te.safetensors", to="te")
    state = load_file(tmp_path / "te.safetensors")
    for text in ("no", "{}", "[]", '{"kind": "x"}'):
        save_file(state, tmp_path / "bad.safetensors", {weight_files.MODEL: text})
        with pytest.raises(CourseError, match=r"header of .* has a course\.model that is no model's configuration"):
            convert(tmp_path / "bad.safetensors", tmp_path / "runs" / "x" / "bad")


def test_what_config_json_cannot_say_comes_from_the_header(tmp_path):
    made = config.load("gpt-demo", [*GPT, "model.mlp=gelu_tanh", "model.dropout=0.1", "model.loss_chunk=8", "model.mlp_ratio=2"])
    convert(fresh_run(tmp_path / "runs" / "x" / "first", made), tmp_path / "out")
    convert(tmp_path / "out", tmp_path / "runs" / "x" / "again")
    assert read_config(tmp_path / "runs" / "x" / "again").model == made.model
    changed = json.loads((tmp_path / "out" / "config.json").read_text()) | {"layer_norm_epsilon": 1e-3}
    (tmp_path / "out" / "config.json").write_text(json.dumps(changed))
    convert(tmp_path / "out", tmp_path / "runs" / "x" / "changed")
    assert read_config(tmp_path / "runs" / "x" / "changed").model.norm_eps == 1e-3      # whoever changed it meant it


def test_a_file_that_does_not_say_its_model_needs_a_preset(tmp_path):
    run = fresh(tmp_path, "gpt")
    convert(run, tmp_path / "te.safetensors", to="te")
    state = load_file(tmp_path / "te.safetensors")
    torch.save(state, tmp_path / "te.pt")
    with pytest.raises(CourseError, match="give --like PRESET"):
        convert(tmp_path / "te.pt", tmp_path / "runs" / "x" / "back")
    convert(tmp_path / "te.pt", tmp_path / "runs" / "x" / "back", [*GPT, "model.mlp=gelu_tanh"], like="gpt-demo")
    assert all(torch.equal(x, weights_of(tmp_path / "runs" / "x" / "back")[name]) for name, x in weights_of(run).items())
    with pytest.raises(CourseError, match=r"tensors that a gpt of these settings in Transformer Engine's layers does not have"):
        convert(tmp_path / "te.pt", tmp_path / "runs" / "x" / "bad", [*GPT, "model.depth=1"], like="gpt-demo")
    with pytest.raises(CourseError, match=r"the settings say \[65, 32\]"):
        convert(tmp_path / "te.pt", tmp_path / "runs" / "x" / "bad", [*GPT, "model.vocab=65"], like="gpt-demo")
    assert sorted(path.name for path in (tmp_path / "runs" / "x").iterdir()) == ["back", "first"]   # nothing half-made is left


# ---- the scales of FP8 ----

FP8 = ["precision=fp8", "fp8.history=4", "train.global_batch=4", "optim.lr=1e-3"]


def trained(tmp_path, steps):
    """A GPT trained in FP8: its training, as it stands."""
    from course.parallel import build_mesh
    from course.training.assemble import assemble
    from course.training.trainer import fit, run_folder

    c = config.load("gpt-demo", [*QUIET, *GPT, *FP8, f"log.dir={tmp_path / 'runs'}", "log.name=fp8", f"train.steps={steps}"])
    training = assemble(c, build_mesh(c.parallel, World()))
    fit(training)
    return training, run_folder(c)


def histories(run):
    folder, index = index_of(run)
    names = [name for name in index["tensors"] if name.endswith("amax_history")]
    return checkpoint.read_named(folder, index, names)


def from_te(tmp_path, name, *more, on=convert):
    on(tmp_path / "te.safetensors", tmp_path / "runs" / "x" / name, [*QUIET, *GPT, *FP8, *more], like="gpt-demo")
    return tmp_path / "runs" / "x" / name


def test_scales_are_those_that_a_first_step_notes_and_near_those_that_training_had(tmp_path):
    training, run = trained(tmp_path, 6)
    convert(run, tmp_path / "te.safetensors", to="te")
    assert not any("amax" in name or "extra_state" in name for name in load_file(tmp_path / "te.safetensors"))
    rebuilt = histories(from_te(tmp_path, "rebuilt"))
    assert rebuilt.keys() == training.scaling.state().keys() and len(rebuilt) == 8
    # what another training from these weights notes in its first step: the same numbers
    settings = config.load(str(tmp_path / "runs" / "x" / "rebuilt" / "config.yaml"))
    from course.parallel import build_mesh
    from course.training.assemble import assemble

    other = assemble(settings, build_mesh(settings.parallel, World()))
    checkpoint.load(*index_of(tmp_path / "runs" / "x" / "rebuilt"), other.model, other.layout)
    batch = other.model.example(4, CPU)
    other.step(batch)
    assert all(torch.equal(rebuilt[name], part) for name, part in other.scaling.state().items())
    # and near what training's own next step uses, the largest of its last four, in which gradients have fallen: inputs and
    # weights within 5%, gradients within a factor of four, two of the thirty-odd powers of two that E5M2 has
    for name, part in training.scaling.state().items():
        ratio = rebuilt[name].amax(1) / part.amax(1)
        assert (ratio[:2] - 1).abs().max() < 0.05 and 0.25 < ratio[2] < 4, (name, ratio)


def test_scales_are_rebuilt_without_what_a_run_has_for_gpus(tmp_path, monkeypatch):
    """Triton kernels, whose formulas hold all scores of attention on a CPU, and cuDNN's attention, which it has not."""
    _, run = trained(tmp_path, 2)
    convert(run, tmp_path / "te.safetensors", to="te")
    plain = histories(from_te(tmp_path, "plain"))
    monkeypatch.setattr("course.training.fuse_blocks.fuse_blocks", None)
    gpu = from_te(tmp_path, "gpu", "kernels=triton", "attention=cudnn")
    assert (read_config(gpu).kernels, read_config(gpu).attention) == ("triton", "cudnn")
    assert all(torch.equal(part, plain[name]) for name, part in histories(gpu).items())


def test_scales_are_the_same_on_two_ranks(tmp_path):
    _, run = trained(tmp_path, 2)
    convert(run, tmp_path / "te.safetensors", to="te")
    one = histories(from_te(tmp_path, "one"))

    def on_two(*given, **more):
        ranks(2)(on_a_rank, *given, **more)

    for layout in ("parallel.tp=2", "parallel.dp=2"):
        two = histories(from_te(tmp_path, layout.replace(".", ""), layout, on=on_two))
        for name, part in one.items():
            torch.testing.assert_close(two[name], part, rtol=2**-6, atol=0)             # bf16's sums in another order


def test_gradients_need_a_scale_of_their_own(tmp_path):
    """Why forward is not enough: without a history the scale is 1, and theirs is a million here, more with more tokens."""
    training, _ = trained(tmp_path, 2)
    amax = torch.stack([part[2].max() for part in training.scaling.state().values()])
    assert native.scale_for(amax, native.LARGEST[native.E5M2], 0).min() > 2**20
    assert native.scale_for(torch.zeros(1), native.LARGEST[native.E5M2], 0) == 1


# ---- what cannot be ----

class Bomb:
    def __reduce__(self):
        return print, ("executed",)


class BombState(Namespace):
    def __setstate__(self, state):
        print("executed")


def test_pickles_are_refused_and_not_executed(tmp_path, capsys):
    run = fresh(tmp_path, "gpt")
    convert(run, tmp_path / "te.safetensors", to="te")
    state = load_file(tmp_path / "te.safetensors")
    torch.save(state | {"blocks.0.self_attention.proj._extra_state": Bomb()}, tmp_path / "te.pt")
    with pytest.raises(CourseError, match=r"more than tensors, and the course never unpickles it.*\(it names print\): if you"):
        convert(tmp_path / "te.pt", tmp_path / "runs" / "x" / "bad", GPT, like="gpt-demo")
    assert "executed" not in capsys.readouterr().out
    for target in ("out.pt", "out.bin"):
        with pytest.raises(CourseError, match="never pickled"):
            convert(run, tmp_path / target, to="te")


def test_a_training_checkpoint_of_dit_has_its_arguments_beside_and_nothing_in_them_runs(tmp_path, capsys):
    """As facebookresearch/DiT's train.py saves it: model, ema, opt and args."""
    state = {name: x.float() for name, x in dit_reference.state_of().items()}
    arguments = Namespace(model="DiT-XL/2", image_size=256, global_seed=0, data_path="/data")
    found = {"model": {name: torch.zeros_like(x) if name != "pos_embed" else x for name, x in state.items()}, "ema": state,
             "opt": torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]).state_dict(), "args": arguments}
    torch.save(found, tmp_path / "0400000.pt")
    run = tmp_path / "runs" / "dit" / "theirs"
    convert(tmp_path / "0400000.pt", run, ["model.heads=3"])
    expected = dit_reference.from_theirs(state, dit_reference.CONFIG)
    assert all(torch.equal(x, expected[name]) for name, x in weights_of(run).items())
    for arguments in (Namespace(model=Bomb()), Bomb(), BombState()):
        torch.save(found | {"args": arguments}, tmp_path / "bad.pt")
        with pytest.raises(CourseError, match="holds more than tensors"):
            convert(tmp_path / "bad.pt", tmp_path / "runs" / "dit" / "bad", ["model.heads=3"])
    assert "executed" not in capsys.readouterr().out


@pytest.mark.parametrize(("given", "words"), [
    ({"to": "dit"}, "is of a gpt, and --to dit is for a dit"), ({"to": "onnx"}, "it is one of hf, dit, te"),
    ({"rows": "mixed"}, "--qkv mixed"), ({"settings": ["train.steps=1"]}, "train.steps=1: the settings of a run"),
    ({"average": True}, "for a moving average")])
def test_what_cannot_be_converted_is_a_sentence(given, words, tmp_path):
    run = fresh(tmp_path, "gpt")
    with pytest.raises(CourseError, match=words):
        convert(run, tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


def test_normed_heads_are_no_layers_of_transformer_engine(tmp_path):
    run = fresh(tmp_path, "llama", "model.qk_norm=true")
    with pytest.raises(CourseError, match=r"model.qk_norm=true norms queries and keys.*--to hf"):
        convert(run, tmp_path / "te.safetensors", to="te")


def test_other_sources_are_a_sentence(tmp_path):
    with pytest.raises(CourseError, match="there is no"):
        convert(tmp_path / "nothing", tmp_path / "run")
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    with pytest.raises(CourseError, match="convert it with the library that wrote it"):
        convert(tmp_path / "a.safetensors", tmp_path / "run")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CourseError, match="has neither"):
        convert(tmp_path / "empty", tmp_path / "run")
    with pytest.raises(CourseError, match="the blocks of a DiT are not Transformer Engine layers"):
        transformer_engine.check_model(dit_reference.CONFIG)
    assert transformer_engine.check_model(GPTConfig()) is transformer_engine.check_model(ViTConfig()) is None
    assert json.loads(transformer_engine.about(GPTConfig(), "stacked")[weight_files.MODEL])["kind"] == "gpt"


def passes_of(way):
    """What a rank has of a step's gradients after a pass of `convert` over samples of its own."""
    from course.parallel import build_mesh
    from course.training.assemble import assemble

    settings = config.load("gpt-demo", ["model.depth=1", "model.dim=16", "model.heads=2", "precision=fp64", "train.device=cpu",
                                        "data.source=mock", "train.global_batch=4", "parallel.dp=2", f"parallel.data={way}"])
    training = assemble(settings, build_mesh(settings.parallel, join("cpu")))
    mine = training.model.example(2, CPU, 2 * training.mesh.dp.rank)
    batch = training.model.prepare(mine, training.progress.step)
    kept = []
    with mock.patch.object(training.gradients, "clear", lambda: kept.extend(p.grad.clone() for p in training.model.parameters()
                                                                           if p.grad is not None)):
        command.compute_once(training, batch)
    return kept[-len(list(training.model.parameters())):]


def test_a_pass_of_convert_averages_by_ddp_too():
    for ours, theirs in zip(ranks(2)(passes_of, "naive"), ranks(2)(passes_of, "ddp"), strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other)
