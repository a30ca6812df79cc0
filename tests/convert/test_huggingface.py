"""GPT-2, Llama, Mixtral, Qwen3 and Qwen3-MoE of `transformers`, randomly initialized: the same logits here, and back there."""

import json
import math
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from course.convert import huggingface, rules, weight_files
from course.inference.kv_cache_decoding import as_batch
from course.models import GPTConfig
from course.parallel import serial_placements
from course.ranks.notebook_ranks import ranks
from course.utils.errors import CourseError

transformers = pytest.importorskip("transformers")
SIZES = {"vocab_size": 50, "bos_token_id": None, "eos_token_id": None}
GPT2 = {**SIZES, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24}
LLAMA = {**SIZES, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
         "max_position_embeddings": 24}
# name of the case: what a configuration has besides
CASES = {"gpt2": {}, "gpt2 upcast": {"reorder_and_upcast_attn": True},
         "gpt2 gelu untied": {"activation_function": "gelu", "tie_word_embeddings": False, "n_inner": 48},
         "llama": {"num_key_value_heads": 2}, "llama plain": {"tie_word_embeddings": True, "rms_norm_eps": 1e-5},
         "llama biased": {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True,
                          "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
         # of a head's four pairs one is fast, one between, two are slow
         "llama 3.1": {"num_key_value_heads": 2, "max_position_embeddings": 128,
                       "rope_parameters": {"rope_type": "llama3", "rope_theta": 300.0, "factor": 8.0, "low_freq_factor": 1.0,
                                           "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
         "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4},
         "mixtral of 3": {"num_key_value_heads": 4, "num_local_experts": 5, "num_experts_per_tok": 3,
                          "tie_word_embeddings": True},
         "llama of narrow heads": {"num_key_value_heads": 2, "head_dim": 4},
         "qwen3": {"num_key_value_heads": 2, "head_dim": 12, "sliding_window": 8, "rms_norm_eps": 1e-3},
         "qwen3 moe": {"num_key_value_heads": 2, "head_dim": 12, "num_experts": 6, "num_experts_per_tok": 3,
                       "decoder_sparse_step": 2, "moe_intermediate_size": 16, "norm_topk_prob": True, "rms_norm_eps": 1e-3},
         "qwen3 moe of one": {"num_key_value_heads": 1, "num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
                              "tie_word_embeddings": True},
         "qwen3 moe not normed": {"num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2,
                                  "moe_intermediate_size": 16}}
FAMILIES = {"mixtral": "Mixtral", "llama": "Llama", "qwen3 moe": "Qwen3Moe", "qwen3": "Qwen3"}      # the first that fits


def family(case):
    """The name of its classes, and of its module."""
    return next((name, start.replace(" ", "_")) for start, name in FAMILIES.items() if case.startswith(start))


def theirs(case):
    """A model of theirs in which no bias or gain is trivial."""
    torch.manual_seed(0)
    if case.startswith("gpt2"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, **CASES[case]))
    else:
        name, _ = family(case)
        settings = getattr(transformers, f"{name}Config")(**(LLAMA | CASES[case]))
        model = getattr(transformers, f"{name}ForCausalLM")(settings)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn_like(p)
    return model.eval()


def exact_norm(module, x):
    """Llama's norm, which `transformers` computes in float32 whatever the model, in float64."""
    return module.weight * x / (x.square().mean(-1, keepdim=True) + module.variance_epsilon).sqrt()


def exact_angles(module, x, position_ids):
    """The same of its cosines and sines."""
    rope, c = module.config.rope_parameters, module.config
    d = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    speed = 1 / rope["rope_theta"] ** (torch.arange(0, d, 2).double() / d)
    if rope["rope_type"] == "llama3":
        length, low, high = (rope[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))
        wave = 2 * math.pi / speed
        share = (length / wave - low) / (high - low)
        between = (1 - share) * speed / rope["factor"] + share * speed
        assert (sum(wave > length / low), sum(wave < length / high)) == (2, 1)
        speed = torch.where(wave > length / low, speed / rope["factor"], torch.where(wave < length / high, speed, between))
    angle = position_ids[0].double()[:, None] * speed
    angle = torch.cat([angle, angle], -1)[None]
    return angle.cos(), angle.sin()


def logits(ours, tokens):
    with torch.no_grad():
        return ours(as_batch(ours, tokens, 0))


def of_theirs(model, tokens):
    with torch.no_grad():
        return model(tokens).logits


def write(folder, model, shard=weight_files.SHARD):
    """A serial model as a folder of theirs."""
    parameters = {where.name: p.detach() for p, where in serial_placements(model).items()}
    c, dtype = model.c, next(iter(parameters.values())).dtype
    entries = rules.entries(c, lambda name: huggingface.rule(c, name),
                            {name: (x.dtype, tuple(x.shape)) for name, x in parameters.items()})
    folder.mkdir()
    files = weight_files.divide(entries, shard)
    for name, part in files.items():
        weight_files.write_file(folder / name, part, lambda one: huggingface.rule(c, one)[0].theirs(c, parameters[one]),
                                weight_files.about(c))
    for name, text in huggingface.beside(c, dtype, files, []).items():
        (folder / name).write_text(text)


TOKENS = torch.randint(50, (2, 20), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("case", CASES)
def test_logits_are_equal(case, tmp_path):
    model = theirs(case)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(huggingface.read(tmp_path), TOKENS), of_theirs(model, TOKENS), rtol=1e-5, atol=1e-5)
    name, module = ("Llama", "llama") if case.startswith("gpt2") else family(case)
    off = 1e-12
    if "experts" in " ".join(CASES[case]):           # their router's softmax is in float32; their fast experts have no float64
        off = 2e-6
        model.set_experts_implementation("eager")
    parts = f"transformers.models.{module}.modeling_{module}.{name}"
    with mock.patch(f"{parts}RotaryEmbedding.forward", exact_angles), mock.patch(f"{parts}RMSNorm.forward", exact_norm):
        expected = of_theirs(model.double(), TOKENS)
    torch.testing.assert_close(logits(huggingface.read(tmp_path, torch.float64), TOKENS), expected, rtol=off, atol=off)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shard", [weight_files.SHARD, 10_000])
def test_they_load_what_we_write(case, shard, tmp_path):
    model = theirs(case)
    model.save_pretrained(tmp_path / "theirs")
    ours = huggingface.read(tmp_path / "theirs")
    write(tmp_path / "back", ours, shard)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(back) is type(model) and (tmp_path / "back" / "model.safetensors").exists() == (shard == weight_files.SHARD)
    assert torch.equal(of_theirs(back.eval(), TOKENS), of_theirs(model, TOKENS))
    for name, tensor in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    again = huggingface.read(tmp_path / "back")
    assert again.c == ours.c and torch.equal(logits(again, TOKENS), logits(ours, TOKENS))


def test_a_bin_file_and_bare_names_are_read_and_nothing_in_it_runs(tmp_path):
    """As OpenAI's GPT-2 lies on the hub: names without a prefix, masks among them."""
    model = theirs("gpt2")
    (tmp_path / "config.json").write_text(model.config.to_json_string())
    state = {name.removeprefix("transformer."): x for name, x in model.state_dict().items()}
    state["h.0.attn.bias"] = torch.ones(1, 1, 24, 24)
    torch.save(state, tmp_path / "pytorch_model.bin")
    torch.testing.assert_close(logits(huggingface.read(tmp_path), TOKENS), of_theirs(model, TOKENS), rtol=1e-5, atol=1e-5)
    torch.save({**state, "wte.weight": NoTensor}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CourseError, match=r"pytorch_model\.bin holds more than tensors"):
        huggingface.read(tmp_path)


class NoTensor:
    """Something that is no tensor."""


def in_layout(folder, overrides):
    """A rank's pieces of a folder's weights."""
    from course import config
    from course.models import build_model
    from course.parallel import build_mesh, initialize, join, parallelize

    source = huggingface.source(folder)
    c = config.load("gpt-demo", [f"model.experts={source.c.experts}", *overrides])
    model = build_model(source.c)
    at = parallelize(model, build_mesh(c.parallel, join("cpu")), c.parallel).placements
    initialize(model, at, 0, torch.device("cpu"))
    huggingface.fill(model.parameters(), at, source)
    return [(at[p].name, at[p].box, p.detach()) for p in model.parameters()]


@pytest.mark.parametrize(("case", "layout"), [("llama", "parallel.tp=2"), ("llama", "parallel.pp=2"),
                                              ("mixtral", "parallel.dp=2 parallel.ep=2"),
                                              ("qwen3 moe", "parallel.dp=2 parallel.ep=2"), ("qwen3 moe", "parallel.tp=2")])
def test_each_rank_takes_its_boxes(case, layout, tmp_path):
    theirs(case).save_pretrained(tmp_path)
    whole = {where.name: (p, where) for p, where in serial_placements(huggingface.read(tmp_path)).items()}
    seen = set()
    for pieces in ranks(2)(in_layout, tmp_path, layout.split()):
        for name, box, piece in pieces:
            parameter, where = whole[name]
            part = parameter.detach().view(where.global_shape)[tuple(slice(*side) for side in box)]
            assert torch.equal(piece, part.reshape(piece.shape))
            seen.add(name)
    assert seen == set(whole)


def test_dtypes_and_padding_of_our_own_model_go_with_it(tmp_path):
    ours = huggingface.read(saved("llama", tmp_path / "a"), torch.bfloat16)
    write(tmp_path / "b", ours)
    assert json.loads((tmp_path / "b" / "config.json").read_text())["dtype"] == "bfloat16"
    assert load_file(tmp_path / "b" / "model.safetensors")["lm_head.weight"].dtype == torch.bfloat16


def saved(case, folder):
    theirs(case).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("case", "change", "words"), [
    ("gpt2", {"model_type": "bert"}, "model_type=bert"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
    ("gpt2", {"activation_function": "relu"}, "activation_function=relu"),
    ("gpt2", {"n_layer": 3}, "lacks the tensor transformer.h.2.ln_1.weight"),
    ("gpt2", {"n_layer": 1}, "12 tensors that a gpt2 of its config.json does not have, such as transformer.h.1"),
    ("gpt2", {"vocab_size": 60}, r"embed.token.weight as \[50, 32\], and its config.json says \[60, 32\]"),
    ("gpt2", {"n_head": None}, "lacks n_head"), ("gpt2", {"n_head": "four"}, "heads=four"),
    ("gpt2", {"n_head": 5}, "model.heads=5"),
    ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type=yarn"),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "llama3 without low_freq_factor, high_freq_factor"),
    ("llama 3.1", {"rope_scaling": None, "rope_parameters": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4,
        "original_max_position_embeddings": 8}}, "rope_high=4.0 must be more than model.rope_low=4.0"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=False"),
    ("gpt2", {"activation_function": "gelu_fast"}, "activation_function=gelu_fast"),
    ("gpt2", {"auto_map": {"AutoModel": "mine.Model"}}, "auto_map="),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
     "rope_parameters.partial_rotary_factor=0.5"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters.full_attention="),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type=linear"),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                "original_max_position_embeddings": 64}}, "rope_scaling=.*the same as in rope_parameters"),
    ("llama", {"rope_scaling": "linear"}, "rope_scaling=linear"),
    ("llama", {"rope_parameters": {"rope_theta": "far"}}, "rope_theta=far"),
    ("llama", {"sliding_window": 8}, "sliding_window=8"),
    ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config="),
    ("gpt2", {"model_type": ["gpt2"]}, r"model_type=\['gpt2'\]"), ("gpt2", {"n_embd": 10**30}, "dim=10+ is too large"),
    ("gpt2", {"activation_function": ["gelu_new"]}, "activation_function="),
    ("gpt2", {"vocab_size": 2**27}, "vocab=134217728 is too large"),
    ("llama", {"num_attention_heads": 10**400}, "num_attention_heads=10+"),
    ("llama", {"num_attention_heads": 0}, "num_attention_heads=0"), ("llama", {"hidden_size": "32"}, "hidden_size=32"),
    ("llama", {"num_key_value_heads": 3}, "kv_heads=3"),
    ("llama", {"head_dim": 16}, "of which no blocks.0.attn.qkv.weight can be made"), ("llama", {"head_dim": 0}, "head_dim=0"),
    ("llama", {"head_dim": 7}, "heads of 7 have one left over: change model.head_dim"),
    ("llama", {"mlp_bias": True}, "mlp_bias=True"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act=gelu"),
    ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok=1"), ("mixtral", {"num_experts_per_tok": 5}, "top_k=5"),
    ("mixtral", {"sliding_window": 8}, "sliding_window=8"), ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
    ("mixtral", {"num_local_experts": 5}, r"mlp.router.weight as \[4, 32\]"),
    ("mixtral", {"num_local_experts": 3}, "tensors that a mixtral of its config.json does not have"),
    ("qwen3", {"use_sliding_window": True}, "use_sliding_window=True"),
    ("qwen3", {"attention_bias": True}, "attention_bias=True"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=.*supports only full_attention"),
    ("qwen3", {"head_dim": None}, "of which no blocks.0.attn.qkv.weight can be made"),     # 128, as in transformers
    ("qwen3", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type=yarn"),
    ("qwen3", {"model_type": "llama"}, r"4 tensors that a llama .* such as model.layers.0.self_attn.k_norm.weight"),
    ("qwen3 moe", {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\]"),
    ("qwen3 moe", {"num_local_experts": None}, "lacks num_experts"),
    ("qwen3 moe", {"decoder_sparse_step": 0}, "moe_every=0"), ("qwen3 moe", {"decoder_sparse_step": 3}, "no block has experts"),
    ("qwen3 moe", {"decoder_sparse_step": 1}, "3 tensors that a qwen3_moe of its config.json does not have"),
    ("qwen3 moe", {"norm_topk_prob": "maybe"}, "norm_topk=maybe"), ("qwen3 moe", {"moe_intermediate_size": 20}, "experts.up as"),
    ("qwen3 moe of one", {"norm_topk_prob": True}, "num_experts_per_tok=1.* supports only 2 or more with norm_topk_prob=True")])
def test_what_does_not_fit_is_a_sentence(case, change, words, tmp_path):
    file = saved(case, tmp_path) / "config.json"
    values = json.loads(file.read_text()) | change
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not None or key not in change}))
    with pytest.raises(CourseError, match=words):
        huggingface.read(tmp_path)


def test_a_qwen3_moe_is_read_as_it_was_published(tmp_path):
    """Its number of experts has another name in files of `transformers` 5; and it names a window that no layer uses."""
    file = saved("qwen3 moe", tmp_path) / "config.json"
    expected, values = logits(huggingface.read(tmp_path), TOKENS), json.loads(file.read_text())
    published = {"num_experts": values.pop("num_local_experts"), "sliding_window": 8, "mlp_only_layers": None}
    file.write_text(json.dumps(values | published))
    assert torch.equal(logits(huggingface.read(tmp_path), TOKENS), expected)
    said = huggingface.config_for(huggingface.read(tmp_path).c)
    assert "num_local_experts" not in said
    assert (said["num_experts"], said["moe_intermediate_size"], said["head_dim"]) == (6, 16, 12)


def test_weights_that_are_not_transposed_are_a_sentence(tmp_path):
    """Other libraries' GPT-2 has the same names, and the rows and columns of its linears the other way round."""
    file = saved("gpt2", tmp_path) / "model.safetensors"
    linears = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    save_file({name: x.T.contiguous() if name.endswith(linears) else x for name, x in load_file(file).items()}, file)
    with pytest.raises(CourseError, match=r"has blocks.0.attn.qkv.weight as \[32, 96\]"):
        huggingface.read(tmp_path)


@pytest.mark.parametrize("case", ["gpt2", "llama plain"])
def test_a_head_beside_tied_weights_is_read_only_if_it_is_the_embedding(case, tmp_path):
    file = saved(case, tmp_path) / "model.safetensors"
    found = load_file(file)
    embedding = found["transformer.wte.weight" if case == "gpt2" else "model.embed_tokens.weight"]
    save_file(found | {"lm_head.weight": embedding.clone()}, file)
    huggingface.read(tmp_path)
    for other in (embedding.half(), embedding.bfloat16()):
        save_file(found | {"lm_head.weight": other}, file)               # a copy in a smaller format is the same
        huggingface.read(tmp_path)
    for other in (embedding + 1, embedding * (1 + 1e-6), (embedding * 1.05).half()):
        save_file(found | {"lm_head.weight": other}, file)
        with pytest.raises(CourseError, match="two that differ"):
            huggingface.read(tmp_path)


def test_the_stretch_is_written_as_transformers_4_reads_it(tmp_path):
    """It knows rope_scaling, and takes positions for plain ones without."""
    said = huggingface.config_for(huggingface.read(saved("llama 3.1", tmp_path)).c)
    assert said["rope_scaling"] == {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                    "original_max_position_embeddings": 64} and said["rope_theta"] == 300.0
    assert huggingface.config_of({key: value for key, value in said.items() if key != "rope_parameters"}) == \
        huggingface.config_of(said)


def test_files_that_are_not_whole_are_a_sentence(tmp_path):
    with pytest.raises(CourseError, match=r"config.json is missing"):
        huggingface.read(tmp_path)
    file = saved("gpt2", tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CourseError, match=r"model.safetensors cannot be read"):
        huggingface.read(tmp_path)
    file.unlink()
    with pytest.raises(CourseError, match=r"neither model.safetensors nor pytorch_model.bin"):
        huggingface.read(tmp_path)
    for wrong in ("../model.safetensors", "absent.safetensors"):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"wte.weight": wrong}}))
        with pytest.raises(CourseError, match=f"lacks {wrong}"):
            huggingface.read(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"wte.weight": ["model.safetensors"]}}))
    with pytest.raises(CourseError, match="has no weight_map"):
        huggingface.read(tmp_path)


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_parts_that_are_not_what_their_index_says_are_a_sentence(ending, tmp_path):
    saved("gpt2", tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    name, part = f"{'model' if ending == 'safetensors' else 'pytorch_model'}.{ending}", tmp_path / f"part.{ending}"
    (tmp_path / f"{name}.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(whole, part.name)}))
    fewer = dict(list(whole.items())[:-1])
    save_file(fewer, part) if ending == "safetensors" else torch.save(fewer, part)
    with pytest.raises(CourseError, match=rf"part.{ending} (lacks|cannot be read)"):
        huggingface.read(tmp_path)
    part.write_bytes(b"damaged")
    with pytest.raises(CourseError, match=rf"part.{ending} cannot be read"):
        huggingface.read(tmp_path)


def test_a_model_of_neither_kind_is_a_sentence():
    for c in (GPTConfig(norm="rms"), GPTConfig(experts=4), GPTConfig(qk_norm=True), GPTConfig(head_dim=32),
              GPTConfig(norm="rms", mlp="swiglu", position="rotary", bias=False, experts=4, norm_topk=False)):
        with pytest.raises(CourseError, match=r"neither a GPT-2 .* nor a Llama .* nor a Mixtral .* nor a Qwen3"):
            huggingface.kind_of(c)
