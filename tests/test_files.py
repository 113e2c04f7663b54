"""Files that are whole or not there."""

import errno
import os

import pytest

from magicpig.files import write_whole


@pytest.mark.parametrize("place", ["write_bytes", "replace"])
def test_a_full_disk_leaves_what_was_there_and_names_the_file(tmp_path, monkeypatch, place):
    file = tmp_path / "trace.json"
    write_whole(file, b"before")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if place == "replace":
        monkeypatch.setattr(os, "replace", full)
    else:
        monkeypatch.setattr(type(file), "write_bytes", full)
    with pytest.raises(OSError, match=r"trace.json' cannot be written: No space left on device"):
        write_whole(file, b"after")
    assert file.read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["trace.json"]
