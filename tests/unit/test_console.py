"""A job's output is written unchanged to this process's stdout and stderr, whatever they are."""

from __future__ import annotations

import io
import os
import sys
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from laptop_fakes import chunk

from kinetic._client.board import console
from kinetic._client.board.console import Printer
from kinetic._client.board.line_prefix import Prefixer
from kinetic._core.log_format import STDERR, STDOUT

NASTY = b"[rank0] arr[i] [/tmp/x] \x1b[31mred\x1b[0m \xff\xfe " + b"x" * 5000 + b"\n"


def test_bytes_arrive_unchanged_on_their_stream(capfdbinary):
    printer = Printer()
    printer.write(chunk(NASTY))
    printer.write(chunk(b"oops\n", stream=STDERR))
    out, err = capfdbinary.readouterr()
    assert out == NASTY
    assert err == b"oops\n"


def test_text_printed_before_stays_before(capsysbinary):
    print("first")
    Printer().write(chunk(b"second\n"))
    assert capsysbinary.readouterr().out == b"first\nsecond\n"


def test_a_stream_without_bytes_gets_text_and_no_broken_characters(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    printer = Printer()
    for byte in "héllo €\n".encode():
        printer.write(chunk(bytes([byte])))
    printer.write(chunk(b"\xff\n"))
    assert stream.getvalue() == "héllo €\n\ufffd\n"


class BrokenStream(io.StringIO):
    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("closed", [False, True])
def test_a_broken_stream_is_left_alone(monkeypatch, capsys, caplog, closed):
    stream = io.StringIO() if closed else BrokenStream()
    if closed:
        stream.close()
    monkeypatch.setattr(sys, "stdout", stream)
    printer = Printer()
    printer.write(chunk(b"a\n"))
    printer.write(chunk(b"b\n"))
    printer.write(chunk(b"to stderr\n", stream=STDERR))
    assert capsys.readouterr().err == "to stderr\n"
    assert len(caplog.records) == 1


class FailingObject:
    def write(self, text):
        raise ValueError("I/O operation on closed file.")


@pytest.mark.parametrize("has_buffer", [False, True])
def test_an_object_that_fails_in_place_of_a_stream_is_left_alone(monkeypatch, caplog, has_buffer):
    stub = FailingObject()
    stub = SimpleNamespace(write=stub.write, flush=print, buffer=stub) if has_buffer else stub
    monkeypatch.setattr(sys, "stdout", stub)
    monkeypatch.setattr(sys, "stderr", stub)
    printer = Printer()
    for stream in (STDOUT, STDERR, STDOUT):
        printer.write(chunk(b"a\n", stream=stream))
    console.notice("told to nobody", repeat=True)
    assert len(caplog.records) == 2


def test_an_object_without_flush_gets_everything(monkeypatch):
    got = []
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=got.append))
    printer = Printer()
    printer.write(chunk(b"a\n"))
    printer.write(chunk(b"b\n"))
    assert got == ["a\n", "b\n"]


def test_no_stream_at_all(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    Printer().write(chunk(b"a\n"))


def test_a_stream_that_does_not_block_gets_everything(monkeypatch):
    read, write = os.pipe()
    os.set_blocking(write, False)
    data = b"0123456789\n" * 60_000
    got = []

    def read_all():
        with open(read, "rb") as file:
            got.append(file.read())

    reader = threading.Thread(target=read_all)
    with open(write, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        reader.start()
        Printer().write(chunk(data))
    reader.join()
    assert got == [data]


@given(st.lists(st.tuples(st.integers(0, 3), st.text("ab\n", min_size=1, max_size=8)), max_size=12))
def test_prefixes_stand_at_the_start_of_each_line_and_nowhere_else(pieces):
    mark = Prefixer(hosts=True).add
    printed = b"".join(mark(chunk(text.encode(), host=host)) for host, text in pieces).decode()
    lines = printed.splitlines()
    assert all(line.startswith("[host ") for line in lines)
    for host in range(4):
        mine = "".join(
            line.partition("] ")[2] for line in lines if line.startswith(f"[host {host}]")
        )
        assert mine == "".join(text for h, text in pieces if h == host).replace("\n", "")


def test_a_notice_is_told_once(capsys):
    console.notice("only once, please")
    console.notice("only once, please")
    console.notice("again", repeat=True)
    console.notice("again", repeat=True)
    assert capsys.readouterr().err == "only once, please\nagain\nagain\n"
