import dataclasses

import pytest

from course import config, models
from course.config import schema, validation
from course.utils.errors import CourseError


def test_defaults_come_from_the_dataclasses_alone():
    loaded = config.load("vit-base")
    assert loaded.optim == config.Optim() and loaded.model == models.ViTConfig()
    assert loaded.preset == "vit-base" and loaded.train.steps == 22_000


@pytest.mark.parametrize("name", config.presets())
def test_every_preset_loads(name):
    assert config.load(name).preset == name


@pytest.mark.parametrize(("batch", "lr"), [(16, 5e-4), (64, 1e-3), (256, 2e-3), (2048, 5.66e-3)])
def test_learning_rate_grows_with_the_root_of_the_batch(batch, lr):
    loaded = config.load(f"vit-bs{batch}")
    assert loaded.train.global_batch == batch and loaded.optim.lr == pytest.approx(lr, rel=2e-3)


def test_reference_values():
    short, mp = config.load("vit-short"), config.load("vit-mp")
    assert (short.data.train_samples, short.data.valid_samples, short.train.steps) == (512, 128, 128)
    assert (mp.model.dim, mp.train.global_batch) == (1024, 64)
    m = short.model
    assert (m.patch, m.dim, m.depth, m.heads, m.mlp_ratio, m.grid) == (8, 384, 12, 8, 4.0, (360, 720))


def test_the_kind_decides_what_a_model_is():
    assert config.load("gpt-350m").model == models.GPTConfig(dim=1024, depth=24, heads=16, mlp="gelu_tanh")
    assert config.load("dit-xl").model == models.DiTConfig()
    assert isinstance(config.load("vit-demo").model, models.ViTConfig)


def test_overrides_are_read_as_yaml():
    loaded = config.load("vit-demo", ["optim.lr=1e-3", "model.grid=[16, 32]", "compile=true", "log.name=7",
                                      "optim.betas=[0.9,0.95]"])
    assert (loaded.optim.lr, loaded.model.grid, loaded.compile, loaded.log.name) == (1e-3, (16, 32), True, "7")
    assert loaded.optim.betas == (0.9, 0.95)


@pytest.mark.parametrize(("typed", "value"), [
    ("", ""), ("007", "007"), ("1_0", "1_0"), ("12:30", "12:30"), ("2024-01-01", "2024-01-01"), ("null", "null"), ("~", "~"),
    ("yes", "yes"), ("true", "true"),
    ("a #b", "a #b"), ("#5", "#5"), ("'quoted #x'", "quoted #x"), ("1.10", "1.10"), ("7", "7"), ("a, b", "a, b")])
def test_a_text_is_what_was_typed(typed, value):
    """KEY= is the empty text. YAML would make null, numbers, dates and comments of some."""
    assert config.load("vit-demo", [f"data.path={typed}"]).data.path == value


@pytest.mark.parametrize(("typed", "value"), [("train.steps=007", 7), ("train.steps=1_000", 1000), ("optim.lr=.5", 0.5),
                                              ("optim.lr=5e-4", 5e-4), ("compile=yes", True), ("compile=off", False)])
def test_numbers_and_switches_are_read_from_what_was_typed(typed, value):
    loaded = config.load("vit-demo", [typed])
    for part in typed.partition("=")[0].split("."):
        loaded = getattr(loaded, part)
    assert loaded == value and type(loaded) is type(value)


def test_fp8_chooses_how_sequence_parallelism_communicates_where_nobody_says():
    given = ["precision=fp8", "parallel.tp=2", "parallel.sp=true"]
    assert config.load("vit-mp", given).parallel.overlap == "none"
    assert config.load("vit-mp", given[1:]).parallel.overlapped
    with pytest.raises(CourseError, match=r"not the pieces of parallel\.overlap=nccl: set parallel\.overlap=none"):
        config.load("vit-mp", [*given, "parallel.overlap=nccl"])


def test_a_runs_own_configuration_takes_fp8_too(tmp_path):
    """What its file says of overlap nobody typed."""
    config.save(config.load("vit-mp", ["parallel.tp=2", "parallel.sp=true"]), tmp_path / "config.yaml")
    assert config.load(str(tmp_path / "config.yaml"), ["precision=fp8"]).parallel.overlap == "none"


def test_who_names_a_path_wants_it_to_be_read(tmp_path):
    """gpt-124m has random data, for measuring; nobody who gives it a folder means that."""
    assert config.load("gpt-124m").data.source == "mock"
    assert config.load("gpt-124m", ["data.path=somewhere"]).data.source == "files"
    assert config.load("gpt-124m", ["data.path=somewhere", "data.source=mock"]).data.source == "mock"
    mine = tmp_path / "mine.yaml"
    mine.write_text("base: gpt-124m\ndata: {path: somewhere}\n")
    assert config.load(str(mine)).data.source == "files"


def test_configuration_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.load("vit-demo").train.steps = 3


@pytest.mark.parametrize("preset", ["vit-demo", "gpt-demo", "dit-demo"])
def test_save_and_load_give_the_same(tmp_path, preset):
    loaded = config.load(preset, ["train.steps=7", "optim.lr=3e-4"])
    config.save(loaded, tmp_path / "config.yaml")
    assert config.load(str(tmp_path / "config.yaml")) == loaded


@pytest.mark.parametrize(("preset", "override", "words"), [
    ("vit-shrt", "", ["vit-shrt", "did you mean 'vit-short'"]),
    ("gpt-7", "", ["did you mean 'gpt-7b'"]),        # gpt-774m begins so, too
    ("mine.yaml", "", ["no file mine.yaml"]),
    ("vit-demo", "train.step=5", ["train.step", "did you mean 'train.steps'"]),
    ("vit-demo", "--train.steps=5", ["settings have no dashes, such as train.steps=10"]),
    ("vit-demo", "steps=5", ["'steps'", "did you mean 'train.steps'"]),
    ("vit-demo", "optm.lr=5", ["optm", "did you mean 'optim'"]),
    ("vit-demo", "train.steps=ten", ["train.steps=ten", "integer"]),
    ("vit-demo", "train.steps=0", ["train.steps", "at least 1"]),
    ("vit-demo", "optim.name=lamb", ["optim.name=lamb", "'adam'"]),
    ("vit-demo", "train=5", ["train=5"]),
    ("vit-demo", "log.name=", ["log.name is empty, and it names a folder", "such as log.name=first"]),
    ("vit-demo", "train.steps=", ["train.steps=: ", "integer"]),
    ("vit-demo", "train.steps=null", ["train.steps=null: ", "integer"]),
    ("vit-demo", "train.steps=true", ["train.steps=true: ", "integer"]),
    ("vit-demo", "model.grid=[32]", ["model.grid.1"]),
    ("vit-demo", "model.patch=5", ["32x64", "not divisible", "model.patch=5"]),
    ("vit-demo", "model.heads=5", ["model.heads=5"]),
    ("vit-demo", "parallel.order=pp-dp", ["parallel.order"]),
    ("vit-demo", "train.steps", ["key=value"]),
    ("vit-demo", "log.name='", ["quote"]),
    ("vit-demo", "graphs=true parallel.pp=2", ["graphs=true cannot capture a pipeline"]),
    ("vit-demo", "graphs=true parallel.data=ddp", ["graphs=true", "parallel.data=bucketed"]),
    ("vit-demo", "model.dimm=3", ["no key 'model.dimm'", "did you mean 'model.dim'"]),
    ("gpt-demo", "model.dimm=3", ["no key 'model.dimm'", "did you mean 'model.dim'"]),
    ("gpt-demo", "model.vocabulary=3", ["no key 'model.vocabulary'", "did you mean 'model.vocab'"]),
    ("vit-demo", "vocab=3", ["no key 'vocab'", "did you mean 'model.vocab'"]),
    ("vit-demo", "lr=3", ["no key 'lr'", "did you mean 'optim.lr'"]),
    ("dit-demo", "model.vocab=3", ["no key 'model.vocab' in a model of kind dit: it is one of kind gpt"]),
    ("gpt-demo", "train.step=5", ["no key 'train.step' (did you mean 'train.steps'?)"]),
    ("vit-demo", "model.kind=gtp", ["no model.kind=gtp", "did you mean 'gpt'", "vit, gpt, dit"]),
    ("vit-demo", "model=5", ["model=5: "]),
    ("gpt-demo", "model.depth=deep", ["model.depth=deep: ", "integer"]),
    ("dit-demo", "model.latent=[4,8]", ["model.latent.2"]),
    ("vit-demo", "model.patch=0", ["model.patch=0 must be at least 1"]),
    ("gpt-demo", "model.context=0", ["model.context=0 must be at least 1"]),
    ("dit-demo", "model.classes=0", ["model.classes=0 must be at least 1"]),
    ("gpt-demo", "model.kv_heads=3", ["model.heads=4 is not divisible by model.kv_heads=3"]),
    ("gpt-demo", "model.heads=64 model.position=rotary", ["heads of 1 have one left over"]),
    ("gpt-demo", "model.head_dim=5 model.position=rotary", ["heads of 5 have one left over", "change model.head_dim"]),
    ("gpt-demo", "model.head_dim=-1", ["model.head_dim=-1 is negative"]),
    ("gpt-demo", "precision=fp8 fp8.by=te model.qk_norm=true", ["fp8.by=te supports only GPT-2's block", "fp8.by=native"]),
    ("gpt-demo", "model.kv_heads=2 parallel.tp=4", ["parallel.tp=4 does not divide model.kv_heads=2 (of model.heads=4)"]),
    ("gpt-demo", "attention=efficient model.kv_heads=2 precision=bf16",
     ["attention=efficient does not support grouped heads in bf16, and model.kv_heads=2 with model.heads=4 groups", "flash"]),
    ("gpt-demo", "model.kv_heads=2 parallel.tp=2 parallel.cp=2 parallel.context=all_to_all",
     ["parallel.tp=2 times parallel.cp=2 of context=all_to_all does not divide model.kv_heads=2", "parallel.context=ring"]),
    ("gpt-demo", "model.mlp_width=-1", ["model.mlp_width=-1 is negative"]),
    ("gpt-demo", f"train.steps={10**23}", [f"train.steps={10**23} is too large", "smaller"]),
    ("vit-demo", f"model.dim={10**400}", ["is too large", "smaller"]),
    ("gpt-demo", "precision=fp8 fp8.by=te model.norm=rms", ["fp8.by=te supports only GPT-2's block", "fp8.by=native"]),
    ("gpt-demo", "model.heads=5", ["model.dim=64 is not divisible by model.heads=5", "or set model.head_dim"]),
    ("dit-demo", "model.patch=3", ["latent 8x8", "not divisible by model.patch=3"]),
    ("dit-demo", "model.dim=66", ["model.dim=66", "divisible by"]),
    ("gpt-python", "data.loader=threads", ["reads weather", "for tokens set data.loader=native"]),
    ("dit-digits", "data.loader=threads", ["data.loader=threads reads weather", "data.loader=native"]),
    ("dit-demo", "optim.ema=1", ["optim.ema=1", "less than 1"]),
    ("vit-demo", "optim.warmup=-3", ["optim.warmup=-3 is negative"]),        # would climb: a learning rate below 0
    ("vit-demo", "optim.clip=-1", ["optim.clip=-1.0 is negative"]),          # would turn all gradients round
    ("vit-demo", "optim.lr=.nan", ["optim.lr=nan"]),
    ("vit-demo", "optim.lr=.nan", ["optim.lr=nan is not a number"]),
    ("vit-demo", "optim.lr=nan", ["optim.lr=nan is not a number"]),
    ("vit-demo", "optim.lr=.inf", ["optim.lr=inf is infinite"]),
    ("vit-demo", "optim.betas=[0.9,1]", ["optim.betas=1.0 must be at least 0 and less than 1"]),
    ("vit-demo", "model.dropout=1", ["model.dropout=1.0 must be at least 0 and less than 1"]),
    ("dit-demo", "model.label_drop=1.5", ["model.label_drop=1.5 must be at least 0 and at most 1"]),
    ("dit-demo", "model.label_drop=.nan", ["model.label_drop=nan"]),
    ("gpt-demo", "model.norm_eps=0", ["model.norm_eps=0.0 must be more than 0"]),
    ("gpt-demo", "model.rope_theta=0", ["model.rope_theta=0.0 must be at least 1"]),
    ("vit-demo", "model.grid=[0,64]", ["model.grid=0 must be at least 1"]),
    ("gpt-demo", "train.threads=-1", ["train.threads=-1 is negative"]),
])
def test_bad_settings_are_explained(preset, override, words):
    with pytest.raises(CourseError) as caught:
        config.load(preset, override.split())
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("fits", ["model.kv_heads=2 precision=tf32", "model.kv_heads=4 precision=bf16", "precision=bf16",
                                  "model.kv_heads=2 precision=bf16 parallel.cp=2 parallel.context=ring"])
def test_efficient_attention_is_refused_for_groups_in_16_bits_alone(fits):
    assert config.load("gpt-demo", ["attention=efficient", *fits.split()]).attention == "efficient"


@pytest.mark.parametrize("text", ["train: [", "- a\n- b", "base: base.yaml", "\x00"])
def test_bad_preset_files_are_explained(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(text)
    with pytest.raises(CourseError):
        config.load("base.yaml")


def test_a_base_is_found_from_the_folder_of_the_file_that_names_it(tmp_path, monkeypatch):
    """And from there its own; a preset's name stays one, whatever lies beside; an error names what was looked for."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "mine.yaml").write_text("base: ../ours.yaml\ntrain: {steps: 3}")
    (tmp_path / "a" / "ours.yaml").write_text("base: most.yaml\ntrain: {global_batch: 2}")
    (tmp_path / "a" / "most.yaml").write_text("base: gpt-demo\noptim: {lr: 0.5}")
    (tmp_path / "a" / "gpt-demo").write_text("model: {kind: dit}")
    (tmp_path / "ours.yaml").write_text("train: {global_batch: 64}")
    monkeypatch.chdir(tmp_path)
    for path in ("a/b/mine.yaml", str(tmp_path / "a" / "b" / "mine.yaml")):
        found = config.load(path)
        assert (found.preset, found.model.kind, found.optim.lr) == ("mine", "gpt", 0.5)
        assert (found.train.steps, found.train.global_batch) == (3, 2)
    (tmp_path / "a" / "most.yaml").rename(tmp_path / "most.yaml")
    with pytest.raises(CourseError, match=r"there is no file a/b/\.\./most\.yaml: give"):
        config.load("a/b/mine.yaml")


def test_every_key_that_has_a_range_is_one():
    listed = [key for keys in validation.NUMBERS.values() for key in keys.split()]
    known = set(schema.flat_keys(config.Config))
    assert len(listed) == len(set(listed)) and not set(listed) - known


def test_differences_name_the_leaves():
    old, new = (schema.as_plain(config.load("vit-demo", [f"train.steps={n}"])) for n in (5, 6))
    assert schema.differences(old, new) == ["train.steps: 5 -> 6"]
