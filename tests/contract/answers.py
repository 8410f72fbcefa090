"""What a call answers, as JSON: numbers by their bits, refusals and warnings by their words."""

import base64
import hashlib
import re
import warnings
import zlib
from dataclasses import fields, is_dataclass

import numpy as np
import pandas as pd
import torch

import selfnorm as sn

KEPT_NUMBERS = 20_000  # of an array; of larger ones every so many, and the hash of all
KEPT_TEXTS = 30
CHOICES = re.compile(r"\{'[^{}]*'\}")  # a set in a message has no order
MEASURED = re.compile(r"\d+(\.\d+)? (s|min|h)\b|\d+ ms\b")  # times that a text mentions


def pinned(value):
    """A value as JSON: arrays by their bits, tables by column, records by field."""
    if isinstance(value, torch.Tensor):
        value = value.detach().numpy()
    if isinstance(value, pd.DataFrame):
        value = {str(name): value[name].to_numpy() for name in value}
    if is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, dict):
        return {str(k): pinned(v) for k, v in value.items() if "seconds" not in str(k)}
    if isinstance(value, float | np.generic):
        value = np.asarray(value)
    if isinstance(value, list | tuple):
        if not value or not all(isinstance(v, int | float | str | None) for v in value):
            return {str(i): pinned(v) for i, v in enumerate(value)}
        value = np.array(value, dtype=object)
    if isinstance(value, np.ndarray):
        return texts(value) if value.dtype.kind in "OUSV" else numbers(value)
    if isinstance(value, str):
        value = CHOICES.sub(lambda match: "".join(sorted(match[0])), value)
        return MEASURED.sub("TIME", value)
    return value if isinstance(value, int | None) else repr(value)


def numbers(array):
    bits = np.ascontiguousarray(array)
    kind = f"{bits.dtype}{list(bits.shape)}"
    if bits.dtype.kind in "mM":
        bits = bits.view(np.int64)
    every = -(-bits.size // KEPT_NUMBERS) or 1
    kept = base64.b85encode(zlib.compress(bits.ravel()[::every].astype(np.float64).tobytes()))
    return {"kind": kind, "sha256": sha256(bits.tobytes()), "numbers": kept.decode()}


def texts(array):
    cells = [repr(cell) for cell in array.ravel().tolist()]
    shape = list(array.shape)
    return {
        "shape": shape,
        "sha256": sha256("\0".join(cells).encode()),
        "texts": cells[:KEPT_TEXTS],
    }


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def leaves(value, name=""):
    """Every pinned value by its path."""
    if isinstance(value, dict) and "sha256" not in value:
        return {k: v for key in value for k, v in leaves(value[key], f"{name}/{key}").items()}
    return {name[1:]: value}


def unpacked(leaf):
    return np.frombuffer(zlib.decompress(base64.b85decode(leaf["numbers"])))


def difference(new, old, within=0.0):
    """How a leaf moved, in words; nothing where it did not, or by no more than ``within``."""
    if new == old:
        return ""
    if not (isinstance(new, dict) and isinstance(old, dict) and "numbers" in new):
        return f"{shown(old)} became {shown(new)}"
    if new["kind"] != old["kind"]:
        return f"{old['kind']} became {new['kind']}"
    a, b = unpacked(new), unpacked(old)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return "numbers that are not kept moved, or the sign of a zero"
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0.0, np.abs(a - b))
        if (apart <= within * np.maximum(1.0, np.abs(b))).all():
            return ""
    at = int(np.argmax(np.nan_to_num(apart, nan=np.inf)))
    return f"{(~same).sum()} of {a.size} numbers, most by {apart[at]:.3g}: {b[at]} became {a[at]}"


def shown(leaf):
    text = repr(leaf.get("texts", leaf) if isinstance(leaf, dict) else leaf)
    return text if len(text) < 300 else text[:300] + " ..."


def answer(function, *args, **options):
    """What a call gives and warns of; of a refusal its words."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", sn.SelfnormWarning)
        try:
            value = pinned(function(*args, **options))
        except (sn.SelfnormError, ValueError, TypeError, RuntimeError) as error:
            value = f"{type(error).__name__}: {error}"
    words = [str(w.message) for w in seen if issubclass(w.category, sn.SelfnormWarning)]
    return {"value": value, "warnings": pinned("\n".join(words))} if words else value
