"""Model folders as somebody makes them who changes what they say and repairs the hash."""

import dataclasses
import json

from selfnorm import saving
from selfnorm.saving import MODEL_FILE


def document(folder):
    """What the header of a model's file says."""
    return saving._document_of((folder / MODEL_FILE).read_bytes())


def put_document(folder, content, tensors=None):
    """Write a model's file that says ``content``, with its own tensors and the right hash."""
    if tensors is None:
        tensors = saving.load_safetensors((folder / MODEL_FILE).read_bytes())
    text = (
        content if isinstance(content, str) else json.dumps(content | {"sha256": saving._NO_HASH})
    )
    (folder / MODEL_FILE).write_bytes(saving._sealed(tensors, text))


def edit(folder, change):
    """Change what the header of a model's file says."""
    content = document(folder)
    change(content)
    put_document(folder, content)


def edit_model(folder, change):
    """Change what the header says of the model."""
    edit(folder, lambda content: change(content["blueprint"]))


def with_tensor(folder, name, change):
    """Change one of the tensors of a model's file."""
    held = saving.read_folder(folder)
    tensors = held.tensors | {name: change(held.tensors[name])}
    saving.write_folder(folder, dataclasses.replace(held, tensors=tensors))
