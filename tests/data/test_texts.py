import gzip
import io
import json
import lzma
import random
import tarfile

import pytest
import zstandard

from course.data.text import documents as texts

PACKERS = {"": bytes, ".gz": lambda data: gzip.compress(data, mtime=0), ".xz": lzma.compress,
           ".zst": zstandard.ZstdCompressor().compress}


def documents(path, key="text"):
    """(where, text, why not) of each document of a file."""
    return [(text.where, text.text, text.bad) for item in texts.items(path) for text in texts.read(item, key)]


def tar(**members):
    """A tar of files, their names with _ for a dot."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name.replace("_", "."))
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        for name, kind in {"folder": tarfile.DIRTYPE, "link": tarfile.SYMTYPE}.items():
            info = tarfile.TarInfo(name)
            info.type = kind
            archive.addfile(info)
    return packed.getvalue()


def lines(*values):
    return b"".join(value if isinstance(value, bytes) else json.dumps(value).encode() + b"\n" for value in values)


@pytest.mark.parametrize("suffix", PACKERS)
def test_lines_plain_and_packed(tmp_path, suffix):
    file = tmp_path / f"some.jsonl{suffix}"
    file.write_bytes(PACKERS[suffix](lines({"text": "é\nx"}, b"\n", {"text": "b", "n": 1}, b'{"text": "no newline"}')))
    assert documents(file) == [("1", "é\nx", ""), ("3", "b", ""), ("4", "no newline", "")]


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_packed_in_several_pieces(tmp_path, suffix):
    """As `cat a.gz b.gz` makes it, or a parallel packer."""
    pack = PACKERS[suffix]
    (tmp_path / "a").write_bytes(pack(lines({"text": "a"}, b'{"text": ')) + pack(b"") + pack(lines(b'"b"}\n')))
    assert documents(tmp_path / "a") == [("1", "a", ""), ("2", "b", "")]


def test_padding_between_pieces_is_no_end(tmp_path):
    """xz allows zeros between its streams; pzstd writes the length of a frame before it, in a frame that is to be skipped."""
    a, b = lines({"text": "a"}), lines({"text": "b"})
    (tmp_path / "xz").write_bytes(lzma.compress(a) + bytes(8192) + lzma.compress(b) + bytes(4))
    skipped = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"size"
    (tmp_path / "zst").write_bytes(b"".join(skipped + PACKERS[".zst"](x) for x in (a, b)) + skipped)
    for name in ("xz", "zst"):
        assert documents(tmp_path / name) == [("1", "a", ""), ("2", "b", "")]


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_a_damaged_piece_is_no_end(tmp_path, suffix):
    a, b = (PACKERS[suffix](lines({"text": x})) for x in "ab")
    (tmp_path / "a").write_bytes(a + b"?" + b[1:])
    first, (where, text, bad) = documents(tmp_path / "a")
    assert first == ("1", "a", "") and (where, text) == ("1", "") and bad.startswith("what follows is unreadable (")


@pytest.mark.parametrize("cut", [1024, 1300, 0])
def test_an_archive_without_its_end_says_so(tmp_path, cut):
    """Cut after a member, or within a header; or with a header that is damaged."""
    whole = tar(a_txt=b"one", b_txt=b"two", c_txt=b"three")
    (tmp_path / "a").write_bytes(whole[:cut] if cut else whole[:1030] + b"?" + whole[1031:])
    first, (_, text, bad) = documents(tmp_path / "a")
    assert first == ("a.txt", "one", "") and not text
    assert bad.startswith("what follows is unreadable (the archive's end is missing")


@pytest.mark.parametrize(("line", "bad"), [
    (b'{"text": "a"', "not JSON (Expecting ',' delimiter"),
    (b'{"text": "\xff"}', "not UTF-8 at byte 10"),
    (b'{"text": "\\ud800"}', "half a surrogate pair"),
    (b'{"text": 7}', "no text under the key 'text'"),
    (b'{"other": "a"}', "no text under the key 'text'"),
    (b'["text"]', "no text under the key 'text'"),
    (b'{"text": ""}', "empty"),
    (b"[" * 100_000, "nested too deeply"),
    (b"9" * 10_000, "not JSON (Exceeds the limit"),
    (b"\0\0", "not JSON"),
])
def test_a_bad_line_does_not_hurt_its_neighbors(tmp_path, line, bad):
    (tmp_path / "a").write_bytes(lines({"text": "first"}, line + b"\n", {"text": "last"}))
    first, found, last = documents(tmp_path / "a")
    assert first == ("1", "first", "") and last == ("3", "last", "")
    assert found[:2] == ("2", "") and found[2].startswith(bad)


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbf" + lines({"text": "a"}))
    assert documents(tmp_path / "a") == [("1", "a", "")]


def test_another_key(tmp_path):
    (tmp_path / "a").write_bytes(lines({"content": "a", "text": "b"}))
    assert documents(tmp_path / "a", "content") == [("1", "a", "")]


@pytest.mark.parametrize("suffix", PACKERS)
def test_openwebtext(tmp_path, suffix):
    """A packed tar of packed tars of texts; also of plain texts, packed texts and plain tars."""
    subset = tar(a_txt=b"one", b_txt="zw\u00f6lf".encode(), c_txt=b"", d_txt=b"\xff")
    whole = tar(s1_xz=lzma.compress(subset), s2_tar=subset, s3_txt=b"plain", s4_txt_gz=gzip.compress(b"packed"))
    (tmp_path / "owt").write_bytes(PACKERS[suffix](whole))
    inside = [("a.txt", "one", ""), ("b.txt", "zwölf", ""), ("c.txt", "", "empty"), ("d.txt", "", "not UTF-8 at byte 0")]
    assert documents(tmp_path / "owt") == [
        *((f"{name}/{where}", *rest) for name in ("s1.xz", "s2.tar") for where, *rest in inside),
        ("s3.txt", "plain", ""), ("s4.txt.gz", "packed", "")]


def test_a_subset_of_openwebtext_alone_and_lines_in_a_tar(tmp_path):
    (tmp_path / "subset.xz").write_bytes(lzma.compress(tar(a_txt=b"one")))
    assert documents(tmp_path / "subset.xz")[0] == ("a.txt", "one", "")
    (tmp_path / "lines.tar").write_bytes(tar(x_jsonl_zst=PACKERS[".zst"](lines({"text": "a"}, b"{\n", {"text": "b"}))))
    found = documents(tmp_path / "lines.tar")
    assert [where for where, _, _ in found] == ["x.jsonl.zst:1", "x.jsonl.zst:2", "x.jsonl.zst:3"]
    assert [text for _, text, _ in found] == ["a", "", "b"]


@pytest.mark.parametrize("small", [texts.SMALL, 100])
def test_large_members_are_unpacked_at_once_to_the_same(tmp_path, monkeypatch, small):
    monkeypatch.setattr(texts, "SMALL", small)
    subset = tar(a_txt=b"one" * 50, b_txt=b"two")
    (tmp_path / "owt").write_bytes(tar(s_xz=lzma.compress(subset), t_txt=b"x" * 101))
    assert documents(tmp_path / "owt") == [("s.xz/a.txt", "one" * 50, ""), ("s.xz/b.txt", "two", ""), ("t.txt", "x" * 101, "")]


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("part", [0.5, 0.999])
def test_a_truncated_file_gives_what_it_has_and_says_so(tmp_path, suffix, part):
    noise = [{"text": random.Random(i).randbytes(500).hex()} for i in range(1000)]
    packed = PACKERS[suffix](lines(*noise))
    (tmp_path / "a").write_bytes(packed[:int(len(packed) * part)])
    *good, (where, text, bad) = documents(tmp_path / "a")
    assert [text for _, text, _ in good] == [value["text"] for value in noise[:len(good)]]
    assert (text, int(where)) == ("", len(good)) and bad.startswith("what follows is unreadable (") and "end" in bad.lower()
    assert 1000 * part / 3 < len(good) < 1000


@pytest.mark.parametrize("suffix", PACKERS)
def test_truncated_archives(tmp_path, suffix):
    subset = PACKERS[suffix](tar(a_txt=b"one", b_txt=b"two" * 1000))
    cut = len(subset) // 2 if suffix else 1024 + 512 + 1000
    (tmp_path / "owt").write_bytes(tar(s_x=subset[:cut], t_txt=b"whole"))
    *_, (where, _, bad), last = documents(tmp_path / "owt")
    assert last == ("t.txt", "whole", "") and where.startswith("s.x") and "what follows is unreadable" in bad
    (tmp_path / "cut").write_bytes(subset[:cut])
    assert "what follows is unreadable" in documents(tmp_path / "cut")[-1][2]


def test_no_file_and_an_empty_one(tmp_path):
    (tmp_path / "a").write_bytes(b"")
    assert documents(tmp_path / "a") == []
    assert [(where, bad.split(" (")[0]) for where, _, bad in documents(tmp_path / "missing")] == [("0", "unreadable")]


def test_what_is_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "LONGEST", 1 << 20)
    monkeypatch.setattr(texts, "SMALL", 1000)
    long = lines({"text": "x" * 3_000_000})
    (tmp_path / "a").write_bytes(lines({"text": "a"}, long, {"text": "b"}, long.strip()))
    bad = "longer than 1 MB"
    assert documents(tmp_path / "a") == [("1", "a", ""), ("2", "", bad), ("3", "b", ""), ("4", "", bad)]
    (tmp_path / "b").write_bytes(tar(a_txt=b"x" * 2_000_000, b_txt=b"b"))
    assert documents(tmp_path / "b") == [("a.txt", "", bad), ("b.txt", "b", "")]


def test_a_member_that_unpacks_to_too_much(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "MOST", 1000)
    (tmp_path / "a").write_bytes(tar(s_xz=lzma.compress(tar(a_txt=b"x" * 900, b_txt=b"y" * 900)), t_txt=b"t"))
    assert [(where, len(text), bad) for where, text, bad in documents(tmp_path / "a")] == [
        ("s.xz/a.txt", 900, ""), ("s.xz", 0, "longer than 0 MB once unpacked"), ("t.txt", 1, "")]


def test_names_of_members_are_not_kept(tmp_path, monkeypatch):
    """Millions of them would fill memory."""
    kept, original = [], tarfile.TarFile.next

    def spy(self):
        kept.append(len(self.members))
        return original(self)

    monkeypatch.setattr(tarfile.TarFile, "next", spy)
    (tmp_path / "a").write_bytes(tar(**{f"m{i}_txt": b"x" for i in range(50)}))
    assert len(documents(tmp_path / "a")) == 50 and len(kept) >= 50 and max(kept) <= 1
