"""Values that are no tensors: what is harmless comes back as it was; a crafted file makes nothing else."""

from __future__ import annotations

import argparse
import importlib
import io
import pickle
import zipfile
from collections import Counter, OrderedDict
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from torch_dcp_backport import dist_checkpointing
from torch_dcp_backport.dist_checkpointing import CheckpointingException
from torch_dcp_backport.dist_checkpointing._src import values

ARRAYS = [
    numpy.arange(6, dtype="i4").reshape(2, 3),
    numpy.asfortranarray(numpy.ones((2, 3))),
    numpy.zeros((0, 3)),
    numpy.array(3.0),
    numpy.array(["a", "bcd"]),
    numpy.array([True, False]),
    numpy.array([1 + 2j]),
]


@pytest.mark.parametrize("array", ARRAYS, ids=str)
def test_arrays_of_numpy(array: Any) -> None:
    first, inner, again = values.loads(values.dumps([array, argparse.Namespace(x=(array,)), array]))
    assert first is again
    for made in (first, inner.x[0]):
        assert type(made) is numpy.ndarray
        assert (made.dtype, made.shape) == (array.dtype, array.shape)
        assert made.flags.f_contiguous == array.flags.f_contiguous
        assert made.flags.writeable
        assert numpy.array_equal(made, array)


@pytest.mark.parametrize(
    "value",
    [
        numpy.float64(1.5),
        numpy.int32(-7),
        numpy.bool_(True),
        numpy.str_("h\u00e9"),
        numpy.bytes_(b"a\0b"),
        numpy.complex64(1 + 2j),
        numpy.dtype("float32"),
        numpy.bytes_(b""),
        numpy.str_(""),
        b"",
        b"x",
        Counter("aab"),
        OrderedDict(b=1, a=2),
    ],
    ids=repr,
)
def test_values_keep_their_classes(value: Any) -> None:
    (made,) = values.loads(values.dumps([value]))
    assert type(made) is type(value)
    assert made == value


def module() -> str:
    return pickle.dumps(numpy.float64(1), 2).split(b"c", 1)[1].split(b"\n")[0].decode()


def call(name: str, *arguments: bytes) -> bytes:
    where, _, kind = name.rpartition(".")
    return b"".join([b"c", where.encode(), b"\n", kind.encode(), b"\n(", *arguments, b"tR"])


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + len(data).to_bytes(4, "little") + data


def dtype(name: str, state: bytes) -> bytes:
    return call("numpy.dtype", text(name), b"\x89", b"\x88") + b"(" + state + b"tb"


EIGHT = call("_codecs.encode", text("A" * 8), text("latin1"))
#: version, byte order, subdtype, names, fields, itemsize, alignment, flags
PLAIN = b"K\x03" + text("<") + b"NNN" + b"J\xff\xff\xff\xff" * 2 + b"K\x00"
FIELDS = b"K\x03" + text("|") + b"N" + b"(" + text("a") + b"t" + b"}" + b"K\x08K\x01K\x00"


#: An array, and the state of one number.
ARRAY = call(f"{module()}._reconstruct", b"cnumpy\nndarray\n", b"(K\x00t", text("b"))
STATE = b"(K\x01(K\x01t" + dtype("f8", PLAIN) + b"\x89" + EIGHT + b"tb"


def crafted(body: bytes, storage: bytes = b"") -> bytes:
    """What torch.save writes, with another pickle in it, and one storage."""
    native, made = io.BytesIO(), io.BytesIO()
    torch.save({}, native)
    with zipfile.ZipFile(native) as old, zipfile.ZipFile(made, "w") as new:
        for name in old.namelist():
            is_pickle = name.endswith("data.pkl")
            new.writestr(name, b"\x80\x02" + body + b"." if is_pickle else old.read(name))
        new.writestr(f"{old.namelist()[0].partition('/')[0]}/data/0", storage)
    return made.getvalue()


@pytest.mark.parametrize(
    "body",
    [
        call(f"{module()}.scalar", dtype("O8", PLAIN), EIGHT),
        call(f"{module()}.scalar", dtype("f8", FIELDS), EIGHT),
        call(f"{module()}.scalar", dtype("f8,O", PLAIN), EIGHT),
        call(f"{module()}.scalar", dtype("i4", PLAIN), EIGHT),
        call(f"{module()}._reconstruct", b"cnumpy\nndarray\n", b"(K\x00t", text("b"))
        + b"(K\x01(K\x01t"
        + dtype("O8", PLAIN)
        + b"\x89"
        + EIGHT
        + b"tb",
        call(f"{module()}._reconstruct", b"cnumpy\nndarray\n", b"(K\x00t", text("b"))
        + b"(K\x01(K\x09t"
        + dtype("f8", PLAIN)
        + b"\x89"
        + EIGHT
        + b"tb",
        call(f"{module()}._reconstruct", b"cnumpy\ndtype\n", b"(K\x00t", text("b")),
        # Made by numpy's class: of any memory, or of none.
        call("numpy.ndarray", b"(K\x01t", text("O"), EIGHT),
        call("numpy.ndarray", b"(K\x08t", text("u1"), EIGHT, b"J\xf8\xff\xff\xff"),
        b"cnumpy\nndarray\n(M\x00\x10t\x81",
        call("torch_dcp_backport.dist_checkpointing._src.numpys.Array", b"(K\x08t", text("u1"), EIGHT),
        ARRAY + STATE + STATE,
        call(
            "torch._utils._rebuild_device_tensor_from_numpy", ARRAY + STATE, text("f8"), text("cpu"), b"\x89"
        ),
        # Where numpy's own takes the byte order or the size from one of the two.
        call(f"{module()}.scalar", dtype(">f8", PLAIN), EIGHT),
        call(f"{module()}.scalar", dtype("S2", PLAIN.replace(b"J\xff\xff\xff\xff", b"K\x08", 1)), EIGHT),
        call(f"{module()}.scalar", dtype("f8", PLAIN.replace(text("<"), text("|"))), EIGHT),
        ARRAY + STATE.replace(b"\x89" + EIGHT, text("C") + EIGHT),
    ],
    ids=[
        "object",
        "fields",
        "several",
        "too long",
        "array of objects",
        "too short",
        "another class",
        "objects from a buffer",
        "before a buffer",
        "nothing",
        "our own class",
        "two states",
        "a tensor",
        "an order in the name",
        "another size than the name's",
        "no order",
        "another word for an order",
    ],
)
def test_no_memory_is_taken_for_pointers(body: bytes) -> None:
    with pytest.raises(values.Unloadable):
        values.loads(crafted(body))


def tensor_of(count: int) -> bytes:
    """A tensor of so many bytes of storage 0."""
    many = b"J" + count.to_bytes(4, "little")
    pid = b"(" + text("storage") + b"ctorch\nByteStorage\n" + text("0") + text("cpu") + many + b"tQ"
    parts = (pid, b"K\x00", many + b"\x85", b"K\x01\x85", b"\x89", call("collections.OrderedDict"))
    return call("torch._utils._rebuild_tensor_v2", *parts)


def test_a_storage_is_its_record() -> None:
    """torch 2.4 to 2.6 reads what lies behind the record in memory, or ends the process."""
    assert values.loads(crafted(tensor_of(4), b"abcd")).tolist() == list(b"abcd")
    for count in (5, 4096, 2_000_000_000):
        with pytest.raises(values.Unloadable, match=f"storage 0 has 4 bytes, and says {count} elements"):
            values.loads(crafted(tensor_of(count), b"abcd"))


LOTS = b"\x8a\x05\x00\x00\x00\x00\x02"  # 2 ** 33


@pytest.mark.parametrize(
    ("body", "says"),
    [
        # Torch hashes it as a key: as many frames of C.
        (b"})" + b"\x85" * 1_000_000 + b"Ns", "more than 10000 tuples"),
        (call("__builtin__.bytearray", LOTS), "made of a int"),
        (call("__builtin__.bytes", LOTS), "made of a int"),
        (call("__builtin__.set", call("__builtin__.range", LOTS)), "made of a range"),
        (b"c__builtin__\nfrozenset\n" + call("__builtin__.range", LOTS) + b"\x85\x81", "made of a range"),
        (call("fractions.Fraction", text("1e999999999")), "Fraction is made of"),
        (b"cargparse\nNamespace\n)\x81(N}" + text("a") + b"K\x01stb", "set by a tuple"),
        (b"cnumpy\nndarray\n", "numpy.ndarray itself"),
        (f"c{module()}\nscalar\n".encode(), "scalar itself"),
    ],
    ids=["deep", "bytearray", "bytes", "set", "frozenset", "Fraction", "slots", "a class", "a function"],
)
def test_a_few_bytes_stay_a_few(body: bytes, says: str) -> None:
    with pytest.raises(values.Unloadable, match=says):
        values.loads(crafted(body))


def test_what_looks_large_and_is_honest() -> None:
    many = {
        "pairs": [(number, (number,)) for number in range(20_000)],
        "half": Fraction(1, 2),
        "n": frozenset([1]),
    }
    assert values.loads(values.dumps(many)) == many


def test_the_reason_is_no_advice() -> None:
    cycle: list[Any] = []
    cycle.append((cycle, 1))
    with pytest.raises(values.Unloadable) as error:
        values.loads(values.dumps(cycle[0]))
    assert "documentation" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("my-module\nFoo", "it has my-module.Foo, which is not known to be harmless"),
        ("a\nf.<locals>.C", "it has a.f.<locals>.C, which is not known to be harmless"),
        ("a\nX\x1b]0;owned\x07", r"it has a.X\x1b]0;owned\x07, which"),
        ("a\rAll is fine\nX", r"it has a\rAll is fine.X, which"),
        ("a\n" + "X" * 100_000, "XXX, which is not known to be harmless"),
    ],
    ids=["dash", "local", "terminal", "lines", "long"],
)
def test_a_file_writes_no_message_of_its_own(name: str, says: str) -> None:
    with pytest.raises(values.Unloadable) as error:
        values.loads(crafted(f"c{name}\n".encode()))
    assert says in str(error.value)
    assert len(str(error.value)) < 550
    assert str(error.value).isprintable()


#: A tensor's storage, whose record has this name.
NO_RECORD = b"".join(
    [b"(", text("storage"), b"ctorch\nFloatStorage\n", text("\x1b[2J" + "0" * 999), text("cpu"), b"K\x01tQ"]
)


def test_a_file_writes_no_message_of_its_own_where_torch_words_it() -> None:
    with pytest.raises(
        values.Unloadable, match=r"made here: .*\\x1b\[2J.* \.\.\. .*(not found|saving)"
    ) as error:
        values.loads(crafted(NO_RECORD))
    assert len(str(error.value)) < 500
    assert str(error.value).isprintable()


def complain(text: str) -> None:
    raise ValueError(text)


@pytest.mark.parametrize(("said", "shown"), [("one\n" + "x" * 999 + "\nthe end",) * 2, ("", "ValueError")])
def test_what_a_trusted_file_raises_is_shown_whole(said: str, shown: str) -> None:
    with pytest.raises(values.Unloadable) as error:
        values.loads(crafted(call(f"{__name__}.complain", text(said))), trust=True)
    assert str(error.value) == f"it is damaged, or cannot be made here: {shown}"


@pytest.mark.parametrize(
    ("name", "says"),
    [(b"no\x1b[2J", r"it names no\\x1b\[2J\.X, which"), (b"m" * 5000, r"it names m+ \.\.\. m+\.X, which")],
    ids=["terminal", "long"],
)
def test_metadata_writes_no_message_of_its_own(tmp_path: Path, name: bytes, says: str) -> None:
    (tmp_path / ".metadata").write_bytes(b"\x80\x02c" + name + b"\nX\n.")
    with pytest.raises(CheckpointingException, match=says) as error:
        dist_checkpointing.load({}, str(tmp_path))
    assert len(str(error.value)) < 700
    assert all(line.isprintable() for line in str(error.value).splitlines())


def test_values_in_odd_places() -> None:
    array, kind = numpy.arange(3), numpy.dtype("f4")
    cycle: list[Any] = [array]
    cycle.append(cycle)
    tensor = torch.ones(2)
    tensor.note = array  # type: ignore[attr-defined]
    ordered: Any = OrderedDict(a=1)
    ordered.note = array
    made = values.loads(
        values.dumps(
            [{kind}, {kind: 1}, {(kind, 2): array}, Counter(a=2), slice(array), cycle, tensor, ordered]
        )
    )
    assert made[0] == {kind}
    assert made[1] == {kind: 1}
    assert list(made[2]) == [(kind, 2)]
    assert made[5][1] is made[5]
    for found in (made[2][kind, 2], made[4].stop, made[5][0], made[6].note, made[7].note):
        assert type(found) is numpy.ndarray
        assert numpy.array_equal(found, array)
        assert found.flags.owndata


def test_values_deep_in_each_other() -> None:
    """Of a thousand frames two for each: as deep as what could be saved until now."""
    depth, value = 380, [numpy.float64(1.5)]
    for _ in range(depth):
        value = [value]  # type: ignore[list-item]
    made = values.loads(values.dumps(value))
    for _ in range(depth):
        (made,) = made
    assert made == [1.5]
    assert type(made[0]) is numpy.float64


def test_values_of_numpy_where_the_user_has_allowed_numpys_own() -> None:
    before = list(torch.serialization.get_safe_globals())
    functions = importlib.import_module(module())
    torch.serialization.add_safe_globals(
        [functions._reconstruct, functions.scalar, numpy.ndarray, numpy.dtype, numpy.dtypes.Float64DType]
    )
    try:
        made = values.loads(values.dumps({"a": numpy.arange(3.0), "b": numpy.float64(2)}))
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)
    assert type(made["a"]) is numpy.ndarray
    assert made["a"].tolist() == [0.0, 1.0, 2.0]
    assert type(made["b"]) is numpy.float64


def test_the_craft_is_right() -> None:
    (array,) = values.loads(crafted(b"]" + ARRAY + STATE + b"a"))
    assert type(array) is numpy.ndarray
    number = values.loads(crafted(call(f"{module()}.scalar", dtype("f8", PLAIN), EIGHT)))
    assert type(number) is numpy.float64


@pytest.mark.parametrize("content", [b"", b"abc", bytes(range(256)) * 40], ids=len)
@pytest.mark.parametrize("place", [0, 1, None])
def test_a_buffer_of_bytes_is_harmless(content: bytes, place: Any) -> None:
    """The extra state of Transformer Engine's modules."""
    buffer = io.BytesIO(content)
    buffer.seek(len(content) if place is None else min(place, len(content)))
    first, again = values.loads(values.dumps([buffer, buffer]))
    assert first is again
    assert type(first) is io.BytesIO
    assert (first.getvalue(), first.tell()) == (content, buffer.tell())


BUFFER = b"c_io\nBytesIO\n"
ABC = call("_codecs.encode", text("abc"), text("latin1"))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (BUFFER + b"(K\x01t\x81", "a BytesIO is made of"),
        (BUFFER + b")\x81(" + ABC + LOTS + b"Ntb", "a BytesIO of 3 bytes is set to place"),
        (BUFFER + b")\x81(" + ABC + b"J\xff\xff\xff\xffNtb", "a BytesIO of 3 bytes is set to place -1"),
        (BUFFER + b")\x81(" + ABC + b"K\x00}" + text("read") + ABC + b"stb", "a BytesIO is set to"),
        (BUFFER + b")\x81}" + text("read") + ABC + b"sb", "a BytesIO is set to"),
        (BUFFER + b")\x81(K\x08K\x00Ntb", "a BytesIO is set to"),
        (BUFFER + text("read") + b"\x85\x81", "a BytesIO is made of"),
    ],
)
def test_a_buffer_is_made_of_its_bytes_alone(body: bytes, says: str) -> None:
    with pytest.raises(values.Unloadable, match=says):
        values.loads(crafted(body))


def test_buffers_in_a_checkpoint_of_another_program(tmp_path: Path) -> None:
    """As Megatron saves them: objects of a grid; and as torch does: values of its own."""
    import torch.distributed.checkpoint as dcp

    objects = [
        dist_checkpointing.ShardedObject("extra", io.BytesIO(bytes([number])), (3,), (number,))
        for number in range(3)
    ]
    (tmp_path / "ours").mkdir()
    dist_checkpointing.save({"parts": list(objects), "one": io.BytesIO(b"common")}, tmp_path / "ours")
    asked = [part.without_data() for part in objects]
    loaded = dist_checkpointing.load({"parts": list(asked)}, tmp_path / "ours")
    assert [part.getvalue() for part in loaded["parts"]] == [b"\0", b"\1", b"\2"]
    assert loaded["one"].getvalue() == b"common"
    dcp.save({"extra": [io.BytesIO(b"theirs")], "w": torch.ones(2)}, checkpoint_id=tmp_path / "theirs")
    part = dist_checkpointing.ShardedObject("extra", None, (1,), (0,))
    (buffer,) = dist_checkpointing.load({"x": part}, tmp_path / "theirs")["x"]
    assert buffer.getvalue() == b"theirs"
    assert (
        dist_checkpointing.verify(tmp_path / "ours") == dist_checkpointing.verify(tmp_path / "theirs") == []
    )


class Odd:
    """A class that no load takes without trust."""


def test_an_object_that_will_not_load_is_named_by_the_save(tmp_path: Path, caplog) -> None:
    part = dist_checkpointing.ShardedObject("odd", Odd(), (1,), (0,))
    dist_checkpointing.save({"x": part}, tmp_path)
    assert "odd/shard_0_1 will not load as it is: " in caplog.text
    asked = {"x": part.without_data()}
    with pytest.raises(CheckpointingException, match="Odd, which is not known to be harmless"):
        dist_checkpointing.load(asked, tmp_path)
    assert type(dist_checkpointing.load(asked, tmp_path, trust=True)["x"]) is Odd


def test_an_object_of_another_grid_is_named_with_both(tmp_path: Path) -> None:
    saved = {"rng": [dist_checkpointing.ShardedObject("rng", number, (2,), (number,)) for number in range(2)]}
    dist_checkpointing.save(saved, tmp_path)
    asked = {"rng": dist_checkpointing.ShardedObject("rng", None, (4,), (3,))}
    says = r"another grid than in the checkpoint: rng/shard_3_4 \(expected \(2,\) as saved, got \(4,\)\)"
    with pytest.raises(CheckpointingException, match=says):
        dist_checkpointing.load(asked, tmp_path)
    with pytest.raises(CheckpointingException, match="not in the checkpoint: other"):
        dist_checkpointing.load({"x": dist_checkpointing.ShardedObject("other", None, (1,), (0,))}, tmp_path)
