"""Values that are no tensors: what is harmless comes back as it was; a crafted file makes nothing else."""

from __future__ import annotations

import argparse
import io
import pickle
import zipfile
from collections import Counter, OrderedDict
from typing import Any

import numpy
import pytest
import torch

from torch_dcp_backport.dist_checkpointing.engine import values

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


def crafted(body: bytes) -> bytes:
    """What torch.save writes, with another pickle in it."""
    native, made = io.BytesIO(), io.BytesIO()
    torch.save({}, native)
    with zipfile.ZipFile(native) as old, zipfile.ZipFile(made, "w") as new:
        for name in old.namelist():
            is_pickle = name.endswith("data.pkl")
            new.writestr(name, b"\x80\x02" + body + b"." if is_pickle else old.read(name))
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
    ],
    ids=["object", "fields", "several", "too long", "array of objects", "too short", "another class"],
)
def test_no_memory_is_taken_for_pointers(body: bytes) -> None:
    with pytest.raises(values.Unloadable):
        values.loads(crafted(body))


def test_the_craft_is_right() -> None:
    number = values.loads(crafted(call(f"{module()}.scalar", dtype("f8", PLAIN), EIGHT)))
    assert type(number) is numpy.float64
