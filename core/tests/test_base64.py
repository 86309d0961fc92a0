"""Base64 as clients write it: with and without padding, in lines, in either alphabet; anything else is refused."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import toy

from mm_plugin.errors import MediaError
from mm_plugin.media import open_audio, open_image, open_video
from mm_plugin.settings import Settings

OPENERS = {"images": open_image, "videos": open_video, "audios": open_audio}


def png() -> bytes:
    return toy.png(3, 9, 11)


def unpadded(text: str) -> str:
    return text.rstrip("=")


BASE64: dict[str, Callable[[bytes], str]] = {
    "padded": lambda data: base64.b64encode(data).decode(),
    "without padding": lambda data: unpadded(base64.b64encode(data).decode()),
    "url-safe": lambda data: base64.urlsafe_b64encode(data).decode(),
    "url-safe without padding": lambda data: unpadded(base64.urlsafe_b64encode(data).decode()),
    "lines of 76": lambda data: base64.encodebytes(data).decode(),
    "lines of 64, CR and LF": lambda data: _wrapped(base64.b64encode(data).decode(), 64, "\r\n"),
    "lines without padding": lambda data: unpadded(_wrapped(base64.b64encode(data).decode(), 60, "\n")),
    "spaces": lambda data: _wrapped(base64.b64encode(data).decode(), 7, " "),
    "tabs at both ends": lambda data: "\t" + base64.urlsafe_b64encode(data).decode() + "\t \n",
    "a space inside the padding": lambda data: base64.b64encode(data).decode().replace("==", "= ="),
}


def _wrapped(text: str, width: int, between: str) -> str:
    return between.join(text[start : start + width] for start in range(0, len(text), width))


@pytest.mark.parametrize("tail", range(6))
@pytest.mark.parametrize("place", ["data URL", "upper case", "bare"])
@pytest.mark.parametrize("form", BASE64)
def test_base64_in_every_form_is_the_same_file(form: str, place: str, tail: int) -> None:
    # Bytes after the end of a PNG are ignored; they make the padding 0, 1 and 2 characters long, and use the whole alphabet.
    data = png() + b"\xfb\xff\xbf\xfe\xff"[:tail]
    head = {"data URL": "data:image/png;base64,", "upper case": "DATA:;BASE64,", "bare": ""}[place]
    source = open_image(head + BASE64[form](data), path="images[0]", settings=Settings())
    assert source.digest() == open_image(data, path="images[0]", settings=Settings()).digest()
    assert source.decode().pixels.shape == (9, 11, 3)


@pytest.mark.parametrize("argument", OPENERS)
@pytest.mark.parametrize(
    "wrong",
    [
        "A",
        "AAAAA",
        "AA=A",
        "AA==AA==",
        "AA=",
        "AAA==",
        "A===",
        "====",
        "+-AA",
        "/_AA",
        "AA.A",
        "AA%A",
        "A\u0391AA",
        "\u200bAAAA",
    ],
)
def test_malformed_base64_is_refused(argument: str, wrong: str) -> None:
    with pytest.raises(MediaError, match=r"data: URL's base64 is malformed") as caught:
        OPENERS[argument](f"data:;base64,{wrong}", path=f"{argument}[0]", settings=Settings())
    assert caught.value.reason == "url"


def test_a_name_that_could_be_url_safe_base64_is_read_as_the_file(tmp_path: Path) -> None:
    name = "a-long_name-of-a-file-that-has-no-suffix_at_all"
    (tmp_path / name).write_bytes(png())
    source = open_image(name, path="images[0]", settings=Settings(media_root=str(tmp_path)))
    assert source.num_bytes == len(png())


def test_white_space_costs_neither_time_nor_pieces() -> None:
    data = np.random.default_rng(0).bytes(3_000_000)
    spaced = _wrapped(base64.b64encode(data).decode(), 1, " \n")
    source = open_audio("data:;base64," + spaced, path="audios[0]", settings=Settings())
    assert source.digest() == open_audio(data, path="audios[0]", settings=Settings()).digest()
