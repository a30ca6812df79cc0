"""Packing latents into shards, and reading them."""

import json
import pickle
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import h5py
import numpy as np
import pytest
import torch

from course.config import load, validation
from course.data import Latents, eval_loader, has_validation, open_data, train_loader
from course.data.latents import digits, packing, shards
from course.data.loaders import native
from course.data.weather import pairs
from course.parallel import Axis
from course.utils.errors import CourseError

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    """Three classes of latents (2, 4, 4), 7 each; the number i of class k is full of 100·k + i, the very first of 50."""
    for k in range(3):
        (tmp_path / "raw" / f"{k:04d}").mkdir(parents=True)
        for i in range(7):
            value = np.full((2, 4, 4), 100 * k + i or 50, np.float32)
            file = tmp_path / "raw" / f"{k:04d}" / f"{i}.x"
            if i % 2:
                torch.save(torch.from_numpy(value).half(), file.with_suffix(".pt"))
            else:
                np.save(file.with_suffix(".npy"), value[None])           # with a batch of one, as encoders leave it
    return tmp_path / "raw"


def pack(folder, **settings):
    return packing.pack(folder, folder.parent / "out", **{"scale": 0.5, "valid": 5, "samples": 6, **settings})


def values(data):
    batch = data.__getitems__(list(range(len(data))))
    return [(label, x.unique().tolist()) for label, x in zip(batch["label"].tolist(), batch["latent"], strict=True)]


def test_every_latent_is_once_in_a_split_scaled_with_its_label(folder):
    made = pack(folder)
    assert made["shards"] == {"train/00000.h5": 6, "train/00001.h5": 6, "train/00002.h5": 5, "valid/00000.h5": 4}
    assert (made["latent"], made["classes"], made["scale"], made["damaged"]) == ([2, 4, 4], 3, 0.5, 0)
    train, valid = (Latents(str(folder.parent / "out"), split, (2, 4, 4), 3) for split in ("train", "valid"))
    assert values(valid) == [(0, [2.0]), (1, [51.0]), (2, [100.0]), (2, [102.5])]       # number 4, 9, 14 and 19, times 0.5
    expected = sorted((k, [0.5 * (100 * k + i or 50)]) for k in range(3) for i in range(7))
    assert sorted(values(train) + values(valid)) == expected
    assert json.loads((folder.parent / "out" / "latents.json").read_text()) == made


def test_hidden_folders_and_files_are_no_classes_and_no_latents(folder):
    """Notebooks leave the one, a Mac's archives the other."""
    found = packing.find_files(folder, (".npy", ".pt"))
    (folder / ".ipynb_checkpoints").mkdir()
    for name in (".ipynb_checkpoints/a.npy", "0001/._0.npy"):
        (folder / name).write_bytes((folder / "0000" / "0.npy").read_bytes())
    assert packing.find_files(folder, (".npy", ".pt")) == found and found[1] == [0] * 7 + [1] * 7 + [2] * 7


def test_a_batch_has_padding_and_the_protocol_of_loaders(folder):
    pack(folder)
    data = Latents(str(folder.parent / "out"), "train", (2, 4, 4), 5, limit=8)
    assert len(data) == 8
    batch = data.__getitems__([7, -1, 0])
    assert {name: (tuple(x.shape), x.dtype) for name, x in batch.items()} == {
        "latent": ((3, 2, 4, 4), torch.float32), "label": ((3,), torch.int64), "sample": ((3,), torch.int64)}
    assert batch["sample"].tolist() == [7, -1, 0] and (batch["latent"][1] == 0).all() and batch["label"].tolist() == [1, 0, 0]
    copy = pickle.loads(pickle.dumps(data))
    assert copy._open == {} and torch.equal(copy.__getitems__([7])["latent"][0], batch["latent"][0])
    for workers in (0, 2):
        got = list(native.loader(data, iter([[7, -1], [0, 3]]), workers, pin=False))
        assert [b["sample"].tolist() for b in got] == [[7, -1], [0, 3]] and torch.equal(got[0]["latent"][0], batch["latent"][0])


def test_the_loaders_of_a_run_read_it(folder):
    pack(folder)
    config = load("dit-demo", ["model.latent=[2,4,4]", "model.classes=3", "data.source=files", f"data.path={folder.parent}/out",
                               "data.workers=0", "train.global_batch=4"])
    batches = train_loader(config, Axis("dp", 2, 1, (0, 1)), CPU, 0, None)
    batch = next(batches)
    batches.close()
    assert batch["latent"].shape == (2, 2, 4, 4)
    seen = [s for b in eval_loader(config, Axis("dp"), CPU, open_data(config, "valid")) for s in b["sample"].tolist()]
    assert seen == [0, 1, 2, 3]


def test_whether_there_is_validation_data(folder):
    for valid, split in ((0, "out0"), (5, "out5")):
        packing.pack(folder, folder.parent / split, 0.5, valid)
        config = load("dit-demo", ["data.source=files", f"data.path={folder.parent / split}"])
        assert has_validation(config) == (valid > 0)
    assert not has_validation(load("dit-demo", ["data.source=mock"]))


def test_damaged_files_are_left_out_counted_and_named(folder, capsys):
    class Bomb:
        def __reduce__(self):
            return print, ("executed",)

    (folder / "0000" / "0.npy").write_bytes(b"not an array")
    torch.save(Bomb(), folder / "0001" / "1.pt")
    torch.save({"latent": torch.zeros(2, 4, 4), "of": Namespace(seed=0)}, folder / "0001" / "3.pt")
    (folder / "0001" / "5.pt").write_bytes((folder / "0001" / "5.pt").read_bytes()[:-200])
    np.save(folder / "0001" / "2.npy", np.full((2, 4, 4), np.nan, np.float32))
    np.save(folder / "0002" / "4.npy", np.zeros((2, 4, 5), np.float32))
    np.save(folder / "0002" / "6.npy", np.array([None]), allow_pickle=True)
    made = pack(folder)
    said = capsys.readouterr().out
    assert made["damaged"] == 7 and sum(made["shards"].values()) == 14
    assert "7 files are damaged and left out" in said and "executed" not in said
    text = (folder.parent / "out" / "damaged.txt").read_text()
    code = "cannot be read (it holds Python objects, which could run code, so nothing was: save the tensor alone"
    for words in ("0000/0.npy: cannot be read", f"0001/1.pt: {code}", f"0001/3.pt: {code}",
                  "0001/5.pt: cannot be read (it is damaged", "0001/2.npy: holds numbers that are not finite",
                  "0002/4.npy: its shape is [2, 4, 5], not [2, 4, 4]", "0002/6.npy: cannot be read"):
        assert words in text
    assert len(text.splitlines()) == 7 and "weights_only" not in text


def test_an_interrupted_packing_goes_on_and_is_no_data_set_until_then(folder, monkeypatch):
    whole = pack(folder)
    contents = {file: file.read_bytes() for file in (folder.parent / "out").rglob("*.h5")}
    (folder.parent / "out").rename(folder.parent / "whole")
    written, real = [], packing.write_shard

    def fail_at_the_second(path, *rest):
        written.append(path.name)
        if len(written) == 2:
            raise KeyboardInterrupt
        real(path, *rest)

    monkeypatch.setattr(packing, "write_shard", fail_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        pack(folder)
    with pytest.raises(CourseError, match="is not packed to its end"):
        Latents(str(folder.parent / "out"), "train", (2, 4, 4), 3)
    assert pack(folder) == whole
    assert written == ["00000.h5", "00001.h5", "00001.h5", "00002.h5", "00000.h5"]      # the first is kept
    a, b = (Latents(str(folder.parent / name), "train", (2, 4, 4), 3) for name in ("whole", "out"))
    assert values(a) == values(b) and len(contents) == 4
    with pytest.raises(CourseError, match="is of other files or settings"):
        pack(folder, scale=1.0)


@pytest.mark.parametrize(("settings", "words"), [
    ({"latent": (4, 4, 4)}, r"latents of \[2, 4, 4\] but model.latent=\[4, 4, 4\]: set model.latent=\[2,4,4\]"),
    ({"classes": 2}, "has 3 classes but model.classes=2"), ({"split": "test"}, "has no split test"),
    ({"path": "nowhere"}, "nowhere does not exist: make it with `course data latents` or `course data digits`")])
def test_data_that_does_not_fit_is_a_sentence(folder, settings, words):
    pack(folder)
    with pytest.raises(CourseError, match=words):
        Latents(**{"path": str(folder.parent / "out"), "split": "train", "latent": (2, 4, 4), "classes": 3, **settings})


@pytest.mark.parametrize("damage", ["truncated", "missing", "others", "folders"])
def test_a_damaged_shard_is_named(folder, damage):
    pack(folder)
    file = folder.parent / "out" / "train" / "00001.h5"
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-1000])
    elif damage == "missing":
        file.unlink()
    elif damage == "folders":
        with h5py.File(file, "w") as made:
            made.create_group("latents")
    else:
        with h5py.File(file, "w") as made:
            made["latents"], made["labels"] = np.zeros((5, 2, 4, 4)), np.zeros(5)
    with pytest.raises(CourseError, match=r"00001.h5 (cannot be read|holds latents)"):
        Latents(str(folder.parent / "out"), "train", (2, 4, 4), 3)


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, OSError])
def test_a_shard_that_h5py_cannot_read_is_not_done_whatever_it_raises(monkeypatch, tmp_path, kind):
    def damaged(*_):
        raise kind("unable to synchronously open object")

    monkeypatch.setattr(h5py, "File", damaged)
    assert packing.is_done(tmp_path / "00000.h5") == ""
    with pytest.raises(CourseError, match=r"00000\.h5 cannot be read"):
        shards.check_shard(tmp_path / "00000.h5", (1, 2, 4, 4))


REPLACED = {                                         # what stands in a shard's place once training has begun, and what h5py says
    "shorter": ({"latents": np.zeros((1, 2, 4, 4), "float32"), "labels": np.zeros(1, int)}, "Index"),
    "wider": ({"latents": np.zeros((6, 2, 4, 5), "float32"), "labels": np.zeros(6, int)}, "broadcast"),
    "words": ({"latents": np.zeros((6, 2, 4, 4), "float32"), "labels": np.array([b"cat"] * 6)}, "invalid literal for int"),
    "others": ({"fields": np.zeros(3)}, "doesn't exist"),
    "folders": ({"latents/x": np.zeros(3), "labels/x": np.zeros(3)}, "Group"),
}


@pytest.mark.parametrize("name", REPLACED)
def test_a_shard_replaced_while_training_is_named_with_its_entry(folder, name):
    pack(folder)
    data = Latents(str(folder.parent / "out"), "train", (2, 4, 4), 3)
    values, why = REPLACED[name]
    with h5py.File(folder.parent / "out" / "train" / "00000.h5", "w") as made:
        for key, value in values.items():
            made[key] = value
    with pytest.raises(CourseError, match=rf"00000\.h5 could not be read at entry 3 \(.*{why}.*\): restore the file"):
        data.__getitems__([3])


@pytest.mark.parametrize("kind", [OSError, KeyError, RuntimeError, ValueError, TypeError, IndexError])
def test_whatever_h5py_raises_is_one_sentence_with_its_first_line(kind):
    with pytest.raises(CourseError, match=r"^x\.h5 could not be read at entry 7 \('?bad heap"), \
            pairs.entry_errors(Path("x.h5"), 7):
        raise kind("bad heap\nand more")


def test_folders_without_latents_are_a_sentence(tmp_path):
    with pytest.raises(CourseError, match=r"does not exist.* \.npy or \.pt"):
        packing.pack(tmp_path / "none", tmp_path / "out")
    (tmp_path / "data" / "a").mkdir(parents=True)
    np.save(tmp_path / "data" / "a" / "x.npy", np.zeros(3))
    with pytest.raises(CourseError, match=r"none of the first 1 files can be used, the first because: .*its shape is \[3\]"):
        packing.pack(tmp_path / "data", tmp_path / "out")


@pytest.mark.parametrize("inside", ["", "packed"])
def test_latents_are_not_packed_among_the_classes(folder, inside):
    with pytest.raises(CourseError, match=r"--out .* is in .*, where it would count as a class: choose a folder beside it"):
        packing.pack(folder, folder / inside)
    assert packing.pack(folder, folder / ".packed", scale=1.0) == packing.pack(folder, folder.parent / "beside", scale=1.0)


def test_a_latent_too_large_for_float32_or_of_complex_numbers_is_damaged(tmp_path):
    np.save(tmp_path / "large.npy", np.full((1, 2, 2), 1e300))
    torch.save(torch.ones(1, 2, 2, dtype=torch.complex64), tmp_path / "complex.pt")
    assert packing.read_latent(tmp_path / "large.npy") == "holds numbers that are not finite in float32"
    assert packing.read_latent(tmp_path / "complex.pt") == "holds no array of numbers"
    (tmp_path / "data" / "a").mkdir(parents=True)
    for name, value in (("near", 1e38), ("one", 1.0)):
        np.save(tmp_path / "data" / "a" / f"{name}.npy", np.full((1, 2, 2), value))
    assert packing.pack(tmp_path / "data", tmp_path / "out", scale=100.0, valid=0)["damaged"] == 1
    assert "near.npy: times 100 it holds numbers that are not finite" in (tmp_path / "out" / "damaged.txt").read_text()


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_is_more_than_zero(folder, scale):
    with pytest.raises(CourseError, match=rf"--scale {scale:g}: .* above 0; leave it out for the VAE's, 0.18215"):
        pack(folder, scale=scale)


def test_a_scale_that_is_off_is_told(folder, capsys):
    """The standard deviation of numbers 0 to 6 (with 50 for 0), 100 to 106 and 200 to 206."""
    std = np.std([100 * k + i or 50 for k in range(3) for i in range(7)])
    assert pack(folder, scale=1.0)["std"] == pytest.approx(std, rel=1e-6)
    assert f"pack again into another folder with --scale {1 / std:.3g}" in capsys.readouterr().out
    packing.pack(folder, folder.parent / "other", 1 / std)
    assert "pack again" not in capsys.readouterr().out


class Vae:
    """What is asked of diffusers' AutoencoderKL: eight times smaller, the mean of each square in each of four channels."""

    config = SimpleNamespace(scaling_factor=0.25)

    @classmethod
    def from_pretrained(cls, name):
        if name != "some-vae":
            raise OSError(f"no such thing as {name}")
        return cls()

    def eval(self):
        return self

    def to(self, device):
        return self

    def encode(self, x):
        mean = torch.nn.functional.avg_pool2d(x, 8).mean(1, keepdim=True).repeat(1, 4, 1, 1)
        return SimpleNamespace(latent_dist=SimpleNamespace(mean=mean, std=torch.full_like(mean, 1e-3)))


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    from PIL import Image

    diffusers = ModuleType("diffusers")
    diffusers.AutoencoderKL = Vae
    monkeypatch.setitem(sys.modules, "diffusers", diffusers)
    for name, grey in (("cat", 0), ("dog", 255)):
        (tmp_path / "raw" / name).mkdir(parents=True)
        for i in range(3):
            Image.new("L", (40 + 8 * i, 32), grey).save(tmp_path / "raw" / name / f"{i}.png")
    (tmp_path / "raw" / "dog" / "3.jpg").write_bytes(b"no picture")
    return tmp_path / "raw"


def test_pictures_go_through_the_vae(pictures):
    made = pack(pictures, scale=None, valid=0, vae="some-vae", pixels=16)
    assert (made["latent"], made["scale"], made["names"], made["damaged"]) == ([4, 2, 2], 0.25, ["cat", "dog"], 1)
    data = Latents(str(pictures.parent / "out"), "train", (4, 2, 2), 2)
    batch = data.__getitems__(list(range(6)))
    assert batch["label"].tolist() == [0, 0, 0, 1, 1, 1]
    torch.testing.assert_close(batch["latent"].mean((1, 2, 3)), torch.tensor([-0.25] * 3 + [0.25] * 3), rtol=0, atol=1e-3)
    assert batch["latent"][0].std() > 0             # a draw, not the mean
    (pictures.parent / "out").rename(pictures.parent / "first")
    pack(pictures, scale=None, valid=0, vae="some-vae", pixels=16)
    again = Latents(str(pictures.parent / "out"), "train", (4, 2, 2), 2)
    assert torch.equal(again.__getitems__([0, 4])["latent"], batch["latent"][[0, 4]])


@pytest.mark.parametrize("scale", [None, 0.9])
def test_a_shift_is_taken_off_before_the_scale_and_kept_with_the_data(pictures, monkeypatch, scale):
    monkeypatch.setattr(Vae, "config", SimpleNamespace(scaling_factor=0.25, shift_factor=0.5))
    made = pack(pictures, scale=scale, valid=0, vae="some-vae", pixels=16)
    assert (made["scale"], made["shift"]) == (scale or 0.25, 0.5)
    mean = Latents(str(pictures.parent / "out"), "train", (4, 2, 2), 2).__getitems__([0, 5])["latent"].mean((1, 2, 3))
    torch.testing.assert_close(mean, (torch.tensor([-1.0, 1.0]) - 0.5) * (scale or 0.25), rtol=0, atol=1e-3)


def test_a_vae_of_diffusers_itself(pictures, tmp_path, monkeypatch):
    """Where the package is installed: pip install diffusers."""
    monkeypatch.delitem(sys.modules, "diffusers")
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(block_out_channels=(8, 8), norm_num_groups=4, down_block_types=2 * ("DownEncoderBlock2D",),
                                  up_block_types=2 * ("UpDecoderBlock2D",), scaling_factor=0.5).eval()
    vae.save_pretrained(tmp_path / "vae")
    made = pack(pictures, scale=None, valid=0, vae=str(tmp_path / "vae"), pixels=16)
    assert (made["latent"], made["scale"], made["shift"], made["damaged"]) == ([4, 8, 8], 0.5, 0.0, 1)
    found = Latents(str(pictures.parent / "out"), "train", (4, 8, 8), 2).__getitems__([0, 5])["latent"]
    with torch.no_grad():
        said = vae.encode(torch.tensor([-1.0, 1.0]).view(2, 1, 1, 1).expand(2, 3, 16, 16)).latent_dist
    assert ((found / 0.5 - said.mean).abs() < 6 * said.std).all() and not torch.equal(found / 0.5, said.mean)


def test_latents_that_no_patches_cover_are_refused(pictures):
    with pytest.raises(CourseError, match="--pixels 24 gives latents of 3x3, which no patches of 2 cover"):
        pack(pictures, valid=0, vae="some-vae", pixels=24)


def test_without_diffusers_or_the_vae_it_is_a_sentence(pictures, monkeypatch):
    with pytest.raises(CourseError, match="the VAE other cannot be loaded"):
        pack(pictures, vae="other")
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(CourseError, match="needs the package diffusers: pip install diffusers"):
        pack(pictures, vae="some-vae")


def test_digits_can_have_the_shape_of_larger_latents(tmp_path):
    small, large = digits.make_digits(tmp_path / "small"), digits.make_digits(tmp_path / "large", (4, 16, 16))
    assert large["latent"] == [4, 16, 16] and small["shards"] == large["shards"]
    both = [shards.Latents(str(tmp_path / name), "train", tuple(made["latent"]), 10).__getitems__([0, 7, 300])
            for name, made in (("small", small), ("large", large))]
    assert torch.equal(both[0]["label"], both[1]["label"])
    picture = torch.nn.functional.pixel_shuffle(both[1]["latent"], 2)                   # (3, 1, 32, 32)
    means = torch.nn.functional.avg_pool2d(picture, 4)
    assert torch.corrcoef(torch.stack([means.flatten(), both[0]["latent"].flatten()]))[0, 1] > 0.99
    with pytest.raises(CourseError, match=r"digits of \[3, 8, 8\] cannot be made"):
        digits.make_digits(tmp_path / "odd", (3, 8, 8))


def test_digits_are_those_of_scikit_learn(tmp_path):
    from sklearn.datasets import load_digits

    made = digits.make_digits(tmp_path)
    assert made["shards"] == {"train/00000.h5": 1498, "valid/00000.h5": 299} and made["latent"] == [1, 8, 8]
    config = validation.check(load("dit-digits", [f"data.path={tmp_path}"]))
    train, valid = (open_data(config, split).__getitems__([0, 1, 5]) for split in ("train", "valid"))
    images, labels = load_digits(return_X_y=True)
    expected = torch.from_numpy(images.reshape(-1, 1, 8, 8) / 8 - 1).float()
    assert torch.equal(train["latent"], expected[[0, 1, 6]]) and torch.equal(valid["latent"], expected[[5, 11, 35]])
    assert train["label"].tolist() == labels[[0, 1, 6]].tolist() and valid["label"].tolist() == labels[[5, 11, 35]].tolist()


def test_digits_of_fewer_than_no_channels_or_too_large_are_refused(tmp_path):
    with pytest.raises(CourseError, match=r"digits of \[4, 1000000, 1000000\] would be 28752000 GB in memory: 17 are the most"):
        digits.make_digits(tmp_path / "d", (4, 1_000_000, 1_000_000))
    with pytest.raises(CourseError, match=r"digits of \[-1, 8, 8\] cannot be made"):
        digits.enlarged(np.zeros((1, 1, 8, 8), np.float32), (-1, 8, 8))


# ---- what is a class, and what was never written ----

@pytest.mark.parametrize("stranger", ["__MACOSX", "lost+found", "cache", "@eaDir", "System Volume Information"])
@pytest.mark.parametrize("inside", [[], ["0000/._0.npy"], ["notes.txt"]])
def test_a_folder_without_latents_is_no_class(folder, stranger, inside):
    found = packing.find_files(folder, (".npy", ".pt"))
    (folder / stranger).mkdir()
    for name in inside:
        (folder / stranger / name).parent.mkdir(exist_ok=True)
        (folder / stranger / name).write_bytes(b"x")
    assert packing.find_files(folder, (".npy", ".pt")) == found


def test_an_empty_folder_among_names_is_no_class(folder):
    for number, name in enumerate(("cat", "dog", "fish")):
        (folder / f"{number:04d}").rename(folder / name)
    (folder / "bird").mkdir()
    assert packing.find_files(folder, (".npy", ".pt"))[2] == ["cat", "dog", "fish"]


def rename(folder, old, new):
    (folder / old).rename(folder / new)


@pytest.mark.parametrize(("spoil", "sentence"), [
    (lambda folder: rename(folder, "0002", "cache"), r"0000, 0001, cache \.\.\., which are neither all numbers.*move away"),
    (lambda folder: [rename(folder, f"000{i}", name) for i, name in ((0, "cat"), (1, "dog"))], "0002, cat, dog ..., which are"),
    (lambda folder: rename(folder, "0002", "1"), "0000, 0001, 1 ..., which are neither all numbers, each once"),
    (lambda folder: rename(folder, "0002", "20240131"), "20240131 ..., which are neither all numbers"),
])
def test_folders_that_cannot_be_classes_are_refused(folder, spoil, sentence):
    spoil(folder)
    with pytest.raises(CourseError, match=sentence):
        pack(folder)


def cached(folder, labels, names=("imagenet256_features", "imagenet256_labels"), torches=False):
    """Latents as fast-DiT and SiT cache them: number i is full of i + 1."""
    for name in names:
        (folder / name).mkdir(parents=True)
    for i, label in enumerate(labels):
        np.save(folder / names[0] / f"{i}.npy", np.full((1, 2, 4, 4), i + 1, np.float32))
        if torches:
            torch.save(torch.tensor([label]), folder / names[1] / f"{i}.pt")
        else:
            np.save(folder / names[1] / f"{i}.npy", np.array([label]))
    return folder


@pytest.mark.parametrize(("names", "torches"), [
    (("imagenet256_features", "imagenet256_labels"), False), (("latents", "labels"), True), (("x", "Labels"), False)])
def test_labels_come_from_a_folder_of_labels(tmp_path, names, torches):
    labels = [7, 3, 3, 0, 9, 7, 1, 2, 4, 5, 8, 6]
    made = pack(cached(tmp_path / "raw", labels, names, torches), scale=1, valid=0, samples=100)
    assert (made["classes"], made["damaged"]) == (10, 0)
    expected = [(label, [i + 1.0]) for i, label in enumerate(labels)]
    assert values(Latents(str(tmp_path / "out"), "train", (2, 4, 4), 10)) == expected


@pytest.mark.parametrize(("spoil", "sentence"), [
    (lambda raw: (raw / "imagenet256_labels/1.npy").unlink(), r"features/1\.npy has no label in .*a folder should hold"),
    (lambda raw: (raw / "imagenet256_features/1.npy").unlink(), r"labels/1\.npy is the label of no file"),
    (lambda raw: np.save(raw / "imagenet256_labels/1.npy", np.array([0.5])), r"1\.npy cannot be read as a label \(it holds no"),
    (lambda raw: np.save(raw / "imagenet256_labels/1.npy", np.arange(3)), r"1\.npy cannot be read as a label \(it holds no"),
    (lambda raw: [f.unlink() for f in (raw / "imagenet256_labels").iterdir()], "features alone does not say which class"),
])
def test_features_and_labels_that_do_not_fit_are_refused(tmp_path, spoil, sentence):
    raw = cached(tmp_path / "raw", [0, 1, 2])
    spoil(raw)
    with pytest.raises(CourseError, match=sentence):
        pack(raw)


def test_labels_come_from_dataset_json_as_edm_and_repa_have_it(folder):
    """Their folders 00000, 00001 ... hold a thousand files each, of all classes."""
    names = [f"000{k}/{i}.{'pt' if i % 2 else 'npy'}" for k in range(3) for i in range(7)]
    (folder / "dataset.json").write_text(json.dumps({"labels": [[name, i % 5] for i, name in enumerate(names)]}))
    files, labels, classes = packing.find_files(folder, (".npy", ".pt"))
    assert labels == [names.index(str(file.relative_to(folder))) % 5 for file in files] and len(classes) == 5 and len(files) == 21
    (folder / "0001/0.npy").unlink()
    with pytest.raises(CourseError, match=r"dataset\.json names 0001/0\.npy, which is not there"):
        pack(folder)


def test_latents_of_zeros_are_left_out_and_named(folder):
    np.save(folder / "0001" / "2.npy", np.zeros((2, 4, 4), np.float32))
    assert pack(folder)["damaged"] == 1
    assert "0001/2.npy: nothing but zeros, so it was never written" in (folder.parent / "out" / "damaged.txt").read_text()


def rewrite(folder, change):
    """Store a shard anew, in chunks of one sample, without those that `change` leaves out."""
    file = folder.parent / "out" / "train" / "00000.h5"
    with h5py.File(file) as opened:
        latents, labels, kept = opened["latents"][:], opened["labels"][:], dict(opened.attrs)
    with h5py.File(file, "w") as opened:
        made = opened.create_dataset("latents", latents.shape, "float32", chunks=(1, *latents.shape[1:]))
        opened["labels"] = labels
        opened.attrs.update(kept)
        change(opened, made, latents)


def without_the_third(opened, made, latents):
    for i in (0, 1, 3, 4, 5):
        made[i] = latents[i]


def zeros_at_the_third(opened, made, latents):
    made[:] = latents
    made[2] = 0


def other_labels(opened, made, latents):
    made[:] = latents
    opened["labels"][1] = 3


@pytest.mark.parametrize(("change", "sentence"), [
    (without_the_third, r"00000\.h5: the latent of entry 2 is nothing but zeros"),
    (zeros_at_the_third, r"00000\.h5: the latent of entry 2 is nothing but zeros"),
    (other_labels, r"00000\.h5 has labels from 0 to 3 for 3 classes"),
])
def test_a_shard_that_was_never_written_to_its_end_is_refused(folder, change, sentence):
    pack(folder)
    rewrite(folder, change)
    with pytest.raises(CourseError, match=sentence):
        values(Latents(str(folder.parent / "out"), "train", (2, 4, 4), 3))
