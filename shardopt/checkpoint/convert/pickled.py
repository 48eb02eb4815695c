"""Pickles of other programs, read without trust: only named classes are called, on data that :func:`check` has walked.

The walk bounds time and memory. A pickle of 251 bytes can nest tuples that share their items, whose hash takes longer
than the universe has existed; a single opcode can ask for a table of 2^29 entries. Keys of a dict take quadratic time
if their hashes are equal, as a file can choose those of numbers, and of tuples of numbers.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from shardopt.checkpoint.errors import CheckpointError
from shardopt.checkpoint.wording import line

#: Values in one another, at most: a little more than extra values of a checkpoint, which torch.save may have written.
MAX_DEPTH = 128

#: Values and characters, counted as often as they are referred to, for each byte of a pickle; and for any pickle.
_MOST_PER_BYTE = 64
_MOST_ANYWAY = 1 << 22

#: Keys of dicts that are tuples, in a pickle.
_MOST_TUPLES = 256

_TUPLES = frozenset(["TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "REDUCE"])  # torch.Size is made by REDUCE
_MADE = _TUPLES | {"STACK_GLOBAL", "NEWOBJ", "BINPERSID"}
#: Opcodes that change the value below their arguments, by the opcodes that may have made that value.
_CHANGING = {
    "APPEND": ("EMPTY_LIST",),
    "APPENDS": ("EMPTY_LIST",),
    "SETITEM": ("EMPTY_DICT", "NEWOBJ"),
    "SETITEMS": ("EMPTY_DICT", "NEWOBJ"),
    "BUILD": ("EMPTY_DICT", "NEWOBJ"),
}
#: Names of classes whose instances count as made by EMPTY_DICT, and the opcode of a node that stands for such a name.
_DICTS = frozenset(["OrderedDict", "Counter", "collections OrderedDict", "collections Counter"])
_DICT = "DICT"


_DTYPES = {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class _Node:
    """A value, as far as its cost is concerned.

    Attributes:
        opcode: what made the value.
        size: values and characters in it.
        depth: the most values in one another.
        is_shared: whether the value was referred to from elsewhere, and may change no more.
    """

    __slots__ = ("depth", "is_shared", "opcode", "size")

    def __init__(self, opcode: str, size: int = 1, depth: int = 1) -> None:
        self.opcode, self.size, self.depth, self.is_shared = opcode, size, depth, False


#: Opcodes without arguments on the stack, with the nodes for those that make a value of constant size.
_CONSTANTS = {
    name: _Node(name)
    for name in (
        *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "EMPTY_TUPLE"),
        *("BINUNICODE", "SHORT_BINUNICODE", "SHORT_BINSTRING", "SHORT_BINBYTES", "BINBYTES", "GLOBAL"),
    )
}


def size(values: Any) -> torch.Size:
    """In place of torch.Size, which NEWOBJ could make, too."""
    return torch.Size(values)


class Unused:
    """Stands in for an object of which nothing is needed."""

    __slots__ = ()

    def __init__(self, *args: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


class Dict(dict[Any, Any]):
    """Stands in for OrderedDict and Counter, whose attributes a pickle might replace."""

    def __init__(self, items: dict[Any, Any] | tuple[()] = ()) -> None:
        if items and not isinstance(items, dict):  # keys that were not looked at
            raise pickle.UnpicklingError("a dict made of a list")
        super().__init__(items)

    def __setstate__(self, state: object) -> None:
        pass


def unpickled(
    data: bytes, classes: Mapping[tuple[str, str], Any], persistent: Callable[[Any], Any] | None = None
) -> Any:
    """The value in a pickle.

    Args:
        data: the pickle.
        classes: what stands for classes and functions, by module and name; dtypes need none. The hash of a class's
            instances must not be one that a pickle can choose.
        persistent: gives the value for a persistent id.

    Raises:
        Exception: of any kind, if the pickle is damaged or hostile: see :func:`refusing`.
    """
    check(data)

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            key = (module.replace("__builtin__", "builtins"), name)
            if key not in classes and key not in _DTYPES:
                raise pickle.UnpicklingError(f"{module}.{name}")
            return classes[key] if key in classes else _DTYPES[key]

        def persistent_load(self, pid: Any) -> Any:
            if persistent is None:
                raise pickle.UnpicklingError("a persistent id")
            return persistent(pid)

    return Unpickler(io.BytesIO(data), encoding="utf-8").load()


def check(data: bytes) -> None:
    """Walks a pickle without making its values.

    Raises:
        Exception: of any kind, if an opcode is one that neither torch.save nor DCP writes, a value changes after it was
            referred to (so none holds itself), keys of a dict may collide, or the value is too deep or too large.
    """
    most = _MOST_PER_BYTE * len(data) + _MOST_ANYWAY
    stack: list[_Node] = []  # since the last mark
    below: list[list[_Node]] = []
    memo: dict[Any, _Node] = {}
    tuples = 0
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name in _CONSTANTS:
            if isinstance(argument, str | bytes):
                stack.append(_Node(_DICT if argument in _DICTS else name, 1 + len(argument)))
            else:
                stack.append(_CONSTANTS[name])
        elif name in ("EMPTY_LIST", "EMPTY_DICT"):
            stack.append(_Node(name))
        elif name in ("BINGET", "LONG_BINGET"):
            memo[argument].is_shared = True
            stack.append(memo[argument])
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            place = len(memo) if argument is None else argument
            _demand(place <= len(data), "a place in the memo")
            memo[place] = stack[-1]
        elif name == "MARK":
            below.append(stack)
            stack = []
        elif name in _CHANGING or name in _MADE:
            if pickletools.markobject in opcode.stack_before:
                nodes, stack = stack, below.pop()
            else:
                count = len(opcode.stack_before) - (name in _CHANGING)
                _demand(count <= len(stack), "too few values")
                nodes, stack[-count:] = stack[-count:], []
            if name not in _CHANGING:
                stack.append(_Node(_opcode_of_made(name, nodes)))
            _add(name, nodes, stack[-1], most)
            tuples += name in ("SETITEM", "SETITEMS") and sum(key.opcode in _TUPLES for key in nodes[::2])
            _demand(tuples <= _MOST_TUPLES, f"more than {_MOST_TUPLES} tuples as keys")
        elif name == "STOP":
            _demand(len(stack) == 1 and not below, "more than one value")
        else:
            _demand(name in ("PROTO", "FRAME"), f"the opcode {name}")


def _opcode_of_made(name: str, nodes: list[_Node]) -> str:
    """The opcode that the node of a new value names as its maker."""
    if name == "REDUCE" and nodes[0].opcode == _DICT:
        return "EMPTY_DICT"
    return _DICT if name == "STACK_GLOBAL" and nodes[1].opcode == _DICT else name


def _add(name: str, nodes: list[_Node], node: _Node, most: int) -> None:
    """Adds values to one that an opcode makes or changes."""
    if name in _CHANGING:
        _demand(not node.is_shared and node.opcode in _CHANGING[name], f"{name} of another value")
    if name in ("SETITEM", "SETITEMS"):
        _demand(all(key.opcode != "LONG1" for key in nodes[::2]), "a large number as a key")
    node.size += sum(part.size for part in nodes)
    node.depth = max([node.depth, *(1 + part.depth for part in nodes)])
    _demand(node.depth <= MAX_DEPTH, f"more than {MAX_DEPTH} values in one another")
    _demand(node.size <= most, "the same values too often")


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise pickle.UnpicklingError(otherwise)


@contextmanager
def refusing(path: str, expected: str) -> Iterator[None]:
    """Raises the errors that damaged and hostile files lead to, which are of many types, as CheckpointError.

    Args:
        path: the file's, for the error.
        expected: what is expected there, with the remedy.

    Raises:
        CheckpointError: there was such an error.
    """
    try:
        yield
    except (CheckpointError, MemoryError, ModuleNotFoundError):
        raise
    except Exception as error:  # of the many types that damage leads to
        reason = line(error, 160)
        reason = reason if reason.isprintable() else ascii(reason)
        raise CheckpointError(f"{path}: got {type(error).__name__}: {reason}, expected {expected}") from error
