"""The catalogue of messages, tests/system/messages.txt, compared with the sources."""

from __future__ import annotations

from pathlib import Path

import messages
import pytest

from kinetic import errors

WITHOUT = 142
"""The largest allowed number of messages without an instance, because no test raises them."""


@pytest.fixture(scope="module")
def sources() -> list[messages.Message]:
    return messages.list_messages(Path(errors.__file__).parent)


def test_each_message_of_the_product_is_in_the_catalogue(sources):
    keys = [message.key for message in sources]
    assert list(messages.read_catalogue()) == keys, "run `make messages`"


def test_each_instance_is_what_the_source_says(sources):
    entries = messages.read_catalogue()
    old = [
        message.key
        for message in sources
        if entries.get(message.key, messages.NONE) != messages.NONE
        and not message.texts.search(entries[message.key])
    ]
    assert old == [], "run `make messages`"


def test_nearly_every_message_has_an_instance():
    without = [key for key, text in messages.read_catalogue().items() if text == messages.NONE]
    assert len(without) <= WITHOUT, without
