"""Values as a checkpoint gives them back."""

from __future__ import annotations

import json

import pytest
import torch

from eventloop.checkpoint.encoding import flatten, restore
from eventloop.object_state.decoding import Decoder
from eventloop.object_state.values import Encoder


@pytest.fixture
def restored():
    """Encodes a value, passes it through the format of a checkpoint, and decodes it."""

    def restored(value, predecessor=None):
        nest = Encoder(lambda value: None).encode(value)
        tensors, skeleton = flatten({"nest": nest}, "state")
        nest = restore(json.loads(json.dumps(skeleton)), tensors)["nest"]
        return Decoder({}, torch.device("cpu")).decode(nest, predecessor)

    return restored
