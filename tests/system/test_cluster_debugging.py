"""A debugger in a pod, which an editor reaches through the cluster's API server."""

from __future__ import annotations

import json

import pytest
from dap import Editor
from on_pods import answer

import kinetic

pytest.importorskip("debugpy")


@pytest.mark.double
def test_an_editor_reaches_the_function_in_a_pod(on_cluster):
    handle = kinetic.run(accelerator="cpu", debug=True)(answer).run_async()
    forward = handle.debug_attach(0)
    try:
        with Editor(forward.port) as editor:
            words = forward.instructions
            editor.attach(json.loads(words[words.index("{") :])["configurations"][0], {})
            assert handle.result() == 42
            editor.event("terminated")
    finally:
        forward.terminate()
    handle.cleanup()


@pytest.mark.double
def test_a_port_where_nothing_listens_ends_at_once(on_cluster):
    handle = kinetic.run(accelerator="cpu")(answer).run_async()
    handle.result()
    api = handle._backend._api
    opened = api.open_port("no-pod", 1)
    assert opened.recv(1) == b""
    opened.close()
    with pytest.raises(ConnectionRefusedError, match="has no running pod"):
        handle._backend.connect(handle.ref, 0, 1)
