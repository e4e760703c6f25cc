"""Sources that anybody may have written: minfer reads them within limits and in linear time."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from minfer.fingerprint import _cpp_meaning
from minfer.ops import Kernel, sources
from minfer.ops.sources import SourceError, quoted_includes, read_source, strip_comments
from tests.workshop import Workshop

LONG = ("/* ", "//@ x\n", "a //@ x\n", 'R"x(', '"\\"', "#include <", "'", "\\\n", "\n", " ", "/\\\n", "*/", "u8R\"", "L'",
        "// Measured (\n//   a\n")  # fmt: skip
MOST_S = 1.0  # a quadratic pattern takes seconds


@pytest.mark.parametrize("part", LONG)
def test_a_scan_is_linear(part: str) -> None:
    count = 10_000
    begin = time.process_time()
    _cpp_meaning(part * count)
    quoted_includes(part * count)
    assert time.process_time() - begin < MOST_S


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ('f("//a");', 'f("//b");'),
        ('f("/*a*/");', 'f("/*b*/");'),
        ('f("a  b");', 'f("a b");'),
        ('f("a\\"//b");', 'f("a\\"//c");'),
        ('f(R"(a" // b)");', 'f(R"(a" // c)");'),
        ('f(R"x(a)" // b)x");', 'f(R"x(a)" // c)x");'),
        ('f(\'"\', "//b");', 'f(\'"\', "//c");'),
        ("int a = 1'000; f('//', 1);", "int a = 1'000; f('//', 2);"),
        ("#include <a//b.h>\n", "#include <a//c.h>\n"),
        ('f("//@ a");', 'f("//@ b");'),
        ('f("a\\\n//b");', 'f("a\\\n//c");'),
        ("// a \\\n b\nint c;", "// a\n b\nint c;"),
    ],
)
def test_what_only_looks_like_a_comment_counts(text: str, other: str) -> None:
    assert _cpp_meaning(text) != _cpp_meaning(other)


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("f(); // a\n", "f(); // b\n"),
        ("f(/* a */);", 'f(/* " */);'),
        ("f(); // don't\ng();", "f(); // do\ng();"),
        ("f(); // a \\\n b\ng();", "f(); // c\ng();"),
        ("f(); /\\\n/ a\ng();", "f(); /\\\n/ b\ng();"),
        ("int a = 1'000'000; // a\n", "int a = 1'000'000; // b\n"),
        ("char a = '\"'; // a\n", "char a = '\"'; // b\n"),
        ('f("a"); /* " */ g("b");', 'f("a"); /* c */ g("b");'),
    ],
)
def test_a_comment_does_not_count(text: str, other: str) -> None:
    assert _cpp_meaning(text) == _cpp_meaning(other)


def test_includes_are_found_but_not_in_comments() -> None:
    text = '#include "a.h"\n  #  include"b.h" // why\n// #include "c.h"\n/*\n#include "d.h"\n*/\n#include <e.h>\n'
    assert quoted_includes(text) == ("a.h", "b.h")
    assert strip_comments('f("//"); // g') == 'f("//");  '


def test_a_file_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "big.h"
    with open(path, "w") as file:
        file.truncate(300 << 20)  # sparse: it takes no room on the disk
    begin = time.process_time()
    with pytest.raises(
        SourceError, match=r"^big.h has 314,572,800 bytes, and a source file may have at most 4,194,304;"
    ):
        read_source(path)
    assert time.process_time() - begin < 1.0


def test_what_is_no_ordinary_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.h")
    with pytest.raises(SourceError, match=r"pipe.h is no ordinary file"):
        read_source(tmp_path / "pipe.h")


def test_bytes_that_are_no_text_count(tmp_path: Path) -> None:
    for name, content in (("a.h", b'f("\xff");'), ("b.h", b'f("\xfe");')):
        (tmp_path / name).write_bytes(content)
    assert _cpp_meaning(read_source(tmp_path / "a.h")) != _cpp_meaning(read_source(tmp_path / "b.h"))


def test_a_kernel_has_no_more_files_and_bytes_than_it_may(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = workshop.kernel(text="".join(f'#include "{number}.h"\n' for number in range(30)))
    for number in range(30):
        workshop.write(f"{number}.h", f'#include "../{workshop.folder.name}/{number}.h"\n')  # itself, by another name
    assert len(kernel.sources()) == 31
    for name in ("MOST_FILES", "MOST_TOTAL"):
        with monkeypatch.context() as patch:
            patch.setattr(f"minfer.ops.kernel.{name}", 20)
            with pytest.raises(SourceError, match=r"^sound.cpp includes .* files"):
                kernel.sources()
    assert sources.MOST_FILES < 10_000


def test_the_order_of_the_sources_does_not_depend_on_where_a_kernel_from_outside_lies(tmp_path: Path) -> None:
    """A run uses a copy of this project, which may lie before a submission's folder or after it; the name of a build hashes
    the files in their order."""
    root = tmp_path / "m" / "minfer"
    (root / "ops" / "softmax").mkdir(parents=True)
    (root / "ops" / "softmax" / "softmax.h").write_text("// a header\n")
    found = set()
    for name in ("a", "z"):
        (tmp_path / name).mkdir()
        source = tmp_path / name / "mine.cpp"
        source.write_text('#include "softmax.h"\n')
        found.add(tuple(path.name for path in Kernel("softmax", "mine", "cpp", source, root=root).sources()))
    assert found == {("softmax.h", "mine.cpp")}
